"""A recurrent module within a byte budget.

On a CPU the layers are *held* ones (:mod:`retrograde.cores.recurrent`): the outputs that the caller
has are their states. Their bytes are counted, and the plan is a closed form. Only what ordinary
backpropagation takes, which a share is of, is measured. All else, such as projections, autocast and
GPUs, runs torch's kernels in ranges by a schedule; what a range takes is measured once for the
shapes, whatever the length, and kept.

Layers of one direction are one recurrence. A layer with two directions needs the whole of the layer
below it, so there every layer is a recurrence of its own, and the sequences between them are held.
These, and their gradients, come off the budget first. Weights are measured on stand-ins, so that
the graph of computed ones is left for the gradient.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from retrograde.cores.dropout import Dropout, draw_key
from retrograde.cores.fastest import Candidate, candidates, fit_fastest, footprints
from retrograde.cores.fused import Fused, Kernel, Layers, Mode, run_torch
from retrograde.cores.ordinary import LONGEST_MEASURED
from retrograde.cores.recurrent.bytes import Shape, sums_at_once
from retrograde.cores.recurrent.core import HeldLayers
from retrograde.cores.recurrent.masks import Drawn, Hashed
from retrograde.cores.recurrent.plan import HeldPlan, Planner, Sequences
from retrograde.cores.recurrent.ranges import run_held, ways_of
from retrograde.cores.timing import Paces, time_calls
from retrograde.errors import CellError
from retrograde.nn.ordinary_memory import Ordinary, last_weights, measure_ordinary, stand_ins
from retrograde.plan.fit import Curve, Fit, Footprint, refusal
from retrograde.run.autograd import run_schedule
from retrograde.run.core import Core
from retrograde.run.inputs import Inputs
from retrograde.run.layout import Rows
from retrograde.run.transforms import is_unreal
from retrograde.scan.block_lengths import Way, sequential_way
from retrograde.schedule import Schedule
from retrograde.units import Memory, as_bytes, asks_for_all

if TYPE_CHECKING:
    from retrograde.nn.recurrent import Recurrent

__all__ = ["Call", "Part", "Plan", "StackFit", "check_measurable"]

Tensors = list[Tensor]
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class StackFit:
    """What a budget buys for layers with two directions, each a recurrence of its own.

    Attributes:
        layers: how each layer is run; its bytes are its share's, or on a CPU those of all layers.
            Empty where torch's own module is run.
        peak_bytes: what is predicted, at most the budget.
        budget_bytes: the budget.
        ordinary_bytes: what ordinary backpropagation takes.
        minimum_bytes: the least budget.
    """

    layers: tuple[Fit, ...]
    peak_bytes: int
    budget_bytes: int
    ordinary_bytes: int
    minimum_bytes: int

    @property
    def ordinary(self) -> bool:
        """Whether torch's own module is run."""
        return not self.layers

    @property
    def forward_steps(self) -> int:
        """Forward steps of all layers, the first sweeps included."""
        return sum(fit.forward_steps for fit in self.layers)


@dataclass(frozen=True)
class Plan:
    """How a module is to be run.

    Attributes:
        parts: for each recurrence what runs it, and its schedule; none to run torch's own module.
        fit: what was found for the budget; None where the schedule was given.
    """

    parts: tuple[tuple[Kernel | HeldPlan, Schedule], ...]
    fit: Fit | StackFit | None = None


class Call:
    """One call of a module.

    Args:
        module: one of ours.
        x: inputs (T, B, I), or packed (rows, I).
        state: the initial state: (h,), or (h, c), each (layers · directions, B, H).
        sizes: of a packed batch: how many sequences have each step.
        weights: of the module, as torch orders them; by default as they were last computed.
        given: whether the initial state was given, and is not just zeros.
        sorts: whether a packed batch had to be sorted.
        memory: the budget; None for what ordinary backpropagation takes.
    """

    def __init__(
        self,
        module: "Recurrent",
        x: Tensor,
        state: State,
        sizes: Tensor | None = None,
        *,
        weights: Tensors | None = None,
        given: bool = True,
        sorts: bool = False,
        memory: Memory | None = None,
    ) -> None:
        self.module, self.x, self.state, self.sizes, self.memory = module, x, state, sizes, memory
        self.weights = last_weights(module) if weights is None else weights
        self.given, self.sorts = given, sorts
        self.length = len(x) if sizes is None else len(sizes)
        # Lengths of one power of two are measured once; from 256 on all.
        self.measured_length = 1 << min(self.length, LONGEST_MEASURED).bit_length() - 1
        self.batch = state[0].shape[1]
        self.both = bool(module.bidirectional)
        self.at_once = sums_at_once(self.length, self.batch)
        self.drops = bool(module.dropout and module.training and module.num_layers > 1)

    def follow(self, schedule: Schedule) -> Plan:
        """The plan that follows a given schedule."""
        return Plan(((run_torch, schedule),) * len(self._nets(self.weights)))

    def plan(self) -> Plan:
        """The fastest plan that fits the budget.

        Raises:
            BudgetError: the memory is too little for these shapes; the message names the least.
        """
        key = repr(self.memory), self.length, len(self.x), self._shapes()
        return cast(Plan, self.module._fits.get(key, self._find))

    def run(self, plan: Plan) -> tuple[Tensor, State]:
        """The outputs, laid out as the inputs are, and the final state."""
        x, finals, nets = self.x, [], self._nets(_apart(self.weights))
        key = draw_key(x.device) if self.drops else None
        states = self._states()
        for number, (runner, schedule) in enumerate(plan.parts):
            dropout, core = self._dropout(number, key), cast(Core, None)
            if isinstance(runner, HeldPlan):
                layout = Rows(self.length, self.sizes, self.both)
                core = self._held(runner, nets[number], layout, dropout)
            else:
                layout = Rows(self.length, self.sizes, self.both, dropout is not None)
                core = Fused(nets[number], runner, dropout, self.sizes is not None)
            (x,), final = run_schedule(core, schedule, [x], states[number], layout)
            finals.append(final)
        if len(finals) == 1:
            return x, tuple(finals[0])
        return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def run_back(self, way: Literal["sequential", "scan"]) -> tuple[Tensor, State]:
        """The same with no budget: all that can be kept is, and gradients are found in a given way.

        What is dropped is drawn as torch draws it.
        """
        x, finals, nets = self.x, [], self._nets(_apart(self.weights))
        for number, (net, state) in enumerate(zip(nets, self._states(), strict=True)):
            layout = Rows(self.length, self.sizes, self.both)
            ways = ways_of(way, net[0], self.length, self.batch)
            x, final = run_held(net, layout, x, state, ways, self._drawn(number, net[0].count))
            finals.append(final)
        if len(finals) == 1:
            return x, tuple(finals[0])
        return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def _drawn(self, number: int, count: int) -> Drawn | None:
        """What is dropped before the layers of a recurrence, drawn as torch draws it."""
        if not self.drops or (self.both and number == 0):
            return None
        layers = [0] if self.both else [*range(1, count)]
        width = self.state[0].shape[-1] * (2 if self.both else 1)
        like = self.x.new_empty(*self.x.shape[:-1], width)
        return Drawn.like(layers, like, float(self.module.dropout))

    def of_length(self, length: int, memory: Memory | None) -> "Call":
        """A call of another length, in another budget, to be planned and not to be run."""
        other = copy.copy(self)
        other.length, other.memory = length, memory
        other.at_once = sums_at_once(length, self.batch)
        return other

    def paces(self, repeats: int) -> Paces:
        """How long held layers take to run forward, to record, and to go back."""
        nets, (state,) = self._nets(stand_ins(self.weights)), self._states()
        state = [s.detach() for s in state]
        given: Tensors = []
        found: Tensors = []

        def run(steps: int) -> None:
            given[:] = [x := self.x[:steps].detach().requires_grad_(self.x.requires_grad)]
            rows, ways = (
                Rows(steps, None, self.both),
                ways_of("sequential", nets[0][0], steps, self.batch),
            )
            found[:] = [run_held(nets[0], rows, x, state, ways)[0]]

        def forward(steps: int) -> None:
            with torch.no_grad():
                run(steps)

        def back(steps: int) -> None:
            y = found.pop()
            leaves = [w for net in nets[0] for w in net.weights if w.requires_grad]
            leaves += given if self.x.requires_grad else []
            torch.autograd.grad(y, leaves, torch.ones_like(y))

        return time_calls((forward, run, back), self.length, repeats, self.x.device)

    def ordinary_bytes(self) -> int:
        """What ordinary backpropagation of so many steps takes."""
        known: Ordinary = self._known("ordinary", self._ordinary)
        rows = self.length if self.sizes is None else len(self.x)
        return known(self.length, rows)

    def _find(self) -> Plan:
        if self.holds:
            return self.fit_held()
        known, parts = self.measured()
        if len(parts) > 1:
            return self._divide(parts, known)
        kernel, found = parts[0].fit(self.memory)
        return Plan(() if found.ordinary else ((kernel, found.schedule),), found)

    @property
    def holds(self) -> bool:
        """Whether held layers can run this, whose bytes are known beforehand."""
        weight, module = self.weights[1], self.module
        plain = not module.proj_size and not torch.is_autocast_enabled(weight.device.type)
        real = weight.dtype in (torch.float32, torch.float64)
        return plain and real and weight.device.type == "cpu" and module.backward != "scan"

    def _held(
        self, plan: HeldPlan, net: tuple[Layers, ...], layout: Rows, dropout: Dropout | None
    ) -> HeldLayers:
        ways = [Way("sequential", max(1, plan.block // self.batch))] * net[0].count
        masks = None if dropout is None else Hashed(dropout)
        return HeldLayers(
            net,
            layout,
            self.batch,
            ways,
            kept=plan.kept,
            masks=masks,
            means=plan.means,
            at_once=self.at_once,
        )

    def _held_planner(self, ordinary: Ordinary) -> Planner:
        """What plans for held layers."""
        module, nets = self.module, self._nets(self.weights)
        first, many = nets[0][0], len(nets) > 1
        shape = Shape(
            kind=first.mode,
            batch=self.batch,
            width=self.x.shape[-1],
            size=module.hidden_size,
            count=first.count,
            tracks=len(nets[0]),
            item=self.x.element_size(),
            threads=torch.get_num_threads(),
            needs_x=self.x.requires_grad,
            straight=self.x.is_contiguous(),
            drops=self.drops and not many,
            at_once=self.at_once,
        )
        upper = replace(shape, width=2 * shape.size, needs_x=True, straight=True, first=self.drops)
        kind, dtype = shape.kind, self.weights[0].dtype
        way = sequential_way(kind, self.batch, shape.width, shape.size, dtype, "cpu")
        return Planner(
            shapes=(shape, *[upper] * (len(nets) - 1)),
            most=way.block * self.batch,
            extra=self._extra_bytes(self.state),
            gradient_copy=ordinary.gradient_copy,
            torchs=not self.drops,
        )

    def fit_held(self) -> Plan:
        """The plan for held layers.

        Raises:
            BudgetError: the memory is too little for these shapes; the message names the least.
        """
        check_measurable([self.x, *self.state, *self.weights])
        known: Ordinary = self._known("ordinary", self._ordinary)
        offsets = None if self.sizes is None else [0, *self.sizes.cumsum(0).tolist()]
        lengths = Sequences(self.length, self.batch, offsets)
        ordinary = self.ordinary_bytes()
        held, found = self._held_planner(known).fit(lengths, self.memory, ordinary)
        fit = found[0]
        if len(found) > 1 or (self.both and self.module.num_layers > 1):
            layers = () if held is None else found
            fit_of_all = StackFit(
                layers, fit.peak_bytes, fit.budget_bytes, fit.ordinary_bytes, fit.minimum_bytes
            )
            return Plan(
                () if held is None else tuple((held, one.schedule) for one in found), fit_of_all
            )
        return Plan(() if held is None else ((held, fit.schedule),), fit)

    def measured(self) -> "tuple[Ordinary, list[Part]]":
        """What ordinary backpropagation takes; every recurrence, and what its ranges take.

        Raises:
            CellError: as :func:`check_measurable`.
        """
        check_measurable([self.x, *self.state, *self.weights])
        x, sizes = self._probe()
        known: Ordinary = self._known("ordinary", self._ordinary)
        return known, self._parts(x, sizes, known)

    def _probe(self) -> tuple[Tensor, Tensor | None]:
        """Inputs to measure by: as given, or those of a packed batch of sequences of one length."""
        if self.sizes is None:
            return self.x.detach().requires_grad_(self.x.requires_grad), None
        rows = self.x.new_zeros(self.length * self.batch, self.x.shape[1])
        rows.requires_grad_(self.x.requires_grad)
        return rows, torch.full((self.length,), self.batch)

    def _ordinary(self) -> Ordinary:
        x, packed = self.x, self.sizes is not None
        if packed:
            x = x.new_zeros(self.measured_length, self.batch, x.shape[1]).requires_grad_(
                x.requires_grad
            )
        state = self.state if self.given else None
        weights = stand_ins(self.weights)
        return measure_ordinary(
            self.module, weights, x, state, self.measured_length, packed, self.sorts, self.memory
        )

    def _parts(self, x: Tensor, sizes: Tensor | None, ordinary: Ordinary) -> "list[Part]":
        """Every recurrence, and what its ranges take."""
        parts, nets, states = [], self._nets(stand_ins(self.weights)), self._states()
        key = torch.zeros((), dtype=torch.int64, device=x.device) if self.drops else None
        for number, net in enumerate(nets):
            if number == 1:
                width = 2 * self.state[0].shape[-1]
                x = x.new_zeros(*x.shape[:-1], width, requires_grad=True)
            dropout = self._dropout(number, key)
            known = candidates(
                net,
                self.batch,
                extra_bytes=self._extra_bytes(states[number]),
                way=self._way(),
                dropout=dropout,
                packed=sizes is not None,
                whole=not self.drops and len(nets) == 1,
            )
            read = Rows(self.length, sizes, self.both, dropout is not None).read([x])
            state = [s.detach() for s in states[number]]
            part = Part(known, read, state, ordinary(self.length, len(self.x)))
            part.gradient_copy = ordinary.gradient_copy
            alike = number > 0, *(w.requires_grad for one in net for w in one.weights)
            part.sizes = self._known(alike, partial(part.measured, self.memory))
            parts.append(part)
        return parts

    def _divide(self, parts: "list[Part]", known: Ordinary) -> Plan:
        """Every layer's share of the budget; or torch's own module where that is no slower."""
        memory, ordinary = self.memory, known(self.length, len(self.x))
        budget = ordinary if memory is None else as_bytes(memory, ordinary)
        held, minima = self._between(), [part.minimum_bytes for part in parts]
        least = held + sum(minima)
        usual = ordinary + known.gradient_copy * self.length + self._extra_bytes(self.state)
        minimum = least if self.drops else min(least, usual)
        if budget < minimum and not self.drops and asks_for_all(memory):
            budget = usual
        if budget < minimum:
            raise refusal(self.length, memory, budget, minimum, ordinary)
        whole = Plan((), StackFit((), usual, budget, ordinary, minimum))
        if budget < least:
            return whole
        wants = [part.most_bytes - part.minimum_bytes + 1 for part in parts]
        shares = [
            at_least + (budget - least) * want // sum(wants)
            for at_least, want in zip(minima, wants, strict=True)
        ]
        found = [part.fit(share) for part, share in zip(parts, shares, strict=True)]
        if not self.drops and budget >= usual:
            time = sum(part.sizes[0].least_time(self.length) for part in parts)
            if time <= sum(fit.time for _, fit in found):
                return whole
        fits = tuple(fit for _, fit in found)
        peak = held + sum(fit.peak_bytes for fit in fits)
        chosen = tuple((kernel, fit.schedule) for kernel, fit in found)
        return Plan(chosen, StackFit(fits, peak, budget, ordinary, minimum))

    def _between(self) -> int:
        """The bytes of the sequences between layers and of the gradient of one; and of the initial
        states' gradients, which wait for one another."""
        rows, width = self.x[..., 0].numel(), 2 * self.state[0].shape[-1]
        whole = rows * width * self.x.element_size() * self.module.num_layers
        return whole + 2 * sum(s.nbytes for s in self.state)

    def _extra_bytes(self, state: Sequence[Tensor]) -> int:
        """What a packed batch takes besides: parts of the state where some sequences have ended,
        and their gradients; what is sorted, and sorted back."""
        if self.sizes is None:
            return 0
        return (6 if self.sorts else 3) * sum(s.nbytes for s in state)

    def _nets(self, weights: Tensors) -> list[tuple[Layers, ...]]:
        """The layers of every recurrence, over given weights."""
        module = self.module
        count = module.num_layers * (2 if self.both else 1)
        stack = Layers(cast(Mode, module.mode), weights, count, module.bias)
        if not self.both:
            return [(stack,)]
        return [(stack[2 * k], stack[2 * k + 1]) for k in range(module.num_layers)]

    def _states(self) -> list[Tensors]:
        """The initial state of every recurrence."""
        if not self.both or self.module.num_layers == 1:
            return [list(self.state)]
        return [list(parts) for parts in zip(*(s.split(2) for s in self.state), strict=True)]

    def _dropout(self, number: int, key: Tensor | None) -> Dropout | None:
        """What is dropped before the layers of a recurrence."""
        if key is None or (self.both and number == 0):
            return None
        return Dropout(float(self.module.dropout), key, number, first=self.both)

    def _way(self) -> Literal["sequential", "scan"] | None:
        """How to go backward, where that was asked."""
        backward = self.module.backward
        if backward == "auto":
            return "scan" if self.x.is_cuda else None
        return backward

    def _known(self, what: Any, find: Callable[[], Any]) -> Any:
        """What was learnt of these shapes; no more than the budget has room for."""
        key = what, repr(self.memory), self.measured_length, self._shapes()
        return self.module._fits.get(key, find)

    def _shapes(self) -> Any:
        """All that the bytes of a range depend on, but for its length."""
        module, x, kind = self.module, self.x, self.x.device.type
        return (
            (module.backward, self.drops and module.dropout, x.shape[1:]),
            (self.sizes is None, self.given, self.sorts, self.at_once),
            *(tuple(s.shape) for s in self.state),
            *((t.is_contiguous(), t.stride(-1), 0 in t.stride()) for t in (x, *self.state)),
            *((t.dtype, t.requires_grad) for t in (x, *self.state)),
            *((w.dtype, w.requires_grad, w.is_contiguous()) for w in self.weights),
            (x.device, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            torch.get_num_threads(),  # each has room of its own
        )


def check_measurable(tensors: Tensors) -> None:
    """Refuse to measure what has no bytes, or takes none.

    Args:
        tensors: inputs, state and weights.

    Raises:
        CellError: they are not real, or none requires a gradient.
    """
    if is_unreal(tensors):
        places = ", ".join(sorted({str(t.device) for t in tensors}))
        raise CellError(
            f"the input or a weight is fake or on the meta device ({places}): expected real "
            "tensors, for what they take is measured; call the module with real ones, and ask again"
        )
    if not any(t.requires_grad for t in tensors):
        raise CellError(
            "there is nothing to backpropagate: expected a weight or an input that requires a "
            "gradient; give the input as training will, with requires_grad_()"
        )


def _apart(weights: Tensors) -> Tensors:
    """Weights that autograd tells apart, one that is used twice or computed from another too: each
    must be given the share of the gradient that is its own."""
    if all(w.is_leaf for w in weights) and len({id(w) for w in weights}) == len(weights):
        return weights
    return [w.view_as(w) for w in weights]


@dataclass
class Part:
    """A recurrence, the cores that can run it, and what their ranges take."""

    cores: list[Candidate]
    inputs: Inputs
    state: Tensors
    ordinary: int
    sizes: list[Footprint] = field(default_factory=list)
    gradient_copy: int = 0

    def measured(self, memory: Memory | None) -> list[Footprint]:
        """What ranges take that a budget has room for, to be kept for other lengths."""
        return footprints(self.cores, self.inputs, self.state, self._ordinary(), memory)

    @property
    def minimum_bytes(self) -> int:
        return min(size.least_bytes(len(self.inputs)) for size in self._sizes())

    @property
    def most_bytes(self) -> int:
        """What torch's kernel would use."""
        return max(self.minimum_bytes, self._sizes()[0].overhead_bytes(len(self.inputs)))

    def fit(self, memory: Any) -> tuple[Kernel, Fit]:
        """The fastest kernel and its schedule within a budget."""
        sizes = self._sizes()
        number, found = fit_fastest(self.cores, sizes, self.inputs, self.state, memory)
        self.sizes[:] = sizes  # with the lengths that were measured
        return cast(Fused, self.cores[number].core).kernel, found

    def _sizes(self) -> list[Footprint]:
        more = {"ordinary": self._ordinary(), "gradient_copy": self.gradient_copy}
        return [replace(size, **more) for size in self.sizes]  # type: ignore[arg-type]

    def _ordinary(self) -> Curve:
        return Curve(((len(self.inputs), self.ordinary),))
