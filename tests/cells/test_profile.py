"""``profile``: what a step costs; ``fit``: what each budget buys."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.models.fit import iteration_seconds
from retrograde.sizes.timing import LinearTime, RangeTimes, linear_time


def make_cell(size=12, batch=4):
    torch.manual_seed(0)
    net = nn.GRUCell(size, size)

    def cell(x, h):
        h = net(x, h)
        return h, h

    return cell, torch.randn(batch, size), torch.zeros(batch, size)


def working_bytes(call):
    """Of forward and backward, the outputs' gradient and the final state being the caller's."""
    seed = torch.ones_like(call()[0])

    def run():
        y, state = call()
        y.backward(seed)
        return y, state

    return rg.measure(run).working_bytes


def offers_of(cell, inputs, h, points=5):
    """What budgets at equal ratios buy, from the least to ordinary backpropagation's."""
    most = rg.fit(cell, inputs, h, memory=1.0)
    least, most = min(most.minimum_bytes, most.peak_bytes), most.ordinary_bytes
    ratio = (most / least) ** (1 / (points - 1))
    budgets = {least, most, *(round(least * ratio**k) for k in range(1, points - 1))}
    return [rg.fit(cell, inputs, h, memory=budget) for budget in sorted(budgets)]


@pytest.mark.quick(0)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_cells_offers_are_what_unroll_holds(wanted):
    cell, x, h = make_cell()
    x.requires_grad_(wanted)
    net = cell.__closure__[0].cell_contents
    inputs = torch.randn(63, *x.shape, requires_grad=wanted)
    with pytest.raises(rg.BudgetError) as caught:
        rg.unroll(cell, inputs, h, memory=1)
    offers = offers_of(cell, inputs, h)
    assert offers[0].budget_bytes == caught.value.minimum_bytes
    for offer in offers:
        rg.unroll(cell, inputs, h, memory=offer.budget_bytes)[0].sum().backward()
        inputs.grad = None
        net.zero_grad(set_to_none=True)
        found = working_bytes(lambda m=offer.budget_bytes: rg.unroll(cell, inputs, h, memory=m))
        assert 0.8 * offer.peak_bytes <= found <= offer.budget_bytes
        assert offer.peak_bytes <= offer.budget_bytes
        inputs.grad = None
        net.zero_grad(set_to_none=True)


def test_seconds_are_those_of_the_steps():
    cell, x, h = make_cell()
    times = RangeTimes(*(LinearTime(0.0, n) for n in (3.0, 5.0, 7.0)))
    for memory in ("10%", "20%", "60%", 1.0):
        found = rg.fit(cell, x.expand(120, *x.shape), h, memory=memory)
        again = found.forward_steps - 120
        assert iteration_seconds(found, times) == pytest.approx(3 * again + (5 + 7) * 120)


@pytest.mark.parametrize("length", [1, 2, 63, 1000])
def test_a_larger_budget_is_not_slower(length):
    cell, x, h = make_cell()
    times = RangeTimes(LinearTime(0.0, 1.0), LinearTime(0.0, 1.0), LinearTime(0.0, 2.0))
    offers = offers_of(cell, x.expand(length, *x.shape), h, points=8)
    seconds = [iteration_seconds(offer, times) for offer in offers]
    for slower, faster in pairwise(seconds):
        assert faster <= 1.02 * slower
    assert offers[-1].budget_bytes == offers[-1].ordinary_bytes
    assert (offers[-1].forward_steps, seconds[-1]) == (length, 3 * length)


def test_measured_seconds_are_of_this_machine():
    cell, x, h = make_cell()
    profile = rg.profile(cell, x, h)
    assert 0 < profile.forward_seconds < 1
    assert 0 < profile.backward_seconds < 1
    inputs = x.expand(200, *x.shape)
    least, most = (rg.fit(cell, inputs, h, memory=memory) for memory in ("5%", 1.0))
    assert min(least.seconds, most.seconds) > 0  # which is larger depends on the machine's load
    assert least.forward_steps > most.forward_steps


def test_a_call_is_told_from_its_steps():
    assert linear_time(10.0, 10.0 + 63 * 2.0, 64) == LinearTime(8.0, 2.0)
    assert linear_time(3.0, 3.0, 1) == LinearTime(0.0, 3.0)
    assert linear_time(3.0, 1.0, 64) == LinearTime(
        3.0, 0.0
    )  # clocks are not exact, times not negative
    assert linear_time(1.0, 640.0, 64) == LinearTime(0.0, 10.0)
    assert LinearTime(8.0, 2.0)(calls=3, steps=10) == 44.0


def test_it_is_printed_as_a_table():
    cell, x, h = make_cell()
    lines = str(rg.profile(cell, x, h)).splitlines()
    assert [line[:14].strip() for line in lines] == [
        "hidden state", "internal state", "working core", "α, β", "forward step",
        "recording step", "backward step",
    ]  # fmt: skip


def test_no_trace_is_left():
    cell, x, h = make_cell()
    state = torch.get_rng_state()
    rg.profile(cell, x, h)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is h.grad is None


def test_a_module_is_refused():
    with pytest.raises(rg.CellError, match=r"a LSTM has none: .* ask rg\.fit"):
        rg.profile(nn.LSTM(6, 6), torch.randn(9, 2, 6))


def test_torchs_own_cells_are_measured_as_they_are():
    state = torch.zeros(2, 6), torch.zeros(2, 6)
    assert rg.profile(nn.LSTMCell(3, 6), torch.zeros(2, 3), state).state_bytes == 2 * 2 * 6 * 4
