"""Sparse transposed Jacobians of feed-forward layers (W20, sections 3.3, 3.4, 4.3)."""
