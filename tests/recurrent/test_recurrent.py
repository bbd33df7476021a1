"""``retrograde.LSTM`` is ``torch.nn.LSTM`` within a budget."""

import copy
import io

import pytest
import torch

import retrograde as rg
from retrograde.sizes import nominal

pytestmark = pytest.mark.usefixtures("ours_however_short")

FEW_STEPS = nominal.FEW_STEPS
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def pair(*args, memory=None, schedule=None, **options):
    """torch's module and ours, with the same weights."""
    torch.manual_seed(0)
    theirs = torch.nn.LSTM(*args, **options)
    ours = rg.LSTM(*args, memory=memory, schedule=schedule, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def results(net, x, hx):
    """Outputs and all gradients of a loss in which each output has a part of its own."""
    leaves = [x, *(hx or ())]
    for t in [*leaves, *net.parameters()]:
        t.grad = None
    y, (h, c) = net(x, hx)
    generator = torch.Generator().manual_seed(1)
    outputs = [y, h, c]
    seeds = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in outputs]
    torch.autograd.backward(outputs, seeds)
    return [t.detach() for t in outputs] + [t.grad for t in [*leaves, *net.parameters()]]


def assert_equal_to(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= tolerance * b.norm().clamp_min(1e-30)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 63, 1000])
def test_gradients_from_the_least_budget_to_more_than_enough(dtype, length):
    theirs, ours = pair(5, 7, dtype=dtype)
    x = torch.randn(length, 3, 5, dtype=dtype, requires_grad=True)
    hx = tuple(torch.randn(1, 3, 7, dtype=dtype, requires_grad=True) for _ in range(2))
    expected = results(theirs, x, hx)
    ours.memory = 1
    with pytest.raises(rg.BudgetError) as caught:
        ours(x, hx)
    least = caught.value.minimum_bytes
    for memory in [least if length < 1000 else 2 * least, 4 * least, 1.0, "1GiB"]:
        ours.memory = memory
        assert_equal_to(results(ours, x, hx), expected, TOLERANCE[dtype])
    ours.memory = least - 1
    with pytest.raises(rg.BudgetError, match=f"need at least {least} bytes"):
        ours(x, hx)


@pytest.mark.parametrize(
    ("policy", "memory", "sizes"),
    [
        ("hsm", 3, {}),
        ("ism", 3, {}),
        ("msm", 12, {"alpha": 5, "beta": 4}),
        ("store-all", None, {}),
        ("hsm", 1, {}),
        ("best", 7, {"alpha": 3, "beta": 3}),
        ("best", 9, {"alpha": 1}),
    ],
)
def test_every_policy(policy, memory, sizes):
    schedule = rg.plan(63, memory, policy=policy, **sizes)
    theirs, ours = pair(5, 7, schedule=schedule, dtype=torch.float64)
    x = torch.randn(63, 3, 5, dtype=torch.float64, requires_grad=True)
    assert_equal_to(results(ours, x, None), results(theirs, x, None), 1e-12)
    with pytest.raises(rg.ScheduleError, match="for 63 steps, but the inputs have 64"):
        ours(torch.randn(64, 3, 5, dtype=torch.float64))


def test_a_schedule_that_is_not_legal_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("retrograde.recurrent.call.run_schedule", None)
    half = rg.Schedule.from_actions([rg.Store(0), rg.Record(0, 9), rg.Backward(5, 9)], length=9)
    with pytest.raises(rg.ScheduleError, match="step 4 is not backpropagated"):
        rg.GRU(5, 7, schedule=half)(torch.randn(9, 3, 5))


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 3},
        {"bias": False},
        {"proj_size": 4},
        {"num_layers": 2, "proj_size": 4, "bias": False},
        {"batch_first": True},
    ],
)
def test_options(options):
    theirs, ours = pair(5, 7, memory="30%", dtype=torch.float64, **options)
    x = torch.randn(40, 40, 5, dtype=torch.float64, requires_grad=True)
    assert_equal_to(results(ours, x, None), results(theirs, x, None), 1e-12)


def test_without_a_batch():
    theirs, ours = pair(5, 7, memory="50%", dtype=torch.float64)
    x = torch.randn(63, 5, dtype=torch.float64, requires_grad=True)
    hx = tuple(torch.randn(1, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert_equal_to(results(ours, x, hx), results(theirs, x, hx), 1e-12)


@pytest.mark.parametrize("cell", [rg.RNN, rg.GRU, rg.LSTM])
@pytest.mark.parametrize("asked", [{"memory": "40%"}, {"memory": 1}, {}])
@pytest.mark.parametrize("backward", [None, "scan"])
def test_a_batch_without_samples_is_torchs_own(cell, asked, backward):
    net, x = cell(3, 4, 2, backward=backward, **asked), torch.ones(5, 0, 3, requires_grad=True)
    y, last = net(x)
    y.sum().backward()
    assert y.shape == (5, 0, 4)
    assert (last[0] if isinstance(last, tuple) else last).shape == (2, 0, 4)
    assert x.grad.shape == x.shape
    assert not any(p.grad.any() for p in net.parameters())


def test_gradcheck_passes():
    _, ours = pair(3, 2, schedule=rg.plan(9, 2), dtype=torch.float64)
    x = torch.randn(9, 2, 3, dtype=torch.float64, requires_grad=True)
    hx = [torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda x, h, c: ours(x, (h, c))[0], (x, *hx))


def working_bytes(net, x, seed):
    def call():
        y, state = net(x)
        y.backward(seed)
        return y, state

    call()
    for t in [x, *net.parameters()]:
        t.grad = None
    return rg.measure(call).working_bytes


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 64), (torch.float64, 48)])
def test_the_peak_is_within_the_budget_and_uses_it(dtype, size):
    theirs, ours = pair(size, size, dtype=dtype)
    x = torch.randn(300, 16, size, dtype=dtype, requires_grad=True)
    seed = torch.randn(300, 16, size, dtype=dtype)
    ordinary = working_bytes(theirs, x, seed)
    ours.memory = 1
    with pytest.raises(rg.BudgetError) as caught:
        ours(x)
    least = caught.value.minimum_bytes
    ours.memory = least  # steps are run very often: fewer of them will do
    assert working_bytes(ours, x[:50].detach().requires_grad_(), seed[:50]) <= least
    for budget in [2 * least, *(ordinary * n // 100 for n in (8, 10, 20, 30, 45, 60))]:
        ours.memory = budget
        taken = working_bytes(ours, x, seed)
        assert taken <= budget
        recomputes = ours.fit(x).forward_steps > 300  # if not, more would not be faster
        share = 0.75 if budget < 3 * least else 0.85  # ranges of steps, and room for one more
        assert taken >= share * budget or not recomputes


@pytest.mark.parametrize("size", [1, 7, 16, 33])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("memory", ["10%", "25%", "70%"])
def test_small_sizes_keep_to_their_budget_too(size, batch, memory):
    _, ours = pair(size, size, memory=memory)
    x = torch.randn(200, batch, size, requires_grad=True)
    for seed in [torch.randn(200, batch, size), torch.ones(()).expand(200, batch, size)]:
        try:
            budget = ours.fit(x).budget_bytes
        except rg.BudgetError:
            pytest.skip("refused: the weights alone take more")
        assert working_bytes(ours, x, seed) <= budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fraction_is_of_what_torch_really_takes(dtype):
    theirs, ours = pair(32, 48, memory="10%", dtype=dtype)
    x = torch.randn(400, 8, 32, dtype=dtype, requires_grad=True)
    seed = torch.randn(400, 8, 48, dtype=dtype)
    ordinary = working_bytes(theirs, x, seed)
    assert ours.fit(x).ordinary_bytes == pytest.approx(ordinary, rel=0.01)
    assert working_bytes(ours, x, seed) <= ordinary // 10 * 1.01


@pytest.mark.parametrize("memory", ["100%", "20%", "4%"])
@pytest.mark.parametrize(
    ("kind", "options", "batch"),
    [
        ("RNN", {}, 1),  # forward grows faster than backward, which is the higher one at first
        ("LSTM", {}, 1),
        ("GRU", {"num_layers": 2, "dropout": 0.3}, 4),
        ("GRU", {"bidirectional": True}, 16),
    ],
)
def test_a_share_is_of_the_whole_length_though_only_a_part_is_measured(
    kind, options, batch, memory
):
    theirs = getattr(torch.nn, kind)(24, 32, **options)
    x = torch.randn(400, batch, 24)
    seed = torch.randn_like(theirs(x)[0])
    ordinary = working_bytes(theirs, x, seed)
    ours = getattr(rg, kind)(24, 32, memory=memory, **options)
    try:
        found = ours.fit(x).ordinary_bytes
    except rg.BudgetError:
        pytest.skip("less than the least")
    assert found == pytest.approx(ordinary, rel=0.01)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_all_that_torch_takes_is_never_too_little(kind, bidirectional):
    """However short: a schedule may need more there than torch's own pass."""
    theirs = getattr(torch.nn, kind)(24, 40, bidirectional=bidirectional)
    ours = getattr(rg, kind)(24, 40, bidirectional=bidirectional, memory="100%")
    ours.load_state_dict(theirs.state_dict())
    for lengths in ([5, 3, 2], [1], [2, 1]):
        x = torch.nn.utils.rnn.pack_sequence([torch.randn(n, 24) for n in lengths])
        found, expected = ours(x)[0].data, theirs(x)[0].data
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_the_same_budget_gives_the_same_schedule():
    _, ours = pair(5, 7, memory="20%")
    x = torch.randn(200, 3, 5)
    schedules = [copy.deepcopy(ours).fit(x).schedule for _ in range(3)]
    assert schedules[0] == schedules[1] == schedules[2]


@pytest.mark.parametrize("kind", [rg.LSTM, rg.GRU])
def test_all_there_is_and_a_byte_are_two_budgets(kind):
    net, x = kind(5, 7, memory=1.0), torch.randn(30, 3, 5)
    net(x)
    net.memory = 1  # equal to 1.0, but a byte
    with pytest.raises(rg.BudgetError):
        net(x)


def test_a_fit_is_for_so_many_threads():
    net, x = rg.GRU(24, 32, memory="30%"), torch.randn(200, 16, 24)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            net(x)[0].sum().backward()
            net.zero_grad(set_to_none=True)
            seed = torch.ones(200, 16, 32)
            assert working_bytes(net, x, seed) <= net.fit(x).budget_bytes
            net.zero_grad(set_to_none=True)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.quick(0)
def test_half_precision_loses_nothing_by_a_budget():
    torch.manual_seed(0)
    x, errors = torch.randn(2000, 128, 12).bfloat16(), []
    exact = torch.nn.GRU(12, 10).bfloat16()
    plain = rg.GRU(12, 10, backward="scan").bfloat16()
    plain.load_state_dict(exact.state_dict())
    exact = exact.float()
    exact(x.float())[0].sum().backward()
    for memory in (None, "100%"):
        plain.memory = memory
        plain.zero_grad(set_to_none=True)
        plain(x)[0].sum().backward()
        reference = exact.weight_hh_l0.grad
        errors.append(float((plain.weight_hh_l0.grad - reference).norm() / reference.norm()))
    assert max(errors) <= torch.finfo(torch.bfloat16).eps


def test_without_gradients_it_is_torchs_own_and_holds_nothing():
    _, ours = pair(5, 7, memory=1)  # a byte would not do for a gradient
    x = torch.randn(63, 3, 5)
    with torch.no_grad():
        y, _ = ours(x)
    assert not y.requires_grad
    ours.requires_grad_(False)
    assert not ours(x)[0].requires_grad


def test_frozen_weights_and_inputs_without_a_gradient():
    theirs, ours = pair(5, 7, memory="50%", dtype=torch.float64)
    for net in (theirs, ours):
        net.weight_ih_l0.requires_grad_(False)
    x = torch.randn(63, 3, 5, dtype=torch.float64)
    for net in (theirs, ours):
        net(x)[0].square().sum().backward()
    assert ours.weight_ih_l0.grad is None
    torch.testing.assert_close(ours.weight_hh_l0.grad, theirs.weight_hh_l0.grad, rtol=1e-12, atol=0)


def test_it_copies_saves_and_loads():
    theirs, ours = pair(5, 7, memory="80%")
    ours.fit(torch.randn(20, 2, 5))  # plans are not part of what is saved
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for again in (torch.load(buffer, weights_only=False), copy.deepcopy(ours)):
        assert again.memory == "80%"
        again(torch.randn(20, 2, 5))[0].sum().backward()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert "memory='80%'" in repr(ours)


def test_bad_input():
    ours = rg.LSTM(5, 7, memory="50%")
    with pytest.raises(rg.CellError, match="has 0 steps"):
        ours(torch.randn(0, 2, 5))
    with pytest.raises(rg.CellError, match="has 4 dimensions"):
        ours(torch.randn(1, 4, 2, 5))
    with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal to input_size"):
        ours(torch.randn(4, 2, 6))
    with pytest.raises(rg.UnitError, match="unknown unit"):
        rg.LSTM(5, 7, memory="3 apples")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("memory", ["15%", "60%"])
@pytest.mark.parametrize("size", [64, 256])
def test_on_a_gpu(memory, size):
    """The vendor's own memory is more than a tenth of ordinary backpropagation's here."""
    theirs, ours = pair(64, size, memory=memory, device="cuda")
    x = torch.randn(500, 16, 64, device="cuda", requires_grad=True)
    seed = torch.randn(500, 16, size, device="cuda")
    outcomes = []
    for net in (theirs, ours):
        x.grad = None
        net(x)[0].backward(seed)
        outcomes.append([x.grad, *(p.grad for p in net.parameters())])
    assert_equal_to(outcomes[1], outcomes[0], 1e-5)
    budget = ours.fit(x).budget_bytes
    assert (
        0.5 * budget < working_bytes(ours, x, seed) <= budget
    )  # on the GPU, as it allocates there
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y, state = ours(x)
    y.backward(seed)
    grown = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    handed = sum(t.nbytes for t in (y, *state)) + sum(
        t.grad.nbytes for t in (x, *ours.parameters())
    )
    assert grown <= budget + handed


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("options", [{"proj_size": 3}, {"dtype": torch.bfloat16}], ids=str)
def test_two_directions_that_would_run_in_ranges_are_refused(options, layers):
    net = rg.LSTM(5, 7, layers, bidirectional=True, memory="60%", **options)
    x = torch.randn(60, 3, 5, dtype=net.weight_hh_l0.dtype)
    with pytest.raises(rg.BudgetError, match="or use one direction: with projections") as refused:
        net(x)
    for memory in ("100%", refused.value.minimum_bytes):
        net.memory = memory
        assert net.fit(x).ordinary
        net(x)[0].sum().backward()
    two = "for two directions, which do not run in ranges of steps: expected memory= or backward"
    with pytest.raises(rg.CellError, match=f"got memory='50%' and backward='scan' {two}"):
        rg.GRU(5, 7, layers, bidirectional=True, memory="50%", backward="scan")
    with pytest.raises(rg.CellError, match=f"got memory='50%' and backward='scan' {two}"):
        rg.fit(rg.GRU(5, 7, layers, bidirectional=True, backward="scan"), x.float(), memory="50%")
    net = rg.GRU(5, 7, layers, bidirectional=True)
    net.schedule = rg.plan(60, 3)
    with pytest.raises(rg.CellError, match=f"got a schedule {two}"):
        net(x.float())


@pytest.mark.parametrize(
    ("shape", "options", "own"),
    [
        ((40, 2, 8), {}, True),  # few steps, few states: our calls cost more than they save
        ((200, 2, 8), {}, False),
        ((100, 700, 8), {}, False),  # 2^19 states and more
        ((40, 2, 8), {"dtype": torch.float64}, False),  # oneDNN has no such LSTM
        ((9, 2, 8), {"dtype": torch.float64}, True),
        ((100, 2, 600), {}, True),  # wide
        ((100, 2, 600), {"dtype": torch.float64}, False),
    ],
    ids=str,
)
def test_with_memory_for_all_torchs_own_pass_runs_where_it_is_faster(
    shape, options, own, monkeypatch
):
    monkeypatch.setattr(nominal, "FEW_STEPS", FEW_STEPS)
    length, batch, size = shape
    x = torch.randn(length, batch, 8, **options)
    assert rg.LSTM(8, size, memory="100%", **options).fit(x).ordinary is own
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.linspace(length, 1, batch).long())
    assert rg.LSTM(8, size, memory="100%", **options).fit(packed).ordinary is (length < 10)
