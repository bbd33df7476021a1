"""The figures of Wang (2020) on recurrent networks: what is drawn, and the numbers beside it."""

import csv
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

from retrograde_papers.every import PLATES
from retrograde_papers.plates import save_plate
from wang2020.figures import WANG, plates_of
from wang2020.loss_figures import figure_5_1, figure_5_3
from wang2020.results import (
    Curves,
    Results,
    ResultsError,
    Timing,
    Timings,
    shipped,
)
from wang2020.seconds_figures import figure_5_2, figure_5_4
from wang2020.style import colour_of

MACHINE = {"device": "abacus", "threads": 1, "torch": "0.0"}
SETTINGS = {
    "cell": "rnn", "data": "", "length": 100, "features": 1, "classes": 10, "hidden": 20,
    "batch": 4, "learning_rate": 3e-5, "seed": 0, "iterations": 5, "training": 32_000,
    "testing": 500,
}  # fmt: skip
WAYS = ("torch", "scan")


def curves(**settings):
    return Curves(
        machine=MACHINE, settings=SETTINGS | settings, every=2,
        seconds={"torch": (2.0, 4.0, 5.0), "scan": (1.0, 2.0, 2.5)},
        losses={"torch": (2.3, 2.0, 1.5), "scan": (2.3, 2.0, 1.5)},
        forward={"torch": 0.2, "scan": 0.3}, backward={"torch": 0.7, "scan": 0.1},
        update={"torch": 0.1, "scan": 0.1}, first={"torch": 1.0, "scan": 9.0},
        difference={"torch": 0.0, "scan": 1.5e-6}, accuracy={"torch": 0.5, "scan": 0.5},
    )  # fmt: skip


def timing(name, length, batch):
    return Timing(
        name, length, batch, {"torch": 1.0, "scan": 1.5}, {"torch": 3.0, "scan": 0.5},
        {"torch": 0.5, "scan": 0.5},
    )  # fmt: skip


BITS = Results(
    "bitstream",
    (curves(),),
    Timings(MACHINE, {"cell": "rnn", "length": 100, "batch": 4, "hidden": 20, "seed": 0}, 3,
            (timing("", 10, 4), timing("", 100, 4), timing("", 100, 2))),
)  # fmt: skip
SOUNDS = Results(
    "instruments",
    (curves(cell="gru", data="S", length=9), curves(cell="gru", data="M", length=13)),
    Timings(MACHINE, {"cell": "gru", "length": 1000, "batch": 4, "hidden": 20, "seed": 0}, 3,
            (timing("S", 9, 2), timing("S", 9, 4), timing("M", 13, 2), timing("M", 13, 4))),
)  # fmt: skip


def test_numbers_survive_their_json():
    for results in (BITS, SOUNDS):
        assert Results.from_json(results.to_json()) == results
    for text in ("", "{}", '{"experiment": "x", "curves": [{}], "timings": null}'):
        with pytest.raises(ResultsError, match="these are not results"):
            Results.from_json(text)


def test_losses_are_drawn_over_time_and_over_iterations():
    plate = figure_5_1(BITS)
    left, right = plate.figure.axes
    assert [line.get_xdata().tolist() for line in left.lines] == [[2, 4, 5], [1, 2, 2.5]]
    assert [list(line.get_xdata()) for line in right.lines] == [[2, 4, 5], [2, 4, 5]]
    assert right.lines[0].get_linewidth() > right.lines[1].get_linewidth()  # both are seen
    assert [to_hex(line.get_color()) for line in left.lines] == [
        to_hex(colour_of(way)) for way in WAYS
    ]
    assert plate.table == {
        "iteration": [2, 4, 5], "torch (s)": [2, 4, 5], "torch (loss, nats)": [2.3, 2, 1.5],
        "scan (s)": [1, 2, 2.5], "scan (loss, nats)": [2.3, 2, 1.5],
    }  # fmt: skip
    for expected in ("held-out accuracy: 2e-06; scan 2.00× (7.00×); 50.0 % each.",
                     "abacus, 1 thread, torch 0.0"):  # fmt: skip
        assert expected in plate.note


def test_every_set_of_instruments_has_its_axes():
    plate = figure_5_3(SOUNDS)
    assert [axes.get_title(loc="left") for axes in plate.figure.axes[:2]] == [
        "set S: T = 9",
        "set M: T = 13",
    ]
    assert plate.table["set"] == ["S"] * 3 + ["M"] * 3
    assert len(figure_5_3(Results("instruments", SOUNDS.curves[:1])).figure.axes) == 2


def test_speed_ups_are_torchs_seconds_over_the_others():
    plate = figure_5_2(BITS)
    by_length, by_batch, whole, _ = plate.figure.axes
    assert list(by_length.lines[0].get_xdata()) == [10, 100]
    assert list(by_length.lines[0].get_ydata()) == [6, 6]
    assert list(by_batch.lines[0].get_xdata()) == [2, 4]
    assert list(whole.lines[0].get_ydata()) == [4.5 / 2.5] * 2
    assert plate.table["length"] == [10, 100, 100]
    assert plate.table["scan, backward (s)"] == [0.5] * 3


def test_an_iteration_is_broken_down_in_torchs_time():
    plate = figure_5_4(SOUNDS)
    left = plate.figure.axes[0]
    bars = [(bar.get_x(), bar.get_width()) for bar in left.patches[:6]]
    assert bars == [(0, 0.25), (0.25, 0), (0.25, 0.75), (0, 0.25), (0.25, 0.125), (0.375, 0.125)]
    assert [label.get_text() for label in left.get_yticklabels()] == [
        "B = 2, torch", "scan", "B = 4, torch", "scan",
    ]  # fmt: skip
    assert plate.table["set"] == ["S", "S", "M", "M"]


def test_a_very_long_bar_is_cut_and_says_how_long_it_is():
    assert SOUNDS.timings is not None
    slow = replace(timing("S", 9, 2), backward={"torch": 3.0, "scan": 80.0})
    plate = figure_5_4(replace(SOUNDS, timings=replace(SOUNDS.timings, points=(slow,))))
    (axes,) = plate.figure.axes
    assert axes.get_xlim() == (0, 3)
    assert [text.get_text() for text in axes.texts] == ["20.4 ▸"]


def test_only_what_was_measured_is_drawn():
    assert [plate.name for plate in plates_of(BITS)] == ["figure_5_1", "figure_5_2"]
    assert [plate.name for plate in plates_of(Results("instruments", SOUNDS.curves))] == [
        "figure_5_3"
    ]


@pytest.mark.quick(0)
def test_plates_are_always_the_same(tmp_path):
    for results in (BITS, SOUNDS):
        for one, other in zip(plates_of(results), plates_of(results), strict=True):
            first, second = save_plate(one, tmp_path / "1"), save_plate(other, tmp_path / "2")
            assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
            with first[2].open(encoding="utf-8", newline="") as file:
                assert next(csv.reader(file)) == list(one.table)


def test_the_figures_stand_beside_those_of_gruslys():
    chapter_3 = ["figure_3_1", "table_3_1", "figure_3_3", "figure_3_4"]
    assert list(WANG) == [*chapter_3, *(f"figure_5_{number}" for number in range(1, 6))]
    assert set(WANG) < set(PLATES)


@pytest.mark.parametrize("experiment", ["bitstream", "instruments"])
def test_the_numbers_of_the_library_are_of_equal_gradients(experiment):
    results = shipped(experiment)
    assert results.experiment == experiment
    assert results.timings is not None
    for each in results.curves:
        assert each.ways[0] == "torch"
        assert "scan" in each.ways
        assert each.machine["device"]
        for way in each.ways[1:]:
            first = each.losses[way][0]
            assert first == pytest.approx(each.losses["torch"][0], abs=1e-3)


def test_the_instruments_of_the_library_were_learnt_every_way():
    for each in shipped("instruments").curves:
        chance = 1 / each.settings["classes"]
        for way in each.ways:
            assert each.losses[way][-1] < each.losses[way][0]
            assert each.accuracy[way] > 2.5 * chance
            assert each.accuracy[way] == pytest.approx(each.accuracy["torch"], abs=0.1)
