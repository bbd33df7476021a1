"""Ordinary BPTT beside the budgeted LSTM: same weights, same batch, same output gradient.

Both run forward and backward in this process, and only the LSTM runs: nothing else differs. Bytes
are measured in a call of their own. Seconds are measured in calls that alternate, so that the load
of the machine affects both sides alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrograde.figures.memory import Curve
from retrograde.machine import is_out_of_memory
from retrograde.measure.allocations import Measurement, measure
from retrograde.training.options import TrainingError
from retrograde.training.task import CharacterModel
from retrograde.units import format_bytes

__all__ = ["Comparison", "Side", "compare"]

_POINTS = 4000
_SIDES = ("budgeted", "ordinary")
Tensors = tuple[Tensor, ...]
Call = Callable[[], Tensors]


@dataclass(frozen=True)
class Side:
    """The measurements of one side. They are the peak of its working bytes, the median seconds of
    an iteration, and working bytes over time."""

    working_bytes: int
    seconds: float
    curve: Curve


@dataclass(frozen=True)
class Comparison:
    """The LSTM within its budget beside ``torch.nn.LSTM``, and how far their gradients differ.

    Attributes:
        ordinary: None where the machine has too little memory for it.
        gradient_difference: the largest difference of any element, relative to its gradient's
            largest element, over inputs and parameters; None where ``ordinary`` is None.
        failure: the reason why there is no ordinary side; else empty.
    """

    budget_bytes: int
    budgeted: Side
    ordinary: Side | None
    gradient_difference: float | None
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain containers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "Comparison":
        """Read the result of :meth:`as_dict`; TrainingError if it is not complete."""
        try:
            return cls(**values | {name: _side_from(values[name]) for name in _SIDES})
        except (KeyError, TypeError, AttributeError) as error:
            expected = ", ".join(field.name for field in fields(cls))
            raise TrainingError(
                f"the comparison with ordinary BPTT is incomplete ({error}): expected {expected}; "
                "use a complete checkpoint of this version, or start a new run without "
                "--resume"
            ) from error


def compare(model: CharacterModel, codes: Tensor, targets: Tensor, repeats: int = 3) -> Comparison:
    """Run the model's LSTM on one batch, within its budget and without one, timed ``repeats``
    times. Weights and gradients stay unchanged. Raises BudgetError if the budget is too small for
    the LSTM."""
    inputs = model.embedding(codes).detach().requires_grad_()
    fit = model.lstm.fit(inputs)
    gradient = _output_gradient(model, inputs, targets)
    within = _call(model.lstm, inputs, gradient)
    unlimited = _call(_ordinary_lstm(model.lstm), inputs, gradient)
    failure = _obstacle(unlimited, fit.ordinary_bytes)
    if failure:
        (seconds,) = _take_turns([within], repeats)
        return Comparison(fit.budget_bytes, _side(measure(within), seconds), None, None, failure)
    ours, theirs = _take_turns([within, unlimited], repeats)
    budgeted, ordinary = measure(within), measure(unlimited)
    return Comparison(
        fit.budget_bytes,
        _side(budgeted, ours),
        _side(ordinary, theirs),
        _largest_difference(budgeted.value, ordinary.value),
    )


def _side_from(values: dict[str, Any] | None) -> Side | None:
    return None if values is None else Side(**values | {"curve": Curve(**values["curve"])})


def _side(measurement: Measurement[Tensors], seconds: float) -> Side:
    times, working = measurement.times.tolist(), measurement.working.tolist()
    return Side(measurement.working_bytes, seconds, Curve(times, working).thinned(_POINTS))


def _ordinary_lstm(lstm: nn.LSTM) -> nn.LSTM:
    ordinary = nn.LSTM(lstm.input_size, lstm.hidden_size)
    ordinary.load_state_dict(lstm.state_dict())
    return ordinary


def _output_gradient(model: CharacterModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of this batch's loss by the LSTM's outputs."""
    with torch.no_grad():
        outputs = model.lstm(inputs)[0]
    outputs.requires_grad_()
    logits = model.linear(outputs).flatten(0, 1)
    loss = functional.cross_entropy(logits, targets.flatten())
    gradient: Tensor = torch.autograd.grad(loss, outputs)[0]
    return gradient


def _call(lstm: nn.LSTM, inputs: Tensor, gradient: Tensor) -> Call:
    """Return a call of forward and backward, which returns gradients, then outputs."""
    sources = (inputs, *lstm.parameters())

    def call() -> Tensors:
        outputs, _ = lstm(inputs)
        return (*torch.autograd.grad(outputs, sources, gradient), outputs.detach())

    return call


def _obstacle(call: Call, expected_bytes: int) -> str:
    """Return why a call lacks memory, in words; empty if it ran. The free memory is read first: a
    system that overcommits memory kills a process instead of raising an error."""
    free = _free_bytes()
    if free is not None and expected_bytes > free:
        return f"would hold {format_bytes(expected_bytes)}; {format_bytes(free)} are free"
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return "out of memory"
    return ""


def _free_bytes() -> int | None:
    """Return the bytes that the system has available; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(sizes[0]) if sizes else None


def _take_turns(calls: list[Call], repeats: int) -> list[float]:
    """Return the seconds of each call, the median over ``repeats`` rounds."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def _largest_difference(ours: Tensors, theirs: Tensors) -> float:
    """Return the largest difference over all gradients; the last tensors are the outputs."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)).item()
        for a, b in zip(ours[:-1], theirs[:-1], strict=True)
    )
