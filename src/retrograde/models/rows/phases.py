"""The phases of one call, which runs by itself in each way to keep it, to be measured.

It runs without a graph, and with one that is kept whole, lean, or dropped. All ways must give the
same bits of gradients (rule 11).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from retrograde.errors import NotExactError
from retrograde.machine import now
from retrograde.models.rows.arguments import (
    Arguments,
    RerunArguments,
    memory_of,
    tensors_in,
    with_nodes,
)
from retrograde.models.rows.rerun import DROPPED, DROPPED_LEAN, KEPT, LEAN, Recomputable
from retrograde.models.rows.rest_of_model import filling
from retrograde.models.rows.running_plan import RunningPlan
from retrograde.models.rows.trials import Leave
from retrograde.plan.calls import CallSizes, Part, Way
from retrograde.replay.fingerprints import fingerprints
from retrograde.replay.surroundings import muted_hooks
from retrograde.run.core import unsaved
from retrograde.sizes.allocations import Phase
from retrograde.torch_private import gradients_of

Weights = frozenset[Tensor]
TURNED = -1  # a way: kept, with a turned gradient
RERUN_BYTES = 1013  # that no other tensor has
_MARK_BYTES = 8  # one number, which tells a generator's position before and after a run
_AGAIN = {KEPT: DROPPED, LEAN: DROPPED_LEAN}  # ways of which both reruns are alike
FORWARD = -2  # a way: run without a graph
ORDINARY = -3  # kept, without what a plan does around the call
#: The order of measuring. What the others are compared with comes last, when all kernels were used.
ORDER = (TURNED, DROPPED_LEAN, DROPPED, LEAN, KEPT)
WHOLE = slice(-7, None)  # the phases of a call that is kept whole


class Phases:
    """The phases of a call, for each way to keep it. It frees ``state`` before it measures, so
    callers pass their only reference.

    ``state`` are the arguments that the call before made, or those of the ``first`` call. The
    gradients of ``tied`` weights are added to those of other calls.
    """

    def __init__(
        self, unit: Recomputable, arguments: Arguments, state: Sequence[Tensor], tied: Weights, *,
        first: bool,
    ) -> None:  # fmt: skip
        self.unit, self.given, self.tied, self.first = unit, state, tied, first
        leaves, self.arguments = arguments.leaves, RerunArguments(arguments)
        self.device = tensors_in(leaves)[0].device
        ours = {id(t): n for n, t in enumerate(state)}
        self.places = [ours.get(id(leaf)) for leaf in leaves]
        self.leaves = [None if id(leaf) in ours else leaf for leaf in leaves]
        for argument in () if first else self.arguments.each:
            argument.has_node |= argument.wants  # a leaf: only where the layers before are left out
        self.reruns, self.begun = replace(unit.reruns, counts=False), unit.surroundings.capture()
        self.before = [(slot, slot.read()) for slot in unit.surroundings.changing]
        self.lengths = [*map(len, unit.surroundings.growing)]
        self.shown: dict[int, Any] = {}  # by way: fingerprints of result and gradients
        self.state: list[Tensor] = []
        self.result: Any = None
        self.edges: list[Any] = []
        self.root: list[Any] = []
        self.seeds: list[Tensor] = []
        self.like: list[tuple[Any, ...]] = []
        self.for_caller: list[Tensor | None] = []
        self.reorders_gradient = [False, False]
        self.aliases_input = False
        self.own_seconds = 0.0  # of the call itself, without what a plan does around it
        self.handed = self.apart = self.gradient_bytes = self.packed = 0

    def begin(self, way: int = KEPT) -> None:
        self.way, around = way, self.unit.surroundings
        around.restore(self.begun)
        for slot in around.moving:  # in memory that a call before left, which this may let go
            slot.write(pytree.tree_map_only(Tensor, _copied, slot.read()))
        if way == TURNED:  # the very state, for a copy would be one more beside a turned gradient's
            self.state = [*self.given]
        elif self.first:  # its memory is the caller's, and may be larger
            self.state = [t.detach().clone() for t in self.given]
        else:  # which copies each memory once
            self.state = deepcopy([t.detach() for t in self.given])

    def advance(self) -> None:
        args, kwargs, _ = self._arguments()
        with unsaved():
            self.result = [t.detach() for t in tensors_in(do_most(self.unit, *args, **kwargs))]
        every = self.state, tensors_in(self.result), tensors_in((args, kwargs))
        state, result, arguments = map(memory_of, every)
        self.handed = sum(size for at, size in state.items() if at in result)
        self.aliases_input = not arguments.keys().isdisjoint(result)

    def record(self) -> None:
        """Run the call as a plan that keeps it in this way does."""
        with torch.enable_grad():
            args, kwargs, wanted = self._arguments()
            self.edges = [get_gradient_edge(t) for t in wanted]
            wanted.clear()
            row, entered = RunningPlan((Part(0, 1, max(self.way, KEPT)),)), Arguments(args, kwargs)
            unit = replace(self.unit, forward=self._again, reruns=self.reruns)
            made = [t for t, n in zip(entered.leaves, self.places, strict=True) if n is not None]
            forward, made = partial(self._timed, do_most, self.unit), [] if self.first else made
            self.result, call = row.run(0, unit, forward, entered, made, None)
            self.packed = (call and call.packed) or self.packed

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        torch.empty(RERUN_BYTES, dtype=torch.uint8, device=self.device)  # marks when it runs again
        return do_most(self.unit, *args, **kwargs)

    def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = now(self.device)
        result = function(*args, **kwargs)
        self.own_seconds += now(self.device) - start
        return result

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments, and those of them that want a gradient."""
        pairs = zip(self.leaves, self.places, strict=True)
        leaves = [leaf if n is None else self.state[n] for leaf, n in pairs]
        return self.arguments.enter(leaves)

    def release_result(self) -> None:
        left = [t for slot in self.unit.surroundings.left for t in tensors_in(slot.read())]
        for grown, length in zip(self.unit.surroundings.growing, self.lengths, strict=True):
            left += tensors_in(grown[length:])
        left = [t for t in left if t.grad_fn is not None]
        outputs = [t for t in (*tensors_in(self.result), *left) if t.requires_grad]
        self.like = [(t.shape, t.dtype, t.device) for t in outputs]
        self.gradient_bytes = sum(t.nbytes for t in outputs)
        if outputs:
            with torch.enable_grad():
                self.root = [get_gradient_edge(Leave.apply(self.seeds, *outputs))]  # type: ignore[no-untyped-call]
        self.result = None

    def put_back(self) -> None:
        """Let go what the call left in attributes and lists."""
        for grown, length in zip(self.unit.surroundings.growing, self.lengths, strict=True):
            del grown[length:]
        for slot, value in self.before:
            slot.write(value)

    def backpropagate(self) -> None:
        root, edges, turned = [*self.root], [*self.edges], self.way == TURNED
        self.root, self.edges = [], []
        weights = [t for t in self.unit.reads if t.requires_grad and t.is_leaf]
        if root and (edges or weights):
            for shape, dtype, device in self.like:
                seed = torch.ones(shape[:: -1 if turned else 1], dtype=dtype, device=device)
                seed.view(-1)[::3].mul_(0.5)  # a sum alone may have no gradient
                self.seeds.append(seed.permute([*range(seed.dim())][::-1]) if turned else seed)
                del seed
            begin = [torch.empty(0, device=self.device)]
            with as_accumulated(weights, self.tied):
                gradients = self._timed(gradients_of, root, [*edges, *weights], begin)
            self.shown[self.way] = fingerprints(g for g in gradients if g is not None)
            back = [g for g in gradients[: len(edges)] if g is not None]
            self.reorders_gradient[turned] = any(not g.is_contiguous() for g in back)
            self.apart = max([0, *(g.untyped_storage().nbytes() - g.nbytes for g in back)])
            self.for_caller = list(gradients[len(edges) :])

    def compare(self) -> None:
        """Refuse a call whose gradients have other bits in one way to keep it than in another."""
        ways = [shown for way, shown in self.shown.items() if way != TURNED]
        if any(shown != ways[0] for shown in ways):
            raise NotExactError(
                f"layer {self.unit.name} computes another gradient when it runs again with the "
                "same arguments: expected the same bits; let it depend on its arguments, "
                "parameters and buffers only, or use memory=None"
            )
        self.unit.reruns.ends_early = self.reruns.ends_early

    def clear(self) -> None:
        self.result, self.state, self.root, self.edges, self.for_caller = None, [], [], [], []


def phases_of(call: Phases) -> tuple[list[Callable[[], None]], dict[int, float]]:
    """Return the phases of a call, and the seconds that each way takes, to which a run of the
    phases adds. They are those of forward and backward passes, or of a forward pass alone."""
    taken = dict.fromkeys((ORDINARY, FORWARD, *ORDER), 0.0)

    def clocked(way: int, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start, call.own_seconds = now(call.device), 0.0
            step()
            taken[way] += now(call.device) - start
            taken[ORDINARY] += call.own_seconds if way == KEPT else 0.0

        return run

    releases = call.release_result, call.put_back
    phases = [call.begin, clocked(FORWARD, call.advance), *releases, call.clear]
    for way in ORDER:
        phases += [
            partial(call.begin, way), clocked(way, call.record), *releases,
            lambda: call.state.clear(), clocked(way, call.backpropagate), call.clear,
        ]  # fmt: skip
    return phases, taken


def sizes_of(call: Phases, phases: Sequence[Phase], seconds: dict[int, float]) -> CallSizes:
    """Return what the phases of a call showed."""
    around, on_gpu = call.unit.surroundings, call.device.type == "cuda"
    noted, found_bytes = (  # also held while it runs again; what the call found in attributes
        sum(t.nbytes for t in tensors_in(values) if t.is_cuda == on_gpu)
        for values in ([*around.capture()], [slot.read() for slot in around.moving])
    )
    input_bytes, output = phases[0].growth() - found_bytes, -phases[2].growth()
    ways, waits = {}, 0
    for k, way in enumerate(ORDER):
        start = 6 + 7 * k
        record, less_result, less_left, less_state, back = phases[start : start + 5]
        last = start + 5  # what is released then is the caller's
        remains = record.growth(before=last) + less_result.growth() + less_left.growth()
        remains += found_bytes
        keeps_output = -less_result.growth() < output
        ways[way] = Way(
            held_bytes=max(0, remains - (output if keeps_output else 0)),
            first_bytes=record.peak() + noted,
            backward_bytes=remains + back.peak(start, last),
            seconds=max(0.0, seconds[way] - seconds[KEPT]),
            again_seconds=max(seconds[FORWARD], seconds[_AGAIN.get(way, way)] - seconds[KEPT]),
            keeps_input=-less_state.growth() < input_bytes,
            keeps_output=keeps_output,
            dropped=way in (DROPPED, DROPPED_LEAN),
        )
        if way == DROPPED:  # before it reads anything saved, which an addition does not
            begun = [*back.sizes, RERUN_BYTES].index(RERUN_BYTES)
            waits = int(back.sizes[:begun].sum()) - noted if begun < len(back.sizes) else 0
    turned = ways[TURNED].backward_bytes - ways[KEPT].backward_bytes
    return CallSizes(
        input_bytes=input_bytes,
        output_bytes=output,
        forward_bytes=phases[1].peak() + noted + _MARK_BYTES,
        forward_seconds=seconds[FORWARD],
        ways=tuple(ways[way] for way in (KEPT, LEAN, DROPPED, DROPPED_LEAN)),
        noted_bytes=noted,
        left_bytes=call.unit.surroundings.left_bytes,
        reorders_gradient=tuple(call.reorders_gradient),
        reorder_bytes=max(0, turned),
        aliases_input=call.aliases_input,
        handed_bytes=call.handed,
        gradient_bytes=max(waits, call.gradient_bytes) + _MARK_BYTES,
        gradient_slack_bytes=call.apart,
        packed_bytes=call.packed,
        ordinary_seconds=seconds[ORDINARY],
    )


def _copied(t: Tensor) -> Tensor:
    with torch.enable_grad():
        return with_nodes([t.detach().clone()])[0] if t.requires_grad else t.clone()


def do_most(unit: Recomputable, *args: Any, **kwargs: Any) -> Any:
    """Run a unit so that it does the most that random numbers may decide."""
    with filling(unit.fill):
        return unit.forward(*args, **kwargs)


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
