"""Second derivatives are torch's, whatever the budget, the options and what the inputs are."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import retrograde as rg

DOUBLE = torch.float64
BEYOND = "the budget does not cover these"
KINDS = ["RNN", "GRU", "LSTM"]
OPTIONS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "two directions": {"num_layers": 2, "bidirectional": True},
    "no biases": {"bias": False},
    "batch first": {"batch_first": True},
    "projected": {"proj_size": 3},
}
ASKED = [{"memory": "100%"}, {"memory": "85%"}, {"backward": "scan"}]


@pytest.fixture
def beyond_is_known():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f".*{BEYOND}")
        yield


def twice(call, x, parameters):
    """First and second derivatives; the inputs depend on a parameter, and on the leaf x."""
    leaf = x.clone().requires_grad_()
    y = call(leaf.tanh() * parameters[0].sum())
    wanted = [leaf, *parameters]
    first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
    return [*first, *second]


def compare(theirs, ours, call, x):
    found = twice(lambda x: call(ours, x), x, list(ours.parameters()))
    expected = twice(lambda x: call(theirs, x), x, list(theirs.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def of_all(net, x):
    return net(x)[0]


def of_packed(net, x):
    return net(pack_padded_sequence(x, [40, 31, 7]))[0].data


@pytest.mark.usefixtures("beyond_is_known")
@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [of_all, of_packed])
def test_second_derivatives_are_torchs(kind, options, asked, call):
    options = OPTIONS[options]
    if "proj_size" in options and (kind != "LSTM" or "backward" in asked):
        pytest.skip("no projections there")
    if options.get("batch_first") and call is of_packed:
        pytest.skip("a packed batch has no order of dimensions")
    theirs = getattr(nn, kind)(3, 5, dtype=DOUBLE, **options)
    ours = getattr(rg, kind)(3, 5, dtype=DOUBLE, **options, **asked)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, 3, 3, dtype=DOUBLE)
    compare(theirs, ours, call, x.transpose(0, 1) if options.get("batch_first") else x)


@pytest.mark.usefixtures("beyond_is_known")
@pytest.mark.parametrize("kind", KINDS)
def test_in_single_precision(kind):
    torch.manual_seed(0)
    theirs, ours = getattr(nn, kind)(3, 5), getattr(rg, kind)(3, 5, memory="70%")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(40, 3, 3)
    found, expected = (twice(net.__call__, x, [*net.parameters()]) for net in (
        nn.Sequential(theirs, _First()), nn.Sequential(ours, _First())))  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class _First(nn.Module):
    def forward(self, pair):
        return pair[0]


@pytest.mark.usefixtures("beyond_is_known")
@pytest.mark.parametrize("asked", [*ASKED[1:], {"memory": "70%", "bidirectional": True}], ids=str)
def test_dropout_drops_the_same_units_again(asked):
    net = rg.LSTM(3, 4, 2, dropout=0.4, dtype=DOUBLE, **asked)
    x = torch.randn(20, 3, 3, dtype=DOUBLE, requires_grad=True)

    def call(x):
        torch.manual_seed(3)
        return net(x)[0]

    once = torch.autograd.grad(call(x).sum(), x)
    again = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    torch.testing.assert_close(again, once)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


class Cell(nn.Module):
    """A cell of one's own, which uses a tensor from outside too."""

    def __init__(self, context=None):
        super().__init__()
        self.net, self.context = nn.GRUCell(3, 5, dtype=DOUBLE), context

    def forward(self, x, h):
        h = self.net(x, h)
        if self.context is not None:
            h = h * self.context
        return h, h


def unrolled(cell, x, memory):
    h = torch.zeros(3, 5, dtype=DOUBLE)
    return rg.unroll(cell, x, h, memory=memory)[0]


@pytest.mark.usefixtures("beyond_is_known")
def test_any_cell():
    cell, x = Cell(), torch.randn(9, 3, 3, dtype=DOUBLE)
    found = twice(lambda x: unrolled(cell, x, "70%"), x, list(cell.parameters()))
    expected = twice(lambda x: unrolled(cell, x, None), x, list(cell.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("beyond_is_known")
def test_a_cell_whose_captured_tensor_was_computed_from_its_parameter_is_refused():
    cell = Cell()
    cell.context = cell.net.bias_hh.sum().tanh()
    y = unrolled(cell, torch.randn(9, 3, 3, dtype=DOUBLE), "70%")
    with pytest.raises(rg.RetrogradeError, match=r"cannot itself be differentiated.*create_graph"):
        torch.autograd.grad(y.sum(), list(cell.parameters()), create_graph=True)


def test_what_goes_beyond_a_budget_says_so_and_the_rest_does_not():
    x = torch.randn(40, 3, 3, requires_grad=True)
    with pytest.warns(UserWarning, match=BEYOND):
        torch.autograd.grad(rg.GRU(3, 5, memory="70%")(x)[0].sum(), x, create_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = rg.GRU(3, 5, backward="scan")(x)
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.usefixtures("beyond_is_known")
def test_weights_that_changed_in_between_are_refused():
    net, x = rg.GRU(3, 5, memory="70%"), torch.randn(40, 3, 3, requires_grad=True)
    y, _ = net(x)
    with torch.no_grad():
        net.weight_hh_l0.zero_()
    with pytest.raises(rg.RetrogradeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), net.parameters(), create_graph=True)
