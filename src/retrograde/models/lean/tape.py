"""The tape of one forward pass: which saved tensors are let go.

1. The same function on the same strides: a value has the same bits when it is computed again.
2. What a recipe reads is held at no cost if the recipe's own nodes save it: they run after the
   reader. What others saved may not be larger than what is let go.
3. What a recipe takes for a moment is covered by the gradient that its reader will allocate, and
   by what was let go before. So the peak is never above ordinary's.
4. What was changed in place is kept, unless autograd followed the change. What was changed after
   it was saved raises what autograd raises.
5. A recipe that costs more than its bytes are worth is not used.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from retrograde.models.lean.cheap import Operation
from retrograde.models.lean.recipes import (
    CHANGED,
    KNOWN,
    Box,
    Packed,
    Recipe,
    Search,
    Versioned,
    shape_of,
    unpack,
)
from retrograde.torch_private import (
    address_of,
    backward_pass,
    base_of,
    has_function_mode,
    is_wrapped,
    next_node,
    number_of,
    raw_saved,
    side_stream,
    without_functions,
    without_subclasses,
)

#: What a byte is worth, in bytes written by an operation of one pass.
WORTH = 5.0
#: Smaller values are kept: what the tape does for one takes as long as to write so many bytes. So
#: are those of less than this part of what is kept.
LEAST_BYTES, LEAST_PART = 128 * 1024, 1 / 1024
#: In the metadata of a node: the version of its result, if autograd followed the changes in place.
VERSION = "retrograde version"


class LeanTape(TorchFunctionMode):
    """Saves for one forward pass, and notes what no node of the graph knows."""

    def __init__(self, parameters_stay: bool, task: int = -1) -> None:
        super().__init__()
        self.kept = 0  # bytes of what is kept; parameters and small tensors are not counted
        self.let_go = Counter[str]()  # bytes of what is let go, by operation
        self._parameters_stay, self._first = parameters_stay, next_node()
        self._boxes: dict[int, ref[Box]] = {}  # by the address of the storage
        self._gone: list[ref[Box]] = []
        self._pending: list[Box] = []  # let go, and perhaps not released yet
        self._credit = 0  # bytes that were let go, and are released
        self._task = task  # the backward pass in which it saves, or -1
        self._is_changing = False  # a function runs that changes its first argument in place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and note what it changes in place."""
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        rule = _RULES[func] if func in _RULES else _rule_of(func)
        if rule is None:
            return func(*args, **kwargs)
        changes, shares, note = rule
        target = kwargs.get("out", args[0] if args else kwargs.get("input"))
        if not isinstance(target, Tensor):
            result = func(*args, **kwargs)
            if changes or "out" in kwargs:
                for tensor in target if isinstance(target, (list, tuple)) else ():
                    self._changed(tensor, False)
            return result
        newest = next_node()
        with without_subclasses():  # which may count that it is looked at
            before = None if target.is_inference() else target._version
            if before is not None:  # else nothing of it is ever saved
                if changes or kwargs.get("inplace"):
                    self._open_dependents(target)
                    self._is_changing = True
                if shares:
                    self.touch(target, shares == "data")
        result = func(*args, **kwargs)
        self._is_changing = False
        with without_subclasses():
            if before is not None and target._version != before:
                self._changed(target, next_node() > newest)
            # Attention's result has weights too.
            made = result[0] if type(result) is tuple and result else result
            if before is not None and note is not None and isinstance(made, Tensor):
                node: Any = made.grad_fn
                if node is not None and number_of(node) >= newest:  # else this call made none
                    note(self, node, args, kwargs)
        return result

    def pack(self, tensor: Tensor) -> Packed | Versioned | tuple[Tensor, int]:
        """Save a tensor, or what it can be computed from."""
        if has_function_mode():
            with without_functions():
                return self.pack(tensor)
        version, base = tensor._version, base_of(tensor)
        small = base.numel() * base.itemsize < LEAST_BYTES
        if small or (base.requires_grad and base.is_leaf):
            return Versioned(tensor if tensor.is_leaf else tensor.detach(), version)
        if (size := _large(tensor)) == 0:
            return Versioned(tensor.detach(), version)
        storage = tensor.untyped_storage()
        box = self._box_of(storage)
        if box is None and size <= self.kept * LEAST_PART:
            return Versioned(tensor.detach(), version)
        dtype = base.dtype if box is None else box.dtype
        if dtype is not tensor.dtype or backward_pass() != self._task:
            self.kept += storage.nbytes() if box is None else 0
            return Versioned(tensor.detach(), version)
        if side_stream(tensor):
            return tensor.detach(), version  # not the default stream, which a recipe would need
        if box is not None and box.version != version:
            alias = box.alias()
            if alias is not None and alias._version == box.version:  # it has versions of its own
                self._take_back(box)
                return Versioned(tensor.detach(), version)
            box.overwritten, box = True, None
        if box is None:
            box = Box(base, storage)
            self._boxes[address_of(storage)] = ref(box)
            node: Any = base.grad_fn
            if node is None or not self._let_go(box, node, base, tensor.requires_grad):
                box.keep(base)
                self.kept += box.nbytes
            if node is not None:
                node.metadata[base.output_nr] = ref(box)
        shape = shape_of(tensor)
        return Packed(box, box.shape if shape == box.shape else shape)

    def close(self) -> None:
        """End the pass. What the caller still holds is not computed a second time beside it."""
        with without_functions():
            for reference in self._gone:
                self._take_back(reference())
        self._boxes, self._gone, self._pending = {}, [], []

    def touch(self, tensor: Tensor, is_parameter: bool = False) -> None:
        """Note that a value may change, or may live on, without autograd's knowledge."""
        base = base_of(tensor)
        node: Any = base.grad_fn
        if is_parameter and base.is_leaf and base.requires_grad and self._parameters_stay:
            self._parameters_stay = False
            for reference in list(self._gone):
                self._take_back(reference(), True)
        if node is not None:
            node.metadata[CHANGED] = True
            self._take_back(self._box_of(base.untyped_storage()) if _large(base) else None)

    def note_noise(self, node: object, p: float) -> None:
        """Let go the noise of a dropout, zeros and one other number: a mask of bits is enough."""
        saved = raw_saved(node, "other").data
        box = saved.box if type(saved) is Packed else None
        noise = box.data if box is not None else None
        if box is None or noise is None or not noise.is_floating_point() or not 0 < p < 1:
            return
        self._settle()
        if not noise.is_cpu or noise.numel() // 8 > self._credit:
            return
        from retrograde.kernels.cpu.masks import packed

        with torch.no_grad():
            scale, mask = noise.new_ones(()).div_(1 - p), packed(noise)
            is_known = (p, noise.dtype) in _NOISES
            if not (is_known or torch.equal(_noise(mask, scale, noise.shape), noise)):
                return
            _NOISES.add((p, noise.dtype))
        at = Box(mask, mask.untyped_storage())
        at.keep(mask)
        self.kept -= box.nbytes - at.nbytes
        args = [Packed(at, at.shape), Versioned(scale, scale._version), noise.shape]
        self._release(box, Recipe(_NOISE, args, {}, 0, box.nbytes), [at], 1, noise)

    def _box_of(self, storage: torch.UntypedStorage) -> Box | None:
        at = self._boxes.get(address_of(storage))
        box = at() if at is not None else None
        return box if box is not None and box.storage() is storage else None

    def _let_go(self, box: Box, node: object, base: Tensor, grad_is_to_come: bool) -> bool:
        """Keep the recipe of a value instead of it, if the rules allow that."""
        whole = base.numel() * base.itemsize == box.nbytes
        if not whole or not self._is_followed(box.version, node):
            return False
        search = Search(self._parameters_stay, self._first)
        step = search.step(node, base.output_nr, box.nbytes)
        if step is None or search.cost > WORTH * box.nbytes:
            return False
        if sum(other.nbytes for other in set(search.apart).difference(search.own)) > box.nbytes:
            return False
        peak = max(step.peak()[0], box.nbytes)
        self._settle()
        if peak - box.nbytes * (2 if grad_is_to_come else 1) > self._credit:
            return False
        box.peak = peak
        self._release(box, step, search.own + search.apart, search.operations, base)
        return True

    def _is_followed(self, version: int, node: Any) -> bool:
        """Whether each change in place of a result is in the graph."""
        if version == node.metadata.get(VERSION, 0):
            return version > 0 or not self._is_changing
        saved = raw_saved(node, "result")
        if saved is None or saved.data is not None:
            return False
        old = node.next_functions[0][0]  # this is a change in place that is saving its own result
        return version == 1 or (old is not None and old.metadata.get(VERSION) == version - 1)

    def _release(
        self, box: Box, recipe: Recipe, reads: list[Box], operations: int, value: Tensor
    ) -> None:
        box.let_go(recipe, value)
        box.reads, box.operations = reads, operations
        self.let_go[recipe.operation.name] += box.nbytes
        self._gone.append(ref(box))
        self._pending.append(box)

    def _take_back(self, box: Box | None, compute: bool = False) -> None:
        """Keep what was let go, if somebody holds it in any case."""
        if box is None or box.recipe is None or not box.is_current():
            return
        if compute or box.alias() is not None:
            self.let_go[box.recipe.operation.name] -= box.nbytes
            self.kept += box.nbytes
            unpack(Packed(box, box.shape))

    def _open_dependents(self, tensor: Tensor) -> None:
        """Compute what would be computed from a tensor that is about to be changed in place."""
        if base_of(tensor).is_leaf:
            self.touch(tensor, True)
        box = self._box_of(tensor.untyped_storage()) if _large(tensor) else None
        if box is not None and box.is_current():
            for gone in [reference() for reference in self._gone]:
                if gone is not None and box in gone.reads:
                    self._take_back(gone, True)

    def _settle(self) -> None:
        """Count what was let go and is released by now."""
        self._credit += sum(box.nbytes for box in self._pending if box.storage() is None)
        self._pending = [box for box in self._pending if box.storage() is not None]

    def _changed(self, tensor: Tensor, followed: bool) -> None:
        """Note a change in place, and whether it made a new node."""
        box = self._box_of(tensor.untyped_storage()) if _large(tensor) else None
        if box is not None and box.version != tensor._version:
            box.overwritten = True
        base = base_of(tensor)
        if base.is_leaf:
            self._parameters_stay &= not base.requires_grad
        elif not followed:
            self.touch(base)
        elif base is tensor:
            node: Any = tensor.grad_fn
            node.metadata[VERSION] = tensor._version


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _note_number(tape: LeanTape, node: Any, args: Any, kwargs: Any) -> None:
    other = _argument(args, kwargs, 1, "other", None)
    is_other = len(args) + ("other" in kwargs) == 2  # not so in the deprecated add(x, alpha, other)
    if is_other and isinstance(other, (int, float)):
        node.metadata[KNOWN] = {"other": other}


def _note_of(**arguments: tuple[int, Any]) -> Callable[..., None]:
    """Note arguments that the node does not keep, by their positions and defaults."""

    def note(tape: LeanTape, node: Any, args: Any, kwargs: Any) -> None:
        known = {at: _argument(args, kwargs, i, at, usual) for at, (i, usual) in arguments.items()}
        bias = known.get("bias")
        if bias is None and node.name() == "ViewBackward0":  # an instance normalisation
            node = node.next_functions[0][0]
        if node is not None and "Norm" in node.name():  # elsewhere it is made of other operations
            if bias is not None:
                known["bias"] = Versioned(bias, bias._version)
            node.metadata[KNOWN] = known

    return note


def _note_noise_of(*argument: Any) -> Callable[..., None]:
    """Note the noise of a dropout, or of the dropped weights that attention multiplies by values.
    Attention with a kernel of its own has another node, and so have the dropouts of a GPU."""

    def note(tape: LeanTape, node: Any, args: Any, kwargs: Any) -> None:
        while node is not None and node.name() in _TO_NOISE:
            node = node.next_functions[node.name() == "AddmmBackward0"][0]  # 0 is the bias
        if node is not None and node.name() == "MulBackward0":
            tape.note_noise(node, _argument(args, kwargs, *argument))

    return note


def _large(tensor: Tensor) -> int:
    """Return the bytes of a storage, or 0 if it is small or the tensor is more than a storage."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    if tensor.is_nested or is_wrapped(tensor):
        return 0
    size = tensor.untyped_storage().nbytes()
    if size < LEAST_BYTES or tensor.is_neg() or tensor.is_conj():
        return 0
    # Complex numbers have other bits where they are multiplied or divided in place.
    kept = tensor._is_zerotensor() or tensor.is_quantized or tensor.is_complex()
    return 0 if kept else size


def _noise(mask: Tensor, scale: Tensor, shape: torch.Size) -> Tensor:
    from retrograde.kernels.cpu.masks import unpack_into

    return unpack_into(mask, scale.new_empty(shape)).mul_(scale)


_NOISE = Operation("Dropout", _noise, 1)
_NOISES = set[tuple[float, torch.dtype]]()  # whose noise was seen to have two values
#: From the result of attention to its dropped weights.
_TO_NOISE = {
    f"{name}Backward0" for name in (
        "ToCopy", "UnsafeView", "View", "Bmm", "Mm", "Addmm", "Expand", "Permute", "Transpose",
        "Clone",
    )
} | {"SqueezeBackward1"}  # fmt: skip
_CHANGING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")} | {"__setitem__"}
# What shares memory unseen; ``.data`` has versions of its own too.
_SHARING = {torch.detach: "detach", Tensor.detach: "detach"}
_SHARING |= dict.fromkeys((Tensor.data.__get__, Tensor.data.__set__), "data")  # type: ignore[attr-defined]
# What is noted of a function's node.
_NOTES: dict[Any, Callable[..., None]] = {
    functional.batch_norm: _note_of(bias=(4, None)),
    torch.batch_norm: _note_of(bias=(2, None)),
    functional.scaled_dot_product_attention: _note_noise_of(4, "dropout_p", 0.0),
    functional.multi_head_attention_forward: _note_noise_of(10, "dropout_p", 0.0),
}
for _place in (functional, torch):
    _NOTES[_place.layer_norm] = _note_of(eps=(4, 1e-5))
    _NOTES[_place.group_norm] = _note_of(bias=(3, None), eps=(4, 1e-5))
    _NOTES[_place.instance_norm] = _note_of(bias=(4 if _place is functional else 2, None))
    _NOTES[_place.dropout] = _note_noise_of(1, "p", 0.5)
for _name in ("add", "sub", "subtract", "rsub"):
    _NOTES[getattr(torch, _name)] = _note_number
_BY_SIGN = ("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__")
for _name in ("add", "sub", "subtract", "add_", "sub_", *_BY_SIGN):
    _NOTES[getattr(Tensor, _name)] = _note_number


# Of functions that were called: whether they change their first argument in place, whether their
# results share memory unseen, and what is noted.
_RULES: dict[Any, tuple[bool, str, Callable[..., None] | None] | None] = {}
# What neither saves nor changes anything.
_PLAIN = {"__get__", "size", "stride", "dim", "view", "reshape", "flatten", "unflatten", "permute"}
_PLAIN |= {"transpose", "squeeze", "unsqueeze", "expand", "split", "chunk", "contiguous"}


def _rule_of(func: Any) -> Any:
    name = getattr(func, "__name__", "")
    if name in _PLAIN and func not in _SHARING:
        return _RULES.setdefault(func, None)
    changes = (name[-1:] == "_" and name[-2:] != "__") or name in _CHANGING  # add_, not __add__
    rule = _RULES[func] = changes, _SHARING.get(func, ""), _NOTES.get(func)
    return rule
