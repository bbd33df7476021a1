"""Calls that people get wrong, and what they are told."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import retrograde as rg

SIZE = 8
X = torch.randn(40, 3, SIZE)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(SIZE, SIZE), nn.Linear(SIZE, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


CALLS = {
    "a layer as a cell": (
        lambda: rg.unroll(nn.LSTM(SIZE, SIZE), X),
        r"got a LSTM, which runs all steps .* use rg\.LSTM\(…, memory=\), or torch\.nn\.LSTMCell",
    ),
    "a layer's fit as a cell": (
        lambda: rg.bptt(Model(), X, loss=lambda t, y: y.sum()),
        r"this Model does not take an input and a state: .*rg\.budget\(model, memory, sample\)",
    ),
    "a model's fit": (
        lambda: rg.fit(Model(), X, memory="50%"),
        r"this Model does not take an input and a state: .*rg\.budget\(model, memory, sample\)",
    ),
    "memory and sample exchanged": (
        lambda: rg.budget(Model(), X, "30%"),
        r"^cannot read the memory <class 'torch\.Tensor'>: expected bytes .{1,70}$",
    ),
    "a unit without bytes": (lambda: rg.LSTM(SIZE, SIZE, memory="64M"), "did you mean '64MiB'"),
    "an unknown unit": (lambda: rg.LSTM(SIZE, SIZE, memory="64 apples"), "'apples' .*: use one of"),
    "percent forgotten": (
        lambda: rg.LSTM(SIZE, SIZE, memory=5)(X),
        r"is 5 bytes \(5 B; did you mean '5%' or '5MiB'\?\)",
    ),
    "percent forgotten, of a model": (
        lambda: rg.budget(Model(), "5", X),
        r"is 5 bytes \(5 B; did you mean '5%' or '5MiB'\?\)",
    ),
    "an array": (lambda: rg.unroll(nn.GRUCell(SIZE, SIZE), X.numpy()), r"torch\.from_numpy"),
    "numbers of steps": (
        lambda: rg.unroll(lambda x, s: (s, s), range(9), X[0]),
        r"got a range in the inputs: .* torch\.arange\(T\)",
    ),
    "a shape as a sample": (
        lambda: rg.budget(Model(), "30%", (40, 3, SIZE)),
        r"the sample \(40, 3, 8\) is a shape: .* give torch\.randn\(40, 3, 8\)",
    ),
    "half of a state": (
        lambda: rg.unroll(nn.LSTMCell(SIZE, SIZE), X, X[0], memory="50%"),
        r"the state is a Tensor: expected the pair \(h, c\)",
    ),
    "a pair for a tensor": (
        lambda: rg.unroll(nn.GRUCell(SIZE, SIZE), X, (X[0], X[0])),
        r"the state is a tuple: expected a tensor",
    ),
    **{
        f"a memory of {type(module).__name__} that is set": (
            lambda module=module: setattr(module, "memory", "lots"),
            "cannot read the memory 'lots'",
        )
        for module in (rg.LSTM(2, 2), rg.Sequential(nn.ReLU()), rg.Recurrent(nn.GRUCell(2, 2)))
    },
    "TorchScript": (
        lambda: torch.jit.script(nn.Sequential(rg.LSTM(SIZE, SIZE, memory="5%"))),
        r"TorchScript cannot run this LSTM: .* torch\.jit\.trace",
    ),
    "no inputs": (lambda: rg.unroll(lambda x, s: (s, s), None, X[0]), r"torch\.arange\(T\)"),
}


@pytest.mark.quick(99)
@pytest.mark.parametrize(("call", "told"), CALLS.values(), ids=CALLS)
def test_a_wrong_call_is_told_what_to_do(call, told):
    with pytest.raises(rg.RetrogradeError, match=told):
        call()


@pytest.mark.parametrize(
    ("sample", "told"), [((X, 3, SIZE), "a tuple, as its arguments"), ([X], "a list, as its one")]
)
def test_an_error_of_the_model_tells_how_the_sample_was_given(sample, told):
    with pytest.raises((TypeError, AttributeError)) as caught:
        rg.budget(Model(), "50%", sample)
    assert any(told in note for note in caught.value.__notes__)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_the_cells_of_torch_are_cells_everywhere(cell):
    cell = cell(SIZE, SIZE)
    y, _ = rg.Recurrent(cell, memory="50%")(X)
    again, _ = rg.unroll(cell, X, memory="50%")
    total, _ = rg.bptt(cell, X, loss=lambda t, y: y.sum(), memory="50%")
    assert torch.equal(y, again)
    torch.testing.assert_close(total.float(), y.sum())
    assert rg.fit(cell, X, memory="50%").schedule.length == len(X)


def test_a_budget_may_be_any_whole_number():
    assert rg.LSTM(SIZE, SIZE, memory=torch.tensor(9999)).fit(X).budget_bytes == 9999


def test_a_share_may_be_a_number_of_numpy():
    assert (
        rg.LSTM(SIZE, SIZE, memory=np.float32(0.1)).fit(X).budget_bytes
        == rg.fit(nn.LSTM(SIZE, SIZE), X, memory="10%").budget_bytes
    )


@pytest.mark.parametrize(
    "module",
    [nn.GRU(SIZE, SIZE), nn.GRUCell(SIZE, SIZE), nn.Sequential(*(nn.Linear(SIZE, SIZE),) * 4)],
)
def test_a_fit_needs_a_shape_only(module):
    found = rg.fit(module, tuple(X.shape), memory="100%")
    assert found.ordinary_bytes == rg.fit(module, X, memory="100%").ordinary_bytes


def test_a_budget_is_taken_off():
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    blocks = nn.ModuleList(nn.TransformerEncoderLayer(SIZE, 2, 64, dropout=0) for _ in range(4))

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    for net in (model, Rows()):
        net(X).sum().backward()  # makes the gradients of the weights
        before = rg.measure(lambda net=net: net(X).sum().backward()).working_bytes
        rg.budget(net, "50%", X)
        within = rg.measure(lambda net=net: net(X).sum().backward()).working_bytes
        assert rg.budget(net, None) is None
        after = rg.measure(lambda net=net: net(X).sum().backward()).working_bytes
        assert within < before == after
    assert torch.equal(model(X), plain(X))


def test_the_front_has_the_public_names_alone():
    assert {*dir(rg)} == {*rg.__all__, "scan", "__version__"}
    for kind in (rg.LSTM, rg.GRU, rg.RNN):
        assert all(name in kind.__doc__ for name in ("memory:", "backward:", "reset="))


@pytest.mark.quick(99)
def test_the_first_lines_of_the_readme_run():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert "```diff" in text.splitlines()[:15]
    block = re.search("```diff\n(.*?)```", text, re.DOTALL)[1]
    lines = [line[2:] for line in block.splitlines() if line[:1] == "+"]
    batch = torch.randn(20, 2, SIZE)
    layer = nn.TransformerEncoderLayer(SIZE, 2, 64)
    names = {"rg": rg, "batch": batch}
    names["model"] = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
    for line in lines:
        exec(line, names)
    assert names["lstm"].memory == "5%"
    names["model"](batch).sum().backward()


def test_a_cell_derived_from_torchs_is_a_cell_as_it_is():
    class Own(nn.GRUCell):
        def forward(self, x, h):
            h = super().forward(x, h)
            return 2 * h, h

    replaced = nn.GRUCell(SIZE, SIZE)
    replaced.forward = Own(SIZE, SIZE).forward
    for cell in (Own(SIZE, SIZE), replaced):
        y, last = rg.unroll(cell, X, torch.zeros(3, SIZE), memory="50%")
        assert torch.equal(y[-1], 2 * last)
