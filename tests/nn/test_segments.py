"""A recurrent layer by segments: exact, and within its budget."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import retrograde as rg
from oracles.networks import CELLS, assert_close, gradients, pair, state_of
from retrograde.nn import segments
from retrograde.scan import layer as layers

DOUBLE = torch.float64
WAYS = [
    (cell, way)
    for cell in CELLS
    for way in ("sequential", "scan", None)
    if (cell, way) != ("LSTM", None)
]
EVERY_WAY = pytest.mark.parametrize(("cell", "way"), WAYS)
SOME_WAYS = pytest.mark.parametrize(
    ("cell", "way"), [("RNN_TANH", None), ("GRU", "scan"), ("LSTM", "sequential")]
)


def least_bytes(net, x, state=None):
    """The least budget, from the error that refuses a byte."""
    net.memory = 1
    hx = state if state is None or net.mode == "LSTM" else state[0]
    with pytest.raises(rg.BudgetError, match="need at least") as caught:
        net(x, hx)
    return caught.value.minimum_bytes


def working_bytes(net, x, seed):
    """What a pass forward and backward takes, besides what it hands to the caller."""

    def call():
        y, state = net(x)
        y.backward(seed)
        return y, state

    def clear():
        for t in (x, *net.parameters()):
            t.grad = None

    call(), clear()  # what a first call compiles or fits is not counted
    found = rg.measure(call).working_bytes
    clear()
    return found


@EVERY_WAY
@pytest.mark.parametrize("length", [1, 2, 63, 65])
@pytest.mark.parametrize("memory", ["least", "60%"])
def test_gradients_are_autograds(cell, way, length, memory):
    theirs, ours = pair(cell, 5, 7, backward=way, dtype=DOUBLE)
    x = torch.randn(length, 3, 5, dtype=DOUBLE, requires_grad=True)
    state = state_of(ours, 3)
    ours.memory = memory
    if memory == "least":
        ours.memory = 1
    try:
        found = gradients(ours, x, state)
    except rg.BudgetError as error:
        ours.memory = error.minimum_bytes
        found = gradients(ours, x, state)
    assert_close(found, gradients(theirs, x, state), 1e-10)


@pytest.mark.parametrize(("cell", "way"), [w for w in WAYS if w[0] != "RNN_RELU"])
def test_gradients_of_a_thousand_steps_from_the_least_budget_up(cell, way):
    theirs, ours = pair(cell, 5, 7, backward=way, dtype=DOUBLE)
    x = torch.randn(1000, 3, 5, dtype=DOUBLE, requires_grad=True)
    state = state_of(ours, 3)
    expected = gradients(theirs, x, state)
    least = least_bytes(ours, x, state)
    for memory in (least, 2 * least):
        ours.memory = memory
        assert_close(gradients(ours, x, state), expected, 1e-10)
    ours.memory = least - 1
    with pytest.raises(rg.BudgetError, match=f"need at least {least} bytes"):
        gradients(ours, x, state)


def check_peaks(cell, way, length, samples, inputs, size):
    theirs, ours = pair(cell, inputs, size, backward=way)
    x = torch.randn(length, samples, inputs, requires_grad=True)
    seed = torch.randn(length, samples, size)
    ordinary = working_bytes(theirs, x, seed)
    least = least_bytes(ours, x)
    budgets = [ordinary * percent // 100 for percent in (2, 6, 20, 60)]
    for budget in (least, *(b for b in budgets if b > least)):
        ours.memory = budget
        taken = working_bytes(ours, x, seed)
        assert taken <= budget, f"{taken / budget:.3f} of the budget {budget / ordinary:.1%}"


@pytest.mark.parametrize("cell", ["RNN_TANH", "GRU", "LSTM"])
@pytest.mark.parametrize("way", ["sequential", "scan"])
def test_the_peak_is_within_the_budget(cell, way):
    check_peaks(cell, way, 200, 3, 5, 33)


@pytest.mark.slow
@EVERY_WAY
@pytest.mark.parametrize(
    "shape", [(200, 1, 3, 1), (1000, 16, 24, 20), (997, 3, 5, 33), (400, 16, 64, 64)]
)
def test_the_peak_is_within_the_budget_at_every_width(cell, way, shape):
    check_peaks(cell, way, *shape)


@SOME_WAYS
def test_a_larger_budget_is_used(cell, way):
    """Up to what speeds anything up, more memory means longer or more segments at a time."""
    _, ours = pair(cell, 24, 20, backward=way)
    x = torch.randn(1000, 16, 24, requires_grad=True)
    least = least_bytes(ours, x)
    blocks = []
    for factor in (1, 2, 4):
        ours.memory = factor * least
        found = ours.fit(x)
        assert found.minimum_bytes == least
        assert found.peak_bytes <= found.budget_bytes == factor * least
        assert found.way is None or found.way.block == found.together * found.way.segment
        blocks.append(1000 if found.way is None else found.way.block)
    assert blocks[0] < blocks[1] <= blocks[2]


@SOME_WAYS
def test_the_same_budget_gives_the_same_segments(cell, way):
    x = torch.randn(300, 3, 5)
    ways = []
    for _ in range(3):
        _, ours = pair(cell, 5, 7, backward=way, memory="40%")
        ways.append(ours.fit(x).way)
    assert ways[0] == ways[1] == ways[2]


@EVERY_WAY
def test_a_budget_of_all_there_is_runs_torchs_own(cell, way, monkeypatch):
    theirs, ours = pair(cell, 5, 7, backward=way, dtype=DOUBLE)
    x = torch.randn(100, 3, 5, dtype=DOUBLE, requires_grad=True)
    for memory in (1.0, "100%", "1GiB"):
        ours.memory = memory
        found = ours.fit(x)
        assert found.way is None
        assert found.budget_bytes >= found.ordinary_bytes == found.peak_bytes
        with monkeypatch.context() as patch:
            patch.setattr("retrograde.nn.recurrent.run_stack", None)
            assert_close(gradients(ours, x), gradients(theirs, x), 0)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_fraction_is_of_what_torch_really_takes(cell, dtype):
    """But for what torch's LSTM adds in float32 for a gradient that has to be laid out first."""
    theirs, ours = pair(cell, 24, 20, backward="sequential", memory="30%", dtype=dtype)
    x = torch.randn(1000, 16, 24, dtype=dtype, requires_grad=True)
    ordinary = working_bytes(theirs, x, torch.randn(1000, 16, 20, dtype=dtype))
    assert ours.fit(x).ordinary_bytes == pytest.approx(ordinary, rel=0.05)


@EVERY_WAY
def test_a_recompute_that_drifts_is_run_again_in_forwards_batches(cell, way, monkeypatch):
    theirs, ours = pair(cell, 5, 3, backward=way, dtype=DOUBLE)
    x = torch.randn(200, 3, 5, dtype=DOUBLE, requires_grad=True)
    ours.memory = "90%"
    fitted = ours.fit(x)
    if fitted.together == 1:
        pytest.skip("the scan's products leave no room for two segments at a time")
    batches, run = [], layers.run
    monkeypatch.setattr(layers, "_drifted", lambda found, kept: True)
    monkeypatch.setattr(layers, "run", lambda *a: batches.append(a[1].shape[1]) or run(*a))
    assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)
    assert max(batches) == 3 * fitted.together
    assert batches.count(3) >= 200 // fitted.way.segment


@EVERY_WAY
def test_layouts_and_absent_gradients(cell, way):
    for options, shape in [({"batch_first": True}, (3, 80, 5)), ({}, (80, 5))]:
        theirs, ours = pair(cell, 5, 7, backward=way, memory="80%", dtype=DOUBLE, **options)
        for x_too in (True, False):
            for net in (theirs, ours):
                net.weight_ih_l0.requires_grad_(x_too)
            x = torch.randn(*shape, dtype=DOUBLE, requires_grad=x_too)
            assert ours.fit(x).way is not None
            assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)


@EVERY_WAY
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bidirectional": True}, "bidirectional=True"),
        ({"num_layers": 2}, "num_layers=2"),
        ({"num_layers": 3, "dropout": 0.5}, "num_layers=3"),
    ],
)
def test_what_is_not_supported_says_so(cell, way, options, named):
    _, ours = pair(cell, 5, 7, backward=way, memory="50%", **options)
    together = "memory=" if way is None else "memory= and backward="
    for call in (ours, ours.fit):
        with pytest.raises(
            rg.CellError, match=f"{named} is not supported together with {together}:"
        ):
            call(torch.randn(50, 3, 5, requires_grad=True))


def test_projections_are_refused():
    ours = rg.LSTM(5, 7, proj_size=3, memory="50%", backward="scan")
    with pytest.raises(rg.CellError, match="proj_size=3 is not supported together"):
        ours(torch.randn(50, 3, 5))


@EVERY_WAY
def test_packed_sequences_are_refused(cell, way):
    _, ours = pair(cell, 5, 7, backward=way, memory="50%")
    packed = pack_sequence([torch.randn(4, 5), torch.randn(3, 5)])
    name = type(ours).__name__
    with pytest.raises(rg.CellError, match=f"a {name} with memory= takes padded tensors"):
        ours(packed)


def test_the_error_says_what_to_do():
    ours = rg.GRU(24, 20, memory=1000)
    x = torch.randn(500, 16, 24)
    with pytest.raises(rg.BudgetError) as caught:
        ours(x)
    text = str(caught.value)
    for part in (
        "the memory 1000 is 1000 bytes",
        "500 steps need",
        "raise the budget",
        "rg.unroll",
    ):
        assert part in text
    with pytest.raises(rg.CellError, match="there is no budget to fit: give memory="):
        rg.GRU(24, 20).fit(x)
    with pytest.raises(rg.CellError, match="has 0 steps"):
        ours(torch.randn(0, 16, 24))


def test_a_fit_is_kept_for_calls_of_the_same_shape_only(monkeypatch):
    _, ours = pair("GRU", 5, 7, backward="scan", memory="50%")
    calls, fit = [], segments.fit
    monkeypatch.setattr(segments, "fit", lambda *a: calls.append(a) or fit(*a))
    for length in (100, 100, 60, 100):
        ours(torch.randn(length, 3, 5))
    assert len(calls) == 2
    ours.memory = "60%"
    ours(torch.randn(100, 3, 5))
    ours.backward = "sequential"
    ours(torch.randn(100, 3, 5))
    ours(torch.randn(100, 3, 5, requires_grad=True))
    assert len(calls) == 5


def test_fitting_leaves_no_trace():
    _, ours = pair("GRU", 5, 7, backward="sequential", memory="50%", batch_first=True)
    x = torch.randn(3, 100, 5, requires_grad=True)
    before, attributes = torch.get_rng_state(), {**vars(ours), "_fits": None}
    ours.fit(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert {**vars(ours), "_fits": None} == attributes
    assert x.grad is None
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sequential", "scan"])
def test_thirty_thousand_steps_in_a_twentieth_of_the_memory(way):
    theirs, ours = pair("GRU", 24, 20, backward=way)
    x = torch.randn(30_000, 16, 24, requires_grad=True)
    seed = torch.randn(30_000, 16, 20)
    expected = gradients(ours, x, None, [seed, None])
    ours.memory = "5%"
    budget = ours.fit(x).budget_bytes
    assert budget <= 0.051 * working_bytes(theirs, x, seed)
    assert working_bytes(ours, x, seed) <= budget
    assert_close(gradients(ours, x, None, [seed, None]), expected, 1e-5)
