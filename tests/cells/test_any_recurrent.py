"""``rg.Recurrent``: any cell over padded batches."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import retrograde as rg
from oracles.loops import assert_near, gradients, least, leaves_of

DOUBLE = torch.float64
KINDS = {"LSTM": (nn.LSTM, nn.LSTMCell), "GRU": (nn.GRU, nn.GRUCell), "RNN": (nn.RNN, nn.RNNCell)}
LENGTHS = [11, 4, 1, 9, 4]


class Light(nn.Module):
    """A cell of someone else's, that begins by itself and has a state of two parts."""

    def __init__(self, inputs, size):
        super().__init__()
        self.net = nn.Linear(inputs + size, 2 * size, dtype=DOUBLE)

    def forward(self, x, state):
        h, n = (x.new_zeros(len(x), self.net.out_features // 2), 0) if state is None else state
        z, c = self.net(torch.cat([x, h], -1)).chunk(2, -1)
        h = z.sigmoid() * h + (1 - z.sigmoid()) * c.relu()
        return h, (h, n + 1)


def networks(kind, **asked):
    """torch's module, and ours around a cell with the same weights."""
    torch.manual_seed(1)
    module, cell = KINDS[kind]
    theirs = module(3, 5, batch_first=asked.get("batch_first", False), dtype=DOUBLE)
    one = cell(3, 5, dtype=DOUBLE)
    one.load_state_dict({n: getattr(theirs, f"{n}_l0") for n in one.state_dict()})
    return theirs, rg.Recurrent(one, **asked)


ASKED = [{}, {"memory": "70%"}, {"schedule": rg.plan(11, 2)}]


def compared(theirs, ours, x, expected, found):
    (y, last), (z, after) = expected, found
    wanted = [x, *theirs.parameters()]
    after = [t.unsqueeze(0) for t in leaves_of(after)]
    last = leaves_of(last)
    assert_near([z, *after], [y, *last])
    mine = {id(p): p for p in ours.parameters()}.values()
    assert_near(gradients(z, after, [x, *mine]), gradients(y, last, wanted))


@pytest.mark.quick(4, every=6)
@pytest.mark.parametrize("asked", ASKED, ids=["none", "memory", "schedule"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_equal_lengths(kind, batch_first, asked):
    theirs, ours = networks(kind, batch_first=batch_first, **asked)
    x = torch.randn(*((5, 11) if batch_first else (11, 5)), 3, dtype=DOUBLE, requires_grad=True)
    compared(theirs, ours, x, theirs(x), ours(x))


@pytest.mark.quick(4)
@pytest.mark.parametrize("asked", ASKED, ids=["none", "memory", "schedule"])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_several_lengths(kind, begins, asked):
    theirs, ours = networks(kind, **asked)
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    h, c = (torch.randn(5, 5, dtype=DOUBLE) * begins for _ in range(2))
    state = (h, c) if kind == "LSTM" else h
    first = (h[None], c[None]) if kind == "LSTM" else h[None]
    sequences = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    y, last = theirs(sequences, first)
    expected = pad_packed_sequence(y)[0], last
    found = ours(x, state if begins else None, torch.tensor(LENGTHS))
    compared(theirs, ours, x, expected, found)


def test_what_lies_behind_an_end_is_not_read():
    _, net = networks("GRU", memory="60%")
    x = torch.randn(11, 5, 3, dtype=DOUBLE)
    poisoned = x.clone()
    for k, length in enumerate(LENGTHS):
        poisoned[length:, k] = torch.nan
    found = []
    for given in (x, poisoned.requires_grad_()):
        y, last = net(given, lengths=LENGTHS)
        found.append([y, last, *gradients(y, last, [*net.parameters()])])
    assert_near(*found)
    (g,) = torch.autograd.grad(net(poisoned, lengths=LENGTHS)[0].sum(), poisoned)
    assert all(not g[length:, k].any() for k, length in enumerate(LENGTHS))


def test_a_cell_of_someone_elses():
    torch.manual_seed(1)
    cell = Light(3, 5)
    net = rg.Recurrent(cell)
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    wanted, outputs = [x, *net.parameters()], []
    for k, length in enumerate(LENGTHS):  # each sample by itself
        rows, state = [], None
        for t in range(length):
            y, state = cell(x[t, k : k + 1], state)
            rows.append(y[0])
        outputs.append(torch.stack([*rows, *[x.new_zeros(5)] * (11 - length)]))
    expected = torch.stack(outputs, 1)
    for memory in (None, "60%", "100%"):
        net.memory = memory
        y, _ = net(x, lengths=torch.tensor(LENGTHS))
        assert_near(
            [y, *gradients(y, None, wanted)], [expected, *gradients(expected, None, wanted)]
        )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_the_budget_is_kept(lengths):
    _, net = networks("GRU")
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    wanted = [x, *net.parameters()]

    def call():
        y, last = net(x, lengths=lengths)
        found = gradients(y, last, wanted)
        return [t.detach() for t in leaves_of((y, last))], found

    def within(memory):
        net.memory = memory
        return call()

    smallest = least(within)
    for memory in (smallest, smallest + 2000, 2 * smallest):
        within(memory)
        own = sum(t.nbytes for t in leaves_of(call()[0]))  # the seeds are the test's
        assert rg.measure(call).working_bytes <= memory + own
        found = net.fit(x, lengths=lengths)
        assert found.peak_bytes <= memory
        assert found.minimum_bytes == smallest


def test_without_gradients_and_with_names():
    _, net = networks("GRU", memory="50%")
    x = torch.randn(11, 5, 3, dtype=DOUBLE)
    with torch.no_grad():
        quiet = net(x, lengths=LENGTHS)[0]
    assert_near([quiet], [net(x, lengths=LENGTHS)[0]])
    assert {name.split(".")[0] for name in net.state_dict()} == {"cell"}
    assert "memory='50%'" in repr(net)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda net, x: net(x, lengths=[11, 4]),
            r"lengths=\[11, 4\]: expected an integer from 1 to 11",
        ),
        (lambda net, x: net(x, lengths=[11, 4, 0, 1, 1]), "expected an integer from 1 to 11"),
        (lambda net, x: net(x, lengths=[11.0] * 5), "expected an integer from 1 to 11"),
        (lambda net, x: net(pack_padded_sequence(x, [11] * 5)), "the input is packed: expected"),
        (lambda net, x: rg.Recurrent(lambda x, h: (x, h)), "expected a module"),
        (lambda net, x: rg.Recurrent(nn.GRUCell(3, 5)).fit(x), "no budget to fit"),
    ],
)
def test_what_is_refused(call, says):
    _, net = networks("GRU")
    with pytest.raises(rg.CellError, match=says):
        call(net, torch.randn(11, 5, 3, dtype=DOUBLE))
