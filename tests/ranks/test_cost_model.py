"""The model of ranks: against a replay of every message, and against the clock."""

import copy
import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from retrograde.errors import RankError, ScanError
from retrograde.ranks.cost_model import (
    RankModel,
    measure_links,
    pipeline_space,
    scan_space,
    scan_steps,
    scan_work,
)
from retrograde.ranks.scan_over_ranks import messages, scan_ranks
from retrograde.ranks.time.sharded import TimeSharded
from retrograde.ranks.transport import simulate
from retrograde.recurrent.modules import GRU

WAYS = ["linear", "tree", "gather"]
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
    """Seconds until the last rank is through, message by message."""
    clock = [model.jacobian_seconds] * size  # of each, in the order of the scan
    clock[0] = model.sweep_seconds
    clock[-1] = model.sweep_seconds if size == 1 else 0.0
    if way == "linear":
        clock = [model.sweep_seconds, *[0.0] * (size - 1)]
    if way == "gather":
        return together(model, clock)
    for m in messages(size, way):
        vector = m.first == 0
        arrives = clock[m.source] + model.hop(model.vector_bytes if vector else model.matrix_bytes)
        clock[m.target] = max(clock[m.target], arrives)
        if m.phase == "on":
            clock[m.target] += model.sweep_seconds
        elif m.phase == "down":
            clock[m.source] += model.apply_seconds
        elif m.target < size - 1:
            clock[m.target] += model.apply_seconds if vector else model.product_seconds
    if way == "linear":
        return max(clock)
    return max([clock[0], *(each + model.sweep_seconds for each in clock[1:])])


def together(model, clock):
    """All begin when the last is ready; each link carries one block of bytes after the other."""
    size = len(clock)
    longest = model.matrix_bytes if size > 2 else model.vector_bytes
    received = sum(m.target == size - 1 for m in messages(size, "gather"))
    start = max(clock) + model.latency_seconds * (size > 1)
    products = max(0, size - 2) * model.apply_seconds
    sweep = model.sweep_seconds * (size > 1)
    return start + received * longest / model.bytes_per_second + products + sweep


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_seconds_are_those_of_every_message_in_turn(name, way):
    model, sizes = MODELS[name], np.arange(1, 71)
    assert model.seconds(way, sizes).tolist() == [replayed(model, p, way) for p in sizes.tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_those_of_the_busiest_rank(way):
    model = MODELS["long Jacobians"]
    for size in range(1, 71):
        sent = [0] * size
        for m in messages(size, way):
            whole = size > 2 if way == "gather" else m.first > 0
            sent[m.source] += model.matrix_bytes if whole else model.vector_bytes
        assert model.sent_bytes(way, size) == max(sent), size


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
        model.sent_bytes("tree", [3, 0])
    with pytest.raises(ScanError, match="more than 0 bytes a second"):
        replace(model, bytes_per_second=0.0)
    with pytest.raises(ScanError, match="at least 0"):
        replace(model, sweep_seconds=math.nan)
    with pytest.raises(RankError, match="one rank has no links"):
        simulate(1, measure_links)


def test_the_general_terms_are_those_of_the_paper():
    n, p = 2**20, 2 ** np.arange(1, 25)
    steps, space, pipeline = scan_steps(n, p), scan_space(n, p, 8.0), pipeline_space(n, p, 1.0)
    assert (np.diff(steps) < 0)[:18].all()
    assert steps[-1] == 20
    assert scan_work(n) == n
    assert (space[19:] == 8.0).all()  # constant, once each rank has one Jacobian
    assert pipeline.argmin() == 9  # at √n, and from there it grows with p
    assert pipeline[-1] > 2**24


def backward(links, way, model):
    """A backward pass with sleep in place of work; in a scan's order, as the first rank's is 0."""
    vector = torch.zeros(model.vector_bytes, dtype=torch.uint8)
    matrix = torch.zeros(model.matrix_bytes, dtype=torch.uint8)
    first, last = links.rank == 0, links.rank == links.size - 1

    def combine(a, b):
        one = a.numel() == model.vector_bytes
        time.sleep(model.apply_seconds if one else model.product_seconds)
        return a

    if way == "linear":
        if not first:
            links.receive(links.rank - 1)
        time.sleep(model.sweep_seconds)
        if not last:
            links.send(vector, links.rank + 1)
        return
    time.sleep(model.sweep_seconds if first else 0.0 if last else model.jacobian_seconds)
    scan_ranks(vector if first else matrix, links, combine, way=way)
    time.sleep(0.0 if first else model.sweep_seconds)


def taken(way, size, model, near=None):
    """The least time of up to five runs: what else runs can only delay one. With ``near``, the
    first that agrees with it is enough."""
    network = {"latency": model.latency_seconds, "bandwidth": model.bytes_per_second}
    least = math.inf
    for _ in range(5):
        start = time.perf_counter()
        simulate(size, lambda links: backward(links, way, model), **network)
        least = min(least, time.perf_counter() - start)
        if least == near:
            break
    return least


# Of a message, of a sweep, of a Jacobian: milliseconds, far above what threads take to wake.
CLOCK = RankModel(0.01, 1e6, 0.01, 0.1, 5000, 1000, 0.01, 0.005)


@pytest.mark.parametrize("way", ["linear", "tree"])
@pytest.mark.parametrize("size", [2, 5, 11])
def test_the_clock_agrees(way, size):
    expected = pytest.approx(CLOCK.seconds(way, size).item(), rel=0.35)
    assert taken(way, size, CLOCK, near=expected) == expected


def test_the_clock_agrees_on_a_gather_whose_links_do_not_fill():
    model = replace(CLOCK, bytes_per_second=math.inf)
    expected = pytest.approx(model.seconds("gather", 5).item(), rel=0.35)
    assert taken("gather", 5, model, near=expected) == expected


@pytest.mark.quick(0)
def test_the_tree_wins_from_where_the_model_says():
    first = CLOCK.first_ranks_where("tree", beats="linear")
    assert 8 < first < 16
    assert taken("tree", first - 4, CLOCK) > taken("linear", first - 4, CLOCK)
    assert taken("tree", first + 4, CLOCK) < taken("linear", first + 4, CLOCK)


def test_links_are_measured():
    def run(links):
        return measure_links(links, rounds=9, size=10**6)

    expected = pytest.approx(0.004, rel=0.35), pytest.approx(1e8, rel=0.35)
    for _ in range(3):  # what else runs can only delay it
        found = simulate(3, run, latency=0.004, bandwidth=1e8)
        assert found[0] == found[1] == found[2]
        measured = found[0].latency_seconds, found[0].bytes_per_second
        if measured == expected:
            break
    assert measured == expected


@pytest.mark.quick(0)
def test_a_network_across_slow_links_takes_what_the_model_says():
    """Its own work is short beside the latency; its sum of gradients is one more of that, and so is
    hearing what the next rank's sweep found."""
    model = replace(MODELS["latency alone"], latency_seconds=0.04)
    size = model.first_ranks_where("tree", beats="linear") + 4

    rnn = GRU(2, 2)

    def run(links, way):
        net = TimeSharded(copy.deepcopy(rnn), links, way=way, pieces=1)
        for _ in range(2):  # the first backward pass of a process takes longer
            loss = net(torch.ones(2, 1, 2))[0].sum()
            links.gather(None)
            start = time.perf_counter()
            loss.backward()
        return time.perf_counter() - start

    found = {}
    for way in ("linear", "tree"):
        hops = 1 if way == "linear" else 2
        seconds = model.seconds(way, size).item() + hops * model.latency_seconds
        expected = pytest.approx(seconds, rel=0.35)
        for _ in range(3):  # what else runs can only delay it
            found[way] = max(simulate(size, lambda links: run(links, way), latency=0.04))  # noqa: B023
            if found[way] == expected:
                break
        assert found[way] == expected
    assert found["tree"] < found["linear"]


def test_the_model_needs_no_torch():
    code = "import retrograde.ranks.cost_model, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
