"""What of a tape is cheap to compute again, and the pass that drops it."""
