"""Where the steps of a sequence lie in the tensors that hold all of them.

Mostly step t is row t. In a packed batch a step has as many rows as there are sequences left, and
two directions are run from both ends at once: then a range of steps is a range of rows for each.
A layout gives a call its part of the inputs, and puts the call's outputs, and the gradients of its
inputs, where they belong.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from retrograde.run.inputs import Held, Inputs

__all__ = ["Layout", "RowInputs", "Rows", "Straight"]

Tensors = list[Tensor]
Gradient = Tensor | None
Index = int | slice


class Layout(Protocol):
    """Between tensors over all steps and the leaves of one call."""

    def read(self, tensors: Tensors, outputs: Sequence[Tensor] = ()) -> Inputs:
        """The inputs of all steps, as the executor reads them; and the outputs, where a core
        writes these itself, and reads them again."""
        ...

    def allocate(self, values: Tensors) -> Tensors:
        """Room for the outputs of all steps, those of one call being known."""
        ...

    def joined(self, outputs: Tensors) -> Tensors:
        """The outputs of a call of all steps, as the caller has them."""
        ...

    def parts(self, tensors: Sequence[Gradient], index: Index) -> list[Gradient]:
        """For each output of a call, its part of the outputs, or of their gradients."""
        ...

    def room(self, x: Tensor) -> Tensor:
        """Where the gradients of an input are to be collected."""
        ...

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        """Put the input gradients of one call into those of all steps."""
        ...


@dataclass(frozen=True)
class Straight:
    """Step t of every tensor is its row t."""

    length: int
    fused: bool

    def read(self, tensors: Tensors, outputs: Sequence[Tensor] = ()) -> Inputs:
        return Held(tensors)

    def allocate(self, values: Tensors) -> Tensors:
        shapes = [y.shape[1:] if self.fused else y.shape for y in values]
        return [y.new_empty((self.length, *shape)) for y, shape in zip(values, shapes, strict=True)]

    def joined(self, outputs: Tensors) -> Tensors:
        return outputs

    def parts(self, tensors: Sequence[Gradient], index: Index) -> list[Gradient]:
        return [None if t is None else t[index] for t in tensors]

    def room(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        for share, total in zip(shares, totals, strict=True):
            if total is not None:
                total[index] = 0 if share is None else share


@dataclass(frozen=True)
class Rows:
    """A batch of sequences, packed or not, run from one end or from both at once.

    Inputs are (T, B, …), or (rows, …) if ``sizes`` (T,) says how many sequences have each step,
    longest first. The leaves of a call are its rows of the inputs, the numbers of its steps if
    ``numbered``, and its sizes if packed: each once for every direction. Its outputs are one for
    every direction, side by side. With steps a … b − 1 of the first direction go T − b … T − a − 1
    of the second.

    Example:
        >>> layout = Rows(4, sizes=torch.tensor([3, 2, 2, 1]), both=True)
        >>> layout.rows(slice(0, 1))
        [slice(0, 3, None), slice(7, 8, None)]
    """

    length: int
    sizes: Tensor | None = None
    both: bool = False
    numbered: bool = False

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Of a packed batch, the first row of every step, and their number."""
        assert self.sizes is not None
        return [0, *self.sizes.cumsum(0).tolist()]

    def spans(self, index: slice) -> list[slice]:
        """The steps of a call, for each direction."""
        mirrored = slice(self.length - index.stop, self.length - index.start)
        return [index, mirrored] if self.both else [index]

    def rows(self, index: slice) -> list[slice]:
        """The rows of a call, for each direction."""
        if self.sizes is None:
            return self.spans(index)
        at = self.offsets
        return [slice(at[span.start], at[span.stop]) for span in self.spans(index)]

    def read(self, tensors: Tensors, outputs: Sequence[Tensor] = ()) -> "RowInputs":
        return RowInputs(self, tensors[0], *outputs)

    def allocate(self, values: Tensors) -> Tensors:
        (_, *inner, _), rows = values[0].shape, self.rows(slice(0, self.length))[0].stop
        lead = (rows, *inner)
        return [values[0].new_empty(*lead, sum(y.shape[-1] for y in values))]

    def joined(self, outputs: Tensors) -> Tensors:
        return [torch.cat(outputs, -1)]

    def parts(self, tensors: Sequence[Gradient], index: Index) -> list[Gradient]:
        assert isinstance(index, slice)
        (whole,), rows = tensors, self.rows(index)
        if whole is None:
            return [None] * len(rows)
        columns = whole.chunk(len(rows), -1)
        return [part[at] for part, at in zip(columns, rows, strict=True)]

    def room(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x) if self.both else torch.empty_like(x)

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        assert isinstance(index, slice)
        (total,) = totals
        if total is None:
            return
        for at, share in zip(self.rows(index), shares, strict=False):
            if not self.both:
                total[at] = 0 if share is None else share
            elif share is not None:
                total[at] += share


@dataclass(frozen=True)
class RowInputs:
    """The leaves of every call, cut from one tensor over all steps."""

    layout: Rows
    x: Tensor
    outputs: Tensor | None = None

    @property
    def differentiable(self) -> Sequence[bool]:
        directions = 2 if self.layout.both else 1
        others = self.layout.numbered + (self.layout.sizes is not None)
        return [self.x.requires_grad] * directions + [False] * directions * others

    def __len__(self) -> int:
        return self.layout.length

    def __getitem__(self, index: Index) -> Tensors:
        assert isinstance(index, slice)
        spans = self.layout.spans(index)
        leaves = [self.x[at] for at in self.layout.rows(index)]
        if self.layout.numbered:
            leaves += [torch.arange(s.start, s.stop, device=self.x.device) for s in spans]
        if self.layout.sizes is not None:
            leaves += [self.layout.sizes[s] for s in spans]
        return leaves
