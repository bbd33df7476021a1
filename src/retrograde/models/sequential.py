"""``torch.nn.Sequential`` within a byte budget, or backpropagated by a parallel scan.

With ``memory=`` alone, the first call for a kind of input tries every layer, measures it
(``chain_units.py``), and finds a plan for the budget (:mod:`retrograde.plan.calls`). Later calls
look these up. Measured times decide which plan is fastest, and they vary. So another process may
follow another plan; its gradient is the same, bit for bit.

With ``backward="scan"``, the backward pass is a scan over Jacobians
(:mod:`retrograde.scan.chain_scan`), and ``memory`` bounds the bytes of these.
"""

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.errors import NotExactError, ScanError
from retrograde.models.chain_units import NOTHING, Layers, measured
from retrograde.models.rows.arguments import Arguments, made_by, tensors_in
from retrograde.models.rows.call_sizes import PassMeasurements, Plans, larger
from retrograde.models.rows.running_plan import RunningPlan
from retrograde.plan.calls import CallSizes, Part, Way, kept_whole, peak_of, seconds_of
from retrograde.run.states import bytes_of_gradients, shaped
from retrograde.run.transforms import besides_forward, uncompiled
from retrograde.scan.chain_scan import SCAN_CHOICES, ChainScan, ScanChoice
from retrograde.scan.sparse.feedforward import Algorithm
from retrograde.scan.sparse.rules import register_layer
from retrograde.scan.sparse.transposed import room
from retrograde.sizes.cache import LRUCache
from retrograde.units import Memory, MemoryAttribute, as_bytes, format_bytes

_OPTIONS = ("memory", "backward", "algorithm", "levels")
_ALGORITHMS = ("auto", "linear", "blelloch", "hybrid")


@dataclass(frozen=True, eq=False)
class ChainFit:
    """The plan of the layers of a ``Sequential`` for a budget; ``print`` shows it.

    Attributes:
        names: of the layers; those that share memory have one name.
        sizes: of each layer's call.
        parts: how each call is kept.
        budget_bytes: the budget.
        minimum_bytes: the least budget.
        ordinary_bytes: the memory of ordinary backpropagation.
        peak_bytes: the predicted peak of the plan.
        beside_bytes: the output with its gradient, and the gradients of parameters and input. They
            are the caller's, so they come on top.
        seconds: the predicted time of an iteration.
        ordinary_seconds: the same for ordinary backpropagation.
    """

    names: tuple[str, ...]
    sizes: tuple[CallSizes, ...]
    parts: tuple[Part, ...]
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    peak_bytes: int
    beside_bytes: int
    seconds: float
    ordinary_seconds: float

    @property
    def ordinary(self) -> bool:
        """Whether ordinary backpropagation fits the budget. If so, it is what runs."""
        return self.parts == kept_whole(self.sizes)

    @property
    def forward_layers(self) -> int:
        """The number of layers that run forward, each as often as it runs."""
        kept, dropped = Way(0, 0, 0, again_seconds=1.0), Way(0, 0, 0, seconds=1.0, dropped=True)
        units = [CallSizes(0, 0, 0, 1.0, (kept, kept, dropped, dropped))] * len(self.sizes)
        return len(units) + round(seconds_of(units, self.parts))

    def __str__(self) -> str:
        ratio = self.seconds / (self.ordinary_seconds or 1.0)
        return (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"ordinary backpropagation holds {format_bytes(self.ordinary_bytes)}, and "
            f"{format_bytes(self.minimum_bytes)} would do\n"
            f"{format_bytes(self.beside_bytes)} of outputs and gradients come on top\n"
            f"{self.forward_layers} layers run forward for {len(self.names)}: {self.seconds:.3g} s "
            f"an iteration, {ratio:.2f} times ordinary backpropagation's"
        )


class Sequential(nn.Sequential):
    """:class:`torch.nn.Sequential`, backpropagated within a budget or by a parallel scan.

    Parameters, ``state_dict``, indexing and hooks on outputs are torch's. Within a budget, outputs
    and gradients are those of ordinary backpropagation, bit for bit if the layers are
    deterministic. By the scan, they differ only through the order of additions.

    Args:
        layers: modules, or one ordered dict of them. Within a budget, any layers are allowed:
            dropout, batch normalisation, residual blocks, layers that return pytrees of tensors.
            For the scan, each layer needs a transposed Jacobian: torch's convolutions, linear
            layers, activations, poolings, padding, dropout, batch normalisation in evaluation
            mode, ``torch.nn.Sequential``, :class:`retrograde.Residual`, and layers registered
            with :func:`retrograde.scan.register_layer`.
        memory: the budget for a forward and backward pass, beyond the output and the gradients that
            the caller gets: bytes (``67108864``), a size (``"2GiB"``), or a fraction of ordinary
            backpropagation's memory (``0.5``, ``"50%"``). None: torch's own pass. With
            ``backward="scan"``: the bytes for Jacobians and their products; None: half of the
            device's memory. If all samples need more, fewer are processed at a time.
        backward: ``"scan"``, or None for the layers' own backward passes.
        algorithm: ``"linear"``, ``"blelloch"``, ``"hybrid"`` with some ``levels``, or ``"auto"``:
            the number of levels with the shortest critical path, in FLOPs, of those that fit. If
            it is 0, or none fits, the layers' own backward passes run, without Jacobians.
        levels: the levels of ``"hybrid"``.

    Raises:
        ScanError: an option is unknown.
        UnitError: the memory cannot be read.

    Example:
        >>> deep = Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)),
        ...                   memory="40%")
        >>> deep(torch.randn(64, 8)).sum().backward()
        >>> net = Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), backward="scan")
        >>> x = torch.randn(2, 3, 8, 8, requires_grad=True)
        >>> net(x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 3, 8, 8])
    """

    memory = MemoryAttribute()

    def __init__(
        self,
        *layers: Any,
        memory: Memory | None = None,
        backward: Literal["scan"] | None = None,
        algorithm: Algorithm = "auto",
        levels: int | None = None,
    ) -> None:
        super().__init__(*layers)
        _check_options(backward, algorithm, levels, memory)
        self.backward, self.algorithm, self.levels = backward, algorithm, levels
        self.memory = memory
        self._scan_choices: LRUCache[ScanChoice] = LRUCache(most=SCAN_CHOICES)
        self._plans = Plans()

    @uncompiled
    def forward(self, input: object) -> Any:
        """Run the layers.

        Args:
            input: the input of the first layer: a tensor, or within a budget a pytree of tensors.
                For the scan, one tensor (samples, …).

        Returns:
            The last layer's output.

        Raises:
            BudgetError: the memory is too small; the message names the least budget.
            NotExactError: within a budget, a layer cannot be run exactly.
            ScanError: with ``backward="scan"``, a layer has no Jacobian, or none that fits.
        """
        output = None
        if self.backward is not None:
            output = self._scan().run(_flat(self), input)
        elif self.memory is not None and torch.is_grad_enabled():
            output = self._run_within(self.memory, input)
        return super().forward(input) if output is None else output  # type: ignore[no-untyped-call]

    def fit(self, input: object) -> ChainFit:
        """Return the schedule that the budget gives for an input; nothing is trained.

        Args:
            input: as for a call, or a shape; every layer is measured on an input like it.

        Returns:
            A :class:`~retrograde.models.sequential.ChainFit`; ``print`` shows it.

        Raises:
            BudgetError: as for a call.
            NotExactError: as for a call; also if ``memory`` is None or ``backward`` is set.
        """
        if self.backward is not None or self.memory is None:
            raise NotExactError(
                f"memory={self.memory!r} and backward={self.backward!r}: expected a memory and no "
                "backward; only layers within a budget have a schedule"
            )
        if (measurements := self._kind(input := shaped(input, self))) is None:
            raise NotExactError(NOTHING)
        wanted = *tensors_in(input), *self.parameters()
        plan = measurements.plan(allowed := as_bytes(self.memory, measurements.ordinary_bytes))
        seconds, ordinary = measurements.seconds(allowed)
        return ChainFit(
            names=tuple(unit.name for unit in measurements.units),
            sizes=(*measurements.sizes,),
            parts=plan,
            budget_bytes=allowed,
            minimum_bytes=measurements.least_bytes,
            ordinary_bytes=measurements.ordinary_bytes,
            peak_bytes=peak_of(measurements.sizes, plan),
            beside_bytes=2 * measurements.sizes[-1].output_bytes + bytes_of_gradients(wanted),
            seconds=seconds,
            ordinary_seconds=ordinary,
        )

    def _run_within(self, memory: Memory, input: object) -> Any:
        """Return the last layer's output, or None where torch's own pass should run."""
        if (measurements := self._kind(input)) is None:
            return None
        plan = measurements.plan(allowed := as_bytes(memory, measurements.ordinary_bytes))
        if measurements.is_ordinary(plan) and not measurements.most:
            return None
        row, grown = RunningPlan(plan, measurements.tied), list[str]()
        before, value, made = None, input, list[Tensor | None]()
        for number, unit in enumerate(measurements.units):
            arguments = Arguments((value,))
            with measurements.watched(number, [self], arguments, made if number else None) as grew:
                value, before = row.run(number, unit, unit.forward, arguments, made, before)
                grew += [unit.name] * measurements.is_whole(number, before, made)
            made = made_by(value, arguments.tensors if unit.fill is None else ())
            grown += grew
        if grown and (need := peak_of(measurements.sizes, plan)) > allowed:
            warnings.warn(larger(grown[0], need, allowed, measurements), stacklevel=4)
        return value

    def _kind(self, input: object) -> PassMeasurements | None:
        """Return what is known of the layers for an input of this kind. It is None if nothing
        requires a gradient, or a tensor is not real."""
        layers = named_layers(self)
        find = partial(measured, layers, input, self._plans)
        return self._plans.kind_of([layer for _, layer in layers], Arguments((input,)), find)

    def explain(self, input: Tensor) -> ScanChoice:
        """Return the scan that a call would use, and the reason; nothing is trained.

        Args:
            input: as for a call; the layers are run on it.

        Returns:
            The choice; ``print`` shows it as a table.

        Raises:
            ScanError: as for a call.
        """
        return self._scan().explain(_flat(self), input)

    def _scan(self) -> ChainScan:
        return ChainScan(self.algorithm, self.levels, self.memory, self._scan_choices)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        chosen = OrderedDict(list(self._modules.items())[index])
        return type(self)(chosen, **{name: vars(self)[name] for name in _OPTIONS})

    def extra_repr(self) -> str:
        """Return the options that are set."""
        options = ((name, vars(self)[name]) for name in _OPTIONS)
        return ", ".join(f"{k}={v!r}" for k, v in options if v not in (None, "auto"))


# A chain inside another layer is part of that layer's Jacobian.
register_layer(Sequential, parts=lambda net: nn.Sequential(*net))


def _flat(net: nn.Sequential) -> list[nn.Module]:
    """Return the layers, with the layers of nested chains in place of these."""
    return [layer for _, layer in named_layers(net, all_chains=True)]


def named_layers(net: nn.Module, *, all_chains: bool = False, prefix: str = "") -> Layers:
    """Return the layers with dotted names, those of nested chains one by one. A chain with hooks
    stays whole, and so does one with its own budget or scan unless ``all_chains``."""
    layers: list[tuple[str, nn.Module]] = []
    for name, layer in net._modules.items():  # one layer may stand in it twice
        assert layer is not None
        asked = [vars(layer).get(option) for option in ("memory", "backward")]
        opens = type(layer) in (nn.Sequential, Sequential) and (all_chains or asked == [None, None])
        if opens and besides_forward(layer) is None:
            layers += named_layers(layer, all_chains=all_chains, prefix=f"{prefix}{name}.")
        else:
            layers.append((f"{prefix}{name}", layer))
    return layers


def _check_options(backward: Any, algorithm: Any, levels: Any, memory: Memory | None) -> None:
    if backward not in (None, "scan"):
        raise ScanError(f"backward={backward!r}: expected 'scan', or None for torch's own")
    if algorithm not in _ALGORITHMS:
        raise ScanError(f"algorithm={algorithm!r}: expected one of {', '.join(_ALGORITHMS)}")
    if (algorithm == "hybrid") != (levels is not None):
        raise ScanError(
            f"algorithm={algorithm!r} and levels={levels!r}: expected levels with 'hybrid', and "
            "with no other"
        )
    if levels is not None and levels < 0:
        raise ScanError(f"levels={levels}: expected 0 (linear) or more")
    if memory is not None and backward is not None:
        room(memory, torch.device("cpu"))  # raises if it cannot be read
