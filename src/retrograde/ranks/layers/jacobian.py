"""The Jacobian of a sequence of layers, as one element of a scan.

If every layer has a rule, it is the product of their sparse transposed Jacobians, multiplied from
the narrower end. Otherwise backward passes compute it: one for each output of a sample, for all
samples at once.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from operator import matmul
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.errors import ScanError
from retrograde.machine import now
from retrograde.scan.any_cell import unit_vectors
from retrograde.scan.elements import IDENTITY, Dense, flops
from retrograde.scan.sparse.composition import Joined, Maker, Path, Piece, Residual, observe
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.outline import ledger_of, outlines
from retrograde.scan.sparse.pattern import Pattern
from retrograde.scan.sparse.rules import parts_of, rule_of
from retrograde.scan.sparse.transposed import room
from retrograde.units import format_bytes

__all__ = ["has_rules", "joined", "operations_a_second", "run", "run_with_jacobian"]


def run(layers: nn.Module, x: Tensor) -> Any:
    """Return the output of layers, whose input is unchanged even where they overwrite it.

    Example:
        >>> x = torch.full((2, 1), -1.0, requires_grad=True)
        >>> run(nn.Sequential(nn.ReLU(inplace=True)), x).sum().item(), x.sum().item()
        (0.0, -2.0)
    """
    over = any(getattr(module, "inplace", False) for module in layers.modules())
    return layers(x.clone() if over else x)


def has_rules(layer: nn.Module) -> bool:
    """Return whether a layer, and every layer inside it, has a sparse Jacobian.

    Example:
        >>> has_rules(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), has_rules(nn.Bilinear(1, 1, 1))
        (True, False)
    """
    parts = parts_of(layer)
    if parts is not None:
        return has_rules(parts)
    runs = type(layer).forward
    made = runs is nn.Sequential.forward or runs is Residual.forward
    if made and "forward" not in vars(layer):
        return all(map(has_rules, layer.children()))
    try:
        rule_of(layer)
    except ScanError:
        return False
    return True


def run_with_jacobian(
    layers: nn.Module, x: Tensor, samples: int, patience: float | None = None
) -> tuple[Tensor, Any, list[Pattern]]:
    """Run layers on a piece of a batch, and compute their transposed Jacobian there.

    Args:
        layers: a sequence of layers.
        x: (samples of the piece, …); it requires a gradient.
        samples: samples of the whole batch, for which there must be memory.
        patience: seconds; a Jacobian whose operations alone take longer is refused.

    Returns:
        The output, differentiable; the element: a ``CSR``, a ``Dense`` or ``IDENTITY``; and the
        patterns, which are made once while the caller keeps them.

    Raises:
        ScanError: samples are coupled, or the Jacobian takes too much memory, or too long.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        >>> y, element, _ = run_with_jacobian(layers, torch.ones(4, 3, requires_grad=True), 4)
        >>> y.shape, element.shape
        (torch.Size([4, 2]), (4, 3, 2))
    """
    if not has_rules(layers):
        y = run(layers, x)
        return y, _swept(x, y, samples, patience), []
    y, path = observe(layers, x)
    ledger, counted = ledger_of([path], x.dtype.itemsize), [0]

    def count(left: Any, right: Any) -> Any:
        counted[0] += flops(right, left)
        return left @ right

    _product(path, outlines(samples, ledger), count)
    _check_room(ledger.bytes_for(samples), x)
    _check_time(counted[0] / operations_a_second(x.device), patience)
    patterns = [piece.jacobian.pattern for piece in path.pieces()]
    element = _product(path, lambda piece: piece.jacobian.csr(x))
    if isinstance(element, CSR):
        element = CSR(element.pattern, element.data.detach())
        patterns.append(element.pattern)
    return y, element, patterns


def joined(elements: Sequence[Any], batches: Sequence[int]) -> Any:
    """Return the Jacobian of a batch, from those of its pieces and the samples of each.

    Example:
        >>> joined([Dense(torch.ones(2, 3, 4)), Dense(torch.ones(1, 3, 4))], [2, 1]).shape
        (3, 3, 4)
    """
    first = elements[0]
    if first is IDENTITY or len(elements) == 1:
        return first
    if isinstance(first, Dense):
        return Dense(torch.cat([each.data for each in elements]))
    if any(each.pattern is not first.pattern for each in elements):  # from a user's own rule
        pairs = zip(elements, batches, strict=True)
        whole = [each.to_dense().expand(size, *first.pattern.shape) for each, size in pairs]
        return Dense(torch.cat(whole))
    if first.data.ndim == 1:
        return first
    return CSR(first.pattern, torch.cat([each.data for each in elements]))


def _product(path: Path, make: Maker, multiply: Callable[[Any, Any], Any] = matmul) -> Any:
    """Return the Jacobian of a sequence of layers, multiplied from its narrower end."""
    turns = path.paths if isinstance(path, Joined) and not path.added else [path]
    changing = (each for each in turns if not isinstance(each, Piece) or each.changes)
    matrices = [each.matrix(make) for each in changing]
    if not matrices:
        return IDENTITY
    if path.inputs <= path.outputs:
        return reduce(multiply, matrices)
    return reduce(lambda right, left: multiply(left, right), reversed(matrices))


def _swept(x: Tensor, y: Any, samples: int, patience: float | None) -> Dense:
    if not isinstance(y, Tensor):
        raise ScanError(f"the layers returned a {type(y).__name__}: expected one tensor")
    if y.ndim < 2 or len(y) != len(x) or y.dtype != x.dtype:
        raise ScanError(
            f"layers took {tuple(x.shape)} of {x.dtype} to {tuple(y.shape)} of {y.dtype}: expected "
            "samples first, as many in the output as in the input, of one type; or use way='linear'"
        )
    inputs, outputs = prod(x.shape[1:]), prod(y.shape[1:])
    _check_room(2 * samples * inputs * outputs * x.dtype.itemsize, x)
    start = now(x.device)
    _check_apart(x, y)
    _check_time((now(x.device) - start) * (outputs if len(x) > 1 else 0), patience)
    columns = [_back(x, y, unit).flatten(1) for unit in unit_vectors(y)]
    return Dense(torch.stack(columns, -1))


def _back(x: Tensor, y: Tensor, seed: Tensor) -> Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(y, x, seed, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def _check_apart(x: Tensor, y: Tensor) -> None:
    """Refuse layers whose output for the first sample depends on another sample."""
    if len(x) < 2:
        return
    seed = torch.zeros_like(y)
    seed[0] = torch.arange(y[0].numel(), dtype=y.dtype, device=y.device).cos().view_as(y[0])
    if bool(_back(x, y, seed)[1:].any()):
        raise ScanError(
            "a sample's output depends on other samples, so there is no Jacobian for each: "
            "expected layers that keep samples apart, or way='linear'"
        )


def operations_a_second(device: torch.device) -> float:
    """Return an upper bound of this kind of device's multiplications and additions a second."""
    return 1e11 if device.type == "cpu" else 5e13


def _check_time(least: float, patience: float | None) -> None:
    if patience is not None and least > patience:
        raise ScanError(
            f"the transposed Jacobian of this rank's layers takes {least:.3g} s or more, and "
            f"{patience:.3g} s are allowed: expected less; use way='linear', or other cuts"
        )


def _check_room(wanted: int, x: Tensor) -> None:
    limit = room(None, x.device)
    if wanted > limit:
        raise ScanError(
            f"the transposed Jacobian of this rank's layers takes {format_bytes(wanted)}, and "
            f"{format_bytes(limit)} are available: expected room for it; use way='linear', or "
            "other cuts"
        )
