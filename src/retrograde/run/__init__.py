"""Carry a schedule out: the core protocol, the executor, the autograd node, streaming."""
