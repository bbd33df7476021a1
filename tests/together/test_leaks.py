"""Nothing is left behind: not by many iterations, not by an exception, not in a cache."""

import ctypes
import gc
import random
from types import SimpleNamespace as Named

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.loops import WAYS, assert_bitwise, both, gradients, least, loop
from retrograde.cells import bptt as streamed
from retrograde.cells import unroll as unrolling
from retrograde.kernels.cpu import layer as cpu_layer
from retrograde.recurrent.backward import LayerBackward
from retrograde.replay.referents import find_referents
from retrograde.run.core import Tape
from retrograde.run.executor import Run
from retrograde.run.settled import Settled
from retrograde.sizes.cache import CellFits, LRUCache, identity

DOUBLE = torch.float64
WITH_MEMORY = [way for way in WAYS if "memory" in WAYS[way][2]]


def left():
    """The tensors that are alive, their bytes, and executions that are not over."""
    gc.collect()
    alive = gc.get_objects()
    tensors = [t for t in alive if type(t) in (torch.Tensor, nn.Parameter)]
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(stores.values()), sum(isinstance(o, Run | Tape) for o in alive)


def iterate(net, lengths):
    for length in lengths:
        net(torch.randn(length, 3, 5, dtype=DOUBLE))[0].square().sum().backward()


def check_iterations(way, count):
    _, net = both(way)
    lengths = random.Random(0).choices((40, 63, 64, 65, 70, 90), k=count)
    few = lengths[:10]
    iterate(net, few)
    before = left()
    iterate(net, lengths)
    dropped = net(torch.randn(65, 3, 5, dtype=DOUBLE))  # a graph that nobody goes through
    del dropped
    assert left() == before
    few = few[:4]
    gc.disable()
    try:
        assert rg.measure(lambda: iterate(net, few)).retained_bytes == 0
    finally:
        gc.enable()


@pytest.mark.quick(0, every=2)
@pytest.mark.parametrize("way", WITH_MEMORY)
def test_iterations_of_changing_lengths_hold_no_more_than_the_first(way):
    check_iterations(way, 15)


@pytest.mark.slow
@pytest.mark.parametrize("way", WITH_MEMORY)
def test_a_thousand_iterations_of_changing_lengths_hold_no_more_than_the_first(way):
    check_iterations(way, 1000)


def test_fits_are_kept_for_the_most_recent_shapes_only(monkeypatch):
    monkeypatch.setattr(unrolling, "_FITS", CellFits(most=3))
    _, cell = both("unroll")
    _, net = both("LSTM")
    h = torch.zeros(3, 7, dtype=DOUBLE)
    for length in range(1, 7):
        rg.unroll(cell.step, torch.randn(length, 3, 5, dtype=DOUBLE), h, memory=2**20)
    assert len(unrolling._FITS) == 3
    for length in range(200):
        net._fits.get(length, lambda: None)
    assert len(net._fits) == 48


def test_streaming_too_keeps_the_most_recent_fits_only(monkeypatch):
    monkeypatch.setattr(streamed, "_FITS", CellFits(most=2))
    _, cell = both("unroll")
    h = torch.zeros(3, 7, dtype=DOUBLE)

    def loss(t, y):
        return y.sum()

    for length in range(1, 6):
        x = torch.randn(length, 3, 5, dtype=DOUBLE)
        rg.bptt(cell.step, x, h, loss=loss, memory=2**20)
    assert len(streamed._FITS) == 2


def test_a_cell_made_anew_at_every_call_is_measured_once(monkeypatch):
    sizes, measured = unrolling.footprint, []
    monkeypatch.setattr(
        unrolling, "footprint", lambda *a, **k: measured.append(1) or sizes(*a, **k)
    )
    _, net = both("unroll")
    x, h = torch.randn(65, 3, 5, dtype=DOUBLE), torch.zeros(3, 7, dtype=DOUBLE)

    def closure(memory):
        def step(x, h):
            return net.step(x, h)

        return rg.unroll(step, x, h, memory=memory)

    for memory in ("40%", "40%", "50%"):  # it is measured within each budget
        closure(memory)
    assert len(measured) == 2
    for _ in range(2):
        rg.unroll(net.step, x, h, memory="40%")
    assert len(measured) == 3
    rg.unroll(net.eval().step, x, h, memory="40%")  # a step of which takes the same
    assert len(measured) == 3
    rg.unroll(net.step, x[:60], h, memory="40%")
    assert len(measured) == 4


def known(cell):
    found = find_referents([cell])
    return identity(found)


def test_what_is_known_of_a_cell_goes_with_it():
    recent = LRUCache(most=9)
    cells = [nn.Linear(2, 2) for _ in range(3)]
    for cell in cells:
        recent.get((1, known(cell)), lambda: "found", of=[cell])
    del cell, cells[1:]
    recent.get("another", lambda: None)
    assert len(recent) == 2
    assert recent.get((1, known(cells[0])), lambda: "again") == "found"


def test_the_fit_of_a_cell_goes_with_it():
    fits = CellFits(most=9)
    for k in range(3):
        found = find_referents([nn.Linear(2, 2)])
        fits.fit([found], k, None, lambda: (1, Settled()), lambda _: "found")
    assert len(fits) == 1
    del found
    fits.get("another", lambda: None)
    assert len(fits) == 1


def test_the_least_recent_result_is_dropped_first():
    recent = LRUCache(most=2)
    for key in "aba":
        recent.get(key, lambda key=key: key)
    recent.get("c", lambda: "c")
    assert recent.get("a", lambda: "new") == "a"
    assert recent.get("b", lambda: "new") == "new"


class Wide(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k


def closures():
    """Pairs of cells of the same code."""
    net, table = nn.Linear(2, 2), torch.ones(2)
    other = nn.Linear(2, 2)

    def make(*parts, size=3):
        return lambda x, h: (parts[0](x) * size, h, parts[1:])

    return {
        "the same": (make(net, table), make(net, torch.zeros(2))),
        "another module": (make(net, table), make(other, table)),
        "another shape": (make(net, table), make(net, torch.ones(3))),
        "another number": (make(net, table), make(net, table, size=4)),
        "another set": (make(net, {1}), make(net, {2})),
        "another attribute": (make(net, Named(k=1)), make(net, Named(k=2))),
        "an attribute of a module": (make(Wide(1), table), make(Wide(2), table)),
    }


CLOSURES = closures()


@pytest.mark.parametrize("what", CLOSURES)
def test_cells_are_known_by_what_they_are_made_of(what):
    one, other = CLOSURES[what]
    assert known(one) == known(one)
    assert (known(one) == known(other)) == (what == "the same")


class Boom(BaseException):
    """Not one that anything would catch."""


class Fragile(nn.Module):
    """Raises at one call of its own choosing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 4, dtype=DOUBLE), nn.BatchNorm1d(4, dtype=DOUBLE))
        self.calls = ctypes.c_long()  # nothing that reruns would set back
        self.last = ctypes.c_long(-1)

    def forward(self, x, h):
        h = torch.tanh(self.net(x) + nn.functional.dropout(h, 0.3))
        self.calls.value += 1
        if self.calls.value - 1 == self.last.value:
            raise Boom
        return h, h


def run(cell, x, h, asked):
    return rg.unroll(cell, x, h, **asked) if asked else loop(cell, x, h)


def attempt(cell, asked, last):
    """Forward and backward, and on again if a call raised; where it did, and all that was found."""
    x = torch.randn(5, 200, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    h = torch.zeros(200, 4, dtype=DOUBLE).requires_grad_()
    x.requires_grad_()
    torch.manual_seed(2)
    cell.calls.value, cell.last.value = 0, -1 if last is None else last
    wanted, where = [x, h, *cell.parameters()], "nowhere"
    try:
        y, after = run(cell, x, h, asked)
    except Boom:
        return "forward", None
    try:
        found = gradients(y, after, wanted)
    except Boom:
        where, cell.last.value = "backward", -1
        found = gradients(y, after, wanted)  # the graph is still there, and runs from its start
    found = [y.detach(), after.detach(), *found, *(b.clone() for b in cell.buffers())]
    return where, [*found, torch.get_rng_state()]


def surroundings():
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), gc.isenabled()
    return *modes, torch._C._autograd._profiler_enabled()


def least_for_fragile():
    x, h = torch.randn(5, 200, 5, dtype=DOUBLE), torch.zeros(200, 4, dtype=DOUBLE)
    x.requires_grad_()
    return least(lambda memory: rg.unroll(Fragile(), x, h, memory=memory))


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("kind", ["memory", "schedule"])
def test_an_exception_at_any_call_of_the_cell(kind):
    asked = {"memory": least_for_fragile()} if kind == "memory" else {"schedule": rg.plan(5, 2)}
    _, expected = attempt(Fragile(), {}, None)
    before, places, running = surroundings(), [], left()[2]
    while "nowhere" not in places:
        cell = Fragile()
        hooks = [p.register_hook(lambda g: g) for p in cell.parameters()]
        where, found = attempt(cell, asked, len(places))
        places.append(where)
        if where != "forward":
            assert_bitwise(found, expected)
        assert surroundings() == before
        assert all(len(p._backward_hooks) == 1 and p.grad is None for p in cell.parameters())
        for hook in hooks:
            hook.remove()
        cell.load_state_dict(Fragile().state_dict())
        assert_bitwise(attempt(cell, asked, None)[1], expected)
    assert left()[2] == running
    assert places == sorted(places, key=["forward", "backward", "nowhere"].index)
    assert set(places) == {"forward", "backward", "nowhere"}


def test_a_backward_pass_that_raised_holds_nothing_though_its_graph_is_alive():
    gc.collect()
    others = {id(run) for run in gc.get_objects() if type(run) is Run}
    cell = Fragile()
    x, h = torch.randn(9, 200, 5, dtype=DOUBLE), torch.zeros(200, 4, dtype=DOUBLE)
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(9, 4))
    cell.last.value = cell.calls.value + 4
    with pytest.raises(Boom):
        y.sum().backward()
    runs = [run for run in gc.get_objects() if type(run) is Run and id(run) not in others]
    assert [(run.stored, run.tapes, run.state) for run in runs] == [({}, [], [])]
    assert y.requires_grad


def calls_of(monkeypatch, place, name):
    """Count the calls of a kernel, and raise at one of them."""
    kernel, seen = getattr(place, name), {"calls": 0, "last": None}

    def call(*args):
        seen["calls"] += 1
        if seen["calls"] - 1 == seen["last"]:
            raise Boom
        return kernel(*args)

    monkeypatch.setattr(place, name, call)
    return seen


@pytest.mark.quick(0, every=2)
@pytest.mark.parametrize(
    ("way", "place", "kernel", "where"),
    [
        ("LSTM", cpu_layer.Forward, "__call__", "forward"),
        ("LSTM", LayerBackward, "add", "backward"),
        ("GRU, scanned within a budget", LayerBackward, "add", "backward"),
        ("RNN", LayerBackward, "add", "backward"),
        ("LSTM, swept", cpu_layer.Backward, "add", "backward"),
    ],
    ids=["LSTM", "LSTM, going back", "GRU, scanned within a budget", "RNN", "LSTM, swept"],
)
def test_an_exception_at_every_other_call_of_a_kernel(way, place, kernel, where, monkeypatch):
    _, ours = both(way)
    x = torch.randn(65, 3, 5, dtype=DOUBLE).requires_grad_()
    ours(x)  # fits
    wanted = [x, *ours.parameters()]
    expected = torch.autograd.grad(ours(x)[0].square().sum(), wanted)
    seen, before, places = calls_of(monkeypatch, place, kernel), surroundings(), []
    running = left()[2]
    while "nowhere" not in places:
        seen.update(calls=0, last=2 * len(places))
        places.append("forward")
        try:
            y = ours(x)[0].square().sum()
            places[-1] = "backward"
            torch.autograd.grad(y, wanted, retain_graph=True)
            places[-1] = "nowhere"
        except Boom:
            pass
        seen.update(last=None)
        if places[-1] != "forward":
            assert_bitwise(torch.autograd.grad(y, wanted), expected)
        y = None
        assert surroundings() == before
        assert_bitwise(torch.autograd.grad(ours(x)[0].square().sum(), wanted), expected)
    assert left()[2] == running
    assert {where, "nowhere"} <= set(places)
