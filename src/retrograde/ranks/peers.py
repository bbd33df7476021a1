"""The other ranks of a process group: plain calls of ``torch.distributed``, and one error.

Tensors go to the neighbour and are summed over all ranks; every rank knows their shapes. A small
message of arguments precedes each call, so ranks that disagree find out before any work.

Errors and timeouts are torch's own. Where another rank has ended, failed or hangs, torch raises a
``RuntimeError``, which becomes one :class:`RankError` here.

The group is referred to weakly. ``destroy_process_group()`` joins gloo's threads only if nothing
else holds the group, and a thread that is alive while Python ends aborts the process.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from retrograde.errors import RankError

T = TypeVar("T")


class Peers:
    """This rank among the others of a process group.

    Args:
        group: a process group; None for all ranks.
        module: the module that the ranks run. NCCL uses its GPU, whichever is the process's
            current one; gloo uses the CPU.

    Raises:
        RankError: there is no process group, or this process is not in it.
    """

    def __init__(self, group: distributed.ProcessGroup | None, module: nn.Module) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RankError(
                "there is no process group: expected torch.distributed.init_process_group() to "
                "have been called in each process; start the program with torchrun"
            )
        group = distributed.group.WORLD if group is None else group
        self.rank = distributed.get_rank(group)
        if self.rank < 0:
            raise RankError("this process is not in the group: expected one of its ranks to call")
        self.size = distributed.get_world_size(group)
        self._group: Callable[[], Any] = weakref.ref(group)
        on_gpu = distributed.get_backend(group) == "nccl"
        self._device = _gpu_of(module) if on_gpu else torch.device("cpu")
        self._sent: list[tuple[Any, Tensor]] = []  # keeps the tensors alive
        self._failed = False

    @property
    def last(self) -> bool:
        """Whether this is the last rank."""
        return self.rank == self.size - 1

    @property
    def group(self) -> Any:
        """The process group; RankError if it is destroyed, or an earlier pass failed here."""
        group = self._group()
        if group is None:
            raise RankError(
                "the process group has been destroyed: expected it to last; make the module again "
                "with a new group"
            )
        if self._failed:
            raise RankError(
                "an earlier pass failed on this rank, and the others wait for its rest: expected "
                "the program to end; start all ranks again from the last checkpoint"
            )
        return group

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Run this rank's part of a pass. After a failure the messages of ranks are out of step, so
        every later pass is refused."""
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def tell(self, mine: object) -> list[Any]:
        """Return what each rank tells, any object, in the order of ranks."""
        told: list[Any] = [None] * self.size
        group = self.group
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            self._checked(lambda: distributed.all_gather_object(told, mine, group=group))
        return told

    def send(self, tensor: Tensor, to: int) -> None:
        """Begin to send a tensor, which must not be written to before :meth:`flush`."""
        if tensor.numel():
            group, here = self.group, tensor.contiguous().to(self._device)
            sent = self._checked(lambda: distributed.isend(here, group=group, group_dst=to), to)
            self._sent.append((sent, here))

    def receive(self, like: Tensor, source: int) -> Tensor:
        """Return a tensor from a rank, of the shape, the type and the device of another one."""
        if not like.numel():
            return torch.empty_like(like)
        group = self.group
        received = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._checked(lambda: distributed.recv(received, group=group, group_src=source), source)
        return received.to(like.device)

    def flush(self) -> None:
        """Wait until the other ranks have received all that was sent."""
        for sent, _ in self._sent:
            self._checked(sent.wait)
        self._sent.clear()

    def add_up(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return sums over the ranks, by one message, the same bits on each."""
        if self.size == 1 or not tensors:
            return tensors
        group = self.group
        flat = torch.cat([t.reshape(-1) for t in tensors])
        there = flat.to(self._device)
        self._checked(lambda: distributed.all_reduce(there, group=group))
        sums = there.to(flat.device).split([t.numel() for t in tensors])
        return [total.view_as(t) for total, t in zip(sums, tensors, strict=True)]

    def _checked(self, call: Callable[[], T], other: int | None = None) -> T:
        """Make a call of torch's that involves another rank, or all of them (None)."""
        try:
            return call()
        except RuntimeError as error:
            who = "another rank" if other is None else f"rank {other}"
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RankError(
                f"rank {self.rank} cannot continue: {who} has ended, failed, or did not answer "
                "within the group's timeout; expected every rank to make the same calls, forward "
                "and backward; find the first error in the ranks' output, and start all of them "
                f"again from the last checkpoint ({lines[0]})"
            ) from error


def _gpu_of(module: nn.Module) -> torch.device:
    """Return the GPU of a module; the process's current one if the module has none."""
    return next((p.device for p in module.parameters() if p.is_cuda), torch.device("cuda"))
