"""Sequences cut along time: each rank has its own steps."""

__all__: list[str] = []
