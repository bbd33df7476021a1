"""Checks of what a call saves: noted when it first runs, compared when it runs again (rule 11).

The first call is checked whole. Later ones check what their last node saves, and one of sixteen
other tensors, each time others. Of a large tensor they check an eighth. A view of a weight is known
by the weight's version. A kernel may write a tensor after it was saved, such as the noise of
``RReLU`` or a running mean. Such a tensor is looked at when the next node of the graph is made.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from retrograde.replay.fingerprints import Fingerprint, fingerprint, verify
from retrograde.torch_private import base_of, next_node

_EVERY = 16
_WEIGHT = "a view of a weight"


@dataclass
class Reruns:
    """What is known of a unit's calls and their reruns."""

    calls: int = 0  # how many there were; measured ones are not counted
    counts: bool = True  # whether calls are counted
    ends_early: bool | None = None  # whether the last wanted tensor leaves nothing undone
    final: dict[int, bool] = field(default_factory=dict)  # whether tensors are written before that
    last: list[int] = field(default_factory=list)  # the tensors that the last node saves
    weights: set[int] = field(default_factory=set)  # the views of weights
    latest: tuple[Any, Any] = (None, None)  # context and graph of the last call with its own casts


class _Watched:
    """Tensors in the order in which they are saved. Those of the newest node may be unwritten."""

    def __init__(self) -> None:
        self.number, self._node = 0, -1
        self._unwritten: list[tuple[int, Tensor]] = []

    def _begin(self) -> int:
        """Return the number of the next tensor, after looking at those of earlier nodes."""
        if (node := next_node()) != self._node:
            self.settle()
            self._node = node
        self.number += 1
        return self.number - 1

    def settle(self) -> None:
        """Look at the tensors that were unwritten when they were saved."""
        waiting, self._unwritten = self._unwritten, []
        for number, t in waiting:
            self._look(number, t)

    def _look(self, number: int, t: Tensor) -> None:
        raise NotImplementedError


class Noted(_Watched):
    """The fingerprints of what a call saves, by number; None where nothing is compared."""

    def __init__(self, reruns: Reruns) -> None:
        super().__init__()
        self.reruns, self.turn = reruns, reruns.calls
        self.part = self.turn if reruns.counts else 1  # measurements compare gradients as a whole
        reruns.calls += reruns.counts
        self.prints: list[Fingerprint] = []
        self._group: list[int] = []  # saved by the newest node

    def add(self, t: Tensor) -> None:
        number, reruns = self.number, self.reruns
        if self.turn and (number + self.turn) % _EVERY and number not in reruns.last:
            if self._unwritten:
                self._begin()
            self.number = number + 1
            self.prints.append(_WEIGHT if number in reruns.weights else None)
            return
        self._begin()
        self._group.append(number)
        base = base_of(t)
        if base is not t and base.is_leaf and base.requires_grad:
            reruns.weights.add(number)
            self.prints.append(_WEIGHT)
            return
        reruns.weights.discard(number)
        self.prints.append(fingerprint(t, self.part))
        if not reruns.final.get(number):
            self._unwritten.append((number, t.detach()))

    def settle(self) -> None:
        super().settle()
        self._group, group = [], self._group
        if self.turn == 0 and group:
            self.reruns.last = group

    def _look(self, number: int, t: Tensor) -> None:
        before, self.prints[number] = self.prints[number], fingerprint(t, self.part)
        self.reruns.final.setdefault(number, bool(before == self.prints[number]))


class Compared(_Watched):
    """What a rerun saves, compared with what was noted. ``differs`` makes the error."""

    def __init__(self, noted: Noted, differs: Callable[[], Exception]) -> None:
        super().__init__()
        self.noted, self.differs = noted, differs

    def add(self, t: Tensor) -> bool:
        """Compare a tensor that is saved. Return whether it is known to be the right one."""
        then = self.noted.prints[self.number]
        if (then is None or then is _WEIGHT) and not self._unwritten:
            self.number += 1
            return then is _WEIGHT
        number = self._begin()
        if then is None or then is _WEIGHT:
            return then is _WEIGHT
        if not self.noted.reruns.final.get(number):
            self._unwritten.append((number, t.detach()))
            return False
        self._look(number, t)
        return True

    def _look(self, number: int, t: Tensor) -> None:
        verify(self.noted.prints[number], t, self.differs, self.noted.part)
