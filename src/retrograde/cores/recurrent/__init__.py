"""Recurrent layers as cores: our own loops, which start from held outputs, or torch's kernels."""
