"""Delay Ctrl-C during work that must not stay half done: a file, a running profiler."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType

__all__ = ["interrupts_put_off"]


@contextmanager
def interrupts_put_off() -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Delay Ctrl-C until the end of the block, except where the block allows it.

    Signals reach the main thread only. In another thread, or if no Python function handles Ctrl-C,
    nothing changes.

    Yields:
        A context in which Ctrl-C has its usual effect.

    Example:
        >>> with interrupts_put_off() as interruptible:
        ...     begun = True  # must be undone
        ...     try:
        ...         with interruptible():
        ...             sum(range(1000))  # may take long
        ...     finally:
        ...         begun = False
        499500
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield nullcontext
        return
    pressed: list[tuple[int, FrameType | None]] = []
    open_for_one = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal open_for_one
        if open_for_one:
            open_for_one = False  # the work to undo this one is not interrupted
            usual(number, frame)
        else:
            pressed.append((number, frame))

    @contextmanager
    def interruptible() -> Iterator[None]:
        nonlocal open_for_one
        open_for_one = True
        try:
            yield
        finally:
            open_for_one = False

    signal.signal(signal.SIGINT, handle)
    try:
        yield interruptible
    finally:
        signal.signal(signal.SIGINT, usual)
        if pressed:
            usual(*pressed[0])
