"""Carrying a schedule out in PyTorch. Plans nothing: a schedule comes in, a gradient goes out."""

__all__: list[str] = []
