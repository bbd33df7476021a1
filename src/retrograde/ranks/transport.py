"""How ranks talk: one element at a time, from one to another, or from each to all.

:class:`Links` says what ranks can do, :class:`Parcel` takes any element apart to be sent, and
:func:`simulate` links threads of one process, with a latency and a bandwidth, for tests. The links
of processes are in :mod:`retrograde.ranks.group_transport`. Every link counts what it sends.
"""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from queue import Empty, Queue
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from retrograde.errors import RankError

__all__ = ["Links", "Parcel", "Simulated", "Traffic", "simulate"]

T = TypeVar("T")


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
                return part.dtype, tuple(part.shape), part.device.type

        Pickler(letter, protocol=5).dump(element)
        return cls(letter.getvalue(), tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors)

    def block(self) -> Tensor:
        """The tensors as one block of bytes; not copied where there is only one."""
        device = self.tensors[0].device if self.tensors else None
        parts = [t.reshape(-1).view(torch.uint8).to(device) for t in self.tensors if t.numel()]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def open(letter: bytes, block: Tensor, gpu: str | torch.device = "cuda") -> Any:
        """The element again, its tensors views into the block, or moved to the kind of device that
        they come from; ``gpu`` is the one of those that come from any."""
        position = 0

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, told: Any) -> Tensor:
                nonlocal position
                dtype, shape, kind = told
                start = position
                position += torch.Size(shape).numel() * dtype.itemsize
                part = block[start:position]
                if start % dtype.itemsize:
                    part = part.clone()
                return _brought(part.view(dtype).view(shape), kind, gpu)

        return Unpickler(BytesIO(letter)).load()


def _brought(tensor: Tensor, kind: str, gpu: str | torch.device) -> Tensor:
    """A tensor on a kind of device. Where it is there it stays, on the current one or another."""
    there = tensor.device.type == kind
    return tensor if there else tensor.to(gpu if kind == "cuda" else kind)


@dataclass(eq=False)
class Simulated:
    """Links between threads, as :func:`simulate` makes them.

    All ranks share the boxes: one queue for each sender and receiver.
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
