"""What one call of a layer takes, in each way to keep it.

The call runs by itself, on the arguments that a model gives it. It runs without a graph, and with
one that is kept whole, lean, or dropped. So measuring holds what one call takes, and the gradients
of its parameters. It leaves no trace.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograde.errors import BudgetError, NotExactError
from retrograde.machine import MEASURING, tell
from retrograde.models.rows.arguments import Arguments, ResultBytes, packed, tensors_in
from retrograde.models.rows.phases import WHOLE, Phases, Weights, phases_of, sizes_of
from retrograde.models.rows.rerun import Recomputable, RecomputedCall
from retrograde.models.rows.trials import (
    architecture_key,
    by_name,
    options_key,
    parts_of,
    tensors_of,
)
from retrograde.plan.call_planner import fastest, least
from retrograde.plan.calls import (
    CallSizes,
    OutputLifetime,
    Part,
    kept_whole,
    one_after_the_other,
    peak_of,
    seconds_of,
)
from retrograde.run.core import raise_again
from retrograde.run.transforms import is_unreal, refuse_sharded, refuse_transforms
from retrograde.sizes.allocations import Phase, measure_phases
from retrograde.sizes.cache import LRUCache, Recent
from retrograde.units import format_bytes

_ALIKE = 65 / 64  # bytes of two calls
_ROUNDS = 3
_MORE_SECONDS = 0.03  # a call that takes longer in all ways is timed once more, not thrice


@dataclass
class PassMeasurements:
    """What is known of the passes with one kind of input. Units and sizes are those of the calls
    that were measured, ``raw`` each by itself. State 0 is the first input, state k the output of
    call k − 1."""

    active: Sequence[int] = ()  # of called layers, those that do not just return their input
    units: list[Recomputable] = field(default_factory=list)
    sizes: list[CallSizes] = field(default_factory=list)
    plans: dict[int, tuple[Part, ...]] = field(default_factory=dict)  # by budget
    tied: Weights = frozenset()  # the weights that several calls have
    kept: set[int] = field(default_factory=set)  # the states that the model keeps for later
    lingers: set[tuple[int, int]] = field(default_factory=set)  # calls, and states still there
    raw: list[CallSizes] = field(default_factory=list)
    most: dict[int, int] = field(default_factory=dict)  # bytes that calls made, if data decide them

    def may_grow(self, at: int) -> bool:
        """Return whether the sizes of a call may depend on data."""
        return at in self.most or any(size.packed_bytes for size in self.raw[at : at + 1])

    @contextmanager
    def watched(
        self, at: int, layers: Sequence[nn.Module], arguments: Arguments,
        made: Sequence[Tensor | None] | None,
    ) -> Iterator[list[str]]:  # fmt: skip
        """Notice, of a call whose sizes depend on data, if it takes more than any before (rule 12).
        Then it is measured anew, and its name is in the list that the block gets. The block may put
        it there itself."""
        grew = list[str]()
        with ResultBytes() if at in self.most else nullcontext() as counted:
            yield grew
        more = counted and counted.nbytes > self.most[at] * _ALIKE + self.raw[at].noted_bytes
        if not (more or grew):
            return
        with MEASURING:
            self.raw[at] = Plans().measure(self.units[at], layers, arguments, made, self.tied)
            self.most |= {at: counted.nbytes} if counted else {}
            every = [*zip(self.units, self.raw, strict=True)]
            self.units, self.sizes, self.raw = [], [], []
            for unit, sizes in every:
                self.add(unit, sizes)
            self.settle()
            self.plans.clear()
            vars(self).pop("least_bytes", None)
        grew[:] = [self.units[at].name]

    def is_whole(self, at: int, call: RecomputedCall | None, made: Sequence[Tensor | None]) -> bool:
        """Return whether a call was measured with an input as bits, and has another one."""
        if not self.raw[at].packed_bytes or (call is not None and call.packed):
            return False
        return all(packed(t) is t for t in made)

    def add(self, unit: Recomputable, sizes: CallSizes) -> None:
        """Add the next call. What it hands on of what the call before made is held throughout. A
        gradient that it hands on may wait in larger memory."""
        if unit.made_bytes is not None:
            self.most.setdefault(len(self.raw), unit.made_bytes)
        self.raw.append(sizes)
        handed = sizes.handed_bytes if self.sizes else 0
        for at in range(len(self.sizes) - 1, -1, -1) if sizes.gradient_slack_bytes else ():
            self.sizes[at] = self.sizes[at].held_back(sizes.gradient_slack_bytes)
            if not self.sizes[at].aliases_input:
                break
        if self.sizes:
            less = self.sizes[-1].output_bytes - handed
            self.sizes[-1] = replace(self.sizes[-1], output_bytes=less)
        input_bytes, left_bytes = sizes.input_bytes - handed, sizes.left_bytes + handed
        sizes = replace(sizes, input_bytes=input_bytes, left_bytes=left_bytes)
        self.units.append(unit)
        self.sizes.append(sizes)

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

    def seconds(self, memory: int) -> tuple[float, float]:
        """Return the predicted times of a pass both ways, within a budget and without one."""
        ordinary = sum(size.ordinary_seconds for size in self.sizes)
        return ordinary + seconds_of(self.sizes, self.plan(memory)), ordinary

    def is_ordinary(self, plan: tuple[Part, ...]) -> bool:
        """Return whether a plan is what runs without a budget, which fills autocast's cache."""
        casts = torch.is_autocast_enabled(self.units[0].surroundings.device.type)
        return not casts and plan == kept_whole(self.sizes)

    def plan(self, memory: int) -> tuple[Part, ...]:
        """Return the fastest plan within a budget. One that is too small is refused."""
        if memory not in self.plans:
            if memory < self.least_bytes:
                raise too_small(memory, self.least_bytes, self)
            self.plans[memory] = fastest(self.sizes, memory)
        return self.plans[memory]

    def late_plan(self, room: int) -> tuple[Part, ...]:
        """Return the plan of a pass that was measured while it ran, as one group."""
        return (Part(0, len(self.sizes), 0, fastest(self.sizes, max(room, least(self.sizes)))),)

    @property
    def late_bytes(self) -> int:
        """The least that such a pass takes, since it drops all of its calls."""
        return peak_of(self.sizes, self.late_plan(0))

    @classmethod
    def of_rows(
        cls, kinds: Sequence["PassMeasurements"], waits: Sequence[OutputLifetime]
    ) -> "PassMeasurements":
        """Return what is known of rows that run one after the other, and wait for each other.
        Autograd adds a weight's second gradient to its first in new memory, and further ones in
        place. So where two later rows have used a weight, its gradients take nothing more."""
        if len(kinds) == 1:
            return kinds[0]
        sizes, later, replaced = list[list[CallSizes]](), Counter[Tensor](), set[Any]()
        for kind in reversed(kinds):
            less, row = sum(p.nbytes for p in kind.tied if later[p] > 1), list[CallSizes]()
            for unit, size in zip(kind.units, kind.sizes, strict=True):
                names = by_name(unit.surroundings.changing).keys()
                left = size.left_bytes - unit.surroundings.left_bytes * (names <= replaced)
                row.append(replace(size.held_back(-less), left_bytes=left))
                replaced |= names
            sizes.insert(0, row)
            later.update({p for unit in kind.units for p in unit.reads if p.requires_grad})
        units = [unit for kind in kinds for unit in kind.units]
        return cls(units=units, sizes=one_after_the_other(sizes, waits))

    def settle(self) -> None:
        """Count, once all calls are known, states that the model keeps, and gradients that wait or
        have to be copied."""
        outputs = [self.sizes[0].input_bytes, *(size.output_bytes for size in self.sizes)]
        waits = sum(p.nbytes for p in self.tied if p.requires_grad)  # their gradients add up
        turned = True  # the caller's gradient may lie in memory in any way
        for k, size in reversed([*enumerate(self.sizes)]):
            size = size.held_back(waits, size.reorder_bytes if turned else 0)
            turned = size.reorders_gradient[turned]
            there = [i for call, i in self.lingers if call == k and i not in self.kept]
            size = size.first_beside(sum(outputs[i] for i in there))
            size = size.beside(outputs[k + 1] if k + 1 in self.kept else 0)
            self.sizes[k] = size
        if 0 in self.kept:
            self.sizes[0] = replace(self.sizes[0].beside(outputs[0]), input_bytes=0)


def too_small(
    memory: int, least: int, measurements: PassMeasurements, do: str = "raise the budget"
) -> BudgetError:
    """Return an error that names the least budget, and the layer that needs most."""
    ways = (size.ways for size in measurements.sizes)
    needs = [min(max(w.first_bytes, w.backward_bytes) for w in each) for each in ways]
    largest = measurements.units[needs.index(max(needs))].name
    return BudgetError(
        f"the memory of {memory} bytes ({format_bytes(memory)}) is too small for an input of this "
        f"kind: expected at least {least} bytes ({format_bytes(least)}), most of it for layer "
        f"{largest}; {do}, or make the batch smaller",
        least,
    )


def larger(name: str, need: int, room: int, measurements: PassMeasurements) -> str:
    """Return the warning of a call that takes more than was planned (rule 12)."""
    return (
        f"layer {name} takes more for these data than for all data of the same shapes before: this "
        f"pass needs {need} bytes of the {room} allowed; the next ones keep the budget if it is at "
        f"least {measurements.least_bytes}; let the sample, or the first call, have the data that "
        "need the most"
    )


class Plans:
    """The measurements and plans of the recent passes through some layers. A copy is empty.

    Calls of layers of one make are measured once, and those of one class are timed once. A further
    call of a class runs once, kept whole. If it allocates what one before did, it takes the same.
    """

    def __init__(self) -> None:
        self.kinds: LRUCache[PassMeasurements] = LRUCache()
        self.sizes: Recent[CallSizes] = Recent()
        self.seen: Recent[dict[Hashable, CallSizes]] = Recent()  # by class, and what a call did
        self.seconds: Recent[dict[int, float]] = Recent()
        self.changing = by_name(())  # the attributes that calls change

    def __reduce__(self) -> Any:
        return type(self), ()

    def kind_of(
        self, layers: Sequence[nn.Module], arguments: Arguments,
        find: Callable[[], PassMeasurements],
    ) -> PassMeasurements | None:  # fmt: skip
        """Return what is known of passes with arguments of this kind; ``find`` it if nothing is.
        The result is None if there is nothing to backpropagate, or no memory to measure."""
        modules = parts_of(layers)
        tensors = tensors_of(modules)
        state = tensors_in(arguments.state)
        if is_unreal(state):
            return None
        if any(map(is_lazy, tensors)):
            raise NotExactError(
                "the layers have parameters without a shape yet: expected all of them; call the "
                "lazy model once before, with memory=None"
            )
        refuse_transforms(used := (*state, *tensors))
        moved = {id(slot.read()) for slot in self.changing.values()}  # others in the next call
        key = arguments.kind(), options_key(modules, tensors, moved), tuple(map(id, layers))
        if (known := self.kinds.known(key)) is not None:
            return known
        if is_unreal(tensors) or not any(t.requires_grad for t in used):
            return None
        refuse_sharded(modules, used)
        stay = (t for t in tensors if id(t) not in moved)
        return self.kinds.get(key, find, (*modules, *stay))

    def measure(
        self, unit: Recomputable, layers: Sequence[nn.Module], arguments: Arguments,
        made: Sequence[Tensor | None] | None, tied: Weights, repeats: int | None = None,
        spare: list[Any] | None = None,
    ) -> CallSizes:  # fmt: skip
        """Return the sizes of a call. ``made`` are the tensors that the call before made, None for
        one in memory of its own input, or None for the first call. If the call has to be run, what
        is ``spare`` is let go before."""
        modules, is_first = parts_of(layers), made is None
        self.changing |= by_name(unit.surroundings.changing)
        kind = arguments.kind(), *(t in tied for t in unit.reads if tied)
        kind += () if is_first else tuple(packed(t) is t for t in made or ())
        made = tensors_in(arguments.state) if made is None else made
        memory = is_first or tuple(t if t is None else t.untyped_storage().nbytes() for t in made)
        key = architecture_key(modules), kind, memory
        if key[0] is None or key not in self.sizes:
            tell(f"measuring layers, once for inputs of this kind: {unit.name}")
            (spare or []).clear()
            call = Phases(unit, arguments, [t for t in made if t is not None], tied, first=is_first)
            shapes = [[(p.shape, p.requires_grad) for p in m.parameters(False)] for m in modules]
            alike = tuple(map(type, modules)), str(shapes), kind
            try:
                with unit.surroundings.measured():
                    phases, taken = phases_of(call)
                    seen = self.seen[alike, memory] = self.seen.get((alike, memory), {})
                    if key[0] is None and seen:
                        did = _deeds(call, measure_phases(phases[WHOLE], device=call.device))
                        if did in seen:
                            return seen[did]
                    measured = measure_phases(phases, device=call.device)
                    call.compare()
                    if alike not in self.seconds:
                        self.seconds[alike] = _seconds(phases, taken, repeats)
            except RuntimeError as error:
                raise_again(error, f"layer {unit.name}")
            sizes = self.sizes[key] = sizes_of(call, measured, self.seconds[alike])
            seen[_deeds(call, measured[WHOLE])] = sizes
        return self.sizes[key]


def _deeds(call: Phases, phases: Sequence[Phase]) -> tuple[Hashable, ...]:
    """Return what a call did while it was kept whole, and what it has to note."""
    noted = [t.nbytes for t in call.unit.surroundings.capture() if isinstance(t, Tensor)]
    left = call.unit.surroundings.left_bytes
    forms = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in call.unit.reads)
    return str((noted, left)), forms, *(phase.sizes.tobytes() for phase in phases)


def _seconds(
    phases: Sequence[Callable[[], None]], taken: dict[int, float], repeats: int | None
) -> dict[int, float]:
    """Return the least seconds of the run that was measured, and of some more."""
    rounds, is_long = [{**taken}], sum(taken.values()) > _MORE_SECONDS
    for _ in range(repeats or (1 if is_long else _ROUNDS)):
        taken.update(dict.fromkeys(taken, 0.0))
        for phase in (*phases[:5], *phases[12:]):
            phase()
        rounds.append({**taken})
    return {way: min(each[way] for each in rounds) for way in taken}
