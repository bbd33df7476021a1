"""Threads that share the units of a layer, and meet at every step."""

import ctypes

import numpy as np
import pytest
import torch

import retrograde as rg
from oracles.networks import relative_error
from retrograde.kernels import kernels, sweep
from retrograde.kernels.cells import GATES, Slopes, Weights
from retrograde.kernels.cpu import sweep as cpu
from retrograde.kernels.cpu.llvm import barrier as meeting
from retrograde.kernels.cpu.llvm import threads as team
from retrograde.kernels.cpu.llvm.barrier import bounds_of_units, meet, parts_of_units
from retrograde.kernels.cpu.llvm.lanes import compiled
from retrograde.recurrent.forward import LayerForward, run_by_torch

pytestmark = pytest.mark.usefixtures("ours_however_short")

EVERY_CELL = pytest.mark.parametrize("kind", GATES)
THREADS = pytest.mark.parametrize("threads", [2, 3])
SIZES = pytest.mark.parametrize("size", [50, 64])
SAMPLES = pytest.mark.parametrize("samples", [1, 2, 5])


@pytest.fixture(autouse=True)
def _every_layer_is_worth_it(monkeypatch):
    monkeypatch.setattr(meeting, "_WORK", 1)
    monkeypatch.setattr(team, "THREAD_WORK", 1)


def counted(monkeypatch):
    """Count the parts that threads take."""
    taken, real = [], meeting.share

    def share(loop, parts, *args, alone=None):
        if alone is not None:
            taken.append(len(parts))
        real(loop, parts, *args, alone=alone)

    monkeypatch.setattr(meeting, "share", share)
    return taken


@EVERY_CELL
@THREADS
@SIZES
@SAMPLES
@pytest.mark.parametrize("lying", [False, True])
@pytest.mark.quick(8)
def test_a_forward_pass_has_the_bits_of_one_thread(
    kind, threads, size, samples, lying, monkeypatch
):
    torch.manual_seed(size)
    rows = GATES[kind] * size
    given = [
        torch.randn(shape) / size**0.5 for shape in ((rows, 9), (rows, size), (rows,), (rows,))
    ]
    weights, x = Weights(kind, *given), torch.randn(50, samples, 9)
    state = [torch.randn(samples, size) for _ in range(1 + (kind == "LSTM"))]
    use = kernels("cpu", x.dtype, size)
    use = use.in_place if lying else use
    taken, found = counted(monkeypatch), []
    for number in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        after, y = [s.clone() for s in state], x.new_empty(50, samples, size)
        LayerForward(use.forward, weights, 20 * samples)(x, after, y)
        found.append([y, *after])
    assert taken == [threads] * 3  # a time for each block of steps
    assert all(map(torch.equal, *found))
    expected, last = torch.empty_like(found[0][0]), [s.clone() for s in state]
    run_by_torch(weights, x, last, expected)
    for a, b in zip(found[0], (expected, *last), strict=True):
        assert relative_error(a, b) <= 1e-5


@EVERY_CELL
@THREADS
@SIZES
@SAMPLES
@pytest.mark.parametrize("losses", [True, False])
@pytest.mark.quick(8)
def test_a_sweep_has_the_bits_of_one_thread(kind, threads, size, samples, losses, monkeypatch):
    torch.manual_seed(size)
    gates, shape = GATES[kind], (40, samples, size)
    inner = torch.rand(shape) if gates > 1 else None
    steps = Slopes(
        torch.rand(40, samples, gates, size), inner, None if inner is None else inner / 2
    )
    hidden, dy = torch.randn(gates * size, size) / size, torch.randn(shape) if losses else None
    g = torch.randn(samples, size * (1 + (gates == 4)))
    taken, found = counted(monkeypatch), []
    for number in (1, threads):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        own = steps.map(torch.clone)
        found.append([cpu.sweep(own, hidden, dy, g), own.gates])
    assert taken == [threads]
    assert all(map(torch.equal, *found))
    own = steps.map(torch.clone)
    for a, b in zip(found[0], (sweep.sweep(own, hidden, dy, g), own.gates), strict=True):
        assert relative_error(a, b) <= 1e-5


@EVERY_CELL
@SAMPLES
def test_samples_that_begin_anew_are_shared_instead(kind, samples, monkeypatch):
    """The weights lie in parts, of which each thread takes all."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.manual_seed(samples)
    options = {"nonlinearity": kind[4:].lower()} if "_" in kind else {}
    ours = getattr(rg, kind.split("_")[0])(5, 64, memory="100%", **options)
    x = torch.randn(40, samples, 5, requires_grad=True)
    starts = torch.rand(40, samples) < 0.2
    taken, found = counted(monkeypatch), []
    for work in (1, 10**12):
        monkeypatch.setattr(meeting, "_WORK", work)
        y, _ = ours(x, reset=starts)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), (x, *ours.parameters()))))
    assert not taken
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_parts_are_whole_vectors_and_cover_all_units(monkeypatch):
    monkeypatch.setattr(meeting, "_WORK", 2**16)
    for size in (1, 16, 33, 250, 1024):
        for threads in (1, 2, 5, 64):
            parts = parts_of_units(2, size, 4, threads)
            assert 1 <= parts <= threads
            bounds, each = bounds_of_units(size, parts)
            assert each == max(np.diff(bounds))
            assert bounds[0] == 0
            assert bounds[-1] == size
            assert (np.diff(bounds) > 0).all()
            assert (bounds[:-1] % meeting.LANES == 0).all()
    assert parts_of_units(1, 16, 1, 64) == 1  # nothing to share
    assert parts_of_units(16, 1024, 4, 64) == 1  # samples enough


@compiled
def come(seen, rounds, by_units, counts, first, last):
    for number in range(rounds if last - first < len(seen) else 0):
        meet(counts, number + 1)
    seen[first:last] += last - first


@pytest.mark.skipif(not team._entry()[0], reason="torch's team of threads is not reached")
def test_a_smaller_team_does_all_parts_on_one_thread(monkeypatch):
    """One of the team has no team of its own."""
    found = []

    def run(parts):
        seen = np.zeros(parts, np.int64)
        meeting.share_or_meet(come, [], parts, seen, 1000)
        found.append(list(seen))

    run(2)
    start = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    enter = ctypes.CFUNCTYPE(None, start, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    enter(team._entry()[0])(start(lambda _: run(3)), None, 2, 0)
    monkeypatch.setattr(team, "_entry", lambda: (0, 0))
    run(2)
    assert found == [[1, 1], [3, 3, 3], [3, 3, 3], [2, 2]]
