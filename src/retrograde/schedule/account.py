"""Count what is held and what is spent while a schedule is carried out.

:class:`_OfUnits` counts the equal steps of a recurrence in the papers' units, after each action.
:class:`_OfChain` counts the unequal layers of a :class:`~retrograde.schedule.chain.Chain` in bytes
and seconds, within actions too. Both assume that the actions are legal, as
:mod:`retrograde.schedule.simulate` checks.

*Bytes of a chain.* Each hidden state counts once, while it is current, stored, or held by something
else: a neighbouring internal state that refers to it, or a held state that hands it on. The
gradient of a state is held from the backward pass of its layer until that of the layer before.
The transient memory of a layer counts while the layer runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

from retrograde.errors import ScheduleError
from retrograde.schedule.chain import Chain

__all__ = ["Account", "Units", "account_of"]


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a schedule's peak; raises ScheduleError if beta exceeds alpha.

    Args:
        alpha: an internal state whose input hidden state is not in memory (α).
        beta: an internal state whose input hidden state is in memory already (β).
        core: the working core, the internal state of the step being backpropagated: 0 where
            it is not counted (HSM, MSM), 1 where it takes a slot (ISM).
        initial: the stored initial state: as ``state`` for HSM and MSM, 0 for ISM.
        state: every other stored hidden state.
    """

    alpha: int = 2
    beta: int = 1
    core: int = 0
    initial: int = 1
    state: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise ScheduleError(
                    f"the unit {field.name} is {value!r}: expected an integer, 0 or more"
                )
        if self.beta > self.alpha:
            raise ScheduleError(
                f"beta is {self.beta} and alpha is {self.alpha}: an internal state without its "
                "input cannot be larger than with it; expected beta <= alpha"
            )


class Account(Protocol):
    """The account of one replay: bytes or units that are held, and seconds since the start.
    ``held`` is held now, and ``high`` is the most that the last action held. ``seconds`` is 0 where
    steps have no time."""

    held: int
    high: int
    seconds: float

    def advance(self, start: int, stop: int) -> None: ...

    def record(self, start: int, stop: int, *, resting: bool, in_core: bool) -> None:
        """Record a range.

        Args:
            start, stop: the steps of the range.
            resting: whether the state before the range is kept in any case.
            in_core: whether the last step is backpropagated at once.
        """
        ...

    def store(self, at: int) -> None: ...

    def load(self, at: int) -> None: ...

    def free(self, at: int) -> None: ...

    def backward(self, start: int, stop: int) -> None: ...

    def keeps_output(self, step: int) -> bool:
        """Whether a step's internal state holds the step's output."""
        ...


def account_of(units: Units | Chain, length: int) -> Account:
    """Return an empty account, for the start of a replay."""
    return _OfChain(units) if isinstance(units, Chain) else _OfUnits(units, length)


class _OfUnits:
    def __init__(self, units: Units, length: int) -> None:
        self.units = units
        self.prices = [0] * length  # the units that each recorded step takes
        self.held = self.high = 0
        self.seconds = 0.0

    def advance(self, start: int, stop: int) -> None:
        self.high = self.held

    def record(self, start: int, stop: int, *, resting: bool, in_core: bool) -> None:
        units, prices = self.units, self.prices
        prices[start:stop] = [units.beta] * (stop - start)
        if not resting:
            prices[start] = units.alpha
        if in_core:
            prices[stop - 1] = units.core
        self._hold(sum(prices[start:stop]))

    def store(self, at: int) -> None:
        self._hold(self._price(at))

    def load(self, at: int) -> None:
        self.high = self.held

    def free(self, at: int) -> None:
        self._hold(-self._price(at))

    def backward(self, start: int, stop: int) -> None:
        self._hold(-sum(self.prices[start:stop]))

    def keeps_output(self, step: int) -> bool:
        return True

    def _hold(self, more: int) -> None:
        self.held += more
        self.high = self.held

    def _price(self, at: int) -> int:
        return self.units.state if at else self.units.initial


class _OfChain:
    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.states, self.gradients = chain.state_bytes, chain.gradient_bytes
        self.tapes = chain.tape_bytes
        self.hands_on = ((), *chain.hands_on[:-1], ())  # the last state is the caller's
        self.reasons = [0] * (len(chain) + 1)  # how many holders each hidden state has
        self.held = self.high = chain.overhead_bytes
        self.seconds = 0.0
        self.current: int | None = None
        self.frontier: int | None = None  # the state whose gradient is held
        self._move(0)

    def advance(self, start: int, stop: int) -> None:
        chain = self.chain
        self.high = self.held
        for k in range(start, stop):
            self._touch(self.states[k + 1] + chain.forward_transient_bytes[k])
            self._move(k + 1)
            self.seconds += chain.forward_seconds[k]

    def record(self, start: int, stop: int, *, resting: bool, in_core: bool) -> None:
        chain = self.chain
        self.high = self.held
        for k in range(start, stop):
            own = self.tapes[k] + self.states[k + 1]
            self._touch(own + chain.record_transient_bytes[k])
            self.held += self.tapes[k]
            self._refer(k, self._hold)
            self._move(k + 1)
            self.seconds += chain.forward_seconds[k]

    def store(self, at: int) -> None:
        self._hold(at)
        self.high = self.held

    def load(self, at: int) -> None:
        self._move(at)
        self.high = self.held

    def free(self, at: int) -> None:
        self._release(at)
        self.high = self.held

    def backward(self, start: int, stop: int) -> None:
        chain = self.chain
        self._move(None)
        if self.frontier is None:
            self.held += self.gradients[stop]
        self.high = self.held
        for k in range(stop - 1, start - 1, -1):
            own = self.gradients[k] + chain.backward_transient_bytes[k]
            alone = chain.keeps_input[k] and self.reasons[k] == 1
            self._touch(own - chain.release_bytes[k] if alone else own)
            self.held += self.gradients[k] - self.gradients[k + 1] - self.tapes[k]
            self._refer(k, self._release)
            self.seconds += chain.backward_seconds[k]
        self.frontier = start

    def keeps_output(self, step: int) -> bool:
        return self.chain.keeps_output[step]

    def _refer(self, k: int, change: Callable[[int], None]) -> None:
        """Apply ``change`` to the hidden states that the internal state of layer k refers to."""
        if self.chain.keeps_input[k]:
            change(k)
        if self.chain.keeps_output[k]:
            change(k + 1)

    def _move(self, to: int | None) -> None:
        before, self.current = self.current, to
        if to is not None:
            self._hold(to)
        if before is not None:
            self._release(before)

    def _hold(self, at: int) -> None:
        if not self.reasons[at]:
            self.held += self.states[at]
            for handed in self.hands_on[at]:
                self._hold(handed)
        self.reasons[at] += 1

    def _release(self, at: int) -> None:
        self.reasons[at] -= 1
        if not self.reasons[at]:
            self.held -= self.states[at]
            for handed in self.hands_on[at]:
                self._release(handed)

    def _touch(self, more: int) -> None:
        self.high = max(self.high, self.held + more)
