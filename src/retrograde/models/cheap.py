"""Which operations are cheap: how each is called again, what it reads, and its nominal cost.

A product, a convolution or attention is never cheap, nor is what draws random numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ATTRIBUTE", "CHEAP", "KEEP_RESULT", "LIST", "NOTED", "RESULT", "SAVED", "Operation"]

#: What an operation reads: a value at an edge, unless the node saved it; a tensor that the node
#: saved, or None; an attribute; a value or else what was noted; all edges; a fact of the result.
VALUE, SAVED, ATTRIBUTE, NOTED, LIST, RESULT = range(6)
_aten = torch.ops.aten


class Operation(NamedTuple):
    """A cheap operation: ``call`` returns its first result.

    ``passes`` is its nominal cost: a simple pointwise operation takes 1. ``reads`` are the
    arguments: kind, name, edge. ``over`` is the same in place, if that is of use. ``check`` returns
    the operation of a node whose name says too little, or None.
    """

    name: str
    call: Callable[..., Any]
    passes: float
    reads: tuple[tuple[int, str, int], ...]
    over: Callable[..., Any] | None
    check: Callable[..., "Operation | None"] | None


def _normalized(x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, eps: float) -> Any:
    """Return what a batch normalisation in training returned; statistics are not updated twice.

    The kernel multiplies by ``scale * weight``, and so does a call in evaluation whose variance is
    one. It takes a tenth of the time. Where this layout has another kernel, the whole is called.
    """
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    plain = x.is_contiguous() or (x.dim() in (4, 5) and x.is_contiguous(memory_format=form))
    if plain and x.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64):
        weight = scale if weight is None else scale * weight
        one = torch.ones_like(mean)
        return _aten.native_batch_norm(x, weight, bias, mean, one, False, 0.0, 0.0)[0]
    return torch.batch_norm(x, weight, bias, None, None, True, 0.0, eps, True)


def _norm(node: Any, nr: int, edges: Any) -> Operation | None:
    if nr or edges[0][0] is None:
        return None  # a weight that the node did not save
    return CHEAP[node.name()] if getattr(node, "_saved_training", True) else CHEAP["evaluation"]


def _power(node: Any, nr: int, edges: Any) -> Operation | None:
    fast = node._saved_exponent in (2, 3, 0.5, -0.5, -1, -2)  # by products and roots
    return CHEAP[node.name()] if fast else None


def _cast(node: Any, nr: int, edges: Any) -> Operation | None:
    source, at = edges[0]
    stays = source._input_metadata[at].device == node._input_metadata[nr].device
    return CHEAP[node.name()] if stays else None


def _words(reads: str) -> tuple[tuple[int, str, int], ...]:
    """Return what a row of the table reads.

    ``a`` is a saved tensor or None; ``a:0`` that or else the value at edge 0; ``:0`` only that
    value; ``:0?`` that or what was noted; ``?`` what was noted; ``:*`` the values at all edges;
    ``.a`` an attribute; ``shape``, ``dtype`` and ``nr`` are of the result.
    """
    found = []
    for word in reads.split():
        name, colon, edge = word.rstrip("?").partition(":")
        if word == ":*":
            found.append((LIST, "", 0))
        elif colon or word == "?":
            kind = NOTED if word[-1] == "?" else VALUE
            found.append((kind, name and f"_raw_saved_{name}", int(edge or -1)))
        elif word[0] == ".":
            found.append((ATTRIBUTE, f"_saved_{word[1:]}", 0))
        else:
            of_result = word in ("shape", "dtype", "nr")
            found.append((RESULT, word, 0) if of_result else (SAVED, f"_raw_saved_{word}", 0))
    return tuple(found)


# Node, what is called, passes as measured on a CPU, what it reads.
_TABLE: list[tuple[str, Callable[..., Any], float, str]] = [
    ("Add", lambda x, y, a: torch.add(x, y, alpha=a), 1, ":0? :1? .alpha"),
    ("Sub", lambda x, y, a: torch.sub(x, y, alpha=a), 1, ":0? :1? .alpha"),
    ("RsubBackward1", lambda x, y, a: torch.rsub(x, y, alpha=a), 1, ":0 ? .alpha"),
    ("Mul", torch.mul, 1, "self:0 other:1"),
    ("MulBackward1", torch.mul, 1, ":0 .other"),
    ("Div", torch.div, 1, "self:0 other:1"),
    ("DivBackward1", torch.div, 1, ":0 .other"),
    ("Neg", torch.neg, 1, ":0"),
    ("Abs", torch.abs, 1, "self:0"),
    ("Pow", torch.pow, 1, "self:0 .exponent"),
    ("Relu", torch.relu, 1, ":0"),
    ("Silu", _aten.silu, 1.5, "self:0"),
    ("Gelu", lambda x, a: _aten.gelu(x, approximate=a), 1.5, "self:0 .approximate"),
    ("LeakyRelu", _aten.leaky_relu, 1, "self:0 .negative_slope"),
    ("Hardtanh", _aten.hardtanh, 1, "self:0 .min_val .max_val"),
    ("Hardswish", _aten.hardswish, 1, "self:0"),
    ("ClampBackward1", torch.clamp, 1, "self:0 .min .max"),
    ("Sigmoid", torch.sigmoid, 1.5, ":0"),
    ("Glu", _aten.glu, 1.5, "self:0 .dim"),
    ("Exp", torch.exp, 4, ":0"),
    ("Sqrt", torch.sqrt, 1.5, ":0"),
    ("Rsqrt", torch.rsqrt, 1.5, ":0"),
    ("Reciprocal", torch.reciprocal, 1, ":0"),
    ("Softmax", lambda x, d: torch._softmax(x, d, False), 3, ":0 .dim"),
    ("LogSoftmax", lambda x, d: torch._log_softmax(x, d, False), 3, ":0 .dim"),
    ("NativeLayerNorm", lambda *a: torch.native_layer_norm(*a)[0], 3,
     "input .normalized_shape weight bias ?"),
    ("NativeGroupNorm", lambda *a: torch.native_group_norm(*a)[0], 1.5,
     "input weight :2? .N .C .HxW .group .eps"),
    ("NativeBatchNorm", _normalized, 1, "input weight :2? result1 result2 .eps"),
    ("CudnnBatchNorm", _normalized, 2, "input weight :2? result1 result2 .epsilon"),
    ("evaluation", lambda *a: torch.batch_norm(*a[:5], False, 0.0, a[5], True), 1,
     "input weight :2? running_mean running_var .eps"),
    ("NativeDropout", lambda x, mask, p: torch.native_dropout_backward(x, mask, 1 / (1 - p)), 1,
     ":0 result1 .p"),
    ("Cat", lambda d, *xs: torch.cat(xs, d), 1, ".dim :*"),
    ("Stack", lambda d, *xs: torch.stack(xs, d), 1, ".dim :*"),
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
    ("Split", lambda x, n, d, nr: torch.split(x, n, d)[nr], 0, ":0 .split_size .dim nr"),
    ("SplitWithSizes", lambda x, n, d, nr: torch.split(x, n, d)[nr], 0, ":0 .split_sizes .dim nr"),
    ("Unbind", lambda x, d, nr: torch.unbind(x, d)[nr], 0, ":0 .dim nr"),
]  # fmt: skip
_OVER = {
    "Add": lambda x, y, a: x.add_(y, alpha=a), "Mul": torch.Tensor.mul_, "Relu": torch.relu_,
    "Silu": _aten.silu_,
}  # fmt: skip
_CHECKS = {
    "NativeLayerNorm": _norm, "NativeGroupNorm": _norm, "NativeBatchNorm": _norm,
    "CudnnBatchNorm": _norm, "Pow": _power, "ToCopy": _cast,
}  # fmt: skip


def _operation(node: str, call: Any, passes: float, reads: str) -> tuple[str, Operation]:
    name = node.partition("Backward")[0] if node != "evaluation" else "NativeBatchNorm"
    node = node if "Backward" in node or node == "evaluation" else f"{name}Backward0"
    return node, Operation(name, call, passes, _words(reads), _OVER.get(name), _CHECKS.get(name))


#: Cheap operations by the name of their node.
CHEAP = dict(_operation(*row) for row in _TABLE)
#: Nodes that save their result, which so lives until they are run.
KEEP_RESULT = {
    f"{name}Backward0"
    for name in ["Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Rsqrt", "Reciprocal", "Softmax", "SafeSoftmax", "LogSoftmax", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention", "ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention"]
}
