"""``rg.Recurrent``: any cell over padded and packed batches, in one direction or two."""

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


def networks(kind, both, **asked):
    """torch's module, and ours around cells with the same weights."""
    torch.manual_seed(1)
    module, cell = KINDS[kind]
    theirs = module(
        3, 5, bidirectional=both, batch_first=asked.get("batch_first", False), dtype=DOUBLE
    )
    cells = [cell(3, 5, dtype=DOUBLE) for _ in range(1 + both)]
    for one, end in zip(cells, ("", "_reverse"), strict=False):
        one.load_state_dict({n: getattr(theirs, f"{n}_l0{end}") for n in one.state_dict()})
    return theirs, rg.Recurrent(*cells, **asked)


def states_of(last, kind, both):
    """Our last state, as torch has it."""
    parts = last if both else [last]
    parts = [p if kind == "LSTM" else (p,) for p in parts]
    return [torch.stack(one) for one in zip(*parts, strict=True)]


ASKED = [{}, {"memory": "70%"}, {"schedule": rg.plan(11, 2)}]


def compared(theirs, ours, x, expected, found, both):
    (y, last), (z, after) = expected, found
    wanted = [x, *theirs.parameters()]
    kind = type(theirs).__name__
    after = states_of(after, kind, both)
    last = list(last) if kind == "LSTM" else [last]
    assert_near([z, *after], [y, *last])
    mine = {id(p): p for p in ours.parameters()}.values()
    assert_near(gradients(z, after, [x, *mine]), gradients(y, last, wanted))


@pytest.mark.quick(4)
@pytest.mark.parametrize("asked", ASKED, ids=["none", "memory", "schedule"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_equal_lengths(kind, both, batch_first, asked):
    theirs, ours = networks(kind, both, batch_first=batch_first, **asked)
    x = torch.randn(*((5, 11) if batch_first else (11, 5)), 3, dtype=DOUBLE, requires_grad=True)
    compared(theirs, ours, x, theirs(x), ours(x), both)


@pytest.mark.quick(4)
@pytest.mark.parametrize("asked", ASKED, ids=["none", "memory", "schedule"])
@pytest.mark.parametrize("packed", ["padded", "sorted", "unsorted"])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_several_lengths(kind, both, packed, asked):
    theirs, ours = networks(kind, both, **asked)
    lengths = sorted(LENGTHS, reverse=True) if packed == "sorted" else LENGTHS
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    sequences = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=packed == "sorted")
    y, last = theirs(sequences)
    expected = pad_packed_sequence(y)[0], last
    if packed == "padded":
        found = ours(x, lengths=torch.tensor(lengths))
    else:
        z, after = ours(sequences)
        assert z.batch_sizes.tolist() == y.batch_sizes.tolist()
        found = pad_packed_sequence(z)[0], after
    compared(theirs, ours, x, expected, found, both)


@pytest.mark.parametrize("both", [False, True])
def test_a_given_state_and_the_order_of_samples(both):
    theirs, ours = networks("LSTM", both, memory="70%")
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    h, c = (torch.randn(1 + both, 5, 5, dtype=DOUBLE) for _ in range(2))
    sequences = pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False)
    y, last = theirs(sequences, (h, c))
    state = [*zip(h, c, strict=True)]
    z, after = ours(sequences, state if both else state[0])
    expected = pad_packed_sequence(y)[0], last
    compared(theirs, ours, x, expected, (pad_packed_sequence(z)[0], after), both)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_a_cell_of_someone_elses(both, packed):
    torch.manual_seed(1)
    cells = [Light(3, 5) for _ in range(1 + both)]
    net = rg.Recurrent(*cells)
    x = torch.randn(11, 5, 3, dtype=DOUBLE, requires_grad=True)
    wanted = [x, *net.parameters()]
    outputs = [[], []]
    for k, length in enumerate(LENGTHS):  # each sample by itself
        for cell, one, steps in zip(
            cells, outputs, (range(length), range(length)[::-1]), strict=False
        ):
            ys, state = {}, None
            for t in steps:
                ys[t], state = cell(x[t, k : k + 1], state)
            rows = [ys.get(t, x.new_zeros(1, 5))[0] for t in range(11)]
            one.append(torch.stack(rows))
    expected = torch.cat([torch.stack(one, 1) for one in outputs if one], -1)
    for memory in (None, "60%", "100%"):
        net.memory = memory
        lengths = torch.tensor(LENGTHS)
        if packed:
            y, _ = net(pack_padded_sequence(x, lengths, enforce_sorted=False))
            y = pad_packed_sequence(y)[0]
        else:
            y, _ = net(x, lengths=lengths)
        assert_near(
            [y, *gradients(y, None, wanted)], [expected, *gradients(expected, None, wanted)]
        )


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("both", [False, True])
def test_the_budget_is_kept(both, lengths):
    _, net = networks("GRU", both)
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
    _, net = networks("GRU", True, memory="50%")
    x = torch.randn(11, 5, 3, dtype=DOUBLE)
    with torch.no_grad():
        quiet = net(x, lengths=LENGTHS)[0]
    assert_near([quiet], [net(x, lengths=LENGTHS)[0]])
    assert {name.split(".")[0] for name in net.state_dict()} == {"cell", "reverse"}
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
        (lambda net, x: net(x, x[0]), "expected a pair, one for each direction"),
        (lambda net, x: rg.Recurrent(lambda x, h: (x, h)), "expected a module"),
        (
            lambda net, x: rg.Recurrent(nn.GRUCell(3, 5), nn.GRUCell(3, 4))(x.float()),
            "equal shapes",
        ),
        (lambda net, x: rg.Recurrent(nn.GRUCell(3, 5)).fit(x), "no budget to fit"),
    ],
)
def test_what_is_refused(call, says):
    _, net = networks("GRU", True)
    with pytest.raises(rg.CellError, match=says):
        call(net, torch.randn(11, 5, 3, dtype=DOUBLE))
