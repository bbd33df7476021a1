"""Steps within a budget are those of the plain loop: their states, their results, their sizes."""

import warnings

import pytest
import torch
from torch import nn

import retrograde as rg

B, H = 4, 8


def plain(cell, x, state):
    outputs = []
    for x_t in x:
        y, state = cell(x_t, state)
        outputs.append(y)
    return torch.stack(outputs), state


def gradients(y, tensors):
    return torch.autograd.grad(y.square().sum(), tensors, allow_unused=True)


def setting(steps=20):
    torch.manual_seed(0)
    return nn.GRUCell(5, H), torch.randn(steps, B, 5), torch.zeros(B, H)


ASKS = {
    "requires_grad": lambda h: h.requires_grad,
    "grad_fn": lambda h: h.grad_fn is None,
    "leaf": lambda h: h.is_leaf,
    "class": lambda h: isinstance(h, nn.Parameter),
    "attribute": lambda h: getattr(h, "age", 0) % 3 == 1,
}


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("kind", ["constant", "parameter", "computed"])
def test_a_step_may_ask_how_its_state_was_made(asks, kind):
    gru, x, h = setting()
    weights = [*gru.parameters()]
    if kind != "constant":
        h = nn.Parameter(torch.randn(B, H))
        weights.append(h)

    def first():
        return h * 2 if kind == "computed" else h

    def cell(x_t, h):
        new = gru(x_t, h)
        new = new * 0.5 if ASKS[asks](h) else new
        new.age = getattr(h, "age", 0) + 1
        return new, new

    expected = gradients(plain(cell, x, first())[0], weights)
    for _ in range(2):  # later passes may run steps without a graph
        found, last = rg.unroll(cell, x, first(), memory="40%")
        assert torch.equal(found, plain(cell, x, first())[0])
        assert last.age == len(x)
        for ours, theirs in zip(gradients(found, weights), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("detached", [False, True])
def test_a_step_that_is_not_recorded_needs_no_graph_after_the_first_pass(detached, monkeypatch):
    gru, x, h = setting()
    forward, recorded = nn.GRUCell.forward, []

    def noting(module, *given):
        recorded.append(torch.is_grad_enabled())
        return forward(module, *given)

    def cell(x_t, state):
        h, total = state
        h = gru(x_t, h)
        total = total + (h.detach() if detached else h)
        return h, (h, total)

    expected, (_, total) = plain(cell, x, (h, h))
    monkeypatch.setattr(nn.GRUCell, "forward", noting)
    for turn in range(3):
        recorded.clear()
        found, (_, last) = rg.unroll(cell, x, (h, h), memory="40%")
        assert turn == 0 or all(recorded) == detached
        assert torch.equal(found, expected)
        assert torch.equal(last, total)
        assert found.requires_grad
        assert last.requires_grad is not detached
        ours, theirs = (gradients(y, [*gru.parameters()]) for y in (found, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        expected, _ = plain(cell, x, (h, h))


def test_a_late_step_that_asks_for_a_graph_is_named():
    gru, x, h = setting(40)

    def cell(x_t, state):
        h, k = state
        h = gru(x_t, h) * (0.5 if k > 10 and not torch.is_grad_enabled() else 1.0)
        return h, (h, k + 1)

    found, _ = rg.unroll(cell, x, (h, 0), memory="40%")
    assert torch.equal(found, plain(cell, x, (h, 0))[0])
    found.sum().backward()
    with pytest.raises(rg.RetrogradeError, match=r"step \d+ of the cell computed something else"):
        rg.unroll(cell, x, (h, 0), memory="40%")[0].sum().backward()


def test_tensors_in_attributes_of_a_state_are_refused():
    gru, x, h = setting()

    def cell(x_t, h):
        new = gru(x_t, h) + getattr(h, "old", 0.0)
        new.old = new * 0.1
        return new, new

    with pytest.raises(rg.CellError, match="the attributes old"):
        rg.unroll(cell, x, h, memory="40%")


def test_results_require_a_gradient_where_the_plain_loops_do():
    gru, x, h = setting()

    def cell(x_t, state):
        h, mean, count = state
        h = gru(x_t, h)
        return (h - mean, mean), (h, 0.9 * mean + 0.1 * h.detach(), count + 1)

    def train(run):
        state, found = (h, torch.zeros(B, H), torch.zeros(())), []
        for _ in range(2):
            (y, z), state = run(state)
            found += [y.requires_grad, z.requires_grad, *(t.requires_grad for t in state)]
            state = state[0].detach(), *state[1:]  # the others have no history
            found += gradients(y, [*gru.parameters()])
        return found

    def loop(state):
        ys = []
        for x_t in x:
            y, state = cell(x_t, state)
            ys.append(y)
        return [torch.stack(one) for one in zip(*ys, strict=True)], state

    ours = train(lambda state: rg.unroll(cell, x, state, memory="60%"))
    for one, other in zip(ours, train(loop), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("call", ["unroll", "bptt"])
def test_a_step_that_computes_something_else_is_named(call):
    gru, x, h = setting()
    done: list[int] = []  # lists are not searched for what changes

    def cell(x_t, h):
        new = gru(x_t, h) * (1.5 if done and done[-1] >= 20 else 1.0)
        return new, new

    if call == "unroll":
        found = rg.unroll(cell, x, h, memory="40%")[0]
        done.append(20)
        with pytest.raises(rg.RetrogradeError, match=r"step \d+ of the cell computed something"):
            found.sum().backward()
    else:
        note = lambda count, _: done.append(count)  # noqa: E731
        with pytest.raises(rg.RetrogradeError, match=r"step \d+ of the cell computed something"):
            rg.bptt(cell, x, h, loss=lambda t, y: y.sum(), memory="40%", progress=note)
    assert all(p.grad is None for p in gru.parameters())


def test_only_some_steps_are_checked_later(monkeypatch):
    from retrograde.run import prints

    gru, x, h = setting(64)
    counted = []
    known = prints.fingerprint
    monkeypatch.setattr(prints, "fingerprint", lambda t: counted.append(t) or known(t))

    def cell(x_t, h):
        new = gru(x_t, h)
        return new, new

    numbers = []
    for _ in range(9):
        counted.clear()
        rg.unroll(cell, x, h, memory="40%")[0].sum().backward()
        numbers.append(len(counted))
    assert numbers == [64, *[8] * 8]


def test_pieces_of_one_tensor_may_be_captured():
    torch.manual_seed(0)
    encoder, gru = nn.Linear(6, 2 * H), nn.GRUCell(H, H)
    memory, x, h = torch.randn(B, 7, 6), torch.zeros(12, B, 0), torch.ones(B, H)

    def make(split):
        keys, values = split(encoder(memory))
        keys = keys / 3

        def cell(_, h):
            weights = torch.softmax((keys @ h.unsqueeze(-1)).squeeze(-1), 1)
            h = gru((weights.unsqueeze(-1) * values).sum(1), h)
            return h, h

        return cell

    for split in (
        lambda t: t.chunk(2, -1),
        lambda t: t.view(B, 7, 2, H).unbind(2),
        lambda t: t.split([H, H], -1),
    ):
        expected = gradients(plain(make(split), x, h)[0], [*encoder.parameters()])
        found = gradients(rg.unroll(make(split), x, h, memory="60%")[0], [*encoder.parameters()])
        torch.testing.assert_close(found, expected)


def test_a_captured_tensor_may_depend_on_a_parameter_of_the_step():
    gru, x, h = setting(12)

    def make():
        context = torch.tanh(torch.ones(B, H) @ gru.weight_hh[:H])

        def cell(x_t, h):
            h = gru(x_t, h * context)
            return h, h

        return cell

    expected = gradients(plain(make(), x, h)[0], [*gru.parameters()])
    found = gradients(rg.unroll(make(), x, h, memory="60%")[0], [*gru.parameters()])
    torch.testing.assert_close(found, expected)


class TestSteps:
    """An ODE-RNN: as many Euler steps as its input says."""

    @staticmethod
    def make():
        torch.manual_seed(0)
        f = nn.Sequential(nn.Linear(H, 4 * H), nn.Tanh(), nn.Linear(4 * H, H))
        gru = nn.GRUCell(5, H)

        def cell(inputs, h):
            x_t, gap = inputs
            for _ in range(int(gap)):
                h = h + 0.1 * f(h)
            h = gru(x_t, h)
            return h, h

        return cell, [*f.parameters(), *gru.parameters()], torch.randn(40, B, 5), torch.zeros(B, H)

    @pytest.mark.parametrize("later", [[12] * 40, [1] * 10 + [12] * 30])
    def test_a_later_call_with_larger_steps(self, later):
        cell, weights, x, h = self.make()
        ones = torch.ones(40, B, H)

        def call(gaps):
            y, h_t = rg.unroll(cell, (x, torch.tensor(gaps)), h, memory=60_000)
            return y, h_t.detach(), torch.autograd.grad(y, weights, ones)

        call([1] * 40)
        with pytest.warns(UserWarning, match="records .* operations, where the steps"):
            assert rg.measure(lambda: call(later)).working_bytes <= 1.5 * 60_000
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured = rg.measure(lambda: call(later))
        assert measured.working_bytes <= 60_000
        state, outputs = h, []
        for x_t, gap in zip(x, later, strict=True):
            y, state = cell((x_t, gap), state)
            outputs.append(y)
        expected = torch.autograd.grad(torch.stack(outputs), weights, ones)
        torch.testing.assert_close(measured.value[2], expected)

    @pytest.mark.parametrize("gaps", [[1] * 6 + [12] * 34, [12] * 6 + [1] * 34])
    def test_the_first_call_is_planned_for_its_largest_steps(self, gaps):
        cell, weights, x, h = self.make()
        ones = torch.ones(40, B, H)

        def call():
            y, h_t = rg.unroll(cell, (x, torch.tensor(gaps)), h, memory=60_000)
            return y, h_t.detach(), torch.autograd.grad(y, weights, ones)

        call()
        assert rg.measure(call).working_bytes <= 60_000

    def test_first_steps_without_a_gradient(self):
        gru, x, h = setting(100)
        steps, ones = torch.arange(100), torch.ones(100, B, H)

        def cell(inputs, h):
            x_t, t = inputs
            with torch.set_grad_enabled(bool(t >= 15)):
                h = gru(x_t, h)
            return h, h

        def call():
            y, h_t = rg.unroll(cell, (x, steps), h, memory="20%")
            return y, h_t.detach(), torch.autograd.grad(y, [*gru.parameters()], ones)

        def loop():
            ys, state = [], h
            for t in range(100):
                y, state = cell((x[t], steps[t]), state)
                ys.append(y)
            y = torch.stack(ys)
            return y, state.detach(), torch.autograd.grad(y, [*gru.parameters()], ones)

        call()
        found = rg.fit(cell, (x, steps), h, memory="20%")
        assert rg.measure(call).working_bytes <= found.budget_bytes
        loop()
        assert found.ordinary_bytes == pytest.approx(rg.measure(loop).working_bytes, rel=0.03)

    @pytest.mark.parametrize("run", ["unroll", "bptt"])
    def test_the_least_that_an_error_names_works(self, run):
        w = torch.randn(H, H).requires_grad_()
        x, h = torch.randn(3, B, H), torch.randn(B, H, requires_grad=True)

        def cell(x_t, h):  # step 0, whose state requires a gradient, is larger than the others
            new = x_t * w[0] + h.sin().cos().tanh()
            return new, h.detach() + x_t

        def call(memory):
            if run == "unroll":
                return rg.unroll(cell, x, h, memory=memory)[0].sum().backward()
            return rg.bptt(cell, x, h, loss=lambda _, y: y.sum(), memory=memory)

        with pytest.raises(rg.BudgetError) as refusal:
            call(1)
        call(refusal.value.minimum_bytes)


def test_a_loop_in_a_loop_is_measured_once(monkeypatch):
    from retrograde.cells import unroll

    torch.manual_seed(0)
    fast, slow = nn.GRUCell(5, H), nn.GRUCell(H, H)
    measured = []
    known = unroll.footprint

    def noted(*arguments, **options):
        measured.append(arguments)
        return known(*arguments, **options)

    monkeypatch.setattr(unroll, "footprint", noted)

    def inner(x_t, h):
        h = fast(x_t, h)
        return h, h

    def outer(xs, state):
        h, g = state
        ys, h = rg.unroll(inner, xs, h, memory="60%")
        g = slow(ys.mean(0), g)
        return g, (h, g)

    x, first = torch.randn(6, 7, B, 5), (torch.zeros(B, H), torch.zeros(B, H))
    rg.unroll(outer, x, first, memory="70%")[0].sum().backward()
    assert len(measured) <= 4


def test_a_share_under_autocast_is_of_what_the_plain_loop_holds():
    torch.manual_seed(0)
    gru, x = nn.GRUCell(8, 32), torch.randn(100, 4, 8)
    h, ones = torch.zeros(4, 32).bfloat16(), torch.ones(100, 4, 32).bfloat16()

    def cell(x_t, h):
        h = gru(x_t, h)
        return h, h

    def loop():
        with torch.autocast("cpu", torch.bfloat16):
            y, last = plain(cell, x, h)
        return y, last.detach(), torch.autograd.grad(y, [*gru.parameters()], ones)

    held = rg.measure(loop).working_bytes
    with torch.autocast("cpu", torch.bfloat16):
        told = rg.fit(cell, x, h, memory="30%").ordinary_bytes
    assert abs(told - held) <= 0.05 * held


def test_a_module_may_override_what_lists_its_modules():
    class Neuron(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, H)
            self.register_buffer("v", torch.zeros(B, H))

        def modules(self):
            return dict(self.named_children())

        def parameters(self):
            return {"linear": self.linear.weight}

        def forward(self, x):
            self.v = 0.9 * self.v + self.linear(x)
            return torch.tanh(self.v)

    torch.manual_seed(0)
    net, x = Neuron(), torch.randn(20, B, 5)
    expected = gradients(torch.stack([net(x_t) for x_t in x]), [net.linear.weight])
    net.v = torch.zeros(B, H)
    found = rg.unroll(net, x, memory="50%", stateful=[net])[0]
    torch.testing.assert_close(gradients(found, [net.linear.weight]), expected)


def test_a_buffer_that_no_step_writes_is_not_charged():
    class Cell(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.linear = nn.Linear(H, H)
            self.register_buffer("table", torch.ones(rows, H))

        def forward(self, x, h):
            h = torch.tanh(x + self.linear(h) + self.table[0])
            return h, h

    x, h = torch.randn(20, B, H), torch.zeros(B, H)
    small, large = (rg.fit(Cell(rows), x, h, memory="100%") for rows in (1, 5000))
    assert small.ordinary_bytes == large.ordinary_bytes
    assert small.minimum_bytes == large.minimum_bytes
