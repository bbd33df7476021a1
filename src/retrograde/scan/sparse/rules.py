"""Layers with a transposed Jacobian: torch's own, by their rules, and registered ones.

A rule gives a pattern from shapes, and values from weights and inputs:

===============================  =============================================  ================
layer                            pattern                                        values
===============================  =============================================  ================
convolution, 1 to 3 dimensions   channels of a group ⊗ a band for each          weights, shared
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
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from retrograde.errors import RetrogradeError, ScanError
from retrograde.scan.sparse.arithmetic import sparse_kernels
from retrograde.scan.sparse.csr import CSR, LayerJacobian
from retrograde.scan.sparse.factor import adaptive, band, identity, padding
from retrograde.scan.sparse.pattern import Pattern
from retrograde.scan.sparse.weights import Sizes, convolution, known, linear

__all__ = ["Parts", "Rule", "parts_of", "register_layer", "rule_of"]

Rule = Callable[[Any, Tensor, Tensor], LayerJacobian | CSR]
Parts = Callable[[Any], nn.Module]

_RULES: dict[type[nn.Module], Rule] = {}
_PARTS: dict[type[nn.Module], Parts] = {}


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
    """Return the rule for a layer; raises ``ScanError`` where there is none."""
    found: Rule | None = _look_up(_RULES, layer)
    if found is None:
        name = type(layer).__name__
        raise ScanError(
            f"{name} has no transposed Jacobian here: expected a layer with a rule; give it one by "
            f"rg.scan.register_layer({name}, jacobian=...), or parts=... if it is made of "
            "layers that have one, or use backward=None"
        )
    return found


def parts_of(layer: nn.Module) -> nn.Module | None:
    """Return a module of known layers with the same outputs; None if the layer is one piece."""
    found = _look_up(_PARTS, layer)
    return None if found is None else found(layer)


def _look_up(table: dict[type[nn.Module], Any], layer: nn.Module) -> Any:
    if "forward" in vars(layer):  # this instance has its own forward pass
        return None
    for kind in type(layer).__mro__:
        if kind in table and kind.forward is type(layer).forward:
            return table[kind]
    return None


_ELEMENTWISE = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


def _elementwise(layer: nn.Module, x: Tensor, y: Tensor) -> LayerJacobian:
    def slopes() -> Tensor:
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        return found.flatten(1)

    return LayerJacobian(_diagonal(x), False, slopes)


def _relu(layer: nn.Module, x: Tensor, y: Tensor) -> LayerJacobian:
    """The rule of ReLU, which calls the kernel of its backward pass directly."""
    one = torch.ones((), dtype=y.dtype, device=y.device)

    def slopes() -> Tensor:
        found: Tensor = torch.ops.aten.threshold_backward(one.expand_as(y), y.detach(), 0)
        return found.flatten(1)

    return LayerJacobian(_diagonal(x), False, slopes)


def _unchanged(layer: nn.Module, x: Tensor, y: Tensor) -> LayerJacobian:
    return LayerJacobian(_diagonal(x), True, None)


def _convolution(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    outputs = tuple(y.shape[2:])
    if layer.padding_mode == "zeros":
        return convolution(layer, tuple(x.shape[2:]), outputs, _before(layer))
    widths = layer._reversed_padding_repeated_twice
    padded = functional.pad(x.detach(), widths, mode=layer.padding_mode)
    inner = convolution(layer, tuple(padded.shape[2:]), outputs, (0,) * len(outputs))
    outer = _padding_of(x, widths, layer.padding_mode)
    product = outer.pattern.product(inner.pattern)
    found = product.exact
    if product.method != "diagonal":
        found.keeps = outer.pattern, inner.pattern

    def values() -> Tensor:
        data: Tensor = (outer.csr(x) @ inner.csr(x)).data
        if found is product.result:
            return data
        return data.index_select(0, torch.from_numpy(found.positions).to(data.device))

    return LayerJacobian(found, True, values)


def _before(layer: Any) -> Sizes:
    """Return the padding before the first input, in each dimension."""
    if layer.padding == "same":
        spans = zip(layer.dilation, layer.kernel_size, strict=True)
        return tuple(dilation * (kernel - 1) // 2 for dilation, kernel in spans)
    return (0,) * len(layer.kernel_size) if layer.padding == "valid" else tuple(layer.padding)


def _max_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    count = x.ndim - 2
    sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    how = [_each(size, count) for size in sizes]
    pool = getattr(functional, f"max_pool{count}d")

    def choose(given: Tensor) -> Any:
        return pool(given, *how, ceil_mode=layer.ceil_mode, return_indices=True)

    pattern = _windows(x, y, *how)
    if count != 2:
        return _maxima(pattern, x, y, choose)

    def back(one: Tensor, chosen: Tensor) -> Tensor:
        given = (*map(list, how), layer.ceil_mode)
        found: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(one, x, *given, chosen)
        return found

    return _maxima(pattern, x, y, choose, back)


def _adaptive_max_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    pool = getattr(functional, f"adaptive_max_pool{x.ndim - 2}d")
    choose = partial(pool, output_size=tuple(y.shape[2:]), return_indices=True)
    return _maxima(_windows(x, y), x, y, choose)


def _maxima(
    pattern: Pattern,
    x: Tensor,
    y: Tensor,
    choose: Callable[[Tensor], Any],
    back: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> LayerJacobian:
    """Return the Jacobian of a max-pooling: 1 where the input of an entry is its output's maximum.
    If every input is in one window, the values are the input's gradient for an output gradient of
    ones."""
    version = x._version
    one_each = all(np.all(factor.row_counts == 1) for factor in pattern.factors)
    one = torch.ones((), dtype=x.dtype, device=x.device)

    def values() -> Tensor:
        # The forward pass saved the places of the maxima; if not, they are found again.
        chosen = getattr(y.grad_fn, "_saved_result1", None)
        if chosen is None or chosen.shape != y.shape:
            if x._version != version:
                raise RetrogradeError(
                    f"the input of a max-pooling, {tuple(x.shape)}, was changed in place between "
                    "the forward pass and the backward pass: expected it as it was; change a copy "
                    "of it"
                )
            _, chosen = choose(x.detach())
        if one_each and back is not None:
            return back(one.expand_as(y), chosen).flatten(1)
        return sparse_kernels(x.device.type, x.dtype).mark(pattern, x, chosen)

    return LayerJacobian(pattern, False, values, scratch=24)


def _average_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    count = x.ndim - 2
    kernel, stride, pad = (
        _each(value, count) for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    pattern = _windows(x, y, kernel, stride, pad, (1,) * count)
    divisor = getattr(layer, "divisor_override", None)
    spans = zip(x.shape[2:], y.shape[2:], kernel, stride, pad, strict=True)
    sizes = [_window_sizes(*span, layer.count_include_pad) for span in spans]
    return _averages(pattern, x, y, sizes, divisor)


def _window_sizes(
    size: int, outputs: int, kernel: int, stride: int, pad: int, with_padding: bool
) -> np.ndarray:
    """Return the divisors of torch in one dimension, for each output."""
    start = np.arange(outputs) * stride - pad
    end = np.minimum(start + kernel, size + pad)
    return end - start if with_padding else np.minimum(end, size) - np.maximum(start, 0)


def _adaptive_average_pool(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    pattern = _windows(x, y)
    sizes = [factor.column_counts for factor in pattern.factors[1:]]
    return _averages(pattern, x, y, sizes, None)


def _averages(
    pattern: Pattern, x: Tensor, y: Tensor, sizes: Sequence[np.ndarray], divisor: int | None
) -> LayerJacobian:
    def values() -> Tensor:
        whole = np.ones(1)
        for each in sizes:
            whole = np.multiply.outer(whole, each).ravel()
        share = torch.from_numpy(1 / whole if divisor is None else np.full(len(whole), 1 / divisor))
        columns = pattern.tensor("indices", x.device) % len(share)
        return share.to(x).index_select(0, columns)

    return LayerJacobian(pattern, True, values, scratch=8)


def _windows(x: Tensor, y: Tensor, *how: Sizes) -> Pattern:
    """Return the windows of kernel, stride, padding, dilation; by default of adaptive pooling."""
    sizes, outputs, channels = tuple(x.shape[2:]), tuple(y.shape[2:]), x.shape[1]

    def make() -> Pattern:
        if not how:
            return Pattern(identity(channels), *map(adaptive, sizes, outputs))
        spans = zip(sizes, outputs, *how, strict=True)
        return Pattern(identity(channels), *(band(*span)[0] for span in spans))

    return known(("windows", channels, sizes, outputs, *how), make)


def _batch_norm(layer: Any, x: Tensor, y: Tensor) -> LayerJacobian:
    def scales() -> Tensor:
        found: Tensor = (layer.running_var + layer.eps).rsqrt()
        if layer.weight is not None:
            found = found * layer.weight.detach()
        return found.repeat_interleave(prod(x.shape[2:]))

    return LayerJacobian(_diagonal(x), True, scales)


def _pad(layer: Any, x: Tensor, y: Tensor, mode: str) -> LayerJacobian:
    return _padding_of(x, layer.padding, mode)


def _padding_of(x: Tensor, widths: Sequence[int], mode: str) -> LayerJacobian:
    """Return the Jacobian of ``functional.pad``; the widths begin with the last dimension."""
    count = x.ndim - 2
    widths = _each(widths, 2 * count)
    channels, sizes = x.shape[1], tuple(x.shape[2:])

    def make() -> Pattern:
        pairs = [widths[2 * i : 2 * i + 2] for i in reversed(range(count))]
        spans = zip(sizes, pairs, strict=True)
        reads = [padding(_reads(size, pair, mode), size) for size, pair in spans]
        return Pattern(identity(channels), *reads)

    pattern = known(("padding", channels, sizes, tuple(widths), mode), make)
    return LayerJacobian(pattern, True, lambda: x.new_ones(pattern.nnz))


def _reads(size: int, widths: Sequence[int], mode: str) -> np.ndarray:
    """Return the input that each output of a padding reads; negative where it reads none."""
    inputs = torch.arange(size, dtype=torch.float64, device="cpu")[None, None]
    fill = {"mode": "constant", "value": -1.0} if mode == "zeros" else {"mode": mode}
    return functional.pad(inputs, tuple(widths), **fill)[0, 0].numpy().astype(np.int64)  # type: ignore[arg-type]


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
register_layer(nn.ReLU, jacobian=_relu)
register_layer(nn.Identity, nn.Flatten, nn.Unflatten, jacobian=_unchanged)
register_layer(nn.Linear, jacobian=linear)
register_layer(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, jacobian=_batch_norm)
for _count in (1, 2, 3):
    for _name, _rule in (
        ("Conv", _convolution),
        ("MaxPool", _max_pool),
        ("AdaptiveMaxPool", _adaptive_max_pool),
        ("AvgPool", _average_pool),
        ("AdaptiveAvgPool", _adaptive_average_pool),
        ("ZeroPad", partial(_pad, mode="zeros")),
        ("ConstantPad", partial(_pad, mode="zeros")),
        ("ReflectionPad", partial(_pad, mode="reflect")),
        ("ReplicationPad", partial(_pad, mode="replicate")),
        ("CircularPad", partial(_pad, mode="circular")),
    ):
        register_layer(
            getattr(nn, f"{_name}{_count}d"), jacobian=partial(_of_images, _rule, 2 + _count)
        )
