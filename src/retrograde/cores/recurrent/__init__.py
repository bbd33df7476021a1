"""Recurrent layers as cores: by loops of our own from held outputs, or by torch's kernels."""
