"""Cells of every kind that one meets: each with inputs, a state, and what wants a gradient."""

import functools
import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import retrograde as rg

BATCH, WIDTH = 4, 3
DOUBLE = torch.float64
Memory = namedtuple("Memory", ["rows", "written", "full"])
GLOBAL = nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE)


@dataclass
class Case:
    """A cell, what it is run on, and what receives a gradient besides."""

    cell: Any
    x: Any
    state: Any
    parameters: list
    reset: Any = lambda: None  # puts back the generators that are its own


def normal(*shape, grad=True):
    return torch.randn(*shape, dtype=DOUBLE).requires_grad_(grad)


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs, dtype=DOUBLE)


def usual(length):
    """Inputs and a state that most cells take."""
    return normal(length, BATCH, WIDTH), normal(BATCH, WIDTH)


def same(h):
    return h, h


def of(length, cell, *modules, more=()):
    """A case on the usual inputs, with the parameters of some modules."""
    parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
    return Case(cell, *usual(length), [*parameters, *more])


def a_global_function(x, h):
    return same(GLOBAL(x, h))


class Callable:
    """An object that is no module, and holds one in a dict."""

    def __init__(self):
        self.parts = {"cell": nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE)}

    def __call__(self, x, h):
        return same(self.parts["cell"](x, h))


def a_function(length):
    return of(length, a_global_function, GLOBAL)


def an_object(length):
    cell = Callable()
    return of(length, cell, cell.parts["cell"])


def a_method(length):
    cell = Callable()
    return of(length, cell.__call__, cell.parts["cell"])


def a_partial(length):
    net, scale = linear(), normal(WIDTH)
    cell = functools.partial(lambda net, x, h, scale: same(torch.tanh(net(x) + h * scale)), net)
    return of(length, functools.partial(cell, scale=scale), net, more=[scale])


def integers_and_booleans(length):
    """A ring of rows: where it writes and whether it is full carry no gradient."""
    net, rows = linear(), 5

    def cell(x, s):
        value = torch.tanh(net(x) + s.rows.mean(1) * (1 + s.full.double()))
        index = (s.written % rows).view(1, 1, 1).expand(BATCH, 1, WIDTH)
        after = Memory(s.rows.scatter(1, index, value.unsqueeze(1)), s.written + 1, s.written >= 4)
        return {"y": value, "count": after.written}, after

    x, _ = usual(length)
    state = Memory(normal(BATCH, rows, WIDTH), torch.tensor(0), torch.tensor(False))
    return Case(cell, x, state, list(net.parameters()))


def nones_and_masks(length):
    """An episode that ends starts anew, as in reinforcement learning."""
    net = nn.LSTMCell(WIDTH, WIDTH, dtype=DOUBLE)

    def cell(x, s):
        value, ended, _ = x
        kept = [torch.where(ended.unsqueeze(-1), torch.zeros_like(t), t) for t in s["hc"]]
        h, c = net(value, tuple(kept))
        return [h, None, (ended, None)], {"hc": (h, c), "none": None}

    x, h = usual(length)
    ended = torch.rand(length, BATCH) < 0.2
    state = {"hc": (h, normal(BATCH, WIDTH)), "none": None}
    return Case(cell, (x, ended, None), state, list(net.parameters()))


def a_complex_state(length):
    decay, drive = normal(WIDTH), nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def cell(x, s):
        s = torch.polar(torch.sigmoid(decay), decay) * s + drive(x.to(s.dtype))
        return s.real.tanh(), s

    state = torch.randn(BATCH, WIDTH, dtype=torch.complex128).requires_grad_()
    return Case(cell, usual(length)[0], state, [decay, *drive.parameters()])


def dropout(length):
    net = nn.Sequential(linear(), nn.Dropout(0.4))
    return of(length, lambda x, h: same(torch.tanh(net(x) + functional.dropout(h, 0.2))), net)


def sampling(length):
    """A stochastic unit, its gradient passed straight through, and a latent by its own noise."""
    net = linear()

    def cell(x, h):
        p = torch.sigmoid(net(x) + h)
        bit = torch.bernoulli(p.detach())
        latent = torch.distributions.Normal(p, 0.1 + p).rsample()
        return (bit - p).detach() + p, torch.tanh(latent)

    return of(length, cell, net)


def a_generator_of_its_own(length):
    net, generator = linear(), torch.Generator().manual_seed(3)

    def cell(x, h):
        noise = torch.rand(BATCH, WIDTH, generator=generator, dtype=DOUBLE)
        return same(torch.tanh(net(x) + h) * noise)

    case = of(length, cell, net)
    case.reset = lambda: generator.manual_seed(3)
    return case


def other_generators(length):
    """Teacher forcing by a coin of Python's, noise by NumPy's."""
    net, own = linear(), np.random.default_rng(5)

    def cell(x, h):
        x = x if random.random() < 0.5 else h
        return same(torch.tanh(net(x) + h) * np.random.rand() + 0.1 * own.random())

    case = of(length, cell, net)
    begin = own.bit_generator.state
    case.reset = lambda: setattr(own.bit_generator, "state", begin)
    return case


def batch_normalization(length):
    net = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, dtype=DOUBLE))
    return of(length, lambda x, h: same(torch.tanh(net(x) + h)), net)


def captured_leaves(length):
    net, scale, shift = linear(), normal(WIDTH), normal(WIDTH)
    used = {"scale": [scale], "shift": shift}

    def cell(x, h):
        return same(torch.tanh(net(x) * used["scale"][0] + h + used["shift"]))

    return of(length, cell, net, more=[scale, shift])


def attention(length):
    """Over what an encoder gave: values, and keys computed from them, both captured."""
    source, key, query, net = normal(6, BATCH, WIDTH), linear(), linear(), linear(2 * WIDTH)
    values = torch.tanh(source)
    keys = key(values)

    def cell(x, h):
        weights = torch.softmax(torch.einsum("lbi,bi->bl", keys, query(h)), -1)
        read = torch.einsum("bl,lbi->bi", weights, values)
        return torch.cat([read, weights], -1), torch.tanh(net(torch.cat([x, read], -1)))

    return of(length, cell, key, query, net, more=[source])


class Tied(nn.Module):
    """The encoder and the cell share a layer, and the cell sees the whole model."""

    def __init__(self):
        super().__init__()
        self.shared, self.inner = linear(), linear()

    def encode(self, source):
        self.context = torch.tanh(self.shared(source))  # an attribute that is no parameter

    def forward(self, x, h):
        return same(torch.tanh(self.shared(x) + self.inner(h) + self.context.mean(0)))


def tied_to_its_context(length):
    model, source = Tied(), normal(6, BATCH, WIDTH)
    model.encode(source)
    return of(length, model, model, more=[source])


class Hyper(nn.Module):
    """Its weights are made from a code, once for all steps."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.randn(WIDTH, dtype=DOUBLE))
        self.weights = [torch.outer(self.code, self.code), self.code.exp()]

    def forward(self, x, h):
        return same(torch.tanh(x @ self.weights[0] + h * self.weights[1]))


def weights_that_a_network_made(length):
    model = Hyper()
    return of(length, model, model)


def its_own_inputs_captured(length):
    """It looks at all of its inputs at every step."""
    case = of(length, None)
    x = case.x.exp()
    case.cell = lambda x_t, h: same(torch.tanh(x_t * x.mean(0) + h))
    case.parameters, case.x = [case.x], x
    return case


def shared_parameters(length):
    """Two cells on the same weights, one of which is used twice."""
    first, second = (nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE) for _ in range(2))
    second.weight_hh = first.weight_hh

    def cell(x, s):
        a = first(x, s[0])
        b = second(first(a, s[1]), s[1])
        return b, (a, b)

    x, h = usual(length)
    parameters = list(nn.ModuleList([first, second]).parameters())
    return Case(cell, x, (h, normal(BATCH, WIDTH)), parameters)


def frozen_parameters(length):
    net = nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE)
    net.weight_hh.requires_grad_(False)
    net.bias_ih.requires_grad_(False)
    return of(length, lambda x, h: same(net(x, h)), net)


def frozen_but_its_state(length):
    net = linear().requires_grad_(False)
    case = of(length, lambda x, h: same(torch.tanh(net(x) + h)))
    case.x = case.x.detach()
    return case


class Spike(torch.autograd.Function):
    """A step forward, a smooth surrogate backward."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


def spiking(length):
    """Leaky integrate-and-fire with adaptation; the reset carries no gradient."""
    net, decay = linear(), normal(WIDTH)

    def cell(x, s):
        v, threshold = s
        v = torch.sigmoid(decay) * v + net(x)
        spike = Spike.apply(v - 0.1 * threshold)
        return spike, (v - (0.1 * spike).detach(), 0.9 * threshold + spike)

    x, v = usual(length)
    return Case(cell, x, (v, torch.ones(BATCH, WIDTH, dtype=DOUBLE)), [decay, *net.parameters()])


def token_inputs(length, sparse=False):
    table, net = nn.Embedding(7, WIDTH, dtype=DOUBLE, sparse=sparse), linear()
    x = torch.randint(7, (length, BATCH))
    parameters = [*table.parameters(), *net.parameters()]
    return Case(
        lambda x, h: same(torch.tanh(table(x) + net(h))), x, normal(BATCH, WIDTH), parameters
    )


def sparse_gradients(length):
    return token_inputs(length, sparse=True)


def writing_to_its_own(length):
    """In place, but to tensors that it made itself."""
    net = linear()

    def cell(x, rows):
        rows = rows.clone()
        rows[:, 1] = net(x).add_(rows[:, 0]).tanh_()
        return rows.sum(1).mul_(2), rows

    return Case(cell, usual(length)[0], normal(BATCH, 2, WIDTH), list(net.parameters()))


def pondering(length):
    """As many inner steps as its state asks for."""
    net = nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE)

    def cell(x, h):
        for _ in range(1 + int(3 * torch.sigmoid(h.detach().mean()))):
            h = net(x, h)
        return 2 * h, h

    return of(length, cell, net)


def a_recurrence_inside(length):
    net = nn.GRUCell(WIDTH, WIDTH, dtype=DOUBLE)

    def cell(x, h):
        inner = torch.stack([x, x + 1, x * 2])
        y, h = rg.unroll(lambda x, h: same(net(x, h)), inner, h, schedule=rg.plan(3, 2))
        return y.sum(0), h

    return of(min(length, 15), cell, net)  # each step is four


def no_state(length):
    net = linear()
    return Case(lambda x, s: (net(x).tanh(), s), usual(length)[0], (), list(net.parameters()))


def a_delay_line(length):
    """Its state is its input, and a constant is handed on as it is."""
    net, constant = linear(), normal(WIDTH)

    def cell(x, s):
        return torch.tanh(net(s[0]) * s[1]), (x, s[1])

    x, h = usual(length)
    return Case(cell, x, (h, constant), list(net.parameters()))


def views_of_one_tensor(length):
    net = linear(2 * WIDTH, 3 * WIDTH)

    def cell(x, h):
        z = torch.tanh(net(torch.cat([x, h], -1)))
        return (z[:, ::2], z[0]), z[:, :WIDTH]

    return of(length, cell, net)


def memory_alone(length):
    """It gives no output: all is in the state, which is one tensor twice."""
    net = linear()

    def cell(x, s):
        h = torch.tanh(net(x) + s[0] * s[1])
        return None, (h, h)

    x, h = usual(length)
    return Case(cell, x, (h, normal(BATCH, WIDTH)), list(net.parameters()))


KINDS = """
a_function an_object a_method a_partial integers_and_booleans nones_and_masks a_complex_state
dropout sampling a_generator_of_its_own other_generators batch_normalization captured_leaves
attention tied_to_its_context weights_that_a_network_made its_own_inputs_captured
shared_parameters frozen_parameters frozen_but_its_state spiking token_inputs sparse_gradients
writing_to_its_own pondering a_recurrence_inside no_state a_delay_line views_of_one_tensor
memory_alone
"""
CASES = {name.replace("_", " "): globals()[name] for name in KINDS.split()}
