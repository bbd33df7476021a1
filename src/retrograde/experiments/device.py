"""What an experiment runs on: whether the device is there, and with how many threads."""

import torch

from retrograde.experiments.options import ExperimentError, check_parallel

__all__ = ["check_device", "use_threads"]


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


def use_threads(threads: int | None) -> None:
    """Let torch compute with some threads.

    Args:
        threads: how many; None leaves it to torch.

    Raises:
        ExperimentError: there would be none, or far more than processors.

    Example:
        >>> use_threads(None)
    """
    if threads is not None:
        check_parallel("--threads", threads)
        torch.set_num_threads(threads)
