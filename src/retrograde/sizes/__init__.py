"""What a range, a call or a layer takes, measured on short ranges; the memo of fits."""
