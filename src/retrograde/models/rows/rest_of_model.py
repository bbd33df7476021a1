"""What a program holds besides some of its calls."""

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from retrograde.plan.calls import OutputLifetime
from retrograde.torch_private import address_of, is_wrapped, next_node, number_of, outputs_of


@dataclass
class _Memory:
    """Memory that was made, and from which to which of the calls something but them held it."""

    storage: StorageWeakRef  # so that no other memory gets the same key
    nbytes: int
    since: float = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    tensors: dict[int, ref[Tensor]] = field(default_factory=dict)
    taken: int = -1  # the last call that was given it
    left: float = math.inf  # calls that had begun when the program let it go

    def close(self, now: int, then: float) -> None:
        """Note that nothing but calls holds it from the call ``now`` to the call ``then``."""
        if self.since < now:
            self.spans.append((int(self.since), now))
        self.since = max(self.since, then)


class RestOfModel(TorchFunctionMode):
    """Notes what is saved for a backward pass, and what is there whenever one of the calls begins.
    While such a call goes back, gradients of skip connections around it stay allocated."""

    def __init__(self, fill: float | None = None) -> None:
        super().__init__()
        self.rows = list[Any]()  # those of all calls
        self.made_by_rows = list[ref[Tensor]]()
        self._saved: list[ref[Tensor]] = []
        self.filling = Filling(fill)  # what the program draws between the calls
        self._memory: dict[int, _Memory] = {}  # made by the program or given back by its calls
        self._inputs: dict[int, _Memory] = {}  # of calls that do not count theirs
        self._begins, self._ends = list[int](), list[int]()  # of calls: numbers of graph nodes
        self._results = list[list[tuple[_Memory, Any]]]()  # of calls: memory and graph node
        self._last = dict[Any, tuple[int, int, Any]]()  # by output: see _walk

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if len(self._begins) == len(self._ends):
            self.filling.look(func, result)
            self._note(result)
        return result

    def pack(self, t: Tensor) -> Tensor:
        """Save a tensor, as a hook for saved tensors."""
        self.hold(t := t.detach())  # as an output of its own node it would keep that node alive
        return t

    def hold(self, tensors: object) -> None:
        """Note tensors that are held until the backward pass."""
        self._saved += map(ref, _tensors(tensors))

    def begin(self, arguments: object, *, counts: bool) -> int:
        """Note that a call begins. It holds what it is given, and may count that as its own. Return
        its number."""
        now = len(self._begins)
        for t in _tensors(arguments):
            if (memory := self._memory.get(address_of(t))) is not None:
                if not counts and memory.since < math.inf:
                    self._inputs[address_of(t)] = memory  # a run without gradients will not hold it
                memory.close(now, math.inf)
                memory.taken = now
        self._begins.append(next_node())
        return now

    def end(self, result: object) -> None:
        """Note the end of a call. What it returns is its own from now on."""
        self._ends.append(next_node())
        nodes = [t.grad_fn and (number_of(t.grad_fn), t.output_nr) for t in _tensors(result)]
        self._results.append([*zip(self._note(result), nodes, strict=True)])
        for memory, _ in self._results[-1]:
            memory.close(len(self._ends), math.inf)

    def finish(self, apart: object, results: object) -> None:
        """Sum up what was held, but for memory of ``apart`` and of ``results``."""
        left_out = {address_of(t) for t in _tensors((apart, results))}
        alive = (t.untyped_storage() for reference in self._saved if (t := reference()) is not None)
        saved = {address_of(storage): storage.nbytes() for storage in alive}
        saved |= {key: memory.nbytes for key, memory in self._inputs.items()}
        either = left_out | saved.keys()
        rest = [memory for key, memory in [*self._memory.items()] if key not in either]
        stays = sum(memory.nbytes for memory in rest if memory.tensors and memory.since < math.inf)
        for memory in rest:
            if memory.tensors:
                memory.close(len(self._begins), math.inf)
        forward = _most((memory.nbytes, *span) for memory in rest for span in memory.spans)
        there = [t() for memory in [*self._memory.values()] for t in memory.tensors.values()]
        self._walk(there, results)
        self._sums = sum(saved[key] for key in saved.keys() - left_out), forward, stays

    def held_bytes(self, call_numbers: Sequence[Sequence[int]]) -> int:
        """Return the most bytes that were held, if some rows of calls count what their results
        take, as :meth:`waits` tells it."""
        (saved, forward, stays), backward = self._sums, _most(self._waiting(call_numbers))
        return saved + max(forward, stays + backward)

    def _note(self, result: object) -> list[_Memory]:
        """Return the memory of tensors that are there from now on."""
        memories = []
        for t in _tensors(result):
            key, now = address_of(t), len(self._begins)
            if (memory := self._memory.get(key)) is None:
                storage = t.untyped_storage()
                memory = self._memory[key] = _Memory(StorageWeakRef(storage), storage.nbytes())
            if not memory.tensors:
                memory.since, memory.left = max(memory.since, now), math.inf
            memory.tensors[id(t)] = ref(t, partial(self._forget, key, memory, id(t)))
            memories.append(memory)
        return memories

    def _forget(self, key: int, memory: _Memory, tensor: int, _: object) -> None:
        memory.tensors.pop(tensor, None)
        if not memory.tensors:
            memory.left = len(self._begins)
            memory.close(len(self._begins), 0)
            if not memory.spans:
                self._memory.pop(key, None)

    def _walk(self, *roots: Any) -> None:
        """Note, for each output of a node in the graph, the last node that reads it, its bytes, and
        the memory in which its gradient may lie: its bytes, and the output that it is made for."""
        ends: list[Any] = [t for t in _tensors(roots) if t.grad_fn is not None]
        pending: list[Any] = [(-number_of(t.grad_fn), id(t.grad_fn), t.grad_fn) for t in ends]
        heapify(pending)
        visited = set[Any]()
        # Of a node's gradient: bytes, who made it. What is handed to an end is as large as that.
        memory: dict[Any, Any] = {t.grad_fn: (t.nbytes, (-1, id(t))) for t in ends}
        while pending:
            *_, node = heappop(pending)
            if node in visited:
                continue
            visited.add(node)
            for to, (inner, nr) in enumerate(node.next_functions):
                if inner is None:
                    continue
                heappush(pending, (-number_of(inner), id(inner), inner))
                key, like = (number_of(inner), nr), outputs_of(inner)[nr]
                nested = like.is_cpp_nested_tensor  # which has no shape
                own_bytes = 0 if nested else math.prod(like.shape) * like.dtype.itemsize
                candidates = [(own_bytes, key), memory.get(inner, (0, key))]
                candidates += [memory[node]] if hands_on(node, to) else []
                by, _, before = self._last.get(key, (0, 0, (0, key)))
                memory[inner] = max(candidates)
                self._last[key] = max(by, number_of(node)), own_bytes, max(*candidates, before)

    def _waiting(self, call_numbers: Sequence[Sequence[int]]) -> Iterable[tuple[int, int, int]]:
        """Yield the gradients of what was not made by calls: bytes, and the calls while which they
        wait. Backward, the nodes of the graph run in the opposite order of their numbers."""
        results = (node for numbers in call_numbers for _, node in self._results[numbers[-1]])
        counted = {self._last[node][2][1] for node in results if node in self._last}  # by rows
        for (made, _), (used, own_bytes, (nbytes, owner)) in self._last.items():
            start, stop = bisect_right(self._begins, made), bisect_right(self._ends, used)
            if start == 0 or made >= self._ends[start - 1]:
                yield own_bytes if owner in counted else nbytes, start, stop

    def waits(self, call_numbers: Sequence[Sequence[int]]) -> Iterable[OutputLifetime]:
        """Yield how long the result of each row of calls waits. The gradients of several may lie in
        one memory, such as that of a stack. It counts for the first of them, which waits longest.
        """
        starts = [numbers[0] for numbers in call_numbers]
        ends = [self._ends[call] for call in starts]
        results = [self._results[numbers[-1]] for numbers in call_numbers]
        ready, counted = dict[Any, int](), set[Any]()  # by the memory of gradients
        for _, node in (result for row in results for result in row):
            read, _, (_, owner) = self._last.get(node, (0, 0, (0, None)))
            ready[owner] = max(ready.get(owner, 0), bisect_right(ends, read))
        for at, row in enumerate(results):
            runs, back, own, taken = at + 1, at + 1, 0, 0
            for memory, node in row:
                later = (call + (memory.taken == call) for call in starts)
                runs = max([runs, *(n for n, k in enumerate(later, 1) if memory.left > k)])
                _, own_bytes, (most, owner) = self._last.get(node, (0, 0, (0, None)))
                back = max(back, ready[owner] if memory.left < math.inf else len(ends))
                own, taken = own + own_bytes, taken + most * (owner not in counted)
                counted.add(owner)
            yield OutputLifetime(runs, back, taken / own if own else 1.0)


#: Torch's nodes that may hand on the memory of the gradient that they are given: to all of their
#: inputs, and to the first one.
_TO_ALL = frozenset(
    ("Add", "AsStridedScatter", "BlockDiag", "Cat", "Complex", "DiagonalScatter", "Rsub",
     "SelectScatter", "SliceScatter", "Stack", "torch::autograd::Copy")
)  # fmt: skip
_TO_FIRST = frozenset(
    ("Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv", "Addr", "Alias", "Baddbmm", "Clone", "Conj",
     "Cumprod", "Cumsum", "DiagEmbed", "Expand", "Fmod", "Frac", "IndexAdd", "IndexPut",
     "LinalgDet", "Permute", "Put", "Remainder", "Repeat", "ReshapeAlias", "ScatterAdd",
     "ScatterReduce", "Squeeze", "Sub", "Sum", "T", "ToCopy", "ToSparse", "Transpose",
     "UnsafeMaskedIndexPutAccumulate", "UnsafeView", "Unsqueeze", "View", "ViewAsComplex",
     "ViewAsReal")
)  # fmt: skip


def hands_on(node: Any, to: int) -> bool:
    """Return whether a node of a graph may hand on to one of its inputs the memory of the gradient
    that it is given."""
    name = node.name().partition("Backward")[0]
    mays = name in _TO_ALL or (to == 0 and name in _TO_FIRST)
    return mays or isinstance(node, BackwardCFunction)


def _most(spans: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes at one time, of some that are there from one time to another."""
    changes = Counter[int]()
    for nbytes, start, stop in spans:
        if start < stop:
            changes[start] += nbytes
            changes[stop] -= nbytes
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


_DRAWS = {"rand", "rand_like", "uniform_", "bernoulli", "bernoulli_"}
_MOST_FILLED = 1000
_FEW = 1024  # numbers, by which a program may decide what it runs
FILLS = 0.0, 1 - 2**-24  # the smallest and the largest numbers that are drawn
_ONES = 0x12DD9BB3  # a state's word of Python's generator, from which it draws ones alone


class Filling(TorchFunctionMode):
    """Notes whether a program draws a few numbers, which become all ``fill`` if that is given. A
    loop that draws until a number is large enough has to end, so at most a thousand are replaced.
    """

    def __init__(self, fill: float | None) -> None:
        super().__init__()
        self.fill, self.drawn = fill, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look(func, result)
        return result

    def look(self, func: Any, result: Any) -> None:
        few = isinstance(result, Tensor) and result.numel() <= _FEW and result.is_floating_point()
        if few and getattr(func, "__name__", "") in _DRAWS:
            self.drawn += 1
            if self.fill is not None and self.drawn <= _MOST_FILLED:
                result.detach().fill_(self.fill)


def draw(fill: float | None) -> None:
    """Let the next numbers that Python and NumPy draw be near to ``fill``, if it is given."""
    if fill is not None:
        word = _ONES if fill else 0
        random.setstate((3, (word,) * 624 + (0,), None))
        np.random.set_state(("MT19937", np.full(624, word, np.uint32), 0, 0, 0.0))


@contextmanager
def filling(fill: float | None) -> Iterator[None]:
    """Let a few numbers be near to ``fill`` in a block, if it is given. That leaves no trace in
    Python's and NumPy's generators."""
    if fill is None:
        yield
        return
    numpy: Any = np.random.get_state
    before = random.getstate(), numpy()
    draw(fill)
    try:
        with Filling(fill):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _tensors(value: object) -> Iterable[Tensor]:
    """Return tensors, but for sparse ones and those that a transform wraps."""
    leaves = (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor))
    return [t for t in leaves if t.layout is torch.strided and not is_wrapped(t)]
