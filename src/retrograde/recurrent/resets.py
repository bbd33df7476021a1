"""Samples that begin anew inside a sequence: where they do, and the states with which they do.

Nothing crosses such a boundary, in either direction. Forward, a sample whose entry is true before
step t has its first state again when step t runs. In a second track, which comes from the last
step, it has it again when step t − 1 runs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import InputError
from retrograde.replay.trees import Tensors


@dataclass(frozen=True)
class SequenceResets:
    """Where the samples of a recurrence begin anew. ``starts`` has a bool tensor for each track,
    (T, B, 1) or packed (rows, 1), true before a step that begins anew. ``state`` is the state with
    which it does: (h,) or (h, c), each (layers · tracks, B, H)."""

    starts: Tensors
    state: Tensors

    @cached_property
    def entries(self) -> Tensor:
        """The states side by side, (layers · tracks, B, n)."""
        return torch.cat([s.detach() for s in self.state], -1)

    def divided(self) -> list["SequenceResets"]:
        """Return the same for each layer of two directions, as a recurrence of its own."""
        states = zip(*(s.split(2) for s in self.state), strict=True)
        return [SequenceResets(self.starts, [*tensors]) for tensors in states]


def read_starts(reset: Any, input: Any, batch_first: bool, both: bool) -> Tensors:
    """Return the starts of each track from a module's argument ``reset``.

    Raises:
        InputError: it is not a bool tensor, or it does not match the input.
    """
    sizes = None
    if isinstance(input, PackedSequence):
        sizes, shape = input.batch_sizes, input.data.shape[:1]
        same = isinstance(reset, PackedSequence) and torch.equal(reset.batch_sizes, sizes)
        starts, expected = reset.data if same else None, "a PackedSequence like the input, of bools"
    else:
        starts, shape = reset, input.shape[:-1]
        expected = f"a bool tensor {tuple(shape)}"
    if not isinstance(starts, Tensor) or starts.dtype != torch.bool or starts.shape != shape:
        actual = f"{starts.dtype} {tuple(starts.shape)}" if isinstance(starts, Tensor) else "other"
        raise InputError(
            f"reset is a {type(reset).__name__} ({actual}): expected {expected}, which is true "
            "before each step at which a sample begins anew"
        )
    if sizes is None:
        starts = starts.unsqueeze(1) if starts.dim() == 1 else starts
        starts = starts.t() if batch_first and input.dim() == 3 else starts
    starts = starts.to(input.data.device).unsqueeze(-1).contiguous()
    return [starts, _after(starts, sizes)] if both else [starts]


def _after(starts: Tensor, sizes: Tensor | None) -> Tensor:
    """Return at each step the starts of the step after it; false where there is none."""
    after = torch.zeros_like(starts)
    if sizes is None:
        after[:-1] = starts[1:]
    else:
        later = torch.arange(int(sizes[0]), len(starts), device="cpu")
        after[later - sizes[:-1].repeat_interleave(sizes[1:])] = starts[later]
    return after
