"""What numba lacks: vectors, tiles of registers, torch's threads, a barrier, derivatives."""
