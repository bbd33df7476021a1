"""Values that autograd saves, and how those that were let go are computed again.

What autograd saves of one storage has a *box*, which the saved tensors share. It holds the tensor,
or a *recipe*: the cheap operation that computed it, and what that read. Recipes are read from the
nodes of autograd's graph. They end at boxes, at parameters, and at numbers.
"""

import math
from dataclasses import dataclass
from functools import reduce
from random import Random
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from retrograde.errors import RetrogradeError
from retrograde.models.lean.cheap import (
    ATTRIBUTE,
    CHEAP,
    KEEP_RESULT,
    LIST,
    PROMOTING,
    RESULT,
    STATISTICS,
    Operation,
)
from retrograde.torch_private import (
    after_backward,
    backward_pass,
    below_autograd,
    has_function_mode,
    number_of,
    outputs_of,
    raw_saved,
    without_autocast,
    without_dispatch,
    without_functions,
)

#: What starting an operation costs, in bytes written.
START_BYTES = 64 * 1024
#: Operations that one value may take: recursion is no deeper.
MOST_OPERATIONS = 16
#: Keys in the metadata of a node: arguments that were noted of it, by name, and that its result
#: changed unseen. An integer is the key of the box of this output.
KNOWN, CHANGED = "retrograde known", "retrograde changed"
#: Words in a run that a glance reads, and from one run to the next. A run is prime, so rows of any
#: common width are read in all columns.
_RUN, _EVERY = 61, 8 * 61
_turn = Random(0).getrandbits  # so that the same value has other turns in other passes

_Shape = tuple[torch.Size, tuple[int, ...], Any]


def shape_of(tensor: Tensor) -> _Shape:
    """Return size, strides and offset."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


class _OverwrittenError(RetrogradeError, RuntimeError):
    """What autograd raises too."""


def overwritten(size: torch.Size, current: int, expected: int) -> Exception:
    return _OverwrittenError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of sizes {list(size)} is at version {current}; expected version "
        f"{expected} instead"
    )


def glance(tensor: Tensor, turn: int) -> Any:
    """Return the sum of an eighth of a storage's bits: of other runs of words at each turn. It
    allocates nothing on a CPU. On a GPU the sum is a tensor, for which nobody waits."""
    flat = tensor.as_strided((tensor.numel(),), (1,), 0)
    words: Any = flat.view(torch.int64 if tensor.nbytes % 8 == 0 else torch.uint8)
    words = words.numpy() if tensor.is_cpu else words
    runs, rest = divmod(len(words), _EVERY)
    if runs:
        start, run = (rest if turn >= 8 else 0), turn % 8 * _RUN  # the last words in late turns
        words = words[start : start + runs * _EVERY].reshape(runs, _EVERY)[:, run : run + _RUN]
    return 0 if tensor.is_meta else words.sum()


class Versioned(NamedTuple):
    """A tensor that is read as it is, at its version."""

    tensor: Tensor
    version: int

    def open(self) -> Tensor:
        """Return the tensor; raise what autograd raises if it was overwritten since."""
        if self.tensor._version != self.version:
            raise overwritten(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


class Packed(NamedTuple):
    """A saved tensor: what a box holds, or a view of it. The shape is then not the box's own."""

    box: "Box"
    shape: _Shape

    def open(self) -> Tensor:
        """Return the tensor, computed again if it was let go."""
        data = self.box.open()
        return data if self.shape is self.box.shape else data.as_strided(*self.shape)


class Box:
    """What autograd saves of a storage: the tensor, or its recipe. ``reads`` are the boxes that the
    recipe reads, ``operations`` how many it calls with those of its boxes, ``peak`` the bytes that
    it takes. ``seen`` is a glance at what was let go."""

    __slots__ = (
        "__weakref__", "alias", "data", "dtype", "nbytes", "operations", "overwritten", "peak",
        "reads", "recipe", "seen", "shape", "storage", "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.alias, self.storage = ref(tensor), ref(storage)
        self.shape, self.dtype, self.version = shape_of(tensor), tensor.dtype, tensor._version
        self.nbytes = self.peak = storage.nbytes()
        self.data: Tensor | None = None
        self.recipe: Recipe | None = None
        self.reads: list[Box] = []
        self.operations, self.overwritten = 0, False

    def keep(self, tensor: Tensor) -> Tensor:
        """Hold a tensor. Its alias does not hold the node that would hold it."""
        self.data, self.version = tensor.detach(), tensor._version
        self.recipe, self.reads, self.operations = None, [], 0
        return self.data

    def is_current(self) -> bool:
        """Whether nothing was written to the storage since."""
        tensor = self.data if self.data is not None else self.alias()
        return not self.overwritten and (tensor is None or tensor._version == self.version)

    def open(self) -> Tensor:
        """Return the tensor, computed again if it was let go."""
        recipe = self.recipe
        if self.data is not None:
            return Versioned(self.data, self.version).open()
        tensor = self.alias()
        if tensor is not None:  # somebody holds it in any case
            return self.keep(Versioned(tensor, self.version).open())
        if self.overwritten:
            raise overwritten(self.shape[0], self.version + 1, self.version)
        assert recipe is not None
        result = recipe.open()
        if shape_of(result) != self.shape:
            whole = torch.empty_strided(*self.shape[:2], dtype=result.dtype, device=result.device)
            result = whole.copy_(result)
        self._compare(recipe.operation.name, result)
        return self.keep(result)

    def let_go(self, recipe: "Recipe", value: Tensor) -> None:
        turn = _turn(4)
        with without_dispatch(), below_autograd():
            self.recipe, self.seen, self.data = recipe, (turn, glance(value, turn)), None

    def _compare(self, name: str, result: Tensor) -> None:
        """Raise if a value that was computed again has other bits than the one that was let go."""
        (turn, expected), size = self.seen, [*self.shape[0]]
        found = glance(result, turn)

        def compare() -> None:
            if found != expected:
                raise RetrogradeError(_OTHER_BITS.format(name, size))

        if isinstance(found, Tensor) and backward_pass() >= 0:
            after_backward(compare)  # nobody waits
        else:
            compare()


_OTHER_BITS = (
    "the result of {}, of sizes {}, was let go and computed again, and its bits are not those of "
    "the forward pass: what it reads was changed, and autograd was not told (.data, a raw pointer, "
    "statistics). Expected it to stay as it was; change it after backward(), or compute this "
    "outside rg.lean() or the budget"
)


def unpack(packed: Packed | Versioned) -> Tensor:
    """Return what was saved, computed again if it was let go."""
    if has_function_mode():
        with without_functions():
            return unpack(packed)
    if type(packed) is Packed and (packed.box.data is None or packed.shape is not packed.box.shape):
        with without_dispatch(), below_autograd(), without_autocast():
            return packed.open()
    return Versioned(*packed).open() if type(packed) is tuple else packed.open()


@dataclass(slots=True)
class Recipe:
    """An operation that is called again, with its arguments."""

    operation: Operation
    args: list[Any]
    keywords: dict[str, Any]
    nr: int  # which of its results
    nbytes: int  # zero of a view
    kind: torch.dtype | None = None  # the result's; None if that has no dimensions
    over: bool = False  # whether the result takes the place of the first argument

    def open(self) -> Tensor:
        call: Any = self.operation.over if self.over else self.operation.call
        result = call(*map(_opened, self.args), **self.keywords)
        tensor: Tensor = result if isinstance(result, Tensor) else result[self.nr]
        return tensor

    def peak(self) -> tuple[int, int]:
        """Return the bytes that computing takes at most, and those that stay, the result's too."""
        held = most = 0
        for arg in self.args[0] if type(self.args[0]) is list else self.args:
            peak = stays = 0
            if type(arg) is Recipe:
                peak, stays = arg.peak()
            elif type(arg) is Packed and arg.box.data is None:
                peak, stays = arg.box.peak, arg.box.nbytes
            most, held = max(most, held + peak), held + stays
        return max(most, held + (0 if self.over else self.nbytes)), self.nbytes or held


def _opened(arg: Any) -> Any:
    if type(arg) is list:
        return [_opened(element) for element in arg]
    return arg.open() if type(arg) in (Recipe, Versioned, Packed) else arg


_UNKNOWN = object()


class Search:
    """Finds how a value is computed, by how many operations. Their ``cost`` is the bytes that they
    write, each as often as its operation has passes."""

    def __init__(self, parameters_stay: bool, first_node: int) -> None:
        self.own: list[Box] = []  # those that the operations' nodes save: they live in any case
        self.apart: list[Box] = []  # others that are read
        self.operations, self.cost = 0, 0.0
        self._parameters_stay, self._first = parameters_stay, first_node

    def step(self, node: Any, nr: int, nbytes: int = 0, copied: bool = True) -> Recipe | None:
        """Return how an output of a node, of so many bytes if they are known, is computed, or None
        if it cannot be. ``copied``: its strides do not matter, as it is copied."""
        operation = CHEAP.get(node.name())
        if operation is None:
            return None
        notes, edges = node.metadata, node.next_functions
        if operation.check is not None:
            operation = operation.check(node, nr, edges)
        if operation is None or CHANGED in notes or number_of(node) < self._first:
            return None  # a node of before may have changed unseen
        if operation.name in ("Clone", "ToCopy") and not copied:
            return None  # its strides are not known
        result, known = outputs_of(node)[nr], notes.get(KNOWN, {})
        args: list[Any] = []
        keywords: dict[str, Any] = {}
        for kind, name, edge, keyword in operation.reads:
            if kind == LIST:
                arg: Any = [self._value(source, at, False) for source, at in edges]
                arg = _UNKNOWN if _UNKNOWN in arg else arg
            elif kind == RESULT:
                arg = getattr(result, name)
            elif kind == ATTRIBUTE:
                arg = getattr(node, f"_saved_{name}", _UNKNOWN)
                arg = known.get(name, _UNKNOWN) if arg is _UNKNOWN else _signed(arg)
            else:
                saved = raw_saved(node, name)
                arg = self._saved(saved) if saved is not None else None
                source, at = edges[edge] if edge < len(edges) else (None, 0)
                if arg is None and source is not None:
                    arg = self._value(source, at, copied and operation.name == "UnsafeView")
                elif arg is None and (saved is None or operation.check is None):
                    arg = known.get(name, _UNKNOWN)
                if name in STATISTICS:
                    arg = _copied(arg)
            if arg is _UNKNOWN:
                return None
            if keyword:
                keywords[keyword] = arg
            else:
                args.append(arg)
        dtype = result.dtype if result.shape else None
        if not operation.passes:
            return Recipe(operation, args, keywords, nr, 0, dtype)
        if not _has_kind(operation.name, args, dtype):
            return None
        nbytes = nbytes or math.prod(result.shape) * result.dtype.itemsize
        self.operations += 1
        self.cost += operation.passes * nbytes + START_BYTES
        if self.operations > MOST_OPERATIONS:
            return None
        over = operation.over and type(args[0]) is Recipe and args[0].nbytes == nbytes
        return Recipe(operation, args, keywords, nr, nbytes, dtype, bool(over))

    def _saved(self, saved: Any) -> Any:
        """Return what a node saved, or None if it saved no such tensor."""
        data = saved.data
        if type(data) is Packed:
            return data if self._read(self.own, data.box) else _UNKNOWN
        if type(data) in (Tensor, nn.Parameter) and saved.unpack_hook is None:
            free = data.requires_grad and data.is_leaf  # saved without hooks
            data = Versioned(data if data.is_leaf else data.detach(), data._version if free else 0)
        if type(data) is not Versioned:
            return None if data is None else _UNKNOWN  # another hook's
        tensor, version = data
        stays = self._parameters_stay or not tensor.requires_grad
        return data if stays and tensor._version == version else _UNKNOWN

    def _value(self, node: Any, nr: int, copied: bool) -> Any:
        """Return the value at an edge."""
        if node is None:
            return _UNKNOWN
        at = node.metadata.get(nr)
        box = at() if at is not None else None
        boxes = self.own if node.name() in KEEP_RESULT else self.apart
        if box is not None and CHANGED not in node.metadata and self._read(boxes, box):
            return Packed(box, box.shape)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            return self.step(node, nr, 0, copied) or _UNKNOWN
        stays = self._parameters_stay and type(leaf) in (Tensor, nn.Parameter)
        return Versioned(leaf, leaf._version) if stays else _UNKNOWN

    def _read(self, boxes: list[Box], box: Box) -> bool:
        boxes.append(box)
        self.operations += box.operations
        return box.is_current()


def _kinds(arg: object) -> list[torch.dtype]:
    """Return the types of the tensors in an argument that have dimensions."""
    if type(arg) is list:
        return [dtype for element in arg for dtype in _kinds(element)]
    if type(arg) is Versioned:
        return [arg.tensor.dtype] if arg.tensor.dim() else []
    if type(arg) is Packed:
        return [arg.box.dtype] if arg.shape[0] else []
    return [arg.kind] if type(arg) is Recipe and arg.kind is not None else []


def _has_kind(name: str, args: list[Any], dtype: torch.dtype | None) -> bool:
    """Whether an operation makes a result of this type; in place it may have made another one."""
    if name == "ToCopy" or dtype is None:
        return True
    kinds = _kinds(args if name in PROMOTING else args[0])
    return not kinds or reduce(torch.promote_types, kinds) is dtype


def _copied(arg: Any) -> Any:
    """Return statistics as they are now: a kernel changes them without a new version."""
    is_there = type(arg) is Versioned or (type(arg) is Packed and arg.box.data is not None)
    return Versioned(arg.open().clone(), 0) if is_there else arg


def _signed(value: object) -> Any:
    """Return an attribute whose negative numbers torch shows as unsigned."""
    if isinstance(value, tuple):
        return tuple(map(_signed, value))
    return value - 2**64 if type(value) is int and value >= 2**63 else value
