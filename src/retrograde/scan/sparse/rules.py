"""Layers with a transposed Jacobian: torch's own, by their rules, and registered ones.

A rule gives a pattern from shapes, and values from weights and inputs:

===============================  =============================================  ================
layer                            pattern                                        values
===============================  =============================================  ================
convolution, 1 to 3 dimensions   groups ⊗ channels of one ⊗ a band for each     weights, shared
linear                           identity ⊗ all with all                        weights, shared
activations, dropout             identity                                       slopes
max-pooling                      identity ⊗ windows                             1 at the maximum
average pooling                  identity ⊗ windows                             1/size, shared
batch normalisation, evaluation  identity                                       scale, shared
padding                          identity ⊗ one input for each output           1, shared
flattening                       identity                                       none
===============================  =============================================  ================

The slopes of an elementwise layer are its own backward pass of ones, so a dropout's mask is that of
the call. Reference: W20, sections 3.3, 3.4 (algorithms 2 to 4 are a convolution of
3×3, stride 1, padding 1).
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from retrograde.errors import RetrogradeError, ScanError
from retrograde.scan.sparse.csr import CSR, LayerJacobian
from retrograde.scan.sparse.factor import adaptive, band, identity, windows
from retrograde.scan.sparse.pattern import Pattern
from retrograde.scan.sparse.weights import Sizes, convolution, known, linear
from retrograde.torch_private import gradients_of

Rule = Callable[[Any, Tensor, Tensor], LayerJacobian | CSR]
Parts = Callable[[Any], nn.Module]

_KNOWN: dict[type[nn.Module], tuple[Rule | None, Parts | None]] = {}


def register_layer(
    *kinds: type[nn.Module], jacobian: Rule | None = None, parts: Parts | None = None
) -> None:
    """Teach the scan a layer of your own, and derived classes with the same ``forward``.

    Args:
        kinds: classes of the layer.
        jacobian: ``jacobian(layer, x, y)`` returns the transposed Jacobian of ``y = layer(x)``
            as a :class:`~retrograde.scan.sparse.csr.CSR`, (inputs, outputs) of one sample,
            flattened. x and y are (samples, …), and y is differentiable in x. The pattern
            may depend on shapes only: a zero that depends on the input is an entry.
        parts: instead of ``jacobian``: ``parts(layer)`` returns a module with the same outputs,
            made of known modules.

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
        which = "neither" if parts is None else "both"
        raise ScanError(f"jacobian and parts: {which} given; expected one of them")
    _KNOWN.update(dict.fromkeys(kinds, (jacobian, parts)))


def rule_of(layer: nn.Module) -> Rule:
    """Return the rule for a layer; raises ``ScanError`` where there is none."""
    rule, _ = _look_up(layer)
    if rule is None:
        name = type(layer).__name__
        raise ScanError(
            f"{name} has no transposed Jacobian here: expected a layer with a rule; give it one by "
            f"rg.scan.register_layer({name}, jacobian=...), or parts=... if it is made of "
            "layers that have one, or use backward=None"
        )
    return rule


def parts_of(layer: nn.Module) -> nn.Module | None:
    """Return a module of known layers with the same outputs; None if the layer is one piece."""
    _, parts = _look_up(layer)
    return None if parts is None else parts(layer)


def _look_up(layer: nn.Module) -> tuple[Rule | None, Parts | None]:
    is_patched = "forward" in vars(layer)  # this instance has its own forward pass
    for ancestor in () if is_patched else type(layer).__mro__:
        if ancestor in _KNOWN and ancestor.forward is type(layer).forward:
            return _KNOWN[ancestor]
    return None, None


_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


def _elementwise(layer: nn.Module, x: Tensor, y: Tensor) -> LayerJacobian:
    return LayerJacobian(_diagonal(x), False, lambda: _slopes(x, y))


def _slopes(x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of x for a gradient of ones, (samples, inputs)."""
    ones = torch.ones((), dtype=y.dtype, device=y.device).expand_as(y)
    gradient: Tensor = gradients_of([y], [x], [ones], stays=True)[0]
    return gradient.flatten(1)


def _unchanged(layer: nn.Module, x: Tensor, y: Tensor) -> LayerJacobian:
    return LayerJacobian(_diagonal(x), True, None)


def _max_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    """The rule of max-pooling: 1 where the input of an entry is its output's maximum. If every
    input is in one window, the values are the slopes."""
    pattern, version = _windows(layer, x, y), x._version
    one_each = all(np.all(factor.row_counts == 1) for factor in pattern.factors)

    def values() -> Tensor:
        if one_each:
            return _slopes(x, y)
        # The forward pass saved the places of the maxima; if not, they are found again.
        chosen: Tensor | None = getattr(y.grad_fn, "_saved_result1", None)
        if chosen is None or chosen.shape != y.shape:
            if x._version != version:
                raise RetrogradeError(
                    f"the input of a max-pooling, {tuple(x.shape)}, was changed in place between "
                    "the forward pass and the backward pass: expected it as it was; change a copy "
                    "of it"
                )
            again = copy(layer)
            again.return_indices = True
            chosen = type(layer).forward(again, x.detach())[1]
        assert chosen is not None
        within = pattern.tensor("row_of", x.device) % prod(x.shape[2:])
        columns = pattern.tensor("indices", x.device)
        return (chosen.flatten(1).index_select(1, columns) == within).to(x.dtype)

    return LayerJacobian(pattern, False, values, scratch=24)


def _average_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    pattern = _windows(layer, x, y)

    def values() -> Tensor:
        # The average of ones is the number of a window's inputs times the value of each.
        ones = torch.ones((1, 1, *x.shape[2:]), dtype=torch.float64, device="cpu")
        counts = reduce(np.multiply.outer, (f.column_counts for f in pattern.factors[1:]))
        share = type(layer).forward(layer, ones).flatten() / torch.from_numpy(counts.ravel())
        columns = pattern.tensor("indices", x.device) % len(share)
        shares: Tensor = share.to(x).index_select(0, columns)
        return shares

    return LayerJacobian(pattern, True, values, scratch=8)


def _windows(layer: object, x: Tensor, y: Tensor) -> Pattern:
    """Return the windows of a pooling, adaptive if it has no kernel."""
    sizes, outputs, channels = tuple(x.shape[2:]), tuple(y.shape[2:]), x.shape[1]
    names = (
        ("kernel_size", "stride", "padding", "dilation") if hasattr(layer, "kernel_size") else ()
    )
    how = [_each(getattr(layer, name, 1), len(sizes)) for name in names]

    def make() -> Pattern:
        if not how:
            return Pattern(identity(channels), *map(adaptive, sizes, outputs))
        spans = zip(sizes, outputs, *how, strict=True)
        return Pattern(identity(channels), *(band(*span)[0] for span in spans))

    return known(("windows", channels, sizes, outputs, *how), make)


def _batch_norm(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    def scales() -> Tensor:
        scale: Tensor = (layer.running_var + layer.eps).rsqrt()
        if layer.weight is not None:
            scale = scale * layer.weight.detach()
        return scale.repeat_interleave(prod(x.shape[2:]))

    return LayerJacobian(_diagonal(x), True, scales)


def _pad(layer: Any, x: Tensor, y: Tensor, mode: str) -> LayerJacobian:
    count = x.ndim - 2
    widths = _each(layer.padding, 2 * count)  # which begin with the last dimension
    channels, sizes = x.shape[1], tuple(x.shape[2:])

    def make() -> Pattern:
        pairs = [widths[2 * i : 2 * i + 2] for i in reversed(range(count))]
        spans = zip(sizes, pairs, strict=True)
        reads = [windows(_reads(size, pair, mode), size)[0] for size, pair in spans]
        return Pattern(identity(channels), *reads)

    pattern = known(("padding", channels, sizes, tuple(widths), mode), make)
    return LayerJacobian(pattern, True, lambda: x.new_ones(pattern.nnz))


def _reads(size: int, widths: Sequence[int], mode: str) -> np.ndarray:
    """Return the input that each output of a padding reads, (outputs, 1); −1 where it is none."""
    inputs = torch.arange(size, dtype=torch.float64, device="cpu")[None, None]
    fill = {"mode": "constant", "value": -1.0} if mode == "zeros" else {"mode": mode}
    return functional.pad(inputs, tuple(widths), **fill)[0].T.numpy().astype(np.int64)  # type: ignore[arg-type]


def _diagonal(x: Tensor) -> Pattern:
    size = prod(x.shape[1:])
    return known(("identity", size), lambda: Pattern(identity(size)))


def _each(value: Any, count: int) -> Sizes:
    return (value,) * count if isinstance(value, int) else tuple(value)


def _of_images(rule: Rule, dimensions: int, layer: nn.Module, x: Tensor, y: Tensor) -> Any:
    """Apply a rule to an input that has the samples' dimension too."""
    if x.ndim != dimensions:
        raise ScanError(
            f"{type(layer).__name__} was given an input of shape {tuple(x.shape)}: expected "
            f"{dimensions} dimensions, the samples first; add one by input[None]"
        )
    return rule(layer, x, y)


register_layer(*_ELEMENTWISE, jacobian=_elementwise)
register_layer(nn.Identity, nn.Flatten, nn.Unflatten, jacobian=_unchanged)
register_layer(nn.Linear, jacobian=linear)
register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, jacobian=_batch_norm)
for _count in (1, 2, 3):
    for _name, _rule in (
        ("Conv", convolution),
        ("MaxPool", _max_pool),
        ("AdaptiveMaxPool", _max_pool),
        ("AvgPool", _average_pool),
        ("AdaptiveAvgPool", _average_pool),
        ("ZeroPad", partial(_pad, mode="zeros")),
        ("ConstantPad", partial(_pad, mode="zeros")),
        ("ReflectionPad", partial(_pad, mode="reflect")),
        ("ReplicationPad", partial(_pad, mode="replicate")),
        ("CircularPad", partial(_pad, mode="circular")),
    ):
        register_layer(
            getattr(nn, f"{_name}{_count}d"), jacobian=partial(_of_images, _rule, 2 + _count)
        )
