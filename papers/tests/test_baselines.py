from itertools import pairwise
from math import isqrt

import pytest

from gruslys2016.baselines import chen_recursive, chen_sqrt, recompute_all, store_hidden
from retrograde.schedule import Record, Units

LENGTHS = [*range(1, 40), 63, 64, 65, 100, 101]
UNITS = Units(alpha=5, beta=4)


@pytest.mark.parametrize("length", LENGTHS)
def test_store_hidden_runs_every_step_but_the_last_twice(length):
    schedule = store_hidden(length, UNITS)
    assert (schedule.cost, schedule.peak) == (2 * length - 1, max(1, length - 1))


@pytest.mark.parametrize("length", LENGTHS)
def test_recompute_all_keeps_one_state(length):
    schedule = recompute_all(length, UNITS)
    assert (schedule.cost, schedule.peak) == (length * (length + 1) // 2, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_chen_sqrt_runs_all_but_its_last_segment_twice(length):
    schedule = chen_sqrt(length, UNITS)
    segments = [a for a in schedule if isinstance(a, Record)]
    assert len(segments) == isqrt(length - 1) + 1
    assert {a.stop - a.start for a in segments} <= {
        length // len(segments),
        -(-length // len(segments)),
    }
    assert schedule.cost == 2 * length - (segments[0].stop - segments[0].start)


@pytest.mark.parametrize("side", [2, 3, 8, 10])
def test_chen_sqrt_holds_a_root_of_each_kind(side):
    schedule = chen_sqrt(side * side, UNITS)
    assert schedule.peak == side + 4 * (side - 1)


@pytest.mark.parametrize("depth", range(8))
def test_chen_recursive_halves_as_often_as_it_can(depth):
    """C(2ⁿ) = 2ⁿ⁻¹ + 2·C(2ⁿ⁻¹), with a state kept at each depth."""
    schedule = chen_recursive(2**depth, UNITS)
    assert schedule.cost == 2**depth + depth * 2**depth // 2
    assert schedule.peak == max(1, depth)


@pytest.mark.parametrize("segments", [2, 3, 5, 9])
@pytest.mark.parametrize("length", LENGTHS)
def test_chen_recursive_costs_what_its_parts_do(length, segments):
    def cost(t):
        bounds = [t * i // segments for i in range(segments + 1)]
        if t < segments:
            return t
        parts = [b - a for a, b in pairwise(bounds)]
        return bounds[-2] + sum(map(cost, parts))

    assert chen_recursive(length, UNITS, segments=segments).cost == cost(length)


def test_parts_shorter_than_their_number_are_recorded_whole():
    recorded = [a for a in chen_recursive(20, UNITS, segments=5) if isinstance(a, Record)]
    assert {a.stop - a.start for a in recorded} == {4}
