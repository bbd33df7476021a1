"""``profile``: what a step costs, and what each budget would buy."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.sizes.timing import LinearTime, RangeTimes, linear_time


def make_cell(size=12, batch=4):
    torch.manual_seed(0)
    net = nn.GRUCell(size, size)

    def cell(x, h):
        h = net(x, h)
        return h, h

    return cell, torch.randn(batch, size), torch.zeros(batch, size)


def paced(profile, forward, record, backward):
    """The same profile on a machine whose seconds are known."""
    times = RangeTimes(forward, record, backward)
    return replace(profile, times=times)


def working_bytes(call):
    """Of forward and backward, the outputs' gradient and the final state being the caller's."""
    seed = torch.ones_like(call()[0])

    def run():
        y, state = call()
        y.backward(seed)
        return y, state

    return rg.measure(run).working_bytes


def offers_of(profile, length, least, points=5):
    """What budgets at equal ratios buy, from the least to ordinary backpropagation's."""
    most = profile.buys(1.0, length).ordinary_bytes
    ratio = (most / least) ** (1 / (points - 1))
    budgets = {least, most, *(round(least * ratio**k) for k in range(1, points - 1))}
    return [profile.buys(budget, length) for budget in sorted(budgets)]


@pytest.mark.quick(0)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_cells_offers_are_what_unroll_holds(wanted):
    cell, x, h = make_cell()
    x.requires_grad_(wanted)
    net = cell.__closure__[0].cell_contents
    inputs = torch.randn(63, *x.shape, requires_grad=wanted)
    profile = rg.profile(cell, x, h)
    with pytest.raises(rg.BudgetError) as caught:
        rg.unroll(cell, inputs, h, memory=1)
    least = profile.buys(1.0, 63).minimum_bytes
    assert least == caught.value.minimum_bytes
    for offer in offers_of(profile, 63, least):
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
    profile = paced(rg.profile(cell, x, h), *(LinearTime(0.0, n) for n in (3.0, 5.0, 7.0)))
    for memory in ("10%", "20%", "60%", 1.0):
        found = profile.buys(memory, 120)
        again = found.forward_steps - 120
        assert found.seconds == pytest.approx(3 * again + (5 + 7) * 120)


@pytest.mark.parametrize("length", [1, 2, 63, 1000, 30_000])
def test_a_larger_budget_is_not_slower(length):
    cell, x, h = make_cell()
    profile = rg.profile(cell, x, h)
    steps = paced(profile, LinearTime(0.0, 1.0), LinearTime(0.0, 1.0), LinearTime(0.0, 2.0))
    most = steps.buys(1.0, length)
    least = min(most.minimum_bytes, most.peak_bytes)
    if length > 1000:  # else steps would be run very often
        least += 50 * profile.state_bytes
    offers = offers_of(steps, length, least, points=8)
    seconds = [o.seconds for o in offers]
    for slower, faster in pairwise(seconds):
        assert faster <= 1.02 * slower
    assert offers[-1].budget_bytes == offers[-1].ordinary_bytes
    assert (offers[-1].forward_steps, offers[-1].seconds) == (length, 3 * length)


def test_measured_seconds_are_of_this_machine():
    cell, x, h = make_cell()
    profile = rg.profile(cell, x, h)
    times = profile.times
    assert times.forward == LinearTime(0.0, profile.forward_seconds)
    assert 0 < profile.forward_seconds < 1
    assert 0 < profile.backward_seconds < 1
    least, most = (profile.buys(memory, 200) for memory in ("5%", 1.0))
    assert least.seconds > most.seconds > 0


def test_a_call_is_told_from_its_steps():
    assert linear_time(10.0, 10.0 + 63 * 2.0, 64) == LinearTime(8.0, 2.0)
    assert linear_time(3.0, 3.0, 1) == LinearTime(0.0, 3.0)
    assert linear_time(3.0, 1.0, 64) == LinearTime(
        3.0, 0.0
    )  # clocks are not exact, times not negative
    assert linear_time(1.0, 640.0, 64) == LinearTime(0.0, 10.0)
    assert LinearTime(8.0, 2.0)(calls=3, steps=10) == 44.0


def test_a_budget_that_is_too_small_names_the_least():
    profile = rg.profile(*make_cell())
    with pytest.raises(rg.BudgetError, match="need at least") as caught:
        profile.buys(1, 120)
    assert profile.buys(caught.value.minimum_bytes, 120).forward_steps > 120


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


def test_bad_arguments():
    cell = make_cell()
    with pytest.raises(rg.CellError, match=r"a LSTM has none: .* ask rg\.fit"):
        rg.profile(nn.LSTM(6, 6), torch.randn(9, 2, 6))
    with pytest.raises(rg.ScheduleError, match="length"):
        rg.profile(*cell).buys("50%", 0)
    with pytest.raises(rg.UnitError, match="unknown unit"):
        rg.profile(*cell).buys("3 apples", 9)
