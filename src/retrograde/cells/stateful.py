"""Cells from modules that keep a state in themselves.

A spiking neuron assigns its membrane potential to an attribute, or to a buffer, and reads it at the
next step. A trial step finds such assignments; each is a *slot*. The cell writes the slots' values
before a step, reads them after it, and restores the modules at the end of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.cells.cell import as_pair
from retrograde.errors import CellError
from retrograde.replay.referents import find_referents
from retrograde.replay.surroundings import Slot, Values, tensors_in, try_out
from retrograde.replay.trees import flatten_state
from retrograde.run.states import device_of, like_of
from retrograde.torch_private import gradients_of


@dataclass(frozen=True, eq=False)
class _StateSlot(Slot):
    """A slot, and its value before the first step. ``settled`` says whether that value has the
    structure and shapes of later steps' values."""

    initial: Any = None
    settled: bool = False


@dataclass(frozen=True)
class Stateful:
    """A step over modules that keep a state, as a cell. Its state is the slots' values, and the
    step's own state if it has one; ``alone`` says that it has none."""

    step: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    slots: tuple[_StateSlot, ...]
    alone: bool

    @classmethod
    def of(
        cls, step: Callable[..., Any], modules: nn.Module | Sequence[nn.Module], inputs: Any,
        state: Any,
    ) -> "Stateful":  # fmt: skip
        """Find the slots by a trial of the first step, which leaves no trace. Raises CellError if
        there is none."""
        modules = [modules] if isinstance(modules, nn.Module) else modules
        for module in modules:
            if not isinstance(module, nn.Module):
                raise CellError(
                    f"stateful= holds a {type(module).__name__}: expected modules, those whose "
                    "attributes are part of the state; keep it in a module"
                )
        arguments = pytree.tree_map_only(
            Tensor, Tensor.detach, (pytree.tree_map_only(Tensor, lambda t: t[0], inputs), state)
        )
        tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
        passed = arguments[:1] if state is None else arguments
        device = device_of(*tensors)
        changes = _assigned(lambda: step(*passed), step, modules, device)
        slots = tuple(
            _StateSlot(slot.holder, slot.key, slot.called, then, _alike(then, now))
            for slot, then, now in changes
        )
        if not slots:
            names = ", ".join(type(module).__name__ for module in modules)
            raise CellError(
                f"a step assigns no tensor to an attribute of {names}: expected stateful= to list "
                "modules that keep a state; leave them out"
            )
        whole = cls(step, tuple(modules), slots, state is None)
        if not any(map(_with_history, slots)):
            return whole
        results: list[Any] = []
        initial = whole.first(arguments[1])
        leaves = pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), initial
        )
        try_out(lambda: results.append(whole(arguments[0], leaves)), [step, *modules], device)
        read = _read(pytree.tree_leaves(results), whole._parted(leaves)[0])
        # A first value that no step depends on comes without the graph behind it.
        apart = (pytree.tree_map_only(Tensor, Tensor.detach, slot.initial) for slot in slots)
        kept = zip(slots, apart, read, strict=True)
        return replace(whole, slots=tuple(s if r else replace(s, initial=t) for s, t, r in kept))

    def first(self, state: Any) -> Any:
        return self._joined([s.initial if s.settled else None for s in self.slots], state)

    def __call__(self, x: Any, state: Any) -> tuple[Any, Any]:
        values, rest = self._parted(state)
        before = [slot.read() for slot in self.slots]
        try:
            for slot, value in zip(self.slots, values, strict=True):
                slot.write(slot.initial if value is None else value)
            y, rest = (self.step(x), None) if self.alone else as_pair(self.step(x, rest))
            after = [slot.read() for slot in self.slots]
        finally:
            for slot, value in zip(self.slots, before, strict=True):
                slot.write(value)
        return y, self._joined(after, rest)

    def leave(self, state: Any) -> Any:
        """Set the modules to the state after the last step; return the step's own state."""
        values, rest = self._parted(state)
        for slot, value in zip(self.slots, values, strict=True):
            slot.write(value)
        return rest

    def _joined(self, values: list[Any], rest: Any) -> Any:
        """Return one state, as simple as possible, since every step takes it apart."""
        if not self.alone:
            return tuple(values), rest
        return values[0] if len(values) == 1 else tuple(values)

    def _parted(self, state: Any) -> tuple[Any, Any]:
        if not self.alone:
            return tuple(state)
        return (state,) if len(self.slots) == 1 else state, None


def _assigned(
    call: Callable[[], object], step: Any, modules: Sequence[nn.Module], device: torch.device
) -> list[tuple[Slot, Any, Any]]:
    """Find where a call assigns other tensors, or counts, in some modules, and leave no trace. The
    results are slots, with their values before and after."""
    before = Values(find_referents(modules))

    def counts(then: Any, now: Any) -> bool:
        return type(then) is type(now) and type(now) in (int, float)

    def assigned() -> list[tuple[Slot, Any, Any]]:
        call()
        return [(s, a, b) for s, a, b in before.changed() if tensors_in(b) or counts(a, b)]

    return try_out(assigned, [step, *modules], device)[0]


def _with_history(slot: _StateSlot) -> bool:
    leaves = pytree.tree_leaves(slot.initial) if slot.settled else []
    return any(isinstance(t, Tensor) and t.requires_grad for t in leaves)


def _read(results: list[Any], slots: Sequence[Any]) -> list[bool]:
    """Return, for each slot, whether the results of a step depend on its value before."""
    roots = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
    leaves = [[t for t in pytree.tree_leaves(s) if isinstance(t, Tensor)] for s in slots]
    wanted = [t for tensors in leaves for t in tensors if t.requires_grad]
    seeds = [torch.zeros_like(t) for t in roots]
    gradients = gradients_of(roots, wanted, seeds) if roots else ()
    reached = {id(t) for t, g in zip(wanted, gradients, strict=False) if g is not None}
    return [any(id(t) in reached for t in tensors) for tensors in leaves]


def _alike(then: Any, now: Any) -> bool:
    """Return whether two values have the same structure, shapes and dtypes."""
    try:
        (before, spec), (after, like) = flatten_state(then), flatten_state(now)
    except CellError:
        return False
    return spec == like and list(map(like_of, before)) == list(map(like_of, after))
