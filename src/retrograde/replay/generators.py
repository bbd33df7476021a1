"""Sources of a step's random numbers: generators whose states can be saved and restored.

A step draws from torch's default generators, from Python's or NumPy's global ones, or from a
generator that it refers to. (A coin for teacher forcing is often Python's.) A recomputation must
draw the same numbers (rule 2). So the states of these generators are stored with
every hidden state.

Known limit: a generator that neither is global nor can be found from the cell is not seen.
"""

import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrograde.torch_private import without_functions


@dataclass(frozen=True)
class _Torch:
    """A generator of torch's."""

    generator: torch.Generator

    def position(self) -> Any:
        """Return a value that changes when a number is drawn, and takes no memory of torch's."""
        # A state has five thousand bytes, so a copy draws its next number instead.
        if self.generator.device.type == "cpu":
            ahead = self.generator.clone_state()
            with without_functions():
                return int(torch.randint(2**62, (), generator=ahead, device="cpu"))
        if self.generator.device.type == "cuda":
            return self.generator.initial_seed(), self.generator.get_offset()
        return bytes(self.generator.get_state().numpy())

    def capture(self) -> Tensor:
        return self.generator.get_state()

    def restore(self, state: Any) -> None:
        self.generator.set_state(state)

    def copy(self) -> "_Torch":
        """Return another generator in the same state, without memory of torch's."""
        return _Torch(self.generator.clone_state())


@dataclass(frozen=True)
class _Other:
    """A generator of Python's, or a bit generator of NumPy's. ``capture`` returns its state as a
    value that compares, and ``restore`` sets it."""

    generator: Any
    capture: Callable[[], Any] = field(compare=False)
    restore: Callable[[Any], None] = field(compare=False)

    def position(self) -> Any:
        return self.capture()

    def copy(self) -> "_Other":
        value = self.capture()
        return _Other(self.generator, lambda: value, self.restore)


#: A generator of random numbers; sources of the same generator are equal.
Source = _Torch | _Other


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator that :func:`sources` can handle."""
    known = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, known)


def sources(device: torch.device, generators: Iterable[Any] = ()) -> tuple[Source, ...]:
    """Return all that a step on ``device`` may draw from: the global and the given generators."""
    given = list(generators)
    ours = _of_device(device) + [g for g in given if isinstance(g, torch.Generator)]
    found: list[Source] = [_Torch(g) for g in {id(g): g for g in ours}.values()]
    python, numpy = random.random.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
    others = [python, numpy, *(g for g in given if not isinstance(g, torch.Generator))]
    return (*found, *dict.fromkeys(map(_other, others)))


def _of_device(device: torch.device) -> list[torch.Generator]:
    """Return torch's global generators: the CPU's and the device's."""
    found: list[torch.Generator] = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _other(generator: Any) -> _Other:
    if isinstance(generator, random.Random):
        return _Other(generator, generator.getstate, generator.setstate)
    old = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if old else generator.bit_generator
    take = generator.get_state if old else lambda: bits.state
    put = generator.set_state if old else partial(setattr, bits, "state")
    # A state holds arrays, which do not compare.
    return _Other(bits, lambda: pickle.dumps(take()), lambda state: put(pickle.loads(state)))


def random_position(device: torch.device) -> tuple[int, ...]:
    """Return the positions of torch's default generators, which change when one is drawn from."""
    return tuple(_Torch(generator).position() for generator in _of_device(device))
