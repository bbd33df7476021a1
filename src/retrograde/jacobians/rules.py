"""Which layers have a transposed Jacobian, and how a further one is given one."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from retrograde.errors import ScanError
from retrograde.jacobians.csr import CSR, Local

__all__ = ["Parts", "Rule", "parts_of", "register_layer", "rule_of"]

Rule = Callable[[Any, Tensor, Tensor], Local | CSR]
Parts = Callable[[Any], nn.Module]

_RULES: dict[type[nn.Module], Rule] = {}
_PARTS: dict[type[nn.Module], Parts] = {}


def register_layer(
    *kinds: type[nn.Module], jacobian: Rule | None = None, parts: Parts | None = None
) -> None:
    """Teach the scan a layer of your own.

    A rule counts for a class, and for those derived from it that leave its ``forward`` as it is.

    Args:
        kinds: classes of the layer.
        jacobian: ``jacobian(layer, x, y)`` gives the transposed Jacobian of ``y = layer(x)``, as a
            :class:`~retrograde.jacobians.csr.CSR` of shape (inputs, outputs) of one sample,
            flattened. x and y are (samples, …), and y is differentiable with respect to x. The
            pattern must be the same at every call with the same shapes, so a zero that depends on
            the input is an entry.
        parts: in place of that, ``parts(layer)`` gives a module with the same outputs, made of
            known modules, such as a ``torch.nn.Sequential`` of the layer's own.

    Raises:
        ScanError: neither is given, or both.

    Example:
        >>> import torch
        >>> import retrograde as rg
        >>> class Twice(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        >>> def jacobian(layer, x, y):
        ...     return rg.scan.CSR.from_dense(2 * torch.eye(x[0].numel()))
        >>> rg.scan.register_layer(Twice, jacobian=jacobian)
        >>> rg.scan.transposed_jacobian(Twice(), torch.ones(1, 3)).data.tolist()
        [2.0, 2.0, 2.0]
    """
    if (jacobian is None) == (parts is None):
        given = "neither" if parts is None else "both"
        raise ScanError(f"jacobian and parts: {given} given; expected one of them")
    for kind in kinds:
        _RULES.pop(kind, None)
        _PARTS.pop(kind, None)
        if jacobian is not None:
            _RULES[kind] = jacobian
        elif parts is not None:
            _PARTS[kind] = parts


def rule_of(layer: nn.Module) -> Rule:
    """The rule for a layer; raises ``ScanError`` where there is none."""
    found: Rule | None = _look_up(_RULES, layer)
    if found is None:
        name = type(layer).__name__
        raise ScanError(
            f"{name} has no transposed Jacobian here: expected a layer with a rule; give it one by "
            f"rg.scan.register_layer({name}, jacobian=...), or parts=... where it is made of "
            "layers that have one, or use backward=None"
        )
    return found


def parts_of(layer: nn.Module) -> nn.Module | None:
    """A module of known layers with the same outputs, or None where the layer is one piece."""
    found = _look_up(_PARTS, layer)
    return None if found is None else found(layer)


def _look_up(table: dict[type[nn.Module], Any], layer: nn.Module) -> Any:
    from retrograde.jacobians import layers as layers  # the rules that come with the library

    if "forward" in vars(layer):  # it has a forward pass of its own
        return None
    for kind in type(layer).__mro__:
        if kind in table and kind.forward is type(layer).forward:
            return table[kind]
    return None
