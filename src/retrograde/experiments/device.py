"""The device that an experiment runs on: whether it is there, its name, and waiting for it."""

import time

import torch

from retrograde.experiments.options import ExperimentError
from retrograde.machine import processor_name

__all__ = ["check_device", "machine_of", "now"]


def check_device(device: str) -> None:
    """See to it that torch can compute on a device.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises:
        ExperimentError: it is neither, or is not there.

    Example:
        >>> check_device("cpu")
        >>> check_device("abacus")
        Traceback (most recent call last):
        retrograde.experiments.options.ExperimentError: --device is 'abacus': expected cpu or cuda
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (":" in device and not number.isdecimal()):
        raise ExperimentError(f"--device is {device!r}: expected cpu or cuda")
    if kind == "cuda" and torch.cuda.device_count() <= int(number or 0):
        raise ExperimentError(
            f"--device is {device!r}, and torch finds {torch.cuda.device_count()} CUDA devices: "
            "use --device cpu"
        )


def machine_of(device: str) -> dict[str, str | int]:
    """What is named beside every measured figure.

    Args:
        device: that was measured on.

    Returns:
        The device's name, torch's version, and on a processor its threads.

    Example:
        >>> sorted(machine_of("cpu"))
        ['device', 'threads', 'torch']
    """
    on_gpu = torch.device(device).type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else processor_name()
    threads = {} if on_gpu else {"threads": torch.get_num_threads()}
    return {"device": name, **threads, "torch": str(torch.__version__)}


def now(device: torch.device) -> float:
    """Seconds on a clock, read when the device has done what it was given.

    Args:
        device: to wait for.

    Returns:
        Seconds; only differences have a meaning.

    Example:
        >>> now(torch.device("cpu")) <= now(torch.device("cpu"))
        True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
