"""The first few steps of a cell as the plain loop runs them, and as a schedule does (rule 11).

Outputs, states, and the gradients of inputs and states must be the same bits (rule 1). Gradients of
parameters may differ by rounding, since they are added in another order.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from retrograde.cells.cell import StepCore, largest_first, later_state
from retrograde.errors import CellError
from retrograde.replay.fingerprints import fingerprint
from retrograde.replay.referents import Referents
from retrograde.replay.surroundings import muted_hooks
from retrograde.replay.trees import Tensors, distinct
from retrograde.run.autograd import run_schedule
from retrograde.run.autograd_core import run_ordinary
from retrograde.run.core import raise_again
from retrograde.run.layout import Inputs, leaves_of
from retrograde.run.settled import Settled
from retrograde.run.states import each_once, entry
from retrograde.schedule import Action, Advance, Backward, Load, Record, Schedule, Store
from retrograde.sizes.allocations import apart
from retrograde.sizes.cache import CellFits, signature
from retrograde.sizes.footprint import step_bytes
from retrograde.torch_private import gradients_of

T = TypeVar("T")

_STEPS = 4


# Outputs, states, and the gradients of inputs and first states; and the parameters' gradients.
_Results = tuple[list[Tensor | None], list[Tensor | None]]


def fit_cell(
    fits: CellFits[T], core: StepCore, inputs: Inputs, state: Tensors,
    find: Callable[[Settled, Tensors], T], budget: Hashable, context: Hashable = (),
    referents: Sequence[Referents] = (),
) -> tuple[T, Settled]:  # fmt: skip
    """Return the fit for a cell, and properties that earlier calls have settled. What is not known
    is measured after a rehearsal, and ``find`` fits it by a state that later steps have.
    ``context`` and ``referents`` are what bytes depend on besides a cell and a step's tensors."""
    around = core.surroundings
    moving = tuple(b.nbytes for b in around.buffers), len(around.sources)
    tensors = map(signature, (*inputs[0], *state, *core.parameters))
    shapes = moving, torch.get_num_threads(), core.state_like, context, *tensors
    state_later = cache(partial(later_state, core, inputs, state))

    def step() -> tuple[Hashable, Settled]:
        graphless, later = rehearse(core, inputs, state), state_later()
        measured = step_bytes(core, largest_first(core, inputs, later), later)
        planned = 0 if core.per_call > 1 else core.settled.seen
        return measured, Settled(planned=planned, graphless=graphless)

    made_of = [around.found, *referents]
    return fits.fit(made_of, shapes, budget, step, lambda settled: find(settled, state_later()))


def growth(core: StepCore, settled: Settled) -> float:
    """Return by how much steps that earlier calls have shown exceed the one that was measured."""
    return settled.planned / max(1, core.settled.seen) if settled.larger else 1.0


def rehearse(core: StepCore, inputs: Inputs, state: Tensors) -> bool:
    """Refuse a cell that computes something else in parts than in one loop, by a CellError. Return
    whether steps that are not recorded give the same bits without a graph. What it takes counts as
    a measurement's, whose limit is on the page about the first call."""
    if core.fused or core.per_call > 1:
        return False
    try:
        return apart(partial(_compare, core, inputs, state), core.surroundings.device)
    except RuntimeError as error:
        raise_again(error, "the cell")


def _compare(core: StepCore, inputs: Inputs, state: Tensors) -> bool:
    core = replace(core, output_is_total=False)  # the loss of a step is an output like others
    plain = _run(core, inputs, state, in_parts=False)
    _run(core, inputs, state, in_parts=False, steps=1)  # else four hidden numbers in turn are alike
    bare = replace(core, settled=Settled(graphless=True, passes=1))
    try:
        if _alike(plain, _run(bare, inputs, state, in_parts=True)):
            core.settled.seen = bare.settled.seen
            return True  # so are steps with a graph, which are nearer to the loop's
    except Exception:  # such as a gradient that is taken within a step
        pass
    if _alike(plain, _run(core, inputs, state, in_parts=True)):
        return False
    cause = core.surroundings.cause()
    if not _alike(plain, _run(core, inputs, state, in_parts=False)):
        raise CellError(
            "the cell computes something else when it is run again with the same arguments, "
            f"{cause}: expected the same bits; make what it depends on part of the inputs, of a "
            "buffer or of the state (for a module by stateful=), or use memory=None"
        )
    raise CellError(
        f"the cell computes other results or gradients in parts than in one loop, {cause}: "
        "expected a step to depend on the values of its state only, and not on whether it is the "
        "tensor that another step made (its identity, history or hooks); name modules that keep a "
        "state in stateful=, or use memory=None"
    )


def _run(
    core: StepCore, inputs: Inputs, state: Tensors, *, in_parts: bool, steps: int = _STEPS
) -> _Results:
    steps = min(steps, len(inputs))
    with core.surroundings.measured(), muted_hooks([*core.parameters, *state]), torch.enable_grad():
        x = leaves_of(inputs, slice(0, steps))
        state = each_once(lambda t: entry(t)[1], state)
        parameters = core.targets  # a captured tensor itself may go on to another parameter
        if in_parts:
            outputs, after = run_schedule(core, _in_halves(steps), x, state, stand_ins=parameters)
        else:
            with core.recording():
                outputs, after = run_ordinary(core, x, state)
        wanted = distinct(t for t in (*x, *state, *parameters) if t.requires_grad)
        roots = [t for t in (*outputs, *after) if t.requires_grad]
        gradients: tuple[Tensor | None, ...] = ()
        if roots and wanted:
            seeds = [*map(_seed_of, roots)]
            # A loop in a loop is tried in the backward pass, under the lock that this thread holds.
            with torch.autograd.set_multithreading_enabled(False):
                gradients = gradients_of(roots, wanted, seeds, stays=True)
    by = {id(t): g for t, g in zip(wanted, gradients, strict=False)}
    parameter_ids = {id(t) for t in parameters}  # a state may be one
    exact = [*(t.detach() for t in (*outputs, *after)), *(by.get(id(t)) for t in x)]
    exact += [by.get(id(t)) for t in state if id(t) not in parameter_ids]
    return exact, [by.get(id(t)) for t in parameters]


def _seed_of(t: Tensor) -> Tensor:
    """Return some gradient of a result, whose numbers differ."""
    numbers = torch.arange(t.numel(), dtype=torch.float32, device=t.device)
    return numbers.mul_(0.7).cos_().to(t.dtype).view(t.shape)


def _in_halves(steps: int) -> Schedule:
    """Return a schedule that runs the first half of some steps again."""
    half = steps // 2
    actions: tuple[Action, ...] = Record(0, steps), Backward(0, steps)
    if half:
        actions = Store(0), Advance(0, half), Record(half, steps), Backward(half, steps)
        actions = *actions, Load(0), Record(0, half), Backward(0, half)
    return Schedule.from_actions(actions, length=steps)


def _alike(one: _Results, other: _Results) -> bool:
    """Return whether two runs gave the same bits, and the same gradients of parameters."""
    same = len(one[0]) == len(other[0]) and all(map(_same, one[0], other[0]))
    return same and all(map(_near, one[1], other[1]))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return all(t is None or not t.any() for t in (a, b))
    return bool(fingerprint(a) == fingerprint(b)) or torch.equal(a, b)


def _near(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or _same(a, b):
        return _same(a, b)
    a, b, place = a.to_dense(), b.to_dense(), a.device.type
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else a.dtype
    return bool((a - b).norm() <= torch.finfo(dtype).eps ** 0.5 * a.norm())
