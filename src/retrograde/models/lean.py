"""``rg.lean()``: the tape of a forward pass, without what is cheap to compute again."""

from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from retrograde.models.recipes import unpack
from retrograde.models.tape import Tape
from retrograde.units import format_bytes


class Lean:
    def __init__(self):
        self.tape = None

    def __enter__(self):
        self.tape = Tape()
        self.hooks = saved_tensors_hooks(self.tape.pack, unpack)
        self.tape.__enter__()
        self.hooks.__enter__()
        return self

    def __exit__(self, *e):
        self.hooks.__exit__(*e)
        self.tape.__exit__(*e)
        self.tape.close()

    def __str__(self):
        t = self.tape
        return f"kept {format_bytes(t.kept)}, let go {format_bytes(sum(t.let_go.values()))}: " + ", ".join(f"{n} {format_bytes(b)}" for n, b in t.let_go.most_common())


def lean():
    return Lean()
