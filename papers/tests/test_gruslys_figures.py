"""The figures of Gruslys et al. (2016): their numbers, against the paper and ``rg.cost``."""

import csv
import re
from functools import cache
from math import comb, factorial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

import retrograde as rg
from gruslys2016.bounds import sweep_linear, sweep_power
from gruslys2016.composed import compose
from gruslys2016.figures import GRUSLYS
from gruslys2016.measured import expected_seconds, measure_seconds
from gruslys2016.timed import Seconds, figure_2b
from retrograde_papers import curves
from retrograde_papers.plates import save_plate

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
CURVES = ("figure_2a", "figure_5", "figure_6")
COLUMN = re.compile(r"(HSM|ISM|MSM), (\d+) .*\(forward steps\)")
SMALL = Seconds(
    machine={"device": "abacus", "threads": 2, "torch": "0.0"},
    inputs=4, hidden=4, batch=2, rounds=1, lengths=(5, 50),
    ordinary=(0.01, 0.1), budgeted={10: (0.02, 0.25), 1000: (0.02, 0.15)},
)  # fmt: skip


@cache
def plate(name):
    return GRUSLYS[name]()


def column(name, start):
    """The one column whose name begins so, as an array."""
    (found,) = [values for key, values in plate(name).table.items() if key.startswith(start)]
    return np.array(found)


def at(name, start, length):
    """A column's value at a length."""
    return column(name, start)[list(plate(name).table["length"]).index(length)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CURVES)
def test_every_curve_is_what_cost_says(name):
    lengths = np.array(plate(name).table["length"])
    some = np.random.default_rng(0).choice(lengths.size, 40, replace=False)
    kinds = [COLUMN.fullmatch(key) for key in list(plate(name).table)[1:]]
    assert len(kinds) == {"figure_2a": 5, "figure_5": 10, "figure_6": 6}[name]
    for key, kind in zip(list(plate(name).table)[1:], kinds, strict=True):
        alpha = 5 if kind[1] == "MSM" else None
        expected = rg.cost(lengths[some], int(kind[2]), kind[1].lower(), alpha=alpha)
        assert np.array(plate(name).table[key])[some].tolist() == expected.tolist()


@pytest.mark.parametrize("name", [*CURVES, "figure_7"])
def test_lengths_are_dense_and_reach_ten_thousand(name):
    lengths = np.array(plate(name).table["length"])
    assert lengths[:30].tolist() == list(range(1, 31))
    assert lengths[-1] == 10_000
    assert 1000 in lengths
    assert np.max(lengths[1:] / lengths[:-1]) <= 2


def test_figure_2a_the_costs_at_a_thousand_and_ten_thousand():
    costs = {10: (4636, 67624), 50: (2948, 38622), 100: (2898, 34747), 500: (2498, 29498),
             1000: (1999, 28998)}  # fmt: skip
    for memory, (thousand, ten_thousand) in costs.items():
        start = f"HSM, {memory} "
        assert (at("figure_2a", start, 1000), at("figure_2a", start, 10_000)) == (
            thousand, ten_thousand,
        )  # fmt: skip


def test_figure_5a_a_third_more_time_for_five_percent_of_the_internal_states():
    """The abstract, and section 3.2."""
    cost = at("figure_5", "ISM, 50 ", 1000)
    assert cost == 1950
    assert round((cost / 1000 + 2) / 3, 3) == 1.317


def test_figure_5b_is_nowhere_above_5a():
    """The caption of figure 5; also where both hold the same bytes, initial state and core too."""
    lengths = np.array(plate("figure_5").table["length"])
    for m in (10, 50, 100, 500, 1000):
        ism, msm = column("figure_5", f"ISM, {m} "), column("figure_5", f"MSM, {5 * m} ")
        assert np.all(msm <= ism)
        assert np.array_equal(msm < ism, lengths > m)
        assert np.all(rg.cost(lengths, 5 * m - 4, "msm", alpha=5) <= ism)


def test_figure_5b_golden():
    """At 50 and 500 units the table of docs/policies.md."""
    costs = [at("figure_5", f"MSM, {units} ", 1000) for units in (50, 250, 500, 2500, 5000)]
    assert costs == [2663, 1941, 1877, 1375, 1000]


@pytest.mark.parametrize(("slots", "first"), [(10, 309), (20, 1919)])
def test_figure_6_hsm_beats_ism_for_long_sequences_and_msm_beats_both(slots, first):
    """Section 3.6."""
    lengths = np.array(plate("figure_6").table["length"])
    hsm, ism = (column("figure_6", start) for start in (f"HSM, {5 * slots} ", f"ISM, {slots} "))
    msm = column("figure_6", f"MSM, {5 * slots} ")
    assert np.all(msm <= np.minimum(hsm, ism))
    assert np.array_equal(msm < np.minimum(hsm, ism), lengths > slots)
    assert np.array_equal(hsm < ism, lengths >= first)
    assert rg.cost(first - 1, 5 * slots) == rg.cost(first - 1, slots, "ism")
    texts = [text.get_text() for axes in plate("figure_6").figure.axes for text in axes.texts]
    assert f"HSM is cheaper than ISM\nfrom t = {first:,}" in texts


def test_figure_6_golden():
    """The row for 50 and for 100 hidden states in docs/policies.md."""
    costs = [column[plate("figure_6").table["length"].index(1000)]
             for column in list(plate("figure_6").table.values())[1:]]  # fmt: skip
    assert costs == [2948, 3640, 2663, 2898, 2750, 1988]


@pytest.mark.parametrize(("beta", "least"), [(2, 63), (5, 98), (10, 137)])
def test_figure_7_memory_is_saved_at_the_cost_of_chen(beta, least):
    """Section 4.2."""
    name = f"least memory at cost 2 per step, β = {beta} "
    assert at("figure_7", name, 1000) == least
    lengths, memories = np.array(plate("figure_7").table["length"]), column("figure_7", name)
    assert np.all(memories < np.sqrt(lengths) * (1 + beta))
    units = {"alpha": beta + 1, "beta": beta}
    for t, m in zip(lengths.tolist()[::25], memories.tolist()[::25], strict=True):
        assert rg.cost(t, m, "msm", **units) <= 2 * t
        assert m == 1 or rg.cost(t, m - 1, "msm", **units) > 2 * t


@pytest.mark.parametrize("beta", [2, 5, 10])
def test_figure_7_the_memory_of_chen_never_costs_more_than_two(beta):
    lengths = np.array(plate("figure_7").table["length"])
    room = column("figure_7", f"memory √t·(1+β) rounded down, β = {beta} ")
    spent = column("figure_7", f"cost in that memory, β = {beta} ")
    assert np.array_equal(room, np.floor(np.sqrt(lengths * (1.0 + beta) ** 2)))
    assert np.all(spent < 2 * lengths)
    some = slice(None, None, 25)
    costs = rg.cost(lengths[some], room[some], "msm", alpha=beta + 1, beta=beta)
    assert spent[some].tolist() == costs.tolist()


def test_figure_3_is_the_plan():
    table = plate("figure_3").table
    for panel, length, cost in (("a", 4, 7), ("b", 10, 24)):
        rows = zip(table["panel"], table["action"], strict=True)
        actions = ", ".join(action for which, action in rows if which == panel)
        assert actions == (GOLDEN / f"figure_3{panel}.txt").read_text(encoding="utf-8").strip()
        title = f"({panel}) HSM: {length} steps,\nmemory of 4 hidden states, {cost} forward steps"
        axes = plate("figure_3").figure.axes["ab".index(panel)]
        assert axes.get_title(loc="left") == title


@pytest.mark.parametrize("memory", range(1, 9))
def test_figure_8_the_composed_strategy_is_legal_and_costs_less_than_three(memory):
    schedule = compose(memory)
    replay = rg.simulate(schedule)
    assert schedule.length == memory * (memory + 1) // 2
    assert replay.peak <= memory
    assert replay.cost == schedule.length - 1 + memory**2 < 3 * schedule.length
    assert rg.cost(schedule.length, memory) <= replay.cost


def test_figure_8_the_optimum_is_a_step_less():
    assert (compose(4).cost, rg.cost(10, 4)) == (25, 24)


def test_figure_8_the_longest_sequences_and_proposition_2():
    table = plate("figure_8").table
    for a in (2, 3, 4, 5):
        for m, t in zip(table["memory"], table[f"T({a},m) (steps)"], strict=True):
            assert rg.cost(t, m) <= a * t
            assert rg.cost(t + 1, m) > a * (t + 1)
            assert t >= m ** (a - 1) / factorial(a - 1)
            if a <= m + 1:
                assert t == comb(m + a, a - 1)
    assert [table[f"T({a},m) (steps)"][9] for a in (2, 3, 4, 5)] == [12, 78, 364, 1365]


def test_the_power_bounds_where_they_are_tightest():
    """Section 3.5: 4·t^(1+1/m) holds, 3·t^(1+1/m) without the first sweep does not."""
    table = sweep_power(10**5 - 1, [1, 2, 20, 25, 28, 29, 34, 56, 100, 999])
    rows = {m: {name: column[i] for name, column in table.items()}
            for i, m in enumerate(table["memory"])}  # fmt: skip
    assert max(table["largest C/t^(1+1/m)"]) == rows[56]["largest C/t^(1+1/m)"]
    assert rows[56]["largest C/t^(1+1/m)"] == pytest.approx(3.79223, abs=5e-6)
    assert rows[29]["largest (C−t)/t^(1+1/m)"] == pytest.approx(3.04987, abs=5e-6)
    assert rows[29]["at length, (C−t)/t^(1+1/m)"] == 99_999
    cells = table["cells with C−t ≥ 3·t^(1+1/m)"]
    assert cells == [0, 0, 1835, 0, 19691, 18554, 0, 0, 0, 0]
    assert all(ratio <= m for m, ratio in zip(table["memory"], table["largest C/t^(1+1/m)"],
                                              strict=True))  # fmt: skip


def test_the_first_lengths_at_which_three_does_not_hold():
    for memory, first in ((28, 80309), (29, 81446), (20, 98165)):
        for length, holds in ((first - 1, True), (first, False)):
            ratio = (rg.cost(length, memory) - length) / length ** (1 + 1 / memory)
            assert (ratio < 3) == holds


def least_multiple(length, memory, strictly):
    """The least a ≤ m with t < mᵃ/a!, or t ≤ mᵃ/a!, one after the other."""
    for a in range(1, memory + 1):
        if length * factorial(a) < memory**a + (not strictly):
            return a
    return None


@pytest.mark.parametrize("memory", [1, 2, 3, 7, 30])
def test_the_linear_bounds_are_those_of_the_paper(memory):
    table = {name: column[0] for name, column in sweep_linear(300, [memory]).items()}
    for name, policy, strictly in (("C/((a+1)·t)", "hsm", True), ("C of ISM/(a·t)", "ism", False)):
        for where, fewest in (("", 1), (", a ≥ 2", 2)):
            ratios = {}
            for t in range(1, 301):
                a = least_multiple(t, memory, strictly)
                if a is not None and a >= fewest:
                    ratios[t] = rg.cost(t, memory, policy) / ((a + strictly) * t)
            largest = max(ratios.values(), default=float("nan"))
            assert table[f"largest {name}{where}"] == pytest.approx(largest, nan_ok=True)
            assert ratios.get(table[f"at length, {name}{where}"], largest) == pytest.approx(
                largest, nan_ok=True
            )
            assert not largest > 1


@pytest.mark.slow
def test_the_bounds_in_every_cell():
    """t < 10⁵ and m < 10³: 10⁸ cells."""
    power, linear = plate("bounds_power").table, plate("bounds_linear").table
    assert power["memory"] == linear["memory"] == list(range(1, 1000))
    assert max(power["largest C/t^(1+1/m)"]) == pytest.approx(3.79223, abs=5e-6)
    assert max(power["largest (C−t)/t^(1+1/m)"]) == pytest.approx(3.04987, abs=5e-6)
    cells = zip(power["memory"], power["cells with C−t ≥ 3·t^(1+1/m)"], strict=True)
    assert {m: n for m, n in cells if n} == {
        20: 1835, 21: 375, 26: 8966, 27: 17967, 28: 19691, 29: 18554, 30: 15785, 31: 11883,
        32: 7086, 33: 1521,
    }  # fmt: skip
    assert sum(power["cells with C−t ≥ 3·t^(1+1/m)"]) == 103_663
    for m, ratio in zip(power["memory"], power["largest C/t^(1+1/m)"], strict=True):
        assert ratio <= m
    for name, column in linear.items():
        if name.startswith("largest"):
            assert np.nanmax(column) <= 1
        if name.startswith("T("):
            assert min(column) >= 1
    assert np.nanmax(linear["largest C/((a+1)·t)"]) == pytest.approx(0.999499, abs=5e-7)


def test_figure_2b_draws_what_was_measured_and_names_the_machine():
    drawn = figure_2b(SMALL)
    assert drawn.table == {
        "length": (5, 50),
        "torch.nn.LSTM (s)": (0.01, 0.1),
        "HSM, 10 hidden states (s)": (0.02, 0.25),
        "HSM, 1000 hidden states (s)": (0.02, 0.15),
    }
    assert "abacus, 2 threads, torch 0.0" in drawn.note
    (axes,) = drawn.figure.axes
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2, 2], [4, 5], [4, 3]]
    assert Seconds.from_json(SMALL.to_json()) == SMALL


def test_figure_2b_comes_with_numbers():
    lengths = plate("figure_2b").table["length"]
    assert list(lengths) == sorted(lengths)
    assert len(plate("figure_2b").table) == 7
    for name, column in list(plate("figure_2b").table.items())[1:]:
        assert name.endswith("(s)")
        assert len(column) == len(lengths)
        assert min(column) > 0


def test_measuring_shares_what_is_the_same_schedule():
    seconds = measure_seconds([2, 6], [3, 5, 10], rounds=2, size=4, batch=2)
    assert seconds.lengths == (2, 6)
    assert len(seconds.ordinary) == 2
    assert set(seconds.budgeted) == {3, 5, 10}
    assert seconds.budgeted[5] == seconds.budgeted[10]
    assert seconds.budgeted[3][0] == seconds.budgeted[10][0]
    assert seconds.budgeted[3][1] != seconds.budgeted[10][1]
    assert seconds.machine["device"]
    assert expected_seconds([2, 6], [3, 10], rounds=2, size=4, batch=2) > 0


@pytest.mark.parametrize("name", [n for n in GRUSLYS if not n.startswith("bounds")])
def test_every_picture_can_be_read_on_its_own(name):
    drawn = plate(name)
    assert drawn.name == name
    assert drawn.note
    assert " ".join(drawn.figure.get_supxlabel().split()) == drawn.note
    for axes in drawn.figure.axes:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        marked = [line for line in axes.lines if line.get_marker() not in ("", "None")]
        for values, (low, high) in [
            *((line.get_xdata(), axes.get_xlim()) for line in marked),
            *((line.get_ydata(), axes.get_ylim()) for line in marked),
        ]:
            assert low < min(values), "a marker is cut"
            assert max(values) < high, "a marker is cut"
    legend = drawn.figure.axes[-1].get_legend()
    assert len(legend.get_texts()) >= 3


def test_the_colours_are_those_of_the_captions():
    drawn = [to_hex(line.get_color()) for line in plate("figure_2a").figure.axes[0].lines[:5]]
    assert drawn == [
        to_hex(c) for c in (curves.RED, curves.GREEN, curves.BLUE, curves.VIOLET, curves.CYAN)
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["figure_2a", "figure_3", "figure_8"])
def test_plates_are_written_with_their_numbers_and_always_the_same(name, tmp_path):
    first = save_plate(GRUSLYS[name](), tmp_path / "first")
    second = save_plate(GRUSLYS[name](), tmp_path / "second")
    assert [path.name for path in first] == [f"{name}.{end}" for end in ("svg", "png", "csv")]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    with first[2].open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    table = plate(name).table
    assert header == list(table)
    assert len(rows) == len(next(iter(table.values())))
    assert [row[0] for row in rows] == [str(value) for value in next(iter(table.values()))]
