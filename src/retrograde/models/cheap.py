"""Which operations are cheap: how each is called again, what it reads, and its nominal cost.

A node of autograd's graph names the operation, and keeps what its own backward pass reads. A
product, a convolution or attention is never cheap, nor is what draws random numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["CHEAP", "KEEP_RESULT", "Operation"]

_aten = torch.ops.aten


class Operation(NamedTuple):
    """A cheap operation.

    Attributes:
        name: of the operation, for reports.
        call: computes its first result.
        passes: its nominal cost: the time of a simple pointwise operation on as many bytes is 1.
        reads: what it is called with: kind, name, edge.
        layout: whether its result's strides follow from its arguments.
        copies: whether it copies what it reads, so that strides of that do not matter.
        over: the same in place, or None.
        check: returns the operation of a node, or None if its result is unknown.
    """

    name: str
    call: Callable[..., Any]
    passes: float
    reads: tuple[tuple[int, str, int], ...]
    layout: bool = True
    copies: bool = False
    over: Callable[..., Any] | None = None
    check: Callable[..., "Operation | None"] | None = None


def _normalized(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse_std: Tensor, eps: float
) -> Tensor:
    """Return what a batch normalisation in training returned; statistics are not updated twice.

    The kernel multiplies by ``inverse_std * weight``, and so does a call in evaluation whose
    variance is one. It takes a tenth of the time of a call that computes statistics. Where the
    kernel of this layout is another one, the whole call is made again.
    """
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    plain = x.is_contiguous() or (x.dim() in (4, 5) and x.is_contiguous(memory_format=form))
    if plain and x.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64):
        scale = inverse_std if weight is None else inverse_std * weight
        one = torch.ones_like(mean)
        return _aten.native_batch_norm(x, scale, bias, mean, one, False, 0.0, 0.0)[0]
    return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, True)


def _add(x: Any, y: Any, alpha: Any) -> Tensor:
    return torch.add(x, y, alpha=alpha)


def _sub(x: Any, y: Any, alpha: Any) -> Tensor:
    return torch.sub(x, y, alpha=alpha)


def _rsub(x: Any, y: Any, alpha: Any) -> Tensor:
    return torch.rsub(x, y, alpha=alpha)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return _aten.gelu(x, approximate=approximate)


def _first(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: call(*args)[0]


def _nth(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: call(*args[:-1])[args[-1]]


# Node; what is called; passes on a CPU; what it reads. ``a`` is the saved tensor of this name or
# None; ``a:0`` that or else the value at edge 0; ``:0`` only that value; ``:0?`` that or what was
# noted; ``?`` what was noted; ``:*`` the values at all edges; ``.a`` an attribute; ``a=`` one by its
# name. ``shape``, ``dtype`` and ``nr`` are those of the result.
_TABLE: list[tuple[str, Callable[..., Any], float, str]] = [
    ("Add", _add, 1, ":0? :1? .alpha"),
    ("Sub", _sub, 1, ":0? :1? .alpha"),
    ("RsubBackward1", _rsub, 1, ":0 ? .alpha"),
    ("Mul", torch.mul, 1, "self:0 other:1"),
    ("Div", torch.div, 1, "self:0 other:1"),
    ("MulBackward1", torch.mul, 1, ":0 .other"),
    ("DivBackward1", torch.div, 1, ":0 .other"),
    ("Neg", torch.neg, 1, ":0"),
    ("Abs", torch.abs, 1, "self:0"),
    ("Pow", torch.pow, 1, "self:0 .exponent"),
    ("Relu", torch.relu, 1, ":0"),
    ("Silu", _aten.silu, 1.5, "self:0"),
    ("Gelu", _gelu, 1.5, "self:0 .approximate"),
    ("LeakyRelu", _aten.leaky_relu, 1, "self:0 .negative_slope"),
    ("Hardtanh", _aten.hardtanh, 1, "self:0 .min_val .max_val"),
    ("Hardswish", _aten.hardswish, 1, "self:0"),
    ("Hardsigmoid", _aten.hardsigmoid, 1, "self:0"),
    ("ClampBackward1", torch.clamp, 1, "self:0 .min .max"),
    ("Sigmoid", torch.sigmoid, 1.5, ":0"),
    ("Glu", _aten.glu, 1.5, "self:0 .dim"),
    ("Exp", torch.exp, 4, ":0"),
    ("Sqrt", torch.sqrt, 1.5, ":0"),
    ("Rsqrt", torch.rsqrt, 1.5, ":0"),
    ("Reciprocal", torch.reciprocal, 1, ":0"),
    ("Softmax", lambda x, dim: torch._softmax(x, dim, False), 3, ":0 .dim"),
    ("LogSoftmax", lambda x, dim: torch._log_softmax(x, dim, False), 3, ":0 .dim"),
    ("NativeLayerNorm", _first(torch.native_layer_norm), 3, "input .normalized_shape weight bias ?"),
    ("NativeGroupNorm", _first(torch.native_group_norm), 1.5, "input weight :2? .N .C .HxW .group .eps"),
    ("NativeBatchNorm", _normalized, 1, "input weight :2? result1 result2 .eps"),
    ("CudnnBatchNorm", _normalized, 2, "input weight :2? result1 result2 .epsilon"),
    ("NativeDropout", lambda x, mask, p: torch.native_dropout_backward(x, mask, 1 / (1 - p)), 1, ":0 result1 .p"),
    ("Cat", lambda dim, *xs: torch.cat(xs, dim), 1, ".dim :*"),
    ("Stack", lambda dim, *xs: torch.stack(xs, dim), 1, ".dim :*"),
    ("Roll", torch.roll, 1, ":0 .shifts .dims"),
    ("Embedding", _aten.embedding, 1, ":0 indices"),
    ("ToCopy", torch.Tensor.to, 1, ":0 dtype"),
    ("Clone", lambda x: x, 1, ":0"),
    ("UnsafeView", torch.reshape, 0, ":0 shape"),
    ("View", torch.reshape, 0, ":0 shape"),
    ("Squeeze", torch.reshape, 0, ":0 shape"),
    ("SqueezeBackward1", torch.reshape, 0, ":0 shape"),
    ("Unsqueeze", torch.unsqueeze, 0, ":0 .dim"),
    ("Expand", torch.Tensor.expand, 0, ":0 shape"),
    ("T", torch.t, 0, ":0"),
    ("Transpose", torch.transpose, 0, ":0 .dim0 .dim1"),
    ("Permute", torch.permute, 0, ":0 .dims"),
    ("Slice", _aten.slice, 0, ":0 .dim .start .end .step"),
    ("Select", torch.select, 0, ":0 .dim .index"),
    ("Split", _nth(torch.split), 0, ":0 .split_size .dim nr"),
    ("SplitWithSizes", _nth(torch.split), 0, ":0 .split_sizes .dim nr"),
    ("Unbind", _nth(torch.unbind), 0, ":0 .dim nr"),
]

#: Nodes that save their result: it lives until they are run.
KEEP_RESULT = {
    *(f"{name}Backward0" for name in ("Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Rsqrt")),
    *("ReciprocalBackward0", "SoftmaxBackward0", "SafeSoftmaxBackward0", "LogSoftmaxBackward0"),
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
}
#: What a word says that an operation reads.
VALUE, SAVED, ATTRIBUTE, NOTED_VALUE, VALUES, RESULT = range(6)


def _parsed(word: str) -> tuple[int, str, int]:
    saved, colon, edge = word.partition(":")
    if word == ":*":
        return VALUES, "", 0
    if word[-1] == "?":
        return NOTED_VALUE, "", int(edge[0]) if colon else -1
    if colon:
        return VALUE, saved and f"_raw_saved_{saved}", int(edge)
    if word[0] == ".":
        return ATTRIBUTE, f"_saved_{word[1:]}", 0
    if word in ("shape", "dtype", "nr"):
        return RESULT, word, 0
    return SAVED, f"_raw_saved_{word}", 0


def _operation(node: str, call: Callable[..., Any], passes: float, reads: str) -> Operation:
    name = node.partition("Backward")[0]
    layout = name not in ("ToCopy", "Clone")
    words = tuple(map(_parsed, reads.split()))
    return Operation(name, call, passes, words, layout, name == "UnsafeView", _OVER.get(name), _CHECKS.get(name))


def _norm(node: Any, nr: int, edges: Any) -> Operation | None:
    if nr or edges[0][0] is None:  # its weight may be unknown
        return None
    training = getattr(node, "_saved_training", True)
    return CHEAP[node.name()] if training else _NORM_OF_RUNNING


def _power(node: Any, nr: int, edges: Any) -> Operation | None:
    """Of exponents, a CPU computes these by products and roots."""
    fast = node._saved_exponent in (2, 3, 0.5, -0.5, -1, -2)
    return CHEAP[node.name()] if fast else None


def _cast(node: Any, nr: int, edges: Any) -> Operation | None:
    source, at = edges[0]
    same = source._input_metadata[at].device == node._input_metadata[nr].device
    return CHEAP[node.name()] if same else None


_OVER: dict[str, Callable[..., Any]] = {
    "Add": lambda x, y, alpha: x.add_(y, alpha=alpha),
    "Mul": torch.Tensor.mul_,
    "Relu": torch.relu_,
    "Silu": _aten.silu_,
}
_CHECKS: dict[str, Callable[..., Operation | None]] = {
    **dict.fromkeys(("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm"), _norm),
    **{"CudnnBatchNorm": _norm, "Pow": _power, "ToCopy": _cast},
}
_NORM_OF_RUNNING = _operation(
    "NativeBatchNorm",
    lambda x, weight, bias, mean, variance, eps: torch.batch_norm(
        x, weight, bias, mean, variance, False, 0.0, eps, True
    ),
    1,
    "input weight :2? running_mean running_var .eps",
)
#: Cheap operations by the name of their node.
CHEAP = {
    row[0] if "Backward" in row[0] else f"{row[0]}Backward0": _operation(*row) for row in _TABLE
}
