"""The figures of Wang (2020) on feed-forward networks: what is drawn, and the numbers beside it."""

import pytest

from retrograde.scan.blelloch import blelloch
from retrograde.scan.elements import UNREAD
from retrograde.scan.work_report import Report
from retrograde_papers.every import PLATES
from retrograde_papers.networks import vgg11
from wang2020.flops import Counted, Point, Pruning, figure_5_5
from wang2020.jacobian_figures import figure_3_1, figure_3_3, table_3_1
from wang2020.training_figures import Convergence, figure_3_4

NAMES = ("figure_3_1", "figure_3_3", "figure_3_4", "figure_5_5", "table_3_1")


def test_all_are_among_the_plates():
    assert set(NAMES) <= set(PLATES)
    assert PLATES["figure_3_1"]().name == "figure_3_1"


def test_the_levels_drawn_are_those_of_the_scan():
    report = Report(cost=lambda a, b: 0)
    names = [type(layer).__name__ for layer in vgg11(width=4)[:-2]]
    blelloch(["x", *names[1:], UNREAD], lambda a, b: f"{a}{b}", report=report)
    table = figure_3_1().table
    products = [
        m + v for m, v in zip(table["matrix products"], table["vector products"], strict=True)
    ]
    assert products == [len(level.products) for level in report.levels]
    assert sum(table["matrix products"][5:]) == 0  # downward only vectors


def test_patterns_are_drawn_entry_by_entry():
    plate = figure_3_3()
    assert plate.table["operator"].count("ReLU") == 72
    assert plate.table["operator"].count("max-pooling, 2×2") == 72
    assert plate.table["operator"].count("convolution, 3×3") == 2 * 3 * (3 * 6 - 2) ** 2
    assert [len(axes.lines[0].get_xdata()) for axes in plate.figure.axes] == [1536, 72, 72]


def test_the_sparsities_are_the_papers():
    table = table_3_1().table
    assert [round(share, 5) for share in table["guaranteed zeros"]] == [0.99157, 0.99998, 0.99994]
    assert table["dense (MiB)"][0] == 768
    assert round(table["CSR values (MiB)"][0], 1) == 6.5
    assert min(table["ratio"]) > 1000


def test_both_losses_are_drawn_and_the_difference_is_told():
    losses = {"torch": [2.0, 1.5], "scan": [2.0, 1.5]}
    settings = {
        "training": 10, "testing": 5, "batch": 2, "learning_rate": 0.1, "momentum": 0.9,
        "epochs": 1, "algorithm": "blelloch",
    }  # fmt: skip
    found = Convergence(
        {"device": "abacus"}, settings, 5, losses, losses, 3e-7, 4e-7,
        {"torch": 0.5, "scan": 0.5}, {},
    )  # fmt: skip
    plate = figure_3_4(found)
    assert plate.table["iteration"] == [5, 10]
    assert "3e-07" in plate.note
    assert [len(axes.lines) for axes in plate.figure.axes] == [2, 2]


def test_steps_on_the_critical_path_are_filled():
    points = (
        Point("vector", 0, "2×2 · 2", 4, 8, critical=True),
        Point("matrix", 0, "2×2 · 2×2", 8, 6, critical=False),
        Point("ordinary", 0, "Linear", 4, 8, critical=True),
    )
    scan = (Counted(3, 1, 14, 8, 8),)
    settings = {"share": 0.97, "epochs": 1, "training": 100}
    accuracy = {"trained": 0.5, "pruned": 0.1, "retrained": 0.4}
    plate = figure_5_5(
        Pruning({}, settings, accuracy, (2.0,), {}, 3, points, scan, scan, ordinary_flops=8)
    )
    filled = [len(c.get_offsets()) for c in plate.figure.axes[0].collections]
    assert filled == [0, 1, 1, 0, 0, 1]
    assert plate.table["flops"] == [8, 6, 8]


@pytest.mark.parametrize("name", ["figure_3_4", "figure_5_5"])
def test_what_is_shipped_is_drawn(name):
    assert PLATES[name]().note
