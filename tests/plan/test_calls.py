"""Plans for calls in a row, against all plans."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from retrograde.plan.call_planner import fastest, least
from retrograde.plan.calls import (
    CallSizes,
    OutputLifetime,
    Part,
    Way,
    kept_whole,
    one_after_the_other,
    peak_of,
    seconds_of,
)


def drawn(seed):
    draw = random.Random(seed)
    n = draw.randrange(1, 6)
    states = [draw.randrange(1, 6) for _ in range(n + 1)]

    def keeps():
        return {"keeps_input": draw.random() < 0.7, "keeps_output": draw.random() < 0.4}

    calls = []
    for before, after in pairwise(states):
        forward = after + draw.randrange(4)
        held = draw.randrange(3, 15)
        some, noted = draw.randrange(1, held), draw.choice([0, 0, 2])
        again = {"again_seconds": 1 + draw.random()}
        first = held + after + draw.randrange(3)
        ways = (
            Way(held, first, held + draw.randrange(5), 0.0, **again, **keeps()),
            Way(some, some + after, some + draw.randrange(8), draw.random(), **again, **keeps()),
            Way(noted, forward + noted, held + noted, 1 + draw.random(), dropped=True, **keeps()),
        )
        calls.append(
            CallSizes(
                before, after, forward, 1 + draw.random(), ways, noted,
                gradient_bytes=draw.choice([0, after]), packed_bytes=draw.choice([0, 0, 1]),
            )
        )  # fmt: skip
    return calls


def every(calls, i, k):
    """All plans for calls i … k - 1."""
    if i == k:
        yield ()
        return
    for way in range(len(calls[i].ways)):
        for rest in every(calls, i + 1, k):
            yield (Part(i, i + 1, way), *rest)
    for j in range(i + 2, k):
        if any(call.starts_row for call in calls[i + 1 : j]):
            return
        for inner in every(calls, i, j):
            for rest in every(calls, j, k):
                yield (Part(i, j, 0, inner), *rest)


@pytest.mark.quick(1, every=40)
@pytest.mark.parametrize("seed", range(120))
@pytest.mark.parametrize("rows", [1, 2])
def test_the_plan_is_the_best_of_all(seed, rows):
    calls = drawn(seed)
    if rows > 1:
        rows = [calls[:3], drawn(seed + 1000)[:3], drawn(seed + 2000)[:1]]
        calls = one_after_the_other(
            rows,
            [
                OutputLifetime(1 + seed % 3, 3 - seed % 2),
                OutputLifetime(3, 2, 1.5),
                OutputLifetime(3, 3),
            ],
        )
    found = [(peak_of(calls, p), seconds_of(calls, p)) for p in every(calls, 0, len(calls))]
    smallest = least(calls)
    assert smallest == min(peak for peak, _ in found)
    with pytest.raises(ValueError, match="least peak"):
        fastest(calls, smallest - 1)
    for budget in range(smallest, max(peak for peak, _ in found) + 2, 3):
        plan = fastest(calls, budget)
        assert peak_of(calls, plan) <= budget
        best = min(seconds for peak, seconds in found if peak <= budget)
        assert seconds_of(calls, plan) == pytest.approx(best)


def test_a_peak_by_hand():
    """Calls 1 and 2 are a group; its input and that of call 2 are held while call 2 goes back."""
    calls = [CallSizes(10, 10, 12, 1.0, (Way(0, 12, 60, 1.0, dropped=True),))] * 3
    calls.append(CallSizes(10, 10, 12, 1.0, (Way(5, 12, 20),), noted_bytes=0))
    group = Part(1, 3, 0, (Part(1, 2), Part(2, 3)))
    assert peak_of(calls, [Part(0, 1), group, Part(3, 4)]) == 10 + 10 + 60
    assert seconds_of(calls, [Part(0, 1), group, Part(3, 4)]) == 1 + (1 + 1 + 1)
    assert peak_of(calls, [Part(k, k + 1) for k in range(4)]) == 10 + 10 + 60
    assert peak_of([replace(c, left_bytes=3) for c in calls], [Part(0, 1), group, Part(3, 4)]) == 92


def test_rows_one_after_the_other_share_their_memory():
    """While the first goes back, what the second held is free."""
    ways = Way(40, 50, 60), Way(0, 12, 60, 1.0, dropped=True)
    row = [CallSizes(10, 10, 12, 1.0, ways, gradient_bytes=7)] * 2
    apart, both = (
        peak_of(row, kept_whole(row)),
        one_after_the_other([row, row], [OutputLifetime(1, 1), OutputLifetime(2, 2)]),
    )
    assert apart == 40 + 10 + 60
    assert peak_of(both, kept_whole(both)) == (40 + 10 + 40) + 10 + apart
    assert least(both) == 10 + 60 + 10  # the first row is one group


@pytest.mark.parametrize("runs", [1, 2, 3])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_what_waits_for_a_later_row_counts_beside_those_between(runs, back):
    """It does so whether the first row's last call is kept by itself or in a group."""
    ways = Way(40, 50, 60), Way(0, 12, 60, 1.0, dropped=True)
    row = [CallSizes(10, 10, 12, 1.0, ways, gradient_bytes=7)] * 2
    waits = [OutputLifetime(runs, back, 3.0), OutputLifetime(2, 2), OutputLifetime(3, 3)]
    for k, call in enumerate(one_after_the_other([row] * 3, waits)):
        ahead, later = 7 * (0 < k // 2 < runs), 3 * 7 * (0 < k // 2 < back)
        later += 2 * 7 * (k == 1)  # which goes back from that memory itself
        assert [way.first_bytes for way in call.ways] == [50 + ahead, 12 + ahead]
        assert [way.backward_bytes for way in call.ways] == [60 + later] * 2
        assert (call.forward_bytes, call.gradient_bytes) == (12 + ahead, 7 + later)
    assert OutputLifetime(runs, back).among([0, 2]) == OutputLifetime(
        max(1, runs - 1), max(1, back - 1)
    )


def test_what_filling_a_call_takes_while_its_group_runs_again():
    ways = Way(5, 12, 20, again_seconds=3.0), Way(0, 12, 60, 7.0, dropped=True)
    calls = [CallSizes(10, 10, 12, 1.0, ways)] * 4
    group = Part(0, 3, 0, (Part(0, 1), Part(1, 2, 1), Part(2, 3, 1)))
    assert seconds_of(calls, [group, Part(3, 4)]) == 3 + (1 + 7) + 7


def test_more_memory_is_never_slower_and_enough_is_ordinary():
    ways = Way(40, 50, 60), Way(25, 35, 60, 0.2), Way(0, 12, 60, 1.0, dropped=True)
    calls = [CallSizes(10, 10, 12, 1.0, ways)] * 24
    smallest = least(calls)
    whole = peak_of(calls, kept_whole(calls))
    budgets = [*range(smallest, whole, (whole - smallest) // 9), whole]
    taken = [seconds_of(calls, fastest(calls, budget)) for budget in budgets]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] == 0
    assert fastest(calls, whole) == kept_whole(calls)


def test_a_level_is_rounded_up():
    """Large sizes: the plan leaves some memory unused, and never takes more than there is."""
    draw = random.Random(0)
    ways = Way(10**7, 12 * 10**6, 15 * 10**6), Way(0, 10**6, 15 * 10**6, 1.0, dropped=True)
    calls = [CallSizes(10**5, 10**5, 10**6, 1.0, ways)] * 9
    smallest = least(calls)
    for _ in range(20):
        budget = draw.randrange(smallest, 10**8)
        assert peak_of(calls, fastest(calls, budget)) <= budget
