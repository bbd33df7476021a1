"""A recurrent layer within a byte budget: from bytes to segments that are recomputed together.

The state is kept before the first step of every segment of L steps, and N segments at a time are
recomputed, as one batch, and backpropagated. With T steps of B samples, states of n numbers, and q
numbers a step of a sample for recomputing and backpropagating it, each of w bytes,

    bytes(L, N) = B w (n T / L + q L N)
    time(L, N)  = T / N + κ T / (L N) + κ' T / L      in steps of a kernel

where κ is what a group of segments costs besides its steps, and κ' what an LSTM's forward pass
does for each segment, since its kernel tells c at the end of a call only. Of the lengths L of a
geometric grid, each with the most segments N that fit, the fastest is taken.

q is not known but measured: the layer is run for two groups of segments, its bytes are counted, and
L and N are chosen anew, until what is predicted fits and uses the budget.

Complexity: a few runs of two groups of segments. The least budget grows like √T: smaller ones need
a schedule (:mod:`retrograde.plan`).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from retrograde.errors import BudgetError
from retrograde.execute.measure import measure
from retrograde.execute.replay import muted_hooks
from retrograde.nn.stack import Batch, run_stack
from retrograde.scan.layer import Way
from retrograde.scan.ways import scan_way, step_numbers
from retrograde.units import as_bytes, format_bytes

if TYPE_CHECKING:
    from retrograde.nn.recurrent import Recurrent

__all__ = ["SegmentFit", "fit"]

State = tuple[Tensor, ...]

_TRIES = 6
_WELL_USED = 0.9

# κ, κ', the grid, and the bytes beyond which a larger group gains nothing. Nominal, so that a
# budget gives the same sums on every run.
_GROUP_STEPS = 8
_FORWARD_STEPS = {"LSTM": 16}
_GRID = 1.2
_GROUP_BYTES = {"cpu": 16 * 2**20, "cuda": 2**30}


@dataclass(frozen=True)
class SegmentFit:
    """What a budget buys.

    Attributes:
        way: how the layer is backpropagated; None where the budget allows torch's own pass.
        together: how many segments are recomputed and backpropagated at a time.
        peak_bytes: what is predicted, at most the budget.
        budget_bytes: the budget.
        ordinary_bytes: what ordinary backpropagation takes.
        minimum_bytes: the least budget.
    """

    way: Way | None
    together: int
    peak_bytes: int
    budget_bytes: int
    ordinary_bytes: int
    minimum_bytes: int


def fit(module: "Recurrent", x: Tensor, state: State) -> SegmentFit:
    """The segments that use a budget best.

    Args:
        module: one layer in one direction, its ``memory`` set.
        x: inputs (T, B, I).
        state: the initial state, each part (1, B, H).

    Returns:
        A :class:`SegmentFit`.

    Raises:
        BudgetError: even one segment at a time takes more; the message names the least budget.
    """
    layer = _Layer(module, x, state)
    ordinary = layer.ordinary_bytes()
    budget = ordinary if module.memory is None else as_bytes(module.memory, ordinary)
    if budget >= ordinary:
        return SegmentFit(None, 1, ordinary, budget, ordinary, min(ordinary, budget))
    least, least_bytes = layer.least()
    if budget < least_bytes:
        raise BudgetError(
            f"the memory {module.memory!r} is {budget} bytes ({format_bytes(budget)}), but "
            f"{len(x)} steps need at least {least_bytes} bytes ({format_bytes(least_bytes)}) by "
            f"segments, that is {least_bytes / ordinary:.2%} of ordinary backpropagation's: raise "
            "the budget, make the batch smaller, or cut the sequence in schedules of its own with "
            "rg.unroll or, for an LSTM, with backward=None",
            least_bytes,
        )
    best, peak = layer.most(budget, least, least_bytes)
    together = -(-best.block // (best.segment or 1))
    return SegmentFit(best, together, peak, budget, ordinary, least_bytes)


class _Layer:
    """A layer, and what is known of its bytes."""

    def __init__(self, module: "Recurrent", x: Tensor, state: State) -> None:
        self.module, self.x, self.state = module, x, state
        kind: Any = module.mode
        self.shape: Any = (x.shape[1], x.shape[2], module.hidden_size, x.dtype, x.device.type)
        real = 8 if x.dtype == torch.float64 else 4
        self.row_bytes = real * x.shape[1]
        self.state_bytes = sum(s.nbytes for s in state)
        self.numbers = float(step_numbers(kind, x.shape[2], module.hidden_size))
        self.scans = module.backward == "scan" or (
            module.backward == "auto" and x.device.type == "cuda"
        )

    def ordinary_bytes(self) -> int:
        """What torch's own pass takes: measured on short sequences, affine beyond them."""
        lengths = sorted({min(len(self.x), steps) for steps in (128, 256)})
        found = [self._measured(steps, None) for steps in lengths]
        slope = (found[-1] - found[0]) / max(1, lengths[-1] - lengths[0])
        return round(found[-1] + slope * (len(self.x) - lengths[-1]))

    def least(self) -> tuple[Way, int]:
        """The segments that take least bytes, one at a time, and what they take."""
        for _ in range(2):  # the second time with the numbers that the first one measured
            steps = math.sqrt(self.state_bytes * len(self.x) / (self.numbers * self.row_bytes))
            way = self._way(steps, 1)
            peak = self._peak(way)
        return way, peak

    def most(self, budget: int, way: Way, peak: int) -> tuple[Way, int]:
        """The fastest segments within a budget, from a way that fits."""
        seen = {way}
        room = float(budget)
        for _ in range(_TRIES):
            tried = self._fastest(room)
            if tried in seen:
                break
            seen.add(tried)
            found = self._peak(tried)
            if found > budget:
                room *= 0.98 * budget / found
            elif self._steps(tried) < self._steps(way):
                way, peak = tried, found
                if found >= _WELL_USED * budget:
                    break
        return way, peak

    def _fastest(self, room: float) -> Way:
        """The fastest L and N for some bytes, with what is known of q."""
        grid = {round(_GRID**i) for i in range(int(math.log(len(self.x), _GRID)) + 2)}
        most = _GROUP_BYTES.get(self.x.device.type, _GROUP_BYTES["cuda"])
        ways = []
        for steps in grid:
            left = min(room - self.state_bytes * len(self.x) / steps, most)
            together = left / (self.numbers * self.row_bytes * steps)
            if together >= 1:
                ways.append(self._way(steps, together))
        return min(ways, key=self._steps, default=self._way(math.sqrt(len(self.x)), 1))

    def _steps(self, way: Way) -> float:
        """The time of a way, in steps of a kernel."""
        assert way.segment is not None
        forward = _FORWARD_STEPS.get(self.module.mode, 0) / way.segment
        return len(self.x) * ((way.segment + _GROUP_STEPS) / way.block + forward)

    def _way(self, steps: float, together: float) -> Way:
        segment = max(1, min(round(steps), len(self.x)))
        block = segment * max(1, min(math.floor(together), -(-len(self.x) // segment)))
        if not self.scans:
            return Way("sequential", block, 1, segment)
        kind: Any = self.module.mode
        return Way("scan", block, scan_way(kind, block, *self.shape).chunk, segment)

    def _peak(self, way: Way) -> int:
        """Predict a way's bytes from a run of two blocks, and learn what a step takes."""
        assert way.segment is not None
        steps = min(len(self.x), 2 * way.block)
        found = self._measured(steps, way)
        marks = [-(-length // way.segment) * self.state_bytes for length in (steps, len(self.x))]
        self.numbers = max(1.0, (found - marks[0]) / (way.block * self.row_bytes))
        return found - marks[0] + marks[1]

    def _measured(self, steps: int, way: Way | None) -> int:
        """The working bytes of forward and backward through the first steps."""
        module, device = self.module, self.x.device
        x = self.x[:steps].detach().requires_grad_(self.x.requires_grad)
        one = torch.ones((), dtype=x.dtype, device=device)

        def call() -> object:
            # Each measurement differentiates: a parametrization's graph serves for one of them.
            module._update_flat_weights()  # type: ignore[no-untyped-call]
            # States and gradients that the caller does not give are made within the call.
            state = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in self.state)
            wanted = [t for t in (x, *state, *module.parameters()) if t.requires_grad]
            if way is None:
                outputs, final = _torch_forward(module, x, state)
            else:
                batch, final = run_stack(module, lambda _: way, Batch(x), state)
                outputs = batch.x
            seeds = [one.expand_as(outputs), *(torch.ones_like(s) for s in final)]
            roots = [outputs, *final]
            return roots, torch.autograd.grad(roots, wanted, seeds)

        with torch.enable_grad(), muted_hooks(list(module.parameters())):
            return measure(call, device=device).working_bytes


def _torch_forward(module: "Recurrent", x: Tensor, state: State) -> tuple[Tensor, State]:
    asked = module.memory, module.backward, module.batch_first
    module.memory = module.backward = None
    module.batch_first = False
    try:
        outputs, final = module(x, state if module.mode == "LSTM" else state[0])
    finally:
        module.memory, module.backward, module.batch_first = asked
    return outputs, final if isinstance(final, tuple) else (final,)
