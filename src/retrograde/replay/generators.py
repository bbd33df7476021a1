"""Sources of a step's random numbers: generators whose states can be saved and restored.

A step draws from torch's default generators, from Python's or NumPy's global ones, or from a
generator that it refers to. (A coin for teacher forcing is often Python's.) A recomputation must
draw the same numbers (rule 2), so the generators' states are stored with every hidden state.

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

from retrograde.torch_private import without_dispatch, without_functions

#: The types of the generators that :func:`sources` can handle.
KINDS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState


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
        with without_functions(), without_dispatch():
            if self.generator.device.type != "cpu":
                return bytes(self.generator.get_state().numpy())
            # A state has five thousand bytes, so a copy draws its next number instead.
            ahead = self.generator.clone_state()
            return int(torch.randint(2**62, (), generator=ahead, device="cpu"))

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


def sources(device: torch.device, generators: Iterable[Any] = ()) -> tuple[Source, ...]:
    """Return all that a step on ``device`` may draw from: the global and the given generators."""
    python, numpy = random.random.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
    on_gpu = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    every = [torch.default_generator, *on_gpu, python, numpy, *generators]
    return tuple(map(Source, {id(each): each for each in every}.values()))
