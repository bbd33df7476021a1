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
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from retrograde.torch_private import without_functions

_KINDS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState


@dataclass(frozen=True)
class Source:
    """A generator of torch's, Python's or NumPy's; sources of the same generator are equal."""

    generator: Any

    @property
    def is_torchs(self) -> bool:
        """Whether it is a generator of torch's."""
        return isinstance(self.generator, torch.Generator)

    def position(self) -> Any:
        """Return a value that changes when a number is drawn, and takes no memory of torch's."""
        if not self.is_torchs:
            return self.capture()
        # A state has five thousand bytes, so a copy draws its next number instead.
        if self.generator.device.type == "cpu":
            with without_functions():
                ahead = self.generator.clone_state()
                return int(torch.randint(2**62, (), generator=ahead, device="cpu"))
        if self.generator.device.type == "cuda":
            return self.generator.initial_seed(), self.generator.get_offset()
        return bytes(self.generator.get_state().numpy())

    def capture(self) -> Any:
        """Return the state. NumPy's holds arrays, which do not compare, so it is pickled."""
        match self.generator:
            case torch.Generator():
                return self.generator.get_state()
            case random.Random():
                return self.generator.getstate()
            case np.random.RandomState():
                return pickle.dumps(self.generator.get_state())
        return pickle.dumps(self.generator.bit_generator.state)

    def restore(self, state: Any) -> None:
        """Set the state to one that was captured."""
        match self.generator:
            case torch.Generator():
                self.generator.set_state(state)
            case random.Random():
                self.generator.setstate(state)
            case np.random.RandomState():
                self.generator.set_state(pickle.loads(state))
            case _:
                self.generator.bit_generator.state = pickle.loads(state)

    def note(self) -> tuple[Any, Callable[[], None]]:
        """Return the position, and what sets the generator back, without memory of torch's."""
        if self.is_torchs:
            copy = self.generator.clone_state()
            return self.position(), lambda: self.restore(copy.get_state())
        state = self.capture()
        return state, partial(self.restore, state)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator that :func:`sources` can handle."""
    return isinstance(value, _KINDS)


def sources(device: torch.device, generators: Iterable[Any] = ()) -> tuple[Source, ...]:
    """Return all that a step on ``device`` may draw from: the global and the given generators."""
    python, numpy = random.random.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
    every = [*_of_device(device), python, numpy, *generators]
    return tuple(map(Source, {id(each): each for each in every}.values()))


def _of_device(device: torch.device) -> list[torch.Generator]:
    """Return torch's global generators: the CPU's and the device's."""
    found: list[torch.Generator] = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def random_position(device: torch.device) -> tuple[int, ...]:
    """Return the positions of torch's default generators, which change when one is drawn from."""
    return tuple(Source(generator).position() for generator in _of_device(device))
