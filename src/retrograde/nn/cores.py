"""The kernels that can run a recurrent layer's ranges, and what a call and a step of each cost.

A plan of few, long ranges wins where calls are dear, one of little recomputation where steps are;
and which kernel is the fastest depends on both. The costs are nominal: measured once, by
``benchmarks/range_costs.py``, and not on the user's machine, so that a budget gives the same
schedule, and the same sums, on every run. They count as arithmetic what a call takes besides it:

    step     = flops / rate + overhead of a step
    call     = overhead of a call
    backward = what recording and backpropagating a step costs more than running it forward

in units of a step of torch's own kernel.
"""

from dataclasses import dataclass
from typing import Literal

from retrograde.execute.dropout import Dropout
from retrograde.execute.fused import (
    Fused,
    Kernel,
    Layers,
    run_lean,
    run_lean_record,
    run_torch,
)
from retrograde.execute.profile import Candidate
from retrograde.nn.compiled import Compiled, has_slopes, is_fast

__all__ = ["candidates"]


@dataclass(frozen=True)
class _Costs:
    """What a kernel takes on a CPU, arithmetic and overheads in floating point operations.

    Attributes:
        rate: how many operations it does while the best one does one.
        step: the overhead of a step.
        call: the overhead of a call, forward or backward.
        backward: recording and backpropagating a step, in forward steps of its own.
    """

    rate: float
    step: float
    call: float
    backward: float

    def forward(self, flops: float) -> float:
        return flops / self.rate + self.step


# oneDNN's LSTM, and torch's own loop for the other kinds; the lean kernel's forward pass is counted
# where it is recorded, being the slower one.
_TORCH_LSTM = _Costs(rate=1.0, step=5e5, call=3e7, backward=2.0)
_TORCH_OTHERS = _Costs(rate=1.0, step=5e5, call=1.5e6, backward=2.0)
_LEAN_RECORD = _Costs(rate=1.0, step=5e5, call=3e7, backward=2.8)
_LEAN = _Costs(rate=1.0, step=5e5, call=3e7, backward=3.3)
_COMPILED = _Costs(rate=1.0, step=1e4, call=1e6, backward=2.0)


def candidates(
    nets: tuple[Layers, ...],
    batch: int,
    *,
    way: Literal["sequential", "scan"] | None = None,
    dropout: Dropout | None = None,
    packed: bool = False,
    whole: bool = True,
) -> list[Candidate]:
    """The cores that can run layers.

    Args:
        nets: the layers of one direction, or one layer for each of two.
        batch: how many sequences.
        way: how to go backward, if that was asked.
        dropout: what is dropped between the layers.
        packed: whether the sequences are packed.
        whole: whether torch's own module can run these layers too, so that with memory enough it
            will.

    Returns:
        A candidate for each kernel.
    """
    weights = [w for net in nets for w in net.weights if w.dim() == 2]
    flops = 2.0 * batch * sum(w.numel() for w in weights)
    lstm = nets[0].mode == "LSTM"
    usual = _TORCH_LSTM if lstm else _TORCH_OTHERS
    kernels: list[tuple[Kernel, _Costs]] = [(run_torch, usual)]
    if way is not None and has_slopes(nets[0]):
        kernels = [(Compiled(way), _COMPILED)]
    elif is_fast(nets[0]) and not packed:
        kernels += [(run_lean_record, _LEAN_RECORD), (run_lean, _LEAN)] if lstm else []
        kernels += [(Compiled(), _COMPILED)]
    return [
        Candidate(
            Fused(nets, kernel, dropout, packed),
            pace=costs.forward(flops) / usual.forward(flops),
            call_steps=costs.call / costs.forward(flops),
            backward_steps=costs.backward,
            scheduled=not (whole and kernel is run_torch),
        )
        for kernel, costs in kernels
    ]
