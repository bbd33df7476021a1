"""The six verbs that every schedule is written in.

Steps are numbered 0 … T−1; hidden state k is the one before step k, so state 0 is the initial one.

=========================  =====================================================================
``Advance(start, stop)``   from state ``start``, run steps start … stop−1, keep nothing; state
                           ``stop`` is now current
``Store(at)``              keep the current hidden state ``at``
``Record(start, stop)``    as Advance, but keep each step's internal state
``Load(at)``               make kept state ``at`` current (stored, or a recorded step's output)
``Free(at)``               drop stored state ``at``
``Backward(start, stop)``  backpropagate steps stop−1 … start, whose internal states are recorded,
                           and drop those
=========================  =====================================================================

The set is that of Gruslys et al., *Memory-Efficient Backpropagation Through Time* (2016), with
ranges where the paper has single steps. :mod:`retrograde.schedule.simulate` defines which orders
are legal and what they cost. Actions know nothing of memory, time or tensors.

Internally an action is a *code*: three integers (verb, start, stop). A verb with one position has
``stop == start``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

Code: TypeAlias = tuple[int, int, int]


class Verb(IntEnum):
    """The number of a verb in a code, and in the arrays of a schedule."""

    ADVANCE = 0
    STORE = 1
    RECORD = 2
    LOAD = 3
    FREE = 4
    BACKWARD = 5


@dataclass(frozen=True, slots=True)
class _OfRange:
    """A verb that applies to the steps ``start`` … ``stop − 1``."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.start}→{self.stop}"


@dataclass(frozen=True, slots=True)
class _OfState:
    """A verb that applies to the hidden state ``at``."""

    at: int

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()} {self.at}"


@dataclass(frozen=True, slots=True)
class Advance(_OfRange):
    """From the current state ``start``, run steps ``start`` … ``stop − 1`` and keep nothing.

    Example:
        >>> print(Advance(0, 5))
        advance 0→5
    """


@dataclass(frozen=True, slots=True)
class Store(_OfState):
    """Keep the current hidden state ``at``.

    Example:
        >>> print(Store(5))
        store 5
    """


@dataclass(frozen=True, slots=True)
class Record(_OfRange):
    """Run steps ``start`` … ``stop − 1`` as :class:`Advance`, and keep each internal state.

    Example:
        >>> print(Record(5, 7))
        record 5→7
    """


@dataclass(frozen=True, slots=True)
class Load(_OfState):
    """Make the kept hidden state ``at`` current: a stored one, or a recorded step's output.

    Example:
        >>> print(Load(0))
        load 0
    """


@dataclass(frozen=True, slots=True)
class Free(_OfState):
    """Drop the stored hidden state ``at``.

    Example:
        >>> print(Free(5))
        free 5
    """


@dataclass(frozen=True, slots=True)
class Backward(_OfRange):
    """Backpropagate steps ``stop − 1`` … ``start``, and drop their internal states.

    Example:
        >>> print(Backward(5, 7))
        backward 7→5
    """

    def __str__(self) -> str:
        return f"backward {self.stop}→{self.start}"


Action: TypeAlias = Advance | Store | Record | Load | Free | Backward


def encode(action: Action) -> Code:
    """Return the code (verb, start, stop) of an action; TypeError for anything else."""
    verb = _VERBS.get(type(action))
    if verb is None:
        raise TypeError(
            f"{action!r} is not an action: expected Advance, Store, Record, Load, Free or Backward"
        )
    if isinstance(action, _OfState):
        return verb, action.at, action.at
    return verb, action.start, action.stop


def decode(verb: int, start: int, stop: int) -> Action:
    """Return the action of a code; ``stop`` is ignored where the verb has one position."""
    if verb in _OF_RANGE:
        return _OF_RANGE[verb](start, stop)
    if verb in _OF_STATE:
        return _OF_STATE[verb](start)
    raise ValueError(f"{verb!r} is not a valid Verb")


def to_word(verb: int, start: int, stop: int) -> str:
    """Return a code as text, such as ``"A0:5"`` or ``"S5"``."""
    return f"{_LETTERS[verb]}{start}:{stop}" if verb in _OF_RANGE else f"{_LETTERS[verb]}{start}"


def of_word(word: str) -> Code | None:
    """Return the code that :func:`to_word` wrote, or None."""
    match = _WORD.fullmatch(word)
    if match is None:
        return None
    letter, start, stop = match[1] or match[4], match[2] or match[5], match[3] or match[5]
    return _LETTERS.index(letter), int(start), int(stop)


# Keyed by plain integers: making enumeration members would slow the decoding of long schedules.
_OF_RANGE: dict[int, Callable[[int, int], Action]] = {0: Advance, 2: Record, 5: Backward}
_OF_STATE: dict[int, Callable[[int], Action]] = {1: Store, 3: Load, 4: Free}
_VERBS: dict[object, int] = {action: verb for verb, action in (_OF_RANGE | _OF_STATE).items()}
_LETTERS = "".join(verb.name[0] for verb in Verb)
_WORD = re.compile(r"([ARB])([0-9]+):([0-9]+)|([SLF])([0-9]+)")
