"""The training program behind ``retrograde train``: a character model on long sequences.

Embedding, LSTM, linear layer; Adam, the gradient's norm clipped at 1; the hidden state carried,
detached, from one iteration to the next. Only the LSTM has a memory budget. A run is a value that
can be written down after any iteration and taken up again, bit for bit.
"""

from retrograde.training.atomic_files import write_whole
from retrograde.training.checkpoint import load_checkpoint, save_checkpoint
from retrograde.training.comparison import Comparison, Side, compare, is_out_of_memory
from retrograde.training.corpus import Text, embedded_text, read_text
from retrograde.training.lock import hold
from retrograde.training.model import CharacterModel
from retrograde.training.options import TrainingError, TrainingOptions
from retrograde.training.program import resume, start, train
from retrograde.training.report import Report
from retrograde.training.run import Run

__all__ = [
    "CharacterModel",
    "Comparison",
    "Report",
    "Run",
    "Side",
    "Text",
    "TrainingError",
    "TrainingOptions",
    "compare",
    "embedded_text",
    "hold",
    "is_out_of_memory",
    "load_checkpoint",
    "read_text",
    "resume",
    "save_checkpoint",
    "start",
    "train",
    "write_whole",
]
