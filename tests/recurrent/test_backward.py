"""``rg.RNN``, ``rg.GRU`` and ``rg.LSTM``, scanned and swept: every option, every way of calling."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import retrograde as rg
from oracles.autocast import run_or_skip
from oracles.networks import (
    CELLS,
    assert_close,
    call,
    gradients,
    pair,
    relative_error,
    seeds_for,
    state_of,
)
from retrograde.recurrent import spans

pytestmark = pytest.mark.usefixtures("ours_however_short")

EVERY_CELL = pytest.mark.parametrize("cell", CELLS)
WAYS = {"sweep": {"memory": "100%"}, "scan": {"backward": "scan"}}
BOTH_WAYS = pytest.mark.parametrize("way", WAYS)
DOUBLE = torch.float64


def skip_other_masks(way, options):
    if way == "sweep" and options.get("dropout"):
        pytest.skip("masks are hashes, not torch's; test_options.py compares them")


def reference(cell, options):
    """Torch's module; with dropout a sweep of ours, which drops what a scan drops."""
    theirs, ours = pair(cell, 5, 7, memory="1TiB", dtype=DOUBLE, **options)
    return ours if options.get("dropout") else theirs


def inputs(*shape, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=dtype)


def both(cell, way, x, *, batch=None, seeds=None, **options):
    """Gradients of ours and of the reference; a random initial state where the batch is told."""
    _, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE, **options)
    state = None if batch is None else state_of(ours, *batch)
    found = []
    for net in (ours, reference(cell, options)):
        torch.manual_seed(5)  # of dropout
        found.append(gradients(net, x, state, seeds))
    return found


@EVERY_CELL
@BOTH_WAYS
def test_gradcheck_passes(cell, way):
    _, ours = pair(cell, 3, 2, **WAYS[way], dtype=DOUBLE)
    x, state = inputs(9, 2, 3).requires_grad_(), state_of(ours, 2)
    leaves = (x, *state, *ours.parameters())

    def outputs(x, *rest):
        return tuple(call(ours, x, rest[: len(state)]))

    assert torch.autograd.gradcheck(outputs, leaves)


def test_unknown_words_and_projections_are_refused():
    expected = "unknown backward='chop': expected 'scan', or None; the fastest sequential"
    with pytest.raises(rg.CellError, match=expected):
        rg.GRU(5, 7, backward="chop")
    ours = rg.GRU(5, 7)
    ours.backward = "auto"
    with pytest.raises(rg.CellError, match="unknown backward='auto': expected"):
        ours(inputs(9, 2, 5, dtype=torch.float32))
    with pytest.raises(rg.CellError, match="proj_size=3 has no Jacobian here: expected an LSTM"):
        rg.LSTM(5, 7, proj_size=3, backward="scan")


OPTIONS = [
    {"num_layers": 3},
    {"bidirectional": True},
    {"bias": False},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 3, "dropout": 0.4},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "bias": False},
]


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["from a state", "from zeros"])
def test_layers_directions_dropout_and_biases(cell, way, options, given):
    skip_other_masks(way, options)
    x = inputs(20, 3, 5).requires_grad_()
    ours, theirs = both(cell, way, x, batch=(3,) if given else None, **options)
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@pytest.mark.parametrize("options", OPTIONS[4:], ids=str)
def test_dropout_of_sequences_of_several_blocks(cell, options, monkeypatch):
    monkeypatch.setitem(spans._SCAN_BYTES, "cpu", 1)
    ours, theirs = both(cell, "scan", inputs(20, 3, 5).requires_grad_(), **options)
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_batch_first_with_as_many_steps_as_not(cell, way, options):
    x = inputs(3, 20, 5).requires_grad_()
    for batch in (None, (3,)):
        ours, theirs = both(cell, way, x, batch=batch, batch_first=True, **options)
        assert_close(ours, theirs, 1e-10)
        assert ours["x"].shape == (3, 20, 5)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bidirectional": True}], ids=str)
def test_without_a_batch(cell, way, options):
    x = inputs(20, 5).requires_grad_()
    for batch in (None, ()):
        ours, theirs = both(cell, way, x, batch=batch, **options)
        assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("options", [{}, *OPTIONS[:4]], ids=str)
def test_outputs_are_torchs(cell, way, dtype, options):
    """To rounding: on a CPU the forward pass is a compiled loop of our own."""
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=dtype, **options)
    x, state = inputs(100, 3, 5, dtype=dtype), state_of(ours, 3, dtype=dtype)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        found = []
        for net in (ours, theirs):
            torch.manual_seed(5)
            found.append(call(net, x, state))
        for a, b in zip(*found, strict=True):
            assert a.requires_grad
            assert relative_error(a, b) <= 16 * torch.finfo(dtype).eps


def packed_by(lengths, sort):
    torch.manual_seed(6)
    data = [torch.randn(n, 5, dtype=DOUBLE) for n in lengths]
    packed = pack_sequence(data, enforce_sorted=not sort)
    return packed._replace(data=packed.data.requires_grad_())


LENGTHS = {
    "sorted": ([20, 13, 13, 1], False),
    "sorted, but not said to be": ([20, 13, 13, 1], True),
    "unsorted": ([4, 20, 1, 9], True),
    "all of one": ([6, 6, 6, 6], True),
    "a single step": ([1, 1, 1, 1], False),
}


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("options", [{}, OPTIONS[3], OPTIONS[4], OPTIONS[5]], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["from a state", "from zeros"])
@pytest.mark.quick(1, every=80)
def test_packed_sequences(cell, way, lengths, options, given):
    skip_other_masks(way, options)
    packed = packed_by(*LENGTHS[lengths])
    ours, theirs = both(cell, way, packed, batch=(4,) if given else None, **options)
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@BOTH_WAYS
def test_packed_outputs_are_packed_as_torchs(cell, way):
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE, bidirectional=True)
    packed = packed_by([4, 20, 1, 9], True)
    (a, last), (b, their_last) = ours(packed), theirs(packed)
    assert isinstance(a, PackedSequence)
    assert relative_error(a.data, b.data) <= 1e-15
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(a, name), getattr(b, name))
    if cell == "LSTM":
        last, their_last = last[1], their_last[1]
    assert relative_error(last, their_last) <= 1e-15


@EVERY_CELL
@BOTH_WAYS
def test_a_packed_batch_padded_with_numbers_that_are_none(cell, way):
    """What lies past a sequence's end is no part of it."""
    padded = inputs(9, 3, 5)
    padded[4:, 1], padded[2:, 2] = float("nan"), float("nan")
    packed = pack_padded_sequence(padded, torch.tensor([9, 4, 2]))
    packed = packed._replace(data=packed.data.requires_grad_())
    ours, theirs = both(cell, way, packed, batch=(3,))
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.parametrize("wanted", ["outputs", "h", "c", "some steps", "the first step"])
def test_a_loss_of_some_of_what_comes_out(cell, way, options, wanted):
    x = inputs(20, 3, 5).requires_grad_()
    theirs, _ = pair(cell, 5, 7, dtype=DOUBLE, **options)
    outputs = call(theirs, x, state_of(theirs, 3))
    if wanted == "c" and cell != "LSTM":
        pytest.skip("has no c")
    seeds = seeds_for(outputs)
    keep = {"h": 1, "c": 2}.get(wanted, 0)
    if wanted == "some steps":
        seeds[0][::3] = 0
    if wanted == "the first step":
        seeds[0][1:] = 0
    seeds = [s if i == keep else None for i, s in enumerate(seeds)]
    ours, theirs = both(cell, way, x, batch=(3,), seeds=seeds, **options)
    assert_close(ours, theirs, 1e-10)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("batch_first", [False, True])
def test_gradients_and_inputs_that_are_expanded_or_not_contiguous(cell, way, batch_first):
    shape = (20, 20, 7)
    x = inputs(5, 20, 20).permute(1, 2, 0).requires_grad_()
    seeds = {
        "expanded": torch.ones((), dtype=DOUBLE).expand(shape),
        "transposed": inputs(20, 20, 7).transpose(0, 1),
        "strided": inputs(40, 20, 14)[::2, :, ::2],
    }
    for seed in seeds.values():
        theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE, batch_first=batch_first)
        rest = [None] * (2 if cell == "LSTM" else 1)
        found, expected = (gradients(net, x, None, [seed, *rest]) for net in (ours, theirs))
        assert_close(found, expected, 1e-10)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize(
    "frozen", ["weight_ih_l0", "weight_hh_l1", "bias_hh_l0", "all of a layer", "all"]
)
@pytest.mark.parametrize("x_too", [True, False])
def test_frozen_parameters_and_inputs_without_a_gradient(cell, way, frozen, x_too):
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE, num_layers=2)
    for net in (theirs, ours):
        for name, p in net.named_parameters():
            hit = frozen in ("all", name) or (frozen == "all of a layer" and name.endswith("l0"))
            p.requires_grad_(not hit)
    x, state = inputs(20, 3, 5).requires_grad_(x_too), state_of(ours, 3)
    found = []
    for net in (ours, theirs):
        y = call(net, x, state)
        torch.autograd.backward(y, seeds_for(y))
        leaves = {"x": x, **dict(enumerate(state)), **dict(net.named_parameters())}
        found.append({str(name): t.grad for name, t in leaves.items()})
        for t in leaves.values():
            t.grad = None
    assert_close(*found, 1e-10)


@EVERY_CELL
@BOTH_WAYS
def test_going_backward_twice_and_adding_up(cell, way):
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE)
    x = inputs(20, 3, 5).requires_grad_()
    found = []
    for net in (ours, theirs):
        y = net(x)[0]
        y.backward(torch.ones_like(y), retain_graph=True)
        y.backward(2 * y.detach(), retain_graph=True)
        net(2 * x.detach())[0].square().sum().backward()
        found.append({"x": x.grad, **{n: p.grad for n, p in net.named_parameters()}})
        x.grad = None
    assert_close(*found, 1e-10)


@EVERY_CELL
@BOTH_WAYS
def test_a_gradient_taken_twice_is_the_same(cell, way):
    _, ours = pair(cell, 5, 7, **WAYS[way])
    x = inputs(130, 3, 5, dtype=torch.float32).requires_grad_()
    y = ours(x)[0]
    leaves, seed = [x, *ours.parameters()], torch.randn_like(y)
    first, second = (torch.autograd.grad(y, leaves, seed, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@EVERY_CELL
@BOTH_WAYS
def test_an_output_written_to_is_noticed(cell, way):
    """Outputs are the tape: what would spoil it is refused, as torch refuses it for its own."""
    _, ours = pair(cell, 5, 7, **WAYS[way])
    y = ours(inputs(20, 3, 5, dtype=torch.float32))[0]
    loss = y.square().sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@EVERY_CELL
@BOTH_WAYS
def test_without_gradients_it_is_torchs_own(cell, way, monkeypatch):
    theirs, ours = pair(cell, 5, 7, **WAYS[way])
    monkeypatch.setattr("retrograde.recurrent.call.Call.run", None)
    x = inputs(20, 3, 5, dtype=torch.float32)
    with torch.no_grad():
        found, expected = call(ours, x), call(theirs, x)
    assert all(map(torch.equal, found, expected))
    ours.requires_grad_(False)
    assert not call(ours, x)[0].requires_grad


@EVERY_CELL
@pytest.mark.parametrize("way", ["scan", None])
def test_it_copies_saves_and_loads(cell, way):
    theirs, ours = pair(cell, 5, 7, backward=way, num_layers=2)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    assert (f"backward={way!r}" in repr(ours)) == (way is not None)
    assert repr(ours).startswith(repr(theirs)[:-1])
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    copies = [torch.load(buffer, weights_only=False), copy.deepcopy(ours)]
    copies.append(pickle.loads(pickle.dumps(ours)))
    x = inputs(20, 2, 5, dtype=torch.float32)
    for again in copies:
        assert type(again) is type(ours)
        assert again.backward == way
        y = again(x)[0]
        assert relative_error(y, theirs(x)[0]) <= 1e-6
        y.sum().backward()


@EVERY_CELL
@BOTH_WAYS
def test_weights_changed_between_calls_are_the_ones_used(cell, way):
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE)
    x = inputs(20, 3, 5).requires_grad_()
    for net in (ours, theirs):
        gradients(net, x)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.3)
    assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)
    ours.backward = ours.memory = None
    assert_close(gradients(ours, x), gradients(theirs, x), 0)


@EVERY_CELL
@BOTH_WAYS
def test_a_module_in_half_precision(cell, way):
    """Its gradients are as close to float32's on the same numbers as bfloat16's own rounding."""
    theirs, ours = pair(cell, 5, 7, **WAYS[way], num_layers=2)
    ours, theirs = ours.to(torch.bfloat16), theirs.to(torch.bfloat16).float()
    x = inputs(50, 3, 5, dtype=torch.bfloat16).requires_grad_()
    found = gradients(ours, x)
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    expected = gradients(theirs, x.detach().float().requires_grad_())
    assert_close(found, expected, 0.1)


@EVERY_CELL
def test_under_autocast_a_scan_is_torchs_own_pass(cell):
    theirs, ours = pair(cell, 5, 7, backward="scan")
    x = inputs(20, 3, 5, dtype=torch.float32).requires_grad_()
    run_or_skip(theirs, x)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = gradients(ours, x), gradients(theirs, x)
    assert_close(found, expected, 0)


def kept_bytes(net, x):
    """What lives from forward to backward, besides outputs and final state."""
    net(x)  # what a first call compiles
    found = rg.measure(lambda: call(net, x))
    return found.retained_bytes - sum(t.nbytes for t in found.value)


@EVERY_CELL
@pytest.mark.parametrize("grad", [True, False])
def test_a_third_of_torchs_memory_is_kept_at_most(cell, grad):
    theirs, ours = pair(cell, 24, 20, backward="scan")
    x = inputs(1000, 16, 24, dtype=torch.float32).requires_grad_(grad)
    ours_kept, theirs_kept, outputs = kept_bytes(ours, x), kept_bytes(theirs, x), 1000 * 16 * 20 * 4
    assert ours_kept <= theirs_kept / 3
    if cell == "LSTM":  # four gates and a cell a unit
        assert ours_kept <= 5.01 * outputs
    else:
        assert ours_kept <= 0.01 * outputs
    if not cell.startswith("RNN"):  # torch's RNN keeps nothing but a copy of its outputs
        assert ours_kept + outputs <= (theirs_kept + outputs) / 3


def explosive(gain, dtype=torch.float32):
    """Two of four units are decoupled from all else, at rest where tanh is steepest: each step
    multiplies what would be their gradient by the gain."""
    pair_ = pair("RNN_TANH", 5, 4, backward="scan", dtype=dtype)
    with torch.no_grad():
        for net in pair_:
            hidden, *rest = net.weight_hh_l0, net.weight_ih_l0, net.bias_ih_l0, net.bias_hh_l0
            hidden.zero_()
            hidden[:2, :2] = torch.tensor([[0.6, -0.4], [0.4, 0.6]])
            hidden[2:, 2:] = gain * torch.eye(2)
            for p in rest:
                p[2:] = 0
    return pair_


def first_steps_loss():
    """A loss of the first three steps, and of the two units that do not explode."""
    seeds = [torch.zeros(64, 3, 4), torch.zeros(1, 3, 4)]
    seeds[0][:3, :, :2] = 1
    return seeds


@pytest.mark.parametrize("gain", [1e7, 1e12, 1e25])
@pytest.mark.parametrize("guarded", [True, False], ids=["with safe chunks", "without"])
def test_products_that_overflow_where_the_gradient_does_not(gain, guarded, monkeypatch):
    """Short chunks make them fit; where they do not, they are thrown away, and that is told."""
    x = inputs(64, 3, 5, dtype=torch.float32).requires_grad_()
    theirs, ours = explosive(gain)
    seeds = first_steps_loss()
    if guarded:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = gradients(ours, x, None, seeds)
    else:
        monkeypatch.setattr("retrograde.recurrent.backward.safe_chunk", lambda hidden, chunk: chunk)
        with pytest.warns(RuntimeWarning, match="swept step by step") as told:
            found = gradients(ours, x, None, seeds)
        assert len(told) == 1
    ours.backward, ours.memory = None, "100%"
    assert all(t.isfinite().all() for t in found.values())
    assert_close(found, gradients(ours, x, None, seeds), 2e-6)
    assert_close(found, gradients(theirs, x, None, seeds), 2e-6)


def test_products_that_cancel_are_thrown_away_too():
    """A gradient that only a sum of far larger terms gives: rounding would show in it."""
    theirs, ours = pair("RNN_TANH", 5, 2, backward="scan")
    with torch.no_grad():  # U = [[k, k], [−k, −k]] has U² = 0, and entries as large as k
        for net in (theirs, ours):
            net.weight_hh_l0.copy_(torch.tensor([[1e4, 1e4], [-1e4, -1e4]]))
            for p in (net.weight_ih_l0, net.bias_ih_l0, net.bias_hh_l0):
                p.zero_()
    x = inputs(64, 3, 5, dtype=torch.float32).requires_grad_()
    seeds = [None, torch.ones(1, 3, 2)]
    found = gradients(ours, x, None, seeds)
    assert_close(found, gradients(theirs, x, None, seeds), 2e-6)


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_no_number_spoils_no_other(cell, way, bad):
    theirs, ours = pair(cell, 5, 7, **WAYS[way], dtype=DOUBLE)
    x, state = inputs(80, 3, 5), state_of(ours, 3)
    x[40, 1, 2] = bad
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "products of Jacobians", RuntimeWarning)
        found = gradients(ours, x, state)
    expected = gradients(theirs, x, state)
    for name in ("x", *(f"state {i}" for i in range(len(state)))):
        for b in (0, 2):
            assert found[name][:, b].isfinite().all()
            assert relative_error(found[name][:, b], expected[name][:, b]) <= 1e-10


@EVERY_CELL
@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_healthy_runs_give_no_warning(cell, way, dtype):
    _, ours = pair(cell, 5, 20, **WAYS[way], dtype=dtype)
    x = inputs(700, 3, 5, dtype=dtype).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(ours, x)
        gradients(ours, packed_by([9, 4], False)) if dtype == DOUBLE else None


@EVERY_CELL
@pytest.mark.parametrize("asked", [*WAYS.values(), {"backward": "scan", "memory": "30%"}], ids=str)
def test_one_dtype_and_one_device_or_an_error_that_names_both(cell, asked):
    _, ours = pair(cell, 5, 7, **asked)
    with pytest.raises(rg.CellError, match=r"input is torch\.float64, .* are torch\.float32"):
        ours(inputs(200, 3, 5))
    state = state_of(ours, 3, dtype=torch.bfloat16)
    with pytest.raises(rg.CellError, match=r"initial state is torch\.bfloat16, .* torch\.float32"):
        call(ours, inputs(200, 3, 5, dtype=torch.float32), state)
    with pytest.raises(rg.CellError, match=r"input is on meta, the parameters are on cpu.*\.to\("):
        ours(torch.zeros(200, 3, 5, device="meta"))
    state = tuple(s.to("meta") for s in state_of(ours, 3, dtype=torch.float32))
    with pytest.raises(rg.CellError, match=r"initial state is on meta, the parameters are on cpu"):
        call(ours, inputs(200, 3, 5, dtype=torch.float32), state)


@EVERY_CELL
@BOTH_WAYS
def test_a_packed_sequence_of_another_dtype_names_both_too(cell, way):
    _, ours = pair(cell, 5, 7, **WAYS[way])
    for state in (None, state_of(ours, 4, dtype=torch.float32)):
        with pytest.raises(rg.CellError, match=r"is torch\.float64, .* are torch\.float32"):
            call(ours, packed_by([4, 3, 2, 1], False), state)


@EVERY_CELL
@BOTH_WAYS
def test_shapes_that_do_not_fit_are_refused_as_torch_refuses_them(cell, way):
    theirs, ours = pair(cell, 5, 7, **WAYS[way])
    x = torch.zeros(9, 3, 5)
    wrong_state = torch.zeros(1, 4, 7)
    hx = (wrong_state, wrong_state) if cell == "LSTM" else wrong_state
    for given in ((torch.zeros(9, 3, 6),), (x, hx)):
        with pytest.raises(RuntimeError) as theirs_said:
            theirs(*given)
        with pytest.raises(RuntimeError) as ours_said:
            ours(*given)
        assert str(ours_said.value) == str(theirs_said.value)
    with pytest.raises(rg.CellError, match="has 4 dimensions"):
        ours(torch.zeros(1, 9, 3, 5))
    with pytest.raises(rg.CellError, match="has 0 steps"):
        ours(torch.zeros(0, 3, 5))
