"""What a command may ask of the machine: a device, threads, processes, and memory."""

import os

from retrograde.errors import RetrogradeError

__all__ = ["check_device", "check_parallel", "is_out_of_memory", "use_threads"]

_PER_PROCESSOR = 4  # threads or processes; with very many more, torch crashes


def check_device(device: str) -> None:
    """Raise RetrogradeError unless torch can compute on ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Example:
        >>> check_device("cpu")
        >>> check_device("abacus")
        Traceback (most recent call last):
        retrograde.errors.RetrogradeError: --device is 'abacus': expected cpu or cuda
    """
    import torch

    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (":" in device and not number.isdecimal()):
        raise RetrogradeError(f"--device is {device!r}: expected cpu or cuda")
    if kind == "cuda" and torch.cuda.device_count() <= int(number or 0):
        raise RetrogradeError(
            f"--device is {device!r}, and torch finds {torch.cuda.device_count()} CUDA devices: "
            "use --device cpu"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that torch's allocator, on CPU or CUDA, lacks memory.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("size mismatch"))
        (True, False)
    """
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("allocate memory" in text or "alloc_cpu" in text)


def use_threads(threads: int | None) -> None:
    """Set torch's number of threads; None leaves it. See :func:`check_parallel`."""
    import torch

    if threads is not None:
        check_parallel("--threads", threads)
        torch.set_num_threads(threads)


def check_parallel(option: str, number: int) -> None:
    """Refuse a nonsensical number of threads or processes, before any of them starts.

    Args:
        option: the option that asks for them, for the message.
        number: the number.

    Raises:
        RetrogradeError: there would be none, or more than four for each processor.
    """
    found = _processors()
    most = _PER_PROCESSOR * found
    if not 1 <= number <= most:
        raise RetrogradeError(
            f"{option} is {number}: expected 1 to {most}, up to {_PER_PROCESSOR} for each of the "
            f"{found} processors that this process may use; name a number in that range, or leave "
            f"{option} out"
        )


def _processors() -> int:
    """Return how many processors this process may use, perhaps fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
