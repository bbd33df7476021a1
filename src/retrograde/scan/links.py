"""How ranks talk: one element at a time, from one to another, or from each to all.

:class:`GroupLinks` does it over a ``torch.distributed`` process group, with any element: what is
not a tensor in it goes ahead in a short letter, the tensors follow as one block of bytes from where
they lie. :func:`simulate` does it between threads of one process, with the latency and bandwidth
that it is told: for tests, and to see what is not at hand.

Every link counts what it sends.
"""

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from queue import Empty, Queue
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, distributed

from retrograde.errors import RankError

__all__ = ["GroupLinks", "Links", "Parcel", "Simulated", "Traffic", "simulate"]

T = TypeVar("T")

_LETTER = 2048  # bytes, of which the first sixteen say how many follow
_UNDERWAY = 8  # messages to one rank that need not have been received yet
_PROBE = 1729  # the tag of a message that nobody waits for
_A_MOMENT = 1.0  # seconds, within which others find out too


@dataclass
class Traffic:
    """What one rank has sent.

    Attributes:
        messages: how many.
        sent_bytes: of tensors; a message of a process group has a letter of 2,048 bytes besides.
    """

    messages: int = 0
    sent_bytes: int = 0


@runtime_checkable
class Links(Protocol):
    """The links of one rank to the others."""

    @property
    def rank(self) -> int:
        """This one, from 0 on."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def traffic(self) -> Traffic:
        """What this one has sent."""

    def send(self, element: Any, to: int) -> None:
        """Send an element; it must not be written to until the other has received it."""

    def receive(self, source: int) -> Any:
        """The next element from a rank.

        Raises:
            RankError: it does not answer.
        """

    def gather(self, element: Any) -> list[Any]:
        """The elements of all ranks, in their order.

        Raises:
            RankError: one does not answer.
        """

    def add_up(self, tensor: Tensor) -> None:
        """Put the sum over all ranks in a tensor's place, the same bits on each.

        Raises:
            RankError: a rank does not answer.
        """

    def flush(self) -> None:
        """Wait until all that was sent has been received.

        Raises:
            RankError: a rank does not answer.
        """


@dataclass
class Parcel:
    """An element taken apart to be sent.

    Attributes:
        letter: all of it but the numbers in its tensors.
        tensors: these, contiguous.

    Example:
        >>> parcel = Parcel.of({"a": torch.ones(2), "b": 3})
        >>> Parcel.open(parcel.letter, parcel.block())
        {'a': tensor([1., 1.]), 'b': 3}
    """

    letter: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, element: Any) -> "Parcel":
        """Take an element apart; anything that can be pickled."""
        letter, tensors = BytesIO(), list[Tensor]()

        class Pickler(pickle.Pickler):
            def persistent_id(self, part: Any) -> Any:
                if not isinstance(part, Tensor):
                    return None
                tensors.append(part.detach().contiguous())
                return part.dtype, tuple(part.shape)

        Pickler(letter, protocol=5).dump(element)
        return cls(letter.getvalue(), tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors)

    def block(self) -> Tensor:
        """The tensors as one block of bytes; not copied where there is only one."""
        parts = [t.reshape(-1).view(torch.uint8) for t in self.tensors if t.numel()]
        if len(parts) == 1:
            return parts[0]
        device = self.tensors[0].device if self.tensors else None
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def open(letter: bytes, block: Tensor) -> Any:
        """The element again, its tensors views into the block."""
        position = 0

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, told: Any) -> Tensor:
                nonlocal position
                dtype, shape = told
                start = position
                position += torch.Size(shape).numel() * dtype.itemsize
                part = block[start:position]
                if start % dtype.itemsize:
                    part = part.clone()
                return part.view(dtype).view(shape)

        return Unpickler(BytesIO(letter)).load()


class GroupLinks:
    """The links of a ``torch.distributed`` process group.

    Args:
        group: a process group; None for all ranks.
        device: where tensors are received: the CPU for gloo, a GPU for NCCL; by default, as the
            group needs it.

    Raises:
        RankError: there is no process group.
    """

    def __init__(
        self, group: distributed.ProcessGroup | None = None, device: torch.device | None = None
    ) -> None:
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RankError(
                "there is no process group: expected torch.distributed.init_process_group() to "
                "have been called in each process; start the program with torchrun"
            )
        self.group: Any = group if group is not None else distributed.group.WORLD
        self.rank = distributed.get_rank(self.group)
        if self.rank < 0:
            raise RankError("this process is not in the group: expected one of its ranks to call")
        self.size = distributed.get_world_size(self.group)
        self.traffic = Traffic()
        on_gpu = distributed.get_backend(self.group) == "nccl"
        own = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.device = device if device is not None else own
        self._underway: list[tuple[Any, int, Tensor]] = []  # the tensor must not go before

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
        return Parcel.open(letter.cpu().numpy().tobytes(), block)

    def gather(self, element: Any) -> list[Any]:
        parcel = Parcel.of(element)
        mine = torch.tensor([len(parcel.letter), parcel.nbytes], device=self.device)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        self._together(lambda: distributed.all_gather(told, mine, group=self.group))
        sizes = [(int(a), int(b)) for a, b in told]
        longest = max(a + b for a, b in sizes)
        whole = torch.empty(longest, dtype=torch.uint8, device=self.device)
        start = len(parcel.letter)
        whole[:start] = _bytes(parcel.letter, self.device)
        whole[start : start + parcel.nbytes] = parcel.block().to(self.device)
        found = [torch.empty_like(whole) for _ in range(self.size)]
        self._together(lambda: distributed.all_gather(found, whole, group=self.group))
        self.traffic.messages += 1
        self.traffic.sent_bytes += parcel.nbytes
        return [
            Parcel.open(each[:a].cpu().numpy().tobytes(), each[a : a + b].clone())
            for each, (a, b) in zip(found, sizes, strict=True)
        ]

    def flush(self) -> None:
        self._wait(self._underway)

    def add_up(self, tensor: Tensor) -> None:
        self._together(lambda: distributed.all_reduce(tensor, group=self.group))

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

    def _with(self, other: int, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error, other) from error

    def _together(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise self._lost(error, None) from error

    def _lost(self, error: RuntimeError, other: int | None) -> RankError:
        """Find out which rank it was that ended, or hangs, and leave word for the others.

        Whoever notices leaves word at once, and then of whom it was. So of the ranks to whom the
        link is broken it is one that has left no word; or else one that comes too late to.
        """
        self._leave_word(self.rank)
        time.sleep(_A_MOMENT / 4)
        asked = self._broken() if other is None else [other, *self._broken()]
        said = {rank: self._word_of(rank) for rank in asked}
        named = [word for rank, word in said.items() if word is not None and word != rank]
        silent = [rank for rank, word in said.items() if word is None]
        if not named and not silent:
            time.sleep(_A_MOMENT)
            silent = [r for r in range(self.size) if r != self.rank and self._word_of(r) is None]
        first = next(iter([*named, *silent]), None)
        if first is not None:
            self._leave_word(first)
        who = "another rank" if first is None else f"rank {first}"
        return RankError(
            f"rank {self.rank} cannot go on: {who} has ended, or did not answer within the group's "
            f"timeout; see why, and start again from what was saved ({_first_line(error)})"
        )

    def _broken(self) -> list[int]:
        """The ranks to which nothing can be sent any more."""
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

    def _word_of(self, rank: int) -> int | None:
        """Whom a rank has named; itself as long as it does not know, None if it said nothing."""
        try:
            store, key = self.group.get_group_store(), f"retrograde/ended/{rank}"
            return int(store.get(key)) if store.check([key]) else None
        except (RuntimeError, ValueError):  # the store has ended too
            return None

    def _leave_word(self, first: int) -> None:
        with suppress(RuntimeError):
            self.group.get_group_store().set(f"retrograde/ended/{self.rank}", str(first))


def _letter(parcel: Parcel, device: torch.device) -> Tensor:
    head = torch.zeros(_LETTER, dtype=torch.uint8)
    head[:16] = torch.tensor([len(parcel.letter), parcel.nbytes]).view(torch.uint8)
    if len(parcel.letter) <= _LETTER - 16:
        head[16 : 16 + len(parcel.letter)] = _bytes(parcel.letter, torch.device("cpu"))
    return head.to(device)


def _bytes(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass
class Simulated:
    """Links between threads.

    Args:
        rank: of this one.
        boxes: by sender and receiver; shared by all.
        latency: of a message, in seconds.
        bandwidth: bytes a second; None where they take no time.
        timeout: seconds until a rank that does not answer is given up.
    """

    rank: int
    boxes: list[list["Queue[tuple[float, Any]]"]]
    latency: float = 0.0
    bandwidth: float | None = None
    timeout: float = 60.0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        return len(self.boxes)

    def send(self, element: Any, to: int) -> None:
        size = Parcel.of(element).nbytes
        takes = self.latency + (size / self.bandwidth if self.bandwidth else 0.0)
        self.boxes[self.rank][to].put((time.perf_counter() + takes, element))
        self.traffic.messages += 1
        self.traffic.sent_bytes += size

    def receive(self, source: int) -> Any:
        try:
            there, element = self.boxes[source][self.rank].get(timeout=self.timeout)
        except Empty:
            raise RankError(
                f"rank {self.rank} lost its link to rank {source}: expected that one to answer "
                f"within {self.timeout:g} s"
            ) from None
        time.sleep(max(0.0, there - time.perf_counter()))
        return element

    def gather(self, element: Any) -> list[Any]:
        others = [k for k in range(self.size) if k != self.rank]
        for to in others:
            self.send(element, to)
        return [element if k == self.rank else self.receive(k) for k in range(self.size)]

    def add_up(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.gather(tensor.clone())).sum(0))

    def flush(self) -> None:
        pass


def simulate(
    size: int,
    run: Callable[[Simulated], T],
    *,
    latency: float = 0.0,
    bandwidth: float | None = None,
    timeout: float = 60.0,
) -> list[T]:
    """Run what ranks would run, each in a thread.

    Args:
        size: ranks.
        run: called with each rank's links.
        latency: of a message, in seconds.
        bandwidth: bytes a second; None where they take no time.
        timeout: seconds until a rank that does not answer is given up.

    Returns:
        What each call returned.

    Raises:
        RankError: there is no rank, or one does not answer. Any error of ``run`` is raised again.

    Example:
        >>> def pass_on(links):
        ...     if links.rank < links.size - 1:
        ...         links.send(links.rank, to=links.rank + 1)
        ...     return links.receive(links.rank - 1) if links.rank else None
        >>> simulate(3, pass_on)
        [None, 0, 1]
    """
    if size < 1:
        raise RankError(f"got {size} ranks: expected at least one")
    boxes: list[list[Queue[tuple[float, Any]]]] = [
        [Queue() for _ in range(size)] for _ in range(size)
    ]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = run(Simulated(rank, boxes, latency, bandwidth, timeout))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
