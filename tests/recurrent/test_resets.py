"""Samples that begin anew inside a sequence, against a loop over torch's own formulas."""

import random
from functools import partial

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import retrograde as rg

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


@pytest.mark.quick(40)
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
