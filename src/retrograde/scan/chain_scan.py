"""A chain of layers backpropagated by a scan over sparse transposed Jacobians (W20, section 3.1).

In the forward pass every layer runs as usual, detached from the layer before. In the backward pass
the scan computes the gradient of every layer's output. Then each layer's own backward pass computes
its parameters' gradients, independently of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.errors import RetrogradeError, ScanError
from retrograde.replay.surroundings import muted_hooks
from retrograde.run.foreign import foreign_tensors
from retrograde.run.transforms import besides_forward, refuse_transforms
from retrograde.scan.blelloch import most_levels
from retrograde.scan.sparse.arithmetic import sparse_kernels
from retrograde.scan.sparse.composition import Path
from retrograde.scan.sparse.feedforward import (
    Algorithm,
    LayerCall,
    Split,
    observe_steps,
    scan_gradients,
    split_of,
)
from retrograde.scan.sparse.transposed import room
from retrograde.sizes.cache import LRUCache
from retrograde.torch_private import gradients_of, keeps_graph
from retrograde.units import Memory, aligned, format_bytes

#: How many choices are kept: one for each shape of a batch, and for each set of masks.
SCAN_CHOICES = 4


@dataclass(frozen=True, eq=False)
class ScanChoice:
    """The candidate scans of a chain with their costs, and the chosen one; ``print`` shows it."""

    chosen: Split
    why: str  # the reason for the choice, in a sentence
    splits: tuple[Split, ...]  # by number of levels, the linear scan first
    jacobians: bool  # whether Jacobians are computed; if not, the gradient goes through the layers
    room: int  # bytes that Jacobians and products may take

    def __str__(self) -> str:
        table = [("levels", "steps", "FLOPs", "critical path", "memory", "samples at a time")]
        for split in self.splits:
            table.append(
                (
                    ("* " if split is self.chosen else "  ") + str(split.levels),
                    str(split.report.steps()),
                    f"{split.report.flops:.3g}",
                    f"{split.report.critical_flops:.3g}",
                    format_bytes(split.bytes),
                    str(split.samples) if split.samples else "does not fit",
                )
            )
        return f"{self.why}\n{aligned(table, left=range(6))}"


@dataclass
class ChainScan:
    """How one module's layers are scanned, and the choices for recent batches. Options are those of
    :class:`retrograde.Sequential`."""

    algorithm: Algorithm
    levels: int | None
    memory: Memory | None
    choices: LRUCache[ScanChoice]

    def run(self, layers: Sequence[nn.Module], x: Any) -> Any:
        """Return the output of the layers, none of them nested; None if nothing requires a
        gradient. Raises ScanError if a layer has no Jacobian, or its Jacobian does not fit in
        memory."""
        if not torch.is_grad_enabled():
            return None
        used = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        parameters = list({id(p): p for p in used}.values())
        if not layers or not (parameters or x.requires_grad):
            return None
        _check_call(layers, x)
        refuse_transforms([x, *parameters], ["backward"])
        return _Scan.apply(self, layers, x, *parameters)  # type: ignore[no-untyped-call]

    def choose(self, used: Sequence[LayerCall], y: Tensor) -> ScanChoice:
        """Return the scan over the Jacobians of some calls, up to the output y, cached by shape."""
        patterns = tuple(p.pattern for step in used for p in step.path.pieces())
        asked = self.algorithm, self.levels, self.memory
        key = y.shape, y.dtype, y.device, asked, patterns
        return self.choices.get(key, lambda: self._find([step.path for step in used], y))

    def _find(self, paths: Sequence[Path], y: Tensor) -> ScanChoice:
        """Compute the cost of each scan, and choose."""
        algorithm, limit = self.algorithm, room(self.memory, y.device)
        size = prod(y.shape[1:]), len(y), y.dtype.itemsize, limit
        most = most_levels(len(paths) + 1)
        asked = {"auto": range(most + 1), "linear": [0], "blelloch": [0, most]}.get(algorithm)
        asked = asked or sorted({0, min(self.levels or 0, most)})
        lists = sparse_kernels(y.device.type, y.dtype).name != "numba"
        splits = tuple(split_of(levels, paths, *size, lists=lists) for levels in asked)
        for path in paths:  # most of these products will not be used again
            for piece in path.pieces():
                piece.pattern.forget()
        linear, fitting = splits[0], [split for split in splits if split.samples]
        if algorithm == "auto":
            best = min(fitting, key=lambda s: s.report.critical_flops, default=linear)
            return ScanChoice(best, _why(best, len(fitting)), splits, best.levels > 0, limit)
        chosen = splits[-1]
        if not chosen.samples:
            needed = chosen.fixed_bytes + chosen.sample_bytes
            size_of = chosen.problem or f"for one sample it takes {format_bytes(needed)}"
            raise ScanError(
                f"algorithm={algorithm!r} does not fit into {format_bytes(limit)}: {size_of}; give "
                "more memory, fewer levels, or algorithm='auto'"
            )
        return ScanChoice(chosen, f"algorithm={algorithm!r} asks for it", splits, True, limit)

    def explain(self, layers: Sequence[nn.Module], x: Tensor) -> ScanChoice:
        """Return the choice for an input, on which the layers run."""
        _check_call(layers, x)
        with torch.enable_grad():
            steps, used = _needed(observe_steps(layers, x), x.requires_grad)
        return self.choose(used, steps[-1].y)


def _why(best: Split, fitting: int) -> str:
    if best.levels:
        return f"{best.levels} levels: the shortest critical path of those that fit, in FLOPs"
    reason = "no products shorten the critical path" if fitting > 1 else "no products fit"
    return f"linear, through the layers themselves, without Jacobians: {reason}"


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scan: ChainScan, layers: Sequence[nn.Module], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            steps = observe_steps(layers, x)
        _check_captured(steps, parameters)
        ctx.needed = _needed(steps, ctx.needs_input_grad[2])
        ctx.choice = scan.choose(ctx.needed[1], steps[-1].y)
        ctx.parameters = parameters
        tensors = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
        ctx.versions = [(t, t._version) for t in tensors]
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
        if ctx.needed is None:
            raise RetrogradeError(
                "a Sequential with backward='scan' was backpropagated a second time, and its graph "
                "was released after the first: expected one backward pass; give "
                "retain_graph=True to the first one"
            )
        steps, used = ctx.needed
        if not keeps_graph():
            ctx.needed = None
        gradients = _gradients(used, dy, ctx.choice)
        of_parameters = _of_parameters(steps, gradients[-len(steps) :], ctx.parameters)
        return (None, None, gradients[0] if ctx.needs_input_grad[2] else None, *of_parameters)


def _gradients(used: Sequence[LayerCall], dy: Tensor, choice: ScanChoice) -> list[Tensor]:
    if choice.jacobians:
        return scan_gradients(used, dy, choice.chosen.levels, choice.chosen.samples)
    gradients = [dy]
    for step in reversed(used):
        gradients += gradients_of([step.y], [step.x], gradients[-1:], stays=True)
    return gradients[::-1]


def _of_parameters(
    steps: Sequence[LayerCall], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the parameters' gradients, by the layers' own backward passes."""
    wanted = [p for p in parameters if p.requires_grad]
    pairs = [
        (step.y, g)
        for step, g in zip(steps, gradients, strict=True)
        if any(p.requires_grad for p in step.layer.parameters())
    ]
    if not wanted or not pairs:
        return [None] * len(parameters)
    outputs, seeds = zip(*pairs, strict=True)
    with muted_hooks(wanted):  # the hooks are called with the returned gradients
        computed = gradients_of(outputs, wanted, seeds, stays=True)
    return list(computed)


def _needed(steps: list[LayerCall], input_wanted: bool) -> tuple[list[LayerCall], list[LayerCall]]:
    """Return the steps whose output needs a gradient, and those whose input needs one."""
    trained = [any(p.requires_grad for p in step.layer.parameters()) for step in steps]
    if input_wanted or not any(trained):
        return steps, steps
    first_trained = trained.index(True)
    return steps[first_trained:], steps[first_trained + 1 :]


def _check_call(layers: Sequence[nn.Module], input: object) -> None:
    if not isinstance(input, Tensor) or input.dtype not in (torch.float32, torch.float64):
        received = input.dtype if isinstance(input, Tensor) else type(input).__name__
        raise ScanError(
            f"the input is of {received}: expected a tensor of float32 or float64; cast it, or use "
            "backward=None"
        )
    if not input.ndim or not len(input):
        raise ScanError("the input has no samples: expected at least one; leave the batch out")
    for layer in layers:
        for each in layer.modules():
            if "backward" in (besides := besides_forward(each) or ""):
                raise ScanError(
                    f"{type(each).__name__} has {besides}, which a scan over Jacobians would not "
                    "pass through: expected none on the layers; hook the Sequential itself, or its "
                    "parameters, or use backward=None"
                )


def _check_captured(steps: Sequence[LayerCall], parameters: Sequence[Tensor]) -> None:
    """Refuse layers that use tensors whose gradient we could not give (rule 5)."""
    for step in steps:
        allowed = {id(t) for t in (step.x, *parameters)}
        leaves, _ = foreign_tensors([step.y], 0)
        if any(id(t) not in allowed for t in leaves):
            raise ScanError(
                f"{type(step.layer).__name__} uses a tensor that requires a gradient and is not "
                "one of its parameters: expected parameters only; register it as one, or use "
                "backward=None"
            )
