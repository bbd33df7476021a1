"""What one call of a layer takes, in each way to keep it; and a trial of the call.

The call runs by itself, on the arguments that a model gives it. It runs without a graph, and with
one that is kept whole, lean, or dropped. So measuring holds what one call takes, and the gradients
of its parameters. It leaves no trace.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from retrograde.machine import now
from retrograde.measure.allocations import Phase, measure_phases
from retrograde.models.chain.chain_core import Leave
from retrograde.models.chain.examine import (
    check_anchors,
    check_trial,
    make_of,
    parts_of,
    reads_of,
)
from retrograde.models.chain.links import enter
from retrograde.models.lean import lean
from retrograde.models.refill import Dropped, Unit
from retrograde.plan.calls import CallSizes, Way
from retrograde.replay.dry_run import try_out
from retrograde.run.states import device_of

__all__ = ["Meter", "try_call"]

Call = tuple[tuple[Any, ...], dict[str, Any]]

_ROUNDS = 3


def try_call(
    name: str, layers: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Unit:
    """Run a layer and its riders once, and return what they are as a unit.

    Raises:
        CellError: the call cannot be run again.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = type(layers[0]).forward(layers[0], *args, **kwargs)
        for rider in layers[1:]:
            value = type(rider).forward(rider, value)
        return value

    leaves, spec = pytree.tree_flatten((args, kwargs))
    anchors: list[ref[Tensor]] = []

    def call() -> Any:
        args, kwargs, _, anchor = _enter(leaves, _wants(leaves), spec)
        anchors.append(ref(anchor))
        return forward(*args, **kwargs)

    trial = replace(try_out(call, layers, device_of(*_tensors(leaves)), _tensors), value=None)
    check_anchors(name, anchors)
    check_trial(name, trial)
    return Unit(name, forward, trial.ambient, reads_of(trial.found, trial.ambient))


_STATE = object()  # the place of the state among the arguments


def _enter(
    leaves: Sequence[Any], wants: Sequence[bool], spec: pytree.TreeSpec
) -> tuple[Any, Any, list[Tensor], Tensor]:
    """Return arguments without the graph that they came from, and those that want a gradient. The
    last result is the leaf of the graph that begins with these."""
    wanted = [leaf for leaf, want in zip(leaves, wants, strict=True) if want]
    given, anchor = enter(wanted, [torch.is_grad_enabled()] * len(wanted))
    rest = iter(given)
    pairs = zip(leaves, wants, strict=True)
    args, kwargs = pytree.tree_unflatten([next(rest) if want else x for x, want in pairs], spec)
    return args, kwargs, given, anchor


def _wants(leaves: Sequence[Any]) -> list[bool]:
    """Return which arguments are tensors that require a gradient."""
    return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]


class _Measurement:
    """The phases of a call, for each way to keep it. It owns the state, and lets it go."""

    def __init__(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor
    ) -> None:
        self.unit, self.given = unit, state
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.leaves = [_STATE if leaf is state else leaf for leaf in leaves]
        self.wants = _wants(leaves)
        self.state: list[Tensor] = []
        self.result: Any = None
        self.edges: list[Any] = []
        self.root: list[Any] = []
        self.seeds: list[Tensor] = []
        self.like: list[tuple[Any, ...]] = []
        self.for_caller: list[Tensor | None] = []
        self.turns = False

    def begin(self) -> None:
        self.state.append(self.given.detach().clone())

    def advance(self) -> None:
        args, kwargs, _ = self._arguments()
        with torch.no_grad():
            self.result = self.unit.forward(*args, **kwargs)

    def keep(self) -> None:
        self._record(self.unit.forward)

    def keep_lean(self) -> None:
        with lean():
            self._record(self.unit.forward)

    def drop(self) -> None:
        self._record(partial(self._dropped, lean=False))

    def drop_lean(self) -> None:
        self._record(partial(self._dropped, lean=True))

    def _dropped(self, *args: Any, lean: bool, **kwargs: Any) -> Any:
        call = Dropped(self.unit, args, kwargs, lean=lean)
        return call.run(self.unit.forward, args, kwargs)

    def _record(self, run: Callable[..., Any]) -> None:
        with torch.enable_grad():
            args, kwargs, wanted = self._arguments()
            self.edges = [get_gradient_edge(t) for t in wanted]
            wanted.clear()
            self.result = run(*args, **kwargs)

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments, and those of them that want a gradient."""
        leaves = [self.state[0] if leaf is _STATE else leaf for leaf in self.leaves]
        args, kwargs, given, _ = _enter(leaves, self.wants, self.spec)
        return args, kwargs, given

    def release_result(self) -> None:
        found = [t for t in _tensors(self.result) if t.requires_grad]
        self.like = [(t.shape, t.dtype, t.device) for t in found]
        if found:
            with torch.enable_grad():
                self.root = [get_gradient_edge(Leave.apply(self.seeds, *found))]  # type: ignore[no-untyped-call]
        self.result = None

    def release_state(self) -> None:
        self.state.clear()

    def backpropagate(self) -> None:
        root, edges = [*self.root], [*self.edges]
        self.root, self.edges = [], []
        own = [t for t in self.unit.reads if t.requires_grad and t.is_leaf]
        if root and (edges or own):
            self.seeds += (torch.ones(shape, dtype=d, device=at) for shape, d, at in self.like)
            begin = [torch.empty(0, device=self.given.device)]
            found = torch.autograd.grad(root, [*edges, *own], begin, allow_unused=True)
            self.turns = any(g is not None and not g.is_contiguous() for g in found[: len(edges)])
            self.for_caller = list(found[len(edges) :])

    def clear(self) -> None:
        self.result = None
        self.state, self.root, self.edges, self.for_caller = [], [], [], []


_WAYS = ("keep", "keep_lean", "drop", "drop_lean")


class Meter:
    """Measures calls; each once for layers of one make, and times layers of one class once."""

    def __init__(self) -> None:
        self.sizes: dict[Hashable, CallSizes] = {}
        self.seconds: dict[Hashable, dict[str, float]] = {}

    def measure(
        self, unit: Unit, layers: Sequence[nn.Module], kind: Hashable, call: Call, state: Tensor
    ) -> CallSizes:
        """Return the sizes of a call, whose arguments are of some kind."""
        parts = parts_of(layers)
        key = make_of(parts), kind
        if key[0] is None or key not in self.sizes:
            one = _Measurement(unit, *call, state)
            shapes = [[t.shape for t in part.parameters(recurse=False)] for part in parts]
            alike = tuple(map(type, parts)), str(shapes), kind
            with unit.ambient.measured():
                found = _bytes(one, state.device)
                if alike not in self.seconds:
                    self.seconds[alike] = _seconds(one, state.device)
            self.sizes[key] = _sizes(one, found, self.seconds[alike])
        return self.sizes[key]

    def __reduce__(self) -> Any:
        return type(self), ()


def _bytes(one: _Measurement, device: torch.device) -> list[Phase]:
    phases: list[Callable[[], None]] = [one.begin, one.advance, one.release_result, one.clear]
    for way in _WAYS:
        phases += [
            one.begin, getattr(one, way), one.release_result, one.release_state,
            one.backpropagate, one.clear,
        ]  # fmt: skip
    return measure_phases(phases, device=device)


def _sizes(one: _Measurement, found: Sequence[Phase], seconds: dict[str, float]) -> CallSizes:
    """Return what the phases of a call showed."""
    given, output = found[0].growth(), -found[2].growth()
    captured = (t for t in one.unit.ambient.capture() if t.is_cuda == one.given.is_cuda)
    noted = sum(int(t.nbytes) for t in captured)  # also held while it runs again
    ways = []
    for k, way in enumerate(_WAYS):
        first = 5 + 6 * k
        record, less_result, less_state, back = found[first : first + 4]
        last = first + 4  # what is released then is the caller's
        remains = record.growth(before=last) + less_result.growth()
        keeps_output = -less_result.growth() < output
        ways.append(
            Way(
                held_bytes=max(0, remains - (output if keeps_output else 0)),
                first_bytes=record.peak() + noted,
                backward_bytes=remains + back.peak(first, last),
                seconds=seconds[way],
                keeps_input=-less_state.growth() < given,
                keeps_output=keeps_output,
                dropped=k > 1,
            )
        )
    return CallSizes(
        input_bytes=given,
        output_bytes=output,
        forward_bytes=found[1].peak() + noted,
        forward_seconds=seconds[""],
        ways=tuple(ways),
        noted_bytes=noted,
        left_bytes=sum(left.nbytes for left in one.unit.ambient.left),
        turns=one.turns,
    )


def _seconds(one: _Measurement, device: torch.device) -> dict[str, float]:
    """Return the seconds of a forward pass, and what each way adds to the first one's."""

    def timed(*steps: Callable[[], None]) -> float:
        one.begin()
        start = now(device)
        for step in steps:
            step()
        taken = now(device) - start
        one.clear()
        return taken

    taken: dict[str, list[float]] = {way: [] for way in ("", *_WAYS)}
    for _ in range(_ROUNDS):
        taken[""].append(timed(one.advance))
        for way in _WAYS:
            taken[way].append(timed(getattr(one, way), one.release_result, one.backpropagate))
    least = {way: min(each) for way, each in taken.items()}
    return {"": least[""]} | {way: max(0.0, least[way] - least["keep"]) for way in _WAYS}


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
