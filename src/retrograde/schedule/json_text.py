"""Schedules as text: versioned, compact JSON, both ways.

A schedule is one JSON object. All its actions are one string of letters and positions, such as
``"S0 A0:5 S5 R5:6 B5:6"``. So 300 000 actions take about 4 MB, and the text is readable. Reading
checks the form only; :func:`retrograde.schedule.simulate` checks whether the schedule is legal.
"""

import json
import re
from dataclasses import asdict, fields
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

from retrograde.errors import ScheduleError
from retrograde.schedule.account import Units
from retrograde.schedule.actions import Code, Verb
from retrograde.schedule.chain import Chain

if TYPE_CHECKING:
    from retrograde.schedule.schedule import Schedule

__all__ = ["VERSION", "read", "to_json"]

VERSION = 1

_FORMAT = "retrograde-schedule"
_LETTERS = "ASRLFB"  # in the order of Verb
_RANGES = frozenset({Verb.ADVANCE.value, Verb.RECORD.value, Verb.BACKWARD.value})
_WORD = re.compile(r"([ARB])([0-9]+):([0-9]+)|([SLF])([0-9]+)")
_OPTIONAL = {"bound": None}
_KEYS = ("format", "version", "length", "policy", "memory", "units", "actions")


def to_json(schedule: "Schedule") -> str:
    """Write a schedule as one line of JSON."""
    document = {
        "format": _FORMAT,
        "version": VERSION,
        "length": schedule.length,
        "policy": schedule.policy,
        "memory": schedule.memory,
        "units": _of_units(schedule.units),
        **({} if schedule.bound is None else {"bound": schedule.bound}),
        "actions": " ".join(_word(*code) for code in schedule.codes()),
    }
    return json.dumps(document, separators=(",", ":"))


def read(text: str) -> tuple[list[Code], int | float | None, dict[str, Any]]:
    """Return the codes, the bound and the other parts of a schedule that :func:`to_json` wrote.

    ScheduleError says where the text is malformed.
    """
    document = _document(text)
    length, policy, memory = document["length"], document["policy"], document["memory"]
    if type(length) is not int or length < 1:
        _fail(f"'length' is {length!r}: expected an integer, 1 or more")
    if not isinstance(policy, str):
        _fail(f"'policy' is {policy!r}: expected a name")
    if memory is not None and (type(memory) is not int or memory < 1):
        _fail(f"'memory' is {memory!r}: expected an integer, 1 or more, or null")
    bound = document["bound"]
    units = _units(document["units"])
    kinds: tuple[type, ...] = (int, float) if isinstance(units, Chain) else (int,)
    if bound is not None and (type(bound) not in kinds or not 0 <= bound < inf):
        expected = "seconds" if isinstance(units, Chain) else "an integer"
        _fail(f"'bound' is {bound!r}: expected {expected}, 0 or more, or null")
    parts = {"length": length, "policy": policy, "memory": memory, "units": units}
    return _codes(document["actions"]), bound, parts


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (TypeError, ValueError) as error:
        _fail(f"the text is not JSON ({error})")
    if not isinstance(document, dict):
        _fail(f"expected a JSON object, got {json.dumps(document)[:40]}")
    if document.get("format") != _FORMAT:
        _fail(f"'format' is {document.get('format')!r}: expected {_FORMAT!r}")
    if document.get("version") != VERSION:
        _fail(f"'version' is {document.get('version')!r}: this library reads {VERSION}")
    document = _OPTIONAL | document
    _same_keys("the object", document, (*_KEYS, *_OPTIONAL))
    return document


def _of_units(units: Units | Chain) -> dict[str, Any]:
    if isinstance(units, Chain):
        return {"chain": json.loads(units.to_json())}
    return asdict(units)


def _units(document: Any) -> Units | Chain:
    if not isinstance(document, dict):
        _fail(f"'units' is {document!r}: expected an object")
    if document.keys() == {"chain"}:
        return Chain.from_json(json.dumps(document["chain"]))
    _same_keys("'units'", document, tuple(field.name for field in fields(Units)))
    return Units(**document)


def _same_keys(where: str, document: dict[str, Any], expected: tuple[str, ...]) -> None:
    missing = [key for key in expected if key not in document]
    unknown = [key for key in document if key not in expected]
    if missing:
        _fail(f"{where} lacks {', '.join(map(repr, missing))}")
    if unknown:
        _fail(f"{where} has the unknown {', '.join(map(repr, unknown))}")


def _codes(text: Any) -> list[Code]:
    if not isinstance(text, str):
        _fail(f"'actions' is {text!r}: expected text such as 'S0 R0:5 B0:5 F0'")
    return [_code(index, word) for index, word in enumerate(text.split())]


def _code(index: int, word: str) -> Code:
    match = _WORD.fullmatch(word)
    if match is None:
        _fail(
            f"action {index} is {word!r}: expected such as 'A0:5', 'S5', 'R5:6', 'L0', 'F5', 'B5:6'"
        )
    letter, start, stop = match[1] or match[4], match[2] or match[5], match[3] or match[5]
    return _LETTERS.index(letter), int(start), int(stop)


def _word(verb: int, start: int, stop: int) -> str:
    return f"{_LETTERS[verb]}{start}:{stop}" if verb in _RANGES else f"{_LETTERS[verb]}{start}"


def _fail(reason: str) -> NoReturn:
    raise ScheduleError(f"not a schedule: {reason}")
