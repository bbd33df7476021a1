"""The cost of a core's steps, in bytes and seconds, for sequences of any length."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from retrograde.plan.fit import Fit, Footprint, fit
from retrograde.recurrent.call import Call
from retrograde.recurrent.fused import run_held
from retrograde.recurrent.scheduled import fit_held, ordinary_bytes
from retrograde.recurrent.weights import stand_ins
from retrograde.schedule.actions import Verb
from retrograde.sizes.timing import RangeTimes, time_calls
from retrograde.units import Memory

__all__ = ["Costs", "HeldCosts", "iteration_seconds", "time_held"]

Tensors = list[Tensor]


@dataclass(frozen=True)
class Costs:
    """The cost of one core's steps: ``sizes`` in bytes, ``times`` in seconds."""

    sizes: Footprint
    times: RangeTimes

    def fit(self, steps: int, memory: Memory) -> Fit:
        return fit(steps, memory, self.sizes)

    def ordinary_bytes(self, steps: int) -> int:
        """Return the memory of ordinary backpropagation."""
        return self.sizes.ordinary_bytes(steps)

    def least_bytes(self, steps: int) -> int:
        return self.sizes.least_bytes(steps)

    def seconds(self, found: Fit) -> float:
        """Return the predicted time of an iteration."""
        return iteration_seconds(found, self.times)


def iteration_seconds(found: Fit, times: RangeTimes) -> float:
    """Return the predicted time of an iteration by a schedule, from the times of ranges."""
    length, records = found.schedule.length, int(np.sum(found.schedule.kind == Verb.RECORD))
    again, calls = found.forward_steps - length, found.calls - 2 * records
    return (
        times.forward(calls, again)
        + times.record(records, length)
        + times.backward(records, length)
    )


@dataclass(frozen=True)
class HeldCosts(Costs):
    """The cost of held layers, whose states are their outputs; ``call`` is of any length."""

    call: Call

    def fit(self, steps: int, memory: Memory) -> Fit:
        return cast(Fit, fit_held(self.call.of_length(steps), memory).fit)

    def ordinary_bytes(self, steps: int) -> int:
        return ordinary_bytes(self.call.of_length(steps), None)

    def least_bytes(self, steps: int) -> int:
        return self.fit(steps, 1.0).minimum_bytes


def time_held(call: Call, repeats: int) -> RangeTimes:
    """Time the held layers of one recurrence: forward, recording, and backward."""
    (net,), (state,) = call.nets(stand_ins(call.weights)), call.states()
    state = [s.detach() for s in state]
    inputs: Tensors = []
    outputs: Tensors = []

    def record(steps: int) -> None:
        inputs[:] = [x := call.x[:steps].detach().requires_grad_(call.x.requires_grad)]
        outputs[:] = [run_held(net, x, state, None)[0]]

    def forward(steps: int) -> None:
        with torch.no_grad():
            record(steps)

    def back(steps: int) -> None:
        y = outputs.pop()
        leaves = [w for w in net.weights if w.requires_grad]
        leaves += inputs if call.x.requires_grad else []
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return time_calls((forward, record, back), call.length, repeats, call.x.device)
