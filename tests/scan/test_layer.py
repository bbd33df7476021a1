"""One layer in one direction: what it returns, keeps, and gives every tensor as its gradient."""

import pytest
import torch

from oracles.networks import CELLS, assert_close, relative_error, seeds_for
from retrograde.errors import RetrogradeError
from retrograde.kernels.cells import Weights
from retrograde.scan.block_lengths import scan_way, sequential_way, step_numbers
from retrograde.scan.layer import Way, backpropagate, run, run_and_keep
from retrograde.scan.layer_node import layer

EVERY_CELL = pytest.mark.parametrize("kind", CELLS)
NAMES = ["x", "weight_ih", "weight_hh", "bias_ih", "bias_hh", "h", "c"]
WAYS = {
    "blocks of one": Way("sequential", 1),
    "blocks of 7": Way("sequential", 7),
    "one block": Way("sequential", 10**6),
    "scan": Way("scan", 10**6, 4),
    "scan in blocks": Way("scan", 12, 4),
    "scan by single steps": Way("scan", 9, 1),
}


def problem(kind, length=33, samples=3, size=7, dtype=torch.float64, bias=True):
    """torch's module, inputs, and the initial state (B, H) of each part."""
    torch.manual_seed(0)
    type_, _, options = CELLS[kind]
    net = type_(4, size, bias=bias, dtype=dtype, **options)
    x = torch.randn(length, samples, 4, dtype=dtype, requires_grad=True)
    parts = 2 if kind == "LSTM" else 1
    state = tuple(torch.randn(samples, size, dtype=dtype).requires_grad_() for _ in range(parts))
    return net, x, state


def by_torch(net, x, state):
    hx = tuple(s.unsqueeze(0) for s in state)
    y, final = net(x, hx if len(hx) == 2 else hx[0])
    return [y, *(s.squeeze(0) for s in (final if isinstance(final, tuple) else (final,)))]


def by_layer(kind, way, net, x, state, sizes=None):
    y, final = layer(kind, list(net.parameters()), way, x, state, sizes)
    return [y, *final]


def gradients(net, x, state, outputs, seeds):
    wanted = [x, *net.parameters(), *state]
    names = [NAMES[0], *NAMES[1 : len(wanted) - len(state)], *NAMES[5:]]
    found = torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)
    return dict(zip(names, found, strict=False))


def gradients_both(kind, way, length=33, **options):
    net, x, state = problem(kind, length, **options)
    theirs, ours = by_torch(net, x, state), by_layer(kind, way, net, x, state)
    seeds = seeds_for(theirs)
    return gradients(net, x, state, ours, seeds), gradients(net, x, state, theirs, seeds)


@EVERY_CELL
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [1, 2, 33, 36])
def test_every_way_gives_autograds_gradients(kind, way, length):
    ours, theirs = gradients_both(kind, WAYS[way], length)
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@pytest.mark.parametrize("way", ["blocks of 7", "scan in blocks"])
def test_without_biases_and_in_single_precision(kind, way):
    for options, tolerance in [({"bias": False}, 1e-10), ({"dtype": torch.float32}, 2e-6)]:
        ours, theirs = gradients_both(kind, WAYS[way], **options)
        assert_close(ours, theirs, tolerance)


@EVERY_CELL
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_are_torchs(kind, way, dtype):
    net, x, state = problem(kind, dtype=dtype)
    theirs, ours = by_torch(net, x, state), by_layer(kind, WAYS[way], net, x, state)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) <= 16 * torch.finfo(dtype).eps


@EVERY_CELL
@pytest.mark.parametrize("way", ["blocks of 7", "scan in blocks"])
def test_gradients_may_lie_in_memory_in_any_way(kind, way):
    net, x, state = problem(kind)
    theirs, ours = by_torch(net, x, state), by_layer(kind, WAYS[way], net, x, state)
    y = theirs[0]
    others = seeds_for(theirs[1:])
    for dy in (
        torch.randn(3, 33, 7, dtype=y.dtype).transpose(0, 1),
        torch.randn(7, 33, 3, dtype=y.dtype).permute(1, 2, 0),
        torch.randn(66, 3, 14, dtype=y.dtype)[::2, :, 1::2],
        torch.ones((), dtype=y.dtype).expand_as(y),
        torch.randn(7, dtype=y.dtype).expand_as(y),
    ):
        assert not dy.is_contiguous()
        kept = dy.clone()
        found = [
            torch.autograd.grad(outputs, [x, *net.parameters(), *state], [dy, *others], True)
            for outputs in (ours, theirs)
        ]
        for a, b in zip(*found, strict=True):
            assert relative_error(a, b) <= 1e-10
        assert torch.equal(dy, kept)


@EVERY_CELL
@pytest.mark.parametrize("way", ["blocks of 7", "scan in blocks"])
def test_inputs_and_states_may_lie_in_memory_in_any_way(kind, way):
    net, *_ = problem(kind)
    x = torch.randn(4, 3, 33, dtype=torch.float64).permute(2, 1, 0).requires_grad_()
    parts = 2 if kind == "LSTM" else 1
    state = tuple(torch.randn(7, 3, dtype=torch.float64).t().requires_grad_() for _ in range(parts))
    theirs, ours = by_torch(net, x, state), by_layer(kind, WAYS[way], net, x, state)
    seeds = seeds_for(theirs)
    found, expected = (gradients(net, x, state, outputs, seeds) for outputs in (ours, theirs))
    assert_close(found, expected, 1e-10)


@EVERY_CELL
@pytest.mark.parametrize("way", ["blocks of 7", "scan in blocks"])
@pytest.mark.parametrize("lengths", [[33, 20, 20, 1], [5, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1]])
def test_sequences_of_several_lengths(kind, way, lengths):
    net, x, state = problem(kind, max(lengths), len(lengths))
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths))
    hx = tuple(s.unsqueeze(0) for s in state)
    data, final = net(packed, hx if kind == "LSTM" else hx[0])
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(data)
    theirs = [y, *(s.squeeze(0) for s in (final if kind == "LSTM" else (final,)))]
    ours = by_layer(kind, WAYS[way], net, x, state, packed.batch_sizes)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) <= 1e-15
    seeds = seeds_for(theirs)
    for t, row in zip(lengths, seeds[0].unbind(1), strict=True):
        row[t:] = 0  # an output past a sequence's end is a constant
    found, expected = (gradients(net, x, state, outputs, seeds) for outputs in (ours, theirs))
    assert_close(found, expected, 1e-10)


@EVERY_CELL
def test_the_tape_holds_what_it_says(kind):
    net, x, state = problem(kind)
    weights = Weights(kind, *net.parameters())
    outputs, _, tape = run_and_keep(weights, Way("sequential", 10), x, state)
    assert tape.outputs is outputs
    assert tape.valid(0, 9) is None
    assert tape.marks is None
    if kind == "LSTM":
        assert tape.kept.gates.shape == (len(x), 3, 28)
        assert torch.equal(tape.kept.cells[0], state[1])
    else:
        assert tape.kept is None


def test_an_lstm_whose_gates_are_not_left_keeps_c_at_the_start_of_every_block():
    net, x, state = problem("LSTM")
    weights, sizes = Weights("LSTM", *net.parameters()), torch.full((len(x),), 3)
    _, _, tape = run_and_keep(weights, Way("sequential", 10), x, state, sizes)
    assert tape.kept is None
    c = torch.stack([state[1], *(run(weights, x[:stop], state)[1][1] for stop in (10, 20, 30))])
    assert relative_error(tape.marks, c) <= 1e-15


@EVERY_CELL
def test_a_range_of_steps_goes_on_where_the_last_ended(kind):
    net, x, state = problem(kind)
    weights = Weights(kind, *net.parameters())
    whole, last = run(weights, x, state)
    first, between = run(weights, x[:20], state)
    second, end = run(weights, x[20:], between)
    assert relative_error(torch.cat([first, second]), whole) <= 1e-15
    assert all(relative_error(a, b) <= 1e-15 for a, b in zip(end, last, strict=True))
    assert not whole.requires_grad


def test_gradients_that_are_not_asked_for_are_not_computed():
    net, x, state = problem("GRU")
    weights = Weights("GRU", *(p.detach() for p in net.parameters()))
    _, after, tape = run_and_keep(weights, Way("sequential", 7), x, state)
    seeds = tuple(map(torch.ones_like, after))
    found = backpropagate(weights, tape, x, state, None, seeds, needs_x=False)
    assert found.x is None
    assert set(found.weights) == {"inputs", "hidden", "bias_inputs", "bias_hidden"}


@EVERY_CELL
@pytest.mark.parametrize("way", ["blocks of 7", "scan in blocks"])
def test_half_precision_is_summed_in_single(kind, way):
    net, x, state = problem(kind, dtype=torch.bfloat16)
    ours = by_layer(kind, WAYS[way], net, x, state)
    seeds = seeds_for(ours)
    found = gradients(net, x, state, ours, seeds)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    single = net.float()
    x, *state = (t.detach().float().requires_grad_() for t in (x, *state))
    theirs = by_torch(single, x, tuple(state))
    expected = gradients(single, x, tuple(state), theirs, [s.float() for s in seeds])
    assert_close(found, expected, 0.05)


def test_no_second_derivative():
    net, x, state = problem("GRU")
    outputs = by_layer("GRU", WAYS["scan"], net, x, state)
    with pytest.raises(RetrogradeError, match=r"create_graph=False; .* use backward=None"):
        torch.autograd.grad(outputs[0].sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("length", [1, 2, 63, 5000])
@pytest.mark.parametrize("size", [1, 20, 500])
@pytest.mark.parametrize("samples", [1, 64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_of_blocks_and_chunks_make_sense(kind, length, size, samples, device):
    way = sequential_way(kind, samples, 24, size, torch.float32, device)
    assert way.name == "sequential"
    assert way.block >= 1
    way = scan_way(kind, length, samples, 24, size, torch.float32, device)
    assert way.name == "scan"
    assert 1 <= way.chunk <= length
    assert way.block >= way.chunk
    assert way.block % way.chunk == 0


def test_a_wider_batch_has_shorter_blocks():
    assert step_numbers("GRU", 24, 20) == 10 * 20 + 48
    narrow, wide = (sequential_way("GRU", b, 24, 20, torch.float32, "cpu") for b in (16, 32))
    assert wide.block == narrow.block // 2
    double = sequential_way("GRU", 16, 24, 20, torch.float64, "cpu")
    assert double.block == narrow.block // 2
