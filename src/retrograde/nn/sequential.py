"""``torch.nn.Sequential`` within a byte budget, or backpropagated by a parallel scan.

With ``memory=`` alone it is a deep chain (:mod:`retrograde.nn.chain_plans`). With
``backward="scan"`` its backward pass is a scan over sparse transposed Jacobians: forward, every
layer runs as usual, cut off from the one before; backward, the scan finds the gradient of every
layer's output; then each layer's parameters get theirs, by the layer's own backward pass, none
waiting for another (W20, section 3.1).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.discover.captured import foreign_tensors
from retrograde.discover.surroundings import muted_hooks
from retrograde.errors import CellError, RetrogradeError, ScanError
from retrograde.jacobians.composition import Residual
from retrograde.jacobians.feedforward import Algorithm, Step, observe_steps, scan_gradients
from retrograde.jacobians.rules import register_layer
from retrograde.jacobians.transposed import room
from retrograde.nn.chain_plans import ChainFit, Plans, named_layers
from retrograde.nn.scan_choice import Outlook, outlook_of
from retrograde.run.transforms import refuse_transforms, uncompiled
from retrograde.units import Memory, parse_memory

__all__ = ["Residual", "Sequential"]

_ALGORITHMS = ("auto", "linear", "blelloch", "hybrid")


class Sequential(nn.Sequential):
    """Layers in turn, as :class:`torch.nn.Sequential`, within a budget or by a parallel scan.

    Parameters, ``state_dict``, indexing and hooks on outputs are torch's. Within a budget, outputs
    and gradients are ordinary backpropagation's, bit for bit where the layers are deterministic;
    by the scan, but for the order of additions.

    Args:
        layers: modules, or one ordered dict of them. Within a budget any will do: dropout, batch
            normalisation, residual blocks, layers that hand on pytrees of tensors. For the scan
            each needs a transposed Jacobian: torch's convolutions, linear layers, activations,
            poolings, padding, dropout, batch normalisation in evaluation mode,
            ``torch.nn.Sequential``, :class:`retrograde.Residual`, and what
            :func:`retrograde.scan.register_layer` was told.
        memory: the budget for a forward and backward pass, beyond the output and the gradients that
            the caller is handed: bytes (``67108864``), a size (``"2GiB"``), or a fraction of what
            ordinary backpropagation would hold (``0.5``, ``"50%"``). None: torch's own pass. With
            ``backward="scan"``: what Jacobians and their products may take; None: half the
            machine's. Samples are taken fewer at a time where all would take more.
        backward: ``"scan"``, or None for the layers' own backward passes.
        algorithm: ``"linear"``, ``"blelloch"``, ``"hybrid"`` with some ``levels``, or ``"auto"``:
            as many levels as make the critical path shortest, in FLOPs; where that is none, the
            gradient goes back through the layers themselves, and no Jacobian is made.
        levels: of ``"hybrid"``.

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
        self._outlooks: dict[Any, Outlook] = {}
        self._plans = Plans()

    @uncompiled
    def forward(self, input: Any) -> Any:
        """Run the layers.

        Args:
            input: what the first layer takes: a tensor, or within a budget a pytree of them; for
                the scan one tensor (samples, …).

        Returns:
            The last layer's output.

        Raises:
            BudgetError: the memory is too small; the message names the least.
            CellError: within a budget, where a layer cannot be run exactly.
            ScanError: under ``backward="scan"``, where a layer has no Jacobian, or none that fits.
        """
        if self.backward is None and self.memory is not None:
            return self._plans.run(self, self.memory, input)
        if self.backward is None or not torch.is_grad_enabled():
            return super().forward(input)  # type: ignore[no-untyped-call]
        layers = _flat(self)
        used = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        parameters = list({id(p): p for p in used}.values())
        if not layers or not (parameters or input.requires_grad):
            return super().forward(input)  # type: ignore[no-untyped-call]
        _check_call(layers, input)
        refuse_transforms([input, *parameters], ["backward"])
        return _Scan.apply(self, layers, input, *parameters)  # type: ignore[no-untyped-call]

    def fit(self, input: Any) -> ChainFit:
        """What the budget buys for an input; nothing is trained.

        Args:
            input: as for a call; every layer is measured on one like it.

        Returns:
            A :class:`~retrograde.nn.chain_plans.ChainFit`; ``print`` shows it.

        Raises:
            BudgetError: as for a call.
            CellError: as for a call; also there is no budget to fit.
        """
        if self.backward is not None or self.memory is None:
            raise CellError(
                f"memory={self.memory!r} and backward={self.backward!r}: expected a memory and no "
                "backward; only layers within a budget have a schedule"
            )
        return self._plans.fit(self, self.memory, input)

    def outlook(self, steps: Sequence[Step], *, whole: bool) -> Outlook:
        """What each scan would take for a batch, and which one is chosen; remembered by shape.

        Args:
            steps: the layers, run on the batch.
            whole: whether the gradient of the first one's input is wanted too.

        Returns:
            The outlook.

        Raises:
            ScanError: what was asked for does not fit.
        """
        x = steps[0].x
        patterns = tuple(p.local.pattern for step in steps for p in step.path.pieces())
        key = (len(x), x.dtype, x.device, whole, self.algorithm, self.levels, self.memory, patterns)
        if key not in self._outlooks:
            limit = room(self.memory, x.device)
            found = outlook_of(steps, self.algorithm, self.levels, limit, whole=whole)
            self._outlooks = {**dict(list(self._outlooks.items())[-_REMEMBERED:]), key: found}
        return self._outlooks[key]

    def explain(self, input: Tensor) -> Outlook:
        """Which scan a call would be backpropagated by, and why; nothing is trained.

        Args:
            input: as for a call; the layers are run on it.

        Returns:
            An outlook; ``print`` shows it as a table.

        Raises:
            ScanError: as for a call.
        """
        layers = _flat(self)
        _check_call(layers, input)
        with torch.enable_grad():
            steps, whole = _needed(observe_steps(layers, input), input.requires_grad)
        return self.outlook(steps, whole=whole)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        chosen = OrderedDict(list(self._modules.items())[index])
        return type(self)(
            chosen,
            backward=self.backward,
            algorithm=self.algorithm,
            levels=self.levels,
            memory=self.memory,
        )

    def extra_repr(self) -> str:
        """What it has besides its layers."""
        names = ("memory", "backward", "algorithm", "levels")
        options = {name: vars(self)[name] for name in names}
        return ", ".join(f"{k}={v!r}" for k, v in options.items() if v not in (None, "auto"))

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_outlooks": {}, "_plans": Plans()}
        return {**super().__getstate__(), **fresh}  # type: ignore[misc, no-untyped-call]


# One that stands inside another layer is part of that one's Jacobian.
register_layer(Sequential, parts=lambda net: nn.Sequential(*net))

_REMEMBERED = 3  # shapes of batches and masks, besides the newest


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, net: Sequential, layers: list[nn.Module], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            steps = observe_steps(layers, x)
        _check_captured(steps, parameters)
        ctx.steps, ctx.whole = _needed(steps, ctx.needs_input_grad[2])
        ctx.outlook = net.outlook(ctx.steps, whole=ctx.whole)
        ctx.parameters = parameters
        ctx.versions = [(t, t._version) for layer in layers for t in _tensors(layer)]
        return steps[-1].y.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RetrogradeError(
                "the gradient of a Sequential with backward='scan' cannot itself be "
                "differentiated: expected create_graph=False; for second derivatives use "
                "backward=None"
            )
        if dy is None:
            return (None,) * (3 + len(ctx.parameters))
        if any(t._version != version for t, version in ctx.versions):
            raise RetrogradeError(
                "a parameter or buffer of a Sequential with backward='scan' was changed in place "
                "between the forward pass and the backward pass: expected both passes with the "
                "same weights; step the optimizer after backward()"
            )
        steps = ctx.steps
        if steps is None:
            raise RetrogradeError(
                "a Sequential with backward='scan' was backpropagated a second time, and what it "
                "held was released after the first: expected one backward pass; give "
                "retain_graph=True to the first one"
            )
        if not _keeps_graph():
            ctx.steps = None
        gradients = _gradients(steps, dy, ctx.outlook, whole=ctx.whole)
        own = gradients[1:] if ctx.whole else gradients
        found = _of_parameters(steps, own, ctx.parameters)
        return (None, None, gradients[0] if ctx.whole else None, *found)


def _keeps_graph() -> bool:
    """Whether the backward pass at work is to leave the graph as it was."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def _gradients(steps: Sequence[Step], dy: Tensor, outlook: Outlook, *, whole: bool) -> list[Tensor]:
    if outlook.jacobians:
        chosen = outlook.chosen
        return scan_gradients(steps, dy, chosen.levels, chosen.samples, whole=whole)
    gradients = [dy]
    for step in reversed(steps if whole else steps[1:]):
        gradients += torch.autograd.grad(step.y, step.x, gradients[-1], retain_graph=True)
    return gradients[::-1]


def _of_parameters(
    steps: Sequence[Step], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Every layer's by its own backward pass, all in one call; those of shared ones add up."""
    wanted = [p for p in parameters if p.requires_grad]
    pairs = [
        (step.y, g)
        for step, g in zip(steps, gradients, strict=True)
        if any(p.requires_grad for p in step.layer.parameters())
    ]
    if not wanted or not pairs:
        return [None] * len(parameters)
    outputs, seeds = zip(*pairs, strict=True)
    with muted_hooks(wanted):  # they are called with the gradients that are returned
        found = torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True)
    return list(found)


def _needed(steps: list[Step], input_wanted: bool) -> tuple[list[Step], bool]:
    """The steps from the first one on whose output's gradient is wanted."""
    if input_wanted:
        return steps, True
    trained = [any(p.requires_grad for p in step.layer.parameters()) for step in steps]
    return (steps[trained.index(True) :], False) if any(trained) else (steps, True)


def _flat(net: nn.Sequential) -> list[nn.Module]:
    """The layers, those of nested ones in their place."""
    opens = (nn.Sequential, Sequential)
    return [layer for _, layer in named_layers(net, lambda nested: type(nested) in opens)]


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


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
        room(memory, torch.device("cpu"))  # refuses what cannot be read


def _check_call(layers: Sequence[nn.Module], input: Any) -> None:
    if not isinstance(input, Tensor) or input.dtype not in (torch.float32, torch.float64):
        given = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise ScanError(
            f"the input is of {given}: expected a tensor of float32 or float64; cast it, or use "
            "backward=None"
        )
    if not input.ndim or not len(input):
        raise ScanError("the input has no samples: expected at least one; leave the batch out")
    for layer in layers:
        for each in layer.modules():
            if each._backward_hooks or each._backward_pre_hooks:
                raise ScanError(
                    f"{type(each).__name__} has a backward hook, which a scan over Jacobians would "
                    "not pass through: expected none on the layers; hook the Sequential itself, or "
                    "its parameters, or use backward=None"
                )


def _check_captured(steps: Sequence[Step], parameters: Sequence[Tensor]) -> None:
    """Refuse layers that use tensors of which we could not give the gradient (rule 5)."""
    for step in steps:
        known = {id(t) for t in (step.x, *parameters)}
        leaves, _ = foreign_tensors([step.y], 0)
        if any(id(t) not in known for t in leaves):
            raise ScanError(
                f"{type(step.layer).__name__} uses a tensor that wants a gradient and is none of "
                "its parameters: expected parameters only; register it as one, or use backward=None"
            )
