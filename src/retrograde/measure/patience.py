"""A notice on the terminal when a first call takes long to measure."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["told_if_slow"]

PATIENCE = 5.0  # seconds
_telling = ContextVar("_telling", default=False)  # whether an outer measurement gives notice


@contextmanager
def told_if_slow() -> Iterator[None]:
    """Give notice on the terminal, on the error stream, if a block takes more than some seconds."""
    if sys.stderr is None or not sys.stderr.isatty() or _telling.get():
        yield
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        _print("retrograde is measuring the memory of a first call of this kind …")

    before, begin = _telling.set(True), time.monotonic()
    timer = threading.Timer(PATIENCE, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _telling.reset(before)
        if said.is_set():
            _print(f"… that took {time.monotonic() - begin:.0f} s")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
