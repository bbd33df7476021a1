"""``profile``: what a step costs, and what each budget would buy."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.models.replace_modules import twin
from retrograde.sizes.timing import LinearTime, RangeTimes, linear_time


def make_cell(size=12, batch=4):
    torch.manual_seed(0)
    net = nn.GRUCell(size, size)

    def cell(x, h):
        h = net(x, h)
        return h, h

    return cell, torch.randn(batch, size), torch.zeros(batch, size)


def lstm_and_input(length=120):
    torch.manual_seed(0)
    return rg.LSTM(24, 32), torch.randn(length, 8, 24)


def paced(profile, forward, record, backward):
    """The same profile on a machine whose seconds are known."""
    times = RangeTimes(forward, record, backward)
    return replace(profile, costs=replace(profile.costs, times=times))


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


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [(rg.RNN, 1), pytest.param(rg.GRU, 2, marks=pytest.mark.slow), (rg.LSTM, 1)],
)
def test_a_modules_offers_are_what_it_makes_of_them(kind, layers):
    torch.manual_seed(0)
    net, x, h = kind(24, 32, layers), torch.randn(120, 8, 24), torch.zeros(layers, 8, 32)
    hx = (h, h.clone()) if kind is rg.LSTM else h
    profile = rg.profile(net, x, hx)
    net.memory = 1
    with pytest.raises(rg.BudgetError) as caught:
        net.fit(x, hx)
    least = caught.value.minimum_bytes
    for offer in offers_of(profile, 120, least):
        assert offer.minimum_bytes == least
        net.memory = offer.budget_bytes
        found = net.fit(x, hx)
        assert found.ordinary_bytes == offer.ordinary_bytes
        assert found.forward_steps == pytest.approx(offer.forward_steps, rel=0.15)
        net(x, hx)[0].sum().backward()
        net.zero_grad(set_to_none=True)
        assert working_bytes(lambda: net(x, hx)) <= offer.budget_bytes
        net.zero_grad(set_to_none=True)


def test_seconds_are_those_of_the_steps_and_of_the_calls():
    lstm, x = lstm_and_input()
    profile = rg.profile(lstm, x)
    steps = paced(profile, LinearTime(0.0, 3.0), LinearTime(0.0, 5.0), LinearTime(0.0, 7.0))
    calls = paced(profile, LinearTime(3.0, 0.0), LinearTime(5.0, 0.0), LinearTime(7.0, 0.0))
    for memory in ("10%", "20%", "60%", 1.0):
        found = profile.costs.fit(120, memory)
        advances = sum(isinstance(action, rg.Advance) for action in found.schedule)
        records = sum(isinstance(action, rg.Record) for action in found.schedule)
        again = found.forward_steps - 120
        assert steps.buys(memory, 120).seconds == pytest.approx(3 * again + (5 + 7) * 120)
        assert calls.buys(memory, 120).seconds == pytest.approx(3 * advances + (5 + 7) * records)


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
    times = profile.costs.times
    assert times.forward == LinearTime(0.0, profile.forward_seconds)
    assert 0 < profile.forward_seconds < 1
    assert 0 < profile.backward_seconds < 1
    assert profile.call_seconds == 0
    least, most = (profile.buys(memory, 200) for memory in ("5%", 1.0))
    assert least.seconds > most.seconds > 0
    lstm, x = lstm_and_input()
    # What runs it, of which torch's kernel is not a part; beside other work a slope may be lost.
    several = (rg.profile(lstm, x).costs.times for _ in range(5))
    assert any(min(t.forward.step_seconds, t.backward.step_seconds) > 0 for t in several)


def test_a_call_is_told_from_its_steps():
    assert linear_time(10.0, 10.0 + 63 * 2.0, 64) == LinearTime(8.0, 2.0)
    assert linear_time(3.0, 3.0, 1) == LinearTime(0.0, 3.0)
    assert linear_time(3.0, 1.0, 64) == LinearTime(
        3.0, 0.0
    )  # clocks are not exact, times not negative
    assert linear_time(1.0, 640.0, 64) == LinearTime(0.0, 10.0)
    assert LinearTime(8.0, 2.0)(calls=3, steps=10) == 44.0


def test_a_step_of_a_module_is_like_that_of_its_cell():
    """The bytes of a GRU's state, and of an LSTM's; a layer more is a state more."""
    x = torch.randn(20, 4, 12)
    assert rg.profile(nn.GRU(12, 12), x).state_bytes == 4 * 12 * 4
    assert rg.profile(nn.LSTM(12, 12), x).state_bytes == 2 * 4 * 12 * 4
    assert rg.profile(nn.LSTM(12, 12, num_layers=3), x).state_bytes == 3 * 2 * 4 * 12 * 4
    frozen = nn.GRU(12, 12)
    frozen.weight_ih_l0.requires_grad_(False)
    assert rg.profile(frozen, x).parameters == 3


def test_layouts_and_initial_states():
    x, hx = torch.randn(8, 40, 24), (torch.zeros(1, 8, 32), torch.zeros(1, 8, 32))
    profile = rg.profile(nn.LSTM(24, 32, batch_first=True), x, hx)
    ours = rg.LSTM(24, 32, batch_first=True, memory="100%")
    assert profile.buys(1.0, 40).ordinary_bytes == ours.fit(x, hx).ordinary_bytes
    alone = rg.profile(nn.LSTM(24, 32), x[0])
    assert 8 * alone.state_bytes == profile.state_bytes
    gru = rg.profile(nn.GRU(24, 32), x.transpose(0, 1), torch.zeros(1, 8, 32))
    assert 2 * gru.state_bytes == profile.state_bytes


def test_a_budget_that_is_too_small_names_the_least():
    lstm, x = lstm_and_input()
    profile = rg.profile(lstm, x)
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
    lstm, x = lstm_and_input()
    assert "kernel call" in str(rg.profile(lstm, x)).splitlines()[7]


def test_no_trace_is_left():
    lstm = nn.LSTM(6, 6)
    lstm.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    before, state = dict(vars(lstm)), torch.get_rng_state()
    rg.profile(lstm, torch.randn(20, 2, 6, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert before == vars(lstm)
    assert type(lstm) is nn.LSTM
    assert lstm.weight_hh_l0.grad is None


def test_what_is_no_single_recurrence_says_so():
    module, x = nn.LSTM(6, 6, bidirectional=True), torch.randn(9, 2, 6)
    with pytest.raises(rg.CellError, match=r"bidirectional=True: expected one .*module\.fit"):
        rg.profile(module, x)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(6, 6, 2),
        nn.GRU(6, 6, 2, dropout=0.1),
        rg.RNN(6, 6, backward="scan"),
    ],
)
def test_options_are_part_of_what_is_measured(module):
    x = torch.randn(50, 2, 6)
    profile, ours = rg.profile(module, x), twin(module)
    ours.memory = "50%"
    offer, found = profile.buys("50%", 50), ours.fit(x)
    assert (offer.ordinary_bytes, offer.budget_bytes) == (found.ordinary_bytes, found.budget_bytes)
    assert offer.forward_steps == pytest.approx(found.forward_steps, rel=0.15)


def test_bad_arguments():
    lstm, x = nn.LSTM(6, 6), torch.randn(9, 2, 6)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 6)])
    with pytest.raises(rg.CellError, match="is a PackedSequence: expected a tensor"):
        rg.profile(lstm, packed)
    with pytest.raises(rg.ScheduleError, match="length"):
        rg.profile(lstm, x).buys("50%", 0)
    with pytest.raises(rg.UnitError, match="unknown unit"):
        rg.profile(lstm, x).buys("3 apples", 9)
