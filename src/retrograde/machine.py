"""The machine that the code runs on: its name and its clock.

Importing this loads no torch: the functions that need it load it.
"""

import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["machine_of", "now", "processor_name"]


def processor_name() -> str:
    """Return the processor's name as Linux gives it, or what Python knows; never empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
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
