"""What ordinary backpropagation takes, in bytes: measured on few steps, for any number of them.

A budget may be a share of it, and what fits ordinary backpropagation is left to it. Forward and
backward are each affine in the steps, but for a kernel's own room that hides the first ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from retrograde.measure.allocations import measure_phases
from retrograde.plan.fit import Curve, Highest
from retrograde.run.autograd_core import AutogradCore, run_ordinary
from retrograde.run.core import as_leaf
from retrograde.run.inputs import Inputs
from retrograde.units import Memory, as_bytes

__all__ = [
    "FEW_BYTES", "FEW_STEPS", "LONGEST_MEASURED",
    "even_from", "expanded", "measure_pass", "ordinary_bytes", "ordinary_curve", "outputs_tell",
]  # fmt: skip

#: How many steps are measured in any case, in whatever memory they take.
FEW_STEPS = 8

#: Bytes that measuring may take in any case: kernels hand out memory by pages, which hide less.
FEW_BYTES = 2**20

# What a measured call holds besides: outputs, their gradients, and what it found.
_BESIDE = 1.25

#: How far ordinary backpropagation is followed to learn what a step adds.
LONGEST_MEASURED = 256

Tensors = list[Tensor]


def ordinary_curve(
    measured: Callable[[int], tuple[int, ...]], length: int, memory: Memory | None = None
) -> Highest:
    """Measure at doubling lengths, until the bytes grow evenly or would leave the budget
    ``memory``. ``measured`` gives the bytes at each phase's peak; phases are followed apart, since
    their slopes differ. The budget holds beyond :data:`FEW_STEPS` steps and :data:`FEW_BYTES`."""
    points = {steps: measured(steps) for steps in sorted({1, min(2, length)})}
    while (last := max(points)) < min(length, LONGEST_MEASURED):
        steps, known = min(2 * last, length), Highest.of(points)
        if memory is not None and steps > FEW_STEPS:
            budget = as_bytes(memory, known(length))
            if known(length) > budget and _BESIDE * known(steps) > max(budget, FEW_BYTES):
                break
        points[steps] = measured(steps)
        if even_from(Highest.of(points)) is not None:
            break
    return Highest.of(points)


def even_from(found: Highest) -> int | None:
    """The steps from which on bytes grow evenly, so that no longer call needs to be measured; None
    if that has not been seen."""
    last = found.curves[0].points[-1][0]
    return last if last >= 16 and all(map(_is_even, found.curves)) else None


def _is_even(curve: Curve) -> bool:
    """Whether the last two slopes are equal; a kernel's own room may hide the growth at first."""
    (a, low), (b, middle), (c, high) = curve.points[-3:]
    slopes = (middle - low) / (b - a), (high - middle) / (c - b)
    return slopes[1] > 0 and abs(slopes[1] - slopes[0]) <= 1e-3 * slopes[1]


def measure_pass(
    forward: Callable[[], None],
    backward: Callable[[], None],
    drop: Callable[[], None],
    device: torch.device,
) -> tuple[int, int]:
    """The working bytes at the peak of forward, and of backward. What ``drop`` releases would be
    the caller's, and does not count."""
    one, other, _ = measure_phases([forward, backward, drop], device=device)
    return one.peak(0, 2), one.growth(0, 2) + other.peak(0, 2)


def outputs_tell(core: AutogradCore, inputs: Inputs, state: Tensors) -> bool:
    """Whether the outputs' gradient goes through all of the state; else a loss may be of that."""
    if core.fused or core.sums or len(inputs) < 2:
        return core.fused or core.sums
    with torch.enable_grad(), core.recording():
        _, after = core(inputs[0], [as_leaf(t) for t in state])
        outputs, _ = core(inputs[1], after)
    pending: list[Any] = [y.grad_fn for y in outputs]
    reached: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [inner for inner, _ in node.next_functions]
    return all(t.grad_fn in reached for t in after)


def ordinary_bytes(
    core: AutogradCore,
    inputs: Inputs,
    state: Tensors,
    steps: int,
    *,
    whole: bool,
    like: Callable[[Tensor], Tensor] = torch.ones_like,
) -> tuple[int, int]:
    """The working bytes, forward and backward, of ordinary backpropagation through the first steps.
    The gradient, made by ``like``, starts at the outputs, and if ``whole`` at the final state too.
    """
    numbers = inputs[0:steps][-1:] if core.sums else []  # ours, and not the caller's
    roots: Tensors = []
    leaves: Tensors = []
    handed: list[Any] = []

    def forward() -> None:
        with torch.enable_grad(), core.recording():
            x = [
                t.detach().requires_grad_(wanted)
                for t, wanted in zip(inputs[0:steps], inputs.differentiable, strict=True)
            ]
            x[len(x) - len(numbers) :] = numbers
            start = [t.detach().requires_grad_(t.requires_grad) for t in state]
            run = run_ordinary if core.fused or not core.sums else _run_summing
            outputs, after = run(core, x, start)
        ends = [*outputs, *after] if whole else outputs
        roots.extend({id(y): y for y in ends if y.requires_grad}.values())
        leaves.extend(t for t in (*x, *start, *core.targets) if t.requires_grad)
        handed.extend((outputs, after))

    def backward() -> None:
        seeds = [like(y) for y in roots]
        found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True) if roots else ()
        handed.extend((seeds, found))

    def drop() -> None:
        for one in (roots, leaves, handed):
            one.clear()

    return measure_pass(forward, backward, drop, core.ambient.device)


def _run_summing(core: AutogradCore, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """All steps of a cell with its loss, as a plain loop sums it."""
    total: Tensor | None = None
    for x in zip(*(t.unbind() for t in inputs), strict=True):
        (value,), state = core(list(x), state)
        total = value if total is None else total + value
    return [] if total is None else [total], state


def expanded(t: Tensor) -> Tensor:
    """Ones like a tensor that are one number, as ``sum().backward()`` makes them."""
    return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)
