"""What one call of a layer takes, in each way to keep it.

The call runs by itself, on the arguments that a model gives it. It runs without a graph, and with
one that is kept whole, lean, or dropped. So measuring holds what one call takes, and the gradients
of its parameters. It leaves no trace.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

from retrograde.errors import BudgetError, CellError
from retrograde.machine import now
from retrograde.models.arguments import Arguments
from retrograde.models.given import Given, tensors_in
from retrograde.models.refill import DROPPED, DROPPED_LEAN, KEPT, LEAN, Row, Unit
from retrograde.models.trials import Leave, make_of, parts_of, tensors_of, texts_of
from retrograde.plan.calls import (
    CallSizes,
    Part,
    Waits,
    Way,
    fastest,
    kept_whole,
    least,
    one_after_the_other,
    peak_of,
)
from retrograde.replay.fingerprints import fingerprints
from retrograde.replay.surroundings import muted_hooks
from retrograde.run.core import unsaved
from retrograde.run.transforms import is_unreal, refuse_sharded, refuse_transforms
from retrograde.sizes.allocations import Phase, measure_phases
from retrograde.sizes.cache import LRUCache
from retrograde.units import format_bytes

Weights = frozenset[Tensor]
_MARK_BYTES = 8  # one number, which tells a generator's position before and after a run
_RERUN_BYTES = 1013  # that no other tensor has
_ROUNDS = 3
_MORE_SECONDS = 0.03  # a call that takes longer in all ways is timed once more, not thrice


class _Phases:
    """The phases of a call, for each way to keep it. It owns the state, and lets it go.

    ``state`` are the arguments that the call before made, or those of the ``first`` call. With
    ``turned``, the gradient of the result has reversed strides. The gradients of ``tied`` weights
    are added to those of other calls.
    """

    def __init__(
        self, unit: Unit, given: Given, state: Sequence[Tensor], tied: Weights, *, first: bool
    ) -> None:
        self.unit, self.given, self.tied, self.first, self.turned = unit, state, tied, first, False
        leaves, self.arguments = given.leaves, Arguments(given.leaves, given.spec)
        self.device = tensors_in(leaves)[0].device
        ours = {id(t): n for n, t in enumerate(state)}
        self.places = [ours.get(id(leaf)) for leaf in leaves]
        self.leaves = [None if id(leaf) in ours else leaf for leaf in leaves]
        self.reruns, self.begun = replace(unit.reruns, counts=False), unit.ambient.capture()
        self.way = KEPT
        self.shown: dict[int, Any] = {}  # by way: fingerprints of result and gradients
        self.state: list[Tensor] = []
        self.result: Any = None
        self.edges: list[Any] = []
        self.root: list[Any] = []
        self.seeds: list[Tensor] = []
        self.like: list[tuple[Any, ...]] = []
        self.for_caller: list[Tensor | None] = []
        self.turns = [False, False]
        self.handed, self.hands_on, self.apart = 0, False, 0
        self.gradients: list[int] = []

    def begin(self, *, turned: bool = False) -> None:
        self.turned = turned
        self.unit.ambient.restore(self.begun)
        if turned:  # the very state, for a copy would be one more beside a turned gradient's
            self.state = [*self.given]
            return
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

    def advance(self) -> None:
        args, kwargs, _ = self._arguments()
        with unsaved(), self.unit.drawing():
            self.result = [t.detach() for t in tensors_in(self.unit.forward(*args, **kwargs))]
        every = self.state, tensors_in(self.result), tensors_in((args, kwargs))
        state, result, given = map(_memory, every)
        self.handed = sum(size for at, size in state.items() if at in result)
        self.hands_on = not given.keys().isdisjoint(result)

    def record(self, way: int) -> None:
        """Run the call as a plan that keeps it in this way does."""
        self.way = _TURNED if self.turned else way
        with torch.enable_grad():
            args, kwargs, wanted = self._arguments()
            self.edges = [get_gradient_edge(t) for t in wanted]
            wanted.clear()
            row, given = Row((Part(0, 1, way),)), Given(args, kwargs)
            unit = replace(self.unit, forward=self._again, reruns=self.reruns)
            self.result, _ = row.run(0, unit, self.unit.forward, given, (), None)

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        torch.empty(_RERUN_BYTES, dtype=torch.uint8, device=self.device)  # marks when it runs again
        return self.unit.forward(*args, **kwargs)

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments, and those of them that want a gradient."""
        pairs = zip(self.leaves, self.places, strict=True)
        leaves = [leaf if n is None else self.state[n] for leaf, n in pairs]
        return self.arguments.enter(leaves)

    def release_result(self) -> None:
        found = [t for t in tensors_in(self.result) if t.requires_grad]
        self.like = [(t.shape, t.dtype, t.device) for t in found]
        self.gradients = [t.nbytes for t in found]
        if found:
            with torch.enable_grad():
                self.root = [get_gradient_edge(Leave.apply(self.seeds, *found))]  # type: ignore[no-untyped-call]
        self.result = None

    def backpropagate(self) -> None:
        root, edges = [*self.root], [*self.edges]
        self.root, self.edges = [], []
        own = [t for t in self.unit.reads if t.requires_grad and t.is_leaf]
        if root and (edges or own):
            for shape, dtype, device in self.like:
                seed = torch.ones(shape[:: -1 if self.turned else 1], dtype=dtype, device=device)
                seed.view(-1)[::3].mul_(0.5)  # a sum alone may have no gradient
                turned = seed.permute(tuple(reversed(range(seed.dim())))) if self.turned else seed
                self.seeds.append(turned)
                del seed, turned
            begin = [torch.empty(0, device=self.device)]
            with as_accumulated(own, self.tied):
                found = torch.autograd.grad(root, [*edges, *own], begin, allow_unused=True)
            self.shown[self.way] = fingerprints(g for g in found if g is not None)
            back = [g for g in found[: len(edges)] if g is not None]
            self.turns[self.turned] = any(not g.is_contiguous() for g in back)
            self.apart = max([0, *(g.untyped_storage().nbytes() - g.nbytes for g in back)])
            self.for_caller = list(found[len(edges) :])

    def compare(self) -> None:
        """Refuse a call whose gradients have other bits in one way to keep it than in another."""
        ways = [shown for way, shown in self.shown.items() if way != _TURNED]
        if any(shown != ways[0] for shown in ways):
            raise CellError(
                f"layer {self.unit.name} computes another gradient when it runs again with the "
                "same arguments: expected the same bits; let it depend on its arguments, "
                "parameters and buffers only, or use memory=None"
            )
        self.unit.reruns.ends_early = self.reruns.ends_early

    def clear(self) -> None:
        self.result, self.state, self.root, self.edges, self.for_caller = None, [], [], [], []


@contextmanager
def as_accumulated(leaves: Sequence[Tensor], tied: Weights = frozenset()) -> Iterator[None]:
    """Silence the hooks of leaves in a block, where ``grad`` takes as much as ``backward``."""
    with muted_hooks(leaves), ExitStack() as stack:
        for t in leaves:
            stack.callback(t.register_hook(partial(_accumulated, t, t in tied)).remove)
        yield


def _accumulated(leaf: Tensor, added: bool, gradient: Tensor) -> Tensor | None:
    """Return what autograd hands to the caller: a sum with what is there, or a copy, if its memory
    has another order."""
    alike = gradient.layout is not torch.strided or gradient.stride() == leaf.stride()
    return torch.empty_like(leaf).copy_(gradient) if added or not alike else None


def _memory(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the bytes of tensors' memory by its address."""
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}


_AGAIN = {KEPT: DROPPED, LEAN: DROPPED_LEAN}  # ways of which both reruns are alike
_TURNED, _FORWARD = -1, -2  # kept, with a turned gradient; and run without a graph
#: The order of measuring. What the others are compared with comes last, when all kernels were used.
_ORDER = (_TURNED, DROPPED_LEAN, DROPPED, LEAN, KEPT)
_WHOLE = slice(-6, None)  # the phases of a call that is kept whole


@dataclass
class Known:
    """What is known of the passes with one kind of input.

    Attributes:
        active: of called layers, those that do not just return their input.
        units, raw, sizes: of their calls, as far as they were measured.
        plans: by budget.
        tied: the weights that several calls have.
        kept: what the model keeps for later: 0 is the first input, k the output of call k − 1.
        lingers: pairs of a call and such a state, which is still there while the call first runs.
        most: bytes that the operations of calls made whose sizes depend on data.
    """

    active: Sequence[int] = ()
    units: list[Unit] = field(default_factory=list)
    sizes: list[CallSizes] = field(default_factory=list)
    plans: dict[int, tuple[Part, ...]] = field(default_factory=dict)
    tied: Weights = frozenset()
    kept: set[int] = field(default_factory=set)
    lingers: set[tuple[int, int]] = field(default_factory=set)
    raw: list[CallSizes] = field(default_factory=list)
    most: dict[int, int] = field(default_factory=dict)

    def add(self, unit: Unit, found: CallSizes, *, last: bool) -> None:
        """Add the next call. What it hands on of what the call before made is held throughout. A
        gradient that it hands on may wait in larger memory, or have to be copied."""
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
        self.units.append(unit)
        self.sizes.append(found)
        turned = last  # the caller's gradient may lie in memory in any way
        waits = sum(p.nbytes for p in self.tied if p.requires_grad)  # their gradients add up
        for at in range(len(self.sizes) - 1, -1, -1) if last else ():
            size = self.sizes[at]
            self.sizes[at] = size.held_back(waits, size.turned_bytes if turned else 0)
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

    def is_ordinary(self, plan: tuple[Part, ...]) -> bool:
        """Return whether a plan is what runs without a budget, which fills autocast's cache."""
        casts = torch.is_autocast_enabled(self.units[0].ambient.device.type)
        ours = casts or any(one.draws_fast for one in self.units)
        return plan == kept_whole(self.sizes) and not ours

    def plan(self, memory: int) -> tuple[Part, ...]:
        """Return the fastest plan within a budget.

        Raises:
            BudgetError: the budget is too small; the message names the least one.
        """
        if memory not in self.plans:
            if memory < self.least_bytes:
                raise too_small(memory, self.least_bytes, self)
            self.plans[memory] = fastest(self.sizes, memory)
        return self.plans[memory]

    def late_plan(self, room: int) -> tuple[Part, ...]:
        """Return the plan of a pass that was measured while it ran, as one group."""
        return (Part(0, len(self.sizes), 0, fastest(self.sizes, max(room, least(self.sizes)))),)

    @classmethod
    def of_rows(cls, kinds: Sequence["Known"], waits: Sequence[Waits]) -> "Known":
        """Return what is known of rows that run one after the other, and wait for each other."""
        if len(kinds) == 1:
            return kinds[0]
        units = [unit for kind in kinds for unit in kind.units]
        return cls(units=units, sizes=one_after_the_other([one.sizes for one in kinds], waits))

    def settle(self) -> None:
        """Count states that the model keeps, or their gradients that wait, once all are known."""
        outputs = [self.sizes[0].input_bytes, *(size.output_bytes for size in self.sizes)]
        for k, size in enumerate(self.sizes):
            there = [i for call, i in self.lingers if call == k and i not in self.kept]
            size = size.first_beside(sum(outputs[i] for i in there))
            size = size.beside(outputs[k + 1] if k + 1 in self.kept else 0)
            self.sizes[k] = size.beside(outputs[0] if k == 0 and 0 in self.kept else 0)


def too_small(memory: int, least: int, kind: Known) -> BudgetError:
    """Return an error that names the least budget, and the layer that needs most."""
    needs = [min(max(w.first_bytes, w.backward_bytes) for w in size.ways) for size in kind.sizes]
    largest = kind.units[needs.index(max(needs))].name
    return BudgetError(
        f"the memory of {memory} bytes ({format_bytes(memory)}) is too small for an input of this "
        f"kind: expected at least {least} bytes ({format_bytes(least)}), most of it for layer "
        f"{largest}; raise the budget, or make the batch smaller",
        least,
    )


class Plans:
    """The measurements and plans of the recent passes through some layers. A copy is empty.

    Calls of layers of one make are measured once, and those of one class are timed once. A further
    call of a class runs once, kept whole. If it allocates and releases what one before did, step by
    step in both passes, it takes what that took.
    """

    def __init__(self) -> None:
        self.kinds: LRUCache[Known] = LRUCache()
        self.sizes: dict[Hashable, CallSizes] = {}
        self.seen: dict[Hashable, dict[Hashable, CallSizes]] = {}  # by class, and what a call did
        self.seconds: dict[Hashable, dict[int, float]] = {}

    def __reduce__(self) -> Any:
        return type(self), ()

    def kind_of(
        self, layers: Sequence[nn.Module], given: Given, find: Callable[[], Known]
    ) -> Known | None:
        """Return what is known of passes with arguments of this kind; ``find`` it if nothing is.
        The result is None if there is nothing to backpropagate, or no memory to measure."""
        parts = parts_of(layers)
        tensors = tensors_of(parts)
        used = (*tensors_in(given.state), *tensors)
        if is_unreal(used) or not any(t.requires_grad for t in used):
            return None
        if any(map(is_lazy, tensors)):
            raise CellError(
                "the layers have parameters without a shape yet: expected all of them; call the "
                "lazy model once before, with memory=None"
            )
        refuse_transforms(used)
        refuse_sharded(parts, used)
        texts = texts_of(parts, tensors)
        key = given.kind(), texts, tuple(map(id, layers))
        return self.kinds.get(key, find, (*parts, *tensors))

    def measure(
        self, unit: Unit, layers: Sequence[nn.Module], given: Given,
        made: Sequence[Tensor | None] | None, tied: Weights, repeats: int | None = None,
    ) -> CallSizes:  # fmt: skip
        """Return the sizes of a call. ``made`` are the tensors that the call before made, or None
        for the first call. One that lies in memory of that call's own input is None."""
        parts, first = parts_of(layers), made is None
        kind = given.kind(), *(t in tied for t in unit.reads if tied)
        made = tensors_in(given.state) if made is None else made
        memory = first or tuple(t if t is None else t.untyped_storage().nbytes() for t in made)
        key = make_of(parts), kind, memory
        if key[0] is None or key not in self.sizes:
            one = _Phases(unit, given, [t for t in made if t is not None], tied, first=first)
            shapes = [[(p.shape, p.requires_grad) for p in m.parameters(False)] for m in parts]
            alike = tuple(map(type, parts)), str(shapes), kind
            with unit.ambient.measured():
                phases, taken = _phases(one)
                seen = self.seen.setdefault((alike, memory), {})
                if key[0] is None and seen:
                    did = _deeds(one, measure_phases(phases[_WHOLE], device=one.device))
                    if did in seen:
                        return seen[did]
                found = measure_phases(phases, device=one.device)
                one.compare()
                if alike not in self.seconds:
                    self.seconds[alike] = _seconds(phases, taken, repeats)
            sizes = self.sizes[key] = _sizes(one, found, self.seconds[alike])
            seen[_deeds(one, found[_WHOLE])] = sizes
        return self.sizes[key]


def _deeds(one: _Phases, phases: Sequence[Phase]) -> tuple[Hashable, ...]:
    """Return what a call did while it was kept whole, and what it has to note."""
    noted = [t.nbytes for t in one.unit.ambient.capture() if isinstance(t, Tensor)]
    left = one.unit.ambient.left_bytes
    own = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in one.unit.reads)
    return str((noted, left)), own, *(phase.sizes.tobytes() for phase in phases)


def _phases(one: _Phases) -> tuple[list[Callable[[], None]], dict[int, float]]:
    """Return the phases of a call, and the seconds that each way takes, to which a run of the
    phases adds. They are those of forward and backward passes, or of a forward pass alone."""
    taken = dict.fromkeys((_FORWARD, *_ORDER), 0.0)

    def clocked(way: int, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start = now(one.device)
            step()
            taken[way] += now(one.device) - start

        return run

    phases = [one.begin, clocked(_FORWARD, one.advance), one.release_result, one.clear]
    for way in _ORDER:
        record = partial(one.record, max(way, KEPT))
        phases += [
            partial(one.begin, turned=way == _TURNED), clocked(way, record), one.release_result,
            lambda: one.state.clear(), clocked(way, one.backpropagate), one.clear,
        ]  # fmt: skip
    return phases, taken


def _seconds(
    phases: Sequence[Callable[[], None]], taken: dict[int, float], repeats: int | None
) -> dict[int, float]:
    """Return the least seconds of the run that was measured, and of some more."""
    rounds, is_long = [{**taken}], sum(taken.values()) > _MORE_SECONDS
    for _ in range(repeats or (1 if is_long else _ROUNDS)):
        taken.update(dict.fromkeys(taken, 0.0))
        for phase in (*phases[:4], *phases[10:]):
            phase()
        rounds.append({**taken})
    return {way: min(each[way] for each in rounds) for way in taken}


def _sizes(one: _Phases, found: Sequence[Phase], seconds: dict[int, float]) -> CallSizes:
    """Return what the phases of a call showed."""
    given, output = found[0].growth(), -found[2].growth()
    on_gpu = one.device.type == "cuda"
    captured = [t for t in one.unit.ambient.capture() if isinstance(t, Tensor)]
    noted = sum(t.nbytes for t in captured if t.is_cuda == on_gpu)  # also held while it runs again
    ways, waits = {}, 0
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
            seconds=max(0.0, seconds[way] - seconds[KEPT]),
            again_seconds=max(seconds[_FORWARD], seconds[_AGAIN.get(way, way)] - seconds[KEPT]),
            keeps_input=-less_state.growth() < given,
            keeps_output=keeps_output,
            dropped=way in (DROPPED, DROPPED_LEAN),
        )
        if way == DROPPED:  # before it reads anything saved, which an addition does not
            begun = [*back.sizes, _RERUN_BYTES].index(_RERUN_BYTES)
            waits = int(back.sizes[:begun].sum()) - noted if begun < len(back.sizes) else 0
    turned = ways[_TURNED].backward_bytes - ways[KEPT].backward_bytes
    return CallSizes(
        input_bytes=given,
        output_bytes=output,
        forward_bytes=found[1].peak() + noted + _MARK_BYTES,
        forward_seconds=seconds[_FORWARD],
        ways=tuple(ways[way] for way in (KEPT, LEAN, DROPPED, DROPPED_LEAN)),
        noted_bytes=noted,
        left_bytes=one.unit.ambient.left_bytes,
        turns=tuple(one.turns),
        turned_bytes=max(0, turned),
        hands_on=one.hands_on,
        handed_bytes=one.handed,
        gradient_bytes=max(waits, sum(one.gradients)) + _MARK_BYTES,
        apart_bytes=one.apart,
        backward_seconds=max(0.0, seconds[KEPT] - seconds[_FORWARD]),
    )
