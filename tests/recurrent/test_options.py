"""``memory=`` changes nothing but the memory, whatever options of torch's modules it meets.

To run one case alone, give its name in quotes; what makes it again is printed where it fails.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

import retrograde as rg
from oracles.masks import Layered, masks_of
from oracles.networks import CELLS
from oracles.options import (
    Setup,
    all_setups,
    alone,
    assert_results,
    covering,
    in_double,
    in_pairs,
    options_of,
    quick_setups,
    settle,
)

# torch says so of dropout without a second layer, and of projections without oneDNN.
pytestmark = [
    pytest.mark.usefixtures("ours_however_short"),
    pytest.mark.filterwarnings("ignore:dropout option adds dropout"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def check(setup):
    """Ours equals torch's, in outputs, final state and all gradients."""
    print(setup)
    theirs, ours = setup.networks()
    x, state = setup.x(), setup.initial(theirs)
    refused = settle(ours, x, state)
    assert refused or setup.memory != 1, f"a byte was enough for {setup}"
    expected = setup.results(theirs, x, state)
    exact = None
    if setup.dtype != "float64":
        exact = setup.results(*in_double(theirs, x, state))
    assert_results(setup, setup.results(ours, x, state), expected, exact)


def named(setups):
    return pytest.mark.parametrize("setup", [pytest.param(s, id=s.id) for s in setups])


# A fortieth of them by default, for time; with the others every pair occurs.
QUICK = [setup for cell in CELLS for setup in quick_setups(cell)]


@named(QUICK[::40])
def test_outputs_and_gradients_are_torchs(setup):
    check(setup)


@pytest.mark.slow
@named([setup for number, setup in enumerate(QUICK) if number % 40])
def test_outputs_and_gradients_are_torchs_too(setup):
    check(setup)


@pytest.mark.slow
@named([setup for cell in CELLS for setup in all_setups(cell)])
def test_every_pair_of_options_at_every_length_and_budget(setup):
    check(setup)


@pytest.mark.parametrize("cell", CELLS)
def test_the_quick_selection_has_every_pair_with_every_length_and_budget(cell):
    chosen = quick_setups(cell)
    for options in [*alone(options_of(cell)), *in_pairs(options_of(cell))]:
        matching = [s for s in chosen if all(getattr(s, k) == v for k, v in options.items())]
        assert matching, options
        if len(options) == 1:
            assert {s.length for s in matching} == {1, 2, 63, 200}
            assert {s.memory for s in matching} == {1, "5%", "1GiB"}


def test_combinations_in_which_all_pairs_meet_are_few():
    axes = {name: range(3) for name in "abcd"}
    rows = list(covering(axes))
    assert 9 <= len(rows) <= 12
    for a, b in ("ab", "ad", "cd"):
        assert {(row[a], row[b]) for row in rows} == {(u, v) for u in range(3) for v in range(3)}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layout", ["packed", "packed unsorted"])
@pytest.mark.parametrize("memory", [1, "1GiB"])
def test_packed_outputs_are_packed_as_the_inputs_are(cell, layout, memory):
    setup = Setup(cell, 9, layout=layout, memory=memory)
    print(setup)
    theirs, ours = setup.networks()
    x = setup.x()
    settle(ours, x, None)
    (found, _), (expected, _) = ours(x), theirs(x)
    assert type(found) is PackedSequence
    assert torch.equal(found.batch_sizes, expected.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None and b is None) or torch.equal(a, b)


# Dropout between layers cannot draw torch's masks, which belong to a whole sequence.

SEED = 5
DROPPING = {
    "kind": [*((cell, 0) for cell in CELLS), ("LSTM", 3)],  # and its projection
    "num_layers": (2, 3),
    "memory": (1, "5%", "1GiB"),
    "bidirectional": (False, True),
    "batch_first": (False, True),
    "layout": ("batched", "unbatched", "packed", "packed unsorted"),
    "state": ("given", "absent"),
    "loss": ("both", "outputs", "final state"),
}


def dropping(kind=("GRU", 0), length=31, num_layers=2, **options):
    """A setup with dropout."""
    cell, proj_size = kind
    options = {"dropout": 0.4, **options}
    return Setup(cell, length, num_layers=num_layers, proj_size=proj_size, training=True, **options)


def seeded_results(setup, seed=SEED):
    """What a network of ours gives after a seed; and random numbers drawn between and behind."""
    _, net = setup.networks()
    x, state = setup.x(), setup.initial(net)
    settle(net, x, state)
    torch.manual_seed(seed)
    return setup.results(net, x, state), torch.rand(3)


@pytest.mark.quick(2, every=8)
@named([dropping(**row) for row in covering(DROPPING)])
def test_dropout_gives_the_gradients_of_torchs_layers_with_the_same_masks(setup):
    print(setup)
    theirs, _ = setup.networks()
    found, _ = seeded_results(setup)
    layered = Layered(setup, theirs, masks_of(setup, SEED))
    expected = setup.results(layered, setup.x(), setup.initial(theirs))
    assert_results(setup, found, expected)


@pytest.mark.quick(1, every=3)
@pytest.mark.parametrize("length", [2, 63, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"kind": ("RNN_TANH", 0), "bidirectional": True},
        {"kind": ("RNN_RELU", 0), "layout": "packed unsorted"},
        {"kind": ("GRU", 0), "num_layers": 3},
        {"kind": ("LSTM", 0), "layout": "packed", "bidirectional": True},
        {"kind": ("LSTM", 3)},
    ],
    ids=str,
)
def test_dropout_is_the_same_at_every_budget_and_leaves_the_same_generator(options, length):
    reference = dropping(length=length, memory=10**15, **options)
    print(reference)
    expected, after = seeded_results(reference)
    for memory in (1, "5%", "1GiB"):
        setup = replace(reference, memory=memory)
        found, drawn = seeded_results(setup)
        assert_results(setup, found, expected)
        assert torch.equal(drawn, after)


@pytest.mark.parametrize("cell", CELLS)
def test_measuring_and_going_backward_draw_nothing(cell):
    setup = dropping((cell, 0), memory="50%")
    print(setup)
    expected, after = seeded_results(setup)
    _, net = setup.networks()
    x, state = setup.x(), setup.initial(net)
    hx = state if cell == "LSTM" else state[0]
    torch.manual_seed(SEED)
    y, _ = net(x, hx)  # for the first time, and so measured
    assert torch.equal(torch.rand(3), after)
    torch.testing.assert_close(y, expected["y"], rtol=1e-12, atol=1e-14)
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.quick(0)
@pytest.mark.parametrize("bidirectional", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cell", ["GRU", pytest.param("LSTM", marks=pytest.mark.slow)])
def test_a_mask_belongs_to_the_seed_the_layer_and_the_step(cell, bidirectional):
    setup = dropping((cell, 0), num_layers=3, bidirectional=bidirectional, size=9)
    print(setup)
    masks = masks_of(setup, SEED)
    for memory in ("5%", "1GiB"):
        again = masks_of(replace(setup, memory=memory), SEED)
        shorter = masks_of(replace(setup, memory=memory, length=20), SEED)
        for whole, same, prefix in zip(masks, again, shorter, strict=True):
            assert torch.equal(same, whole)
            assert torch.equal(prefix, whole[:20])
    other = masks_of(setup, SEED + 1)
    samples = 31 * 3 * masks[0].shape[2]
    for a, b in [*zip(masks, other, strict=True), masks]:
        assert abs(correlation(a, b, setup.dropout)) <= 4 / samples**0.5
    if bidirectional:
        forth, back = masks[0].chunk(2, 2)
        assert abs(correlation(forth, back, setup.dropout)) <= 4 / (samples / 2) ** 0.5


def correlation(a, b, rate):
    """Of two tensors of what is kept, of equal shapes."""
    a, b = a.double() - (1 - rate), b.double() - (1 - rate)
    return float((a * b).mean() / (rate * (1 - rate)))


def seen_through(memory, rate, length=300, batch=10, size=20):
    """A network whose outputs are what dropout makes of ones, and inputs for it."""
    net = rg.RNN(1, size, 2, "relu", dropout=rate, memory=memory, dtype=torch.float64)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.bias_ih_l0.fill_(1.0)
        net.weight_ih_l1.copy_(torch.eye(size))
    return net, torch.zeros(length, batch, 1, dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.7, 0.999])
@pytest.mark.parametrize("memory", ["5%", "1GiB"])
def test_dropout_drops_at_its_rate_independently_and_scales_what_is_left(memory, rate):
    net, x = seen_through(memory, rate)
    settle(net, x, None)
    torch.manual_seed(SEED)
    calls = [net(x)[0].detach() for _ in range(2)]
    kept = calls[0] != 0
    number = kept.numel()
    assert abs((~kept).double().mean() - rate) <= 4 * (rate * (1 - rate) / number) ** 0.5
    torch.testing.assert_close(
        calls[0][kept], torch.full_like(calls[0][kept], 1 / (1 - rate)), rtol=3e-16, atol=0
    )
    half = len(kept) // 2
    pairs = {
        "steps": (kept[1:], kept[:-1]),
        "halves": (kept[half:], kept[:half]),
        "samples": (kept[:, 1:], kept[:, :-1]),
        "units": (kept[:, :, 1:], kept[:, :, :-1]),
        "calls": (kept, calls[1] != 0),
    }
    for name, (a, b) in pairs.items():
        # Where hardly any is kept, pairs are few, and their number has the tail of Poisson's.
        allowed = 4 / a.numel() ** 0.5 * (1 if rate < 0.99 else 4)
        assert abs(correlation(a, b, rate)) <= allowed, name


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("rate", "layers"), [(1.0, 2), (1.0, 3), (0.4, 1)])
@pytest.mark.parametrize("memory", [1, "1GiB"])
def test_where_dropout_leaves_nothing_to_chance_all_is_torchs(cell, rate, layers, memory):
    check(dropping((cell, 0), num_layers=layers, dropout=rate, memory=memory))


@pytest.mark.parametrize("cell", CELLS)
def test_a_rate_close_to_one_keeps_gradients_finite_and_equal_between_budgets(cell):
    reference = dropping((cell, 0), dropout=0.999, memory="1GiB")
    print(reference)
    expected, _ = seeded_results(reference)
    assert all(t.isfinite().all() for t in expected.values())
    setup = replace(reference, memory=1)
    assert_results(setup, seeded_results(setup)[0], expected)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.3},
        {"dropout": 0.3, "bidirectional": True},
        {"backward": "scan"},
        {"dropout": 0.3, "proj_size": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_all_of_the_memory_is_never_refused(cell, options, length):
    """Of few steps torch's kernels may take less than ours; the least of an error works."""
    kind = {k: v for k, v in options.items() if k != "proj_size" or cell == "LSTM"}
    x = torch.randn(length, 4, 64, requires_grad=True)
    net = getattr(rg, cell)(64, 64, 2, memory="100%", **kind)
    net(x)[0].sum().backward()
    with pytest.raises(rg.BudgetError) as refused:
        net._fit_within(1, x)
    net.memory = refused.value.minimum_bytes
    net(x)[0].sum().backward()


@pytest.mark.parametrize("bidirectional", [False, True])
def test_all_of_the_memory_is_never_refused_with_resets(bidirectional):
    net, x = rg.GRU(64, 64, 2, bidirectional=bidirectional, memory="100%"), torch.randn(1, 4, 64)
    assert net(x, reset=torch.ones(1, 4, dtype=torch.bool))[0].requires_grad
