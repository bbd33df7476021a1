"""Run a layer and find its Jacobian, also for layers that are made of others.

A layer is one piece, a sequence of layers (``torch.nn.Sequential``), or a sum of paths (a residual
block). The Jacobian of a sequence is the product of its layers' Jacobians; that of a sum is the
sum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from operator import add, matmul
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import cached

from retrograde.errors import ScanError
from retrograde.run.transforms import besides_forward
from retrograde.scan.sparse.csr import CSR, LayerJacobian
from retrograde.scan.sparse.pattern import Pattern
from retrograde.scan.sparse.rules import Rule, parts_of, rule_of


class Residual(nn.Module):
    """A residual block: the sum of a sequence of layers and a shortcut (He et al., 2016).

    Args:
        layers: the one path.
        shortcut: the other path; by default, the input itself.

    Example:
        >>> import torch
        >>> block = Residual(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU())
        >>> block(torch.ones(2, 3, 8, 8)).shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if shortcut is None else shortcut

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum of both paths, (samples, …)."""
        passed = input.clone() if _overwrites(self.layers) else input  # the shortcut reads it too
        total: Tensor = self.layers(passed) + self.shortcut(input)
        return total


def _overwrites(layer: nn.Module) -> bool:
    """Return whether the first layer of a sequence works in place."""
    while isinstance(layer, nn.Sequential) and len(layer):
        layer = layer[0]
    return bool(getattr(layer, "inplace", False))


@dataclass(frozen=True, eq=False)
class Joined:
    """At least one path: a sequence, or a sum of paths from the same input."""

    paths: "Sequence[Path]"
    added: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs of one sample."""
        return self.paths[0].shape[0], self.paths[-1].shape[1]

    def pieces(self) -> list[LayerJacobian]:
        """Return the single layers."""
        return [piece for path in self.paths for piece in path.pieces()]


#: One or more layers from an input to an output.
Path = LayerJacobian | Joined
#: Returns the matrix of a single layer: its values for some samples, or an outline of its size.
Maker = Callable[[LayerJacobian], Any]


def matrix_of(path: Path, make: Maker) -> Any:
    """Return the Jacobian of a path, by ``@`` and ``+`` of its layers' matrices."""
    if isinstance(path, LayerJacobian):
        return make(path)
    matrices = (matrix_of(each, make) for each in path.paths)
    return reduce(add if path.added else matmul, matrices)


def apply_path(path: Path, make: Maker, gradient: object) -> Any:
    """Return the Jacobian times a gradient, without computing the Jacobian."""
    if isinstance(path, LayerJacobian):
        return gradient if path.values is None else make(path) @ gradient
    if path.added:
        return reduce(add, (apply_path(each, make, gradient) for each in path.paths))
    for each in reversed(path.paths):
        gradient = apply_path(each, make, gradient)
    return gradient


def observe(layer: nn.Module, x: Tensor) -> tuple[Tensor, Path]:
    """Run a layer on x, (samples, …), and return the output and the path of its Jacobian. The
    output is differentiable in x, which must require a gradient. Raises ScanError if a layer has no
    rule or couples samples."""
    known_layers, plain, layer_type = parts_of(layer), "forward" not in vars(layer), type(layer)
    if known_layers is not None:
        run = partial(observe, known_layers)
    elif isinstance(layer, Residual) and layer_type.forward is Residual.forward and plain:
        run = partial(_observe_sum, layer)
    elif isinstance(layer, nn.Sequential) and layer_type.forward is nn.Sequential.forward and plain:
        run = partial(_observe_turns, layer)
    else:
        run = partial(_observe_piece, layer, rule_of(layer))
    return _through(layer, x, run)


def _observe_sum(block: Residual, x: Tensor) -> tuple[Tensor, Path]:
    y, layers_path = observe(block.layers, x)
    z, shortcut_path = observe(block.shortcut, x)
    return y + z, Joined([layers_path, shortcut_path], added=True)


def _observe_turns(layers: nn.Sequential, x: Tensor) -> tuple[Tensor, Path]:
    paths = []
    for each in layers if len(layers) else [nn.Identity()]:
        x, path = observe(each, x)
        paths.append(path)
    return x, paths[0] if len(paths) == 1 else Joined(paths, added=False)


def _observe_piece(layer: nn.Module, rule: Rule, x: Tensor) -> tuple[Tensor, Path]:
    _check_apart(layer)
    # An in-place layer gets a copy, since the input is read again.
    passed = x.clone() if getattr(layer, "inplace", False) else x
    with cached():  # a parametrized weight may differ at each computation
        y = type(layer).forward(layer, passed)
        _check_output(layer, x, y)
        jacobian = rule(layer, x, y)
    if isinstance(jacobian, CSR):
        jacobian = LayerJacobian(jacobian.pattern, jacobian.data.ndim == 1, jacobian.data.detach)
    _check_pattern(layer, x, y, jacobian.pattern)
    return y, jacobian


def _through(
    layer: nn.Module, x: Tensor, run: Callable[[Tensor], tuple[Tensor, Path]]
) -> tuple[Tensor, Path]:
    """Call a layer with its hooks; refuse hooks that change its input or its output."""
    besides = besides_forward(layer)
    if besides is None:
        return run(x)
    seen: list[tuple[Tensor, Tensor, Path]] = []

    def forward(passed: Tensor) -> Tensor:
        y, path = run(passed)
        seen.append((passed, y, path))
        return y

    layer.forward = forward
    try:
        y = layer(x)
    finally:
        del layer.forward
    ((passed, made, path),) = seen
    if passed is not x or y is not made:
        raise ScanError(
            f"{besides} of {type(layer).__name__} changed the layer's input or output, and its "
            "Jacobian does not include that: expected hooks that only observe; move the change "
            "into a layer, or use backward=None"
        )
    return y, path


def _check_apart(layer: nn.Module) -> None:
    """Refuse a batch norm that uses the batch's own statistics."""
    if not isinstance(layer, _BatchNorm) or not (layer.training or layer.running_var is None):
        return
    why = "in training mode" if layer.training else "without running statistics"
    what = "evaluation mode; call .eval() on it" if layer.training else "track_running_stats=True"
    raise ScanError(
        f"{type(layer).__name__} {why} takes its mean and variance from the batch, so a sample's "
        "output depends on all samples and there is no Jacobian for each: expected "
        f"{what}, or use backward=None"
    )


def _check_output(layer: nn.Module, x: Tensor, y: object) -> None:
    name = type(layer).__name__
    if not isinstance(y, Tensor):
        raise ScanError(f"{name} returned a {type(y).__name__}: expected one tensor")
    if x.ndim < 2 or y.ndim < 2 or len(y) != len(x):
        raise ScanError(
            f"{name} took an input of shape {tuple(x.shape)} to {tuple(y.shape)}: expected samples "
            "first, as many in the output as in the input, and one more dimension"
        )
    if y.dtype != x.dtype:
        raise ScanError(
            f"{name} took {x.dtype} to {y.dtype}: expected one type throughout; leave autocast, or "
            "use backward=None"
        )


def _check_pattern(layer: nn.Module, x: Tensor, y: Tensor, pattern: Pattern) -> None:
    expected = prod(x.shape[1:]), prod(y.shape[1:])
    if pattern.shape != expected:
        raise ScanError(
            f"the rule for {type(layer).__name__} gave a Jacobian of {pattern}: expected "
            f"{expected[0]:,}×{expected[1]:,}, the inputs and the outputs of one sample"
        )
