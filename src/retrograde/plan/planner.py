"""The two questions a user asks: what is the schedule, and what does it cost?

One table of policies, one place where arguments are checked, one answer for each. HSM and ISM are
closed forms (:mod:`retrograde.plan.closed_form`), MSM is a dynamic program
(:mod:`retrograde.plan.mixed`), the rest are :mod:`retrograde.plan.baselines`.

===================  =========================================================  ================
policy               ``memory`` counts                                          also takes
===================  =========================================================  ================
``hsm``              hidden states, the initial one included
``ism``              internal states, the working core included
``msm``              hidden states, the initial one included                    alpha, beta
``store-all`` …      none: it holds what it holds                               alpha, beta
``chen-recursive``   none                                                       alpha, beta,
                                                                                segments
===================  =========================================================  ================
"""

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.plan import baselines, closed_form, mixed
from retrograde.schedule import Schedule, Units, Verb, merge

__all__ = ["BASELINES", "POLICIES", "cost", "plan"]

_BASELINES: Mapping[str, Callable[[int, Units], Schedule]] = MappingProxyType(
    {
        "store-all": baselines.store_all,
        "store-hidden": baselines.store_hidden,
        "recompute-all": baselines.recompute_all,
        "chen-sqrt": baselines.chen_sqrt,
        "chen-recursive": baselines.chen_recursive,
    }
)

BASELINES = tuple(_BASELINES)
POLICIES = ("hsm", "ism", "msm", *BASELINES)


def plan(
    length: int,
    memory: int | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> Schedule:
    """The schedule of a policy, in the longest ranges.

    Args:
        length: steps, at least 1.
        memory: slots, in the policy's units, at least 1; None for a baseline.
        policy: ``"hsm"``, ``"ism"``, ``"msm"``, or a baseline: ``"store-all"``,
            ``"store-hidden"``, ``"recompute-all"``, ``"chen-sqrt"``, ``"chen-recursive"``.
        alpha: size of an internal state in hidden states, for ``"msm"`` (and for the peak of a
            baseline, where it is 2 by default).
        beta: the same when its input hidden state is in memory; ``alpha − 1`` by default, and at
            least 1.
        segments: parts at each division, for ``"chen-recursive"``; 2 by default.

    Returns:
        The cheapest schedule of that policy whose peak is within ``memory``.

    Raises:
        ScheduleError: an argument is missing, out of place or out of range.

    Example:
        >>> schedule = plan(1000, 50, policy="hsm")
        >>> schedule.cost, schedule.peak
        (2948, 50)
        >>> print(plan(3, 3, "msm", alpha=2))
        store 0, record 0→3, backward 3→0, free 0
    """
    _check_policy(policy, alpha, beta, segments, memory is not None)
    steps = _integer("length", length)
    if memory is None:
        return merge(_baseline(steps, policy, alpha, beta, segments))
    slots = _integer("memory", memory)
    if policy == "hsm":
        return merge(closed_form.hsm_schedule(steps, slots))
    if policy == "ism":
        return merge(closed_form.ism_schedule(steps, slots))
    units = _units(alpha, beta)
    return merge(mixed.plan_blocks(steps, slots, alpha=units.alpha, beta=units.beta))


@overload
def cost(
    length: int,
    memory: int | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int: ...


@overload
def cost(
    length: ArrayLike,
    memory: ArrayLike | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int | NDArray[np.int64]: ...


def cost(
    length: ArrayLike,
    memory: ArrayLike | None = None,
    policy: str = "hsm",
    *,
    alpha: int | None = None,
    beta: int | None = None,
    segments: int | None = None,
) -> int | NDArray[np.int64]:
    """The forward steps that a policy runs, the first sweep included, without the schedule.

    Args:
        length: steps, at least 1; an integer or an array of them.
        memory: slots, as :func:`plan` has it; an integer or an array that broadcasts with
            ``length``.
        policy: as :func:`plan` has it.
        alpha: as :func:`plan` has it.
        beta: as :func:`plan` has it.
        segments: as :func:`plan` has it.

    Returns:
        An exact integer; for arrays, 64-bit integers of the broadcast shape.

    Raises:
        ScheduleError: as :func:`plan`; also a length in an array is too large for 64-bit costs.

    Example:
        >>> cost(1000, 50)
        2948
        >>> cost(1000, [1, 50, 1000], policy="ism").tolist()
        [500500, 1950, 1000]
    """
    _check_policy(policy, alpha, beta, segments, memory is not None)
    if np.ndim(length) == 0 and (memory is None or np.ndim(memory) == 0):
        slots = None if memory is None else _integer("memory", memory)
        return _cost_of_one(_integer("length", length), slots, policy, alpha, beta, segments)
    lengths = _integers("length", length)
    if memory is None:
        one = [
            _cost_of_one(t, None, policy, alpha, beta, segments) for t in lengths.ravel().tolist()
        ]
        return np.array(one, dtype=np.int64).reshape(lengths.shape)
    memories = _integers("memory", memory)
    if policy == "hsm":
        return closed_form.hsm_costs(lengths, memories)
    if policy == "ism":
        return closed_form.ism_costs(lengths, memories)
    return _mixed_costs(lengths, memories, _units(alpha, beta))


def _cost_of_one(
    length: int,
    memory: int | None,
    policy: str,
    alpha: int | None,
    beta: int | None,
    segments: int | None,
) -> int:
    if memory is None:
        return _forward_steps(_baseline(length, policy, alpha, beta, segments))
    if policy == "hsm":
        return closed_form.hsm_cost(length, memory)
    if policy == "ism":
        return closed_form.ism_cost(length, memory)
    return int(_mixed_costs(np.array(length), np.array(memory), _units(alpha, beta))[()])


def _mixed_costs(
    length: NDArray[np.int64], memory: NDArray[np.int64], units: Units
) -> NDArray[np.int64]:
    """One dynamic program for all, to the longest length."""
    lengths, memories = np.broadcast_arrays(length, memory)
    if not lengths.size:
        return np.empty(lengths.shape, dtype=np.int64)
    levels, rows = np.unique(memories, return_inverse=True)
    table = mixed.mixed_costs(
        int(lengths.max()), levels.tolist(), alpha=units.alpha, beta=units.beta
    )
    return np.asarray(table[rows.reshape(lengths.shape), lengths])


def _baseline(
    length: int, policy: str, alpha: int | None, beta: int | None, segments: int | None
) -> Schedule:
    units = _units(2 if alpha is None else alpha, beta)
    if segments is None:
        return _BASELINES[policy](length, units)
    return baselines.chen_recursive(length, units, segments=_integer("segments", segments, 2))


def _forward_steps(schedule: Schedule) -> int:
    runs = (schedule.kind == Verb.ADVANCE) | (schedule.kind == Verb.RECORD)
    return int((schedule.stop - schedule.start)[runs].sum())


def _check_policy(
    policy: str, alpha: int | None, beta: int | None, segments: int | None, has_memory: bool
) -> None:
    """Refuse an unknown policy, and whatever is missing for it or foreign to it."""
    if policy not in POLICIES:
        raise ScheduleError(f"unknown policy {policy!r}: use one of {', '.join(POLICIES)}")
    if has_memory and policy in BASELINES:
        raise ScheduleError(
            f"the policy {policy!r} takes no memory: it holds what it holds; leave memory out, or "
            "use 'hsm', 'ism' or 'msm'"
        )
    if not has_memory and policy not in BASELINES:
        raise ScheduleError(f"the policy {policy!r} needs a memory: give its slots, 1 or more")
    if policy == "msm" and alpha is None:
        raise ScheduleError(
            "the policy 'msm' needs alpha, the size of an internal state in hidden states: give "
            "such as alpha=5"
        )
    if policy in ("hsm", "ism") and not (alpha is None and beta is None):
        raise ScheduleError(
            f"the policy {policy!r} keeps states of one size and takes neither alpha nor beta: "
            "leave them out, or use 'msm'"
        )
    if policy != "chen-recursive" and segments is not None:
        raise ScheduleError(
            f"the policy {policy!r} takes no segments: leave them out, or use 'chen-recursive'"
        )


def _units(alpha: int | None, beta: int | None) -> Units:
    size = _integer("alpha", alpha)
    without_input = max(1, size - 1) if beta is None else _integer("beta", beta)
    if without_input > size:
        raise ScheduleError(
            f"beta is {without_input} and alpha is {size}: an internal state without its input is "
            "no larger than with it; expected beta <= alpha"
        )
    return Units(alpha=size, beta=without_input, core=0, initial=1)


def _integer(name: str, value: object, least: int = 1) -> int:
    """A number as a Python integer, at least ``least``; truth values and fractions are refused."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ScheduleError(f"{name} is {value!r}: expected an integer, {least} or more") from None
    if number < least:
        raise ScheduleError(f"{name} is {number}: expected an integer, {least} or more")
    return number


def _integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ScheduleError(f"{name} is an array of {array.dtype}: expected integers, 1 or more")
    if array.size and int(array.min()) < 1:
        raise ScheduleError(f"{name} is {int(array.min())}: expected integers, 1 or more")
    return array.astype(np.int64)
