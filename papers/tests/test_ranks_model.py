"""The model of ranks: against a replay of every message, and against the general terms."""

import math
from dataclasses import replace

import numpy as np
import pytest

from retrograde.errors import ScanError
from retrograde.scan.blelloch import pairs
from wang2020.ranks_model import RankModel, pipeline_space, scan_space, scan_steps, scan_work

WAYS = ["linear", "tree"]
# Whole numbers and halves, so that sums are exact in any order.
MODELS = {
    "latency alone": RankModel(1.0, math.inf, 0.0, 0.0, 0, 0, 0.0, 0.0),
    "all alike": RankModel(1.0, 1.0, 1.0, 1.0, 1, 1, 1.0, 1.0),
    "long sweeps": RankModel(1.0, 2.0, 64.0, 8.0, 6, 2, 3.0, 1.0),
    "long Jacobians": RankModel(1.0, 2.0, 4.0, 128.0, 12, 2, 5.0, 1.0),
    "long products": RankModel(1.0, 4.0, 2.0, 16.0, 8, 4, 32.0, 7.0),
    "slow links": RankModel(16.0, 0.5, 2.0, 16.0, 8, 4, 3.0, 0.5),
}


def replayed(model, size, way):
    """Seconds until the last rank is through, message by message, in the order of the scan."""
    if way == "linear":
        clock = 0.0
        for rank in range(size):
            clock += model.hop(model.vector_bytes) * (rank > 0) + model.sweep_seconds
        return clock
    clock = [model.jacobian_seconds] * size
    clock[0] = model.sweep_seconds
    clock[-1] = model.sweep_seconds if size == 1 else 0.0
    rounds = math.ceil(math.log2(size))
    for d in range(rounds):
        for half, last in pairs(size - 1, d):
            is_first = half < 2**d
            sent = model.vector_bytes if is_first else model.matrix_bytes
            arrives = clock[half] + model.hop(sent)
            clock[last] = max(clock[last], arrives)
            if last < size - 1:
                clock[last] += model.apply_seconds if is_first else model.product_seconds
    for d in reversed(range(rounds)):
        for half, last in pairs(size - 1, d):
            if half >= 2**d:
                arrives = clock[last] + model.hop(model.vector_bytes)
                clock[half] = max(clock[half], arrives)
                clock[last] += model.apply_seconds
    return max([clock[0], *(each + model.sweep_seconds for each in clock[1:])])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_seconds_are_those_of_every_message_in_turn(name, way):
    model, sizes = MODELS[name], np.arange(1, 71)
    assert model.seconds(way, sizes).tolist() == [replayed(model, p, way) for p in sizes.tolist()]


def test_a_million_ranks_and_any_shape():
    model = MODELS["slow links"]
    tree = model.seconds("tree", [[2, 3], [1024, 10**6]])
    assert tree.shape == (2, 2)
    assert tree[1, 1] < 3 * tree[1, 0]
    assert model.seconds("tree", 1024) == replayed(model, 1024, "tree")
    assert model.seconds("linear", 10**6) > 1000 * tree[1, 1]


def test_the_first_number_of_ranks_at_which_a_way_wins():
    model = MODELS["long Jacobians"]
    first = model.first_ranks_where("tree", beats="linear")
    faster = [p for p in range(1, 200) if replayed(model, p, "tree") < replayed(model, p, "linear")]
    assert first == faster[0]
    assert faster == list(range(first, 200))
    assert model.first_ranks_where("tree", beats="linear", most=first - 1) is None
    odd = replace(model, latency_seconds=0.1, sweep_seconds=0.3, jacobian_seconds=1e9)
    assert odd.first_ranks_where("tree", beats="linear") is None  # not by rounding either
    far = replace(model, jacobian_seconds=2.0**16)
    assert far.seconds("tree", first) > far.seconds("linear", first)
    assert far.first_ranks_where("tree", beats="linear") > 5000


def test_bad_questions_are_answered():
    model = MODELS["all alike"]
    with pytest.raises(ScanError, match="unknown way 'ring'"):
        model.seconds("ring", 3)
    with pytest.raises(ScanError, match="got 0 ranks"):
        model.seconds("tree", [3, 0])
    with pytest.raises(ScanError, match="more than 0 bytes a second"):
        replace(model, bytes_per_second=0.0)
    with pytest.raises(ScanError, match="at least 0"):
        replace(model, sweep_seconds=math.nan)


def test_the_general_terms_are_those_of_the_paper():
    n, p = 2**20, 2 ** np.arange(1, 25)
    steps, space, pipeline = scan_steps(n, p), scan_space(n, p, 8.0), pipeline_space(n, p, 1.0)
    assert (np.diff(steps) < 0)[:18].all()
    assert steps[-1] == 20
    assert scan_work(n) == n
    assert (space[19:] == 8.0).all()  # constant, once each rank has one Jacobian
    assert pipeline.argmin() == 9  # at √n, and from there it grows with p
    assert pipeline[-1] > 2**24
