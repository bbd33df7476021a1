"""Deep chains: unequal layers, one after the other, carried out by the same executor."""
