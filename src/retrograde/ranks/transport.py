"""Messages between ranks: one element at a time, from one rank to another or to all.

:class:`Links` is the interface, and :class:`Parcel` takes any element apart to send it.
:func:`simulate` links threads of one process, with a latency and a bandwidth, for tests. The links
of processes are in :mod:`retrograde.ranks.group_transport`. All links count what they send.
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
    """Counts of what one rank has sent.

    Attributes:
        messages: the number of messages.
        sent_bytes: bytes of tensors; a message of a process group has 2,048 bytes more.
    """

    messages: int = 0
    sent_bytes: int = 0


@runtime_checkable
class Links(Protocol):
    """The links of one rank to the others."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def traffic(self) -> Traffic:
        """The counts of what this rank has sent."""

    def send(self, element: Any, to: int) -> None:
        """Send an element, which must not be written to until the other rank has received it."""

    def receive(self, source: int) -> Any:
        """Return the next element from a rank.

        Raises:
            RankError: it does not answer.
        """

    def gather(self, element: Any) -> list[Any]:
        """Return the elements of all ranks, in their order.

        Raises:
            RankError: a rank does not answer.
        """

    def add_up(self, tensor: Tensor) -> None:
        """Overwrite a tensor by its sum over all ranks, the same bits on each.

        Raises:
            RankError: a rank does not answer.
        """

    def flush(self) -> None:
        """Wait until all sent messages are received.

        Raises:
            RankError: a rank does not answer.
        """


@dataclass
class Parcel:
    """An element taken apart to be sent.

    Attributes:
        letter: the element without the numbers of its tensors.
        tensors: the tensors, contiguous.

    Example:
        >>> parcel = Parcel.of({"a": torch.ones(2), "b": 3})
        >>> Parcel.open(parcel.letter, parcel.block())
        {'a': tensor([1., 1.]), 'b': 3}
    """

    letter: bytes
    tensors: list[Tensor]

    @classmethod
    def of(cls, element: Any) -> "Parcel":
        """Take an element apart; it may be anything that can be pickled."""
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
        """The bytes of the tensors."""
        return sum(t.nbytes for t in self.tensors)

    def block(self) -> Tensor:
        """Return the tensors as one block of bytes; a single tensor is not copied."""
        device = self.tensors[0].device if self.tensors else None
        parts = [t.reshape(-1).view(torch.uint8).to(device) for t in self.tensors if t.numel()]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def open(letter: bytes, block: Tensor, gpu: str | torch.device = "cuda") -> Any:
        """Put the element together again, on the kinds of device that its tensors come from.
        Tensors are views into the block where possible. Those of any GPU go to ``gpu``."""
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
    """Return a tensor on a kind of device; a tensor on any device of that kind stays there."""
    there = tensor.device.type == kind
    return tensor if there else tensor.to(gpu if kind == "cuda" else kind)


@dataclass(eq=False)
class Simulated:
    """Links between threads, made by :func:`simulate`.

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
    """Run the work of each rank in a thread.

    Args:
        size: the number of ranks.
        run: called with each rank's links.
        latency: seconds of a message.
        bandwidth: bytes a second; None where they take no time.
        timeout: seconds after which a rank that does not answer counts as lost.

    Returns:
        The result of each call.

    Raises:
        RankError: there is no rank, or one does not answer. Errors of ``run`` are raised again.

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
