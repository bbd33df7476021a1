"""The device that an experiment runs on: whether it is there."""

import torch

from retrograde.experiments.options import ExperimentError

__all__ = ["check_device"]


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
