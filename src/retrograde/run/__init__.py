"""Carrying a schedule out: what a core is, the executor, the autograd node, streaming."""
