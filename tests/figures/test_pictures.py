"""The pictures: what is drawn, and that the files are whole and reproducible."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex

from retrograde import figures
from retrograde.figures.schedules import _lay_out
from retrograde.figures.style import BLUE, GREEN, GREY, ORANGE, new_axes
from retrograde.plan import plan, trade_off
from retrograde.schedule import Advance, Backward, Free, Load, Record, Schedule, Store

FOUR = Schedule.from_actions(
    [
        Store(0), Advance(0, 1), Store(1), Advance(1, 3), Record(3, 4), Backward(3, 4),
        Load(1), Advance(1, 2), Record(2, 3), Backward(2, 3), Load(1), Record(1, 2),
        Backward(1, 2), Free(1), Load(0), Record(0, 1), Backward(0, 1), Free(0),
    ],
    length=4,
    policy="hsm",
    memory=2,
)  # fmt: skip


def blocks(length: int, block: int) -> Schedule:
    """Store a state at each block, then record and backpropagate block by block."""
    starts = range(0, length, block)
    actions = [Store(0)]
    for start in starts[1:]:
        actions += [Advance(start - block, start), Store(start)]
    for start in reversed(starts):
        stop = min(start + block, length)
        actions += [Load(start)] if start != starts[-1] else []
        actions += [Record(start, stop), Backward(start, stop), Free(start)]
    return Schedule.from_actions(actions, length=length, policy="blocks")


def segments(figure, colour):
    """The line segments of one colour, as (from, to, height) or (at, first, last)."""
    (axes,) = figure.axes
    return [
        path.vertices
        for collection in axes.collections
        if isinstance(collection, LineCollection)
        for path in collection.get_paths()
        if to_hex(collection.get_color()[0]) == colour.lower()
    ]


def test_a_row_is_a_sweep():
    layout = _lay_out(FOUR)
    assert layout.rows == 4
    assert layout.advances == [(0, 0, 3), (1, 1, 2)]
    assert layout.records == [(0, 3, 4), (1, 2, 3), (2, 1, 2), (3, 0, 1)]
    assert layout.backwards == [(0, 4, 3), (1, 3, 2), (2, 2, 1), (3, 1, 0)]
    assert layout.loads == [(1, 1), (2, 1), (3, 0)]
    assert layout.kept == [(1, 0, 2), (0, 0, 3)]


def test_internal_states_are_a_field_from_the_row_that_records_them():
    actions = [Record(0, 2), Advance(2, 3), Record(3, 4), Backward(3, 4), Load(2), Record(2, 3),
               Backward(0, 3)]  # fmt: skip
    layout = _lay_out(Schedule.from_actions(actions, length=4))
    assert layout.internal == [(3, 4, 0, 0), (0, 2, 0, 1), (2, 3, 1, 1)]


def test_the_schedule_is_drawn_in_full():
    figure = figures.draw_schedule(FOUR)
    assert [len(segments(figure, colour)) for colour in (BLUE, ORANGE, GREEN, GREY)] == [2, 4, 4, 2]
    first_run = segments(figure, BLUE)[0]
    assert first_run[:, 0].tolist() == [0, 3]
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[:4] == ["run forward", "run forward, recorded", "backpropagated",
                         "hidden state kept"]  # fmt: skip
    assert figure.axes[0].get_title(loc="left") == (
        "HSM: 4 steps, memory of 2 hidden states, 8 forward steps"
    )


def test_a_legend_names_what_is_drawn_and_the_memory_is_in_states():
    everything = Schedule.from_actions([Record(0, 5), Backward(0, 5)], length=5)
    (axes,) = figures.draw_schedule(everything).axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["run forward, recorded", "backpropagated", "internal states kept"]
    titles = {
        policy: figures.draw_schedule(plan(30, 20, policy, **sizes)).axes[0].get_title(loc="left")
        for policy, sizes in (("ism", {}), ("msm", {"alpha": 5}))
    }
    assert "memory of 20 internal states, " in titles["ism"]
    assert "memory of 20 hidden states (α = 5, β = 4), " in titles["msm"]


def test_the_ends_of_a_trade_off_are_named():
    (axes,) = figures.draw_trade_off(trade_off(100, "ism")).axes
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["ordinary BPTT", "memory 100 or more: cost 1", "memory 1: cost 50.5"]
    (axes,) = figures.draw_trade_off(trade_off(1, "ism")).axes
    assert [text.get_text() for text in axes.texts][1:] == ["memory 1 or more: cost 1"]


@pytest.mark.parametrize(("length", "block"), [(1, 1), (63, 1), (1000, 7), (1000, 40)])
def test_schedules_of_any_size_can_be_drawn(tmp_path, length, block):
    figure = figures.draw_schedule(blocks(length, block))
    assert len(segments(figure, GREEN)) == -(-length // block)
    figures.save(figure, tmp_path, "schedule")


def test_a_schedule_can_be_drawn_into_another_figure():
    axes = new_axes(5, 4)
    assert figures.draw_schedule(FOUR, axes) is axes.get_figure()


def test_memory_is_drawn_before_ordinary_backpropagation_and_under_the_budget_line():
    ordinary = figures.Curve((0.0, 0.5, 1.0), (2**20, 2**29, 0))
    budgeted = figures.Curve((0.0, 0.5, 1.0), (2**20, 2**24, 0))
    (axes,) = figures.draw_memory(budgeted, 2**25, ordinary).axes
    assert axes.get_ylabel() == "working memory (MiB)"
    assert axes.get_ylim()[1] > 1.3 * 512
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "ordinary backpropagation, peak 512 MiB",
        "within the budget, peak 16 MiB",
        "budget, 32 MiB",
    ]
    (axes,) = figures.draw_memory(budgeted, 2**25).axes
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "within the budget, peak 16 MiB",
        "budget, 32 MiB",
    ]


def test_an_empty_curve_can_be_drawn(tmp_path):
    empty = figures.Curve((), ())
    figures.save(figures.draw_memory(empty, 1000, empty), tmp_path, "memory")


def test_a_thinned_curve_keeps_its_outline():
    held = np.random.default_rng(0).integers(0, 10**6, 10_001)
    curve = figures.Curve(np.arange(10_001) / 7, held)
    thin = curve.thinned(500)
    assert thin.peak_bytes == held.max()
    assert len(thin.seconds) <= 502
    assert len(thin.seconds) == len(thin.held_bytes)
    assert min(thin.held_bytes) == held.min()
    assert list(thin.seconds) == sorted(thin.seconds)
    assert curve.thinned(10_001) is curve


def test_the_same_picture_is_the_same_file(tmp_path):
    first = figures.save(figures.draw_schedule(FOUR), tmp_path / "deep" / "first", "schedule")
    second = figures.save(figures.draw_schedule(FOUR), tmp_path / "second", "schedule")
    assert [path.suffix for path in first] == [".svg", ".png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert first[1].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path(first[0]).read_text(encoding="utf-8")
