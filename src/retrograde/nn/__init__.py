"""What users import: torch's modules, within a budget."""

from retrograde.nn.recurrent import LSTM

__all__ = ["LSTM"]
