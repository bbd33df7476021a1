"""Checks the arguments of every public planning function before work begins."""

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from retrograde.errors import ScheduleError
from retrograde.schedule import Units

POLICIES = ("hsm", "ism", "msm", "best", "store-all")
CHAIN_POLICIES = ("hsm", "ism", "msm", "store-all")
_MIXED = ("msm", "best")


def check_policy(
    policy: str, *, alpha: int | None = None, beta: int | None = None, state: int | None = None,
    has_memory: bool = True,
) -> None:  # fmt: skip
    """Refuse an unknown policy, and arguments that are missing or that it does not take."""
    if policy not in POLICIES:
        raise ScheduleError(f"unknown policy {policy!r}: use one of {', '.join(POLICIES)}")
    _check_memory(policy, has_memory, "its slots, 1 or more")
    if policy in _MIXED and alpha is None:
        raise ScheduleError(
            f"the policy {policy!r} needs alpha, the size of an internal state in hidden states: "
            "give such as alpha=5"
        )
    if policy in ("hsm", "ism") and not (alpha is None and beta is None):
        raise ScheduleError(
            f"the policy {policy!r} stores states of one kind and takes neither alpha nor beta: "
            "leave them out, or use 'best'"
        )
    if policy not in _MIXED and state is not None:
        raise ScheduleError(
            f"the policy {policy!r} takes no state size: its slots are states; leave state out, or "
            "use 'best'"
        )


def check_chain_policy(policy: str, *, has_memory: bool = True, **foreign: object) -> None:
    """Refuse a policy that chains do not have, and a missing memory or one too many. ``foreign``
    holds the arguments that only lengths take, None where they were not given."""
    if policy not in CHAIN_POLICIES:
        raise ScheduleError(
            f"unknown policy {policy!r} for a chain: use one of {', '.join(CHAIN_POLICIES)}"
        )
    for name, value in foreign.items():
        if value is not None:
            raise ScheduleError(
                f"{name} is {value!r} beside a chain, whose layers have their own sizes: leave "
                f"{name} out"
            )
    _check_memory(
        policy,
        has_memory,
        "bytes, such as '2GiB', or a share of what store-all holds, such as '50%'",
    )


def _check_memory(policy: str, has_memory: bool, expected: str) -> None:
    if has_memory and policy == "store-all":
        raise ScheduleError(
            f"the policy {policy!r} takes no memory, since what it keeps is fixed: leave memory "
            "out, or use 'hsm', 'ism', 'msm' or 'best'"
        )
    if not has_memory and policy != "store-all":
        raise ScheduleError(f"the policy {policy!r} needs a memory: give {expected}")


def units_of(alpha: int | None, beta: int | None, state: int | None = None) -> Units:
    """Return the sizes ``alpha``, ``beta`` and ``state`` in one unit, with the working core free.
    By default ``state`` is 1, and ``beta`` is ``alpha`` less a hidden state, at least 1."""
    hidden = 1 if state is None else integer("state", state)
    if state is None and isinstance(alpha, float | np.floating) and alpha > 1:
        raise ScheduleError(
            f"alpha is {alpha}: expected an integer, 1 or more; for a ratio between, give all "
            "sizes in bytes: state=, alpha= and beta= with a memory such as '64MiB'"
        )
    size = integer("alpha", alpha)
    without_input = max(1, size - hidden) if beta is None else integer("beta", beta)
    return Units(alpha=size, beta=without_input, core=0, initial=hidden, state=hidden)


def integer(name: str, value: object, least: int = 1) -> int:
    """Return a number of at least ``least`` as a Python integer; refuse booleans and fractions."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ScheduleError(f"{name} is {value!r}: expected an integer, {least} or more") from None
    if number < least:
        raise ScheduleError(f"{name} is {number}: expected an integer, {least} or more")
    return number


def integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return an array of integers, each at least 1, as 64-bit integers."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ScheduleError(f"{name} is an array of {array.dtype}: expected integers, 1 or more")
    if array.size and int(array.min()) < 1:
        raise ScheduleError(f"{name} is {int(array.min())}: expected integers, 1 or more")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ScheduleError(f"{name} is {int(array.max())}: expected less than 2**63 in an array")
    return array.astype(np.int64, copy=False)
