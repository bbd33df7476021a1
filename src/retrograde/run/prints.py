"""Fingerprints of what steps computed, compared when the steps run again (rule 11).

The first pass of a cell is checked whole, and a later one in every eighth step, by rotation. States
are handed on, so what differs in one step is mostly seen in the next one that is checked. Of a long
sequence at most :data:`_MOST` steps are checked, and fewer on a GPU, where numbers take memory.
"""

from dataclasses import dataclass, field

from retrograde.errors import RetrogradeError
from retrograde.replay.fingerprints import Fingerprint, fingerprint, verify
from retrograde.replay.surroundings import Surroundings
from retrograde.replay.trees import Tensors, distinct

_MOST = 4096
_MOST_ON_A_GPU = 64
_SHARE = 8


@dataclass
class Prints:
    """The fingerprints of one pass, the ``turn``-th of its cell. It can be called as an ``Emit``
    by steps that run again. ``per_call`` is the number of steps of a call."""

    length: int
    turn: int
    surroundings: Surroundings
    per_call: int = 1
    found: dict[int, list[Fingerprint]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.most = _MOST_ON_A_GPU if self.surroundings.device.type == "cuda" else _MOST
        self.stride = max(_SHARE if self.turn else 1, -(-self.length // self.most))

    def covers(self, start: int, stop: int) -> bool:
        """Return whether some step of a range is checked."""
        return -(start + self.turn) % self.stride < stop - start

    def __call__(self, start: int, stop: int, outputs: Tensors, state: Tensors) -> None:
        """Note what a step computed, or compare it with what it computed before."""
        if (start + self.turn) % self.stride:
            return
        then = self.found.get(start)
        if then is None:
            self.found[start] = [fingerprint(t) for t in distinct((*outputs, *state))]
            if len(self.found) > 2 * self.most:  # the length was not known
                self.stride *= 2
                kept = (k for k in self.found if not (k + self.turn) % self.stride)
                self.found = {k: self.found[k] for k in kept}
            return
        now = distinct((*outputs, *state))
        if len(now) != len(then):
            raise self._differs(start)
        for value, t in zip(then, now, strict=True):
            verify(value, t, lambda: self._differs(start))

    def _differs(self, call: int) -> RetrogradeError:
        steps = f"step {call}"
        if self.per_call > 1:
            start = call * self.per_call
            steps = f"one of the steps {start} … {start + self.per_call - 1}"
        return self.surroundings.differs(f"{steps} of the cell")
