"""The parts of a model that get a share of its budget, and their calls in the run on a sample."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import BudgetError, CellError, NotExactError
from retrograde.machine import MEASURING, unpacked
from retrograde.models.budget.call_order import Layers
from retrograde.models.budget.replace_modules import as_if_recorded, replace_module, twin, wrapped
from retrograde.models.rows.arguments import memory_of, tensors_in
from retrograde.models.rows.call_sizes import PassMeasurements
from retrograde.models.rows.joint_plan import JointPlan
from retrograde.models.rows.layer_run import LayerRun, OnSample, Tied
from retrograde.models.rows.rest_of_model import RestOfModel
from retrograde.models.rows.trials import by_name
from retrograde.plan.calls import OutputLifetime, peak_of
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.weights import last_weights
from retrograde.replay.surroundings import Slot
from retrograde.run.transforms import refuse_transforms, uncompiled
from retrograde.sizes.allocations import measure
from retrograde.sizes.cache import signature
from retrograde.sizes.ordinary import FEW_BYTES, FEW_STEPS
from retrograde.torch_private import flat_names

_USEFUL = 0.9
_MOST_CALLS = 2000  # of one plan, which takes seconds for more


class Watched(ABC):
    """A module or a run of layers that will get a part of a budget, and its calls."""

    def __init__(self, name: str, called_rows: Iterable[LayerRun] = ()) -> None:
        self.name, self.title, self.called_rows = name, name, [*called_rows]
        self.calls = Counter[Hashable]()  # by kind of input
        self.sizes: dict[Hashable, tuple[int, int]] = {}  # least and ordinary bytes of each kind
        self.held: dict[tuple[Hashable, int], int] = {}  # by kind and budget, between the passes
        self.seconds: tuple[float, float] | None = None  # of a pass, within its part and without

    def watched(self, rest: RestOfModel) -> AbstractContextManager[None]:
        """Watch its calls within a block; ``rest`` notes what is held besides."""
        return nullcontext()

    @abstractmethod
    def give(self, part: int) -> "Iterable[tuple[Watched, int]]":
        """Give it this part of the budget, in bytes, from now on. Return what has a share of it."""

    @property
    def minimum_bytes(self) -> int:
        return max(least for least, _ in self.sizes.values())

    @property
    def ordinary_bytes(self) -> int:
        return max(ordinary for _, ordinary in self.sizes.values())

    @property
    def useless(self) -> bool:
        """Whether a budget would save less than a tenth of its bytes."""
        return bool(self.calls) and self.minimum_bytes > _USEFUL * self.ordinary_bytes

    def used(self, part: int) -> int:
        """Return the bytes of all calls if each has this part of the budget. Those that wait for
        the backward pass take what they hold."""
        waiting, most = 0, 0
        for kind, calls in self.calls.items():
            size = min(part, self.sizes[kind][1])
            stays = self.held.get((kind, size), size)
            waiting, most = waiting + calls * stays, max(most, size - stays)
        ordinary = self.ordinary_bytes
        return waiting + most if part >= ordinary else min(waiting + most, self.used(ordinary))

    def part(self, share: int, of: int) -> int:
        """Return the least bytes, plus ``share / of`` of what it could use beyond them."""
        least = self.minimum_bytes
        return least + max(0, self.ordinary_bytes - least) * share // of

    def count(self, measured: PassMeasurements) -> None:
        """Count a pass of layers that were measured."""
        self.sizes[id(measured)] = measured.least_bytes, measured.ordinary_bytes
        self.calls[id(measured)] += 1


class WatchedModule(Watched):
    """A recurrent module that will become its ``twin``. It always gets a budget."""

    useless = False

    def __init__(self, name: str, module: nn.RNNBase) -> None:
        super().__init__(name)
        self.module, self.title = module, name or type(module).__name__
        self.twin: BudgetedRNN = self._named(lambda: twin(module))

    def give(self, part: int) -> Iterable[tuple[Watched, int]]:
        self.twin.memory = part
        replace_module(self.module, self.twin)
        return [(self, part)]

    @contextmanager
    def watched(self, rest: RestOfModel) -> Iterator[None]:
        """Watch torch's forward pass of the module, even if a derived class wraps it."""
        module_class, base = type(self.module), wrapped(type(self.module))
        self.calls.clear()
        if base is None:
            own = Slot(vars(self.module), "forward", "forward")
            before = own.read()
            own.write(self._watch(self.module.forward, rest))
            yield
            own.write(before)
            return
        run = self._watch(partial(base.forward, self.module), rest)
        inner = type(
            base.__name__, (base,), {"forward": lambda _, *args, **more: run(*args, **more)}
        )
        self.module.__class__ = type(module_class.__name__, (module_class, inner), {})
        try:
            yield
        finally:
            self.module.__class__ = module_class

    def _watch(self, run: Callable[..., Any], rest: RestOfModel) -> Callable[..., Any]:
        """Return a forward pass that runs the module, notes its arguments, and records nothing."""

        @uncompiled
        def forward(*args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            tensors = tensors_in(values)
            used = [*tensors, *last_weights(self.module)]
            if not (torch.is_grad_enabled() and any(t.requires_grad for t in used)):
                return run(*args, **kwargs)
            refuse_transforms(used)
            # The bytes of packed sequences depend on their sizes besides the shapes.
            packed = [value for value in values if isinstance(value, PackedSequence)]
            sizes = (tuple(sequence.batch_sizes.tolist()) for sequence in packed)
            kind = (*map(signature, tensors), *sizes)
            if kind not in self.sizes:
                self.sizes[kind] = self._named(lambda: self._ask(args, kwargs))
            self.calls[kind] += 1
            if self.calls[kind] == FEW_STEPS:  # it is called step by step
                self._note_held(kind, partial(run, *args, **kwargs), (args, kwargs))
            rest.begin(values, counts=False)
            with torch.no_grad():
                outputs = run(*args, **kwargs)
            outputs = as_if_recorded(outputs, used)
            rest.end(outputs)
            return outputs

        return forward

    def _named(self, ask: Callable[[], Any]) -> Any:
        """Return an answer; a refusal names the module."""
        try:
            return ask()
        except CellError as refusal:
            raise NotExactError(f"{self.title}: {refusal}") from refusal

    def _ask(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
        """Return the least bytes for a call, and those of ordinary backpropagation."""
        now, names = vars(self.module), flat_names(self.module)  # perhaps a hook's
        vars(self.twin).update({name: now[name] for name in names if name in now})
        ordinary: int = self.twin._fit_within("100%", *args, **kwargs).ordinary_bytes
        try:
            least: int = self.twin._fit_within(1, *args, **kwargs).minimum_bytes
        except BudgetError as refusal:
            least = refusal.minimum_bytes
        return min(least, ordinary), ordinary

    def _note_held(self, kind: Hashable, plain: Callable[[], Any], arguments: Any) -> None:
        """Note what the graph of a call holds beyond its results, within the least budget and
        without one, if that is little."""
        self.twin.memory = self.sizes[kind][0]
        calls: Sequence[Any] = (partial(self.twin, *arguments[0], **arguments[1]), plain)
        for call, size in zip(calls, self.sizes[kind], strict=True):
            if size <= FEW_BYTES:
                with MEASURING, unpacked(), torch.enable_grad():
                    results = sum(memory_of(tensors_in(call())).values())
                    graph_bytes = measure(call).retained_bytes - results
                self.held[kind, size] = min(size, max(0, graph_bytes))


class WatchedRow(Watched):
    """A run of layers, which the model calls one after the other. In the run on the sample all of
    their calls are dropped."""

    def __init__(self, layers: Layers, tied: Tied, leaves: Sequence[Slot]) -> None:
        self.row = LayerRun([(c.name, c.module) for c in layers], [c.slot for c in layers], tied)
        self.row.plans.changing |= by_name(leaves)
        name = " … ".join(call.name for call in layers[:: max(1, len(layers) - 1)])
        super().__init__(name, [self.row])

    def give(self, part: int) -> Iterable[tuple[Watched, int]]:
        self.row.joint_plan = joint_plan = JointPlan([self.row], part, [part])
        if len(self.times) == 1:
            joint_plan.knows({0: self.times[0].kind}, self.times[0].kind)
            self.seconds = self.times[0].kind.seconds(part)
        return [(self, part)]

    @contextmanager
    def watched(self, rest: RestOfModel) -> Iterator[None]:
        self.row.sample = sample = OnSample(rest)
        self.calls.clear()
        self.row.install()
        yield
        self.row.sample = None
        times = [*map(partial(_Time, self), sample.kinds, sample.numbers[1:])]
        self.times = [time for time in times if time.kind.is_measured]  # the model ran to their end
        self.is_whole = self.times == times
        for measurements in {id(time.kind): time.kind for time in self.times}.values():
            if id(measurements) not in self.sizes:
                measurements.settle()
        for time in self.times:
            self.count(time.kind)


@dataclass(frozen=True, eq=False)
class _Time:
    """One time that the model runs a row, and the numbers of its calls."""

    row: WatchedRow
    kind: PassMeasurements
    numbers: Sequence[int]


class WatchedRows(Watched):
    """Runs of layers that the model calls one after the other, perhaps several times. They have one
    plan, since what the later ones held is free when the earlier ones go back."""

    def __init__(
        self, times: Sequence[_Time], waits: Sequence[OutputLifetime],
        earlier: "Sequence[WatchedRows]" = (),
    ) -> None:  # fmt: skip
        self.rows = [*dict.fromkeys(time.row for time in times)]
        names = ", ".join(row.name for row in self.rows)
        super().__init__(names, [row.row for row in self.rows])
        self.times, self.kinds, self.waits = times, [time.kind for time in times], waits
        self.all = PassMeasurements.of_rows(self.kinds, waits)
        self.count(self.all)
        self.passes = [*(rows for rows in earlier if rows.rows == self.rows), self]
        for rows in self.passes[:-1]:
            self.sizes |= rows.sizes

    def give(self, part: int) -> Iterable[tuple[Watched, int]]:
        plan, start, shares = self.all.plan(part), 0, [0] * len(self.times)
        self.seconds = self.all.seconds(part)
        smallest = sum(time.row.minimum_bytes for time in self.times)
        rest = max(1, sum(time.row.ordinary_bytes for time in self.times) - smallest)
        if part >= smallest:
            share = min(rest, part - smallest)
            shares = [time.row.part(share, rest) for time in self.times]
        joint_plan = JointPlan([time.row.row for time in self.times], part, shares, self.waits)
        for rows in self.passes:
            joint_plan.knows(dict(enumerate(rows.kinds)), rows.all)
        peaks = dict.fromkeys(self.rows, 0)
        for time in self.times:
            time.row.row.joint_plan, stop = joint_plan, start + len(time.kind.sizes)
            row_plan = [p.moved(-start) for p in plan if start <= p.start < stop]
            peaks[time.row] = max(peaks[time.row], peak_of(time.kind.sizes, row_plan))
            start = stop
        return peaks.items()

    @classmethod
    def join(
        cls, watched: Sequence[Watched], elsewhere: RestOfModel, earlier: Sequence[Watched]
    ) -> list[Watched]:
        """Return the parts, with rows in place of each row, if these do not overlap. ``earlier``
        are those of the pass before."""
        rows = [row for row in watched if isinstance(row, WatchedRow) and row.times]
        times = sorted((time for row in rows for time in row.times), key=lambda one: one.numbers[0])
        ended = all(row.is_whole for row in rows)
        apart = all(time.numbers[-1] < after.numbers[0] for time, after in pairwise(times))
        few = sum(len(time.kind.sizes) for time in times) <= _MOST_CALLS
        if len(times) < 2 or not (ended and apart and few):
            return [*watched]
        waits = elsewhere.waits([time.numbers for time in times])
        same = [rows for rows in earlier if isinstance(rows, cls)]
        return [*(other for other in watched if other not in rows), cls(times, [*waits], same)]
