"""What a program holds besides some of its calls."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_next_number = torch._C._autograd._get_sequence_nr  # of a node in the graph


@dataclass
class _Memory:
    """Memory that was made, and from which to which of the calls something but them held it."""

    storage: StorageWeakRef  # so that no other memory gets the same key
    nbytes: int
    since: float = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    tensors: dict[int, ref[Tensor]] = field(default_factory=dict)

    def close(self, now: int, then: float) -> None:
        """Note that nothing but calls holds it from the call ``now`` to the call ``then``."""
        if self.since < now:
            self.spans.append((int(self.since), now))
        self.since = max(self.since, then)


class Elsewhere(TorchFunctionMode):
    """Notes what is saved for a backward pass, and what is there whenever one of the calls begins.
    While such a call goes back, the gradients of what was made before it and used after it wait."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[ref[Tensor]] = []
        self._memory: dict[int, _Memory] = {}  # made by the program or given back by its calls
        self._inputs: dict[int, _Memory] = {}  # of calls that do not count theirs
        self._begins, self._ends = list[int](), list[int]()  # of calls: numbers of graph nodes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if len(self._begins) == len(self._ends):
            self._note(result)
        return result

    def pack(self, t: Tensor) -> Tensor:
        """Save a tensor, as a hook for saved tensors."""
        self.hold(t := t.detach())  # as an output of its own node it would keep that node alive
        return t

    def hold(self, tensors: Any) -> None:
        """Note tensors that are held until the backward pass."""
        self._saved += map(ref, _tensors(tensors))

    def begin(self, given: Any, *, counts: bool) -> None:
        """Note that a call begins. It holds what it is given, and may count that as its own."""
        now = len(self._begins)
        for t in _tensors(given):
            if (one := self._memory.get(_key(t))) is not None:
                if not counts and one.since < math.inf:
                    self._inputs[_key(t)] = one  # a run without gradients will not hold it
                one.close(now, math.inf)
        self._begins.append(_next_number())

    def end(self, result: Any) -> None:
        """Note the end of a call. What it returns is its own from now on."""
        self._ends.append(_next_number())
        for one in self._note(result):
            one.close(len(self._ends), math.inf)

    def held_bytes(self, apart: Any, results: Any) -> int:
        """Return the most bytes that were held, but for memory of ``apart`` and of ``results``."""
        known = {_key(t) for t in _tensors((apart, results))}
        alive = (t.untyped_storage() for one in self._saved if (t := one()) is not None)
        saved = {storage._cdata: storage.nbytes() for storage in alive}
        saved |= {key: one.nbytes for key, one in self._inputs.items()}
        either = known | saved.keys()
        rest = [one for key, one in [*self._memory.items()] if key not in either]
        stays = sum(one.nbytes for one in rest if one.tensors and one.since < math.inf)
        for one in rest:
            if one.tensors:
                one.close(len(self._begins), math.inf)
        forward = _most((one.nbytes, *span) for one in rest for span in one.spans)
        there = [t() for one in [*self._memory.values()] for t in one.tensors.values()]
        backward = _most(self._waiting(there, results))
        return sum(saved[key] for key in saved.keys() - known) + max(forward, stays + backward)

    def _note(self, result: Any) -> list[_Memory]:
        """Return the memory of tensors that are there from now on."""
        found = []
        for t in _tensors(result):
            key, now = _key(t), len(self._begins)
            if (one := self._memory.get(key)) is None:
                storage = t.untyped_storage()
                one = self._memory[key] = _Memory(StorageWeakRef(storage), storage.nbytes())
            if not one.tensors:
                one.since = max(one.since, now)
            one.tensors[id(t)] = ref(t, self._forgets(key, one, id(t)))
            found.append(one)
        return found

    def _forgets(self, key: int, one: _Memory, tensor: int) -> Any:
        def forget(_: Any) -> None:
            one.tensors.pop(tensor, None)
            if not one.tensors:
                one.close(len(self._begins), 0)
                if not one.spans:
                    self._memory.pop(key, None)

        return forget

    def _waiting(self, *roots: Any) -> Iterable[tuple[int, int, int]]:
        """Yield the gradients of what was not made by calls: bytes, and the calls while which they
        wait. Backward, the nodes of the graph run in the opposite order of their numbers."""
        pending: list[Any] = [t.grad_fn for t in _tensors(roots) if t.grad_fn is not None]
        visited, last = set[Any](), dict[tuple[int, int], tuple[int, int]]()
        while pending:
            if (node := pending.pop()) in visited:
                continue
            visited.add(node)
            for inner, nr in node.next_functions:
                if inner is None:
                    continue
                pending.append(inner)
                key, like = (inner._sequence_nr(), nr), inner._input_metadata[nr]
                nested = like.is_cpp_nested_tensor  # which has no shape
                nbytes = 0 if nested else math.prod(like.shape) * like.dtype.itemsize
                last[key] = max(last.get(key, (0, 0)), (node._sequence_nr(), nbytes))
        for (made, _), (used, nbytes) in last.items():
            first, stop = bisect_right(self._begins, made), bisect_right(self._ends, used)
            if first == 0 or made >= self._ends[first - 1]:
                yield nbytes, first, stop


def _most(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at one time, of some that are there from one time to another."""
    changes = Counter[int]()
    for nbytes, first, stop in spans:
        if first < stop:
            changes[first] += nbytes
            changes[stop] -= nbytes
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def _tensors(value: Any) -> Iterable[Tensor]:
    """Return tensors, but for sparse ones."""
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, Tensor) and t.layout is torch.strided]


def _key(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)
