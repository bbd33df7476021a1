"""What a step depends on besides its arguments, kept with a state and put back before a rerun.

A step may draw random numbers, change buffers of its module (running statistics), and run under
autocast. For a recomputation to be the same computation, and to leave no trace (rules 2 to 4 of
the design), its surroundings are restored to what they were when the step first ran: the states
of the random generators and the changing buffers travel with every stored hidden state, and what
ordinary training would have left behind is put back at the end.

Most cells draw nothing and change nothing: then nothing is kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

__all__ = [
    "Ambient",
    "OwnRandom",
    "Snapshot",
    "autocast_as_now",
    "muted_hooks",
    "random_position",
]

Snapshot = tuple[Tensor, ...]


def _random_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that a step on ``device`` may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def random_position(device: torch.device) -> tuple[int, ...]:
    """Where the generators stand, as numbers that change when one is drawn from.

    It takes no memory to speak of, unlike the states themselves: a copy of the CPU's generator is
    asked for its next number, and CUDA's for its offset.
    """
    ahead = torch.default_generator.clone_state()
    position = [int(torch.randint(2**62, (), generator=ahead))]
    if device.type == "cuda":
        position.append(torch.cuda.default_generators[device.index or 0].get_offset())
    return tuple(position)


class OwnRandom:
    """Random numbers for blocks that are run once, between others that are run again.

    What is drawn inside goes on where the last block left off and does not move the generators that
    the others draw from. Copies of generators take no memory of torch's; a state does, so states
    are passed on only where something was drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[device.index or 0])
        self.stream: list[torch.Generator] = []

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Run a block that may draw."""
        before = [generator.clone_state() for generator in self.generators]
        self._set(self.stream)
        position = random_position(self.device)
        try:
            yield
        finally:
            if self.stream or position != random_position(self.device):
                self.stream = [generator.clone_state() for generator in self.generators]
                self._set(before)

    def _set(self, values: list[torch.Generator]) -> None:
        for generator, value in zip(self.generators, values, strict=False):
            generator.set_state(value.get_state())


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


@dataclass(frozen=True)
class Ambient:
    """The surroundings that matter to one cell.

    Attributes:
        device: where the cell runs.
        draws: whether its steps draw random numbers.
        buffers: the buffers that its steps change.
    """

    device: torch.device
    draws: bool = False
    buffers: tuple[Tensor, ...] = ()

    def capture(self) -> Snapshot:
        """Copy the surroundings as they are; nothing for a cell that depends on none."""
        random = _random_states(self.device) if self.draws else []
        return (*random, *(buffer.detach().clone() for buffer in self.buffers))

    def restore(self, snapshot: Snapshot) -> None:
        """Put captured surroundings back (rules 2 and 3)."""
        random = len(snapshot) - len(self.buffers)
        if random:
            _set_random_states(self.device, snapshot[:random])
        with torch.no_grad():
            for buffer, value in zip(self.buffers, snapshot[random:], strict=True):
                # A graph recorded earlier may hold this buffer; its version must not move.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Leave the surroundings, after the block, as they were before it (rule 3)."""
        before = self.capture()
        try:
            yield
        finally:
            self.restore(before)


def autocast_as_now(device: torch.device) -> torch.autocast:
    """A context that sets autocast as it is at this moment, to be entered later (rule 4).

    Its weight cache is off: a cached cast would tie the graphs of different steps together.
    """
    return torch.autocast(
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=False,
    )


@contextmanager
def muted_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks of tensors: theirs is the whole gradient, not the share of one step."""
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, entries in hooks:
            table.update(entries)
