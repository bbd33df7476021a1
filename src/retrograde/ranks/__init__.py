"""Networks across processes: sequences cut along time, chains cut between layers."""

__all__: list[str] = []
