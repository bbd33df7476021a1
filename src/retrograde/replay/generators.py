"""Sources of a step's random numbers: generators whose states can be saved and restored.

A step draws from torch's default generators, from Python's or NumPy's global ones, or from a
generator that it refers to. (A coin for teacher forcing is often Python's.) A recomputation must
draw the same numbers (rule 2). So the states of these generators are stored with
every hidden state.

A generator that moved does not show who drew from it: another thread may have, such as a loader
that prefetches. For torch's generators :class:`OwnDraws` tells. It is slow, so it is used only
where one moved while other threads were running. For Python's and NumPy's nothing tells.

Known limit: a generator that neither is global nor can be found from the cell is not seen.
"""

import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class _Torch:
    """A generator of torch's."""

    generator: torch.Generator

    def position(self) -> Any:
        """Return a value that changes when a number is drawn, and takes no memory of torch's."""
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

    def restore(self, state: Any) -> None:
        self.generator.set_state(state)

    def copy(self) -> "_Torch":
        """Return another generator in the same state, without memory of torch's."""
        return _Torch(self.generator.clone_state())


@dataclass(frozen=True)
class _Other:
    """A generator of Python's, or a bit generator of NumPy's. ``capture`` returns its state as a
    value that compares, and ``restore`` sets it."""

    generator: Any
    capture: Callable[[], Any] = field(compare=False)
    restore: Callable[[Any], None] = field(compare=False)

    def position(self) -> Any:
        return self.capture()

    def copy(self) -> "_Other":
        value = self.capture()
        return _Other(self.generator, lambda: value, self.restore)


#: A generator of random numbers; sources of the same generator are equal.
Source = _Torch | _Other


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator that :func:`sources` can handle."""
    known = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, known)


def sources(device: torch.device, generators: Iterable[Any] = ()) -> tuple[Source, ...]:
    """Return all that a step on ``device`` may draw from: the global and the given generators."""
    given = list(generators)
    ours = _of_device(device) + [g for g in given if isinstance(g, torch.Generator)]
    found: list[Source] = [_Torch(g) for g in {id(g): g for g in ours}.values()]
    python, numpy = random.random.__self__, np.random.mtrand._rand  # type: ignore[attr-defined]
    others = [python, numpy, *(g for g in given if not isinstance(g, torch.Generator))]
    return (*found, *dict.fromkeys(map(_other, others)))


def _of_device(device: torch.device) -> list[torch.Generator]:
    """Return torch's global generators: the CPU's and the device's."""
    found: list[torch.Generator] = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    return found


def _other(generator: Any) -> _Other:
    if isinstance(generator, random.Random):
        return _Other(generator, generator.getstate, generator.setstate)
    old = isinstance(generator, np.random.RandomState)
    bits = generator._bit_generator if old else generator.bit_generator
    take = generator.get_state if old else lambda: bits.state
    put = generator.set_state if old else partial(setattr, bits, "state")
    # A state holds arrays, which do not compare.
    return _Other(bits, lambda: pickle.dumps(take()), lambda state: put(pickle.loads(state)))


def random_position(device: torch.device) -> tuple[int, ...]:
    """Return the positions of torch's default generators, which change when one is drawn from."""
    return tuple(_Torch(generator).position() for generator in _of_device(device))


def draws_python(source: Source) -> bool:
    """Return whether the numbers that a source draws are Python's or NumPy's."""
    return isinstance(source, _Other)


def is_alone() -> bool:
    """Return whether no other thread could draw random numbers."""
    return threading.active_count() == 1


class OwnDraws(TorchDispatchMode):
    """Notes which of torch's generators its own thread draws from in a block, call by call."""

    def __init__(self, sources: Iterable[Source]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources = [source for source in sources if isinstance(source, _Torch)]
        self.drawn: set[Source] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        given = [v for v in (*args, *(kwargs or {}).values()) if isinstance(v, torch.Generator)]
        names = {int(g._cdata) for g in given}  # type: ignore[attr-defined]
        ours = [s for s in self.sources if not given or int(s.generator._cdata) in names]  # type: ignore[attr-defined]
        before = [source.position() for source in ours]
        result = func(*args, **(kwargs or {}))
        pairs = zip(ours, before, strict=True)
        self.drawn.update(source for source, then in pairs if source.position() != then)
        return result


#: Numbers that become bits at a time, so that NumPy takes little memory.
_CHUNK = 2**16


def packed(zeros_and_ones: Tensor) -> Tensor:
    """Return a tensor of zeros and ones on a CPU as bits, in a tensor of bytes."""
    flat = _whole_numbers(zeros_and_ones.detach().contiguous())
    bits = torch.empty(-(-len(flat) // 8), dtype=torch.uint8)
    for at in range(0, len(flat), _CHUNK):
        some = np.packbits(flat[at : at + _CHUNK] != 0)
        bits.numpy()[at // 8 :][: len(some)] = some
    return bits


def unpack_into(bits: Tensor, target: Tensor) -> Tensor:
    """Write the zeros and ones of :func:`packed` into a tensor, and return it."""
    whole = target if target.is_contiguous() else target.new_empty(target.shape)
    flat, known = _whole_numbers(whole), bits.numpy()
    one = _whole_numbers(target.new_ones(1))
    for at in range(0, len(flat), _CHUNK):
        some = flat[at : at + _CHUNK]
        np.multiply(np.unpackbits(known[at // 8 :], count=len(some)), one, out=some)
    return target if whole is target else target.copy_(whole)


def _whole_numbers(t: Tensor) -> Any:
    """Return the bits of a contiguous tensor's numbers, as whole numbers of NumPy's."""
    kind = (torch.uint8, torch.int16, torch.int32, torch.int64)[t.itemsize.bit_length() - 1]
    return t.view(-1).view(kind).numpy()


class KeptDraws(TorchFunctionMode):
    """The random numbers that a call drew on a CPU, for a rerun that takes them from here.

    To draw a mask takes a CPU longer than to multiply by it, up to a hundred times. Its zeros and
    ones are kept as bits, and a few other numbers as they are. If the call draws anything else,
    nothing is kept, and ``complete`` is false.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.complete = True
        self._source = _Torch(torch.default_generator)
        self._position, self._read = self._source.position(), -1  # below zero: nothing is read

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        way = _WAYS.get(func)
        if way is None:
            name = getattr(func, "__name__", "")
            way = _WAYS[func] = "dropout" in name or name in _DRAWING
        if not way or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            with self:
                return _attention(*args, **kwargs)
        if func is functional.dropout and _is_composed(*args, **kwargs):
            return self._dropout(*args, **kwargs)
        with _EachDraw(self):
            return func(*args, **kwargs)

    def end(self) -> None:
        """End the call that draws."""
        self._see()
        if not self.complete:
            self.kept = []

    def again(self) -> "KeptDraws":
        """Return the same numbers, from the first on, for a rerun within a ``with`` block."""
        self._read = 0
        return self

    def draw(self, draw: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Let an operation draw numbers, or do as if it did."""
        if self._read >= 0:
            kept, self._read = self.kept[self._read], self._read + 1
            if not draw.__name__.partition(".")[0].endswith("_"):
                return kept.clone()
            is_mask = kept.dtype is torch.uint8
            return unpack_into(kept, args[0]) if is_mask else args[0].copy_(kept)
        self._see()
        found = draw(*args, **kwargs)
        self._position = self._source.position()
        is_mask = draw.__name__.startswith("bernoulli_")
        self.complete &= found.is_cpu and found.dtype is not torch.uint8
        self.complete &= (is_mask or found.numel() <= _FEW) and not kwargs.get("generator")
        if self.complete:
            self.kept.append(packed(found) if is_mask else found.clone())
        return found

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Call the operations that torch's dropout calls on a CPU."""
        noise = self.draw(Tensor.bernoulli_, torch.empty_like(input), 1 - p).div_(1 - p)
        return input.mul_(noise) if inplace else input * noise

    def _see(self) -> None:
        """Note whether numbers were drawn that were not seen."""
        self.complete = self.complete and self._position == self._source.position()


def _is_composed(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Return whether a dropout draws, and has the bits of operations that are called here."""
    if type(input) is not Tensor or not (input.is_cpu and training and 0 < p < 1 and len(input)):
        return False
    if (p, input.dtype) not in _COMPOSED:
        before, few = torch.get_rng_state(), torch.linspace(-3, 3, 99, dtype=input.dtype)
        expected = functional.dropout(few, p)
        torch.set_rng_state(before)
        found = few * torch.empty_like(few).bernoulli_(1 - p).div_(1 - p)
        torch.set_rng_state(before)
        _COMPOSED[p, input.dtype] = torch.equal(found, expected)
    return _COMPOSED[p, input.dtype]


class _EachDraw(TorchDispatchMode):
    """Passes each operation that draws to its owner. It takes microseconds for any operation."""

    def __init__(self, owner: KeptDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, and from wrapping each call."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        draws = _WAYS.get(func)
        if draws is None:
            may_draw = torch.Tag.nondeterministic_seeded in func.tags
            draws = _WAYS[func] = may_draw and len(func._schema.returns) == 1
        kwargs = kwargs or {}
        return self.owner.draw(func, *args, **kwargs) if draws else func(*args, **kwargs)


_FEW = 4096  # numbers that are kept as they are
_WAYS: dict[Any, bool] = {}  # whether a function or an operation may draw
_COMPOSED: dict[tuple[float, torch.dtype], bool] = {}
_DRAWING = {
    "scaled_dot_product_attention", "multi_head_attention_forward", "rrelu", "rrelu_",
    "bernoulli", "bernoulli_", "rand", "rand_like", "uniform_",
}  # fmt: skip
#: The same code, which does not look for modes first. So these see the functions that it calls.
_attention = FunctionType(
    functional.multi_head_attention_forward.__code__,
    {**vars(functional), "has_torch_function": lambda _: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)


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
