"""Passes of a model through its rows of layers, and the plans of rows that run in turn.

A pass waits for its next call by where the tensors lie that this should be given. So tensors carry
nothing, and a hook may wrap them. A :class:`JointPlan` has the rows of a pass, and one budget for
all of them.
"""

import threading
import warnings
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from retrograde.models.rows.arguments import Arguments
from retrograde.models.rows.call_sizes import PassMeasurements, larger, too_small
from retrograde.models.rows.rerun import RecomputedCall
from retrograde.models.rows.running_plan import RunningPlan, Waiting
from retrograde.plan.calls import OutputLifetime, Part, held_of, peak_of
from retrograde.replay.surroundings import version
from retrograde.sizes.cache import Recent
from retrograde.torch_private import address_of, is_wrapped

if TYPE_CHECKING:
    from retrograde.models.rows.layer_run import LayerRun


@dataclass
class Pass:
    """A pass of a model through a row."""

    kind: PassMeasurements
    calls: RunningPlan | None  # None if ordinary backpropagation runs
    next: int = 0  # the number of the next call
    made: list[Hashable] = field(default_factory=list)  # where the results of the last one lie
    last: RecomputedCall | None = None  # of the layer before, if it is dropped; riders may follow

    def made_of(self, arguments: Arguments) -> list[Tensor | None]:
        """Return what the call before made and this one is given, each in its place."""
        by_address = {where(t): t for t in arguments.tensors}
        return [by_address.get(at) for at in self.made]


class Handed:
    """The passes of a row that wait for their next call, by where the tensors lie that it should be
    given. A tensor that a hook wraps lies where the layer's own result does."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Pass, int, StorageWeakRef]] = {}

    def __reduce__(self) -> Any:
        return Handed, ()

    def on(self, now: Pass, tensors: Iterable[Tensor | None]) -> list[Hashable]:
        """Let a pass wait for some tensors, and return where they lie. Others that ended early are
        forgotten with theirs."""
        for at, (waiting, _, storage) in [*self._found.items()]:
            if waiting is now or storage.expired():
                self._found.pop(at, None)
        places = [None if t is None else where(t) for t in tensors]
        for at, t in zip(places, tensors, strict=True):
            if t is not None:
                self._found[at] = now, version(t), StorageWeakRef(t.untyped_storage())
        return places

    def to(self, tensors: Iterable[Tensor]) -> Pass | None:
        """Return the pass that waits for one of some tensors, which nobody wrote to since then."""
        for t in tensors if self._found else ():
            if t.layout is torch.strided and not is_wrapped(t):
                entry = self._found.get(where(t))
                if entry is not None and entry[1] == version(t) and not entry[2].expired():
                    return entry[0]
        return None


def where(t: Tensor) -> Hashable:
    """Return where a tensor lies. The memory must live, or it may be another's later."""
    return address_of(t), t.storage_offset(), t.shape, t.stride(), t.dtype


class JointPlan:
    """Rows that a pass runs in turn, within one budget. A rollout runs a row once for each step.

    Once a pass was seen, the shapes at its first row determine those at the others, so that all
    have one plan. If they do not, each row has its share of the budget. A row that is new, or whose
    share is too small, is one group, whose plan is made when it goes back.

    ``rows`` has each as often as it comes. ``waits`` tells how long the output of each waits.
    """

    def __init__(
        self, rows: Sequence["LayerRun"], memory: int = 0, shares: Sequence[int] = (0,),
        waits: Sequence[OutputLifetime] = (OutputLifetime(1, 1),),
    ) -> None:  # fmt: skip
        self.rows, self.memory, self.shares, self.waits = [*rows], memory, shares, [*waits]
        self._repeats = len({*map(id, rows)}) < len(rows)
        self._known: Recent[tuple[_Kinds, PassMeasurements | None]] = Recent(_MOST_KINDS)
        self._running = threading.local()  # each thread's pass: its rows and their plans

    def __getstate__(self) -> Any:
        return self.rows, self.memory, self.shares, self.waits

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def begin(self, row: "LayerRun", measurements: PassMeasurements) -> Pass:
        """Begin this thread's pass through a row."""
        now = getattr(self._running, "now", {})
        at, is_first = self._place(row, now)
        if is_first:
            self._running.now = now = {}
        now[at] = measurements, None
        kinds, whole = self._known.get(_first(now), ({}, None))
        plan, share = None, self.shares[at] if at < len(self.rows) else 0
        if whole is not None and kinds.get(at) is measurements:
            start = sum(len(earlier.sizes) for k, earlier in kinds.items() if k < at)
            whole_plan = whole.plan(self.memory)
            first_part, stop_part = (
                bisect_left(whole_plan, n, key=lambda part: part.start)
                for n in (start, start + len(measurements.sizes))
            )
            plan = tuple(part.moved(-start) for part in whole_plan[first_part:stop_part])
        elif whole is None and measurements.is_measured and share >= measurements.least_bytes:
            plan = measurements.plan(share)
        now[at] = measurements, plan
        late = partial(self._late, now, at) if plan is None else None
        is_ordinary = plan is not None and measurements.is_ordinary(plan)
        calls = None if is_ordinary else RunningPlan(plan or (), measurements.tied, late)
        begun = Pass(measurements, calls)
        self._running.open = row, begun
        return begun

    def _place(self, row: "LayerRun", now: "_Running") -> tuple[int, bool]:
        """Return a row's place in a pass, and whether the pass begins with it. More steps than
        there were on the sample come behind, as long as the pass has not gone back."""
        last, first_place = max(now, default=-1), self.rows.index(row)
        if not self._repeats:
            return first_place, not now or first_place <= last
        if not Waiting.is_on(getattr(self._running, "graph", lambda: None)):
            return first_place, True
        places = (k for k in range(last + 1, len(self.rows)) if self.rows[k] is row)
        return next(places, last + 1), False

    def is_in(self, row: "LayerRun", number: int) -> bool:
        """Return whether this thread's pass has begun a row, and may come to a call of it."""
        open_row, now = getattr(self._running, "open", (None, None))
        return open_row is row and now is not None and now.next <= number

    def end(self, result: object) -> None:
        """End a row, of whose last call this is the result. A budget that is too small for its
        input is refused."""
        self._running.open = None, None
        now, at = self._running.now, max(self._running.now)
        if self._repeats:
            self._running.graph = Waiting.of(result)
        grown, self._running.grown = getattr(self._running, "grown", None), None
        if grown is not None:  # the next pass is planned anew, or refused
            measurements, plan = now[at]
            peak = measurements.late_bytes if plan is None else peak_of(measurements.sizes, plan)
            if (need := self._before(now, at) + peak) > self.memory:
                warnings.warn(larger(grown, need, self.memory, measurements), stacklevel=7)
            return
        if at == len(self.rows) - 1:
            self._found(now)

    def _found(self, now: "_Running") -> None:
        """Note which kinds of input a pass had. Tell or refuse if it needs more than the budget. A
        pass that left rows out is not refused, since it cannot name what a whole one needs."""
        kinds, key = {k: now[k][0] for k in now}, _first(now)
        late = {k: kind.late_bytes for k, (kind, plan) in now.items() if plan is None}
        need, at = max(((self._before(now, k) + late[k], k) for k in late), default=(0, 0))
        earlier, _ = self._known.get(key, ({}, None))
        new, old = ({(k, id(each[k])) for k in each} for each in (kinds, earlier))
        if old and not old < new and need <= self.memory:
            return
        beyond = [OutputLifetime(k + 1, k + 1) for k in range(len(self.waits), max(kinds) + 1)]
        waits = [[*self.waits, *beyond][k].among([*kinds]) for k in kinds]
        whole = PassMeasurements.of_rows([*kinds.values()], waits)
        if whole.least_bytes <= self.memory:  # the next ones are planned by it
            self.knows(kinds, whole)
        elif old and not (old < new or new <= old):
            self._known[key] = kinds, None
        elif len(kinds) == len(self.rows):
            raise too_small(self.memory, whole.least_bytes, whole, _ANEW)
        if need > self.memory:
            name = self.rows[min(at, len(self.rows) - 1)].names[0]
            warnings.warn(_SURPRISE.format(name, need, self.memory), stacklevel=8)

    def knows(self, kinds: "_Kinds", whole: PassMeasurements) -> None:
        """Note which kinds of input occur together, and what is known of all."""
        at = min(kinds)
        self._known[at, id(kinds[at])] = kinds, whole

    def grows(self, name: str, measurements: PassMeasurements) -> None:
        """Plan anew from the next pass on, since calls of a kind take more than they did."""
        self._running.grown = name
        for key in [key for key, entry in self._known.items() if measurements in entry[0].values()]:
            del self._known[key]

    def _before(self, now: "_Running", at: int) -> int:
        """Return what the rows before one hold, and its own input."""
        inputs = sum(now[k][0].sizes[0].input_bytes for k in now if min(now) < k <= at)
        calls = [(measurements.sizes, plan) for k, (measurements, plan) in now.items() if k < at]
        group = (Part(0, 1),)
        return inputs + sum(held_of(s, p or (Part(0, len(s), 0, group),)) for s, p in calls)

    def _late(self, now: "_Running", at: int) -> tuple[Part, ...]:
        measurements = now[at][0]
        ends = max(now) + 1 == len(self.rows) or getattr(self._running, "ended", None) is now
        if not ends and all(each.is_measured for each, _ in now.values()):
            self._running.ended = now  # the pass has ended without the last row, or behind it
            self._found(now)
        noted = sum(call.noted_bytes for call in measurements.sizes)
        return measurements.late_plan(self.memory - self._before(now, at) - noted)


_Kinds = dict[int, PassMeasurements]
_Running = dict[int, tuple[PassMeasurements, tuple[Part, ...] | None]]
_MOST_KINDS = 32
_ANEW = "call budget() again with such a sample (a share became bytes by the one that it had)"
_SURPRISE = (
    "layer {} was given another kind of input than this pass was planned for: it needs {} bytes of "
    "the {} allowed; give budget() as much if such passes come again"
)


def _first(now: _Running) -> tuple[int, int]:
    at = min(now)
    return at, id(now[at][0])
