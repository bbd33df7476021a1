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
from typing import Literal, cast

from retrograde.cores.compiled import Compiled, has_slopes, is_fast
from retrograde.cores.dropout import Dropout
from retrograde.cores.fastest import Candidate
from retrograde.cores.fused import (
    Fused,
    Kernel,
    Layers,
    run_lean,
    run_lean_record,
    run_torch,
)
from retrograde.cores.loops import Direct
from retrograde.run.core import Core

__all__ = ["Runner", "candidates", "core_of", "runner_of"]

#: What runs a range: a kernel, or :class:`Direct`.
Runner = Kernel | type[Direct]


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
    "lean": _Costs(step=20, rate=0.85e5, backward=1.2, call=130, record=550),
    "compiled": _Costs(
        step=0.2, rate=1.35e5, backward=2.0, call=130, record=600, weight=9e-4, weighed=5e-3
    ),
    "direct": _Costs(
        step=0.2, rate=1.35e5, backward=2.0, call=100, record=250, weight=9e-4, weighed=3e-3
    ),
}
# Not measured: launches count, arithmetic hardly does.
_CUDA = _Costs(step=5, rate=2e7, backward=2.0, call=100, record=400)


def core_of(
    runner: Runner,
    nets: tuple[Layers, ...],
    dropout: Dropout | None = None,
    packed: bool = False,
    at_once: bool = False,
) -> Core:
    """The core in which layers are run.

    Args:
        runner: what runs them.
        nets: the layers of one direction, or one layer for each of two.
        dropout: what is dropped between the layers.
        packed: whether the sequences are packed.
        at_once: as :func:`retrograde.cores.loops.sums_at_once` has it.

    Returns:
        The core.
    """
    if runner is Direct:
        return Direct(nets[0], at_once)
    return Fused(nets, cast(Kernel, runner), dropout, packed)


def runner_of(core: Core) -> Runner:
    """What :func:`core_of` was given for a core."""
    return Direct if isinstance(core, Direct) else cast(Fused, core).kernel


def candidates(
    nets: tuple[Layers, ...],
    batch: int,
    *,
    way: Literal["sequential", "scan"] | None = None,
    dropout: Dropout | None = None,
    packed: bool = False,
    whole: bool = True,
    at_once: bool | None = None,
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
        at_once: as for :func:`core_of`; None for cores that autograd can differentiate only.
        extra_bytes: as :class:`Candidate` has it.

    Returns:
        A candidate for each kernel.
    """
    lstm, on_cpu = nets[0].mode == "LSTM", nets[0].weights[0].device.type == "cpu"
    usual = _CPU[nets[0].mode.split("_")[0]] if on_cpu else _CUDA
    compiled = _CPU["compiled"] if on_cpu else _CUDA
    kernels: list[tuple[Runner, _Costs, _Costs]] = [(run_torch, usual, usual)]
    if way is not None and has_slopes(nets[0]):
        kernels = [(Compiled(way), compiled, compiled)]
    elif is_fast(nets[0]) and not packed:
        lean = [(run_lean_record, usual, _CPU["lean"]), (run_lean, _CPU["lean"], _CPU["lean"])]
        alone = at_once is not None and len(nets) == 1 and dropout is None
        ours: tuple[Runner, _Costs] = (Compiled(), compiled)
        if alone:
            ours = (Direct, _CPU["direct"])
        kernels += [*(lean if lstm else []), (*ours, ours[1])]
    weights = sum(w.numel() for net in nets for w in net.weights if w.dim() == 2)
    found = []
    for kernel, advancing, recording in kernels:
        step, recorded = (costs.forward(2.0 * batch * weights) for costs in (advancing, recording))
        candidate = Candidate(
            core_of(kernel, nets, dropout, packed, bool(at_once)),
            pace=step,
            call_steps=(advancing.call + advancing.weight * weights) / step,
            record_steps=(recording.record + recording.weighed * weights) / step,
            backward_steps=recorded * (1 + recording.backward) / step - 1,
            scheduled=not (whole and kernel is run_torch),
            extra_bytes=extra_bytes,
        )
        found.append(candidate)
    return found
