"""States of any structure: None that step 0 settles, numbers, dataclasses; and those of modules."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.loops import assert_bitwise, assert_near, gradients, least, leaves_of, loop

DOUBLE = torch.float64


class Begins(nn.Module):
    """A cell that makes its first state itself, from a parameter that no other step uses."""

    def __init__(self, kind):
        super().__init__()
        self.net = nn.GRUCell(3, 5, dtype=DOUBLE)
        self.start = nn.Parameter(torch.randn(5, dtype=DOUBLE))
        self.kind = kind

    def forward(self, x, state):
        match self.kind:
            case "tensor":
                h = self.net(x, self.start.expand(len(x), 5) if state is None else state)
                return 2 * h, h
            case "first input":  # the hidden weights are not used at step 0
                h = (
                    torch.tanh(x @ self.net.weight_ih[:5].T)
                    if state is None
                    else self.net(x, state)
                )
                return h, h
            case "a leaf":  # as some spiking neurons make it
                state = x.new_zeros(len(x), 5, requires_grad=True) if state is None else state
                h = self.net(x, state)
                return h, h
            case "dict":
                state = state or {"h": self.start.expand(len(x), 5), "sum": x.sum(-1), "none": None}
                h = self.net(x, state["h"])
                return h, {"h": h, "sum": state["sum"] + h.sum(-1), "none": None}
            case "part of it":
                h, more = state
                more = self.start if more is None else more
                h = self.net(x, h) * more
                return h, (h, more * 0.9)
            case "a number":
                h, more = state
                h = self.net(x, h) * (1 + more)
                return h, (h, h.mean(0) + more)


def initial(kind, size=2):
    h = torch.randn(size, 5, dtype=DOUBLE, requires_grad=True)
    return {"part of it": (h, None), "a number": (h, 0.5)}.get(kind)


def compared(cell, x, state, wanted, memory, seed=3):
    """The loop's bits: outputs, the last state, the gradients that count as inputs."""
    torch.manual_seed(seed)
    outputs, last = loop(cell, x, state)
    expected = gradients(outputs, last, wanted)
    torch.manual_seed(seed)
    ours, after = rg.unroll(cell, x, state, **memory)
    assert_bitwise(leaves_of((ours, after)), leaves_of((outputs, last)))
    assert_near(gradients(ours, after, wanted), expected)
    return after


KINDS = ["tensor", "first input", "dict", "part of it", "a number"]


@pytest.mark.quick(5)
@pytest.mark.parametrize("length", [1, 2, 11])
@pytest.mark.parametrize("kind", KINDS)
def test_step_0_settles_the_state(kind, length):
    torch.manual_seed(1)
    cell, state = Begins(kind), initial(kind)
    x = torch.randn(length, 2, 3, dtype=DOUBLE, requires_grad=True)
    wanted = [x, *leaves_of(state), *cell.parameters()]
    smallest = least(lambda memory: rg.unroll(cell, x, state, memory=memory))
    compared(cell, x, state, wanted, {})
    seed = torch.ones((), dtype=DOUBLE).expand(length, 2, 5)
    for memory in (smallest, smallest + 500, 2 * smallest, "100%"):
        compared(cell, x, state, wanted, {"memory": memory})
        if isinstance(memory, int):

            def call(memory=memory):
                y, after = rg.unroll(cell, x, state, memory=memory)
                found = torch.autograd.grad(y, wanted, seed, allow_unused=True)
                return y.detach(), [t.detach() for t in leaves_of(after)], found

            call()
            assert rg.measure(call).working_bytes <= memory
    for slots in range(1, min(length, 4)):
        compared(cell, x, state, wanted, {"schedule": rg.plan(length, slots)})


def test_step_0_may_make_its_state_as_a_leaf():
    torch.manual_seed(1)
    cell, x = Begins("a leaf"), torch.randn(11, 2, 3, dtype=DOUBLE, requires_grad=True)
    for asked in ({"memory": "60%"}, {"memory": "100%"}, {"schedule": rg.plan(11, 3)}):
        compared(cell, x, None, [x, *cell.parameters()], asked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_settled_state_elsewhere(kind):
    torch.manual_seed(1)
    cell, state = Begins(kind), initial(kind)
    x = torch.randn(9, 2, 3, dtype=DOUBLE)
    outputs, last = loop(cell, x, state)
    with torch.no_grad():
        ours, after = rg.unroll(cell, x, state, memory="50%")
    assert_bitwise(leaves_of((ours, after)), leaves_of((outputs, last)))
    cell.zero_grad()
    outputs.square().sum().backward()
    expected = [p.grad for p in cell.parameters()]
    cell.zero_grad()
    _total, after = rg.bptt(
        cell, x, state, loss=lambda t, y: y.square().sum(), memory="60%" if kind != "dict" else None
    )
    assert_near([p.grad for p in cell.parameters()], expected)
    assert_bitwise(leaves_of(after), leaves_of(last))
    assert rg.profile(cell, x[0], state).state_bytes > 0


@dataclass
class Held:
    h: torch.Tensor
    step: int
    scale: float
    done: bool
    more: torch.Tensor | None = None


torch.export.register_dataclass(Held)


def test_a_dataclass_of_tensors_and_numbers_is_a_state():
    torch.manual_seed(1)
    net = nn.GRUCell(3, 5, dtype=DOUBLE)

    def cell(x, state):
        assert type(state) is Held
        assert type(state.step) is int
        assert type(state.done) is bool
        h = net(x, state.h) * state.scale if state.step % 3 else net(x, state.h)
        return h, Held(h, state.step + 1, state.scale * 0.9, not state.done, state.more)

    x = torch.randn(11, 2, 3, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(2, 5, dtype=DOUBLE, requires_grad=True)
    for asked in ({}, {"memory": "70%"}, {"schedule": rg.plan(11, 2)}):
        after = compared(cell, x, Held(h, 0, 1.0, False), [x, h, *net.parameters()], asked)
        assert (after.step, after.done, after.more) == (11, True, None)
        assert after.scale == pytest.approx(0.9**11)
        assert type(after.scale) is float


def test_a_dataclass_that_torch_does_not_know_is_refused():
    @dataclass
    class Unknown:
        h: torch.Tensor

    told = r"got a Unknown in the state: expected .* torch\.export\.register_dataclass\(Unknown\)"
    with pytest.raises(rg.CellError, match=told):
        rg.unroll(lambda x, s: (x, s), torch.randn(5, 2), Unknown(torch.zeros(2)), memory="50%")


def test_a_state_that_does_not_settle_is_refused():
    x = torch.randn(5, 2, 3)

    def grows(x, state):
        return x, (state or ()) + (x,)

    with pytest.raises(rg.CellError, match="changed the structure of its state"):
        rg.unroll(grows, x.requires_grad_(), None, memory="50%")
    with pytest.raises(rg.CellError, match="got a str in the state"):
        rg.unroll(grows, x, "a text")


def test_a_cell_may_change_its_dtype_between_calls():
    cell = nn.GRUCell(3, 5)

    def step(x, h):
        h = cell(x, h)
        return h, h

    for kind in (torch.float32, DOUBLE, torch.float32):
        cell.to(kind)
        x = torch.randn(9, 2, 3, dtype=kind, requires_grad=True)
        compared(step, x, torch.zeros(2, 5, dtype=kind), [x, *cell.parameters()], {"memory": "70%"})


class Neuron(nn.Module):
    """A leaky neuron that keeps its potential in itself, as spiking networks do."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.decay = kept, nn.Parameter(torch.tensor(0.9, dtype=DOUBLE))
        self.table = {"v": 0.0}
        self.register_buffer("mem", torch.zeros(0, dtype=DOUBLE))
        self.v, self.pair, self.count = None, None, 0

    def forward(self, x):
        self.count += 1
        match self.kept:
            case "buffer":
                before = self.mem if self.mem.shape == x.shape else torch.zeros_like(x)
                self.mem = self.decay * before + x
                return torch.tanh(self.mem)
            case "attribute":
                self.v = x if self.v is None else self.decay * self.v + x
                return torch.tanh(self.v)
            case "dict":
                self.table["v"] = self.decay * self.table["v"] + x
                return torch.tanh(self.table["v"])
            case "pair":
                a, b = self.pair or (torch.zeros_like(x), torch.zeros_like(x))
                self.pair = self.decay * a + b, x + 0.3 * a
                return torch.tanh(self.pair[0])

    @property
    def held(self):
        return {
            "buffer": self.mem, "attribute": self.v, "dict": self.table["v"], "pair": self.pair
        }[self.kept]  # fmt: skip


class Spiking(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4, dtype=DOUBLE), nn.Linear(4, 2, dtype=DOUBLE)
        self.neurons = nn.ModuleList([Neuron(kept), Neuron(kept)])

    def forward(self, x):
        x = nn.functional.dropout(self.neurons[0](self.first(x)), 0.2)
        return self.neurons[1](self.last(x))


KEPT = ["buffer", "attribute", "dict", "pair"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("asked", [{}, {"memory": "80%"}, {"schedule": rg.plan(11, 2)}])
@pytest.mark.parametrize("kept", KEPT)
def test_modules_that_keep_their_state_in_themselves(kept, asked):
    torch.manual_seed(1)
    theirs, ours = Spiking(kept), Spiking(kept)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(11, 200, 3, dtype=DOUBLE, requires_grad=True)
    for number in range(2):  # the second call goes on from where the first one ended
        found = []
        for net in (theirs, ours):
            torch.manual_seed(number)
            if net is theirs:
                y = torch.stack([net(x_t) for x_t in x])
            else:
                y, last = rg.unroll(net, x, stateful=[net], **asked)
                assert last is None
            wanted = [x, *net.parameters()]
            held = [neuron.held for neuron in net.neurons]
            assert [neuron.count for neuron in net.neurons] == [11 * (number + 1)] * 2
            found.append((leaves_of((y, held)), gradients(y, held, wanted)))
        assert_bitwise(found[1][0], found[0][0])
        assert_bitwise(found[1][1][:1], found[0][1][:1])
        assert_near(found[1][1], found[0][1])
        for net in (theirs, ours):  # and not its graph
            for neuron in net.neurons:
                neuron.mem = neuron.mem.detach()
                neuron.v = None if neuron.v is None else neuron.v.detach()
                neuron.pair = neuron.pair and tuple(t.detach() for t in neuron.pair)
                v = neuron.table["v"]
                neuron.table["v"] = v.detach() if isinstance(v, torch.Tensor) else v


def test_stateful_modules_beside_a_state():
    torch.manual_seed(1)
    neuron, net = Neuron("attribute"), nn.GRUCell(3, 5, dtype=DOUBLE)

    def cell(x, h):
        h = net(x, h)
        return neuron(h), h

    x = torch.randn(9, 2, 3, dtype=DOUBLE, requires_grad=True)
    h = torch.randn(2, 5, dtype=DOUBLE, requires_grad=True)
    outputs, last = loop(cell, x, h)
    expected = gradients(outputs, (last, neuron.v), [x, h, *net.parameters()])
    neuron.v = None
    ours, after = rg.unroll(cell, x, h, stateful=[neuron], memory="80%")
    found = gradients(ours, (after, neuron.v), [x, h, *net.parameters()])
    assert_bitwise([ours, after, *found[:2]], [outputs, last, *expected[:2]])
    with torch.no_grad():
        neuron.v = None
        again, _ = rg.unroll(cell, x, h, stateful=neuron)
    assert_bitwise([again], [outputs])


def test_modules_that_keep_nothing_are_refused():
    x = torch.randn(9, 2, 3)
    with pytest.raises(rg.CellError, match="assigns no tensor to an attribute of Linear"):
        rg.unroll(nn.Linear(3, 4), x, stateful=[nn.Linear(3, 4)], memory="50%")
    with pytest.raises(rg.CellError, match="stateful= holds a str"):
        rg.unroll(nn.Linear(3, 4), x, stateful=["a name"], memory="50%")
