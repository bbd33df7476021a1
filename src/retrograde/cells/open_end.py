"""Cells over sequences whose end nobody knows: items of an iterator, or a predicate that ends them.

The bytes of a step are measured on the first item, and the plan is made of bytes alone
(:mod:`retrograde.plan.open_end`).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from retrograde.cells.cell import Cell, StepCore, as_pair, examine
from retrograde.cells.rehearsal import fit_cell, growth
from retrograde.errors import CellError
from retrograde.plan.footprint import Curve, Footprint
from retrograde.plan.open_end import OpenPlan, bytes_of
from retrograde.replay.referents import Referents
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import Structure, Tensors, flatten, flatten_state
from retrograde.run.arriving import Arrivals, OpenEnd
from retrograde.run.autograd import Begun, Done, finish_schedule
from retrograde.run.executor import Run
from retrograde.run.layout import Apart, Inputs, Straight, check_length
from retrograde.run.settled import Settled
from retrograde.run.sources import steps_told
from retrograde.run.states import device_of
from retrograde.run.transforms import refuse_transforms
from retrograde.sizes.cache import CellFits
from retrograde.sizes.footprint import footprint, grown
from retrograde.units import Memory

#: ``until(y, state)``: whether the loop ends with the step that returned these, detached.
Until = Callable[[Any, Any], object]

_SIZES: CellFits[tuple[Footprint, bool]] = CellFits()
_NOTHING = Curve(((1, 0),))  # ordinary backpropagation's bytes, of which no share is asked
_MEASURED = 4  # steps, at most, of a range that is measured


def is_iterated(inputs: Any) -> bool:
    """Return whether inputs can only be taken one after the other."""
    return hasattr(inputs, "__iter__") and not hasattr(inputs, "__getitem__")


def refuse_open(inputs: Any, until: Until | None, **options: object) -> None:
    """Refuse what cannot be where the end is unknown, by a CellError."""
    for name, value in options.items():
        if value is not None:
            raise CellError(
                f"got {name}= for a loop whose end is unknown: expected memory= in bytes, or none; "
                "leave it out, or give inputs whose length is known, without until="
            )
    if inputs is None and until is None:
        raise CellError("got neither inputs nor until=: expected one of them, to end the loop")


def arrivals_of(inputs: Any, length: SupportsIndex | None) -> Arrivals:
    """Return the items of an iterator, or of tensors with time first; of None, there is no end."""
    if inputs is not None and not is_iterated(inputs):
        leaves, spec = flatten(inputs, "inputs")
        check_length(leaves)
        inputs = map(spec.unflatten, zip(*(t.unbind() for t in leaves), strict=True))
    most = None if length is None else steps_told(length, None)
    return Arrivals(
        itertools.repeat(None) if inputs is None else iter(inputs), most, inputs is None
    )


def open_plan(
    core: StepCore, inputs: Inputs, states: Tensors, memory: Memory,
    referents: Sequence[Referents] = (),
) -> tuple[StepCore, OpenPlan]:  # fmt: skip
    """Return a cell's core with what earlier calls have settled, and the plan for it in a budget.
    ``inputs`` are some to measure by. ``referents`` are what their bytes depend on."""
    bytes_of(memory)

    def find(settled: Settled, later: Tensors) -> tuple[Footprint, bool]:
        def measured(core: StepCore) -> Footprint:
            sizes = footprint(core, inputs, later, ordinary=_NOTHING, memory=memory, first=states)
            return grown(sizes, growth(core, settled))

        sizes = measured(core)
        singly = core.records_ranges and not sizes.even  # longer ranges are not known
        return measured(replace(core, singly=True)) if singly else sizes, singly

    key = repr(memory), tuple(inputs.differentiable)
    (sizes, singly), settled = fit_cell(_SIZES, core, inputs, states, find, *key, referents)
    return replace(core, settled=settled, singly=singly), OpenPlan.within(memory, sizes)


def unroll_open(
    cell: Cell, items: Arrivals, state: Any, memory: Memory | None, until: Until | None
) -> tuple[Any, Any]:
    """As :func:`retrograde.unroll`, for items of which nobody knows the number."""
    if memory is None or not torch.is_grad_enabled():
        return _plainly(cell, items, state, until)
    (states, state_spec), leaves = flatten_state(state), items.steps[0]
    refuse_transforms([*leaves, *states], ["memory"])
    with autocast_as_now(device_of(*states, *leaves)):
        core = examine(cell, leaves, items.structure, states, state_spec)
    copies = [t.detach().expand(_MEASURED, *t.shape).contiguous() for t in leaves]
    copies = [t.requires_grad_(leaf.requires_grad) for t, leaf in zip(copies, leaves, strict=True)]
    core, plan = open_plan(core, Straight(_MEASURED, False).read(copies), states, memory)
    core, end = replace(core, ragged=True), OpenEnd(plan, items.take, until, items.check)
    begun = Begun(core, states, [*states, *core.parameters])
    outputs: Tensors = []
    wanted: list[bool] = []

    def emit(start: int, stop: int, ys: Tensors, after: Tensors) -> None:
        outputs.extend(y.detach().clone() for y in ys)  # it may be a part of the state
        wanted.extend(core.settled.sweeps_without_graph or y.requires_grad for y in ys)
        end.note(core.output_spec.unflatten(ys), core.state_spec.unflatten(after))

    run = Run(core, (), 1, prints=core.prints(1))
    after = end.sweep(run, Apart(items.steps), states, emit)
    begun.check([*states, *core.parameters])
    done = Done(begun, outputs, wanted, after)
    outputs, after = finish_schedule(run, done, items.steps, states)
    columns = [outputs[j :: len(core.aliases)] for j in range(len(core.aliases))]
    return core.output_spec.unflatten([*map(_joined, columns)]), core.state_spec.unflatten(after)


def _plainly(cell: Cell, items: Arrivals, state: Any, until: Until | None) -> tuple[Any, Any]:
    """Run the plain loop, which holds of the items what autograd holds."""
    end = OpenEnd(OpenPlan(), items.take, until)
    outputs: list[tuple[Tensors, Structure]] = []
    while not end.ends() and items.take(len(outputs)):
        y, state = as_pair(cell(items[len(outputs)], state))
        end.note(y, state)
        outputs.append(flatten(y, "output of the cell"))
        items.forget()
    columns = zip(*(ys for ys, _ in outputs), strict=True)
    return outputs[0][1].unflatten([*map(_joined, columns)]), state


def _joined(outputs: Sequence[Tensor]) -> Any:
    """Stack the outputs of all steps, or list them if their shapes differ."""
    shapes = {(t.shape, t.dtype) for t in outputs}
    return torch.stack([*outputs]) if len(shapes) == 1 else [*outputs]
