"""A chain of unequal layers as a core."""
