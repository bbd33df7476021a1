"""Inputs that are not held in memory: files, functions, anything indexable.

A schedule runs most steps more than once, so every source is read again, and must return the same
values. An iterator cannot be read twice, so it is refused. Of tensors with time first, and of other
arrays such as a memory map, a range is a slice (:class:`TimeFirst`). Of a function of the step, or
of anything that is indexed by it, a range is put together step by step (:class:`Steps`).

torch allocates what is read, so :mod:`retrograde.sizes.allocations` counts it. The pages of a
memory map belong to the operating system and are not counted. What is read from main memory for a
model on a GPU is moved (:class:`Stream`).
"""

import copy
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.replay.generators import sources
from retrograde.replay.trees import Structure, Tensors, flatten
from retrograde.run.arriving import Arrivals
from retrograde.run.layout import check_length
from retrograde.run.states import Like, is_real, like_of


def open_source(inputs: Any, length: SupportsIndex | None, device: torch.device) -> "Source":
    """Make the source of some inputs for a model on ``device``, and read the first step. Raises
    CellError if the inputs are of no known kind, too short, or differ when read again.

    Example:
        >>> source = open_source(lambda t: torch.full((2,), float(t)), 5, torch.device("cpu"))
        >>> len(source), source[3], source[1:3]
        (5, [tensor([3., 3.])], [tensor([[1., 1.],
                [2., 2.]])])
    """
    if isinstance(inputs, Arrivals):
        return Steps(inputs.__getitem__, sys.maxsize, device)
    if all(_is_array(leaf) for leaf in pytree.tree_leaves(inputs) if leaf is not None):
        return TimeFirst.of(inputs, length)
    return Steps(_reader(inputs), steps_told(length, inputs), device)


def _reader(inputs: Any) -> Callable[[int], Any]:
    """Return a function of the step that reads its input."""
    if not isinstance(inputs, list | tuple | dict):
        if hasattr(inputs, "__getitem__"):
            return cast(Callable[[int], Any], inputs.__getitem__)
        if callable(inputs):
            return cast(Callable[[int], Any], inputs)
    raise CellError(
        f"cannot read inputs from a {type(inputs).__name__}: expected a pytree of tensors or "
        "arrays with time first, a function of the step, or something indexed by it, since steps "
        "are read again; for a list of steps, pass inputs=lambda t: steps[t], length=len(steps); "
        "for a module write what an iterator gives to a file first, such as a memory map"
    )


@dataclass(frozen=True)
class TimeFirst:
    """Tensors, or other objects with a shape, a dtype and slices, with time first."""

    leaves: list[Any]
    structure: Structure
    length: int

    @cached_property
    def trained(self) -> list[Tensor | None]:
        return [t if isinstance(t, Tensor) and t.requires_grad else None for t in self.leaves]

    @classmethod
    def of(cls, inputs: Any, length: SupportsIndex | None) -> "TimeFirst":
        """Make the source from a pytree, of which the first ``length`` steps are used."""
        stand_in = torch.empty(0, device="cpu")
        shape = pytree.tree_map(lambda leaf: None if leaf is None else stand_in, inputs)
        _, structure = flatten(shape, "inputs")
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if leaf is not None]
        return cls(leaves, structure, steps_told(length, range(check_length(leaves))))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Tensors:
        return [t[index] if isinstance(t, Tensor) else _copied(t[index]) for t in self.leaves]


class Steps:
    """An object that returns the input of a step by its number, in any order and repeatedly."""

    def __init__(self, get: Callable[[int], Any], length: int, device: torch.device) -> None:
        self.get, self.length = get, length
        torchs = [source for source in sources(device) if source.is_torchs]
        before = [source.position() for source in torchs]
        with torch.enable_grad():  # so that an input with a history is detected at once
            leaves, self.structure = _leaves(get(0), 0)
        self.like = [*map(like_of, leaves)]
        if before != [source.position() for source in torchs]:
            raise CellError(
                "the inputs draw random numbers, and would differ when they are read again: "
                "draw them from a generator that is seeded by the step"
            )
        self.trained: list[Tensor | None] = [None] * len(leaves)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Tensors:
        if not isinstance(index, slice):
            return self._step(index)
        start, stop, _ = index.indices(self.length)
        whole = [
            torch.empty((stop - start, *shape), dtype=dtype, device=device)
            for shape, dtype, device in self.like
        ]
        for t in range(start, stop):
            for stacked, leaf in zip(whole, self._step(t), strict=True):
                stacked[t - start].copy_(leaf)
        return whole

    def _step(self, t: int) -> Tensors:
        leaves, structure = _leaves(self.get(t), t)
        like = [*map(like_of, leaves)]
        if (structure, like) != (self.structure, self.like):
            raise CellError(
                f"the input of step {t} is {_named(structure, like)}: expected "
                f"{_named(self.structure, self.like)}, as at step 0; every step must have the same "
                "structure, shapes and dtypes"
            )
        return leaves


def _named(structure: Structure, like: Sequence[Like]) -> str:
    descriptions = [f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in like]
    return f"{structure} of {', '.join(descriptions) or 'nothing'}"


#: The inputs of all steps. A source has a length, and the ``structure`` of a step's input. For each
#: leaf, ``trained`` has the caller's tensor of all steps, if that requires a gradient. A source is
#: indexed by a step or a range, and returns leaves, with time first for a range. Every read gives
#: the same values.
Source = TimeFirst | Steps


@dataclass(frozen=True)
class Stream:
    """A source whose leaves are moved to a device, with one more leaf: the number of each step.

    ``wanted`` says which leaves receive a gradient. ``probed``, if given, replaces the number of a
    step, or of the last step of a range. So bytes can be measured at a step with a loss, with the
    inputs of the first steps. ``reading``, if given, is called with the number of steps to be read.
    """

    source: Source
    wanted: tuple[bool, ...]
    device: torch.device
    probed: int | None = None
    reading: Callable[[int], object] | None = None

    @classmethod
    def of(cls, source: Source, device: torch.device, all_wanted: bool) -> "Stream":
        """Make a stream with gradients for trained tensors, or for all that can have one."""
        wanted = tuple(
            trained is not None or (all_wanted and is_real(x))
            for x, trained in zip(source[0], source.trained, strict=True)
        )
        return cls(source, wanted, device)

    def read(self, index: int | slice) -> Tensors:
        """Return the leaves of the source. Those in main memory are copied to a GPU through pinned
        memory, so the program does not wait for it."""
        leaves = self.source[index]
        if self.device.type == "cpu":
            return leaves
        pins = self.device.type == "cuda"
        for k, (t, trained) in enumerate(zip(leaves, self.source.trained, strict=True)):
            if trained is None and t.device.type == "cpu":
                leaves[k] = (t.pin_memory() if pins else t).to(self.device, non_blocking=True)
        return leaves

    def ended(self, length: int) -> "Stream":
        """Return the stream of the first ``length`` steps."""
        source = copy.copy(self.source)
        object.__setattr__(source, "length", length)  # some are frozen
        return replace(self, source=source)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        return (*self.wanted, False)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int | slice) -> Tensors:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            steps = stop - start
        else:
            start, steps = index, 1
        if self.reading is not None:
            self.reading(steps)
        if self.probed is not None:
            start = max(0, min(self.probed + 1, len(self)) - steps)
        if not isinstance(index, slice):
            return [*self.read(index), torch.tensor(start, device="cpu")]
        return [*self.read(index), torch.arange(start, start + steps, device="cpu")]


def steps_told(length: SupportsIndex | None, inputs: Any) -> int:
    """Return the number of steps, from the argument and from the inputs themselves."""
    there = len(inputs) if hasattr(inputs, "__len__") else None
    if length is None and there is None:
        raise CellError(
            f"the inputs are a {type(inputs).__name__}, which does not say how many steps there "
            "are: give length="
        )
    try:
        steps = operator.index(cast(SupportsIndex, there if length is None else length))
    except TypeError:
        raise CellError(f"length is {length!r}: expected a whole number of steps") from None
    if steps < 1:
        said = "the inputs have 0 steps" if length is None else f"length is {steps}"
        raise CellError(f"{said}: expected at least one step")
    if there is not None and steps > there:
        raise CellError(f"the inputs have {there} steps: expected {steps}, as length= says")
    return steps


def _is_array(leaf: Any) -> bool:
    return all(hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__"))


def _leaves(tree: Any, t: int) -> tuple[Tensors, Structure]:
    """Return the tensors of one step's input, which receives no gradient."""
    tree = pytree.tree_map(_as_tensor, tree)
    leaves, structure = flatten(tree, f"input of step {t}")
    if any(x.requires_grad for x in leaves):
        raise CellError(
            f"the input of step {t} requires a gradient: expected one that does not; move the "
            "layer that computes it (an embedding, say) into the cell, or detach it and ask for "
            "input_gradient="
        )
    return leaves, structure


def _as_tensor(leaf: Any) -> Any:
    return _copied(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _copied(array: Any) -> Tensor:
    """Copy an array into a tensor of torch's own."""
    values = np.asarray(array)
    native = values.dtype.newbyteorder("=")
    try:
        dtype = torch.from_numpy(np.empty(0, native)).dtype
    except TypeError:
        raise CellError(
            f"the inputs hold an array of {values.dtype}, which torch has no type for: convert it, "
            "for instance by inputs=lambda t: array[t].astype('float32')"
        ) from None
    copy = torch.empty(values.shape, dtype=dtype, device="cpu")
    copy.numpy()[...] = values
    return copy
