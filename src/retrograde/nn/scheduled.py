"""The plan of a recurrent module's call: which core runs it, and by which schedule.

On a CPU, and on a GPU where there are compiled kernels, the layers are *held* ones
(:mod:`retrograde.cores.recurrent`): the outputs that the caller has are their states. Their bytes
are counted, and the plan is a closed form. Only what ordinary backpropagation takes, which a share
is of, and what a GPU's forward pass takes besides, is measured. All else, such as projections,
autocast, wide layers and packed batches on a GPU, runs torch's kernels in ranges by a schedule;
what a range takes is measured once for the shapes, whatever the length, and kept.

The sequences between layers of two directions, and their gradients, come off the budget first.
Weights are measured on stand-ins, so that the graph of computed ones is left for the gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from retrograde.cores.fastest import Candidate, candidates, fit_fastest, footprints
from retrograde.cores.fused import Fused
from retrograde.cores.ordinary import LONGEST_MEASURED
from retrograde.cores.recurrent.bytes import Means, Shape
from retrograde.cores.recurrent.forward import forward_curve
from retrograde.cores.recurrent.plan import Planner, Sequences
from retrograde.cores.vendor import Kernel, Layers, copied_bytes, laid_out
from retrograde.kernels.cells import Weights
from retrograde.nn.call import Call, Plan, StackFit
from retrograde.nn.ordinary_memory import Ordinary, measure_ordinary
from retrograde.nn.weights import stand_ins
from retrograde.plan.fit import Curve, Fit, Footprint, refusal
from retrograde.run.inputs import Inputs
from retrograde.run.layout import Rows
from retrograde.scan.block_lengths import sequential_plan
from retrograde.units import Memory, as_bytes, asks_for_all

__all__ = ["Part", "find_plan", "fit_held", "measure_parts", "ordinary_bytes"]

Tensors = list[Tensor]
T = TypeVar("T")


def find_plan(call: Call, memory: Memory) -> Plan:
    """The fastest plan of a call that fits a budget; remembered by the module. Raises BudgetError,
    which names the least budget."""

    def find() -> Plan:
        if call.runs_held:
            return fit_held(call, memory)
        ordinary, parts = measure_parts(call, memory)
        if len(parts) > 1:
            return _divide(call, memory, parts, ordinary)
        kernel, found = parts[0].fit(memory)
        return Plan(() if found.ordinary else ((kernel, found.schedule),), found)

    key = repr(memory), call.length, len(call.x), call.shapes()
    return cast(Plan, call.module._fits.get(key, find))


def ordinary_bytes(call: Call, memory: Memory | None) -> int:
    """What ordinary backpropagation takes, measured within a budget."""
    return _ordinary(call, memory)(call.length, len(call.x))


def fit_held(call: Call, memory: Memory | None) -> Plan:
    """The plan of held layers within a budget. Raises BudgetError, which names the least budget, or
    CellError as :func:`~retrograde.nn.call.check_measurable`."""
    call.check_measurable()
    offsets = None if call.sizes is None else [0, *call.sizes.cumsum(0).tolist()]
    lengths = Sequences(call.length, call.batch, offsets)
    ordinary = _ordinary(call, memory)
    usual = ordinary(call.length, len(call.x))
    held, found = _held_planner(call, ordinary, memory).fit(lengths, memory, usual)
    parts = () if held is None else tuple((held, one.schedule) for one in found)
    fit = found[0]
    if len(found) == 1 and not (call.bidirectional and call.module.num_layers > 1):
        return Plan(parts, fit)
    layers = () if held is None else found
    sizes = fit.peak_bytes, fit.budget_bytes, fit.ordinary_bytes, fit.minimum_bytes
    return Plan(parts, StackFit(layers, *sizes))


def _held_planner(call: Call, ordinary: Ordinary, memory: Memory | None) -> Planner:
    nets, x = call.nets(call.weights), call.x
    first, many = nets[0][0], len(nets) > 1
    by: Means = "loops" if x.device.type == "cpu" else "torch"
    vendor: list[tuple[Curve, ...]] = [()] * len(nets)
    copied = 0
    if by == "torch":
        measure = partial(_forward_bytes, nets, call, memory)
        vendor = _known(call, memory, "forward", measure)
        copied = sum(copied_bytes(one, apart=True) for net in nets for one in net)
    shape = Shape(
        kind=first.mode,
        batch=call.batch,
        width=x.shape[-1],
        size=call.module.hidden_size,
        count=first.count,
        tracks=len(nets[0]),
        item=x.element_size(),
        threads=torch.get_num_threads(),
        needs_x=x.requires_grad,
        straight=x.is_contiguous(),
        drops=call.has_dropout and not many,
        at_once=call.at_once,
        onward=by,
        back=(by,) * first.count,
        vendor=vendor[0],
    )
    upper = replace(
        shape, width=2 * shape.size, needs_x=True, straight=True, first=call.has_dropout
    )
    uppers = [replace(upper, vendor=own) for own in vendor[1:]]
    kind, dtype = x.device.type, call.weights[0].dtype
    back = sequential_plan(shape.kind, call.batch, shape.width, shape.size, dtype, kind)
    return Planner(
        shapes=(shape, *uppers),
        most=back.block * call.batch,
        extra=_extra_bytes(call, call.state) + copied,
        gradient_copy=ordinary.gradient_copy,
        torchs=not call.has_dropout,
    )


def _forward_bytes(
    nets: list[tuple[Layers, ...]], call: Call, memory: Memory | None
) -> list[tuple[Curve, ...]]:
    """For each recurrence, what the vendor's forward pass of each layer takes, by steps: measured
    on few, within the budget as soon as that tells."""
    found = []
    for net in nets:
        curves = []
        for k in range(net[0].count):
            parts = [w.detach() for w in laid_out(net[0][k]).weights]
            weights = Weights.of(net[0].mode, parts)
            state = [call.x.new_zeros(call.batch, weights.size) for _ in call.state]
            curves.append(forward_curve(weights, state, call.length, memory))
        found.append(tuple(curves))
    return found


@dataclass
class Part:
    """A recurrence, the cores that can run it, and what their ranges take.

    Attributes:
        inputs: to measure by.
        ordinary: the bytes of ordinary backpropagation of the whole call.
        gradient_copy: as :class:`~retrograde.nn.ordinary_memory.Ordinary` has it.
        sizes: a footprint for each core, shared with the module's cache; :meth:`fit`
            overwrites it with footprints that know further lengths.
    """

    cores: list[Candidate]
    inputs: Inputs
    state: Tensors
    ordinary: Curve
    gradient_copy: int
    sizes: list[Footprint]

    @property
    def minimum_bytes(self) -> int:
        return min(size.least_bytes(len(self.inputs)) for size in self._sizes())

    @property
    def most_bytes(self) -> int:
        """What torch's kernel would use."""
        return max(self.minimum_bytes, self._sizes()[0].overhead_bytes(len(self.inputs)))

    def fit(self, memory: Memory | None) -> tuple[Kernel, Fit]:
        """The fastest kernel and its schedule within a budget."""
        sizes = self._sizes()
        number, found = fit_fastest(self.cores, sizes, self.inputs, self.state, memory)
        self.sizes[:] = sizes  # with the lengths that were measured
        return cast(Fused, self.cores[number].core).kernel, found

    def _sizes(self) -> list[Footprint]:
        """The footprints, with what ordinary backpropagation takes at this length."""
        more = self.gradient_copy
        return [replace(size, ordinary=self.ordinary, gradient_copy=more) for size in self.sizes]


def measure_parts(call: Call, memory: Memory | None) -> tuple[Ordinary, list[Part]]:
    """Measure what ordinary backpropagation takes, and what the ranges of every recurrence take.
    Raises CellError as :func:`~retrograde.nn.call.check_measurable`."""
    call.check_measurable()
    ordinary = _ordinary(call, memory)
    usual = Curve(((call.length, ordinary(call.length, len(call.x))),))
    x, packed = call.x.detach(), call.sizes
    if packed is not None:  # a packed batch is measured on sequences of one length
        x = x.new_zeros(call.length * call.batch, x.shape[1])
        packed = torch.full((call.length,), call.batch, device="cpu")
    x.requires_grad_(call.x.requires_grad)
    backward = None if call.module.backward == "auto" else call.module.backward
    parts, nets = [], call.nets(stand_ins(call.weights))
    key = torch.zeros((), dtype=torch.int64, device=x.device) if call.has_dropout else None
    for number, (net, state) in enumerate(zip(nets, call.states(), strict=True)):
        if number == 1:
            width = 2 * call.state[0].shape[-1]
            x = x.new_zeros(*x.shape[:-1], width, requires_grad=True)
        dropout = call.dropout(number, key)
        copied = sum(copied_bytes(one, apart=dropout is not None) for one in net)
        net = tuple(laid_out(one, apart=dropout is not None) for one in net)
        known = candidates(
            net,
            call.batch,
            extra_bytes=_extra_bytes(call, state) + copied,
            backward=backward,
            dropout=dropout,
            packed=packed is not None,
            whole=not call.has_dropout and len(nets) == 1,
        )
        read = Rows(call.length, packed, call.bidirectional, dropout is not None).read([x])
        start = [s.detach() for s in state]
        alike = number > 0, *(w.requires_grad for one in net for w in one.weights)
        measure = partial(footprints, known, read, start, usual, memory)
        sizes = _known(call, memory, alike, measure)
        parts.append(Part(known, read, start, usual, ordinary.gradient_copy, sizes))
    return ordinary, parts


def _divide(call: Call, memory: Memory | None, parts: list[Part], known: Ordinary) -> Plan:
    """Every layer's share of the budget; or torch's own module where that is no slower."""
    ordinary = known(call.length, len(call.x))
    budget = ordinary if memory is None else as_bytes(memory, ordinary)
    held, minima = _between(call), [part.minimum_bytes for part in parts]
    least = held + sum(minima)
    usual = ordinary + known.gradient_copy * call.length + _extra_bytes(call, call.state)
    minimum = least if call.has_dropout else min(least, usual)
    if budget < minimum and not call.has_dropout and asks_for_all(memory):
        budget = usual
    if budget < minimum:
        raise refusal(call.length, memory, budget, minimum, ordinary)
    whole = Plan((), StackFit((), usual, budget, ordinary, minimum))
    if budget < least:
        return whole
    wants = [part.most_bytes - part.minimum_bytes + 1 for part in parts]
    shares = [
        at_least + (budget - least) * want // sum(wants)
        for at_least, want in zip(minima, wants, strict=True)
    ]
    found = [part.fit(share) for part, share in zip(parts, shares, strict=True)]
    if not call.has_dropout and budget >= usual:
        time = sum(part.sizes[0].least_time(call.length) for part in parts)
        if time <= sum(fit.time for _, fit in found):
            return whole
    fits = tuple(fit for _, fit in found)
    peak = held + sum(fit.peak_bytes for fit in fits)
    chosen = tuple((kernel, fit.schedule) for kernel, fit in found)
    return Plan(chosen, StackFit(fits, peak, budget, ordinary, minimum))


def _between(call: Call) -> int:
    """The bytes of the sequences between layers, of one gradient of such a sequence, and of the
    initial states' gradients. These are held until all layers' are there."""
    rows, width = call.x[..., 0].numel(), 2 * call.state[0].shape[-1]
    whole = rows * width * call.x.element_size() * call.module.num_layers
    return whole + 2 * sum(s.nbytes for s in call.state)


def _extra_bytes(call: Call, state: Sequence[Tensor]) -> int:
    """The further bytes of a packed batch: states of sequences that have ended, their gradients,
    and sorted copies."""
    if call.sizes is None:
        return 0
    return (6 if call.sorts else 3) * sum(s.nbytes for s in state)


def _ordinary(call: Call, memory: Memory | None) -> Ordinary:
    """What ordinary backpropagation takes, by length; measured at another length if that serves."""
    shapes, steps = call.shapes(), 1
    while steps <= LONGEST_MEASURED:
        found = call.module._fits.known(("ordinary", repr(memory), steps, shapes))
        if isinstance(found, Ordinary) and found.serves(call.measured_length):
            return found
        steps *= 2
    return _known(call, memory, "ordinary", partial(measure_ordinary, call, memory))


def _known(call: Call, memory: Memory | None, what: Any, find: Callable[[], T]) -> T:
    """What was learnt of these shapes; no more than the budget has room for."""
    key = what, repr(memory), call.measured_length, call.shapes()
    return cast(T, call.module._fits.get(key, find))
