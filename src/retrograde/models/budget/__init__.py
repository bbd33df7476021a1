"""One budget for a whole model."""
