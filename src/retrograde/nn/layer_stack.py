"""Layers and directions of a recurrent module, each backpropagated in our own way.

What lies between the layers is torch's: dropout, the concatenation of two directions, packed
sequences. A reversed direction is the same layer on the reversed sequence. A packed batch is run
packed, by torch's kernel, and backpropagated padded: past a sequence's end the slopes are zero, but
for an LSTM's c, which is handed on unchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrograde.kernels.cells import Kind
from retrograde.scan.layer import Way
from retrograde.scan.layer_node import layer

__all__ = ["Batch", "run_stack"]

State = tuple[Tensor, ...]
#: The way for a layer whose inputs have a given width.
WayFor = Callable[[int], Way]


@dataclass(frozen=True)
class Batch:
    """Sequences, time first.

    Attributes:
        x: (T, B, I), zero past the end of each sequence.
        sizes: how many sequences have a step t, for every t, longest sequence first (torch's
            ``batch_sizes``); None where all have T steps.
    """

    x: Tensor
    sizes: Tensor | None = None

    @property
    def lengths(self) -> Tensor | None:
        """The length of each sequence (B,), or None."""
        if self.sizes is None:
            return None
        return (self.sizes.unsqueeze(1) > torch.arange(int(self.sizes[0]))).sum(0)

    @classmethod
    def padded(cls, data: Tensor, sizes: Tensor) -> "Batch":
        """From a packed sequence's data and batch sizes."""
        x, _ = torch._VF._pad_packed_sequence(data, sizes, False, 0.0, len(sizes))  # type: ignore[attr-defined]
        return cls(x, sizes)

    def packed(self) -> Tensor:
        """The data as a packed sequence has them; as they are where none was given."""
        if self.sizes is None:
            return self.x
        lengths: Any = self.lengths
        return torch._VF._pack_padded_sequence(self.x, lengths, False)[0]  # type: ignore[attr-defined]

    def reversed(self) -> "Batch":
        """Each sequence backwards."""
        lengths = self.lengths
        if lengths is None:
            return Batch(self.x.flip(0))
        steps = torch.arange(len(self.x)).unsqueeze(1)
        index = torch.where(steps < lengths, lengths - 1 - steps, steps).to(self.x.device)
        return Batch(self.x.gather(0, index.unsqueeze(-1).expand_as(self.x)), self.sizes)


def run_stack(module: nn.RNNBase, way: WayFor, batch: Batch, state: State) -> tuple[Batch, State]:
    """Run every layer and direction of a module.

    Args:
        module: its options and its parameters are used.
        way: how a layer is to be backpropagated, given the width of its inputs.
        batch: the sequences.
        state: the initial state: (h,), or (h, c), each (layers · directions, B, H).

    Returns:
        The last layer's outputs, and the final state, shaped like the initial one.
    """
    directions = 2 if module.bidirectional else 1
    weights = cast(list[Tensor], module._flat_weights)
    each = len(weights) // (module.num_layers * directions)
    finals: list[State] = []
    for number in range(module.num_layers):
        outputs = []
        for direction in range(directions):
            at = number * directions + direction
            found, final = _run_layer(
                cast(Kind, module.mode),
                weights[at * each : (at + 1) * each],
                way(batch.x.shape[-1]),
                batch if direction == 0 else batch.reversed(),
                tuple(s[at] for s in state),
            )
            outputs.append(found if direction == 0 else found.reversed())
            finals.append(final)
        batch = outputs[0]
        if directions == 2:
            batch = Batch(torch.cat([b.x for b in outputs], -1), batch.sizes)
        if module.dropout and module.training and number < module.num_layers - 1:
            batch = _drop(batch, module.dropout)
    return batch, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))


def _run_layer(
    kind: Kind, weights: list[Tensor], way: Way, batch: Batch, state: State
) -> tuple[Batch, State]:
    outputs, final = layer(kind, weights, way, batch.x, state, batch.sizes)
    return Batch(outputs, batch.sizes), final


def _drop(batch: Batch, p: float) -> Batch:
    """Dropout, its mask drawn over the packed data as torch draws it."""
    data: Any = functional.dropout(batch.packed(), p)
    return Batch(data) if batch.sizes is None else Batch.padded(data, batch.sizes)
