"""The bytes that are told of torch's own pass, beside what it takes."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import retrograde as rg
from oracles.autocast import run_or_skip


def packed(batch, width, lengths):
    return pack_padded_sequence(torch.randn(max(lengths), batch, width), lengths)


def working_bytes(net, x, seeds, parameters=None):
    def call():
        outputs, final = net(x)
        first = outputs.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else outputs
        ends = final if isinstance(final, tuple) else (final,)
        torch.autograd.backward([first, *ends][: len(seeds)], seeds)
        return outputs, final

    for _ in range(2):
        measured = rg.measure(call).working_bytes
        leaf = x.data if hasattr(x, "batch_sizes") else x
        for t in [leaf, *(parameters or net.parameters())]:
            t.grad = None
    return measured


def seeds_of(net, x, final, summed):
    outputs, after = net(x)
    ends = after if isinstance(after, tuple) else (after,)
    roots = [outputs.data if hasattr(outputs, "batch_sizes") else outputs, *(ends if final else ())]
    make = (lambda t: torch.ones((), dtype=t.dtype).expand(t.shape)) if summed else torch.ones_like
    return [make(t) for t in roots]


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "options"),
    [
        # oneDNN fills pages, unevenly by length.
        ("LSTM", (7, 3), (5, 12), {"bidirectional": True}),
        ("LSTM", (40, 64), (33, 20), {"bidirectional": True, "batch_first": True}),
        ("LSTM", (64, 16), (127, 4), {"num_layers": 2}),
        # A gradient is copied into the layout of its leaf.
        ("RNN", (115, 3), (16, 12), {"batch_first": True}),
        ("RNN", (115, 3), (12, 16), {"turned": True}),
        ("LSTM", (256, 33), (16, 12), {"num_layers": 2, "turned": True}),
        ("GRU", (115, 8), (12, 9), {"batch_first": True, "dtype": torch.float64}),
        ("RNN", (7, 3), (12, 1), {"bidirectional": True, "turned": True, "bias": False}),
        ("LSTM", (115, 33), (30, 2), {"proj_size": 16}),
    ],
    ids=str,
)
def test_what_torchs_own_pass_takes_is_told(kind, sizes, shape, options, summed):
    options = dict(options)
    turned = options.pop("turned", False)
    net = getattr(rg, kind)(*sizes, memory="100%", **options)
    x = torch.randn(*shape, sizes[0], dtype=options.get("dtype"))
    x = (x.transpose(0, 1) if turned else x).requires_grad_()
    fit = net.fit(x)
    assert fit.ordinary
    took = working_bytes(net, x, seeds_of(net, x, final=summed, summed=summed))
    assert 0.85 * fit.budget_bytes < took <= fit.budget_bytes


@pytest.mark.parametrize(
    ("kind", "options", "lengths"),
    [
        ("GRU", {}, [8, 8, 7, 2, 1]),
        ("RNN", {"bidirectional": True}, [12, 9, 9]),
        ("GRU", {"bias": False}, [5, 5, 4, 1]),
        ("LSTM", {"proj_size": 4}, [140, 130]),  # another phase takes most after 17 steps
        ("LSTM", {"proj_size": 4, "bidirectional": True}, [140]),
    ],
    ids=str,
)
def test_what_torchs_own_pass_of_a_packed_batch_takes_is_told(kind, options, lengths):
    net = getattr(rg, kind)(40, 9, memory="100%", **options)
    x = packed(len(lengths), 40, lengths)
    fit = net.fit(x)
    assert fit.ordinary
    took = working_bytes(net, x, seeds_of(net, x, final=False, summed=False))
    assert took <= fit.budget_bytes < 1.2 * took + 1000


@pytest.mark.parametrize("lengths", [[64] * 4, [64, 63, 63, 60], [64, 30, 10, 5], [64]], ids=str)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_share_of_a_packed_batch_is_one_of_what_torch_takes(kind, lengths):
    """With sequences of one length torch runs oneDNN's LSTM, which takes three times as much."""
    x = packed(len(lengths), 20, lengths)
    theirs, ours = getattr(torch.nn, kind)(20, 32), getattr(rg, kind)(20, 32, memory="50%")
    took = working_bytes(theirs, x, seeds_of(theirs, x, final=False, summed=False))
    assert ours.fit(x).ordinary_bytes == pytest.approx(took, rel=0.03)


def test_a_packed_batch_of_many_steps_and_few_units_keeps_its_least_budget():
    """Numbers of samples, 8 bytes a step, would be most of it."""
    x = packed(2, 7, [300, 120])
    net = rg.RNN(7, 3, memory=1)
    with pytest.raises(rg.BudgetError) as caught:
        net.fit(x)
    net.memory = caught.value.minimum_bytes
    seeds = seeds_of(net, x, final=False, summed=True)
    assert working_bytes(net, x, seeds) <= net.memory


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_the_least_budget_of_few_steps_is_enough(kind, length):
    """It is that of torch's own pass."""
    net = getattr(rg, kind)(40, 8, memory=1, dtype=torch.float64)
    x = torch.randn(5, length, 40, dtype=torch.float64).transpose(0, 1).requires_grad_()
    with pytest.raises(rg.BudgetError) as caught:
        net.fit(x)
    net.memory = caught.value.minimum_bytes
    assert net.fit(x).ordinary
    seeds = seeds_of(net, x, final=True, summed=False)
    assert working_bytes(net, x, seeds) <= net.memory


@pytest.mark.parametrize("memory", ["60%", "20%", 1], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes", "frozen"),
    [
        ("LSTM", (5, 64), ["weight_hh_l0"]),  # one loop goes back
        ("GRU", (5, 130), ["weight_ih_l0", "weight_hh_l0", "bias_hh_l0"]),
        ("LSTM", (24, 300), ["weight_hh_l1", "weight_ih_l0"]),  # in place, or by products
        ("RNN", (24, 64), "all"),
    ],
    ids=str,
)
def test_frozen_weights_have_sums_that_count(kind, sizes, frozen, memory):
    net = getattr(rg, kind)(*sizes, 2, memory=memory)
    for name, p in net.named_parameters():
        p.requires_grad_(frozen != "all" and name not in frozen)
    x = torch.randn(40, 5, sizes[0], requires_grad=True)
    try:
        net.fit(x)
    except rg.BudgetError as refused:
        net.memory = refused.minimum_bytes
    took = working_bytes(net, x, seeds_of(net, x, final=False, summed=False))
    assert took <= net.fit(x).budget_bytes


@pytest.mark.parametrize("memory", ["100%", "40%", 1], ids=str)
@pytest.mark.parametrize(
    ("kind", "sizes", "shape", "options"),
    [
        ("RNN", (24, 1), (257, 2), {}),  # another phase takes most after 16 steps
        ("GRU", (24, 130), (2, 1), {"num_layers": 3}),  # casts of weights are most of it
        ("LSTM", (24, 8), (130, 2), {"bidirectional": True}),
    ],
    ids=str,
)
def test_autocast_keeps_the_budget(kind, sizes, shape, options, memory):
    net = getattr(rg, kind)(*sizes, memory=memory, **options)
    x = torch.randn(*shape, sizes[0], requires_grad=True)
    run_or_skip(getattr(torch.nn, kind)(*sizes, **options), x)

    def forward(x):
        with torch.autocast("cpu"):
            return net(x)

    with torch.autocast("cpu"):
        try:
            net.fit(x)
        except rg.BudgetError as refused:
            net.memory = refused.minimum_bytes
        budget = net.fit(x).budget_bytes
    seeds = seeds_of(forward, x, final=False, summed=False)
    assert working_bytes(forward, x, seeds, [*net.parameters()]) <= budget
