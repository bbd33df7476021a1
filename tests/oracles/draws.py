"""Models, shapes and options drawn at random, and iterations through them within a budget."""

import random
from dataclasses import dataclass

import torch
from torch import nn

import retrograde as rg
from oracles.loops import leaves_of
from oracles.networks import CELLS
from oracles.options import Setup, data_of

#: How a recurrence is run, as often as it is named.
WAYS = ["module"] * 4 + ["unroll"] * 2 + ["bptt of a cell", "bptt of a module"]


@dataclass(frozen=True)
class Drawn:
    """A case.

    Attributes:
        number: what it was drawn by.
        way: one of :data:`WAYS`.
        setup: the cell and its options; its own ``memory`` is not used.
        into: whether gradients go into ".grad", or are "returned".
        share: where the budget lies between the least and 1.2 times the ordinary, in logarithms.
    """

    number: int
    way: str
    setup: Setup
    into: str
    share: float

    def __str__(self):
        s = self.setup
        return f"{self.number} {self.way} {s.cell} T={s.length} B={s.batch}"

    def budget(self, least, ordinary):
        most = max(least, 1.2 * ordinary)
        return max(least, int(least * (most / least) ** self.share))


def draw(number, cheap=True):
    """The case of a number, small enough to take a fraction of a second or not."""
    dice = random.Random(f"{number} {cheap}")

    def up_to(most):
        return round(most ** dice.random())

    def one_of(*values):
        return dice.choice(values)

    way = dice.choice(WAYS)
    by_module = way == "module"
    cell = dice.choice([*CELLS] + ["nested"] * way.endswith(("unroll", "a cell")))
    size, layers = up_to(12 if cheap else 70), one_of(1, 1, 2, 3)
    most = (
        20 if cheap else 400 if way.endswith("module") else 80
    )  # the least budget: quadratic time
    options = {}
    if by_module:
        options = {
            "batch_first": one_of(True, False),
            "bidirectional": one_of(True, False),
            "dropout": one_of(0.0, 0.3) if layers > 1 else 0.0,
            "training": one_of(True, True, False),
            "layout": one_of("batched", "batched", "unbatched", "packed", "packed unsorted"),
        }
    if way.endswith("module"):
        options |= {"num_layers": layers, "state": one_of("given", "absent", "constant")}
        if cell == "LSTM" and size > 1:
            options["proj_size"] = one_of(0, dice.randrange(1, size))
    setup = Setup(
        cell,
        length=max(up_to(most), up_to(most)),  # the least schedules of few steps are trivial
        batch=up_to(8 if cheap else 20),
        inputs=up_to(12 if cheap else 70),
        size=size,
        bias=one_of(True, True, False),
        dtype=one_of("float64", "float32", "float32", "bfloat16"),
        loss=one_of("both", "outputs", "final state"),
        wanted=one_of("all", "all", "no x", "no weight_hh", "x alone"),
        seeds=one_of("dense", "expanded"),
        **options,
    )
    return Drawn(number, way, setup, one_of(".grad", "returned"), dice.random())


class Run:
    """An iteration of a case, as often as it is called.

    Args:
        drawn: the case.
        x: the inputs.
        state: the initial state.
        net: whose parameters are trained.
        forward: ``forward(memory)`` gives outputs and final state.
    """

    def __init__(self, drawn, x, state, net, forward):
        self.drawn, self.forward = drawn, forward
        self.leaves = [data_of(x), *leaves_of(state), *net.parameters()]
        self.wanted = [t for t in self.leaves if t.requires_grad]
        self.seeds = None

    def clear(self):
        for t in self.leaves:
            t.grad = None

    def call(self, memory):
        """Forward and backward: all that the caller is handed."""
        outputs, final = self.forward(memory)
        loss = self.drawn.setup.loss
        roots = [] if loss == "final state" else leaves_of(data_of(outputs))
        roots += [] if loss == "outputs" else leaves_of(final)
        roots = [t for t in roots if t.requires_grad]
        if self.seeds is None:  # made at a first call, which is not measured
            self.seeds = self._seeds(roots)
        if self.drawn.into == ".grad":
            torch.autograd.backward(roots, self.seeds)
            return outputs, final, [t.grad for t in self.leaves]
        found = torch.autograd.grad(roots, self.wanted, self.seeds, allow_unused=True)
        return outputs, final, found

    def _seeds(self, roots):
        if self.drawn.setup.seeds == "dense":
            return [torch.randn_like(t) for t in roots]
        return [torch.ones((), dtype=t.dtype).expand(t.shape) for t in roots]


class Streamed(Run):
    """An iteration that does both passes at once, as ``rg.bptt`` does."""

    def call(self, memory):
        return *self.forward(memory), [t.grad for t in self.leaves]


def run_of(drawn):
    """A case, to be run."""
    torch.manual_seed(drawn.number)
    make = {"module": _module, "unroll": _unrolled}.get(drawn.way, _streamed)
    return make(drawn)


def _module(drawn):
    _, net = drawn.setup.networks()
    x, state = drawn.setup.x(), drawn.setup.initial(net)
    hx = state if state is None or net.mode == "LSTM" else state[0]

    def forward(memory):
        net.memory = memory
        return net(x, hx)

    return Run(drawn, x, state, net, forward)


def _unrolled(drawn):
    net, step, x, state = _cell(drawn.setup)
    return Run(drawn, x, state, net, lambda memory: rg.unroll(step, x, state, memory=memory))


def _streamed(drawn):
    setup = drawn.setup
    if drawn.way.endswith("module"):
        step, _ = setup.networks()
        net, x, state = step, setup.x(), setup.initial(step)
        state = state if state is None or net.mode == "LSTM" else state[0]
    else:
        net, step, x, state = _cell(setup)

    def loss(_, y):
        return y.sum() if setup.seeds == "expanded" else y.square().sum()

    return Streamed(
        drawn, x, state, net, lambda memory: rg.bptt(step, x, state, loss=loss, memory=memory)
    )


class Nested(nn.Module):
    """A cell whose state is a tree: leaky traces of a tanh unit, and how many steps were gone."""

    def __init__(self, inputs, size, bias, dtype):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(size, inputs, dtype=dtype) / inputs**0.5)
        self.weight_hh = nn.Parameter(torch.randn(size, size, dtype=dtype) / size**0.5)
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype)) if bias else 0

    def forward(self, x, state):
        fast, slow = state["traces"]
        drive = x @ self.weight_ih.T + slow @ self.weight_hh.T + self.bias
        fast = 0.5 * fast + torch.tanh(drive)
        return fast * slow, {"traces": (fast, 0.9 * slow + 0.1 * fast), "steps": state["steps"] + 1}


def _cell(setup):
    """A module, the cell that it is, inputs, and a state."""
    kinds = {"GRU": nn.GRUCell, "LSTM": nn.LSTMCell, "nested": Nested}
    options = {"bias": setup.bias, "dtype": setup.number_type}
    if setup.cell.startswith("RNN"):
        options["nonlinearity"] = setup.cell.removeprefix("RNN_").lower()
    net = kinds.get(setup.cell, nn.RNNCell)(setup.inputs, setup.size, **options)
    setup.freeze(net)
    h, c = torch.randn(2, setup.batch, setup.size, dtype=setup.number_type)
    h, c = h.clone().requires_grad_(), c.clone().requires_grad_()
    if setup.cell == "nested":
        return net, net, setup.x(), {"traces": (h, c), "steps": torch.tensor(0)}

    def step(x, state):
        state = net(x, state)
        return (state[0] if setup.cell == "LSTM" else state), state

    return net, step, setup.x(), (h, c) if setup.cell == "LSTM" else h
