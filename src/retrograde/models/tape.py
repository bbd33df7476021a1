"""The tape of one forward pass: which saved tensors are let go.

When autograd saves a tensor, the tape looks for the recipe of its storage. The rules:

1. The same function on the same strides: a value has the same bits when it is computed again.
2. What a recipe reads is held at no cost if the recipe's own nodes save it, since those are still
   to come when the value is read. What others saved may not be larger than what is let go.
3. What a recipe takes for a moment is covered: by the gradient that its reader is about to
   allocate, and by what values before it have let go. So the peak is never above ordinary's.
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
from torch.autograd.graph import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from retrograde.models.cheap import CHEAP, Operation
from retrograde.models.recipes import (
    CHANGED,
    NOTED,
    Box,
    Held,
    Packed,
    Recipe,
    Search,
    Step,
    no_function,
    shape_of,
    unpack,
)

__all__ = ["Tape"]

#: What a byte is worth, in bytes written by an operation of one pass.
WORTH = 5.0
#: Smaller values are kept: what the tape does for one takes as long as to write so many bytes.
LEAST_BYTES = 128 * 1024
#: In the metadata of a node: the version of its result, if autograd followed the changes in place.
VERSION = "retrograde version"

# Dispatch keys of tensors that are more than their storage, size and strides.
_STRANGE = 0
for _name in (
    *("Negative", "Conjugate", "ZeroTensor", "Python"),
    *("Quantized", "Sparse", "SparseCsr", "NestedTensor"),
):
    _STRANGE |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _name)).raw_repr()
_keys_of = torch._C._dispatch_keys
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_newest = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id


class Tape(TorchFunctionMode):
    """Saves for one forward pass, and notes what no node of the graph knows.

    Attributes:
        kept: bytes of what is saved and kept, parameters not counted.
        let_go: bytes of what is saved and let go, by operation.
    """

    def __init__(self, parameters_stay: bool = True) -> None:
        super().__init__()
        self.kept = 0
        self.let_go = Counter[str]()
        self._parameters_stay = parameters_stay
        self._boxes: dict[int, ref[Box]] = {}  # by the address of the storage
        self._gone: list[ref[Box]] = []
        self._pending: list[Box] = []  # let go, and perhaps not released yet
        self._is_changing = False  # a function runs that changes its first argument in place
        self._credit = 0  # bytes that were let go, and are released

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function, and note what it changes in place."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        first = kwargs.get("out", args[0] if args else kwargs.get("input"))
        if not isinstance(first, Tensor):
            result = func(*args, **kwargs)
            if "out" in kwargs or getattr(func, "__name__", "")[:2] == "_f":  # _foreach_add_
                for one in first if isinstance(first, (list, tuple)) else ():
                    self._changed(one, False)
            return result
        if first.is_inference():  # nothing of it is ever saved
            return func(*args, **kwargs)
        before, newest = first._version, _newest()
        name = getattr(func, "__name__", "")
        if name in _CHANGING or (name[-1:] == "_" and name[-2:] != "__") or kwargs.get("inplace"):
            self._save_dependents(first)
            self._is_changing = True
        quiet, note = _SPECIAL.get(func, _PLAIN)
        if quiet is not None and not before and quiet(args, kwargs) and self._is_top():
            _pop_hooks()
            try:
                result = func(*args, **kwargs)
            finally:
                _push_hooks(self.pack, unpack)
        else:
            result = func(*args, **kwargs)
        self._is_changing = False
        if first._version != before:
            self._changed(first, first.requires_grad and _newest() > newest)
        if note is not None:
            note(self, result, args, kwargs)
        return result

    def _is_top(self) -> bool:
        hooks = _top_hooks(True)
        return hooks is not None and hooks[0] == self.pack

    def pack(self, tensor: Tensor) -> Packed | tuple[Tensor, int]:
        """Save a tensor, or what it can be computed from."""
        if torch._C._is_torch_function_mode_enabled():
            with no_function():
                return self.pack(tensor)
        version = tensor._version
        if tensor.requires_grad and tensor.is_leaf:
            return tensor, version
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            self.kept += storage.nbytes()
            return tensor.detach(), version
        kind = type(tensor)
        plain = (kind is Tensor or kind is nn.Parameter) and not (
            _keys_of(tensor).raw_repr() & _STRANGE
        )
        base = tensor if tensor._base is None else tensor._base
        if not plain or base.dtype is not tensor.dtype or _graph_task() >= 0:
            return tensor.detach(), version
        box = self._box_of(storage)
        if box is not None:
            if box.dtype is not tensor.dtype:
                return tensor.detach(), version
            if box.version == version:
                shape = shape_of(tensor)
                return Packed(box, box.shape if shape == box.shape else shape)
            box.overwritten = True
        box = Box(base, storage)
        self._boxes[storage._cdata] = ref(box)
        node = base.grad_fn
        if node is None or not self._let_go(box, node, base, tensor.requires_grad):
            box.keep(base)
            self.kept += box.nbytes
        if node is not None:
            node.metadata[base.output_nr] = ref(box)
        return Packed(box, box.shape if base is tensor else shape_of(tensor))

    def note_noise(self, node: Node, p: float) -> None:
        """Let go the noise of a dropout, zeros and one other number: a mask of bytes is enough."""
        packed = node._raw_saved_other.data  # type: ignore[attr-defined]
        box = packed.box if type(packed) is Packed else None
        noise = box.data if box is not None else None
        if box is None or noise is None or not 0 < p < 1:
            return
        self._settle()
        if not noise.is_floating_point() or noise.itemsize < 2 or noise.numel() > self._credit:
            return
        with torch.no_grad():
            one = torch.ones((), dtype=noise.dtype, device=noise.device).div_(1 - p)
            mask = noise.bool().view(torch.uint8)  # numbers are converted faster than truth
            if (p, noise.dtype) not in _NOISES:
                if not torch.equal(_noise(mask, one), noise):
                    return
                _NOISES.add((p, noise.dtype))
        at = Box(mask, mask.untyped_storage())
        at.keep(mask)
        step = Step(_NOISE, [Packed(at, at.shape), one], box.nbytes)
        self.kept -= box.nbytes - at.nbytes
        box.data = None
        self._release(box, Recipe(step, [at], 1, box.nbytes))

    def close(self) -> None:
        """End the pass. What the caller still holds is not computed a second time beside it."""
        with no_function():
            for one in self._gone:
                self._take_back(one())
        self._boxes, self._gone, self._pending = {}, [], []

    def _box_of(self, storage: torch.UntypedStorage) -> Box | None:
        at = self._boxes.get(storage._cdata)
        box = at() if at is not None else None
        return box if box is not None and box.storage() is storage else None

    def _let_go(self, box: Box, node: Node, base: Tensor, grad_is_to_come: bool) -> bool:
        """Keep the recipe of a value instead of it, if the rules allow that."""
        if base.numel() * base.itemsize != box.nbytes:
            return False
        if not self._is_followed(box.version, node) or (self._is_changing and not box.version):
            return False
        search = Search(self._parameters_stay)
        step = search.step(node, base.output_nr, box.nbytes)
        if step is None or search.cost > WORTH * box.nbytes:
            return False
        if sum(one.nbytes for one in set(search.apart).difference(search.own)) > box.nbytes:
            return False
        peak = max(step.peak()[0], box.nbytes)
        self._settle()
        if peak - box.nbytes * (2 if grad_is_to_come else 1) > self._credit:
            return False
        self._release(box, Recipe(step, search.own + search.apart, search.operations, peak))
        return True

    def _is_followed(self, version: int, node: Node) -> bool:
        """Whether each change in place of a tensor is in the graph."""
        if not version or node.metadata.get(VERSION) == version:
            return True
        saved = getattr(node, "_raw_saved_result", None)
        if saved is None or saved.data is not None:
            return False
        old = node.next_functions[0][0]  # this is a change in place that is saving its own result
        return version == 1 or (old is not None and old.metadata.get(VERSION) == version - 1)

    def _release(self, box: Box, recipe: Recipe) -> None:
        box.recipe = recipe
        self.let_go[recipe.step.operation.name] += box.nbytes
        self._gone.append(ref(box))
        self._pending.append(box)

    def _take_back(self, box: Box | None) -> None:
        """Keep what was let go, if somebody holds it in any case."""
        if box is None or box.data is not None or box.recipe is None or not box.is_current():
            return
        tensor = box.alias()
        if tensor is not None:
            self.let_go[box.recipe.step.operation.name] -= box.nbytes
            self.kept += box.nbytes
            box.keep(tensor)

    def _settle(self) -> None:
        """Count what was let go and is released by now."""
        still = []
        for box in self._pending:
            if box.storage() is None:
                self._credit += box.nbytes
            else:
                still.append(box)
        self._pending = still

    def _save_dependents(self, tensor: Tensor) -> None:
        """Compute what would be computed from a tensor that is about to be changed in place."""
        box = self._box_of(tensor.untyped_storage())
        for other in [one() for one in self._gone] if box and box.is_current() else ():
            recipe = other.recipe if other is not None else None
            if other is not None and recipe is not None and box in recipe.reads:
                self.let_go[recipe.step.operation.name] -= other.nbytes
                unpack(Packed(other, other.shape))
                self.kept += other.nbytes

    def _changed(self, tensor: Tensor, followed: bool) -> None:
        """Note a change in place, and whether it made a new node."""
        box = self._box_of(tensor.untyped_storage())
        if box is not None and box.version != tensor._version:
            box.overwritten = True
        if followed and tensor.grad_fn is not None:
            tensor.grad_fn.metadata[VERSION] = tensor._version
        elif tensor.requires_grad and tensor.is_leaf:
            self._parameters_stay = False
        else:
            self._touched(tensor)

    def _touched(self, tensor: Tensor) -> None:
        """Note that a value may change, or may live on, without autograd's knowledge."""
        base = tensor if tensor._base is None else tensor._base
        for one in (tensor, base):
            if one.grad_fn is not None:
                one.grad_fn.metadata[CHANGED] = True
        self._take_back(self._box_of(base.untyped_storage()))


def _note_other(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
    """Note the number that is added or subtracted."""
    for one in (*args[:2], kwargs.get("other")):
        if isinstance(one, (int, float)) and result.grad_fn is not None:
            result.grad_fn.metadata[NOTED] = one


def _note_eps(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
    if result.grad_fn is not None:
        result.grad_fn.metadata[NOTED] = args[4] if len(args) > 4 else kwargs.get("eps", 1e-5)


def _note_bias(position: int) -> Callable[..., None]:
    def note(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
        bias = args[position] if len(args) > position else kwargs.get("bias")
        if result.grad_fn is not None and (bias is None or not bias.requires_grad):
            held = None if bias is None else Held(bias, bias._version)
            result.grad_fn.metadata[NOTED] = held

    return note


def _note_dropout(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
    """Let go the noise of a dropout on a CPU: zeros and one other number."""
    node, p = result.grad_fn, args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if node is not None and node.name() == "MulBackward0":
        tape.note_noise(node, p)


def _note_attention(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
    node, p = result.grad_fn, args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    for _ in range(8 if p else 0):  # attention without a kernel of its own
        if node is None or node.name() == "MulBackward0":
            break
        node = node.next_functions[0][0]
    if p and node is not None and node.name() == "MulBackward0":
        tape.note_noise(node, p)


def _note_touched(tape: Tape, result: Any, args: Any, kwargs: Any) -> None:
    if args[0].grad_fn is not None:
        tape._touched(args[0])


def _noise(mask: Tensor, one: Tensor) -> Tensor:
    return mask.to(one.dtype).mul_(one)


def _is_kept(args: Any, kwargs: Any) -> bool:
    """Whether a normalisation saves nothing that could be let go: an input that is kept."""
    first = args[0] if args else kwargs["input"]
    node = first.grad_fn if first._base is None else None
    return node is not None and node.name() not in CHEAP


def _is_kept_in_training(args: Any, kwargs: Any) -> bool:
    training = args[5] if len(args) > 5 else kwargs.get("training")
    return training is True and _is_kept(args, kwargs)


_NOISE = Operation("Dropout", _noise, 1, ())
_NOISES = set[tuple[float, torch.dtype]]()  # whose noise was seen to have two values
_CHANGING = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "matmul")}
_CHANGING |= {"__setitem__"}
_PLAIN = None, None
# Whether a function saves nothing that could be let go, and what is noted after it.
_SPECIAL: dict[Any, tuple[Callable[..., bool] | None, Callable[..., None] | None]] = {
    **dict.fromkeys((functional.layer_norm, torch.layer_norm), (_is_kept, _note_eps)),
    **dict.fromkeys((functional.group_norm, torch.group_norm), (_is_kept, _note_bias(3))),
    functional.batch_norm: (_is_kept_in_training, _note_bias(4)),
    torch.batch_norm: (_is_kept_in_training, _note_bias(2)),
    **dict.fromkeys((functional.dropout, torch.dropout), (None, _note_dropout)),
    functional.scaled_dot_product_attention: (None, _note_attention),
    **dict.fromkeys((Tensor.detach, torch.detach, Tensor.data.__get__), (None, _note_touched)),
}
for _place in (torch, Tensor):
    for _name in ("add", "sub", "subtract", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"):
        if hasattr(_place, _name):
            _SPECIAL[getattr(_place, _name)] = None, _note_other
for _name in ("add_", "sub_", "__iadd__", "__isub__"):
    _SPECIAL[getattr(Tensor, _name)] = None, _note_other
