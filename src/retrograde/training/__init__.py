"""The training program behind ``retrograde train``: a character model on long sequences.

The model is an embedding, an LSTM and a linear layer, trained by Adam with the gradient's norm
clipped at 1. The hidden state is carried, detached, from one iteration to the next. Only the LSTM
has a memory budget. A run can be saved after any iteration and resumed bit for bit.
"""

from retrograde.training.checkpoint import load_checkpoint, save_checkpoint
from retrograde.training.comparison import Comparison, Side, compare
from retrograde.training.folder import hold, write_whole
from retrograde.training.options import TrainingError, TrainingOptions
from retrograde.training.program import resume, run_program
from retrograde.training.report import Report
from retrograde.training.run import Run
from retrograde.training.task import CharacterModel, Text, embedded_text, read_text

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
    "load_checkpoint",
    "read_text",
    "resume",
    "run_program",
    "save_checkpoint",
    "write_whole",
]
