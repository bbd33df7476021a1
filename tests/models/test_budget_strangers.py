"""Strange programs keep their budget and get their gradient, from the first call on.

Programs are drawn by seed, each by itself, so a message names all that it takes to draw one again:

    for reading in readings(lambda: draw_cell(17, 120).unrolled()):
        print(reading)
"""

import pytest
import torch

import retrograde as rg
from oracles.strangers import LABELS, draw_cell, draw_chain, readings, watched

WAYS = ["unrolled", "streamed"]

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")


def check(make, labels=LABELS):
    print(make().traits)
    for reading in readings(make, labels):
        if reading.refused:
            pytest.skip(str(reading))
        assert not reading.wrong, str(reading)
        assert reading.kept, str(reading)


@pytest.mark.quick(1, every=12)
@pytest.mark.parametrize("seed", range(24))
def test_a_strange_cell(seed):
    for way, label in zip(WAYS, ("least", "50%") if seed % 2 else ("50%", "least"), strict=True):
        check(lambda way=way: getattr(draw_cell(seed, 12), way)(), (label,))


@pytest.mark.quick(1, every=6)
@pytest.mark.parametrize("seed", range(12))
def test_a_strange_chain(seed):
    check(lambda: draw_chain(seed, 12))


@pytest.mark.parametrize("seed", [18, 32])
def test_the_first_step_is_tried_last_in_a_measurement(seed):
    """What is allocated after that is the call's own, and within the least budget."""
    check(lambda: draw_cell(seed).unrolled(), ("least",))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(300))
def test_a_longer_strange_cell(seed, way):
    check(lambda: getattr(draw_cell(seed), way)())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_deeper_strange_chain(seed):
    check(lambda: draw_chain(seed))


@pytest.mark.parametrize("seed", range(6))
def test_watching_finds_what_measuring_finds(seed):
    one = draw_cell(seed, 12).unrolled()
    one.call("1GiB")
    _, found = watched(lambda: one.call("1GiB"))
    assert found.working_bytes() == rg.measure(lambda: one.call("1GiB")).working_bytes
    assert found.working_bytes() == found.working_bytes(measuring=False)


def test_watching_goes_on_while_a_call_measures():
    def zeros(count):
        return torch.zeros(count, dtype=torch.uint8)

    def call():
        before = zeros(1000)
        inner = rg.measure(lambda: len(zeros(200))).working_bytes
        after = zeros(50)
        return inner, len(before) + len(after)

    (inner, _), found = watched(call)
    assert inner == 200
    assert found.working_bytes() == 1200
    assert found.working_bytes(measuring=False) == 1050
