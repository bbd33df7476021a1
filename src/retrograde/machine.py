"""The machine that the code runs on: its name, its clock, and its one measurement at a time.

Importing this loads no torch: the functions that need it load it.
"""

import contextvars
import math
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def processor_name() -> str:
    """Return the processor's name as Linux gives it, or what Python knows; never empty. One name
    may be that of several makes. So vectors of 512 bits, if there are any, are added."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    if names and any("avx512f" in line.split() for line in lines if line.startswith("flags")):
        return f"{names[0]} with AVX-512"
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def machine_of(device: "str | torch.device") -> dict[str, str | int]:
    """Return the labels of every measured figure: device, torch's version, and a CPU's threads.

    Example:
        >>> sorted(machine_of("cpu"))
        ['device', 'threads', 'torch']
    """
    import torch

    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else processor_name()
    threads = {} if on_gpu else {"threads": torch.get_num_threads()}
    return {"device": name, **threads, "torch": str(torch.__version__)}


def now(device: "torch.device") -> float:
    """Return seconds on a clock, after the device has finished its work; only differences count."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


class _Teller:
    """Tells on a terminal what makes a first call long: two seconds after it began, and every five
    seconds from then on."""

    quiet = False

    def __init__(self) -> None:
        self._began = self._last = self._told = -math.inf

    def __call__(self, what: str) -> None:
        last, self._last = self._last, time.monotonic()
        if self._last - last > _PAUSE:
            self._began = self._last
        waits = self._last - self._began < _PATIENCE or self._last - self._told < _BETWEEN
        if not (waits or self.quiet) and sys.stderr.isatty():
            self._told = self._last
            print(f"retrograde: {what}", file=sys.stderr)


_PATIENCE, _BETWEEN, _PAUSE = 2, 5, 30  # seconds
tell = _Teller()


def quiet(on: bool = True) -> None:
    """Tell nothing on the terminal while kernels are compiled or layers measured."""
    _Teller.quiet = on


class _Turn:
    """A reentrant lock, which a thread started in a copy of the holder's context holds too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: object = None
        self._mine: contextvars.ContextVar[object] = contextvars.ContextVar("turn", default=None)
        self.depth = 0

    def __enter__(self) -> None:
        mine = self._mine.get()
        if mine is None or mine is not self._holder:
            self._lock.acquire()
            self._holder = object()
            self._mine.set(self._holder)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._holder = None
            self._lock.release()


#: Held by a thread while it measures or tries a call, since both change state of the process.
MEASURING = _Turn()


@contextmanager
def unpacked() -> Iterator[None]:
    """Record without the caller's saved-tensor hooks, such as those of ``torch.utils.checkpoint``.
    A trial or a measurement is not the caller's graph."""
    from retrograde import torch_private as private

    hooks = []
    while (top := private.default_saved_hooks(True)) is not None:
        hooks.append(top)
        private.pop_saved_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            private.push_saved_hooks(pack, unpack)
