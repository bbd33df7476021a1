"""The bytes of ordinary backpropagation, measured on few steps and extrapolated to any number.

A budget may be a share of these bytes. If ordinary backpropagation fits into a budget, it is what
runs. The bytes of the forward pass and of the backward pass are each affine in the number of steps.
At few steps a kernel's own workspace may hide that growth.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from retrograde.machine import now
from retrograde.plan.footprint import Curve, Highest
from retrograde.replay.trees import Tensors
from retrograde.run.autograd_core import AutogradCore, run_ordinary
from retrograde.run.foreign import foreign_tensors
from retrograde.run.layout import Inputs, leaves_of
from retrograde.run.states import each_once, entry
from retrograde.sizes.allocations import measure_phases
from retrograde.torch_private import gradients_of
from retrograde.units import Memory, as_bytes

#: The number of steps that are always measured, whatever memory they take.
FEW_STEPS = 8

#: The bytes that measuring may always take. Kernels allocate memory by pages, so small amounts
#: would show no growth.
FEW_BYTES = 2**20

# A measured call takes up to this many times the predicted bytes. It also holds outputs, their
# gradients, and the gradients that it computed.
_BESIDE = 1.25

#: The most steps that are measured to learn what one more step adds.
LONGEST_MEASURED = 256


def ordinary_curve(
    measured: Callable[[int], tuple[int, ...]], length: int, memory: Memory | None = None, *,
    bends: bool = False, few: bool = False,
) -> Highest:  # fmt: skip
    """Measure at doubling lengths, until bytes would exceed the budget ``memory`` or grow evenly. A
    curve that ``bends`` later is measured further. Where ``few`` steps may tell, four are enough
    if the last one adds as much to each phase as the one before to the first. ``measured`` returns
    the bytes at the peak of each phase, which has a curve of its own. The budget limits only
    measurements that exceed both :data:`FEW_STEPS` steps and :data:`FEW_BYTES` bytes."""
    begin = (2, 3, 4) if few else (1, 2)
    points = {steps: measured(steps) for steps in sorted({min(n, length) for n in begin})}
    if few and 4 in points:
        (two, *_), three, four = points.values()
        adds = {three[0] - two, *(b - a for a, b in zip(three, four, strict=True))}
        if len(adds) == 1 and min(adds) > 0:
            return Highest.of(points)
    while (last := max(points)) < min(length, LONGEST_MEASURED):
        steps, peaks = min(2 * last, length), Highest.of(points)
        if memory is not None and steps > FEW_STEPS:
            budget = as_bytes(memory, peaks(length))
            if peaks(length) > budget and _BESIDE * peaks(steps) > max(budget, FEW_BYTES):
                break
        points[steps] = measured(steps)
        if not bends and grows_evenly(Highest.of(points)):
            break
    return Highest.of(points)


def grows_evenly(highest: Highest) -> bool:
    """Return whether bytes are seen to grow evenly, so that no longer call has to be measured: the
    last two slopes are equal and positive. At first a kernel's own workspace may hide the growth.
    """

    def is_even(curve: Curve) -> bool:
        (a, low), (b, middle), (c, high) = curve.points[-3:]
        slopes = (middle - low) / (b - a), (high - middle) / (c - b)
        return slopes[1] > 0 and abs(slopes[1] - slopes[0]) <= 1e-3 * slopes[1]

    return highest.curves[0].points[-1][0] >= 16 and all(map(is_even, highest.curves))


def measure_pass(
    forward: Callable[[], None], backward: Callable[[], None], drop: Callable[[], None],
    device: torch.device,
) -> tuple[int, int]:  # fmt: skip
    """Return the working bytes at the peak of the forward pass, and of the backward pass. Memory
    that ``drop`` releases would belong to the caller, so it does not count."""
    forward_phase, backward_phase, _ = measure_phases([forward, backward, drop], device=device)
    return forward_phase.peak(0, 2), forward_phase.growth(0, 2) + backward_phase.peak(0, 2)


def time_pass(
    forward: Callable[[], None], backward: Callable[[], None], drop: Callable[[], None],
    device: torch.device,
) -> float:  # fmt: skip
    """Return the seconds of a forward and a backward pass."""
    start = now(device)
    forward()
    backward()
    stop = now(device)
    drop()
    return stop - start


def outputs_tell(core: AutogradCore, inputs: Inputs, state: Tensors) -> bool:
    """Return whether the gradient of the outputs flows through every part of the state. Otherwise a
    loss may also depend on the final state."""
    if core.fused or core.output_is_total or len(inputs) < 2:
        return core.fused or core.output_is_total
    with torch.enable_grad(), core.recording():
        _, after = core(inputs[0], [entry(t)[1] for t in state])
        outputs, _ = core(inputs[1], after)
    edges = {(t.grad_fn, t.output_nr) for t in after if t.grad_fn is not None}
    _, reached = foreign_tensors(outputs, 0, edges)
    return reached == edges


def ordinary_bytes(
    core: AutogradCore, inputs: Inputs, state: Tensors, steps: int, *, whole: bool,
    like: Callable[[Tensor], Tensor] = torch.ones_like, by: Callable[..., Any] = measure_pass,
) -> Any:  # fmt: skip
    """Return the working bytes, forward and backward, of ordinary backpropagation. It runs through
    the first ``steps`` steps. The gradient, made by ``like``, starts at the outputs, and if
    ``whole`` at the final state too. Another measure may be taken ``by`` the way."""
    # Allocated here, not by the caller.
    numbers = inputs[0:steps][-1:] if core.output_is_total else []
    roots: Tensors = []
    leaves: Tensors = []
    handed: list[Any] = []

    def forward() -> None:
        with torch.enable_grad(), core.recording():
            x = leaves_of(inputs, slice(0, steps))
            x[len(x) - len(numbers) :] = numbers
            pairs = each_once(entry, state)
            start = [leaf for leaf, _ in pairs]
            run = run_ordinary if core.fused or not core.output_is_total else _run_summing
            with _casting_once(core.surroundings.device):
                outputs, after = run(core, x, [s for _, s in pairs])
            del pairs
        ends = [*outputs, *after] if whole else outputs
        roots.extend({id(y): y for y in ends if y.requires_grad}.values())
        leaves.extend(t for t in (*x, *start, *core.targets) if t.requires_grad)
        handed.extend((outputs, after))

    def backward() -> None:
        seeds = [like(y) for y in roots]
        gradients = gradients_of(roots, leaves, seeds) if roots else ()
        handed.extend((seeds, gradients))

    def drop() -> None:
        for kept in (roots, leaves, handed):
            kept.clear()

    return by(forward, backward, drop, core.surroundings.device)


@contextmanager
def _casting_once(device: torch.device) -> Iterator[None]:
    """Let autocast cast each weight once in a block, as in the plain loop."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    torch.clear_autocast_cache()
    dtype = torch.get_autocast_dtype(device.type)
    try:
        with torch.autocast(device.type, dtype=dtype, cache_enabled=True):
            yield
    finally:
        torch.clear_autocast_cache()


def _run_summing(core: AutogradCore, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """Run all steps of a cell with its loss, and sum the losses as a plain loop would."""
    total: Tensor | None = None
    for x in zip(*(t.unbind() for t in inputs), strict=True):
        (value,), state = core(list(x), state)
        total = value if total is None else total + value
    return [] if total is None else [total], state


def expanded(t: Tensor) -> Tensor:
    """Return ones of a tensor's shape that share one element, as ``sum().backward()`` does."""
    return torch.ones((), dtype=t.dtype, device=t.device).expand(t.shape)
