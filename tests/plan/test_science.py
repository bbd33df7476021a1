"""The statements of docs/science.md, each by its own test; the page names them."""

import importlib
import random
from fractions import Fraction
from functools import cache
from itertools import chain, combinations, pairwise
from math import ceil, comb
from pathlib import Path

import numpy as np
import pytest

from oracles.recurrences import plain_tables
from retrograde.plan import cost, plan
from retrograde.plan.arguments import units_of
from retrograde.plan.steps.mixed import Mixed
from retrograde.plan.steps.tables import Tables
from retrograde.schedule import Record, Store

package = pytest.importorskip("checkpoint_schedules")
RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
KINDS = [(beta, wide) for beta in (1, 2, 3, 5) for wide in (False, True)]


@cache
def dual(levels, x, beta, wide):
    """ω_M(x) by its definition, equation (1) of the page."""
    if x <= 1:
        return 0
    z = x - 1
    alone = sum(x - i for i in range(1, ceil(x)))

    def recorded(k):
        stored = sum(dual(level, z, beta, wide) for level in range(k * beta + 1, levels + 1))
        return k * z + stored + wide * sum(dual(i * beta, z, beta, wide) for i in range(1, k + 1))

    return alone + max(recorded(k) for k in range(levels // beta + 1))


def hull(form, length):
    """The convex function of t whose ceiling is the cost."""
    whole, more, w = form.hull(length)
    return whole + Fraction(more, w)


@pytest.mark.parametrize(("beta", "wide"), KINDS)
def test_the_closed_form_is_the_transform_of_omega(beta, wide):
    grid = [Fraction(n, 60) for n in range(60, 360)]
    for levels in range(8):
        form = Mixed(levels, beta, wide)
        for t in range(2, min(40, form.reach(4))):
            best = max(x * t - dual(levels, x, beta, wide) for x in grid)
            assert form.cost(t) == ceil(best)
            assert hull(form, t) >= best


@pytest.mark.parametrize("beta", [1, 2, 3, 5])
def test_omega_has_the_shape_of_lemma_1(beta):
    grid = [Fraction(n, 12) for n in range(72)]
    for levels in range(9):
        omega = [dual(levels, x, beta, False) for x in grid]
        slopes = [12 * (b - a) for a, b in pairwise(omega)]
        assert slopes == sorted(slopes)
        assert slopes[0] >= 0
        assert all(dual(levels + 1, x, beta, False) >= dual(levels, x, beta, False) for x in grid)
        assert omega[12:25] == [(x - 1) * (1 + levels // beta) for x in grid[12:25]]
    for k in range(4):
        edge = 1 + Fraction(1, beta * (k + 1))
        block = range(k * beta + 1, (k + 1) * beta + 1)
        around = edge - Fraction(1, 99), edge, edge + Fraction(1, 99), edge + 2
        gains = [z - sum(dual(m, z, beta, False) for m in block) for z in around]
        assert gains[0] > gains[1] == 0 > gains[2] > gains[3]


@pytest.mark.parametrize("beta", [1, 2, 3, 5])
def test_a_schedule_of_lemma_4_costs_no_less(beta):
    drawn = random.Random(beta)
    costs = [[0, *(Mixed(level, beta).cost(t) for t in range(1, 200))] for level in range(13)]
    for _ in range(500):
        levels = drawn.randrange(13)
        k, u = drawn.randint(0, levels // beta), drawn.randint(1, 6)
        parts = {level: drawn.randint(0, 9) for level in range(k * beta + 1, levels + 1)}
        bound = u * (u + 1) // 2 + k + sum(y + costs[level][y] for level, y in parts.items())
        assert costs[levels][u + k + sum(parts.values())] <= bound


@pytest.mark.parametrize("beta", [1, 2, 3, 5])
def test_omega_grows_as_lemma_2_says(beta):
    for levels in range(1, 8):
        for x in (Fraction(n, 12) for n in range(1, 60)):
            omega = dual(levels, x, beta, False)
            assert omega >= max(0, x - 1, x - 1 + dual(levels, x - 1, beta, False))
            assert omega >= dual(levels, x - 1, beta, False) + dual(levels - 1, x, beta, False)
            if levels >= beta:
                assert omega >= x - 1 + dual(levels - beta, x, beta, False)


@pytest.mark.parametrize(("beta", "wide"), KINDS)
def test_slopes_are_integers_and_integers_plus_an_inverse(beta, wide):
    for levels in range(12):
        form = Mixed(levels, beta, wide)
        widths = {(beta - 1) * q - 1 if wide else beta * q for q in range(1, 13)} | {2}
        hulls = [hull(form, t) for t in range(200)]
        slopes = np.diff(hulls).tolist()
        assert slopes == sorted(slopes)
        for slope in slopes:
            part = slope - slope.numerator // slope.denominator
            assert part == 0 or (part.numerator == 1 and part.denominator in widths)


def test_corners_are_binomials():
    for levels, beta in ((9, 2), (30, 4), (100, 101)):
        form = Mixed(levels, beta)
        for n in range(2, 6):
            steps = form.reach(n)
            assert hull(form, steps) == n * steps - comb(n + levels, levels + 2)
            assert hull(form, steps + 1) > hull(form, steps) + n


def edges(levels, beta, wide, n):
    """T(n), its cost, and the edges of H from there down, as (slope, steps), by the page."""
    steps = comb(n + levels, levels + 1) + sum(
        comb(levels - at + n - 1, n - 1) for at in range(beta, levels + 1, beta)
    )
    price = n * steps - comb(n + levels, levels + 2)
    if wide and beta == 1:
        steps = comb(n + levels + 1, n) - 1
        return steps, n * (steps + 1) - comb(n + levels + 1, n - 1), []
    found = []
    for q in range(1, levels // beta + 1):
        w = q * (beta - 1) - 1 if wide else q * beta
        if w:
            found.append((n + Fraction(1, w), w * comb(levels - q * beta + n - 2, n - 2)))
    if wide and beta == 2 and levels >= 2:
        price -= comb(levels + n - 4, n - 2)
        if n >= 3:
            found.append((n + Fraction(1, 2), 2 * comb(levels + n - 5, n - 3)))
    return steps, price, sorted(found, reverse=True)


@pytest.mark.parametrize(("beta", "wide"), [*KINDS, (4, True)])
def test_the_corners_of_the_page_are_the_recurrences(beta, wide):
    length = 150
    _, _, msm = plain_tables(length, 9, beta + (not wide), beta, 1)
    for levels in range(9):
        end = 1 + levels // beta
        assert msm[1 : end + 1, levels + 1].tolist() == list(range(1, end + 1))
        for n in range(2, length):
            steps, price, found = edges(levels, beta, wide, n)
            if steps > length:
                break
            assert msm[steps, levels + 1] == price
            at = steps
            for slope, wide_by in found:
                for k in range(wide_by + 1):
                    assert msm[at - k, levels + 1] == ceil(price - k * slope)
                at, price = at - wide_by, price - wide_by * slope
            assert all(msm[k, levels + 1] == price - n * (at - k) for k in range(end, at + 1))
            end = steps


def test_what_memory_buys():
    for beta in (1, 2, 3, 5):
        for levels in range(beta, 40):
            form = Mixed(levels, beta)
            for n in range(2, 7):
                steps, beyond = form.reach(n), comb(n + levels, n - 2)
                stored = comb(n + levels, n - 1)
                assert comb(n + levels - beta, n) <= beta * (steps - stored)
                assert beta * (steps - stored) <= comb(n + levels - 1, n)
                assert form.cost(steps) <= n * steps
                assert form.cost(steps + beyond + 1) > n * (steps + beyond + 1)


@pytest.mark.parametrize("beta", [1, 2, 3, 7])
def test_up_to_two_runs_of_a_step(beta):
    for levels in range(16):
        form, most = Mixed(levels, beta), levels // beta

        def longest(k, levels=levels):
            return 2 + k + sum(1 + level // beta for level in range(k * beta + 1, levels + 1))

        for t in range(most + 2, longest(0) + 1):
            k = max(k for k in range(most + 1) if t <= longest(k))
            assert form.cost(t) == 2 * t - 1 - k


def test_two_runs_are_counted_otherwise_where_alpha_is_beta():
    assert (Mixed(2, 1).cost(5), Mixed(2, 1, wide=True).cost(5)) == (8, 7)


def test_hsm_and_ism_follow():
    for memory in range(1, 20):
        for t in range(1, 80):
            assert Mixed(memory - 1, memory).cost(t) == cost(t, memory, "hsm")
            assert Mixed(memory - 1, 1, wide=True).cost(t) == cost(t, memory, "ism")
            assert cost(t, memory, "ism") == cost(t + 1, memory, "hsm") - (t + 1)


def test_beyond_a_slope_of_three_the_first_action_keeps_a_hidden_state():
    form = Mixed(15, 4)
    for t in (form.reach(3), form.reach(3) + 1, form.reach(4)):
        kept = [a for a in plan(t, 16, "msm", alpha=5)[1:] if isinstance(a, (Store, Record))]
        assert isinstance(kept[0], Store)


@pytest.mark.parametrize(("state", "alpha", "beta"), [(2, 5, 2), (3, 9, 6), (2, 4, 4)])
def test_where_a_state_divides_beta_memory_counts_in_whole_states(state, alpha, beta):
    _, _, msm = plain_tables(70, 60, alpha, beta, state)
    for memory in range(state, 61):
        form = Mixed(memory // state - 1, beta // state, alpha == beta)
        assert [form.cost(t) for t in range(1, 71)] == msm[1:, memory].tolist()


def transformed(length, memory, sizes, parts):
    """⌈H⌉ with equality in the branches of the recurrence, from slopes n + i/parts."""
    state, alpha, beta = sizes
    assert alpha >= beta + state
    values = [np.zeros(parts, np.int64) for _ in range(memory + 1)]
    best, rises, n = 0, True, 0
    while rises:
        n, rises = n + 1, False
        earned = (n - 1) * parts + np.arange(parts)
        for m in range(state, memory + 1):
            found = np.maximum(0, earned + values[m])
            if m >= 2 * state:
                found = np.maximum(found, values[m] + values[m - state])
            if m >= state + beta:
                found = np.maximum(found, earned + values[m - beta])
            values[m] = found
        bound = int((-(-((earned + parts) * length - values[memory]) // parts)).max())
        best, rises = max(best, bound), bound > best
    return best


@pytest.mark.parametrize(
    ("state", "alpha", "beta", "length", "memory", "exact", "bound"),
    [
        (2, 5, 3, 11, 14, 19, 18),
        (3, 7, 4, 11, 20, 19, 18),
        (2, 3, 1, 9, 7, 14, 13),
        (5, 6, 1, 24, 24, 33, 29),
        (9, 10, 1, 48, 51, 62, 55),
        (2, 5, 2, 11, 14, 16, 16),  # where a state divides β, both are equal
    ],
)
def test_where_a_state_does_not_divide_beta_the_bound_is_no_cost(
    state, alpha, beta, length, memory, exact, bound
):
    _, _, msm = plain_tables(length, memory, alpha, beta, state)
    sizes = {"state": state, "alpha": alpha, "beta": beta}
    assert msm[length, memory] == exact == plan(length, memory, "msm", **sizes).cost
    assert transformed(length, memory, (state, alpha, beta), 2520) == bound


def mixed_costs(length, units):
    """Maddison's recurrence: A with A in the place of B, at sizes 1; [t, units]."""
    never = 10**9
    a = np.full((length + 1, units + 1), never)
    a[0], a[1] = 0, 1
    for t in range(2, length + 1):
        y = np.arange(1, t)
        for f in range(1, units + 1):
            a[t, f] = min(1 + a[t - 1, f - 1], np.min(y + a[t - y, f - 1] + a[y, f]))
    return a


@pytest.mark.quick(0)
def test_theorem_c_against_the_mixed_policy_of_equal_sizes(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    imported = importlib.import_module("from_checkpoint_schedules").imported
    theirs = mixed_costs(60, 10)[2:, 1:]
    for t, units in ((2, 1), (7, 3), (30, 4), (60, 5), (60, 10)):
        assert imported(package.MixedCheckpointSchedule(t, units)).cost == theirs[t - 2, units - 1]
    ours = cost(np.arange(2, 61)[:, None], np.arange(1, 11), "best", alpha=1)
    assert np.all(ours <= theirs)
    assert (int((ours < theirs).sum()), int((ours == theirs).sum())) == (535, 55)
    assert (ours[-1, 4], theirs[-1, 4], cost(60, 5, "msm", alpha=1)) == (157, 178, 160)


def test_theorem_c_where_msm_is_not_the_least():
    """Three forward steps for two where two are enough."""
    assert cost(2, 1, "msm", alpha=1) == 3
    assert cost(2, 1, "best", alpha=1) == 2
    fewer = Tables.fill(7, 4, units_of(3, 3), reuse=True).cost(7, 4)
    assert (cost(7, 4, "msm", alpha=3, beta=3), fewer) == (14, 13)


def subsets(values, most):
    return chain.from_iterable(combinations(values, n) for n in range(most + 1))


def test_theorem_d_no_step_runs_more_than_twice():
    """Against all choices of the tapes that every product leaves."""

    @cache
    def least(e, tapes, r):
        """Evaluations and products, each the fewest, before steps e … 1 are backpropagated."""
        while e and e in tapes:
            e, tapes = e - 1, tapes - {e}
        if e == 0:
            return 0, 0
        after = [
            (len((made | {e}) - tapes), least(e, made | {e}, r))
            for made in map(frozenset, subsets(range(1, e), r - 1))
        ]
        return min(new + more for new, (more, _) in after), 1 + min(n for _, (_, n) in after)

    for m in range(1, 9):  # of HSM
        assert [cost(m + more, m, "hsm") - 2 * (m + more) for more in (1, 2)] == [-1, 0]
    for length in range(1, 7):
        for r in range(1, 5):
            kept = min(length, r)
            found = [least(length, frozenset(t), r) for t in subsets(range(1, length + 1), r)]
            assert length + min(evaluations for evaluations, _ in found) == 2 * length - kept
            assert min(products for _, products in found) == -(-(length - kept) // r)


@pytest.mark.parametrize("tape", [2, 3])
def test_proposition_6_against_every_schedule_of_two_runs(tape):
    @cache
    def goes(e, tapes, marks, room):
        """Whether steps e … 1 can be backpropagated, if steps without a tape run once more."""
        if e == 0:
            return True
        known = {0} | tapes | marks
        if e in tapes and e - 1 in known:
            return goes(e - 1, tapes - {e}, marks - {e}, room)
        free = [mark for mark in marks if mark in tapes or mark + 1 not in tapes]
        if any(goes(e, tapes, marks - {mark}, room) for mark in free):
            return True
        if tape * (len(tapes) + 1) + len(marks) > room:
            return False
        return any(
            t not in tapes and t - 1 in known and goes(e, tapes | {t}, marks, room)
            for t in range(1, e + 1)
        )

    for length in range(1, 6):
        steps = range(1, length + 1)
        for room in range(1, 8):
            kept = [
                len(tapes)
                for tapes in map(frozenset, subsets(steps, room // tape))
                for marks in map(frozenset, subsets(steps, room - tape * len(tapes)))
                if {t - 1 for t in tapes} <= {0} | tapes | marks  # a tape refers to the c before it
                if goes(length, tapes, marks, room)
            ]
            reach, told = 0, None
            for n in range(room + 1):
                reach += (room - n) // tape
                if reach >= length:
                    told = min(length, (room - n) // tape)
                    break
            assert max(kept, default=None) == told
