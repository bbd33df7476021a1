"""The machine that something is measured on: its name, and its clock.

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
    """The processor's name as Linux gives it, or what Python knows.

    Returns:
        Such as ``"AMD EPYC"``; never empty.

    Example:
        >>> processor_name() != ""
        True
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def machine_of(device: "str | torch.device") -> dict[str, str | int]:
    """What is named beside every measured figure.

    Args:
        device: that was measured on.

    Returns:
        The device's name, torch's version, and on a processor its threads.

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
    """Seconds on a clock, read when the device has done what it was given.

    Args:
        device: to wait for.

    Returns:
        Seconds; only differences have a meaning.

    Example:
        >>> import torch
        >>> now(torch.device("cpu")) <= now(torch.device("cpu"))
        True
    """
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()
