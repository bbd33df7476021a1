"""A chain of layers backpropagated by a scan over sparse transposed Jacobians (W20, section 3.1).

Forward, every layer runs as usual, cut off from the one before; backward, the scan finds the
gradient of every layer's output; then each layer's parameters get theirs, by the layer's own
backward pass, none waiting for another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.discover.captured import foreign_tensors
from retrograde.discover.surroundings import muted_hooks
from retrograde.errors import RetrogradeError, ScanError
from retrograde.jacobians.feedforward import Algorithm, Step, observe_steps, scan_gradients
from retrograde.jacobians.transposed import room
from retrograde.nn.cache import Recent
from retrograde.nn.scan_choice import Outlook, outlook_of
from retrograde.run.transforms import refuse_transforms
from retrograde.units import Memory

__all__ = ["OUTLOOKS", "ChainScan"]

#: How many outlooks are remembered: one for each shape of a batch, and of masks.
OUTLOOKS = 4


@dataclass
class ChainScan:
    """How the layers of one module are scanned.

    Attributes:
        algorithm: as for :class:`retrograde.Sequential`.
        levels: as there.
        memory: what Jacobians and their products may take; None for half the machine's.
        outlooks: what was found for recent batches.
    """

    algorithm: Algorithm
    levels: int | None
    memory: Memory | None
    outlooks: Recent[Outlook]

    def run(self, layers: Sequence[nn.Module], x: Any) -> Any:
        """The output of the layers; None where nothing wants a gradient.

        Args:
            layers: in turn, none nested.
            x: (samples, …).

        Raises:
            ScanError: a layer has no Jacobian, or none that fits.
        """
        used = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        parameters = list({id(p): p for p in used}.values())
        if not layers or not (parameters or x.requires_grad):
            return None
        _check_call(layers, x)
        refuse_transforms([x, *parameters], ["backward"])
        return _Scan.apply(self, layers, x, *parameters)  # type: ignore[no-untyped-call]

    def outlook(self, steps: Sequence[Step], *, whole: bool) -> Outlook:
        """What each scan would take for a batch, and which one is chosen; remembered by shape.

        Args:
            steps: the layers, run on the batch.
            whole: whether the gradient of the first one's input is wanted too.

        Raises:
            ScanError: what was asked for does not fit.
        """
        x = steps[0].x
        patterns = tuple(p.local.pattern for step in steps for p in step.path.pieces())
        asked = self.algorithm, self.levels, self.memory

        def find() -> Outlook:
            limit = room(self.memory, x.device)
            return outlook_of(steps, self.algorithm, self.levels, limit, whole=whole)

        return self.outlooks.get((len(x), x.dtype, x.device, whole, asked, patterns), find)

    def explain(self, layers: Sequence[nn.Module], x: Tensor) -> Outlook:
        """The outlook for an input that the layers are run on."""
        _check_call(layers, x)
        with torch.enable_grad():
            steps, whole = _needed(observe_steps(layers, x), x.requires_grad)
        return self.outlook(steps, whole=whole)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scan: ChainScan, layers: Sequence[nn.Module], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            steps = observe_steps(layers, x)
        _check_captured(steps, parameters)
        ctx.steps, ctx.whole = _needed(steps, ctx.needs_input_grad[2])
        ctx.outlook = scan.outlook(ctx.steps, whole=ctx.whole)
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


def _tensors(layer: nn.Module) -> Iterator[Tensor]:
    yield from layer.parameters()
    yield from layer.buffers()


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
