"""The kernels that can run a recurrent layer's ranges, and what a call and a step of each cost.

A plan of few, long ranges wins where calls are dear, one of little recomputation where steps are;
and which kernel is the fastest depends on both. The costs are nominal: what
``benchmarks/range_costs.py`` measured once, and not the user's machine, so that a budget gives the
same schedule, and the same sums, on every run. In microseconds, for layers of W weights:

    forward step  = step + flops / rate
    advancing     = call + weight · W        a call, besides its steps
    recording     = record + weighed · W     a call, and one backward, besides their steps
    backward step = backward · forward step  beyond running it forward
"""

from dataclasses import dataclass
from typing import Literal

from retrograde.cores.dropout import Dropout
from retrograde.cores.fastest import Candidate
from retrograde.cores.fused import Fused, Kernel, Layers, run_torch
from retrograde.cores.recurrent.ranges import RunHeld, has_slopes
from retrograde.kernels import kernels

__all__ = ["candidates"]


@dataclass(frozen=True)
class _Costs:
    """What a kernel takes; times in microseconds, rates in operations to one.

    Attributes:
        step: a step, besides its arithmetic.
        rate: of its arithmetic.
        backward: recording and backpropagating a step, in forward steps.
        call: a call that advances.
        record: a call that records, and the one that goes back.
        weight: for each weight, of a call that advances.
        weighed: for each weight, of recording and going back.
    """

    step: float
    rate: float
    backward: float
    call: float
    record: float
    weight: float = 0.0
    weighed: float = 0.0

    def forward(self, flops: float) -> float:
        """A forward step."""
        return self.step + flops / self.rate


# With what the executor adds to a call, some 40 µs to advance and 130 to record and go back.
_CPU = {
    "LSTM": _Costs(step=1.2, rate=1.6e5, backward=2.2, call=130, record=500),
    "GRU": _Costs(step=14, rate=1.1e5, backward=3.0, call=70, record=300),
    "RNN": _Costs(step=5, rate=1.1e5, backward=3.0, call=70, record=260),
    "compiled": _Costs(
        step=0.2, rate=1.35e5, backward=2.0, call=130, record=600, weight=9e-4, weighed=5e-3
    ),
}
# Not measured: launches count, arithmetic hardly does.
_CUDA = _Costs(step=5, rate=2e7, backward=2.0, call=100, record=400)


def candidates(
    nets: tuple[Layers, ...],
    batch: int,
    *,
    way: Literal["sequential", "scan"] | None = None,
    dropout: Dropout | None = None,
    packed: bool = False,
    whole: bool = True,
    extra_bytes: int = 0,
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
        extra_bytes: as :class:`Candidate` has it.

    Returns:
        A candidate for each kernel.
    """
    on_cpu = nets[0].weights[0].device.type == "cpu"
    usual = _CPU[nets[0].mode.split("_")[0]] if on_cpu else _CUDA
    compiled = _CPU["compiled"] if on_cpu else _CUDA
    known: list[tuple[Kernel, _Costs]] = [(run_torch, usual)]
    weight = nets[0].weights[1]
    if way is not None and has_slopes(nets[0]):
        known = [(RunHeld(way), compiled)]
    elif has_slopes(nets[0]) and not packed and len(nets) == 1:
        fast = kernels(weight.device.type, weight.dtype, weight.shape[1]).backward is not None
        known += [(RunHeld(), compiled)] if fast else []
    weights = sum(w.numel() for net in nets for w in net.weights if w.dim() == 2)
    found = []
    for kernel, costs in known:
        step = costs.forward(2.0 * batch * weights)
        candidate = Candidate(
            Fused(nets, kernel, dropout, packed),
            pace=step,
            call_steps=(costs.call + costs.weight * weights) / step,
            record_steps=(costs.record + costs.weighed * weights) / step,
            backward_steps=costs.backward,
            scheduled=not (whole and kernel is run_torch),
            extra_bytes=extra_bytes,
        )
        found.append(candidate)
    return found
