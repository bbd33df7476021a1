"""Links over a ``torch.distributed`` process group: gloo between processes, NCCL between GPUs.

An element is sent as a short letter, which holds all but its tensors, and one block of their bytes.
Sending does not block while few messages are underway.

The error of torch may only say that a connection broke. So each rank that sees a failure records it
in the group's store; the rank without a record failed first.

The links refer to the group weakly. ``destroy_process_group()`` joins gloo's threads only if
nothing else holds the group, and a thread that drops a tensor while Python ends aborts the process.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from retrograde.errors import RankError
from retrograde.ranks.transport import Parcel, Traffic

__all__ = ["GroupLinks"]

T = TypeVar("T")

_LETTER = 2048  # bytes; the first sixteen are the lengths of the letter and of the block
_UNDERWAY = 8  # messages to one rank that may be in transit
_PROBE = 1729  # the tag of a message that no rank receives
_A_MOMENT = 1.0  # seconds within which other ranks notice a failure too


class GroupLinks:
    """The links of a ``torch.distributed`` process group.

    Args:
        group: a process group; None for all ranks.
        device: where messages are received: the CPU for gloo, a GPU for NCCL; by default, as the
            group needs it. From there tensors go to the kind of device that they come from.
        module: the module that the ranks run. Its present GPU is used, whichever is the
            process's current one.

    Raises:
        RankError: there is no process group.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup | None = None,
        device: torch.device | None = None,
        *,
        module: nn.Module | None = None,
    ) -> None:
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
        self.traffic = Traffic()
        self.gpu = _gpu_of(module)
        needed = self.gpu if distributed.get_backend(group) == "nccl" else "cpu"
        self.device = torch.device(needed) if device is None else device
        self._underway: list[tuple[Any, int, Tensor]] = []  # keeps the tensor alive

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            RankError: it has been destroyed.
        """
        group = self._group()
        if group is None:
            raise RankError(
                "the process group has been destroyed: expected it to last; make the module again "
                "with a new group"
            )
        return group

    def send(self, element: Any, to: int) -> None:
        parcel = Parcel.of(element)
        self._wait([sent for sent in self._underway if sent[1] == to][:-_UNDERWAY])
        self._post(_letter(parcel, self.device), to)
        if len(parcel.letter) > _LETTER - 16:
            self._post(_bytes(parcel.letter, self.device), to)
        if parcel.nbytes:
            self._post(parcel.block().to(self.device), to)
        self.traffic.messages += 1
        self.traffic.sent_bytes += parcel.nbytes

    def receive(self, source: int) -> Any:
        head = self._take(_LETTER, source)
        length, size = head[:16].cpu().view(torch.int64).tolist()
        letter = head[16 : 16 + length] if length <= _LETTER - 16 else self._take(length, source)
        block = self._take(size, source)
        return Parcel.open(letter.cpu().numpy().tobytes(), block, self.gpu)

    def gather(self, element: Any) -> list[Any]:
        parcel = Parcel.of(element)
        mine = torch.tensor([len(parcel.letter), parcel.nbytes], device=self.device)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        self._with(None, lambda: distributed.all_gather(told, mine, group=self.group))
        sizes = [(int(a), int(b)) for a, b in told]
        longest = max(a + b for a, b in sizes)
        whole = torch.empty(longest, dtype=torch.uint8, device=self.device)
        start = len(parcel.letter)
        whole[:start] = _bytes(parcel.letter, self.device)
        whole[start : start + parcel.nbytes] = parcel.block().to(self.device)
        found = [torch.empty_like(whole) for _ in range(self.size)]
        self._with(None, lambda: distributed.all_gather(found, whole, group=self.group))
        self.traffic.messages += 1
        self.traffic.sent_bytes += parcel.nbytes
        return [
            Parcel.open(each[:a].cpu().numpy().tobytes(), each[a : a + b].clone(), self.gpu)
            for each, (a, b) in zip(found, sizes, strict=True)
        ]

    def flush(self) -> None:
        self._wait(self._underway)

    def add_up(self, tensor: Tensor) -> None:
        there = tensor.to(self.device)
        self._with(None, lambda: distributed.all_reduce(there, group=self.group))
        if there is not tensor:
            tensor.copy_(there)

    def _post(self, message: Tensor, to: int) -> None:
        work = self._with(to, lambda: distributed.isend(message, group=self.group, group_dst=to))
        self._underway.append((work, to, message))

    def _wait(self, sent: list[tuple[Any, int, Tensor]]) -> None:
        for work, to, _ in sent:
            self._with(to, work.wait)
        done = {id(work) for work, _, _ in sent}
        self._underway = [each for each in self._underway if id(each[0]) not in done]

    def _take(self, size: int, source: int) -> Tensor:
        message = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            self._with(
                source, lambda: distributed.recv(message, group=self.group, group_src=source)
            )
        return message

    def _with(self, other: int | None, call: Callable[[], T]) -> T:
        """Make a call of torch's that involves another rank, or all of them (None)."""
        try:
            return call()
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lost(error, other) from error

    def _lost(self, error: RuntimeError, other: int | None) -> RankError:
        """Return an error that names the rank that ended or hangs.

        Each rank that sees a failure records it at once, and again when it knows whose it was. So
        among the ranks whose link is broken, the rank without a record failed first.
        """
        self._record_failed(self.rank)
        time.sleep(_A_MOMENT / 4)
        asked = self._broken() if other is None else [other, *self._broken()]
        records = {rank: self._record_of(rank) for rank in asked}
        named = [r for rank, r in records.items() if r is not None and r != rank]
        silent = [rank for rank, record in records.items() if record is None]
        if not named and not silent:
            time.sleep(_A_MOMENT)
            silent = [r for r in range(self.size) if r != self.rank and self._record_of(r) is None]
        first = next(iter([*named, *silent]), None)
        if first is not None:
            self._record_failed(first)
        who = "another rank" if first is None else f"rank {first}"
        return RankError(
            f"rank {self.rank} cannot continue: {who} has ended, or did not answer within the "
            f"group's timeout; find the cause, and start again from the last checkpoint "
            f"({_first_line(error)})"
        )

    def _broken(self) -> list[int]:
        """Return the ranks to which nothing can be sent any more."""
        found = []
        for rank in range(self.size):
            try:
                if rank != self.rank:
                    distributed.isend(
                        torch.zeros(1, device=self.device),
                        group=self.group,
                        group_dst=rank,
                        tag=_PROBE,
                    )
            except RuntimeError:
                found.append(rank)
        return found

    def _record_of(self, rank: int) -> int | None:
        """Return the rank that another rank recorded.

        It is that rank itself while it does not know whose failure it was, and None without a
        record.
        """
        try:
            store, key = self.group.get_group_store(), f"retrograde/ended/{rank}"
            return int(store.get(key)) if store.check([key]) else None
        except (RuntimeError, ValueError):  # the store is gone too
            return None

    def _record_failed(self, first: int) -> None:
        with suppress(RuntimeError):
            self.group.get_group_store().set(f"retrograde/ended/{self.rank}", str(first))


def _gpu_of(module: nn.Module | None) -> torch.device:
    """Return the GPU of a module; the process's current one if the module has none."""
    parameters = [] if module is None else module.parameters()
    return next((p.device for p in parameters if p.is_cuda), torch.device("cuda"))


def _letter(parcel: Parcel, device: torch.device) -> Tensor:
    head = torch.zeros(_LETTER, dtype=torch.uint8, device="cpu")
    head[:16] = torch.tensor([len(parcel.letter), parcel.nbytes], device="cpu").view(torch.uint8)
    if len(parcel.letter) <= _LETTER - 16:
        head[16 : 16 + len(parcel.letter)] = _bytes(parcel.letter, torch.device("cpu"))
    return head.to(device)


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
