"""Sizes in bytes: at most 1 % of the memory is wasted, and the budget and the gap are kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.recurrences import plain_tables
from retrograde.errors import ScheduleError, UnitError
from retrograde.plan import plan
from retrograde.plan.arguments import units_of
from retrograde.plan.steps.coarse import coarsen

BYTES = st.integers(1, 10**7)


@settings(deadline=None)
@given(BYTES, st.floats(0.01, 99), st.floats(0, 3), st.integers(1, 10**4), st.integers(0, 10**6))
def test_whatever_fits_99_percent_of_the_bytes_fits_the_units(state, share, more, slots, rest):
    beta = max(1, int(share * state))
    units = units_of(int(beta + more * state), beta, state)
    memory = slots * max(state, beta) + rest
    coarse = coarsen(memory, units)
    for size, counted in ((units.alpha, coarse.alpha), (beta, coarse.beta), (state, coarse.state)):
        most = 99 * memory // (100 * size)  # as many as fit 99 %
        assert most * counted <= coarse.memory
        fits = coarse.memory // counted  # as many as fit the units
        assert fits * size <= memory
        assert memory // size * counted <= coarse.most


def test_a_common_divisor_is_used_as_it_is():
    coarse = coarsen(2**26, units_of(5 * 4096, None, 4096))
    assert (coarse.state, coarse.alpha, coarse.beta) == (1, 5, 4)
    assert coarse.memory == coarse.most == 2**14


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 80),
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 900),
)
def test_the_budget_is_kept_and_the_gap_never_wrong(length, state, beta, more, room):
    """Against brute force in single bytes."""
    alpha, memory = beta + more, state + room
    _, _, best = plain_tables(length, memory, alpha, beta, state)
    schedule = plan(length, memory, "msm", alpha=alpha, beta=beta, state=state)
    assert schedule.peak <= memory == schedule.memory
    assert schedule.bound <= best[length, memory] <= schedule.cost
    # Wasting at most 1 % is costing no more than with 99 % of the memory.
    assert schedule.cost <= best[length, max(state, 99 * memory // 100)]


def test_memory_may_be_a_text_or_a_share():
    sizes = {"state": 65_536, "alpha": 430_080}
    schedule = plan(1000, "16MiB", "msm", **sizes)
    assert schedule.memory == 2**24
    assert schedule.units == units_of(430_080, 364_544, 65_536)
    assert schedule == plan(1000, 2**24, "msm", **sizes)
    share = plan(1000, "10%", "msm", **sizes)
    assert share == plan(1000, 0.1, "msm", **sizes)
    assert share.memory == (65_536 + 999 * 364_544) // 10
    assert plan(1000, 1.0, "msm", **sizes).cost == 1000
    assert share.gap < 0.005


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"memory": 99}, ScheduleError, "memory is 99 bytes: expected at least 100, the initial"),
        ({"memory": "0%"}, UnitError, "the memory '0%' is 0 times"),
        ({"memory": "much"}, UnitError, "cannot read the memory 'much'"),
        ({"state": 0}, ScheduleError, "state is 0: expected an integer, 1 or more"),
        ({"state": 1.5}, ScheduleError, "state is 1.5: expected an integer"),
        ({"alpha": 500.5}, ScheduleError, "alpha is 500.5: expected an integer"),
        ({"beta": 501}, ScheduleError, "beta is 501 and alpha is 500"),
        ({"state": None, "alpha": 5.25}, ScheduleError, "alpha is 5.25: .* all sizes in bytes"),
        ({"policy": "hsm", "alpha": None}, ScheduleError, "'hsm' takes no state size"),
        ({"state": None, "memory": "1kB"}, ScheduleError, "memory is '1kB': expected an integer"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(given, error, message):
    request = {"memory": 5000, "policy": "msm", "state": 100, "alpha": 500, **given}
    with pytest.raises(error, match=message):
        plan(10, **request)
