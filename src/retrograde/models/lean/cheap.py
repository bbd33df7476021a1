"""Which operations are cheap: how each is called again, what it reads, and its nominal cost.

A product, a convolution or attention is never cheap, nor is what draws random numbers.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograde.torch_private import log_softmax, outputs_of, schema_of, softmax

#: What an argument is: a tensor, a list of all tensors, an attribute of the node, or a fact of the
#: result.
TENSOR, LIST, ATTRIBUTE, RESULT = range(4)
_aten = torch.ops.aten


class Operation(NamedTuple):
    """A cheap operation."""

    name: str  # for reports
    call: Callable[..., Any]
    passes: float  # its nominal cost; a simple pointwise operation has 1, a view 0
    reads: tuple[tuple[int, str, int, str], ...] = ()  # what, its name, the edge, its keyword or ""
    over: Callable[..., Any] | None = None  # the same in place
    check: Callable[..., "Operation | None"] | None = None  # where the name of a node is too little


def _normalized(x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, eps: float) -> Any:
    """Return what a batch normalisation in training returned; statistics are not updated twice. The
    kernel multiplies by ``scale * weight``, and so does a call in evaluation whose variance is one.
    It takes a tenth of the time. Where this layout has another kernel, the whole is called."""
    form = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    plain = x.is_contiguous() or (x.dim() in (4, 5) and x.is_contiguous(memory_format=form))
    if plain and x.device.type == "cpu" and mean.dtype in (torch.float32, torch.float64):
        weight = scale if weight is None else scale * weight
        variance = torch.ones_like(mean)
        return _aten.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, 0.0)[0]
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
    if source is None:  # a view that was made without gradients, of a tensor that has one
        return None
    stays = outputs_of(source)[at].device == outputs_of(node)[nr].device
    return CHEAP[node.name()] if stays else None


# Operators of ATen by their passes on a CPU. ``Mul1.Scalar`` has the node MulBackward1.
_OPERATORS = {
    1: "Add.Tensor Sub.Tensor Rsub1.Scalar Mul.Tensor Mul1.Scalar Div.Tensor Div1.Scalar Neg Abs "
    "Relu Pow.Tensor_Scalar LeakyRelu Hardtanh Hardswish Clamp1 Reciprocal Cat Stack Roll "
    "Repeat Embedding",
    1.5: "Silu Gelu Sigmoid Glu Sqrt Rsqrt NativeGroupNorm",
    3: "NativeLayerNorm",
    4: "Exp",
    0: "T Transpose.int Permute Unsqueeze Slice.Tensor Select.int Split.Tensor SplitWithSizes "
    "Unbind.int",
}
_NORM = "Tensor input, Tensor? weight, Tensor? bias, "
# Others: node, function, passes, its arguments.
_FUNCTIONS: list[tuple[str, Callable[..., Any], float, str]] = [
    ("Softmax", lambda x, dim: softmax(x, dim, False), 3, "Tensor self, int dim"),
    ("LogSoftmax", lambda x, dim: log_softmax(x, dim, False), 3, "Tensor self, int dim"),
    ("NativeBatchNorm", _normalized, 1,
     _NORM + "Tensor result1, Tensor result2, float eps"),
    ("CudnnBatchNorm", _normalized, 2,
     _NORM + "Tensor result1, Tensor result2, float epsilon"),
    ("evaluation", lambda *a: _aten.batch_norm(*a[:5], False, 0.0, a[5], True), 1,
     _NORM + "Tensor running_mean, Tensor running_var, float eps"),
    ("NativeDropout", lambda x, mask, p: _aten.native_dropout_backward(x, mask, 1 / (1 - p)), 1,
     "Tensor input, Tensor result1, float p"),
    ("PreluKernel", _aten._prelu_kernel, 1, "Tensor self, Tensor weight"),
    ("UpsampleNearest2D", _aten.upsample_nearest2d, 1,
     "Tensor self, int output_size, float? scales_h, float? scales_w"),
    ("ToCopy", torch.Tensor.to, 1, "Tensor self, int dtype"),
    ("Clone", lambda x: x, 1, "Tensor self"),
    *((name, torch.reshape, 0, "Tensor self, int shape")
      for name in ("View", "UnsafeView", "Squeeze", "Squeeze1")),
    ("Expand", torch.Tensor.expand, 0, "Tensor self, int shape"),
]  # fmt: skip
_OVER: dict[str, Any] = {
    "Add": _aten.add_.Tensor,
    "Mul": _aten.mul_.Tensor,
    "Relu": _aten.relu_,
    "Silu": _aten.silu_,
}
_CHECKS = {"Pow": _power, "ToCopy": _cast, "NativeLayerNorm": _norm, "NativeGroupNorm": _norm}
_CHECKS |= {"NativeBatchNorm": _norm, "CudnnBatchNorm": _norm}
#: Cheap operations by the name of their node.
CHEAP: dict[str, Operation] = {}


def _add(node: str, call: Any, passes: float, schema: Any) -> None:
    name = "NativeBatchNorm" if node == "evaluation" else node.rstrip("1")
    reads, edge = [], 0
    for argument in schema.arguments:
        keyword = argument.name if argument.kwarg_only else ""
        if argument.name in ("shape", "dtype"):
            reads.append((RESULT, argument.name, 0, keyword))
        elif "Tensor" not in str(argument.type):
            reads.append((ATTRIBUTE, argument.name, 0, keyword))
        else:
            kind = LIST if "List" in str(argument.type) else TENSOR
            reads.append((kind, argument.name, edge, keyword))
            edge += 1
    key = node if node == "evaluation" else f"{name}Backward{node[len(name) :] or 0}"
    over = _OVER.get(name)
    CHEAP[key] = Operation(name, call, passes, tuple(reads), over, _CHECKS.get(name))


for _passes, _names in _OPERATORS.items():
    for _node, _, _overload in (word.partition(".") for word in _names.split()):
        _packet = getattr(_aten, re.sub("(?<=.)([A-Z])", r"_\1", _node.rstrip("1")).lower())
        _operator = getattr(_packet, _overload or "default")
        _add(_node, _operator, _passes, _operator._schema)
for _node, _call, _passes, _text in _FUNCTIONS:
    _add(_node, _call, _passes, schema_of(f"f({_text}) -> Tensor"))

#: Operations whose result has the type of all their arguments. Others have their first argument's.
PROMOTING = {"Add", "Sub", "Mul", "Div", "Cat", "Stack"}
#: Arguments that the kernel of a later call may change without a new version.
STATISTICS = {"running_mean", "running_var"}
#: Nodes that save their result, which so lives until they are run.
KEEP_RESULT = {
    f"{name}Backward0" for name in (
        "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Rsqrt", "Reciprocal", "Softmax", "SafeSoftmax",
        "LogSoftmax", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductFlashAttention",
        "ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention",
    )
}  # fmt: skip
