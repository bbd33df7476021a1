"""Layers that a model calls one after the other, within a byte budget.

A model may call its layers itself: the blocks of a transformer in a loop, or ``layer1`` to
``layer4`` of a ResNet in turn. Each such layer keeps its class. Its ``forward`` becomes a
:class:`RowForward`, which passes the call to the :class:`CalledRow` of all of them. The row plans
how each call is kept (:mod:`retrograde.plan.calls`): whole, lean, or dropped and run again
(:mod:`retrograde.models.refill`).

The first pass with another kind of input drops all but its first input, and measures every call.
Its plan is made when it goes back. A layer that is not given the result of the layer
before it runs by ordinary backpropagation, and a warning says so.

A *rider* is an activation that writes to its input, such as an in-place ReLU. It is a part of the
layer before it.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from retrograde.errors import CellError
from retrograde.machine import MEASURING
from retrograde.models.call_sizes import Known, Plans, Weights, too_small
from retrograde.models.given import Given, made_by, tensors_in
from retrograde.models.refill import Dropped, Row
from retrograde.models.trials import try_call
from retrograde.plan.calls import Part, Waits, held_of
from retrograde.replay.surroundings import version
from retrograde.run.transforms import uncompiled
from retrograde.sizes.elsewhere import Elsewhere

_MARK = "_retrograde_pass"  # an attribute of the tensor that a layer hands on


class RowForward:
    """The ``forward`` of a module in a row, which passes its calls to the row.

    A module may be called at several places, each of which is a row and a number in it. The state
    that it is given tells which.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: list[tuple[CalledRow, int]] = []

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()] if rides(self.module) or len(self.places) > 1 else []
        turns = [(now.row, now.next) for t in given if (now := _pass_of(t)) is not None]
        at = next((turn for turn in turns if turn in self.places), self.places[0])
        if rides(self.module) and at not in turns:  # it may also be called outside of its rows
            return own_forward(self.module)(*args, **kwargs)
        row, number = at
        return row.call(number, args, kwargs)


class RefusedLayerError(CellError):
    """A layer cannot be called by its row, as the run on the sample shows."""

    def __init__(self, name: str, layer: nn.Module, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.layer, self.reason = name, layer, reason


@dataclass
class _Pass:
    """A pass of a model through a row. It is an attribute of the tensor between two layers.

    Attributes:
        calls: the calls that are dropped; None if ordinary backpropagation runs.
        next: the number of the next call.
        made: the tensors of the last result; None for those that it was given.
        last: the call of the layer before, if it is dropped; riders may follow.
    """

    row: "CalledRow"
    kind: Known
    calls: Row | None
    next: int = 0
    made: "list[ref[Tensor] | None]" = field(default_factory=list)
    last: Dropped | None = None


class Timeline:
    """Rows that a pass runs in turn, each at most once, within one budget.

    Once a pass was seen, the kind of the first row's input tells those of the others, so that all
    have one plan. If it does not, each row has its share of the budget. A row that is new, or whose
    share is too small, is one group, whose plan is made when it goes back.

    Args:
        rows: in the order of a pass.
        waits: how long the output of each waits.
    """

    def __init__(
        self, rows: Sequence["CalledRow"], waits: Sequence[Waits] = (Waits(1, 1),)
    ) -> None:
        self.rows, self.waits, self.memory = [*rows], [*waits], 0
        self.shares = [0] * len(rows)
        self._known: dict[tuple[int, int], tuple[dict[int, Known], Known | None]] = {}
        self._running = threading.local()  # each thread's pass: its rows and their plans

    def __getstate__(self) -> Any:
        return self.rows, self.waits, self.memory, self.shares

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state[:2])  # type: ignore[misc]
        *_, self.memory, self.shares = state

    def begin(self, row: "CalledRow", kind: Known) -> Row | None:
        """Begin a row. Return how its calls run; None is ordinary backpropagation."""
        at, now = self.rows.index(row), getattr(self._running, "now", {})
        if not now or at <= max(now):
            self._running.now = now = {}
        now[at] = kind, None
        kinds, whole = self._known.get(_first(now), ({}, None))
        if whole is not None and kinds.get(at) is kind:
            start = sum(len(one.sizes) for k, one in kinds.items() if k < at)
            parts = [part.moved(-start) for part in whole.plan(self.memory)]
            own = tuple(part for part in parts if 0 <= part.start < len(kind.sizes))
        elif whole is None and kind.is_measured and self.shares[at] >= kind.least_bytes:
            own = kind.plan(self.shares[at])
        else:
            return Row((), kind.tied, partial(self._late, now, at))
        now[at] = kind, own
        return None if kind.is_ordinary(own) else Row(own, kind.tied)

    def end(self, row: "CalledRow") -> None:
        """End a row.

        Raises:
            BudgetError: the budget is too small for its input.
        """
        at, now = self.rows.index(row), self._running.now
        (kind, parts), first = now[at], _first(now)
        kinds, whole = self._known.get(first, ({}, None))
        need = self._before(now, at) + kind.least_bytes
        if parts is None and need > self.memory:
            if whole is None:
                raise too_small(self.memory, need, kind)
            warnings.warn(_SURPRISE.format(row.names[0], need, self.memory), stacklevel=7)
        if row is self.rows[-1]:
            found = {k: one for k, (one, _) in now.items()}
            if first not in self._known:
                waits = [self.waits[k].among([*found]) for k in found]
                self.knows(found, Known.of_rows([*found.values()], waits)).plan(self.memory)
            elif [*map(id, found.values())] != [*map(id, kinds.values())]:
                self._known[first] = found, None

    def knows(self, kinds: dict[int, Known], whole: Known) -> Known:
        """Note which kinds of input occur together, and what is known of all."""
        while len(self._known) >= _MOST_KINDS:
            del self._known[next(iter(self._known))]
        at = min(kinds)
        self._known[at, id(kinds[at])] = kinds, whole
        return whole

    def _before(self, now: "_Running", at: int) -> int:
        """Return what the rows before one hold, and its own input."""
        inputs = sum(
            kind.sizes[0].input_bytes for k, (kind, _) in now.items() if min(now) < k <= at
        )
        calls = [(kind.sizes, parts) for k, (kind, parts) in now.items() if k < at]
        group = (Part(0, 1),)
        return inputs + sum(held_of(s, p or (Part(0, len(s), 0, group),)) for s, p in calls)

    def _late(self, now: "_Running", at: int) -> tuple[Part, ...]:
        kind = now[at][0]
        noted = sum(call.noted_bytes for call in kind.sizes)
        return kind.late_plan(self.memory - self._before(now, at) - noted)


_Running = dict[int, tuple[Known, tuple[Part, ...] | None]]
_MOST_KINDS = 32
_SURPRISE = (
    "layer {} was given another kind of input than in the last pass that began as this one: this "
    "pass needs {} bytes of the {} allowed; the next ones keep the budget"
)


def _first(now: _Running) -> tuple[int, int]:
    at = min(now)
    return at, id(now[at][0])


class CalledRow:
    """Layers that a model calls one after the other. One that it calls again is there again.

    Args:
        calls: the called modules, by name, in the order of the calls. Riders are parts of the
            layers before them.
        slots: the argument of each layer that is the state.
        tied: the weights that several calls of the model have, of these or later ones.
    """

    def __init__(
        self, calls: Sequence[tuple[str, nn.Module]], slots: Sequence[int | str], tied: Weights
    ) -> None:
        self.calls, self.timeline, self.tied = [*calls], Timeline([self]), tied
        starts = [i for i, (_, module) in enumerate(calls) if not rides(module)]
        self.names, self.layers = [], list[list[nn.Module]]()
        self.slots: list[int | str] = []
        self.parts: list[tuple[int, int]] = []  # each call's layer, and 0 or its rider
        for k, (start, stop) in enumerate(pairwise([*starts, len(calls)])):
            self.names.append(calls[start][0])
            self.layers.append([module for _, module in calls[start:stop]])
            self.slots.append(slots[start])
            self.parts += [(k, part) for part in range(stop - start)]
        self.plans = Plans()
        self.seen: list[Known] | None = None  # of all passes, during the run on a sample
        self.events = list[CalledRow]()  # the rows of all calls, in the order of that run
        self.made = list[list[ref[Tensor]]]()  # its first input and outputs, in that run
        self.kept = set[int]()  # which of these the model keeps for later
        self.lingers = set[tuple[int, int]]()  # calls, and which are still there when they run
        self.elsewhere: Elsewhere | None = None  # what is held besides, in that run
        self.numbers = list[int]()  # of its calls there

    def install(self) -> None:
        """Pass the calls of the layers to this row from now on."""
        for number, (_, module) in enumerate(self.calls):
            vars(module).setdefault("forward", RowForward(module)).places.append((self, number))

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of the model that has this number in the row."""
        if self.elsewhere is not None:
            if self.events and (last := self.events[-1]) is not self:
                last.kept.update(last._alive())  # which states but the last are still there
            self.events.append(self)
            self.numbers.append(self.elsewhere.begin((args, kwargs), counts=True))
        result = None
        try:
            result = self._call(number, args, kwargs)
            return result
        except CellError as refusal:
            if self.seen is None or isinstance(refusal, RefusedLayerError):
                raise
            reason = f"cannot be run again: {refusal}"
            raise RefusedLayerError(*self.calls[number], reason) from refusal
        finally:
            if self.elsewhere is not None:
                self.elsewhere.end(result)

    def _alive(self) -> list[int]:
        return [k for k, made in enumerate(self.made) if any(t() is not None for t in made)]

    def _call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        k, part = self.parts[number]
        forward = own_forward(self.calls[number][1])
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given = Given(args, kwargs, 0 if part else self.slots[k])
        if (reason := given.refusal()) is not None:
            raise CellError(f"layer {self.names[k]} {reason}")
        now = self._pass(number, given)
        if now is None or now.calls is None or k not in now.kind.active:
            result = forward(*args, **kwargs)
        elif part:
            result = forward(*args) if now.last is None else now.last.run(forward, given)
        else:
            made = [None if y is None else y() for y in now.made]
            at = now.kind.active.index(k)
            self._measure(now.kind, at, given, made if at else None)
            if self.seen is not None:
                self.lingers |= {(at, k) for k in self._alive() if 0 < k < at}
            result, now.last = now.calls.run(at, now.kind.units[at], forward, given, made, now.last)
            if self.elsewhere is not None and now.last is not None:
                held = zip(given.leaves, now.last.given.each, strict=True)
                state = given.state if at or self.events[0] is not self else None
                ours = {id(t) for t in tensors_in(state)}
                rest = [one.value for x, one in held if id(x) not in ours and not hasattr(x, _MARK)]
                self.elsewhere.hold(tensors_in(rest))
        if now is not None and number + 1 < len(self.calls):
            now.next = number + 1
            if part or k not in now.kind.active:  # the same tensors as before
                own: list[Tensor | None] = [*tensors_in(result)]
            else:
                own = made_by(result, given.leaves)
                now.made = [y if y is None else ref(y) for y in own]
                if self.seen is not None:
                    self.made.append([y for y in now.made if y is not None])
            for y in own:
                if y is not None:
                    setattr(y, _MARK, (now, version(y)))
        elif now is not None and now.calls is not None:
            now.last = None
            if self.seen is None:
                self.timeline.end(self)
            else:
                for y in tensors_in(result):
                    setattr(y, _MARK, (None, -1))
        return result

    def _pass(self, number: int, given: Given) -> _Pass | None:
        """Return the pass of a call whose state is the output of the call before it.

        The call of the first active layer begins a pass. Otherwise the result is None, and the call
        of an active layer warns, or is refused on a sample.
        """
        state = given.state
        now = _pass_of(state)
        if now is not None and now.row is self and now.next == number:
            return now
        k, part = self.parts[number]
        active = [k for k, one in enumerate(self.layers) if not passes_through(one[0])]
        if part == 0 and active[:1] == [k] and isinstance(state, Tensor):
            return self._begin(active, given)
        if k in active and self.seen is not None:
            reason = "is not called in turn where gradients are recorded"
            raise RefusedLayerError(*self.calls[number], reason)
        if k in active:
            warnings.warn(
                f"layer {self.names[k]} was not called on the output of the layer before "
                "it, as it was for the sample: it is run by ordinary backpropagation, beyond the "
                "budget",
                stacklevel=6,
            )
        return None

    def _begin(self, active: list[int], given: Given) -> _Pass:
        layers = [layer for one in self.layers for layer in one]
        unknown = partial(Known, active, tied=self.tied, kept=self.kept, lingers=self.lingers)
        kind = self.plans.kind_of(layers, given, unknown)
        if kind is None:
            return _Pass(self, unknown(), None)
        if self.seen is not None:
            self.seen.append(kind)
            self.made = [[*map(ref, tensors_in(given.state))]]
            return _Pass(self, kind, Row((), kind.tied, partial(kind.late_plan, 0)))
        return _Pass(self, kind, self.timeline.begin(self, kind))

    def _measure(
        self, kind: Known, at: int, given: Given, made: Sequence[Tensor | None] | None
    ) -> None:
        """Try and measure an active layer, if it is the next one that is not known. ``made`` are
        the tensors that the call before made."""
        if len(kind.sizes) > at:
            return
        k = kind.active[at]
        layers = self.layers[k]

        def forward(*args: Any, **kwargs: Any) -> Any:
            value = own_forward(layers[0])(*args, **kwargs)
            for rider in layers[1:]:
                value = own_forward(rider)(value)
            return value

        with MEASURING:  # another thread may be measuring the same
            if len(kind.sizes) == at:
                unit = try_call(self.names[k], forward, layers, given).unit
                found = self.plans.measure(unit, layers, given, made, self.tied)
                kind.add(unit, found, last=at + 1 == len(kind.active))
                if kind.is_measured and self.seen is None:
                    kind.settle()


def _pass_of(t: Any) -> _Pass | None:
    """Return the pass that a tensor belongs to; None if it was written to since then."""
    now, then = getattr(t, _MARK, (None, 0))
    return now if now is not None and then == version(t) else None


def passes_through(layer: nn.Module) -> bool:
    """Return whether a layer returns the very tensor that it is given."""
    is_off = isinstance(layer, _DropoutNd) and (not layer.training or layer.p == 0)
    return is_off or isinstance(layer, nn.Identity)


def release(modules: Iterable[nn.Module]) -> None:
    """Give all modules their own forward pass again, so that no row gets their calls."""
    for module in modules:
        if isinstance(vars(module).get("forward"), RowForward):
            del vars(module)["forward"]


def rides(module: nn.Module) -> bool:
    """Return whether a module is a rider: an activation that works in place."""
    kind = type(module)
    is_activation = kind.__module__ == nn.ReLU.__module__ and kind is not nn.RReLU  # which draws
    return is_activation and bool(getattr(module, "inplace", False))


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the forward pass of a module's class, without a :class:`RowForward`."""
    return partial(type(module).forward, module)
