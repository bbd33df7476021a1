"""Deep networks within a budget: what is drawn, and the numbers beside it."""

from dataclasses import replace

import pytest

from gruslys2016.deep_figures import DEEP, deep_losses, deep_memory, deep_schedule, deep_trade_off
from gruslys2016.deep_results import Deep, Held, Side
from gruslys2016.planned import draw_planned, planned_memory
from retrograde import figures
from retrograde.errors import ScheduleError
from retrograde.plan import plan
from retrograde.plan.chains import chain_minimum, plan_chain
from retrograde.schedule import Chain
from retrograde_papers.plates import save_plate

CHAIN = Chain(
    [1, 2, 3, 2, 1], [3, 1, 4, 1, 5], [2**20, 3 * 2**20, 2**19, 2**20, 2**18],
    [2**20, 5 * 2**20, 2**20, 2**20, 2**18], backward_transient_bytes=[2**18, 0, 2**20, 0, 7],
    keeps_input=[True, False, True, False, True], overhead_bytes=640,
)  # fmt: skip


def found() -> Deep:
    whole = plan(CHAIN, policy="store-all")
    least = chain_minimum(CHAIN)
    schedule = plan_chain(CHAIN, least)
    planned, ordinary = planned_memory(schedule), planned_memory(whole)
    sides = (
        Side("ordinary", "ordinary", 0, whole.peak, 1.0),
        Side("90%", "budget", least, schedule.peak, 1.25),
        Side("2 segments", "segments", 0, whole.peak - 1, 1.5),
    )
    settings = {
        "network": "vgg11", "title": "VGG-11", "images": "noise", "batch": 2, "iterations": 3,
        "learning_rate": 0.1, "momentum": 0.9, "rounds": 3, "note": "which slept meanwhile",
    }  # fmt: skip
    losses = {"ordinary": [2.0, 1.5, 1.25], "90%": [2.0, 1.5, 1.25]}
    curves = {"msm": [(least, 30.0), (whole.peak, 23.0)], "hsm": [(least, 31.0)]}
    return Deep(
        {"device": "abacus"}, settings, CHAIN.to_json(), whole.peak, least, 23.0, losses,
        {"90%": 0.0}, {"90%": 0.0}, {"ordinary": 1.0, "90%": 1.3}, sides, {"5%": "too little"},
        curves, {"90%": Held(planned, planned, ordinary, ordinary)},
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_memory_as_planned_peaks_where_the_schedule_does(share):
    least = chain_minimum(CHAIN)
    whole = plan(CHAIN, policy="store-all").peak
    schedule = plan_chain(CHAIN, least + int(share * (whole - least)))
    curve = planned_memory(schedule)
    assert max(curve.held_bytes) == schedule.peak
    assert curve.seconds[0] == 0
    assert curve.seconds[-1] == pytest.approx(schedule.seconds)
    assert list(curve.seconds) == sorted(set(curve.seconds))
    assert curve.held_bytes[-1] == CHAIN.overhead_bytes


def test_a_recurrence_has_no_memory_over_time():
    with pytest.raises(ScheduleError, match="have no seconds: expected one of a chain"):
        planned_memory(plan(10, 4, policy="hsm"))


def test_planned_and_measured_are_two_panels_of_one_scale():
    curve, other = figures.Curve((0.0, 1.0), (2**20, 0)), figures.Curve((0.0, 2.0), (2**22, 0))
    figure = draw_planned(curve, curve, 2**21, (other, other))
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert left.get_xlim() == right.get_xlim()
    assert right.get_xlim()[1] >= 2.0
    longer = draw_planned(curve, figures.Curve((0.0, 3.0), (2**20, 0)), 2**21)
    assert longer.axes[0].get_xlim()[1] >= 3.0
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        "ordinary backpropagation, peak 4 MiB",
        "within the budget, peak 1 MiB",
        "budget, 2 MiB",
    ]
    assert len(draw_planned(curve, curve, 2**21).axes[0].get_legend().get_texts()) == 2


def test_a_picture_of_a_chain_speaks_of_layers_and_bytes():
    schedule = plan_chain(CHAIN, chain_minimum(CHAIN))
    (axes,) = figures.draw_schedule(schedule).axes
    assert axes.get_title(loc="left").startswith("MSM: 5 layers, memory ")
    assert axes.get_title(loc="left").endswith(f"MiB, {schedule.cost} layers run forward")
    assert axes.get_xlabel() == "hidden state (k is the one before layer k)"


def test_the_numbers_are_read_as_they_were_written():
    one = found()
    assert Deep.from_json(one.to_json()) == one


@pytest.mark.quick(0)
def test_every_plate_has_its_numbers_and_its_caption(tmp_path):
    one = found()
    losses = deep_losses(one)
    assert losses.table["90% (nats)"] == [2.0, 1.5, 1.25]
    assert "Greatest distance of any loss from the ordinary one 0," in losses.note
    assert "Refused: 5 %, for " in losses.note
    assert "abacus (which slept meanwhile)" in losses.note
    memory = deep_memory(one)
    assert max(memory.table["bytes"]) == one.ordinary_bytes
    schedule = deep_schedule(one)
    assert max(schedule.table["most held (bytes)"]) == one.side("90%").peak_bytes
    trade_off = deep_trade_off(one)
    assert trade_off.table["seconds (ordinary = 1)"] == [30 / 23, 1.0, 31 / 23, 1.0, 1.25, 1.5]
    for plate in (losses, memory, schedule, trade_off):
        assert plate.name.startswith("deep_vgg11_")
        save_plate(plate, tmp_path)
    assert "Refused" not in deep_losses(replace(one, refused={})).note


@pytest.mark.parametrize("name", [name for name in DEEP if name.endswith("_losses")])
def test_the_numbers_of_the_library_are_of_equal_gradients(name):
    plate = DEEP[name]()
    first, *others = [values for way, values in plate.table.items() if way != "iteration"]
    assert others
    assert all(values == first for values in others)
    assert len(set(first)) == len(first)
