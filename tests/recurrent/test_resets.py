"""Samples that begin anew inside a sequence, against a loop over torch's own formulas."""

import random
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import retrograde as rg
from retrograde.errors import InputError
from retrograde.kernels import kernels
from retrograde.recurrent import backward, core, forward

pytestmark = pytest.mark.usefixtures("ours_however_short")

KINDS = {"RNN": {}, "ReLU": {"nonlinearity": "relu"}, "GRU": {}, "LSTM": {}}


def made(kind, *sizes, **options):
    cls = rg.RNN if kind == "ReLU" else getattr(rg, kind)
    return cls(*sizes, **KINDS[kind], **options)


def cell(mode, x, state, w_ih, w_hh, b_ih, b_hh):
    """One step by torch's formulas."""
    driven, own = x @ w_ih.t() + b_ih, state[0] @ w_hh.t() + b_hh
    if mode == "GRU":
        (r, z, n), (u_r, u_z, u_n) = driven.chunk(3, -1), own.chunk(3, -1)
        r, z = torch.sigmoid(r + u_r), torch.sigmoid(z + u_z)
        n = torch.tanh(n + r * u_n)
        return (n + z * (state[0] - n),)
    if mode == "LSTM":
        i, f, g, o = (driven + own).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    return ((driven + own).relu() if mode == "RNN_RELU" else torch.tanh(driven + own),)


def loop(net, x, hx, starts, entry, lengths):
    """The layers' outputs (T, B, …) and last states, step by step; nothing crosses a start."""
    steps = len(x)
    directions, last = 2 if net.bidirectional else 1, []
    for layer in range(net.num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            names = [f"{n}_l{layer}" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            weights = [getattr(net, n + "_reverse" * direction, None) for n in names]
            weights[2:] = [x.new_zeros(()) if w is None else w for w in weights[2:]]
            state, first = [s[number] for s in hx], [s[number] for s in entry]
            found = [None] * steps
            for t in reversed(range(steps)) if direction else range(steps):
                anew = starts[t]
                if direction:  # the step that follows in time begins anew, so this one does too
                    anew = starts[t + 1] & (lengths > t + 1) if t + 1 < steps else starts[t] & False
                anew, alive = anew.unsqueeze(-1), (lengths > t).unsqueeze(-1)
                given = [torch.where(anew & alive, e, s) for e, s in zip(first, state, strict=True)]
                after = cell(net.mode, x[t], given, *weights)
                state = [torch.where(alive, a, s) for a, s in zip(after, state, strict=True)]
                found[t] = torch.where(alive, state[0], torch.zeros_like(state[0]))
            outputs.append(torch.stack(found))
            last.append(state)
        x = torch.cat(outputs, -1)
    return x, [torch.stack(parts) for parts in zip(*last, strict=True)]


def gradients(outputs, leaves, seeds):
    return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)


def drawn(seed):
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kind = draw.choice([*KINDS])
    samples, steps = draw.choice([1, 2, 5, 9]), draw.choice([1, 2, 17, 60])
    sizes = draw.choice([1, 3, 8]), draw.choice([1, 5, 8, 17])
    options = {
        "num_layers": draw.choice([1, 1, 2, 3]), "bidirectional": draw.random() < 0.3,
        "bias": draw.random() < 0.8, "batch_first": draw.random() < 0.3,
    }  # fmt: skip
    torch.manual_seed(seed)
    net = made(kind, *sizes, dtype=torch.float64, **options)
    count = options["num_layers"] * (2 if options["bidirectional"] else 1)
    share = draw.choice([0.0, 0.1, 0.5, 1.0, "first"])
    starts = torch.rand(steps, samples, generator=generator) < (0 if share == "first" else share)
    if share == "first":
        starts[0] = True

    def state():
        parts = 2 if kind == "LSTM" else 1
        shape = count, samples, sizes[1]
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(parts)]
        return [s.requires_grad_(draw.random() < 0.7) for s in made]

    x = torch.randn(steps, samples, sizes[0], generator=generator, dtype=torch.float64)
    x.requires_grad_(draw.random() < 0.8)
    entry = state() if draw.random() < 0.5 else None
    lengths = None
    if draw.random() < 0.3:
        lengths = torch.randint(1, steps + 1, (samples,), generator=generator)
    return draw, net, x, state(), starts, entry, lengths


def as_given(net, state):
    return state and (tuple(state) if net.mode == "LSTM" else state[0])


def given(net, x, starts, lengths):
    """Inputs and starts in the layout of the module."""
    if lengths is None:
        return (x.transpose(0, 1), starts.t()) if net.batch_first else (x, starts)
    x, starts = (pack_padded_sequence(t, lengths, enforce_sorted=False) for t in (x, starts + 0))
    return x, starts._replace(data=starts.data.bool())


def step(net, x, starts, hx, entry, leaves, seeds):
    """Our module's outputs, last states and gradients."""
    y, last = net(x, as_given(net, hx), reset=starts, reset_state=as_given(net, entry))
    outputs = [y if isinstance(y, torch.Tensor) else y.data]
    outputs += list(last) if net.mode == "LSTM" else [last]
    return y, outputs[1:], gradients(outputs, leaves, seeds)


@pytest.mark.quick(6, every=45)
@pytest.mark.parametrize("seed", range(600))
def test_drawn_modules_against_a_loop(seed):
    draw, net, x, hx, starts, entry, lengths = drawn(seed)
    if lengths is not None:
        net.batch_first = False
    whole = lengths if lengths is not None else torch.full((x.shape[1],), len(x))
    zeros = [torch.zeros_like(s) for s in hx]
    y, last = loop(net, x, hx, starts, entry or zeros, whole)
    y = y[: int(whole.amax())]
    leaves = [t for t in (x, *hx, *(entry or ())) if t.requires_grad] + [*net.parameters()]
    rows = y
    if lengths is not None:
        rows = pack_padded_sequence(y, lengths, enforce_sorted=False).data
    elif net.batch_first:
        rows = y.transpose(0, 1)
    seeds = [torch.randn(t.shape, dtype=t.dtype) for t in (rows, *last)]
    expected = [rows, *last, *gradients([rows, *last], leaves, seeds)]
    inputs, begun = given(net, x, starts, lengths)
    if lengths is not None and x.requires_grad:  # the packed inputs are a leaf of their own
        expected[1 + len(last)] = pack_padded_sequence(
            expected[1 + len(last)], lengths, enforce_sorted=False
        ).data
        inputs = inputs._replace(data=inputs.data.detach().requires_grad_())
        leaves[0] = inputs.data
    call = partial(step, net, inputs, begun, hx, entry, leaves, seeds)
    for budget in draw.sample([None, "100%", 1], 2):  # 1 byte: the least budget
        net.memory = budget
        try:
            call()
        except rg.BudgetError as refusal:
            net.memory = refusal.minimum_bytes
        y, last, found = call()
        y = y if isinstance(y, torch.Tensor) else y.data
        for a, b in zip([y, *last, *found], expected, strict=True):
            if a is None or b is None:  # a state that is never used
                assert all(t is None or not t.any() for t in (a, b))
                continue
            assert (a - b).norm() <= 1e-12 * (1 + b.norm()), budget
        del y, last, found
        if net.memory is not None and budget == 1:
            assert rg.measure(call).working_bytes <= net.memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", [None, "100%", "20%"])
def test_torchs_operations_begin_anew_as_the_loops_do(kind, memory, monkeypatch):
    """Those are what a GPU runs."""
    net = made(kind, 3, 5, 2, memory=memory, dtype=torch.float64)
    x = torch.randn(300, 4, 3, dtype=torch.float64, requires_grad=True)
    starts = torch.rand(300, 4) < 0.1
    entry = [torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    entry = entry if kind == "LSTM" else entry[:1]
    found = []
    for plain in (False, True):
        if plain:
            for module in (backward, core, forward):
                monkeypatch.setattr(module, "kernels", lambda *_: kernels("cpu", torch.half, 5))
        y, _ = net(x, reset=starts, reset_state=as_given(net, entry))
        leaves = [x, *entry, *net.parameters()]
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-12 * (1 + b.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_begins_anew_the_call_is_the_same(kind):
    net = made(kind, 3, 8, memory="80%")
    x = torch.randn(300, 4, 3, requires_grad=True)
    y, _ = net(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x)
    z, _ = net(x, reset=torch.zeros(300, 4, dtype=torch.bool))
    (found,) = torch.autograd.grad(z.square().sum(), x)
    assert torch.equal(y, z)
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert torch.equal(net(x, reset=torch.zeros(300, 4, dtype=torch.bool))[0], z)
    one = net(x[:, 0], reset=torch.zeros(300, dtype=torch.bool))[0]  # without a batch
    assert (one - z[:, 0]).abs().max() <= 1e-5


def test_the_state_of_a_reset_may_be_the_initial_one():
    lstm, x = rg.LSTM(3, 4, dtype=torch.float64, memory="50%"), torch.randn(99, 2, 3).double()
    starts = torch.rand(99, 2) < 0.1
    hx = [torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    apart = [t.detach().clone().requires_grad_() for t in hx]
    found = torch.autograd.grad(lstm(x, hx, reset=starts, reset_state=hx)[0].sum(), hx)
    y = lstm(x, hx, reset=starts, reset_state=apart)[0]
    first, later = (
        torch.autograd.grad(y.sum(), hx),
        torch.autograd.grad(lstm(x, hx, reset=starts, reset_state=apart)[0].sum(), apart),
    )
    for a, b, c in zip(found, first, later, strict=True):
        assert (a - b - c).abs().max() <= 1e-12


def test_refusals():
    x, starts = torch.randn(20, 2, 3), torch.zeros(20, 2, dtype=torch.bool)
    lstm = rg.LSTM(3, 4)
    with pytest.raises(InputError, match=r"expected a bool tensor \(20, 2\)"):
        lstm(x, reset=starts.t())
    with pytest.raises(InputError, match=r"torch.float32 \(20, 2\)"):
        lstm(x, reset=starts.float())
    with pytest.raises(InputError, match="without reset"):
        lstm(x, reset_state=(torch.zeros(1, 2, 4),) * 2)
    with pytest.raises(InputError, match="the reset state is a Tensor: expected the pair"):
        lstm(x, reset=starts, reset_state=torch.zeros(1, 2, 4))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        lstm(x, reset=starts, reset_state=(torch.zeros(1, 3, 4),) * 2)
    with pytest.raises(rg.CellError, match="got reset= with backward="):
        rg.LSTM(3, 4, backward="scan")(x, reset=starts)
    with pytest.raises(rg.CellError, match="got reset= with schedule="):
        rg.LSTM(3, 4, schedule=rg.plan(20, 3))(x, reset=starts)
    with pytest.raises(rg.CellError, match="without projections"):
        rg.LSTM(3, 4, proj_size=2)(x, reset=starts)
    for memory in (None, "50%"):
        lstm.memory = memory
        for place in (torch.bfloat16, "meta"):
            with pytest.raises(rg.CellError, match="got reset= with these layers"):
                rg.LSTM(3, 4, memory=memory).to(place)(x.to(place), reset=starts)
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(rg.CellError, match="outside autocast"),
        ):
            lstm(x, reset=starts)
        assert lstm(x[:, :0], reset=starts[:, :0])[0].shape == (20, 0, 4)
    lstm.memory = None
    y, _ = lstm(x.requires_grad_(), reset=starts)
    with pytest.raises(rg.RetrogradeError, match="cannot itself be differentiated"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
