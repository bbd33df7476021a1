"""What one call of a layer takes, in each way to keep it.

The call runs by itself, on the arguments that a model gives it. It runs without a graph, and with
one that is kept whole, lean, or dropped. So measuring holds what one call takes, and the gradients
of its parameters. It leaves no trace.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from retrograde.errors import BudgetError
from retrograde.machine import now
from retrograde.measure.allocations import Phase, measure_phases
from retrograde.models.lean import lean
from retrograde.models.refill import Dropped, Unit, tensors_in
from retrograde.models.trials import Tried, enter, make_of, parts_of, try_call, wants_of
from retrograde.plan.calls import CallSizes, Part, Way, fastest, kept_whole, least, peak_of
from retrograde.replay.surroundings import Steady, muted_hooks
from retrograde.run.core import unrecorded
from retrograde.units import format_bytes

__all__ = ["Kind", "Meter"]

Call = tuple[tuple[Any, ...], dict[str, Any]]

_MARK_BYTES = 8  # one number, which tells a generator's position before and after a run
_ROUNDS = 3
_MORE_SECONDS = 0.1  # a call that takes longer in all ways is not timed apart


class _Leave(torch.autograd.Function):
    """The end of a recorded call, whose backward pass takes the gradients out of ``seeds``.

    ``torch.autograd.grad`` would hold gradients passed to it until it returns.
    """

    @staticmethod
    def forward(ctx: Any, seeds: list[Tensor], *state: Tensor) -> Tensor:
        ctx.seeds = seeds
        return torch.empty(0, device=state[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (None, *ctx.seeds)
        ctx.seeds.clear()
        return found


class _Measurement:
    """The phases of a call, for each way to keep it. It owns the state, and lets it go.

    ``state`` are the arguments that the call before made, or those of the ``first`` call. With
    ``turned``, the gradient of the result has reversed strides.
    """

    def __init__(self, unit: Unit, call: Call, state: Sequence[Tensor], *, first: bool) -> None:
        self.unit, self.given, self.first, self.turned = unit, state, first, False
        args, kwargs = call
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.device = next(t.device for t in leaves if isinstance(t, Tensor))
        ours = {id(t): n for n, t in enumerate(state)}
        self.places = [ours.get(id(leaf)) for leaf in leaves]
        self.leaves = [None if id(leaf) in ours else leaf for leaf in leaves]
        self.wants = wants_of(leaves)
        self.state: list[Tensor] = []
        self.result: Any = None
        self.edges: list[Any] = []
        self.root: list[Any] = []
        self.seeds: list[Tensor] = []
        self.like: list[tuple[Any, ...]] = []
        self.for_caller: list[Tensor | None] = []
        self.turns = [False, False]
        self.handed, self.hands_on = 0, False
        self.gradients: list[int] = []
        self.apart = 0

    def begin(self) -> None:
        copies: dict[int, torch.UntypedStorage] = {}
        for t in self.given:
            memory = t.untyped_storage()
            if self.first:  # its memory is the caller's, and may be larger
                self.state.append(t.detach().clone())
                continue
            if memory.data_ptr() not in copies:
                copies[memory.data_ptr()] = memory.clone()  # type: ignore[no-untyped-call]
            copy = torch.empty(0, dtype=t.dtype, device=t.device)
            at = t.storage_offset(), t.shape, t.stride()
            self.state.append(copy.set_(copies[memory.data_ptr()], *at))  # type: ignore[call-overload]

    def begin_turned(self) -> None:
        """Begin on the very state, for a copy would be one more beside a turned gradient's."""
        self.state, self.turned = [*self.given], True

    def advance(self) -> None:
        args, kwargs, _ = self._arguments()
        with unrecorded():
            self.result = self.unit.forward(*args, **kwargs)
        memory = {s.data_ptr(): s.nbytes() for s in _memory(self.state)}
        handed = {s.data_ptr() for s in _memory(tensors_in(self.result))}
        self.handed = sum(size for at, size in memory.items() if at in handed)
        given = {s.data_ptr() for s in _memory(tensors_in((args, kwargs)))}
        self.hands_on = not given.isdisjoint(handed)

    def keep(self) -> None:
        self._record(self.unit.forward)

    def keep_turned(self) -> None:
        self.keep()

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
        pairs = zip(self.leaves, self.places, strict=True)
        leaves = [leaf if n is None else self.state[n] for leaf, n in pairs]
        args, kwargs, given, _ = enter(leaves, self.wants, self.spec)
        return args, kwargs, given

    def release_result(self) -> None:
        found = [t for t in tensors_in(self.result) if t.requires_grad]
        self.like = [(t.shape, t.dtype, t.device) for t in found]
        self.gradients = [t.nbytes for t in found]
        if found:
            with torch.enable_grad():
                self.root = [get_gradient_edge(_Leave.apply(self.seeds, *found))]  # type: ignore[no-untyped-call]
        self.result = None

    def release_state(self) -> None:
        self.state.clear()

    def backpropagate(self) -> None:
        root, edges = [*self.root], [*self.edges]
        self.root, self.edges = [], []
        own = [t for t in self.unit.reads if t.requires_grad and t.is_leaf]
        if root and (edges or own):
            for shape, dtype, device in self.like:
                seed = torch.ones(shape[:: -1 if self.turned else 1], dtype=dtype, device=device)
                turned = seed.permute(*reversed(range(seed.dim()))) if self.turned else seed
                self.seeds.append(turned)
                del seed, turned
            begin = [torch.empty(0, device=self.device)]
            with muted_hooks(own):
                found = torch.autograd.grad(root, [*edges, *own], begin, allow_unused=True)
            back = [g for g in found[: len(edges)] if g is not None]
            self.turns[self.turned] = any(not g.is_contiguous() for g in back)
            self.apart = max([0, *(g.untyped_storage().nbytes() - g.nbytes for g in back)])
            self.for_caller = list(found[len(edges) :])

    def clear(self) -> None:
        self.result, self.turned = None, False
        self.state, self.root, self.edges, self.for_caller = [], [], [], []


def _memory(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors]


_WAYS = ("keep", "keep_lean", "drop", "drop_lean")
_AGAIN = {"keep": "drop", "keep_lean": "drop_lean"}  # ways of which both reruns are alike
_ORDER = ("keep_turned", *reversed(_WAYS))  # in which they are measured


class Meter:
    """Tries and measures calls; each once for layers of one make. It times layers of one class
    once."""

    def __init__(self) -> None:
        self.tried: dict[Hashable, Tried] = {}
        self.sizes: dict[Hashable, CallSizes] = {}
        self.seconds: dict[Hashable, dict[str, float]] = {}

    def try_call(
        self, name: str, forward: Callable[..., Any], layers: Sequence[nn.Module], kind: Hashable,
        call: Call,
    ) -> Tried:  # fmt: skip
        """Return what a trial of a call shows, whose arguments are of some kind.

        Raises:
            CellError: the call cannot be run again.
        """
        key = make_of(parts_of(layers)), kind
        known = self.tried[key].on(name, forward, layers) if key in self.tried else None
        if known is not None:
            return known
        found = try_call(name, forward, layers, *call)
        if key[0] is not None:
            self.tried[key] = found
        return found

    def measure(
        self, unit: Unit, layers: Sequence[nn.Module], kind: Hashable, call: Call,
        state: Sequence[Tensor], *, first: bool, repeats: int | None = None,
    ) -> CallSizes:  # fmt: skip
        """Return the sizes of a call. ``state`` are the arguments that the call before made, or
        those of the ``first`` call."""
        parts = parts_of(layers)
        memory = first or tuple(s.nbytes() for s in _memory(state))
        key = make_of(parts), kind, memory
        if key[0] is None or key not in self.sizes:
            one = _Measurement(unit, call, state, first=first)
            shapes = [[t.shape for t in part.parameters(recurse=False)] for part in parts]
            alike = tuple(map(type, parts)), str(shapes), kind
            with unit.ambient.measured():
                found, taken = _phases(one, one.device)
                if alike not in self.seconds:
                    self.seconds[alike] = _seconds(one, taken, repeats, one.device)
            self.sizes[key] = _sizes(one, found, self.seconds[alike])
        return self.sizes[key]

    def __reduce__(self) -> Any:
        return type(self), ()


@dataclass
class Kind:
    """What is known of the passes with one kind of input.

    Attributes:
        active: the layers that do not just return their input.
        sizes: of their calls, as far as they were measured.
        units: of their calls.
        passes: whether a gradient goes through each of them, where that is known.
        plans: by budget.
        still: the generators that no unit draws from, where they are checked once over all.
    """

    active: list[int]
    sizes: list[CallSizes] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    passes: list[bool] = field(default_factory=list)
    plans: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    still: Steady = field(default_factory=Steady)

    def add(self, found: CallSizes, *, last: bool) -> None:
        """Add the sizes of the next call. What it hands on of what the call before made is held
        throughout. A gradient that it hands on may wait in larger memory, or have to be copied."""
        handed = found.handed_bytes if self.sizes else 0
        for at in range(len(self.sizes) - 1, -1, -1) if found.apart_bytes else ():
            self.sizes[at] = self.sizes[at].held_back(found.apart_bytes)
            if not self.sizes[at].hands_on:
                break
        if self.sizes:
            less = self.sizes[-1].output_bytes - handed
            self.sizes[-1] = replace(self.sizes[-1], output_bytes=less)
        found = replace(
            found, input_bytes=found.input_bytes - handed, left_bytes=found.left_bytes + handed
        )
        self.sizes.append(found)
        turned = last  # the caller's gradient may lie in memory in any way
        for at in range(len(self.sizes) - 1, -1, -1) if last else ():
            size = self.sizes[at]
            self.sizes[at] = size.held_back(0, size.turned_bytes if turned else 0)
            turned = size.turns[turned]

    @property
    def is_measured(self) -> bool:
        return len(self.sizes) == len(self.active)

    @property
    def ordinary_bytes(self) -> int:
        return peak_of(self.sizes, kept_whole(self.sizes))

    @cached_property
    def least_bytes(self) -> int:
        """The smallest budget; asked once all calls are measured."""
        return min(self.ordinary_bytes, least(self.sizes))

    def plan(self, memory: int) -> tuple[Part, ...]:
        """Return the fastest plan within a budget.

        Raises:
            BudgetError: the budget is too small; the message names the least one.
        """
        if memory not in self.plans:
            smallest = self.least_bytes
            if memory < smallest:
                sizes = zip(self.units, self.sizes, strict=True)
                largest = max(sizes, key=lambda pair: min(map(_peak, pair[1].ways)))[0].name
                raise BudgetError(
                    f"the memory of {memory} bytes ({format_bytes(memory)}) is too small for an "
                    f"input of this kind: expected at least {smallest} bytes "
                    f"({format_bytes(smallest)}), most of it for layer {largest}; raise the "
                    "budget, or make the batch smaller",
                    smallest,
                )
            self.plans[memory] = fastest(self.sizes, memory)
        return self.plans[memory]

    def late_plan(self, memory: int) -> tuple[Part, ...]:
        """Return the plan of a first pass, which was measured while it ran, as one group."""
        room = memory - sum(call.noted_bytes for call in self.sizes)
        parts = fastest(self.sizes, max(room, least(self.sizes)))
        return (Part(0, len(self.sizes), 0, parts),)


def _peak(way: Way) -> int:
    return max(way.first_bytes, way.backward_bytes)


def _phases(one: _Measurement, device: torch.device) -> tuple[list[Phase], dict[str, float]]:
    """Return the phases of a call, and the seconds that each way took while they were watched.

    The way that is compared with the others comes last, when all kernels were used before.
    """
    taken = dict.fromkeys(("", *_ORDER), 0.0)

    def clocked(way: str, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start = now(device)
            step()
            taken[way] += now(device) - start

        return run

    phases = [one.begin, clocked("", one.advance), one.release_result, one.clear]
    for way in _ORDER:
        phases += [
            _begin(one, way), clocked(way, getattr(one, way)), one.release_result,
            one.release_state,
            clocked(way, one.backpropagate), one.clear,
        ]  # fmt: skip
    return measure_phases(phases, device=device), taken


def _begin(one: _Measurement, way: str) -> Callable[[], None]:
    return one.begin_turned if way == "keep_turned" else one.begin


def _sizes(one: _Measurement, found: Sequence[Phase], seconds: dict[str, float]) -> CallSizes:
    """Return what the phases of a call showed."""
    given, output = found[0].growth(), -found[2].growth()
    on_gpu = one.device.type == "cuda"
    captured = [t for t in one.unit.ambient.capture() if isinstance(t, Tensor)]
    noted = sum(t.nbytes for t in captured if t.is_cuda == on_gpu)  # also held while it runs again
    ways = {}
    for k, way in enumerate(_ORDER):
        first = 5 + 6 * k
        record, less_result, less_state, back = found[first : first + 4]
        last = first + 4  # what is released then is the caller's
        remains = record.growth(before=last) + less_result.growth()
        keeps_output = -less_result.growth() < output
        ways[way] = Way(
            held_bytes=max(0, remains - (output if keeps_output else 0)),
            first_bytes=record.peak() + noted,
            backward_bytes=remains + back.peak(first, last),
            seconds=max(0.0, seconds[way] - seconds["keep"]),
            again_seconds=max(seconds[""], seconds[_AGAIN.get(way, way)] - seconds["keep"]),
            keeps_input=-less_state.growth() < given,
            keeps_output=keeps_output,
            dropped=way.startswith("drop"),
        )
    turned = ways["keep_turned"].backward_bytes - ways["keep"].backward_bytes
    return CallSizes(
        input_bytes=given,
        output_bytes=output,
        forward_bytes=found[1].peak() + noted + _MARK_BYTES,
        forward_seconds=seconds[""],
        ways=tuple(ways[way] for way in _WAYS),
        noted_bytes=noted,
        left_bytes=sum(left.nbytes for left in one.unit.ambient.left),
        turns=tuple(one.turns),
        turned_bytes=max(0, turned),
        hands_on=one.hands_on,
        handed_bytes=one.handed,
        gradient_bytes=sum(one.gradients) + _MARK_BYTES,
        apart_bytes=one.apart,
        backward_seconds=max(0.0, seconds["keep"] - seconds[""]),
    )


def _seconds(
    one: _Measurement, watched: dict[str, float], rounds: int | None, device: torch.device
) -> dict[str, float]:
    """Return the seconds of a forward pass, and of forward and backward passes in each way. Those
    of a long call are the ``watched`` ones, since watching takes little of them."""
    if rounds is None and sum(watched.values()) > _MORE_SECONDS:
        return watched

    def timed(begin: Callable[[], None], *steps: Callable[[], None]) -> float:
        begin()
        start = now(device)
        for step in steps:
            step()
        taken = now(device) - start
        one.clear()
        return taken

    taken: dict[str, list[float]] = {way: [] for way in watched}
    for _ in range(rounds or _ROUNDS):
        taken[""].append(timed(one.begin, one.advance))
        for way in _ORDER:
            steps = getattr(one, way), one.release_result, one.backpropagate
            taken[way].append(timed(_begin(one, way), *steps))
    return {way: min(each) for way, each in taken.items()}
