"""Sizes as people write them: ``"64MiB"``, ``"5%"``, ``0.05``, ``67108864``.

A whole number is bytes. A float in (0, 1] or a percentage is a fraction of the memory of ordinary
backpropagation, for the same module and shapes. Decimal prefixes (kB, MB, GB) are powers of 1000,
binary ones (KiB, MiB, GiB) of 1024, as in IEC 80000-13.
"""

import math
import operator
import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, SupportsIndex

from retrograde.errors import UnitError

Memory = str | float | SupportsIndex

_FACTORS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for base, prefix, suffix in [
        (1000, letter, "b"),
        (1024, letter, "ib"),
        (1024, letter + "i", ""),
    ]
}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*|%)\s*")
_HINT = "expected bytes (67108864), a size ('64MiB', '1.5GB') or a fraction (0.05, '5%')"


def parse_memory(memory: Memory) -> int | Fraction:
    """Read a budget: bytes as an ``int`` of 1 or more, or a share of ordinary BPTT's in (0, 1].

    Raises UnitError if a text cannot be read. A number must be positive and finite, and a share at
    most 1.

        >>> parse_memory("64MiB"), parse_memory("5%")
        (67108864, Fraction(1, 20))
    """
    if isinstance(memory, str):
        return _parse_text(memory)
    if isinstance(memory, Real) and not isinstance(memory, Integral) and math.isfinite(memory):
        return _fraction(Fraction(str(memory)), memory)
    try:
        size = None if isinstance(memory, bool) else operator.index(memory)  # type: ignore[arg-type]
    except TypeError:
        size = None
    if size is None:
        shown = repr(memory) if isinstance(memory, Real | None) else type(memory)
        raise UnitError(f"cannot read the memory {shown}: {_HINT}")
    return _positive(size, memory)


class MemoryAttribute:
    """An attribute that is a budget, or None. What cannot be read is refused when it is set."""

    def __get__(self, instance: object, owner: object = None) -> Any:
        return self if instance is None else vars(instance).get("memory")

    def __set__(self, instance: object, memory: Memory | None) -> None:
        if memory is not None:
            parse_memory(memory)
        vars(instance)["memory"] = memory


def asks_for_all(memory: Memory | None) -> bool:
    """Return whether a budget allows all that ordinary backpropagation takes.

    Example:
        >>> asks_for_all("100%"), asks_for_all(1.0), asks_for_all(None), asks_for_all(1)
        (True, True, True, False)
    """
    asked = None if memory is None else parse_memory(memory)
    return asked is None or (isinstance(asked, Fraction) and asked >= 1)


def as_bytes(memory: Memory, ordinary_bytes: int) -> int:
    """Return the budget in bytes; a fraction of ``ordinary_bytes`` is rounded down.

    >>> as_bytes("5%", 1000), as_bytes("1KiB", 1000)
    (50, 1024)
    """
    size = parse_memory(memory)
    return size if isinstance(size, int) else math.floor(size * ordinary_bytes)


def as_given(memory: Memory | None, size: int, ordinary_bytes: int) -> str:
    """Return a budget for a message: as it was given, and its bytes.

    >>> as_given("5%", 51, 1024)
    "'5%' of 1 KiB is 51 bytes (51 B)"
    >>> as_given(5, 5, 1024)
    "5 is 5 bytes (5 B; did you mean '5%' or '5MiB'?)"
    """
    is_share = memory is not None and isinstance(parse_memory(memory), Fraction)
    whole = f" of {format_bytes(ordinary_bytes)}" if is_share else ""
    few = "" if is_share or size > 100 else f"; did you mean '{size}%' or '{size}MiB'?"
    return f"{memory!r}{whole} is {size} bytes ({format_bytes(size)}{few})"


def format_bytes(size: float) -> str:
    """Format a size in bytes for people, in binary units.

    >>> format_bytes(67108864), format_bytes(1000), format_bytes(0)
    ('64 MiB', '1000 B', '0 B')
    """
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop()
    unit = units[-1]
    digits = f"{size:.0f}" if unit == "B" or abs(size) >= 999.5 else f"{size:.3g}"
    return f"{digits} {unit}"


def _parse_text(text: str) -> int | Fraction:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UnitError(f"cannot read the memory {text!r}: {_HINT}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        return _fraction(number / 100, text)
    if unit not in _FACTORS:
        unit_names = "B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, %"
        near = f"{match[1]}{unit.upper()}iB" if unit + "ib" in _FACTORS else None
        maybe = f"did you mean {near!r}? Else " if near else ""
        raise UnitError(
            f"unknown unit {match[2]!r} in the memory {text!r}: {maybe}use one of {unit_names}"
        )
    if not unit and number.denominator != 1:
        return _fraction(number, text)
    return _positive(math.floor(number * _FACTORS[unit]), text)


def _fraction(value: Fraction, memory: object) -> Fraction:
    if not 0 < value <= 1:
        raise UnitError(
            f"the memory {memory!r} is {float(value):g} times what ordinary backpropagation holds: "
            "expected a fraction above 0 and at most 1 (write bytes as a whole number or '64MiB')"
        )
    return value


def _positive(size: int, memory: object) -> int:
    if size < 1:
        raise UnitError(f"the memory {memory!r} is {size} bytes: expected at least 1 byte")
    return size


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Format rows as lines of text: columns two spaces apart, right-aligned except ``left``.

    Example:
        >>> print(aligned([("budget", "steps"), ("1 MiB", "7")]))
        budget  steps
        1 MiB       7
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(t.ljust(w) if k in left else t.rjust(w) for k, (t, w) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    )
    return "\n".join(line.rstrip() for line in lines)
