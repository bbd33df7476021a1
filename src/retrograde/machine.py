"""The machine that the code runs on: its name, its clock, and its one measurement at a time.

Importing this loads no torch: the functions that need it load it.
"""

import contextvars
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def processor_name() -> str:
    """Return the processor's name as Linux gives it, or what Python knows; never empty.

    One name may be that of several makes. So vectors of 512 bits, if there are any, are added.
    """
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
    import torch

    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
