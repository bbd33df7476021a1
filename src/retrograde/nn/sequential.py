"""``torch.nn.Sequential`` whose backward pass is a scan over sparse transposed Jacobians.

Forward, every layer runs as usual, cut off from the one before. Backward, the scan finds the
gradient of every layer's output; then each layer's parameters get theirs, by the layer's own
backward pass, none waiting for another (W20, section 3.1).
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.errors import RetrogradeError, ScanError
from retrograde.execute.captured import foreign_tensors
from retrograde.execute.replay import muted_hooks
from retrograde.execute.transforms import refuse_transforms, uncompiled
from retrograde.nn.outlook import Outlook, outlook_of
from retrograde.scan.chain import Algorithm, Step, observe_steps, scan_gradients
from retrograde.scan.sparse.jacobian import room
from retrograde.scan.sparse.paths import Residual
from retrograde.scan.sparse.rules import register_layer
from retrograde.units import Memory

__all__ = ["Residual", "Sequential"]

_ALGORITHMS = ("auto", "linear", "blelloch", "hybrid")


class Sequential(nn.Sequential):
    """Layers in turn, as :class:`torch.nn.Sequential`, backpropagated by a parallel scan.

    Parameters, ``state_dict``, indexing and hooks on outputs are torch's. The gradients are those
    of ordinary backpropagation, but for the order of additions.

    Args:
        layers: modules, or one ordered dict of them. Each needs a transposed Jacobian: torch's
            convolutions, linear layers, activations, poolings, padding, dropout, batch
            normalisation in evaluation mode, ``torch.nn.Sequential``, :class:`retrograde.Residual`,
            and what :func:`retrograde.scan.register_layer` was told.
        backward: ``"scan"``, or None for torch's own backward pass.
        algorithm: ``"linear"``, ``"blelloch"``, ``"hybrid"`` with some ``levels``, or ``"auto"``:
            as many levels as make the critical path shortest, in FLOPs; where that is none, the
            gradient goes back through the layers themselves, and no Jacobian is made.
        levels: of ``"hybrid"``.
        memory: what Jacobians and their products may take, such as ``"2GiB"``; None: half the
            machine's. Samples are taken fewer at a time where all would take more.

    Raises:
        ScanError: an option is unknown.

    Example:
        >>> net = Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.Flatten(), backward="scan")
        >>> x = torch.randn(2, 3, 8, 8, requires_grad=True)
        >>> net(x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(
        self,
        *layers: Any,
        backward: Literal["scan"] | None = None,
        algorithm: Algorithm = "auto",
        levels: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(*layers)
        _check_options(backward, algorithm, levels, memory)
        self.backward, self.algorithm, self.levels = backward, algorithm, levels
        self.memory = memory
        self._outlooks: dict[Any, Outlook] = {}

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        """Run the layers.

        Args:
            input: (samples, …); one tensor.

        Returns:
            The last layer's output.

        Raises:
            ScanError: under ``backward="scan"``, where a layer has no Jacobian, or none that fits.
        """
        if self.backward is None or not torch.is_grad_enabled():
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        layers = list(_flat(self))
        used = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        parameters = list({id(p): p for p in used}.values())
        if not layers or not (parameters or input.requires_grad):
            return super().forward(input)  # type: ignore[no-any-return, no-untyped-call]
        _check_call(layers, input)
        refuse_transforms([input, *parameters])
        found: Tensor = _Scan.apply(self, layers, input, *parameters)  # type: ignore[no-untyped-call]
        return found

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
        layers = list(_flat(self))
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
        options = {"backward": self.backward, "algorithm": self.algorithm, "levels": self.levels}
        return ", ".join(f"{k}={v!r}" for k, v in options.items() if v not in (None, "auto"))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_outlooks": {}}  # type: ignore[misc, no-untyped-call]


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


def _flat(net: nn.Sequential) -> Iterator[nn.Module]:
    """The layers, those of nested ones in their place."""
    for layer in net:
        hooked = any(
            (
                layer._forward_hooks,
                layer._forward_pre_hooks,
                layer._backward_hooks,
                layer._backward_pre_hooks,
            )
        )
        plain = type(layer) in (nn.Sequential, Sequential) and not hooked
        if plain and isinstance(layer, nn.Sequential):
            yield from _flat(layer)
        else:
            yield layer


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
    if memory is not None:
        if backward is None:
            raise ScanError(
                "memory= without backward='scan': expected both; deep chains within a budget are "
                "not there yet"
            )
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
