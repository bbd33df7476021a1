"""Chains cut between layers: each rank has its own layers."""

__all__: list[str] = []
