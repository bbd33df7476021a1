"""Count what is held and what is spent while a schedule is carried out.

:class:`OfUnits` counts the equal steps of a recurrence in the papers' units, after each action.
:class:`OfChain` counts the unequal layers of a :class:`~retrograde.schedule.chain.Chain` in bytes
and seconds, within actions too. Both assume that the actions are legal, as
:mod:`retrograde.schedule.simulate` checks.

*Bytes of a chain.* Each hidden state counts once, while it is current, stored, or held by a
neighbouring internal state that refers to it. The gradient of a state is held from the backward
pass of its layer until that of the layer before.
The transient memory of a layer counts while the layer runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from retrograde.errors import ScheduleError
from retrograde.schedule.chain import Chain


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


class OfUnits:
    """The account of equal steps. ``held`` is held now, in units."""

    seconds = 0.0
    high = 0  # no more is held within an action than after it

    def __init__(self, units: Units, length: int) -> None:
        self.units = units
        self.prices = [0] * length  # the units that each recorded step takes
        self.held = 0

    def advance(self, start: int, stop: int) -> None: ...

    def record(self, start: int, stop: int, *, resting: bool, in_core: bool) -> None:
        """Record a range. ``resting`` is whether the state before it is kept in any case, and
        ``in_core`` whether the last step is backpropagated at once."""
        units, prices = self.units, self.prices
        prices[start:stop] = [units.beta] * (stop - start)
        if not resting:
            prices[start] = units.alpha
        if in_core:
            prices[stop - 1] = units.core
        self.held += sum(prices[start:stop])

    def hold(self, at: int) -> None:
        self.held += self._price(at)

    def move(self, to: int) -> None: ...

    def release(self, at: int) -> None:
        self.held -= self._price(at)

    def backward(self, start: int, stop: int) -> None:
        self.held -= sum(self.prices[start:stop])

    def _price(self, at: int) -> int:
        return self.units.state if at else self.units.initial


class OfChain:
    """The account of a chain's layers. ``held`` is held now, in bytes, ``high`` is the most since
    it was last set to 0, and ``seconds`` are those since the start."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.states, self.gradients = chain.state_bytes, chain.gradient_bytes
        self.tapes = chain.tape_bytes
        self.reasons = [0] * (len(chain) + 1)  # how many holders each hidden state has
        self.held, self.high = chain.overhead_bytes, 0
        self.seconds = 0.0
        self.current: int | None = None
        self.frontier: int | None = None  # the state whose gradient is held
        self.move(0)

    def advance(self, start: int, stop: int) -> None:
        chain = self.chain
        for k in range(start, stop):
            self._touch(self.states[k + 1] + chain.forward_transient_bytes[k])
            self.move(k + 1)
            self.seconds += chain.forward_seconds[k]

    def record(self, start: int, stop: int, *, resting: bool, in_core: bool) -> None:
        chain = self.chain
        for k in range(start, stop):
            layer_bytes = self.tapes[k] + self.states[k + 1]
            self._touch(layer_bytes + chain.record_transient_bytes[k])
            self.held += self.tapes[k]
            self._refer(k, self.hold)
            self.move(k + 1)
            self.seconds += chain.forward_seconds[k]

    def backward(self, start: int, stop: int) -> None:
        chain = self.chain
        self.move(None)
        if self.frontier is None:
            self.held += self.gradients[stop]
        for k in range(stop - 1, start - 1, -1):
            self._touch(self.gradients[k] + chain.backward_transient_bytes[k])
            self.held += self.gradients[k] - self.gradients[k + 1] - self.tapes[k]
            self._refer(k, self.release)
            self.seconds += chain.backward_seconds[k]
        self.frontier = start

    def move(self, to: int | None) -> None:
        """Make a state current instead of the one before."""
        before, self.current = self.current, to
        if to is not None:
            self.hold(to)
        if before is not None:
            self.release(before)

    def hold(self, at: int) -> None:
        if not self.reasons[at]:
            self.held += self.states[at]
        self.reasons[at] += 1

    def release(self, at: int) -> None:
        self.reasons[at] -= 1
        if not self.reasons[at]:
            self.held -= self.states[at]

    def _refer(self, k: int, change: Callable[[int], None]) -> None:
        """Apply ``change`` to the hidden states that the internal state of layer k refers to."""
        if self.chain.keeps_input[k]:
            change(k)
        if self.chain.keeps_output[k]:
            change(k + 1)

    def _touch(self, more: int) -> None:
        self.high = max(self.high, self.held + more)
