"""Layouts: the positions of a sequence's steps in the tensors that hold all of them.

Mostly step t is row t. In a packed batch a step has one row for each remaining sequence. Sequences
of several lengths may also run as one padded batch. A layout cuts a call's part from the inputs,
and writes the call's outputs and input gradients to their positions.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from retrograde.errors import CellError
from retrograde.replay.trees import Tensors

#: The steps whose rows are cut out of a tensor at a time, since to cut out one takes long.
ROWS = 64

Gradient = Tensor | None
Index = int | slice


class Inputs(Protocol):
    """The inputs of all steps; every read gives the same values."""

    @property
    def differentiable(self) -> Sequence[bool]:
        """For each leaf, whether it receives a gradient."""

    def __len__(self) -> int:
        """Return the number of steps."""

    def __getitem__(self, index: Index) -> Tensors:
        """Return the leaves of one step, or of a range, with time first."""


def leaves_of(inputs: Inputs, index: Index) -> Tensors:
    """Return inputs as new leaves of a graph, which require a gradient if one is wanted."""
    leaves = inputs[index]
    wanted = inputs.differentiable
    if isinstance(inputs, Apart):
        wanted = [t.requires_grad for t in leaves]
    return [t.detach().requires_grad_(asks) for t, asks in zip(leaves, wanted, strict=True)]


def rows_of(inputs: Inputs, leaves: Tensors, steps: int) -> Iterator[Tensors]:
    """Iterate over the leaves of each step of a range, of which ``leaves`` are those of all."""
    if not isinstance(inputs, Apart):
        yield from map(list, zip(*(t.unbind() for t in leaves), strict=True))
        return
    for k in range(0, len(leaves), len(leaves) // steps):
        row = leaves[k : k + len(leaves) // steps]
        yield [t[...] if t.requires_grad else t for t in row]


@dataclass
class Apart(Inputs):
    """Each step's own tensors. The leaves of a range are those of its steps, one after another."""

    steps: list[Tensors]
    differentiable = ()  # the tensors themselves say so

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Index) -> Tensors:
        if isinstance(index, slice):
            return [t for leaves in self.steps[index] for t in leaves]
        return self.steps[index]


class Layout:
    """Maps between tensors over all steps and the leaves of one call. Unless a subclass says
    otherwise, each call has its own rows of every tensor."""

    length: int  # the number of steps
    added = 0  # the leaves of a call beside those of the tensors
    whole = True  # whether a tensor has all steps

    @property
    def calls(self) -> int:
        """The number of calls, or of steps if a call takes a range of them."""
        return self.length

    def rows(self, index: Index) -> Index:
        """Return the rows of a call."""
        return index

    def leaves(self, tensors: Tensors, index: Index) -> Tensors:
        """Return the leaves of a call, or of several."""
        return [t[index] for t in tensors]

    def read(self, tensors: Tensors, outputs: Sequence[Tensor] = ()) -> "InMemory":
        """Return the inputs of all steps, for the executor. ``outputs`` are those that a core
        writes itself, and reads again."""
        return InMemory(self, tensors, outputs)

    def allocate(self, values: Tensors) -> Tensors:
        """Allocate the outputs of all steps, given those of one call."""
        return [y.new_empty(self.length, *y.shape) for y in values]

    def parts(self, tensors: Sequence[Gradient], index: Index) -> list[Gradient]:
        """Return, for each output of a call, its part of the outputs or of their gradients."""
        return [None if t is None else t[self.rows(index)] for t in tensors]

    def put(self, tensors: Tensors, index: Index, values: Tensors) -> None:
        """Write the outputs of a call to their positions."""
        for part, value in zip(self.parts(tensors, index), values, strict=True):
            if part is not None:
                part.copy_(value)

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        """Write the input gradients of one call into those of all steps."""
        for total, share in zip(totals, shares, strict=False):
            if total is not None:
                total[self.rows(index)] = 0 if share is None else share


@dataclass(frozen=True)
class InMemory(Inputs):
    """The leaves of every call, cut from tensors in memory. Ranges begin at step ``first``, or at
    the last one that they can."""

    layout: Layout
    tensors: Tensors
    outputs: Sequence[Tensor] = ()
    first: int = 0

    @functools.cached_property
    def differentiable(self) -> Sequence[bool]:
        return [*(t.requires_grad for t in self.tensors), *[False] * self.layout.added]

    def __len__(self) -> int:
        return self.layout.calls

    def __getitem__(self, index: Index) -> Tensors:
        if self.first and isinstance(index, slice):
            stop = min(index.stop, len(self))
            shift = min(self.first, len(self) - stop)
            index = slice(index.start + shift, stop + shift)
        elif self.first and isinstance(index, int):
            index = min(index + self.first, len(self) - 1)
        return self.layout.leaves(self.tensors, index)


@dataclass(frozen=True)
class Straight(Layout):
    """Step t of every tensor is its row t."""

    length: int
    fused: bool

    def allocate(self, values: Tensors) -> Tensors:
        return super().allocate([y[0] for y in values] if self.fused else values)


@dataclass(frozen=True)
class Rows(Layout):
    """A batch of sequences, packed or not, of which a call runs a range of steps.

    Inputs are (T, B, …), or (rows, …) if ``sizes`` (T,) says how many sequences have each step,
    longest first. The leaves of a call are its rows of the inputs, the numbers of its steps if
    ``numbered``, and its sizes if packed.
    """

    length: int
    sizes: Tensor | None = None
    numbered: bool = False

    @functools.cached_property
    def offsets(self) -> list[int]:
        """The first row of every step of a packed batch, and the number of rows."""
        assert self.sizes is not None
        return list(itertools.accumulate(self.sizes.tolist(), initial=0))

    def rows(self, index: Index) -> slice:
        assert isinstance(index, slice)
        bounds = index.start, index.stop
        return index if self.sizes is None else slice(*(self.offsets[n] for n in bounds))

    @property
    def added(self) -> int:  # type: ignore[override]
        return self.numbered + (self.sizes is not None)

    def leaves(self, tensors: Tensors, index: Index) -> Tensors:
        assert isinstance(index, slice)
        leaves = [tensors[0][self.rows(index)]]
        if self.numbered:
            leaves += [torch.arange(index.start, index.stop, device=leaves[0].device)]
        return leaves if self.sizes is None else [*leaves, self.sizes[index]]

    def allocate(self, values: Tensors) -> Tensors:
        (_, *rest), row_count = values[0].shape, self.rows(slice(0, self.length)).stop
        return [values[0].new_empty(row_count, *rest)]


@dataclass(frozen=True)
class Ragged(Layout):
    """A padded batch whose every step is a call with all samples.

    Tensors are (T, B, …), and ``lengths`` (B,). The last leaf of a call is a mask (B,) of the
    samples that still have steps. Beyond a sample's end its last row is read again, whose gradient
    there is zero.

    Example:
        >>> layout = Ragged(3, torch.tensor([3, 1]))
        >>> x, goes_on = layout.read([torch.arange(6).view(3, 2)])[1]
        >>> x.tolist(), goes_on.tolist()
        ([2, 1], [True, False])
    """

    length: int
    lengths: Tensor
    added = 1

    def leaves(self, tensors: Tensors, index: Index) -> Tensors:
        steps = self._numbers(index).minimum(self.lengths - 1)
        samples = torch.arange(len(self.lengths), device=steps.device).expand_as(steps)
        return [*(t[steps, samples] for t in tensors), self._goes_on(index)]

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        goes_on = self._goes_on(index)
        shares = [None if g is None else over(goes_on, g) for g in shares]
        super().take(totals, index, shares)

    def _goes_on(self, index: Index) -> Tensor:
        """Return which samples still have the steps of a call."""
        return self._numbers(index) < self.lengths

    def _numbers(self, index: Index) -> Tensor:
        """Return the steps of a call, (1,), or (L, 1) for several."""
        if isinstance(index, slice):
            return torch.arange(index.start, index.stop, device=self.lengths.device).unsqueeze(-1)
        return torch.tensor([index], device=self.lengths.device)


def over(goes_on: Tensor, t: Tensor, other: Tensor | None = None) -> Tensor:
    """Return a tensor where samples go on, and the other, or zeros, where they have ended."""
    mask = goes_on.view(*goes_on.shape, *[1] * (t.dim() - goes_on.dim()))
    return torch.where(mask, t, torch.zeros_like(t) if other is None else other)


@dataclass(frozen=True)
class InBlocks(Layout):
    """Neighbouring steps in blocks of ``size``, of which a call runs one; the last may be shorter.

    ``steps`` is the layout of the steps of a block.

    Example:
        >>> layout = InBlocks(Straight(7, fused=False), 7, 3)
        >>> read = layout.read([torch.arange(7)])
        >>> len(read), [read[k][0].tolist() for k in range(3)]
        (3, [[0, 1, 2], [3, 4, 5], [6]])
    """

    steps: Layout
    length: int
    size: int

    def rows(self, index: Index) -> slice:
        """Return the steps of a block, or of several."""
        start, stop = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
        return slice(start * self.size, min(stop * self.size, self.length))

    @property
    def calls(self) -> int:
        return math.ceil(self.length / self.size)

    @property
    def added(self) -> int:  # type: ignore[override]
        return self.steps.added

    def leaves(self, tensors: Tensors, index: Index) -> Tensors:
        return self.steps.leaves(tensors, self.rows(index))

    def allocate(self, values: Tensors) -> Tensors:
        return self.steps.allocate([y[0] for y in values])

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        self.steps.take(totals, self.rows(index), shares)


@dataclass(frozen=True)
class OneByOne(Layout):
    """Tensors of one step each, ``width`` inputs and ``outputs`` a step. Inputs are in the reverse
    order: autograd adds the gradients of one tensor in the order in which a loop adds them."""

    length: int
    width: int
    outputs: int
    whole = False

    def read(self, tensors: Tensors, outputs: Sequence[Tensor] = ()) -> Any:
        flat, n = tensors[::-1], self.width
        return Apart([flat[k * n : k * n + n] or [NOTHING] for k in range(self.length)])

    def parts(self, tensors: Sequence[Gradient], index: Index) -> list[Any]:
        n = self.outputs
        if not isinstance(index, slice):
            return [*tensors[index * n : index * n + n]]
        columns = [tensors[j + index.start * n : index.stop * n : n] for j in range(n)]
        return [None if all(t is None for t in column) else tuple(column) for column in columns]

    def take(self, totals: Sequence[Gradient], index: Index, shares: Sequence[Gradient]) -> None:
        start = index.start if isinstance(index, slice) else index
        if self.width:
            for i, share in enumerate(shares, start * self.width):
                cast(list[Gradient], totals)[-1 - i] = share


#: The input of a step that has none.
NOTHING = torch.empty(0, device="cpu")


def steps_of(inputs: Inputs, start: int, stop: int) -> Iterator[Tensors]:
    """Iterate over the leaves of steps. Rows of tensors in memory are cut out some at a time."""
    if not isinstance(inputs, InMemory) or inputs.first or not isinstance(inputs.layout, Straight):
        yield from map(inputs.__getitem__, range(start, stop))
        return
    for begin in range(start, stop, ROWS):
        unbound = (t[begin : min(begin + ROWS, stop)].unbind() for t in inputs.tensors)
        yield from map(list, zip(*unbound, strict=True))


def check_length(leaves: Tensors) -> int:
    """Return the number of steps of flat inputs, each with time first. Raises CellError if there
    are no inputs, if their numbers of steps differ, or if there are no steps."""
    if not leaves:
        raise CellError(
            "the inputs hold no tensor: expected at least one, with time first (T, …); for T steps "
            "without an input give torch.arange(T)"
        )
    lengths = {x.shape[0] if len(x.shape) else None for x in leaves}
    if len(lengths) > 1 or None in lengths:
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        raise CellError(
            f"the inputs have the shapes {shapes}: expected the same number of steps as the first "
            "dimension of each"
        )
    length = int(lengths.pop() or 0)
    if length < 1:
        raise CellError("the inputs have 0 steps: expected at least one")
    return length
