"""Loops for a CPU, compiled by numba, and matrix products."""
