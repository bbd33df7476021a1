"""Versioned JSON objects, on one line, of a schedule or a chain."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from retrograde.errors import ScheduleError

_VERSION = 1


def write(name: str, entries: Mapping[str, Any]) -> str:
    """Return compact JSON of a ``"schedule"`` or a ``"chain"``."""
    document = {"format": f"retrograde-{name}", "version": _VERSION, **entries}
    return json.dumps(document, separators=(",", ":"))


def read(name: str, text: str, keys: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return the entries that :func:`write` wrote. ScheduleError says what is malformed."""
    try:
        document = json.loads(text)
    except (TypeError, ValueError) as error:
        fail(name, f"the text is not JSON ({error})")
    if not isinstance(document, dict):
        fail(name, f"expected a JSON object, got {json.dumps(document)[:40]}")
    if (format_name := document.pop("format", None)) != f"retrograde-{name}":
        fail(name, f"'format' is {format_name!r}: expected 'retrograde-{name}'")
    if (version := document.pop("version", None)) != _VERSION:
        fail(name, f"'version' is {version!r}: this library reads {_VERSION}")
    check_keys(name, "the object", document, keys, optional)
    return document


def check_keys(
    name: str, where: str, document: Any, keys: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Refuse keys that are missing or unknown."""
    missing = [key for key in keys if key not in document]
    if missing:
        fail(name, f"{where} lacks {', '.join(map(repr, missing))}")
    unknown = [key for key in document if key not in {*keys, *optional}]
    if unknown:
        fail(name, f"{where} has the unknown {', '.join(map(repr, unknown))}")


def fail(name: str, reason: object) -> NoReturn:
    raise ScheduleError(f"not a {name}: {reason}")
