"""``budget``: one budget for all the recurrent modules of a model, divided by what each needs."""

import copy
import dataclasses
import random
import warnings
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import retrograde as rg
from oracles.autocast import run_or_skip
from retrograde.models.budget import budget as budget_module


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


class Pair(nn.Module):
    """Two layers of unequal size, and nothing beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.LSTM(24, 40)
        self.second = nn.LSTM(40, 8)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


class Calls(nn.Module):
    """The same module under two names, called over and over, its inputs of two lengths."""

    def __init__(self, times, short=0):
        super().__init__()
        self.rnn = nn.LSTM(16, 16)
        self.again = self.rnn
        self.times, self.short = times, short

    def forward(self, x):
        total = sum((self.again if i % 2 else self.rnn)(x + i)[0].mean() for i in range(self.times))
        return total + (self.rnn(x[: self.short])[0].sum() if self.short else 0)


def working_bytes(model, x):
    seed = torch.ones_like(model(x))

    def call():
        y = model(x)
        y.backward(seed)
        return y

    def clear():
        for t in (x, *model.parameters()):
            t.grad = None

    call()
    clear()
    found = rg.measure(call).working_bytes
    clear()
    return found


def least_of(model, sample):
    with pytest.raises(rg.BudgetError) as caught:
        rg.budget(model, 1, sample)
    return caught.value.minimum_bytes


def test_the_budget_is_kept_by_the_whole_model():
    x = leaf(100, 16, 24)
    between = 2 * 100 * 16 * 40 * 4  # the first layer's outputs, and their gradient
    ordinary = working_bytes(Pair(), x)
    seen = []
    for memory in (2 * least_of(Pair(), x), "10%", "25%", "60%", 1.0):
        model = Pair()
        division = rg.budget(model, memory, x)
        found = working_bytes(model, x)
        assert found <= division.total_bytes + between
        seen.append(found)
    assert seen == sorted(seen)
    assert seen[1] < ordinary / 4
    assert division.ordinary_bytes >= ordinary - between


def test_every_module_gets_its_least_and_the_same_share_of_the_rest():
    x = leaf(200, 16, 24)
    division = rg.budget(Pair(), "25%", x)
    first, second = division.shares["first"], division.shares["second"]
    assert division.minimum_bytes == first.minimum_bytes + second.minimum_bytes
    assert division.ordinary_bytes == first.ordinary_bytes + second.ordinary_bytes
    assert division.total_bytes == division.ordinary_bytes // 4
    given = first.budget_bytes + second.budget_bytes
    assert division.total_bytes - 2 <= given <= division.total_bytes
    parts = [
        (s.budget_bytes - s.minimum_bytes) / (s.ordinary_bytes - s.minimum_bytes)
        for s in (first, second)
    ]
    assert parts[0] == pytest.approx(parts[1], rel=1e-3)
    assert 0 < parts[0] < 0.25 < first.budget_bytes / first.ordinary_bytes + 0.1


def test_the_least_is_feasible_and_a_byte_less_is_refused_with_nothing_changed():
    x = leaf(60, 4, 24)
    model = Pair()
    least = least_of(model, x)
    before = {name: dict(vars(part)) for name, part in model.named_modules()}
    message = rf"is {least - 1} bytes .* need at least {least} bytes .* together.*most of it is for"
    with pytest.raises(rg.BudgetError, match=message) as caught:
        rg.budget(model, least - 1, x)
    assert caught.value.minimum_bytes == least
    assert type(model.first) is type(model.second) is nn.LSTM
    assert before == {name: dict(vars(part)) for name, part in model.named_modules()}
    division = rg.budget(model, least, x)
    assert [s.budget_bytes for s in division.shares.values()] == [
        s.minimum_bytes for s in division.shares.values()
    ]
    model(x).sum().backward()
    assert x.grad is not None


def test_more_than_enough_is_not_handed_out():
    x = leaf(60, 4, 24)
    division = rg.budget(Pair(), "1GiB", x)
    assert division.total_bytes == 2**30
    for share in division.shares.values():
        assert share.budget_bytes == share.ordinary_bytes


@pytest.mark.parametrize("memory", ["20%", "50%"])
def test_a_module_that_is_called_several_times_holds_as_often(memory):
    model, x = Calls(3), leaf(100, 8, 16)
    once = rg.budget(Calls(1), memory, x)
    division = rg.budget(model, memory, x)
    assert division.shares.keys() == {"rnn"}
    assert division.shares["rnn"].calls == 3
    assert model.rnn is model.again
    assert division.minimum_bytes == 3 * once.minimum_bytes
    assert division.ordinary_bytes == 3 * once.ordinary_bytes
    # Beside the modules: their inputs and outputs, and the gradients of those and of the weights.
    others = (3 * 2 + 2) * 100 * 8 * 16 * 4 + sum(p.nbytes for p in model.parameters())
    assert working_bytes(model, x) <= division.total_bytes + others


class Stepwise(nn.Module):
    """Calls an LSTM step by step, as where episodes begin within a batch."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        state, ys = (torch.zeros(1, 8, 32),) * 2, []
        for x_t in x:
            y, state = self.lstm(x_t.unsqueeze(0), tuple(0.9 * s for s in state))
            ys.append(y)
        return self.head(torch.cat(ys))


def test_calls_that_wait_take_what_they_hold_not_their_peaks():
    torch.manual_seed(0)
    plain, x = Stepwise(), torch.randn(64, 8, 16)
    division = rg.budget(ours := copy.deepcopy(plain), "100%", x)
    told = division.ordinary_bytes + division.elsewhere_bytes
    assert told == pytest.approx(working_bytes(plain, x), rel=0.05)
    rg.budget(ours := copy.deepcopy(plain), least := least_of(copy.deepcopy(plain), x), x)
    results = 64 * 3 * 8 * 32 * 4 + x.nbytes  # outputs and states, which the caller holds
    assert least < told / 5
    assert working_bytes(ours, x) <= least + division.elsewhere_bytes + results
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        expected = torch.autograd.grad(plain(x).sum(), other)[0]
        torch.testing.assert_close(torch.autograd.grad(ours(x).sum(), one)[0], expected)


def test_a_short_call_takes_no_more_than_it_can():
    """Of a part that is more than its ordinary backpropagation, the rest goes to the others."""
    x = leaf(100, 8, 16)
    alone, both = rg.budget(Calls(1), "1GiB", x), rg.budget(Calls(1, short=10), "1GiB", x)
    short = both.ordinary_bytes - alone.ordinary_bytes
    assert 0 < short < alone.ordinary_bytes / 5
    total = alone.ordinary_bytes // 2
    division = rg.budget(Calls(1, short=10), total, x)
    assert division.shares["rnn"].calls == 2
    assert division.shares["rnn"].budget_bytes == pytest.approx(total - short, abs=2)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_the_gradient_stays_what_it_was_and_so_does_all_else(kind):
    torch.manual_seed(0)
    model = nn.ModuleDict({"inner": nn.ModuleList([kind(5, 7, dtype=torch.float64)])})
    model.forward = lambda x: model["inner"][0](x)[0].square().sum()
    theirs = copy.deepcopy(model["inner"][0])
    module = model["inner"][0]
    parameters, keys = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    x = torch.randn(400, 3, 5, dtype=torch.float64, requires_grad=True)
    division = rg.budget(model, "70%", x)
    assert division.model is model
    assert model["inner"][0] is module
    assert type(module) is getattr(rg, kind.__name__)
    assert module.memory == division.shares["inner.0"].budget_bytes
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    assert not seen  # the runs on the sample leave no trace
    model.forward(x)  # the first call of a shape measures
    seen.clear()
    model.forward(x).backward()
    assert seen == ["hook"]
    theirs(x)[0].square().sum().backward()
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-11, atol=1e-12)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_model_may_be_a_recurrent_module():
    lstm, x = nn.LSTM(8, 8), leaf(50, 2, 8)
    division = rg.budget(lstm, "30%", x)
    assert division.model is lstm
    assert isinstance(lstm, rg.LSTM)
    assert lstm.memory == division.shares[""].budget_bytes == division.total_bytes
    assert str(division).splitlines()[1].startswith("LSTM")
    assert copy.deepcopy(lstm).memory == lstm.memory


def test_modules_of_ours_get_another_memory_and_keep_their_backward():
    gru = rg.GRU(8, 8, memory="90%", backward="scan")
    lstm = rg.LSTM(8, 8, schedule=rg.plan(50, 4))
    model = nn.ModuleDict({"gru": gru, "lstm": lstm})
    model.forward = lambda x: lstm(gru(x)[0])[0]
    division = rg.budget(model, "70%", leaf(50, 2, 8))
    assert (gru.memory, gru.backward) == (division.shares["gru"].budget_bytes, "scan")
    assert (lstm.memory, lstm.schedule) == (division.shares["lstm"].budget_bytes, None)
    model(leaf(40, 2, 8)).sum().backward()  # of another length than the schedule had


class Everything(nn.Module):
    """Of all that a forward pass can leave behind, one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", None)
        self.hidden, self.called = None, 0

    def forward(self, x, scale=1.0):
        x = nn.functional.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2), 0.2)
        y, self.hidden = self.rnn(scale * x + random.random() + np.random.rand(), self.hidden)
        self.hidden = self.hidden.detach()
        self.steps += 1
        self.last = y.detach()
        self.called += 1
        y = y.clone()  # the outputs are what gradients are found from
        y[:, 0] = 0.0
        return nn.functional.relu(y, inplace=True).sum()


def test_the_run_on_the_sample_leaves_no_trace():
    torch.manual_seed(0)
    model, x = Everything(), torch.randn(4, 30, 6)
    model.norm.weight.grad = torch.ones(6)
    state, buffers = model.state_dict(), list(model.buffers())
    expected = {name: t.clone() for name, t in state.items()}
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    rg.budget(model, 1.0, {"x": x, "scale": 2.0})
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws[1:]
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(torch.equal(model.state_dict()[name], t) for name, t in expected.items())
    assert model.norm.weight.grad.sum() == 6
    assert model.rnn.weight_hh_l0.grad is None
    assert (model.hidden, model.called, model.last, model.training) == (None, 0, None, True)
    assert "forward" not in vars(model.rnn)
    model(x).backward()


def test_nothing_is_left_either_by_a_forward_pass_that_fails():
    model = Everything()
    with pytest.raises(TypeError, match="scales"):
        rg.budget(model, "80%", {"x": torch.randn(4, 30, 6), "scales": 2.0})
    with pytest.raises(RuntimeError, match="should contain"):
        rg.budget(model, "80%", torch.randn(4, 30, 7))
    assert type(model.rnn) is nn.GRU
    assert "forward" not in vars(model.rnn)


class Fitted:
    """What a module might answer."""

    ordinary_bytes, minimum_bytes = 1000, 100


def test_the_run_on_the_sample_takes_no_ordinary_backpropagation(monkeypatch):
    """A budget is for those who have not the memory to do without."""
    x = leaf(200, 16, 24)
    ordinary = working_bytes(Pair(), x)
    model, seen = Pair(), deque()  # which is not put back after the runs on the sample
    model.second.register_forward_pre_hook(lambda _, args: seen.append(args[0].requires_grad))
    monkeypatch.setattr(rg.LSTM, "_fit_within", lambda *_: Fitted)  # measures nothing
    assert rg.measure(lambda: rg.budget(model, 1.0, x)).working_bytes < ordinary / 3
    assert [*seen] == [False, True]  # the first looks for layers that are called in turn


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 6)

    def forward(self, sequences):
        packed = sequences if isinstance(sequences, PackedSequence) else pack_sequence(sequences)
        outputs, (h, c) = self.rnn(packed)
        assert isinstance(outputs, PackedSequence)
        return outputs.data.sum() + h.sum() + c.sum()


@pytest.mark.parametrize("given", [list, pack_sequence])
def test_packed_sequences_are_asked_for_as_they_are(monkeypatch, given):
    asked = []

    def fit(module, memory, input, hx=None):
        asked.append((memory, input.batch_sizes.tolist(), hx))
        return Fitted

    monkeypatch.setattr(rg.LSTM, "_fit_within", fit)
    model = Packed()
    division = rg.budget(model, 550, given([torch.randn(5, 6), torch.randn(3, 6)]))
    assert asked == [("100%", [2, 2, 2, 1, 1], None), (1, [2, 2, 2, 1, 1], None)]
    assert division.shares["rnn"] == rg.Share(1, 550, 100, 1000)


def test_packed_sequences_of_other_lengths_are_another_kind_of_call(monkeypatch):
    asked = []

    def fit(module, memory, input, hx=None):
        asked.append(input.batch_sizes.tolist())
        return Fitted

    class Twice(Packed):
        def forward(self, first, second):
            return super().forward(first) + super().forward(second) + super().forward(first)

    monkeypatch.setattr(rg.LSTM, "_fit_within", fit)
    pairs = [[torch.randn(steps, 6) for steps in lengths] for lengths in ((5, 3, 1), (5, 2, 2))]
    assert rg.budget(Twice(), 1.0, tuple(pairs)).shares["rnn"].calls == 3
    assert asked == [[3, 2, 2, 1, 1]] * 2 + [[3, 3, 1, 1, 1]] * 2


@pytest.mark.parametrize("wanted", [True, False])
def test_a_module_is_asked_for_the_inputs_that_it_is_given(wanted):
    model, x = Pair(), torch.randn(100, 8, 24, requires_grad=wanted)
    division = rg.budget(model, "50%", x)
    alone = rg.LSTM(24, 40, memory=1.0)
    assert alone.fit(x).ordinary_bytes == division.shares["first"].ordinary_bytes
    assert alone.fit(leaf(100, 8, 24)).ordinary_bytes != alone.fit(x.detach()).ordinary_bytes


def test_a_frozen_encoder_takes_nothing():
    model, x = Pair(), torch.randn(100, 8, 24)
    model.first.requires_grad_(False)
    division = rg.budget(model, "50%", x)
    assert division.shares.keys() == {"second"}
    assert division.left == ("first",)
    assert type(model.first) is nn.LSTM
    assert str(division).splitlines()[-1].endswith("nothing to backpropagate: first")


def test_what_is_seen_is_asked_for_under_the_models_autocast():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(16, 16)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.rnn(x)[0].sum()

    model, x = Cast(), leaf(100, 8, 16)
    run_or_skip(model.rnn, x)
    division = rg.budget(model, "50%", x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.rnn.fit(x).ordinary_bytes == division.ordinary_bytes


def test_a_parametrized_module_stays_parametrized():
    lstm = nn.LSTM(6, 6, dtype=torch.float64)
    parametrizations.weight_norm(lstm, "weight_hh_l0")
    theirs = copy.deepcopy(lstm)
    keys = list(lstm.state_dict())
    x = torch.randn(60, 2, 6, dtype=torch.float64, requires_grad=True)
    rg.budget(lstm, "60%", x)
    assert isinstance(lstm, rg.LSTM)
    assert list(lstm.state_dict()) == keys
    for net in (lstm, theirs):
        net(x)[0].square().sum().backward()
    for ours, other in zip(lstm.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-10, atol=1e-12)
    parametrize.remove_parametrizations(lstm, "weight_hh_l0")
    assert type(lstm) is rg.LSTM


def test_the_division_is_a_table():
    division = rg.budget(Pair(), "25%", leaf(100, 4, 24))
    head, first, second, last, covered = str(division).splitlines()
    assert covered.startswith("budgeted modules hold ")
    assert head.split() == ["module", "calls", "budget", "share", "least", "ordinary"]
    assert first.split()[:2] == ["first", "1"]
    assert second.split()[:2] == ["second", "1"]
    assert last.split()[:2] == ["all", "2"]
    assert "25.0%" in last
    assert len({len(line) for line in (head, first, second, last)}) == 1


class Own(nn.LSTM):
    def check_forward_args(self, input, hidden, batch_sizes):
        super().check_forward_args(input, hidden, None)


class Named(ABC, nn.RNNBase):
    """What a forecasting library derives its modules from."""

    @abstractmethod
    def zeros(self, x): ...

    def forward(self, x, hx=None, lengths=None):
        hx = self.zeros(x) if hx is None else hx
        y, last = super().forward(x if lengths is None else 2 * x, hx)
        return y, last


class NamedLSTM(Named, nn.LSTM):
    def zeros(self, x):
        h = torch.zeros(self.num_layers, x.shape[1], self.hidden_size)
        return h, h


class NamedGRU(Named, nn.GRU):
    def zeros(self, x):
        return torch.zeros(self.num_layers, x.shape[1], self.hidden_size)


@pytest.mark.parametrize("kind", [NamedLSTM, NamedGRU])
def test_a_class_that_wraps_forward_keeps_what_it_adds(kind):
    torch.manual_seed(0)
    plain = nn.ModuleDict({"inner": kind(8, 16)})
    ours = copy.deepcopy(plain)
    x, lengths = torch.randn(100, 4, 8, requires_grad=True), torch.tensor([1])

    class Model(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            return self.parts["inner"](x, lengths=lengths)[0]

    division = rg.budget(Model(ours), "20%", x)
    assert division.shares["parts.inner"].budget_bytes == ours["inner"].memory
    assert isinstance(ours["inner"], kind)
    assert type(ours["inner"]).__name__ == kind.__name__
    found = [Model(net)(x) for net in (plain, ours)]
    wanted = [[x, *net.parameters()] for net in (plain, ours)]
    grads = [torch.autograd.grad(y.square().sum(), w) for y, w in zip(found, wanted, strict=True)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    fit = ours["inner"].fit(2 * x)
    assert fit.peak_bytes <= ours["inner"].memory
    assert not fit.ordinary


def test_what_cannot_be_divided_says_so():
    x = torch.randn(20, 2, 24)
    with pytest.raises(rg.CellError, match=r"got a function: expected a torch\.nn\.Module"):
        rg.budget(lambda x: x, "5%", x)
    with pytest.raises(rg.CellError, match=r"the Linear has nothing to budget.*use rg\.unroll"):
        rg.budget(nn.Linear(24, 2), "5%", x)
    with pytest.raises(rg.UnitError, match="unknown unit"):
        rg.budget(Pair(), "3 apples", x)
    with pytest.raises(rg.CellError, match=r"\(first, second\) nothing to backpropagate: expected"):
        rg.budget(Pair().requires_grad_(False), "50%", x)
    with pytest.raises(rg.CellError, match=r"^inner: Own is a class of its own.*from rg\.LSTM"):
        rg.budget(nn.ModuleDict({"inner": Own(24, 2)}), "50%", x)
    patched = Pair()
    patched.second.forward = patched.second.forward
    with pytest.raises(rg.CellError, match=r"^second: the forward of this LSTM was replaced"):
        rg.budget(patched, "50%", x)
    with pytest.raises(rg.CellError, match=r"parameters without a shape yet.*call the lazy"):
        rg.budget(nn.Sequential(nn.LSTM(24, 2), nn.LazyLinear(2)), "50%", x)


def test_a_refusal_of_a_module_names_it(monkeypatch):
    def fit(module, *_):
        raise rg.CellError("not like this")

    monkeypatch.setattr(rg.LSTM, "_fit_within", fit)
    model = Pair()
    with pytest.raises(rg.CellError, match=r"^first: not like this$"):
        rg.budget(model, "50%", leaf(20, 2, 24))
    assert type(model.first) is nn.LSTM


def test_a_forward_pass_that_differentiates_is_told():
    class Penalty(Pair):
        def forward(self, x):
            y = super().forward(x)
            return y.sum() + torch.autograd.grad(y.sum(), x)[0].norm()

    with pytest.raises(rg.CellError, match="differentiates through a budgeted module"):
        rg.budget(Penalty(), "50%", leaf(20, 2, 24))


@pytest.mark.quick(0)
def test_around_a_compiled_model():
    model, x = Pair(), leaf(30, 2, 24)
    compiled = torch.compile(model, backend="eager")
    division = rg.budget(compiled, "60%", x)
    assert len(division.shares) == 2
    assert isinstance(model.first, rg.LSTM)
    compiled(x).sum().backward()


class KeepsWide(nn.Module):
    """Keeps something wide, which nothing saves, while its second layer runs."""

    def __init__(self, before=0):
        super().__init__()
        self.first, self.second = nn.LSTM(8, 16), nn.LSTM(16, 16)
        self.before = before

    def forward(self, x):
        for _ in range(self.before):
            self.first(x[:1, :1])
        h, _ = self.first(x)
        kept = torch.cat([h * 1.0] * 8, -1)
        h, _ = self.second(h + 1)
        return h + kept.unflatten(-1, (8, 16)).sum(-2)


@pytest.mark.parametrize("before", [0, 300])
def test_what_is_kept_beside_recurrent_modules_is_told(before):
    model, x = KeepsWide(before), torch.randn(200, 4, 8)
    division = rg.budget(model, "30%", x)
    state = 200 * 4 * 16 * 4
    assert 9 * state <= division.elsewhere_bytes <= 10 * state  # the wide one, and an input

    def step():
        model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    step()
    outputs = 3 * state  # those of the layers, and of the model
    told = division.total_bytes + division.elsewhere_bytes + outputs
    assert rg.measure(step).working_bytes <= told


class Wide(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class AfterAStem(nn.Module):
    """Blocks behind a layer of the model's own."""

    def __init__(self, stem):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = stem, nn.ModuleList(Wide() for _ in range(6))

    def forward(self, x):
        x = self.stem(x)
        x = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x
        for block in self.blocks:
            x = block(x)
        return x


class Inline(AfterAStem):
    """Holds more than its blocks do before they run."""

    def __init__(self):
        super().__init__(nn.Linear(24, 400))
        self.back = nn.Linear(400, 24)

    def forward(self, x):
        x = self.back(self.stem(x).sin().exp().sigmoid().tanh())
        for block in self.blocks:
            x = block(x)
        return x


def test_the_least_that_a_share_names_works_as_bytes():
    x = torch.randn(64, 24)
    with pytest.raises(rg.BudgetError) as caught:
        rg.budget(Inline(), "10%", x)
    division = rg.budget(Inline(), caught.value.minimum_bytes, x)
    assert division.total_bytes == caught.value.minimum_bytes


def test_the_rests_own_peak_is_the_ordinary_one_and_told():
    x = torch.randn(2, 3, 128, 128)
    plain, model = (AfterAStem(nn.Conv2d(3, 24, 32, 32)) for _ in range(2))
    with pytest.warns(UserWarning, match="no budget of the budgeted modules lowers it"):
        division = rg.budget(model, "60%", x)
    true = working_bytes(plain, x)
    assert division.rest_bytes == division.peak_bytes == pytest.approx(true, rel=0.05)
    told = division.ordinary_bytes + division.elsewhere_bytes
    assert told == pytest.approx(true, rel=0.05)
    assert "takes" in str(division)
    assert "no budget of the budgeted modules lowers it" in str(division)


@dataclasses.dataclass
class Aside:
    weights: torch.Tensor
    values: torch.Tensor


class Telling(nn.Module):
    """A block of attention that returns how it attended, in an object of its own."""

    def __init__(self, width=24):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.wide = Wide(width)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / 5).softmax(-1)
        return self.wide(x + weights @ v), Aside(weights, v)


class Keeping(nn.Module):
    """Keeps what its blocks tell until its forward pass ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Telling() for _ in range(6))

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x, aside = block(x)
            kept.append(aside)
        return x


@pytest.mark.parametrize("memory", ["least", "55%", "70%"])
def test_what_a_model_keeps_unseen_counts(memory):
    plain, model, x = Keeping(), Keeping(), torch.randn(4, 48, 24)
    least = least_of(model, x)
    with pytest.raises(rg.BudgetError) as caught:
        rg.budget(model, "10%", x)
    assert caught.value.minimum_bytes == least
    assert "forward" not in vars(model.blocks[0])
    division = rg.budget(model, least if memory == "least" else memory, x)
    told = division.total_bytes + division.elsewhere_bytes
    assert division.peak_bytes <= told
    assert working_bytes(model, x) <= told + x.nbytes
    true = working_bytes(plain, x)
    assert division.ordinary_bytes + division.elsewhere_bytes == pytest.approx(true, rel=0.05)
    y = torch.ones_like(x)
    found, expected = (
        torch.autograd.grad(one(x), [*one.parameters()], y) for one in (model, plain)
    )
    assert all(map(torch.equal, found, expected))


def test_the_least_that_is_named_works_if_another_plan_takes_a_little_more(monkeypatch):
    """Seconds decide between plans of the same bytes, beside which a model keeps more or less."""
    model, x = Keeping(), torch.randn(4, 48, 24)
    least, taken = least_of(model, x), budget_module.bytes_of_a_pass
    monkeypatch.setattr(budget_module, "bytes_of_a_pass", lambda *given: taken(*given) + 64)
    division = rg.budget(model, least, x)
    assert division.peak_bytes <= division.total_bytes + division.elsewhere_bytes


def test_a_division_tells_how_much_slower_a_pass_is():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    division = rg.budget(blocks, "30%", torch.randn(256, 64))
    assert 0 < division.ordinary_seconds <= division.seconds
    ratio = division.seconds / division.ordinary_seconds
    assert f"{ratio:.2f} times ordinary ones'" in str(division)
    division = rg.budget(nn.LSTM(8, 8), "30%", torch.randn(50, 2, 8))
    assert division.seconds is division.ordinary_seconds is None
    assert "times" not in str(division)


def test_what_is_beyond_ordinary_backpropagation_is_there_for_larger_inputs():
    layers = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(64, 32)
    ordinary = rg.budget(model, "100%", x).ordinary_bytes
    division = rg.budget(model, 2 * ordinary, x)
    assert [one.budget_bytes for one in division.shares.values()] == [2 * ordinary]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert working_bytes(model, torch.randn(100, 32)) <= 2 * ordinary
