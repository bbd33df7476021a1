"""Which operations are cheap: how each is called again, what it reads, and its nominal cost.

A node of autograd's graph names the operation, and keeps what its own backward pass reads. A
product, a convolution or attention is never cheap, nor is what draws random numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["CHEAP", "FAST_POWERS", "NORM_OF_RUNNING", "Operation"]

_aten = torch.ops.aten


class Operation(NamedTuple):
    """A cheap operation.

    Attributes:
        name: of the operation, for reports.
        call: computes its first result.
        passes: its nominal cost: the time of a simple pointwise operation on as many bytes is 1.
        reads: what it is called with, as words.
        layout: whether its result's strides follow from its arguments.
    """

    name: str
    call: Callable[..., Any]
    passes: float
    reads: tuple[str, ...]
    layout: bool = True


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


def _first(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: call(*args)[0]


def _nth(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: call(*args[:-1])[args[-1]]


# Node; what is called; passes on a CPU; what it reads. ``a`` is the saved tensor of this name or
# None; ``a:0`` that or else the value at edge 0; ``:0`` only that value; ``:0?`` that or what was
# noted; ``?`` what was noted; ``:*`` the values at all edges; ``.a`` an attribute; ``a=`` one by its
# name. ``shape``, ``dtype`` and ``nr`` are those of the result.
_TABLE: list[tuple[str, Callable[..., Any], float, str]] = [
    ("Add", torch.add, 1, ":0? :1? alpha="),
    ("Sub", torch.sub, 1, ":0? :1? alpha="),
    ("RsubBackward1", torch.rsub, 1, ":0 ? alpha="),
    ("Mul", torch.mul, 1, "self:0 other:1"),
    ("Div", torch.div, 1, "self:0 other:1"),
    ("Neg", torch.neg, 1, ":0"),
    ("Abs", torch.abs, 1, "self:0"),
    ("Pow", torch.pow, 1, "self:0 .exponent"),
    ("Relu", torch.relu, 1, ":0"),
    ("Silu", _aten.silu, 1.5, "self:0"),
    ("Gelu", _aten.gelu, 1.5, "self:0 approximate="),
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

#: A batch normalisation in evaluation, whose node has the same name.
NORM_OF_RUNNING = Operation(
    "NativeBatchNorm",
    lambda x, weight, bias, mean, variance, eps: torch.batch_norm(
        x, weight, bias, mean, variance, False, 0.0, eps, True
    ),
    1,
    ("input", "weight", ":2?", "running_mean", "running_var", ".eps"),
)
#: Exponents that a CPU computes by products and roots.
FAST_POWERS = {2, 3, 0.5, -0.5, -1, -2}

#: Cheap operations by the name of their node.
CHEAP: dict[str, Operation] = {}
for _node, _call, _passes, _reads in _TABLE:
    _name, _found, _ = _node.partition("Backward")
    CHEAP[_node if _found else f"{_node}Backward0"] = Operation(
        _name, _call, _passes, tuple(_reads.split()), _name not in ("ToCopy", "Clone")
    )
