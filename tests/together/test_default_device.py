"""Under another default device all computes as before, where the given tensors are."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import retrograde as rg

LENGTH, BATCH, SIZE = 60, 2, 8


def step_of(cell):
    def step(x, h):
        h = cell(x, h)
        return h, h

    return step


def summed(found):
    leaves = found if isinstance(found, torch.Tensor) else found[0]
    leaves.sum().backward()


def recurrent(kind, **asked):
    def make():
        rnn = kind(SIZE, SIZE, device="cpu", **asked)
        return rnn, lambda x: summed(rnn(x))

    return make


def packed():
    rnn = rg.GRU(SIZE, SIZE, memory="50%", device="cpu")
    lengths = torch.tensor([LENGTH, LENGTH // 2], device="cpu")
    pack = nn.utils.rnn.pack_padded_sequence
    return rnn, lambda x: rnn(pack(x, lengths))[0].data.sum().backward()


def unrolled(**asked):
    def make():
        cell = nn.GRUCell(SIZE, SIZE, device="cpu")
        state = torch.zeros(BATCH, SIZE, device="cpu")
        return cell, lambda x: summed(rg.unroll(step_of(cell), x, state, **asked))

    return make


def counting():
    """A cell whose state holds a number."""
    cell = nn.GRUCell(SIZE, SIZE, device="cpu")

    def step(x, state):
        h, count = state
        h = cell(x, h) / (1 + count / 100)
        return h, (h, count + 1)

    state = torch.zeros(BATCH, SIZE, device="cpu"), 0
    return cell, lambda x: summed(rg.unroll(step, x, state, memory="70%"))


def around():
    net = rg.Recurrent(nn.GRUCell(SIZE, SIZE, device="cpu"), memory="50%")
    lengths = torch.tensor([LENGTH, LENGTH // 2], device="cpu")
    state = torch.zeros(BATCH, SIZE, device="cpu")
    return net, lambda x: summed(net(x, state, lengths=lengths))


def streamed():
    rnn = nn.LSTM(SIZE, SIZE, device="cpu")
    read = lambda t: torch.ones(BATCH, SIZE, device="cpu") * t / LENGTH  # noqa: E731
    asked = {"memory": "30%", "length": LENGTH}
    return rnn, lambda x: rg.bptt(rnn, read, loss=lambda t, y: y.square().sum(), **asked)


def layers():
    return [nn.Sequential(nn.Linear(SIZE, SIZE, device="cpu"), nn.Tanh()) for _ in range(12)]


def chain(**asked):
    def make():
        net = rg.Sequential(*layers(), **asked)
        return net, lambda x: summed(net(x.flatten(0, 1)))

    return make


def budgeted():
    net = nn.Sequential(*layers())
    rg.budget(net, memory="70%", sample=torch.ones(BATCH * LENGTH, SIZE, device="cpu"))
    return net, lambda x: summed(net(x.flatten(0, 1)))


WAYS = {
    "LSTM": recurrent(rg.LSTM, memory="30%"),
    "GRU, both directions": recurrent(rg.GRU, memory="60%", bidirectional=True, num_layers=2),
    "GRU, swept": recurrent(rg.GRU, memory="30%"),
    "RNN, scanned": recurrent(rg.RNN, backward="scan"),
    "packed": packed,
    "unroll": unrolled(memory="50%"),
    "unroll, a number in the state": counting,
    "Recurrent": around,
    "bptt": streamed,
    "Sequential": chain(memory="70%"),
    "Sequential, scanned": chain(backward="scan"),
    "budget": budgeted,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_the_same(name):
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        x = torch.randn(LENGTH, BATCH, SIZE, device="cpu", requires_grad=name != "bptt")
        torch.set_default_device(device)
        try:
            module, run = WAYS[name]()
            run(x)
        finally:
            torch.set_default_device(None)
        found.append([*(p.grad for p in module.parameters()), x.grad])
    for usual, other in zip(*found, strict=True):
        assert (usual is None and other is None) or torch.equal(usual, other)


def test_fit_and_measure_count_the_same():
    cell = nn.GRUCell(SIZE, SIZE)
    x, state = torch.randn(LENGTH, BATCH, SIZE), torch.zeros(BATCH, SIZE)
    asked = step_of(cell), x, state
    usual = rg.fit(*asked, memory="50%"), rg.measure(lambda: x.exp().sum()).peak_bytes
    with torch.device("meta"):
        other = rg.fit(*asked, memory="50%"), rg.measure(lambda: x.exp().sum()).peak_bytes
    assert usual[0].peak_bytes == other[0].peak_bytes
    assert usual[1] == other[1]


FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "eye", "rand", "randn", "randint"),
    *("randperm", "linspace", "scalar_tensor", "empty_strided", "tril_indices", "triu_indices"),
}


def test_every_tensor_that_the_library_makes_names_its_device():
    unnamed = []
    for path in Path(rg.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("torch"), name), keywords=told):
                    named = any(k.arg in ("device", None) for k in told)
                    if name in FACTORIES and not named:
                        unnamed.append(f"{path.name}:{node.lineno}")
    assert not unnamed
