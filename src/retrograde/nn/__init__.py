"""What users import: torch's modules, within a budget, or with a faster backward pass."""

from retrograde.nn.recurrent import GRU, LSTM, RNN

__all__ = ["GRU", "LSTM", "RNN"]
