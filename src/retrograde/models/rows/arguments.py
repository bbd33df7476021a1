"""The arguments of a call and of its reruns, and the tensors in these and in results.

A rerun finds what the call found: the same objects, without the graph that they came from. One
tensor that was given twice is one tensor again. A tensor without a gradient, or a parameter, is the
very object. Another one is replaced by a stand-in, which has its class, its attributes, and a node
or none, as the tensor had.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retrograde.models.lean.recipes import overwritten
from retrograde.models.lean.tape import LEAST_BYTES
from retrograde.replay.fingerprints import Fingerprint, fingerprint, verify
from retrograde.replay.surroundings import version
from retrograde.sizes.cache import signature

_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), nn.Module)
_PLAIN += (torch.dtype, torch.device, torch.Size, Enum, type)


@dataclass(frozen=True)
class _Object:
    """An object of the caller's, such as a cache, taken apart: its class, the structure of its
    attributes, and those of them that are objects. One that was met before has its number only."""

    number: int
    kind: type | None = None
    spec: pytree.TreeSpec | None = None
    inner: "tuple[_Object | None, ...]" = ()


# The structure of arguments: None for tensors by position, the usual case. Some may be objects.
_Structure = pytree.TreeSpec | tuple[pytree.TreeSpec, tuple[_Object | None, ...]] | None


def _apart(leaf: Any, into: list[Any], met: dict[int, int]) -> _Object | None:
    """Append the values of a leaf to a list, and return its structure; None for a value. Raises
    TypeError for an object that cannot be made again from its attributes."""
    if isinstance(leaf, (Tensor, *_PLAIN)):
        into.append(leaf)
        return None
    if id(leaf) in met:
        return _Object(met[id(leaf)])
    leaf_class: Any = type(leaf)
    slots = any(vars(base).get("__slots__") for base in leaf_class.__mro__)
    if leaf_class.__new__ is not object.__new__ or slots or not hasattr(leaf, "__dict__"):
        raise TypeError(leaf_class.__name__)
    number = met[id(leaf)] = len(met)
    leaves, spec = pytree.tree_flatten(vars(leaf))
    try:
        return _Object(number, leaf_class, spec, tuple(_apart(each, into, met) for each in leaves))
    except TypeError as error:
        raise TypeError(f"{leaf_class.__name__} with a {error}") from None


def _together(structure: _Object | None, values: Iterator[Any], made: dict[int, Any]) -> Any:
    """Return a new object with the next of some values, or the next value."""
    if structure is None:
        return next(values)
    if structure.kind is not None:
        copy: Any = object.__new__(structure.kind)
        made[structure.number] = copy
        assert structure.spec is not None
        leaves = [_together(each, values, made) for each in structure.inner]
        vars(copy).update(pytree.tree_unflatten(leaves, structure.spec))
    return made[structure.number]


class Arguments:
    """The arguments of a call, with copies of the caller's lists and dicts.

    ``slot`` is the position or name of the state among them. ``leaves`` are their values. An object
    of the caller's, such as a cache, has those that its attributes had before the call. A rerun is
    given a copy of it with these, so it finds what the call found, and changes no one's.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, slot: int | str = 0
    ) -> None:
        self.slot = slot
        self.spec: _Structure = None
        self.leaves: list[Any] = [*args]
        if kwargs or not all(isinstance(leaf, Tensor) for leaf in args):
            self.leaves, self.spec = pytree.tree_flatten((args, kwargs or {}))
        self.args, self.kwargs = unflatten(self.leaves, self.spec)
        self.given = self.leaves, self.spec  # with objects as they are
        self.uncopied: str | None = None
        if self.spec is not None and not all(isinstance(v, (Tensor, *_PLAIN)) for v in self.leaves):
            values, met = list[Any](), dict[int, int]()
            try:
                objects = tuple(_apart(leaf, values, met) for leaf in self.leaves)
                self.leaves, self.spec = values, (self.spec, objects)
            except TypeError as error:
                self.uncopied = str(error)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def state(self) -> Any:
        """The state, or None if there is no such argument."""
        if isinstance(self.slot, int):
            return self.args[self.slot] if self.slot < len(self.args) else None
        return self.kwargs.get(self.slot)

    def kind(self) -> Hashable:
        """Return their key: the structure, the tensors' signatures, and the other values."""
        signatures = (signature(v) if isinstance(v, Tensor) else (type(v), v) for v in self.leaves)
        return str(self.spec), tuple(signatures)

    def refusal(self) -> str | None:
        """Return the reason why a layer cannot be recomputed with these arguments, or None."""
        if self.uncopied is None:
            return None
        return (
            f"is given a {self.uncopied}, which it may change, and of which no copy can be made: "
            "expected tensors, numbers, and objects whose attributes are such"
        )


class _Spikes:
    """A tensor of zeros and ones, as spiking layers make them, held as bits."""

    def __init__(self, t: Tensor, bits: Tensor) -> None:
        self.bits, self.like = bits, (t.shape, t.dtype)

    def open(self) -> Tensor:
        from retrograde.kernels.cpu.masks import unpack_into

        shape, dtype = self.like
        return unpack_into(self.bits, torch.empty(shape, dtype=dtype, device="cpu"))


def packed(t: Any) -> Any:
    """Return a tensor of zeros and ones as bits, and anything else as it is."""
    if type(t) is not Tensor or not (t.is_cpu and t.is_floating_point() and t.is_contiguous()):
        return t
    if t.nbytes < LEAST_BYTES or t._is_zerotensor() or t.is_neg():
        return t
    from retrograde.kernels.cpu.masks import packed_spikes

    bits = packed_spikes(t)
    return t if bits is None else _Spikes(t, bits)


class RerunArgument:
    """An argument. Where the row has the tensor, there is no value, but its ``place`` in the result
    of the call before, and its fingerprint."""

    def __init__(self, leaf: Any) -> None:
        self.value, self.source, self.attributes = leaf, None, dict[str, Any]()
        self.wants = self.has_node = False
        self.version = self.place = self.turn = 0
        self.print: Fingerprint = None
        if isinstance(leaf, Tensor):
            self.wants = leaf.requires_grad and not isinstance(leaf, nn.Parameter)
            self.value = leaf.detach() if self.wants else leaf
            self.source, self.attributes = ref(leaf), {**vars(leaf)}
            self.has_node, self.version = leaf.grad_fn is not None, version(leaf)

    def is_hidden(self) -> bool:
        return self.source is not None and self.value is None

    def hide(self, place: int, turn: int) -> None:
        """Let go the tensor, which is in this place of the result of the call before."""
        self.print, self.turn = fingerprint(self.value, turn), turn
        self.value, self.place = None, place

    def pack(self, made: Sequence[Tensor | None]) -> int:
        """Hold what the call before made as bits, if that is possible. Return the bytes of them."""
        if self.source is None or all(self.source() is not t for t in made):
            return 0
        self.value = packed(self.value)
        return self.value.bits.nbytes if isinstance(self.value, _Spikes) else 0

    def is_overwritten(self) -> bool:
        return isinstance(self.value, Tensor) and version(self.value) != self.version

    def find(self, state: Sequence[Tensor | None], differs: Callable[[], Exception]) -> Any:
        """Return the value, perhaps from the state that the row has computed again. ``differs``
        makes the error for a tensor there that is not the one that the call was given."""
        if self.is_overwritten():
            raise overwritten(self.value.shape, version(self.value), self.version)
        if not self.is_hidden():
            return self.value.open() if isinstance(self.value, _Spikes) else self.value
        tensor: Any = state[self.place]
        tensor = tensor.open() if isinstance(tensor, _Spikes) else tensor
        assert tensor is not None
        verify(self.print, tensor, differs, self.turn)
        return tensor


class RerunArguments:
    """The arguments of one call: ``each`` of them, and which are one tensor."""

    def __init__(self, arguments: Arguments) -> None:
        self.each, self.spec = [RerunArgument(leaf) for leaf in arguments.leaves], arguments.spec
        positions: dict[int, int] = {}
        ids = [id(x) if isinstance(x, Tensor) else -n for n, x in enumerate(arguments.leaves, 1)]
        self.same = [positions.setdefault(at, n) for n, at in enumerate(ids)]

    def enter(self, values: Sequence[Any]) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments and keyword arguments with some values, for another run, and those
        tensors that want a gradient."""
        leaves = [*values]
        wanted = [n for n, argument in enumerate(self.each) if argument.wants and self.same[n] == n]
        with torch.enable_grad():
            inner = [n for n in wanted if self.each[n].has_node]
            for n, t in zip(inner, with_nodes([values[n] for n in inner]), strict=True):
                leaves[n] = t
            for n in wanted:
                if not self.each[n].has_node:
                    leaves[n] = values[n].detach().requires_grad_()
        for n, argument in enumerate(self.each):
            if argument.attributes and leaves[n] is not argument.value:
                vars(leaves[n]).update(argument.attributes)
        leaves = [leaves[n] for n in self.same]
        args, kwargs = unflatten(leaves, self.spec)
        return args, kwargs, [leaves[n] for n in wanted]


def with_nodes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors that require a gradient, as a layer before would have returned them."""
    if not tensors:
        return ()
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    return tuple(_Enter.apply(anchor, *(t.detach() for t in tensors)))  # type: ignore[no-untyped-call]


def alone(t: Tensor) -> Tensor:
    """Return a tensor without the graph that it came from; it requires a gradient if it did."""
    with torch.enable_grad():
        return with_nodes([t])[0] if t.requires_grad else t.detach()


class _Enter(torch.autograd.Function):
    """Tensors in the form that a preceding layer would have returned. Autograd would hold a leaf as
    long as the graph, even one that no layer refers to."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in state)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> None:
        raise AssertionError("gradients are taken before they get here")


def tied(weights: Iterable[Iterable[Tensor]]) -> frozenset[Tensor]:
    """Return the weights that several calls have, given those of each."""
    users = Counter(p for call_weights in weights for p in call_weights)
    return frozenset(p for p, count in users.items() if count > 1)


def unflatten(leaves: Sequence[Any], spec: _Structure) -> tuple[Any, Any]:
    """Return the arguments and keyword arguments that have some leaves."""
    if spec is None:
        return tuple(leaves), {}
    if isinstance(spec, tuple):
        values, made = iter(leaves), dict[int, Any]()
        spec, objects = spec
        leaves = [_together(structure, values, made) for structure in objects]
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a pytree."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


class ResultBytes(TorchDispatchMode):
    """Sums up the bytes of what torch's operations return in a block. It notes whether some sizes
    depend on data, as those of ``nonzero`` do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.varies = 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler at the first operation, for a second

    def __enter__(self) -> Any:
        self.nbytes = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.varies |= not _BY_DATA.isdisjoint(func.tags)
        if not any(returned.alias_info for returned in func._schema.returns):
            self.nbytes += sum(t.nbytes for t in tensors_in(result) if t.layout is torch.strided)
        return result


_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def memory_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of tensors' memory by its address."""
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}


def made_by(result: object, given: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the tensors of a result; None for one that lies in memory of what was given."""
    theirs = {t.untyped_storage().data_ptr() for t in given}
    return [t if t.untyped_storage().data_ptr() not in theirs else None for t in tensors_in(result)]
