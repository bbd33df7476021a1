"""What numba lacks: vectors, tiles of registers, torch's threads, a barrier, derivatives."""

from retrograde.kernels.cpu.llvm import duals  # noqa: F401 (numba learns vectors' + and *)
