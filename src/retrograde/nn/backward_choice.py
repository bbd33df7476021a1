"""The choice of a module's backward pass, and its reason: ``backward="auto"``, :func:`explain`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError
from retrograde.kernels import LARGEST_SIZE, Kernels, kernels
from retrograde.kernels.cells import Kind
from retrograde.nn.calibration import BACKWARDS, contenders, timings
from retrograde.nn.call import check_measurable
from retrograde.nn.chain_scan import ScanChoice
from retrograde.nn.weights import last_weights
from retrograde.scan.block_lengths import scan_plan
from retrograde.units import aligned

if TYPE_CHECKING:
    from retrograde.nn.recurrent import BudgetedRNN
    from retrograde.nn.sequential import Sequential

__all__ = ["Explanation", "check_slopes", "choose_backward", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The algorithm of a call's backward pass, and the reason.

    Attributes:
        choice: "torch", "sequential" or "scan".
        why: the reason, in a sentence.
        seconds: expected seconds of each algorithm, forward and backward together.
        step_seconds: the latency of one more step of each algorithm.
        call_seconds: the cost of a call of each algorithm, its steps aside.
        kernels: the implementation of the sequential sweep and the scan: "numba", "triton" or
            "torch".
        chunk: steps in a chunk of the scan.
    """

    choice: str
    why: str
    seconds: dict[str, float]
    step_seconds: dict[str, float]
    call_seconds: dict[str, float]
    kernels: str
    chunk: int

    def __str__(self) -> str:
        rows = [("algorithm", "expected", "a step", "a call")]
        for name in BACKWARDS:
            call = f"{self.call_seconds[name] * 1e3:.2f} ms"
            step = f"{self.step_seconds[name] * 1e6:.2f} µs"
            rows.append((name, f"{self.seconds[name] * 1e3:.2f} ms", step, call))
        last = f"kernels: {self.kernels}; the scan's chunks: {self.chunk} steps"
        return f"{self.choice}: {self.why}\n{aligned(rows)}\n{last}"


def choose_backward(
    module: "BudgetedRNN", steps: int, samples: int, like: Tensor
) -> Literal["sequential", "scan"] | None:
    """Return the algorithm of a module with ``backward`` set; None for torch's own pass. Raises
    CellError if the module has projections, which have no Jacobian here."""
    check_slopes(module)
    if torch.is_autocast_enabled(like.device.type):
        return None  # torch's kernels know which part of a cell runs in which type
    choice: Any = module.backward
    if choice == "auto":
        choice = fastest(module, steps, samples, like.requires_grad)
    return choice if choice in ("sequential", "scan") else None


def check_slopes(module: "BudgetedRNN") -> None:
    """Refuse a module that has no Jacobians here, by a CellError."""
    if module.proj_size:
        raise CellError(
            f"proj_size={module.proj_size} has no Jacobian here: expected an LSTM without "
            "projections; use backward=None, or a Linear layer after the LSTM"
        )


def fastest(module: "BudgetedRNN", steps: int, samples: int, needs_x: bool) -> str:
    found = timings(module, samples, steps, needs_x)
    return min(contenders(found), key=lambda name: found[name].seconds(steps))


@overload
def explain(module: "BudgetedRNN", input: Tensor | PackedSequence) -> Explanation: ...


@overload
def explain(module: "Sequential", input: Tensor) -> ScanChoice: ...


def explain(
    module: "BudgetedRNN | Sequential", input: Tensor | PackedSequence
) -> Explanation | ScanChoice:
    """Return the chosen algorithm for an input, the reason, and the predicted time of each.

    Args:
        module: an :class:`retrograde.RNN`, :class:`retrograde.GRU`, :class:`retrograde.LSTM` or
            :class:`retrograde.Sequential`.
        input: as for a call; for a recurrent module, only the shape matters.

    Returns:
        An :class:`Explanation`, or for a ``Sequential`` a
        :class:`~retrograde.nn.chain_scan.ScanChoice`; ``print`` shows either as a table.

    Raises:
        CellError: the module is not one of ours, has no Jacobians, or cannot be measured.
        ScanError: a layer of the ``Sequential`` has no Jacobian, or its Jacobian is too large.

    Example:
        >>> import retrograde as rg
        >>> found = explain(rg.GRU(3, 5, backward="scan"), torch.randn(40, 2, 3))
        >>> found.choice, found.kernels
        ('scan', 'numba')
    """
    from retrograde.nn.recurrent import BudgetedRNN
    from retrograde.nn.sequential import Sequential

    if isinstance(module, Sequential) and isinstance(input, Tensor):
        return module.explain(input)
    if not isinstance(module, BudgetedRNN):
        raise CellError(
            f"got a {type(module).__name__}: expected an rg.RNN, rg.GRU, rg.LSTM or rg.Sequential"
        )
    if isinstance(input, PackedSequence):
        steps, samples, data = len(input.batch_sizes), int(input.batch_sizes[0]), input.data
    else:
        steps, samples = module._time_major(input, ())[0].shape[:2]
        data = input
    check_measurable([data, *last_weights(module)])
    found = timings(module, samples, steps, data.requires_grad)
    chosen = choose_backward(module, steps, samples, data) if module.backward else None
    weight = cast(Tensor, module._flat_weights[0])
    real = torch.float64 if weight.dtype == torch.float64 else torch.float32
    loops = kernels(weight.device.type, real, module.hidden_size)
    use = "torch" if loops.refusal else loops.name
    choice = chosen or "torch"
    kind, size = cast(Kind, module.mode), module.hidden_size
    shape: Any = (samples, module.input_size, size, weight.dtype, weight.device.type)
    return Explanation(
        choice=choice,
        why=_why(module, weight, loops, choice),
        seconds={name: found[name].seconds(steps) for name in BACKWARDS},
        step_seconds={name: found[name].step_seconds for name in BACKWARDS},
        call_seconds={name: found[name].call_seconds for name in BACKWARDS},
        kernels=use,
        chunk=scan_plan(kind, steps, *shape).chunk,
    )


def _why(module: "BudgetedRNN", weight: Tensor, use: Kernels, choice: str) -> str:
    """Return the reason, and the obstacle to the compiled kernels if there is one."""
    reason = f"backward={module.backward!r} asks for it"
    if torch.is_autocast_enabled(weight.device.type):
        reason = "under autocast torch's own pass is used"
    elif module.backward is None:
        reason = "backward=None is torch's own pass"
    elif module.backward == "auto":
        reason = "it is expected to be the fastest"
    obstacle = None
    if use.refusal:
        obstacle = f"Triton cannot launch its kernels ({use.refusal})"
    elif use.name == "torch":
        obstacle = f"there are no compiled kernels for {weight.dtype} on {weight.device.type}"
    elif use.wide is not None and choice == "scan":
        obstacle = f"H = {module.hidden_size} > {LARGEST_SIZE} is too large for the scan's kernels"
    if obstacle and choice != "torch":
        reason += f"; {obstacle}, so torch's own operations are called step by step"
    return reason
