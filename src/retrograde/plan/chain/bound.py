"""A lower bound of a chain's seconds, from the bytes held when backpropagation begins.

When the last layer is backpropagated, some layers K are recorded. Every layer has run once by then,
and every layer outside K has to run again, from a state that is held. A recorded layer stays
recorded until its own turn. So when layer k has its turn, at least the tapes of K before it are
held, and the bytes that layer k needs. With u, s, p as in :mod:`retrograde.plan.chain.search`, the
least forward seconds are

    Σ u + min over K of Σ u_k outside K,   where for every layer k
        Σ p_j of the j < k in K + Σ s_i of the states that they refer to  ≤  m − what k needs

At the last layer, the first state of each run of layers outside K counts too. How the layers are
run again is left open. With a price for each of these limits (Lagrangian relaxation), one pass
finds the minimum over kept and left-out layers. Any prices give a valid bound. The price of the
last layer's limit is bisected. Where another limit can bind, at layers that need more than all
later ones, subgradients (Polyak's step) raise its price.

The bound holds for every legal schedule, not only for persistent ones. It is close to the best
schedule where most layers are run at most twice in all. It is weak where budgets are so small that
most layers run more often. The time is linear in the layers, a few hundred passes.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from retrograde.schedule import Chain

if TYPE_CHECKING:
    from retrograde.plan.chain.fill import Kinds

__all__ = ["least_seconds"]

_HALVINGS = 60
_STEPS = 300
_PATIENCE = 10  # steps without a gain, before the step is halved
_ROUNDING = 1 - 1e-12

_Ints = NDArray[np.int64]
_Reals = NDArray[np.float64]
_Flags = NDArray[np.bool_]


class _Columns(NamedTuple):
    """The columns of a chain of T layers that the relaxation reads. They are u (T,), s (T + 1,) and
    p (T,) of the module's docstring. ``limit`` (T,) has the bytes left for everything held before a
    layer when it is backpropagated."""

    seconds: _Reals
    state: _Reals
    tape: _Reals
    keeps_input: _Flags
    keeps_output: _Flags
    limit: _Reals
    stores: bool
    records: bool


def least_seconds(chain: Chain, room: int, kinds: "Kinds") -> float:
    """Return a lower bound of the seconds of an iteration within ``room`` bytes."""
    state, gradient = np.array(chain.state_bytes), np.array(chain.gradient_bytes)
    inputs, outputs = np.array(chain.keeps_input), np.array(chain.keeps_output)
    tape = np.array(chain.tape_bytes)
    running = gradient[:-1] + np.array(chain.backward_transient_bytes)
    running = np.maximum(running - inputs * np.array(chain.release_bytes), 0)
    need = tape + inputs * state[:-1] + outputs * state[1:] + gradient[1:] + running
    columns = _Columns(
        np.array(chain.forward_seconds), state.astype(float), tape.astype(float), inputs, outputs,
        (room - chain.overhead_bytes - need).astype(float), kinds.stores, kinds.records,
    )  # fmt: skip
    once = sum(chain.forward_seconds) + sum(chain.backward_seconds)
    return (once + max(0.0, _highest(columns))) * _ROUNDING


@njit(cache=True)  # type: ignore[untyped-decorator]
def _relaxed(columns: _Columns, price: _Reals, over: _Reals) -> float:
    """Return the least seconds of running again, plus ``price`` seconds a byte above each limit.
    ``over``, shape (T,), is overwritten by the bytes above each limit."""
    seconds, state, tape, inputs, outputs, limit, stores, records = columns
    size = len(seconds)
    total = np.zeros(size + 1)  # the prices of a layer and of all later ones
    for k in range(size - 1, -1, -1):
        total[k] = total[k + 1] + price[k]
    from_kept = np.zeros((size, 2), np.bool_)
    left = seconds[0] if size > 1 else np.inf
    kept = tape[0] * total[1] if records or size == 1 else np.inf
    for k in range(1, size):
        held, here = state[k] * total[k + 1], 0.0 if inputs[k] else state[k] * price[k]
        # From kept to kept, from kept to left out, and from left out to kept.
        kept_kept = kept + (held + here if outputs[k - 1] else held if inputs[k] else 0.0)
        base = state[k] * price[size - 1] if stores else np.inf
        kept_left = kept + (held + here if outputs[k - 1] else base)
        left_kept = left + (held if inputs[k] else 0.0)
        from_kept[k, 1], from_kept[k, 0] = kept_kept <= left_kept, kept_left <= left
        own = tape[k] * total[k + 1] if records or k == size - 1 else np.inf
        kept, left = min(kept_kept, left_kept) + own, min(kept_left, left) + seconds[k]
    choice = np.ones(size, np.bool_)
    for k in range(size - 1, 0, -1):
        choice[k - 1] = from_kept[k, int(choice[k])]
    before = bases = 0.0
    for k in range(size):
        refers = k > 0 and choice[k - 1] and outputs[k - 1]
        over[k] = before + (state[k] if refers and not inputs[k] else 0.0) - limit[k]
        if refers or (choice[k] and inputs[k]):
            before += state[k]
        elif k > 0 and choice[k - 1] and not choice[k]:
            bases += state[k]
        before += tape[k] if choice[k] else 0.0
    over[size - 1] += bases
    value: float = kept - (price * limit).sum()
    return value


@njit(cache=True)  # type: ignore[untyped-decorator]
def _highest(columns: _Columns) -> float:
    """Return the relaxation at the best prices that are found."""
    size, limit = len(columns.seconds), columns.limit
    price, over = np.zeros(size), np.empty(size)
    best, best_price = _relaxed(columns, price, over), price.copy()
    high = columns.seconds.sum() / max(1.0, columns.tape.sum() + columns.state.sum())
    low, found = 0.0, over[-1] <= 0
    for _ in range(_HALVINGS):
        price[-1] = (low + high) / 2 if found else high
        value = _relaxed(columns, price, over)
        if value > best:
            best, best_price = value, price.copy()
        if over[-1] > 0:
            low, high = price[-1], high if found else 2 * high
        else:
            high, found = price[-1], True
    binding = np.zeros(size, np.bool_)
    least = np.inf
    for k in range(size - 1, -1, -1):
        binding[k] = limit[k] < least
        least = min(least, limit[k])
    price, reach, waited = best_price.copy(), columns.seconds.sum() / 100, 0
    for _ in range(_STEPS if binding.sum() > 1 else 0):
        value = _relaxed(columns, price, over)
        waited += 1
        if value > best:
            best, best_price, waited = value, price.copy(), 0
        elif waited == _PATIENCE:
            price, reach, waited = best_price.copy(), reach / 2, 0
            value = _relaxed(columns, price, over)
        move = np.where(binding & ((price > 0) | (over > 0)), over, 0.0)
        length = (move * move).sum()
        if length == 0:
            break
        price = np.maximum(price + move * (best + reach - value) / length, 0.0)
    return best
