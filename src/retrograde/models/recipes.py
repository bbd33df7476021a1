"""Values that autograd saves, and how those that were let go are computed again.

What autograd saves of one storage has a *box*, which the saved tensors share. It holds the tensor,
or the *recipe*: the operation that computed it, with what that read. A recipe is read from the
nodes of autograd's graph. It ends at boxes, at parameters, and at numbers.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from retrograde.models.cheap import (
    ATTRIBUTE,
    CHEAP,
    KEEP_RESULT,
    RESULT,
    SAVED,
    VALUE,
    VALUES,
    Operation,
)

__all__ = ["CHANGED", "MOST_OPERATIONS", "NOTED", "Box", "Held", "Packed", "Recipe", "Search", "Step"]

#: What starting an operation costs, in bytes written.
START_BYTES = 64 * 1024
#: Operations that one value may take: recursion is no deeper.
MOST_OPERATIONS = 16
#: Keys in the metadata of a node: what was noted of it, and that its result changed unseen. An
#: integer is the key of the box of this output.
NOTED, CHANGED = "retrograde noted", "retrograde changed"

Shape = tuple[torch.Size, tuple[int, ...], int]


def shape_of(tensor: Tensor) -> Shape:
    """Return size, strides and offset."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


no_function = torch._C.DisableTorchFunction


class Held(NamedTuple):
    """A tensor that is read as it is, at its version."""

    tensor: Tensor
    version: int

    def open(self) -> Tensor:
        """Return the tensor, unless it was overwritten."""
        return unchanged(self.tensor, self.version)


class Packed(NamedTuple):
    """A saved tensor: what a box holds, or a view of it. The shape is then not the box's own."""

    box: "Box"
    shape: Shape

    def open(self) -> Tensor:
        """Return the tensor, computed again if it was let go."""
        data = self.box.open()
        return data if self.shape is self.box.shape else data.as_strided(*self.shape)


class Box:
    """What autograd saves of a storage: the tensor, or its recipe."""

    __slots__ = ("__weakref__", "alias", "data", "dtype", "nbytes", "overwritten", "recipe", "shape", "storage", "version")  # fmt: skip

    def __init__(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.alias, self.storage = ref(tensor), ref(storage)
        self.shape, self.dtype, self.version = shape_of(tensor), tensor.dtype, tensor._version
        self.nbytes = storage.nbytes()
        self.data: Tensor | None = None
        self.recipe: Recipe | None = None
        self.overwritten = False

    def keep(self, tensor: Tensor) -> None:
        """Hold the tensor. The alias does not hold the node that would hold it."""
        self.data, self.recipe = tensor.detach(), None

    def is_current(self) -> bool:
        """Whether nothing was written to the storage since."""
        tensor = self.data if self.data is not None else self.alias()
        return not self.overwritten and (tensor is None or tensor._version == self.version)

    def open(self) -> Tensor:
        """Return the tensor, computed again if it was let go.

        Raises:
            RuntimeError: as ordinary autograd's, if the tensor was overwritten after it was saved.
        """
        recipe = self.recipe
        if self.data is not None:
            return unchanged(self.data, self.version)
        tensor = self.alias()
        if tensor is not None:  # somebody holds it in any case
            self.keep(unchanged(tensor, self.version))
        else:
            if self.overwritten:
                raise RuntimeError(_MODIFIED.format(list(self.shape[0]), self.version + 1, self.version))
            assert recipe is not None
            result = recipe.step.open()
            if shape_of(result) != self.shape:
                size, stride, _ = self.shape
                whole = torch.empty_strided(size, stride, dtype=result.dtype, device=result.device)
                result = whole.copy_(result)
            self.data, self.version = result, result._version
        self.recipe = None
        assert self.data is not None
        return self.data


_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: a tensor of sizes {} is at version {}; expected version {} instead"
)


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor, unless it was overwritten after it was saved."""
    if tensor._version != version:
        raise RuntimeError(_MODIFIED.format(list(tensor.shape), tensor._version, version))
    return tensor


def unpack(packed: Packed | tuple[Tensor, int]) -> Tensor:
    """Return what was saved, computed again if it was let go."""
    if torch._C._is_torch_function_mode_enabled():
        with no_function():
            return unpack(packed)
    if type(packed) is tuple:
        return unchanged(*packed)
    box, shape = packed
    if box.data is not None and shape is box.shape:
        return unchanged(box.data, box.version)
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
    ):
        return packed.open()


@dataclass(slots=True)
class Step:
    """An operation that is called again, with its arguments.

    A view's ``nbytes`` is zero. ``over``: the result takes the place of the first argument.
    """

    operation: Operation
    args: list[Any]
    nbytes: int
    over: bool = False

    def open(self) -> Tensor:
        """Compute the value."""
        call = self.operation.over if self.over else self.operation.call
        assert call is not None
        return call(*[a.open() if type(a) in _OPENED else a for a in self.args])

    def peak(self) -> tuple[int, int]:
        """Return the bytes that computing takes at most, and those that stay, the result's too."""
        held = most = 0
        for arg in self.args:
            if type(arg) is Step:
                peak, stays = arg.peak()
            elif type(arg) is Packed and arg.box.data is None and arg.box.recipe is not None:
                peak, stays = arg.box.recipe.peak, arg.box.nbytes
            else:
                continue
            most, held = max(most, held + peak), held + stays
        return max(most, held + (0 if self.over else self.nbytes)), self.nbytes or held


_OPENED = {Step, Held, Packed}


class Recipe(NamedTuple):
    """How a value is computed, with the operations of what it reads and the bytes it takes."""

    step: Step
    reads: list[Box]
    operations: int
    peak: int


class Search:
    """Finds how a value is computed.

    Attributes:
        own: boxes that the nodes of the operations save themselves: they live as long in any case.
        apart: other boxes that are read.
        operations: how many operations are called.
        cost: the bytes that they write, each as often as its operation has passes.
    """

    __slots__ = ("_parameters_stay", "apart", "cost", "operations", "own")

    def __init__(self, parameters_stay: bool) -> None:
        self.own: list[Box] = []
        self.apart: list[Box] = []
        self.operations = 0
        self.cost = 0.0
        self._parameters_stay = parameters_stay

    def step(self, node: Node, nr: int, nbytes: int = 0, is_goal: bool = True) -> Step | None:
        """Return how an output of a node is computed, or None if it cannot be.

        ``nbytes`` is its size, if that is known.
        """
        operation = CHEAP.get(node.name())
        if operation is None or not (operation.layout or is_goal):
            return None
        notes, edges = node.metadata, node.next_functions
        if operation.check is not None:
            operation = operation.check(node, nr, edges)
        if operation is None or CHANGED in notes:
            return None
        args: list[Any] = []
        for kind, name, edge in operation.reads:
            if kind == ATTRIBUTE:
                arg = _signed(getattr(node, name))
            elif kind == RESULT:
                arg = nr if name == "nr" else getattr(node._input_metadata[nr], name)  # type: ignore[attr-defined]
            elif kind == VALUES:
                args += [self._value(*one, False) for one in edges]
                if None in args:
                    return None
                continue
            else:
                arg = self._saved(node, name) if name else None
                if arg is None and kind != SAVED:
                    source, at = edges[edge] if edge >= 0 else (None, 0)
                    if source is not None:
                        arg = self._value(source, at, is_goal and operation.copies)
                    if arg is None and (source is not None or kind == VALUE or NOTED not in notes):
                        return None
                    if source is None:
                        arg = notes[NOTED]
                elif arg is _UNKNOWN:
                    return None
            args.append(arg)
        if not operation.passes:
            nbytes = 0
        else:
            if not nbytes:
                result = node._input_metadata[nr]  # type: ignore[attr-defined]
                nbytes = math.prod(result.shape) * result.dtype.itemsize
            self.operations += 1
            self.cost += operation.passes * nbytes + START_BYTES
            if self.operations > MOST_OPERATIONS:
                return None
        first = args[0]
        over = operation.over is not None and type(first) is Step and first.nbytes == nbytes
        return Step(operation, args, nbytes, over)

    def _saved(self, node: Node, name: str) -> Any:
        """Return what a node saved, or None if it saved no such tensor."""
        saved = getattr(node, name)
        data = saved.data
        if data is None:
            return None
        if type(data) is Packed:
            return data if self._read(self.own, data.box) else _UNKNOWN
        if type(data) is tuple and saved.unpack_hook is unpack:
            tensor, version = data
        elif type(data) in (Tensor, nn.Parameter) and saved.unpack_hook is None:
            tensor = data if data.is_leaf else data.detach()  # saved without hooks
            version = data._version if data.requires_grad and data.is_leaf else 0
        else:
            return _UNKNOWN  # another hook's
        if tensor.requires_grad and not self._parameters_stay:
            return _UNKNOWN
        return Held(tensor, version) if tensor._version == version else _UNKNOWN

    def _value(self, node: Node | None, nr: int, is_copied: bool) -> Any:
        """Return the value at an edge, or None if it is unknown."""
        if node is None:
            return None
        at = node.metadata.get(nr)
        box = at() if at is not None else None
        if box is not None and CHANGED not in node.metadata:
            if self._read(self.own if node.name() in KEEP_RESULT else self.apart, box):
                return Packed(box, box.shape)
        leaf = getattr(node, "variable", None)
        if leaf is None:
            return self.step(node, nr, 0, is_copied)
        stays = self._parameters_stay and type(leaf) in (Tensor, nn.Parameter)
        return Held(leaf, leaf._version) if stays else None

    def _read(self, boxes: list[Box], box: Box) -> bool:
        if not box.is_current():
            return False
        boxes.append(box)
        if box.data is None and box.recipe is not None:
            self.operations += box.recipe.operations
        return True


_UNKNOWN = object()


def _signed(value: Any) -> Any:
    """Return an attribute whose negative numbers torch shows as unsigned."""
    if isinstance(value, tuple):
        return tuple(map(_signed, value))
    return value - 2**64 if type(value) is int and value >= 2**63 else value
