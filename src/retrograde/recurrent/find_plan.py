"""The plan of a recurrent module's call: which core runs it, and by which schedule.

On a CPU, and on a GPU with compiled kernels, the layers are *held* layers
(:mod:`retrograde.recurrent`): the outputs that the caller holds are their states. Their bytes
are counted, and their plan is a closed form. Only two sizes are measured: the memory of ordinary
backpropagation, which a fraction refers to, and the forward pass of a GPU.

All other calls run torch's kernels in ranges by a schedule. Among them are projections, autocast,
and on a GPU float64 and packed batches. The bytes of their ranges are measured once for the shapes
and the budget, and cached. Calls of like length share them (``Call.measured_length``). Layers in
two directions are then refused below what torch's own module takes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from retrograde.errors import BudgetError
from retrograde.kernels import kernels
from retrograde.kernels.cells import Weights
from retrograde.plan.fit import Fit, refusal
from retrograde.plan.footprint import Curve, Footprint
from retrograde.recurrent.bytes import Backend, Layer, stacked, sums_at_once
from retrograde.recurrent.call import Call, Plan
from retrograde.recurrent.dropout import Place
from retrograde.recurrent.fastest import candidate, fit_measured
from retrograde.recurrent.forward import forward_curve
from retrograde.recurrent.fused import Fused, has_slopes, held_plan, run_held
from retrograde.recurrent.ordinary_memory import Ordinary, measure_ordinary, measure_whole
from retrograde.recurrent.plan import HeldPlan, Planner, ordinary_fit
from retrograde.recurrent.spans import Sequences
from retrograde.recurrent.vendor import Kernel, copied_bytes, is_too_long, laid_out, run_torch
from retrograde.recurrent.weights import stand_ins
from retrograde.replay.trees import Tensors
from retrograde.run.layout import Inputs, Rows
from retrograde.sizes.footprint import footprint
from retrograde.units import Memory, as_bytes, asks_for_all

_TURNING = 60 * 60  # the numbers that torch buffers while it copies a transposed matrix


def find_plan(call: Call, memory: Memory) -> Plan:
    """Return the fastest plan of a call that fits a budget; the module caches it. Raises
    BudgetError, which names the least budget, or CellError if the bytes cannot be measured."""

    def find() -> Plan:
        if call.runs_held:
            return fit_held(call, memory)
        if call.may_scan_held:
            with suppress(BudgetError):  # ranges of steps may take less
                return fit_held(call, memory)
        return _fit_whole(call, memory) if call.bidirectional else _fit_ranges(call, memory)

    key = repr(memory), call.length, len(call.x), call.shapes()
    return cast(Plan, call.module._fits.get(key, find))


def fit_held(call: Call, memory: Memory | None) -> Plan:
    """Return the plan of held layers within a budget; raises as :func:`find_plan`."""
    call.check_measurable()
    layout = Rows(call.length, call.sizes)
    lengths = Sequences(call.length, call.batch, None if call.sizes is None else layout.offsets)
    ordinary = _ordinary(call, memory)
    usual = ordinary(call.length, len(call.x))
    planner = _held_planner(call, ordinary, memory)
    plan, fit = planner.fit(lengths, memory, usual, partial(measure_whole, call))
    return _plan(call, plan, fit)


def _held_planner(call: Call, ordinary: Ordinary, memory: Memory | None) -> Planner:
    nets, x = call.nets(call.weights), call.x
    recurrence, scans = nets[0], call.module.backward == "scan"
    by: Backend = "loops" if x.device.type == "cpu" else "torch"
    count, copied = call.module.num_layers, 0
    vendor: Sequence[Curve | None] = [None] * count
    onward = kernels(x.device.type, x.dtype, call.module.hidden_size).onward
    if by == "torch":
        copied = sum(copied_bytes(net, apart=True) for net in nets)
    if by == "torch" and onward is None:
        curve = partial(forward_curve, call.length, memory)
        vendor = _known(call, memory, "forward", partial(_of_layers, call, curve))
    elif by == "loops":  # what runs in place reads whole rows
        turned = [w for net in nets for w in net.weights if not w.is_contiguous()]
        copied = sum(w.nbytes for w in turned) + (_TURNING * x.itemsize if turned else 0)
    frozen = (sum(w.numel() for w in net.weights if not w.requires_grad) for net in nets)
    lowest = Layer(
        kind=recurrence.mode,
        batch=call.batch,
        width=x.shape[-1],
        size=call.module.hidden_size,
        tracks=2 if recurrence.both else 1,
        item=x.element_size(),
        threads=torch.get_num_threads(),
        needs_x=x.requires_grad,
        straight=x.is_contiguous(),
        packed=call.sizes is not None,
        views=not (recurrence.both or call.sizes is not None or call.resets),
        drops=call.has_dropout and not recurrence.both,
        at_once=sums_at_once(call.length, call.batch),
        forward_by="launches" if onward is not None else by,
        backward_by=by,
    )
    layers = stacked(lowest, count, vendor)
    if recurrence.both:
        upper = replace(lowest, width=2 * lowest.size, needs_x=True, straight=True)
        upper = replace(upper, first=call.has_dropout)
        layers = tuple(replace(upper if k else lowest, vendor=own) for k, own in enumerate(vendor))
    return Planner(
        layers=layers,
        most=held_plan(recurrence, call.length, call.batch, scans=scans).block,
        extra=_extra_bytes(call),
        copied=copied + max(4, x.itemsize) * max(frozen),
        gradient_copy=ordinary.gradient_copy,
        torchs=not (scans or call.resets or is_too_long(x, call.length)),
        masks=_mask_bytes(call),
        scans=scans,
    )


def _of_layers(call: Call, find: Callable[[Weights, Tensors], Any]) -> list[Any]:
    """Return what is found of each layer, given its weights and a state."""
    by_layer = []
    for net in call.nets(call.weights):
        for layer in net.parts[: net.count]:
            weights = Weights.of(net.mode, [w.detach() for w in laid_out(layer).weights])
            state = [call.x.new_zeros(call.batch, weights.size) for _ in call.state]
            by_layer.append(find(weights, state))
    return by_layer


def _fit_ranges(call: Call, memory: Memory) -> Plan:
    """Return the fastest schedule of ranges within a budget, of a call that is one recurrence;
    raises as :func:`find_plan`."""
    call.check_measurable()
    ordinary, length = _ordinary(call, memory), call.length
    usual = Curve(((length, ordinary(length, len(call.x))),))
    core, read, start, cached = _ranges_of(call, memory, usual)
    size = replace(cached[0], ordinary=usual, gradient_copy=ordinary.gradient_copy)
    whole, least = size.whole_bytes(length), size.minimum_bytes()
    budget = whole if asks_for_all(memory) else as_bytes(memory, size.ordinary_bytes(length))
    if not size.scheduled and whole <= max(budget, least) and not ordinary.is_certain(length):
        exact = measure_whole(call) - ordinary.gradient_copy * length
        size = replace(size, ordinary=Curve(((length, max(exact, size.ordinary(length))),)))
    try:
        fit, size = fit_measured(core, read, start, memory, size)
    except BudgetError as refused:  # of a few steps, torch's own pass may take less
        if size.ordinary_bytes(length) > max(budget, refused.minimum_bytes):
            raise
        try:
            return _fit_whole(call, memory)
        except BudgetError as other:
            raise min(refused, other, key=lambda error: error.minimum_bytes) from None
    cached[:] = [size]  # with the lengths that were measured now
    least = min(size.least_bytes(length), fit.minimum_bytes)
    parts = () if fit.ordinary else ((core.kernel, fit.schedule),)
    return Plan(parts, replace(fit, minimum_bytes=least))


def _ranges_of(
    call: Call, memory: Memory, usual: Curve
) -> tuple[Fused, Inputs, Tensors, list[Footprint]]:
    """Return the core of a call's ranges, the inputs and the state to measure it by, and its
    footprint as the module's cache has it."""
    x, packed = call.x.detach(), call.sizes
    if packed is not None:  # a packed batch is measured on sequences of one length
        x = x.new_zeros(call.length * call.batch, x.shape[1])
        packed = torch.full((call.length,), call.batch, device="cpu")
    x.requires_grad_(call.x.requires_grad)
    (net,), (state,) = call.nets(stand_ins(call.weights)), call.states()
    key = torch.zeros((), dtype=torch.int64, device=x.device)
    dropout = call.masks(0, Place(key) if call.has_dropout else None)
    extra = _extra_bytes(call) + copied_bytes(net, apart=dropout is not None)
    net = laid_out(net, apart=dropout is not None)
    scans = call.module.backward == "scan" and has_slopes(net)
    kernel: Kernel = partial(run_held, scans=True) if scans else run_torch
    core, costs = candidate(net, call.batch, kernel, dropout)
    read = Rows(call.length, packed, numbered=dropout is not None).read([x])
    start = [s.detach() for s in state]

    def find() -> list[Footprint]:
        size = footprint(core, read, start, ordinary=usual, memory=memory)
        size = replace(size, scheduled=call.has_dropout, extra_bytes=size.extra_bytes + extra)
        return [replace(size, **costs)]

    alike = "ranges", *(w.requires_grad for w in net.weights)
    return cast(Fused, core), read, start, _known(call, memory, alike, find)


def _fit_whole(call: Call, memory: Memory) -> Plan:
    """Return the plan of torch's own module; raises BudgetError."""
    estimate = _ordinary(call, memory)
    ordinary = estimate(call.length, len(call.x))
    usual = ordinary + estimate.gradient_copy * call.length + _extra_bytes(call) + _mask_bytes(call)
    if not estimate.is_certain(call.length):
        usual = max(usual, measure_whole(call))
    budget = max(as_bytes(memory, ordinary), usual if asks_for_all(memory) else 0)
    if budget < usual:
        why = "; or use one direction: with projections, autocast or half precision, and on a GPU "
        why += "with float64 or packed batches, layers in two directions are run by torch's own "
        why = f"{why}module only" if call.bidirectional else ""
        raise BudgetError(f"{refusal(call.length, memory, budget, usual, ordinary)}{why}", usual)
    told = {"budget_bytes": budget, "ordinary_bytes": ordinary, "minimum_bytes": usual}
    return _plan(call, None, ordinary_fit(call.length, peak_bytes=usual, **told))


def _plan(call: Call, plan: HeldPlan | None, fit: Fit) -> Plan:
    """Return a plan that runs each recurrence alike; torch's own module if ``plan`` is None. It
    runs layer by layer if there is dropout, whose masks are the same at every budget."""
    layers = call.module.num_layers if call.bidirectional else 1
    masked = call.has_dropout and (call.runs_held or not call.bidirectional)
    parts = ((plan, fit.schedule),) * layers if plan or masked else ()
    counts = {name: layers * getattr(fit, name) for name in ("forward_steps", "calls", "time")}
    return Plan(parts, replace(fit, **counts))


def _extra_bytes(call: Call) -> int:
    """Return what a packed batch adds: states of ended sequences, their gradients, sorted copies;
    and what resets add: states in two forms, their gradients, and where samples begin anew."""
    state = sum(s.nbytes for s in call.state)
    extra = 0 if call.sizes is None else (6 if call.sorts else 3) * state
    if call.resets is not None:
        extra += 4 * state + 2 * sum(starts.nbytes for starts in call.resets.starts)
    return extra


def _mask_bytes(call: Call) -> int:
    """Return what masks by place take beside torch's: a seed a row, and what is drawn at a time."""
    count, wide = call.x[..., 0].numel(), (1 + call.bidirectional) * call.module.hidden_size
    return call.has_dropout * (count * (wide * call.x.element_size() + 8) + 64 * len(call.weights))


def _ordinary(call: Call, memory: Memory | None) -> Ordinary:
    """Return the bytes of ordinary backpropagation, by length."""
    find = partial(measure_ordinary, call, memory)
    return cast(Ordinary, _known(call, memory, "ordinary", find))


def _known(call: Call, memory: Memory | None, what: Any, find: Callable[[], Any]) -> Any:
    """Return the cached result for these shapes and this budget, or find it."""
    key = what, repr(memory), call.measured_length, call.shapes()
    return call.module._fits.get(key, find)
