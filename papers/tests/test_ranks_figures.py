"""Figures of many ranks: computed, and marked as such."""

import math
from dataclasses import replace

import numpy as np
import pytest

from retrograde_papers.every import PLATES
from retrograde_papers.plates import save_plate
from wang2020.ranks_figures import RANKS, ranks_memory, ranks_seconds
from wang2020.ranks_model import RankModel
from wang2020.ranks_results import Crossing, Ranks


def found() -> Ranks:
    model = RankModel(1e-3, 1e9, 0.01, 0.3, 60_000, 2_000, 1e-3, 5e-4)
    crossings = tuple(Crossing(way, 0.5) for way in ("linear", "tree"))
    settings = {
        "ranks": 3, "hidden": 8, "steps": 50, "batch": 4, "backend": "gloo",
        "note": "which slept meanwhile",
    }  # fmt: skip
    return Ranks({"device": "abacus", "threads": 1}, settings, model, 0.1, crossings)


@pytest.mark.quick(0)
def test_seconds_are_the_models_and_say_so(tmp_path):
    one = found()
    plate = ranks_seconds(one)
    ranks = plate.table["ranks"]
    assert (ranks[0], ranks[-1]) == (2, 10**6)
    for way in ("linear", "tree"):
        assert plate.table[f"{way}, computed (s)"] == one.model.seconds(way, ranks).tolist()
    assert plate.note.startswith("Curves: computed, not measured.")
    assert "3 processes over gloo, abacus, 1 thread each (which slept meanwhile)" in plate.note
    assert "latency 1 ms" in plate.note
    left, right = plate.figure.axes
    assert left.get_title(loc="left").endswith("computed")
    assert right.get_title(loc="left").endswith("computed")
    first = one.model.first_ranks_where("tree", beats="linear")
    assert f"first at p = {first}" in left.texts[0].get_text()
    save_plate(plate, tmp_path)


def test_nothing_is_marked_where_the_tree_never_wins():
    one = found()
    model = replace(one.model, jacobian_seconds=1e9, bytes_per_second=math.inf)
    plate = ranks_seconds(replace(one, model=model, crossings=()))
    assert not plate.figure.axes[0].texts
    assert "bytes without delay" in plate.note


def test_space_is_constant_for_the_scan_and_grows_for_pipelines():
    plate = ranks_memory(found())
    scan = np.array(plate.table["BPPSA (bytes)"])
    pipeline = np.array(plate.table["pipeline parallelism (bytes)"])
    ranks = np.array(plate.table["ranks"])
    assert (scan[ranks >= 10**4] == 60_000).all()
    assert (np.diff(pipeline)[ranks[:-1] >= 200] > 0).all()
    assert plate.note.startswith("Computed, not measured")


def test_from_where_the_tree_wins_it_goes_on_winning():
    model = Ranks.shipped().model
    first = model.first_ranks_where("tree", beats="linear")
    ranks = np.arange(first, 5000)
    assert (model.seconds("tree", ranks) < model.seconds("linear", ranks)).all()


@pytest.mark.parametrize("name", RANKS)
def test_the_librarys_numbers_are_drawn(name):
    assert PLATES[name]().name == name
