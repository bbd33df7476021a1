"""Plans for chains of unequal layers, in bytes and seconds."""
