"""Layers by compiled loops alone, against torch's own modules under autograd."""

import pytest
import torch

import retrograde as rg
from oracles.networks import relative_error
from retrograde.cores.fused import Layers
from retrograde.cores.loops import Direct, sums_at_once
from retrograde.plan.fit import Curve, Footprint, fit
from retrograde.run.autograd import run_schedule
from retrograde.run.inputs import Held
from retrograde.run.layout import Rows

KINDS = {"RNN_TANH": torch.nn.RNN, "GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM}
DOUBLE = torch.float64


class Case:
    """A module of torch's, our core of its weights, and what both are called with."""

    def __init__(self, kind, sizes, layers=1, bias=True, at_once=True, dtype=DOUBLE):
        torch.manual_seed(3)
        self.length, batch, width, size = sizes
        self.net = KINDS[kind](width, size, layers, bias=bias, dtype=dtype)
        self.kind, self.at_once, self.bias, self.layers = kind, at_once, bias, layers
        self.x = torch.randn(self.length, batch, width, dtype=dtype, requires_grad=True)
        count = 2 if kind == "LSTM" else 1
        shape = layers, batch, size
        self.state = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(count)]
        self.seeds = [torch.randn(self.length, batch, size, dtype=dtype)]
        self.seeds += [torch.randn(shape, dtype=dtype) for _ in range(count)]

    def core(self):
        net = Layers(self.kind, self.net._flat_weights, self.layers, self.bias)
        return Direct(net, self.at_once)

    def ours(self, x, schedule):
        (y,), after = run_schedule(self.core(), schedule, [x], self.state, Rows(self.length))
        return [y, *after]

    def theirs(self, x):
        hx = tuple(self.state) if len(self.state) == 2 else self.state[0]
        y, after = self.net(x, hx)
        return [y, *(after if isinstance(after, tuple) else [after])]

    def assert_same(self, schedule, x=None, seeds=None, wanted=None):
        x, seeds = self.x if x is None else x, self.seeds if seeds is None else seeds
        wanted = wanted or [self.x, *self.state, *self.net.parameters()]
        results = []
        for values in (self.ours(x, schedule), self.theirs(x)):
            roots = [v for v, g in zip(values, seeds, strict=True) if g is not None]
            given = [g for g in seeds if g is not None]
            found = torch.autograd.grad(roots, wanted, given)
            results.append([*values, *found])
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape
            assert relative_error(a.detach(), b.detach()) <= 1e-12


# Makes schedules that record many steps at a time, in ranges of several lengths.
STEPS = Curve.affine(0, 400)
BLOCKS = Footprint(100, FIXED := Curve.affine(900, 0), STEPS, STEPS, FIXED, STEPS, 100, None)
SCHEDULES = {
    "tight": lambda n: rg.plan(n, 3),
    "in blocks": lambda n: fit(n, 2000 + 100 * n, BLOCKS).schedule,
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@EVERY_KIND
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 7), (90, 1, 8, 16), (77, 9, 4, 24)])
@pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize("at_once", [True, False])
def test_outputs_and_gradients_are_torchs(kind, schedule, sizes, layers, bias, at_once):
    case = Case(kind, sizes, layers, bias, at_once)
    case.assert_same(SCHEDULES[schedule](case.length))


@EVERY_KIND
def test_what_is_laid_out_otherwise(kind):
    case = Case(kind, (40, 3, 8, 16), layers=2)
    x = case.x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, *states = case.seeds
    for seed in (
        y.transpose(0, 1).contiguous().transpose(0, 1),
        torch.ones((), dtype=DOUBLE).expand(y.shape),
        y[:1].expand(y.shape),
        None,
    ):
        schedule = rg.plan(40, 4)
        case.assert_same(schedule, x, [seed, *states], [x, *case.net.parameters()])


@EVERY_KIND
@pytest.mark.parametrize("given", range(2))
def test_gradients_that_arrive_at_one_end_only(kind, given):
    case = Case(kind, (23, 2, 8, 8))
    seeds = [g if number == given else None for number, g in enumerate(case.seeds)]
    case.assert_same(rg.plan(23, 3), seeds=seeds)


@EVERY_KIND
def test_frozen_weights_and_inputs(kind):
    case = Case(kind, (31, 2, 8, 8), layers=2)
    case.net.weight_hh_l0.requires_grad_(False)
    case.net.bias_ih_l1.requires_grad_(False)
    wanted = [*case.state, *(p for p in case.net.parameters() if p.requires_grad)]
    case.assert_same(rg.plan(31, 3), case.x.detach(), wanted=wanted)


@EVERY_KIND
def test_states_on_the_way_are_those_of_single_advances(kind):
    case = Case(kind, (200, 2, 4, 8), layers=2)
    core, inputs = case.core(), Held([case.x.detach()])
    emitted = []
    found = core.advance(
        inputs, 5, [6, 90, 200], case.state, lambda a, b, _: emitted.append((a, b))
    )
    state, at = case.state, 5
    for stop, expected in zip([6, 90, 200], found, strict=True):
        (state,) = core.advance(inputs, at, [stop], state, None)
        at = stop
        assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    assert [b for _, b in emitted[:-1]] == [a for a, _ in emitted[1:]]
    assert (emitted[0][0], emitted[-1][1]) == (5, 200)


@EVERY_KIND
@pytest.mark.parametrize("memory", ["4%", "6%"])
def test_a_store_between_two_advances_costs_no_call(kind, memory, monkeypatch):
    """And what is held stays within the budget all the same."""
    calls, advance = [], Direct.advance

    def counted(self, inputs, start, stops, state, emit):
        calls.append(len(stops))
        return advance(self, inputs, start, stops, state, emit)

    torch.manual_seed(0)
    ours = getattr(rg, kind.split("_")[0])(16, 16, memory=memory)
    x, seed = torch.randn(900, 4, 16, requires_grad=True), torch.randn(900, 4, 16)
    plan = ours._read(x, (), ours.memory).plan()
    assert plan.parts[0][0] is Direct

    def call():
        y, _ = ours(x)
        y.backward(seed)
        return y

    call()
    monkeypatch.setattr(Direct, "advance", counted)
    x.grad = None
    ours.zero_grad(set_to_none=True)
    found = rg.measure(call)
    assert found.working_bytes <= plan.fit.budget_bytes
    advances = sum(isinstance(action, rg.Advance) for action in plan.parts[0][1])
    assert len(calls) < sum(calls) == advances


def test_long_sums_are_not_added_one_by_one():
    assert sums_at_once(1000, 16)
    assert not sums_at_once(1000, 17)
    for batch in (16, 17):
        ours = rg.GRU(8, 8, memory="20%")
        x = torch.randn(1000, batch, 8)
        assert ours._read(x, (), None).at_once == (batch == 16)
