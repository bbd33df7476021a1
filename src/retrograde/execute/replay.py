"""What a step depends on besides its arguments, kept with a state and put back before a rerun.

A step may draw random numbers, change buffers of its module (running statistics), and run under
autocast. For a recomputation to be the same computation, and to leave no trace (rules 2 to 4 of
the design), its surroundings are restored to what they were when the step first ran: the states
of the random generators and the changing buffers travel with every stored hidden state, and what
ordinary training would have left behind is put back at the end.

Most cells draw nothing and change nothing: then nothing is kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from retrograde.errors import CellError
from retrograde.execute.chance import Source

__all__ = [
    "Ambient",
    "Snapshot",
    "Steady",
    "autocast_as_now",
    "autocast_of_caller",
    "muted_hooks",
    "version",
]

#: The states of generators, and copies of buffers.
Snapshot = tuple[Any, ...]
#: A module's parameters or buffers, by name.
Held = dict[str, Any]


def version(t: Tensor) -> int:
    """A number that changes when a tensor is written to; a tensor of inference mode has none."""
    return 0 if t.is_inference() else t._version


@dataclass(frozen=True)
class Steady:
    """What the first step left as it was, and so every other step must.

    Attributes:
        sources: of random numbers.
        buffers: of the modules.
    """

    sources: tuple[Source, ...] = ()
    buffers: tuple[Tensor, ...] = ()

    def marks(self) -> tuple[list[Any], list[int]]:
        """Values to compare later, by :meth:`check`."""
        return [s.position() for s in self.sources], [version(b) for b in self.buffers]

    def check(self, before: tuple[list[Any], list[int]]) -> None:
        """Refuse what was drawn or changed since, for it was not kept for a rerun (rule 6).

        Raises:
            CellError: as said.
        """
        drawn, changed = (now != then for now, then in zip(self.marks(), before, strict=True))
        if drawn:
            raise CellError(
                "the cell drew random numbers at a later step from a generator that step 0 did not "
                "draw from: expected it to draw at every step or at none; draw at step 0 too, and "
                "discard what is not used"
            )
        if changed:
            raise CellError(
                "the cell changed a buffer of its module at a later step, but not at step 0: "
                "expected it to change at every step or at none; write to it at step 0 too "
                "(self.count.add_(0)), or make it part of the state"
            )


@dataclass(frozen=True)
class Ambient:
    """The surroundings that matter to one cell.

    Attributes:
        device: where the cell runs.
        sources: the generators that its steps draw from.
        buffers: the buffers that its steps change.
        steady: what they must leave alone.
        holdings: the modules' dicts of parameters and of buffers, and what each of them held:
            ``torch.func.functional_call`` puts other tensors there while the forward pass runs.
    """

    device: torch.device
    sources: tuple[Source, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    steady: Steady = Steady()
    holdings: tuple[tuple[Held, Held], ...] = ()

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return bool(self.sources)

    def capture(self) -> Snapshot:
        """Copy the surroundings as they are; nothing for a cell that depends on none."""
        random = (source.capture() for source in self.sources)
        return (*random, *(buffer.detach().clone() for buffer in self.buffers))

    def restore(self, snapshot: Snapshot) -> None:
        """Put captured surroundings back (rules 2 and 3)."""
        for source, state in zip(self.sources, snapshot, strict=False):
            source.restore(state)
        with torch.no_grad():
            for buffer, value in zip(self.buffers, snapshot[len(self.sources) :], strict=True):
                # A graph recorded earlier may hold this buffer; its version must not move.
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Leave the surroundings, after the block, as they were before it (rule 3).

        In the block, the modules hold the tensors that they held when the cell was examined.
        """
        before = self.capture()
        others = [(held, dict(held)) for held, then in self.holdings if not _same(held, then)]
        try:
            for held, then in self.holdings if others else ():
                held.update(then)
            yield
        finally:
            self.restore(before)
            for held, now in others:
                held.update(now)


def _same(held: Held, then: Held) -> bool:
    return all(held.get(name) is t for name, t in then.items())


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


def autocast_of_caller(device: torch.device, *, replayed: bool) -> AbstractContextManager[Any]:
    """Autocast as the caller has it, to be set within a replay; nothing where both have none."""
    on = replayed or torch.is_autocast_enabled(device.type)
    return autocast_as_now(device) if on else nullcontext()


@contextmanager
def muted_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Silence the hooks of tensors: theirs is the whole gradient, not the share of one step.

    ``retain_grad`` is a hook too, which cannot be taken away: what it added is.
    """
    hooks = [(t._backward_hooks, dict(t._backward_hooks)) for t in tensors if t._backward_hooks]
    retained = [(t, t.grad) for t in tensors if t.retains_grad]
    for table, _ in hooks:
        table.clear()
    try:
        yield
    finally:
        for table, entries in hooks:
            table.update(entries)
        for t, grad in retained:
            t.grad = grad
