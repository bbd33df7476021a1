"""Layers of any model: what the backward pass can compute again is not kept."""
