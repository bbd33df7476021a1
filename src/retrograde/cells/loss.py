"""A recurrence and its loss as one core, whose only output is the loss of a step or of a range.

So outputs are dropped as soon as their loss is known, and losses are summed over calls
(``Core.output_is_total``). The loss is examined and measured with the cell, so its parameters get
gradients and its bytes count. A run that needs only the state skips the loss. It does not if the
loss or the cell draws random numbers or changes buffers.

A step's loss may be None. A cell is examined at a step that has a loss, if one of the first
:data:`PROBED` steps or the last one has.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrograde.cells.cell import Cell, StepCore, as_pair, examine
from retrograde.errors import CellError
from retrograde.recurrent.fused import Fused
from retrograde.replay.trees import Structure, Tensors, flatten
from retrograde.run.foreign import LeafWatch
from retrograde.run.layout import leaves_of
from retrograde.run.sources import Stream
from retrograde.torch_private import next_node

#: How many of the first steps are searched for one that has a loss.
PROBED = 512

Loss = Callable[[Any, Any], Tensor | None]


@dataclass(frozen=True)
class StepLoss:
    """A cell and its ``loss(t, y_t)`` as one cell with the input (x_t, t). The loss is a scalar or
    None. Losses are summed on ``device``."""

    cell: Cell
    loss: Loss
    device: torch.device
    note: Callable[[Any, Any], object] | None = None  # gets outputs and states

    def run(self, x: Any, state: Any) -> tuple[Any, Any]:
        """Return the output and the state after the step."""
        return as_pair(self.cell(x, state))

    def told(self, number: int, y: Any) -> Tensor | None:
        """Return the loss of a step."""
        return self.loss(number, y)

    def __call__(self, inputs: Any, state: Any) -> tuple[Tensor, Any]:
        x, number = inputs
        y, after = self.run(x, state)
        if self.note is not None:
            self.note(y, after)
        step = int(number)
        return as_summand(self.told(step, y), f"step {step}", self.device), after


@dataclass(frozen=True)
class RangeLoss:
    """A fused kernel and ``loss(range, y)``, where y is (L, B, H). The loss is the sum of the
    losses of the steps, or None."""

    kernel: Fused
    loss: Loss
    device: torch.device
    parameters: Sequence[Tensor] | None = None  # that the loss may use, if they are known yet

    def run(self, x: Any, state: Any) -> tuple[Tensor, Tensors]:
        """Return the outputs and the state after the range."""
        (y,), after = self.kernel([x], state)
        return y, after

    def told(self, number: int, y: Any) -> Tensor | None:
        """Return the loss of one step."""
        return self.loss(range(number, number + 1), y[:1])

    def __call__(self, inputs: Any, state: Any) -> tuple[Tensor, Tensors]:
        x, numbers = inputs
        y, after = self.run(x, state)
        steps = range(int(numbers[0]), int(numbers[0]) + len(numbers))
        mark = next_node()
        value = self.loss(steps, y)
        where = f"steps {steps.start} … {steps.stop - 1}"
        summand = as_summand(value, where, self.device)
        if self.parameters is not None and summand.requires_grad:
            self._check(summand, y, mark, where)
        return summand, after

    def _check(self, summand: Tensor, y: Tensor, mark: int, where: str) -> None:
        """Check rule 5 for the loss only, because the kernel's graph may be long, and is known."""
        allowed = y, *(self.parameters or ())
        if LeafWatch(allowed, allowed, mark).foreign([summand]):
            raise CellError(
                f"at {where} the loss uses a tensor that requires a gradient and that it did not "
                "use when it was examined: expected the same parameters at every step; let an "
                "nn.Module own them, or use them at every step"
            )


def state_only(part: StepLoss | RangeLoss, inputs: Any, state: Any) -> tuple[None, Any]:
    """Run a step or a range without its loss."""
    return None, part.run(inputs[0], state)[1]


def as_summand(value: Any, where: str, device: torch.device) -> Tensor:
    """Return a loss as a new scalar, or zero for None, in double precision, since a sum may have
    millions of these. Raises CellError if it is no real scalar tensor, or lacks a gradient."""
    if value is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    remedy = "return a scalar tensor, or None where there is no loss"
    if not isinstance(value, Tensor):
        raise CellError(f"the loss of {where} is a {type(value).__name__}: {remedy}")
    if value.shape != () or not value.is_floating_point():
        raise CellError(
            f"the loss of {where} has the shape {tuple(value.shape)} and is {value.dtype}: {remedy}"
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise CellError(
            f"the loss of {where} does not require a gradient: expected one that depends on the "
            f"output or on a parameter; {remedy}"
        )
    return value.to(device=device, dtype=torch.float64, copy=True)


@dataclass
class _Probing:
    """A cell with its loss, which searches for a step that has a loss."""

    part: StepLoss | RangeLoss
    numbers: Iterable[int]
    found: int = 0

    def __call__(self, inputs: Any, state: Any) -> tuple[Tensor, Any]:
        y, after = self.part.run(inputs[0], state)
        for number in self.numbers:
            value = self.part.told(number, y)
            if value is not None:
                self.found = number
                return as_summand(value, f"step {number}", self.part.device), after
        return as_summand(None, "", self.part.device), after


def examine_loss(
    part: StepLoss | RangeLoss, stream: Stream, state: Tensors, state_spec: Structure
) -> tuple[StepCore, Stream]:
    """Return the core of a cell or kernel with its loss, and inputs to measure it by: those of a
    step with a loss. Raises CellError also if a kernel's loss draws random numbers, changes
    buffers, or is no sum over steps."""
    fused = isinstance(part, RangeLoss)
    inputs = leaves_of(stream, slice(0, 1) if fused else 0)
    tree = stream.source.structure.unflatten(inputs[:-1]), inputs[-1]
    input_spec = flatten(tree, "inputs")[1]
    last = len(stream) - 1
    ends = [] if len(stream) == sys.maxsize else [last]  # nobody knows which is the last
    numbers = dict.fromkeys((0, *ends, *range(1, min(last, PROBED))))
    probing = _Probing(part, numbers)
    runs = part.kernel.net.weights if isinstance(part, RangeLoss) else part.cell
    core = examine(probing, inputs, input_spec, state, state_spec, [runs, part.loss])
    around = core.surroundings
    plain = not (around.moves or around.moving)
    if isinstance(part, RangeLoss):
        if around.moves or around.changing:
            raise CellError(
                "the loss draws random numbers, or changes buffers or attributes: expected neither "
                "with a module, whose ranges depend on the budget; pass a cell that runs one step, "
                "such as an nn.LSTMCell, instead of the module"
            )
        part = replace(part, parameters=tuple(core.targets))
    stated = partial(state_only, part) if plain else None
    core = replace(core, cell=part, fused=fused, output_is_total=True, without_outputs=stated)
    probed = replace(stream, probed=probing.found)
    if isinstance(part, RangeLoss) and len(stream) > 1:
        del inputs, tree  # BUDGET: before other steps are read
        _check_sum(part, probed, state)
    return core, probed


def _check_sum(part: RangeLoss, stream: Stream, state: Tensors) -> None:
    """Refuse a loss that depends on how steps are divided into ranges, such as a mean over time."""
    start, outputs = max(0, (stream.probed or 0) - 1), []
    with torch.no_grad():
        for k in range(2):  # two steps at a time would take more than the least budget
            y, state = part.run(stream[k : k + 1][0], state)
            outputs.append(y)
        y = torch.cat(outputs)
        ranges = range(start, start + 2), range(start, start + 1), range(start + 1, start + 2)
        losses = [part.loss(r, y[r.start - start : r.stop - start]) for r in ranges]
    terms = [value.reshape(()) for value in losses if value is not None]
    # A GPU is waited for once. On a CPU nothing is allocated, since the least budget has no room.
    on_cpu = y.device.type == "cpu"
    read = iter([float(v) for v in terms] if on_cpu or not terms else torch.stack(terms).tolist())
    both, first, second = (0.0 if value is None else next(read) for value in losses)
    if abs(both - first - second) > 0.05 * (abs(first) + abs(second)):
        raise CellError(
            f"the loss of steps {start} and {start + 1} together is {both:.6g}, but theirs are "
            f"{first:.6g} and {second:.6g}: expected the sum, since it depends on the budget which "
            "steps are a range; sum over time, and divide by the number of steps afterwards"
        )
