"""Backpropagation as a scan over transposed Jacobians (Wang, BPPSA, 2020)."""
