"""Held layers against torch's own modules, in whatever pieces, and their bytes as counted."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import retrograde as rg
from oracles.networks import relative_error
from oracles.strangers import watched
from retrograde.plan.fit import whole_fit
from retrograde.recurrent import backward
from retrograde.recurrent.bytes import Layer, stacked, sums_at_once
from retrograde.recurrent.core import HeldLayers
from retrograde.recurrent.find_plan import find_plan
from retrograde.recurrent.plan import HeldPlan, Planner
from retrograde.recurrent.spans import Sequences
from retrograde.recurrent.vendor import Layers
from retrograde.run.autograd import run_schedule
from retrograde.run.layout import Rows

pytestmark = pytest.mark.usefixtures("ours_however_short")

DOUBLE = torch.float64
KINDS = [nn.RNN, nn.GRU, nn.LSTM]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
WHOLE = {"forward_steps": 0, "calls": 0, "time": 0.0, "budget_bytes": 0, "peak_bytes": 0}
SCHEDULES = {
    "in one range": lambda n: whole_fit(n, n, **WHOLE, ordinary_bytes=0, minimum_bytes=0).schedule,
    "tight": lambda n: rg.plan(n, 3),
}


class Case:
    """A module of torch's, held layers over its weights, and what both are called with."""

    def __init__(self, kind, sizes, layers=1, both=False, lengths=None, dtype=DOUBLE, **options):
        torch.manual_seed(3)
        self.length, self.batch, width, size = sizes
        self.both, self.tracks = both, 2 if both else 1
        self.net = kind(width, size, layers, bidirectional=both, dtype=dtype, **options)
        x, self.sizes = torch.randn(self.length, self.batch, width, dtype=dtype), None
        if lengths is not None:
            packed = pack_padded_sequence(x, torch.tensor(lengths))
            x, self.sizes = packed.data, packed.batch_sizes
        self.x = x.detach().requires_grad_()
        shape = layers * self.tracks, self.batch, size
        self.state = [
            torch.randn(shape, dtype=dtype, requires_grad=True)
            for _ in range(2 if kind is nn.LSTM else 1)
        ]
        lead = self.x.shape[:-1]
        self.seeds = [torch.randn(*lead, size * self.tracks, dtype=dtype)]
        self.seeds += [torch.randn(shape, dtype=dtype) for _ in self.state]

    def core(self, plan, **options):
        net = self.net
        layers = Layers(net.mode, net._flat_weights, net.num_layers, net.bias, self.both)
        rows = Rows(self.length, self.sizes)
        return HeldLayers(layers, rows, self.batch, plan, **options)

    def ours(self, schedule, plan, x=None, **options):
        x, rows = self.x if x is None else x, Rows(self.length, self.sizes)
        (y,), after = run_schedule(self.core(plan, **options), schedule, [x], self.state, rows)
        return [y, *after]

    def theirs(self, x=None):
        x = self.x if x is None else x
        given = x if self.sizes is None else nn.utils.rnn.PackedSequence(x, self.sizes)
        hx = tuple(self.state) if len(self.state) == 2 else self.state[0]
        y, after = self.net(given, hx)
        y = y if self.sizes is None else y.data
        return [y, *(after if isinstance(after, tuple) else [after])]

    def assert_same(self, ours, x=None, seeds=None, wanted=None):
        seeds = self.seeds if seeds is None else seeds
        wanted = wanted or [self.x if x is None else x, *self.state, *self.net.parameters()]
        results = []
        for values in (ours, self.theirs(x)):
            roots = [v for v, g in zip(values, seeds, strict=True) if g is not None]
            given = [g for g in seeds if g is not None]
            results.append([*values, *torch.autograd.grad(roots, wanted, given, retain_graph=True)])
        for a, b in zip(*results, strict=True):
            assert a.shape == b.shape
            assert relative_error(a.detach(), b.detach()) <= 1e-12


LAYERS = {"one": {}, "three": {"layers": 3}, "two ways": {"both": True}, "bare": {"bias": False}}
LENGTHS = {"padded": None, "packed": [17, 12, 12, 5, 1]}


def run_by(means, case):
    return "in place" if means == "in place" else "loops", (means,) * case.net.num_layers


@pytest.mark.quick(2, every=60)
@EVERY_KIND
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", [None, 3], ids=["sequential", "scan"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [7, 24])
@pytest.mark.parametrize("means", ["loops", "sweeps", "in place"])
def test_outputs_and_gradients_are_torchs(kind, schedule, chunk, layers, lengths, size, means):
    case = Case(kind, (17, 5, 4, size), lengths=LENGTHS[lengths], **LAYERS[layers])
    if schedule == "tight" and case.both:
        pytest.skip("two directions are one range")
    alike = schedule == "in one range" and lengths == "padded" and not case.both
    unequal = (6, 5, 3, 2, 1) if alike else ()
    for block, kept, steps in [(1, 0, ()), (5, 6, ()), (100, 17, ()), (4, 1, ()), (6, 0, unequal)]:
        plan = HeldPlan(5 * block, kept, *run_by(means, case), chunk, steps)
        ours = case.ours(SCHEDULES[schedule](17), plan)
        case.assert_same(ours)
        case.assert_same(ours)  # and a second time through the same graph


@EVERY_KIND
@pytest.mark.parametrize("layers", LAYERS)
def test_what_is_laid_out_otherwise(kind, layers):
    case = Case(kind, (40, 3, 8, 16), **LAYERS[layers])
    x = case.x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, *states = case.seeds
    for seed in (
        y.transpose(0, 1).contiguous().transpose(0, 1),
        torch.ones((), dtype=DOUBLE).expand(y.shape),
        y[:1].expand(y.shape),
        None,
    ):
        for kept in (0, 9):
            ours = case.ours(SCHEDULES["in one range"](40), HeldPlan(21, kept), x)
            case.assert_same(ours, x, [seed, *states], [x, *case.net.parameters()])


@EVERY_KIND
@pytest.mark.parametrize("means", ["loops", "sweeps", "in place"])
def test_a_gradient_in_another_order_is_copied_in_few_pieces(kind, means, monkeypatch):
    case, pieces = Case(kind, (400, 8, 3, 8)), []
    copy = backward._laid
    monkeypatch.setattr(backward, "_laid", lambda *given: pieces.append(given) or copy(*given))
    y, *states = case.seeds
    seed = y.transpose(0, 1).contiguous().transpose(0, 1)
    ours = case.ours(SCHEDULES["in one range"](400), HeldPlan(1600, 0, *run_by(means, case)))
    case.assert_same(ours, seeds=[seed, *states])
    assert len(pieces) <= 2 * (backward.LAID_SHARE + 1)  # of two spans; it was once one a step


@EVERY_KIND
@pytest.mark.parametrize("given", range(2))
def test_gradients_that_arrive_at_one_end_only(kind, given):
    case = Case(kind, (23, 2, 8, 8))
    seeds = [g if number == given else None for number, g in enumerate(case.seeds)]
    case.assert_same(case.ours(rg.plan(23, 3), HeldPlan(8)), seeds=seeds)


@EVERY_KIND
def test_frozen_weights_and_inputs(kind):
    case = Case(kind, (31, 2, 8, 8), layers=2)
    case.net.weight_hh_l0.requires_grad_(False)
    case.net.bias_ih_l1.requires_grad_(False)
    wanted = [*case.state, *(p for p in case.net.parameters() if p.requires_grad)]
    x = case.x.detach()
    ours = case.ours(SCHEDULES["in one range"](31), HeldPlan(8), x)
    case.assert_same(ours, x, wanted=wanted)


@pytest.mark.parametrize("kind", [rg.GRU, rg.LSTM])
def test_outputs_that_are_written_to_are_noticed(kind):
    net, x = kind(5, 7, memory="50%"), torch.randn(30, 3, 5)
    y = net(x)[0]
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.quick(1, every=2)
@EVERY_KIND
@pytest.mark.parametrize("chunk", [None, 3], ids=["sequential", "scan"])
def test_half_precision_is_summed_in_single(kind, chunk):
    case = Case(kind, (33, 3, 4, 7), dtype=torch.bfloat16)
    wanted = [case.x, *case.state, *case.net.parameters()]
    ours = case.ours(SCHEDULES["in one range"](33), HeldPlan(21, chunk=chunk))
    found = torch.autograd.grad(ours, wanted, case.seeds)
    assert {t.dtype for t in found} == {torch.bfloat16}
    single = Case(kind, (33, 3, 4, 7), dtype=torch.float)
    for p, q in zip(single.net.parameters(), case.net.parameters(), strict=True):
        p.data.copy_(q.data)
    x, *state = (t.detach().float().requires_grad_() for t in (case.x, *case.state))
    single.x, single.state = x, state
    expected = torch.autograd.grad(
        single.theirs(), [x, *state, *single.net.parameters()], [s.float() for s in case.seeds]
    )
    for a, b in zip(found, expected, strict=True):
        assert relative_error(a.float(), b) <= 0.05


@EVERY_KIND
def test_a_range_holds_marks_gates_and_what_lies_below(kind):
    case = Case(kind, (20, 3, 4, 7), layers=2)
    core, rows = case.core(HeldPlan(15, 7)), Rows(20)
    x = case.x.detach()
    inputs = rows.read([x], core.room(rows.read([x])))
    tape = core.record(inputs, 0, 20, [s.detach() for s in case.state], lambda *_: None)
    assert [t.shape for t in tape.below] == [(60, 7)]
    steps = {k: [(p.start, p.stop) for _, j, p in part if j == k] for k in (0, 1)
             for part in [tape.marks]}  # fmt: skip
    if kind is nn.LSTM:
        assert steps[0] == steps[1] == [(0, 5), (5, 10), (10, 13)]
        assert sorted({(p.start, p.stop) for *_, p in tape.kept}) == [(13, 18), (18, 20)]
    else:
        assert not tape.marks
        assert not tape.kept


def drawn_shape(dice):
    """A case, and how it is run, with the bytes that are counted for it."""
    one = dice.choice
    kind, both = one(KINDS), dice.random() < 0.3
    layers = 1 if both else one([1, 1, 2, 3])
    length, batch = one([1, 2, 30, 100]), one([1, 2, 3, 8, 16, 33])
    width, size, dtype = (
        one([1, 8, 40]),
        one([1, 7, 16, 32, 63, 128, 300]),
        one([DOUBLE, torch.float]),
    )
    lengths = sorted([length, *dice.choices(range(1, length + 1), k=batch - 1)], reverse=True)
    lengths = lengths if dice.random() < 0.3 else None
    case = Case(kind, (length, batch, width, size), layers, both, lengths, dtype)
    needs, straight = dice.random() < 0.6, lengths is not None or dice.random() < 0.7
    x = case.x.detach()
    if not straight:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    straight = x.is_contiguous()
    steps = min(one([1, 3, 10, 50]), length)
    plan = HeldPlan(
        steps * batch,
        one([0, 0, length // 2, length]),
        one(["loops", "in place"]),
        tuple(dice.choices(["loops", "sweeps", "in place"], k=layers)),
    )
    views = lengths is None and not both
    if views and not plan.kept:
        most, steps = steps, [one(range(1, steps + 1))]
        while sum(steps) < length and dice.random() < 0.97:
            most = max(1, most - one([0, 0, 1]))
            steps.append(min(most, length - sum(steps)))
        plan = replace(plan, steps=tuple(steps) if sum(steps) == length else ())
    shape = Layer(
        case.net.mode, batch, width, size, case.tracks, dtype.itemsize,
        torch.get_num_threads(), needs, straight, lengths is not None, views,
        at_once=sums_at_once(length, batch),
    )  # fmt: skip
    offsets = None if lengths is None else [0, *case.sizes.cumsum(0).tolist()]
    kept = plan.kept if kind is nn.LSTM else 0
    peak = Planner(stacked(shape, layers), plan.block).peak(
        Sequences(length, batch, offsets), replace(plan, kept=kept)
    )
    return case, x.requires_grad_(needs), replace(plan, kept=kept), shape, peak


@pytest.mark.quick(2, every=10)
@pytest.mark.parametrize("seed", range(24))
def test_what_is_counted_is_no_less_than_what_is_taken(seed):
    found = []
    for number in range(4):
        case, x, plan, shape, peak = drawn_shape(random.Random(f"{seed} {number}"))
        dy = case.seeds[0]
        if seed % 2:
            dy = torch.ones((), dtype=dy.dtype).expand(dy.shape)
        wanted = [t for t in (x, *case.net.parameters()) if t.requires_grad]

        def call(case=case, x=x, plan=plan, dy=dy, wanted=wanted):
            case.state = [torch.zeros_like(s) for s in case.state]
            schedule = SCHEDULES["in one range"](case.length)
            y, *after = case.ours(schedule, plan, x)
            after = [t.detach() for t in after]
            return y.detach(), after, torch.autograd.grad(y, wanted, dy)

        call()
        taken = watched(call)[1].working_bytes()
        assert taken <= peak, (taken, peak, shape, plan, case.sizes)
        found.append((taken, peak))
    assert max(taken / peak for taken, peak in found) >= 0.5  # counted, and not just enough


@pytest.mark.parametrize("kind", [rg.LSTM, rg.GRU, rg.RNN])
def test_weights_that_lie_in_another_order_are_counted_where_they_are_copied(kind):
    torch.manual_seed(0)
    net, x = kind(4, 40, memory=10**9), torch.randn(60, 3, 4, requires_grad=True)
    straight = net(x)[0]
    straight.sum().backward()
    with torch.no_grad():
        net.weight_hh_l0 = nn.Parameter(net.weight_hh_l0.t().contiguous().t())
    expected = x.grad.clone()
    net.memory = 1
    with pytest.raises(rg.BudgetError) as refusal:
        net(x)
    net.memory = refusal.value.minimum_bytes
    x.grad = None

    def call():
        y, _ = net(x)
        y.sum().backward()
        return y.detach()

    torch.testing.assert_close(call(), straight)
    torch.testing.assert_close(x.grad, expected)
    net.zero_grad()
    x.grad = None
    assert rg.measure(call).working_bytes <= net.memory


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("shape", "memory"), [((1000, 53, 115, 12), "5%"), ((100, 16, 256, 512), "20%")], ids=str
)
def test_wide_inputs_by_samples_and_samples_that_end_keep_the_budget(shape, memory):
    length, batch, width, size = shape
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if size > width:  # few samples are left at the end, whose units the threads divide
            x = torch.randn(length, batch, width)
            x = nn.utils.rnn.pack_padded_sequence(
                x, torch.linspace(length, length // 4, batch).long()
            )
            net, leaf = rg.LSTM(width, size, memory=memory), x.data
        else:
            x = leaf = torch.randn(batch, length, width, requires_grad=True)
            net = rg.LSTM(width, size, memory=memory, batch_first=True)

        def call():
            y = net(x)[0]
            (y.data if leaf is not x else y).sum().backward()
            return y

        call()
        leaf.grad = None
        net.zero_grad()
        assert rg.measure(call).working_bytes <= net.fit(x).budget_bytes
    finally:
        torch.set_num_threads(threads)


def test_unequal_spans_run_each_step_twice_in_less_memory(monkeypatch):
    """Spans of equal length would need a fifth more, or runs of some steps a third time."""
    torch.manual_seed(0)
    net, x = rg.LSTM(32, 32, memory=97_982), torch.randn(1000, 4, 32, requires_grad=True)
    theirs, dy = nn.LSTM(32, 32), torch.randn(1000, 4, 32)
    theirs.load_state_dict(net.state_dict())
    (plan, _), *_ = find_plan(net._call_of(x, None), net.memory).parts
    assert plan.steps[0] > plan.steps[-2] >= plan.steps[-1]
    assert sum(plan.steps) == 1000

    def call(net):
        y = net(x)[0]
        y.backward(dy)
        return y.detach()

    assert relative_error(call(net), call(theirs)) <= 1e-5
    for a, b in zip(net.parameters(), theirs.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) <= 1e-4
    net.zero_grad()
    x.grad = None
    found = net.fit(x)
    assert found.forward_steps == 2000
    taken = rg.measure(lambda: call(net)).working_bytes
    assert 0.8 * found.peak_bytes <= taken <= found.peak_bytes <= found.budget_bytes
    monkeypatch.setattr(Planner, "_unequal", lambda *_: None)
    ranges = rg.LSTM(32, 32, memory=found.budget_bytes).fit(x)
    assert len(ranges.schedule) > len(found.schedule)  # of steps, which then do not fit at once


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which decide what runs backward
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("kind", "memory"), [(nn.RNN, "3%"), (nn.GRU, "1.5%")])
def test_spans_after_the_first_copy_no_states(kind, memory, two_threads):
    """So they are longer, within the same memory."""
    torch.manual_seed(0)
    ours, theirs = getattr(rg, kind.__name__)(16, 64, memory=memory), kind(16, 64)
    theirs.load_state_dict(ours.state_dict())
    x, dy = torch.randn(1500, 4, 16, requires_grad=True), torch.randn(1500, 4, 64)
    (plan, _), *_ = find_plan(ours._call_of(x, None), ours.memory).parts
    assert plan.steps[1] > plan.steps[0]
    assert sum(plan.steps) == 1500

    def call(net):
        y = net(x)[0]
        found = torch.autograd.grad(y, [x, *net.parameters()], dy)
        return [y.detach(), *found]

    for a, b in zip(call(ours), call(theirs), strict=True):
        assert relative_error(a, b) <= 1e-5
    found = ours.fit(x)
    taken = rg.measure(lambda: call(ours)).working_bytes
    assert 0.7 * found.peak_bytes <= taken <= found.peak_bytes <= found.budget_bytes


def test_one_loop_is_not_chosen_for_spans_of_few_rows(two_threads):
    """It would read and write the sums of all weights' gradients at every step."""
    module = rg.GRU(256, 256, memory="5%")
    (plan, _), *_ = find_plan(module._call_of(torch.randn(200, 64, 256), None), "5%").parts
    assert plan.backward_by == ("sweeps",)
    assert min(plan.steps[:-1]) > 1


def test_marks_that_are_free_are_counted_once():
    """The first span takes most, when nearly all marks are free."""
    case = Case(nn.LSTM, (80, 8, 4, 16), dtype=torch.float)
    plan = HeldPlan(40 * 8, backward_by=("in place",), steps=(40, *[1] * 40))
    threads = torch.get_num_threads()
    shape = Layer("LSTM", 8, 4, 16, threads=threads, at_once=sums_at_once(80, 8))
    peak = Planner(stacked(shape, 1), plan.block).peak(Sequences(80, 8), plan)
    wanted = [case.x, *case.net.parameters()]

    def call():
        y, *_ = case.ours(SCHEDULES["in one range"](80), plan)
        return y.detach(), torch.autograd.grad(y, wanted, case.seeds[0])

    call()
    assert 0.8 * peak <= watched(call)[1].working_bytes() <= peak


@pytest.mark.quick(2, every=3)
@pytest.mark.parametrize("more", [{}, {"bidirectional": True}, {"num_layers": 2}])
@pytest.mark.parametrize("length", [301, 60])
def test_gradients_within_every_budget_from_the_least_on(length, more):
    torch.manual_seed(0)
    theirs, x = nn.LSTM(3, 8, **more).double(), torch.randn(length, 2, 3, dtype=DOUBLE)
    ours = rg.LSTM(3, 8, memory=1, dtype=DOUBLE, **more)
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(rg.BudgetError) as refusal:
        ours(x)
    whole = ours._fit_within("100%", x).ordinary_bytes

    def call(net):
        y, (h, c) = net(x)
        loss = y.square().sum() + h.sum() + (c * c).sum()
        return [y, h, c, *torch.autograd.grad(loss, net.parameters())]

    expected = call(theirs)
    for k in range(16):  # at equal ratios
        least = refusal.value.minimum_bytes
        ours.memory = round(least * (whole / least) ** (k / 15))
        for a, b in zip(call(ours), expected, strict=True):
            assert relative_error(a.detach(), b.detach()) <= 1e-10, ours.memory
