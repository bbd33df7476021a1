"""``torch.nn.Sequential`` within a byte budget, or backpropagated by a parallel scan.

With ``memory=`` alone, the layers are a chain that runs by a schedule
(:mod:`retrograde.models.chain_plans`). With ``backward="scan"``, the backward pass is a scan over
Jacobians (:mod:`retrograde.scan.chain_scan`), and ``memory`` bounds the bytes of these.
"""

from collections import OrderedDict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.errors import NotExactError, ScanError
from retrograde.models.chain_plans import CHAINS, ChainFit, ChainPlans, named_layers
from retrograde.run.states import shaped
from retrograde.run.transforms import uncompiled
from retrograde.scan.chain_scan import SCAN_CHOICES, ChainScan, ScanChoice
from retrograde.scan.sparse.feedforward import Algorithm
from retrograde.scan.sparse.rules import register_layer
from retrograde.scan.sparse.transposed import room
from retrograde.sizes.cache import LRUCache
from retrograde.units import Memory, parse_memory

_OPTIONS = ("memory", "backward", "algorithm", "levels")
_ALGORITHMS = ("auto", "linear", "blelloch", "hybrid")


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
        self._plans = ChainPlans()

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
        found = None
        if self.backward is not None:
            found = self._scan().run(_flat(self), input)
        elif self.memory is not None:
            found = self._plans.run(self, self.memory, input)
        return super().forward(input) if found is None else found  # type: ignore[no-untyped-call]

    def fit(self, input: object) -> ChainFit:
        """Return the schedule that the budget gives for an input; nothing is trained.

        Args:
            input: as for a call, or a shape; every layer is measured on an input like it.

        Returns:
            A :class:`~retrograde.models.chain_plans.ChainFit`; ``print`` shows it.

        Raises:
            BudgetError: as for a call.
            NotExactError: as for a call; also if ``memory`` is None or ``backward`` is set.
        """
        if self.backward is not None or self.memory is None:
            raise NotExactError(
                f"memory={self.memory!r} and backward={self.backward!r}: expected a memory and no "
                "backward; only layers within a budget have a schedule"
            )
        return self._fit_within(self.memory, shaped(input, self))

    def _fit_within(self, memory: Memory, input: object) -> ChainFit:
        """Return the result of :meth:`fit` for another budget; nothing is changed."""
        return self._plans.fit(self, memory, input)

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


CHAINS.add(Sequential)
# A chain inside another layer is part of that layer's Jacobian.
register_layer(Sequential, parts=lambda net: nn.Sequential(*net))


def _flat(net: nn.Sequential) -> list[nn.Module]:
    """Return the layers, with the layers of nested chains in place of these."""
    return [one for _, one in named_layers(net, all_chains=True)]


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
    if memory is not None and backward is None:
        parse_memory(memory)
    elif memory is not None:
        room(memory, torch.device("cpu"))  # raises if it cannot be read
