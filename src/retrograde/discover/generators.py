"""Sources of a step's random numbers: generators whose states can be saved and restored.

A step draws from torch's default generators, from Python's or NumPy's global ones, or from a
generator that it refers to. (A coin for teacher forcing is often Python's.) A recomputation must
draw the same numbers (rule 2). So the states of these generators are stored with
every hidden state.

A generator that moved does not show who drew from it: another thread may have, such as a loader
that prefetches. :class:`Watch` finds the draws of its own thread. It is slow, so it is used only
where a generator moved while other threads were running.

Known limit: a generator that neither is global nor can be found from the cell is not seen.
"""

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "OwnRandom",
    "PythonValue",
    "Source",
    "Watch",
    "draws_python",
    "is_alone",
    "is_generator",
    "random_position",
    "sources",
]


class Source(Protocol):
    """A generator of random numbers; sources of the same generator are equal."""

    def __hash__(self) -> int: ...

    def position(self) -> Any:
        """Return a value that changes when a number is drawn, and takes no memory of torch's."""
        ...

    def capture(self) -> Any:
        """Return its state, with ``nbytes`` and ``is_cuda``, as a tensor has them."""
        ...

    def restore(self, state: Any) -> None:
        """Restore a captured state."""
        ...

    def copy(self) -> "Source":
        """Return another generator in the same state, without memory of torch's."""
        ...


@dataclass(frozen=True)
class _Torch:
    generator: torch.Generator

    def position(self) -> Any:
        # A state has five thousand bytes, so a copy draws its next number instead.
        if self.generator.device.type == "cpu":
            ahead = self.generator.clone_state()
            with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
                return int(torch.randint(2**62, (), generator=ahead, device="cpu"))
        if self.generator.device.type == "cuda":
            return self.generator.initial_seed(), self.generator.get_offset()
        return bytes(self.generator.get_state().numpy())

    def capture(self) -> Tensor:
        return self.generator.get_state()

    def restore(self, state: Tensor) -> None:
        self.generator.set_state(state)

    def copy(self) -> Source:
        return _Torch(self.generator.clone_state())


@dataclass(frozen=True)
class PythonValue:
    """A part of a snapshot that takes none of torch's memory."""

    value: Any
    nbytes: int = 0
    is_cuda: bool = False


@dataclass(frozen=True)
class _Other:
    """A generator of Python's or NumPy's. ``take`` returns its state as a value that compares, and
    ``put`` restores it. ``instance`` is the object whose methods draw (Python's), or the bit
    generator (NumPy's)."""

    generator: Any
    instance: Any = field(compare=False)
    take: Callable[[], Any] = field(compare=False)
    put: Callable[[Any], None] = field(compare=False)

    def position(self) -> Any:
        return self.take()

    def capture(self) -> PythonValue:
        return PythonValue(self.take())

    def restore(self, state: PythonValue) -> None:
        self.put(state.value)

    def copy(self) -> Source:
        value = self.take()
        return _Other(self.generator, self.instance, lambda: value, self.put)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator that :func:`sources` can handle."""
    known = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, known)


def sources(device: torch.device, generators: Iterable[Any] = ()) -> tuple[Source, ...]:
    """Return all that a step on ``device`` may draw from: the global and the given generators."""
    given = list(generators)
    ours = _of_device(device) + [g for g in given if isinstance(g, torch.Generator)]
    found: list[Source] = [_Torch(g) for g in {id(g): g for g in ours}.values()]
    others = [*_global(), *(_other(g) for g in given if not isinstance(g, torch.Generator))]
    return (*found, *{id(source.instance): source for source in reversed(others)}.values())


def _of_device(device: torch.device) -> list[torch.Generator]:
    """Return torch's global generators: the CPU's and the device's."""
    found: list[torch.Generator] = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _global() -> "tuple[_Other, ...]":
    """Return Python's generator and NumPy's, whichever way a cell refers to them."""
    python = random.random.__self__  # type: ignore[attr-defined]
    return _Other(random, python, random.getstate, random.setstate), _numpy(np.random)


def _other(generator: Any) -> _Other:
    if isinstance(generator, random.Random):
        return _Other(generator, generator, generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return _numpy(generator)
    bits = generator.bit_generator  # its state may hold arrays, which do not compare
    return _Other(
        generator,
        bits,
        lambda: pickle.dumps(bits.state),
        lambda state: setattr(bits, "state", pickle.loads(state)),
    )


def _numpy(generator: Any) -> _Other:
    def take() -> Any:
        name, key, *rest = generator.get_state()
        return name, key.tobytes(), *rest

    def put(state: Any) -> None:
        name, key, *rest = state
        generator.set_state((name, np.frombuffer(key, np.uint32), *rest))

    owner = np.random.mtrand._rand if generator is np.random else generator
    return _Other(generator, owner._bit_generator, take, put)


def random_position(device: torch.device) -> tuple[int, ...]:
    """Return the positions of torch's default generators, which change when one is drawn from."""
    return tuple(_Torch(generator).position() for generator in _of_device(device))


def _defaults() -> list[torch.Generator]:
    """Return the generators of an operation that is given none."""
    return [torch.default_generator, *torch.cuda.default_generators]


def _identity(generator: torch.Generator) -> int:
    """Return the id of a generator, since each operation is given a new Python object of it."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def _is_off(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws nothing: no dropout, or a layer in evaluation mode."""
    parameters = func._schema.arguments
    given = {p.name: p.default_value for p in parameters}
    given |= {p.name: value for p, value in zip(parameters, args, strict=False)} | kwargs
    is_evaluated = given.get("train") is False or given.get("training") is False
    return is_evaluated or 0 in (given.get("dropout_p"), given.get("dropout"))


def draws_python(source: Source) -> bool:
    """Return whether the numbers that a source draws are Python's or NumPy's."""
    return isinstance(source, _Other)


def is_alone() -> bool:
    """Return whether no other thread could draw random numbers."""
    return threading.active_count() == 1


class Watch(TorchDispatchMode):
    """Watches which generators its thread draws from in a block, and which tensors it reads.

    torch's operations are intercepted one by one. The interpreter's profiling hook sees calls of
    Python's generators. NumPy's are locked for the block, so only the block itself can move them.
    ``seen`` is called with each source drawn from, and each given tensor read.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tensors: Sequence[Tensor] = (),
        seen: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ours = [s for s in sources if isinstance(s, _Torch)]
        self.others = {id(s.instance): s for s in sources if isinstance(s, _Other)}
        self.tensors = {id(t): t for t in tensors}
        self.seen = seen
        self.drawn: set[Source] = set()

    def __enter__(self) -> "Watch":
        self.locks = ExitStack()
        bits = [s for s in self.others.values() if not isinstance(s.instance, random.Random)]
        for source in bits:
            self.locks.enter_context(source.instance.lock)
        self.before = [(source, source.position()) for source in bits]
        self.hook = sys.getprofile()
        if self.hook is None and len(self.others) > len(bits):
            sys.setprofile(self._called)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.hook is None:
            sys.setprofile(None)
        with self.locks:
            for source, position in self.before:
                if source.position() != position:
                    self._tell(source)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.tensors:
            for value in pytree.tree_leaves((args, kwargs)):
                if id(value) in self.tensors:
                    self.seen(value)
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_off(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        given = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, torch.Generator)]
        which = set(map(_identity, given or _defaults()))
        ours = [s for s in self.ours if _identity(s.generator) in which]
        before = [source.position() for source in ours]  # another thread may move the others
        result = func(*args, **(kwargs or {}))
        for source, position in zip(ours, before, strict=True):
            if source.position() != position:
                self._tell(source)
        return result

    def _called(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            source = self.others.get(id(getattr(function, "__self__", None)))
            if source is not None:
                self._tell(source)

    def _tell(self, source: Source) -> None:
        self.drawn.add(source)
        self.seen(source)


class OwnRandom:
    """Random numbers for blocks that run once, between others that are rerun.

    Draws inside a block continue where the last block ended, and do not move the generators of the
    others. Copies of generators take no memory of torch's; a state does, so states are passed on
    only if numbers were drawn.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generators = _of_device(device)
        self.stream: list[torch.Generator] = []

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Run a block that may draw."""
        before = [generator.clone_state() for generator in self.generators]
        self._set(self.stream)
        position = random_position(self.device)
        try:
            yield
        finally:
            if self.stream or position != random_position(self.device):
                self.stream = [generator.clone_state() for generator in self.generators]
                self._set(before)

    def _set(self, values: list[torch.Generator]) -> None:
        for generator, value in zip(self.generators, values, strict=False):
            generator.set_state(value.get_state())
