"""``unroll`` gives ordinary autograd's gradients bit for bit; what cannot be exact is refused."""

import ctypes
import gc
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import retrograde as rg

POLICIES = [
    ("hsm", 3, {}),
    ("ism", 3, {}),
    ("msm", 12, {"alpha": 5, "beta": 4}),
    ("msm", 9, {"alpha": 3}),
    ("store-all", None, {}),
    ("hsm", 1, {}),
    ("best", 7, {"alpha": 3, "beta": 3}),
    ("best", 9, {"alpha": 1}),
]


def gru_cell(dtype):
    cell = nn.GRUCell(3, 5, dtype=dtype)

    def step(x, h):
        h = cell(x, h)
        return h, h

    return step, torch.randn(4, 5, dtype=dtype, requires_grad=True), list(cell.parameters())


def lstm_cell(dtype):
    cell = nn.LSTMCell(3, 5, dtype=dtype)

    def step(x, state):
        h, c = cell(x, state)
        return {"h": h, "twice": 2 * c}, (h, c)

    h, c = (torch.randn(4, 5, dtype=dtype, requires_grad=True) for _ in range(2))
    return step, (h, c), list(cell.parameters())


def loop(cell, x, state):
    """Ordinary backpropagation through time, as one would write it."""
    outputs = []
    for x_t in pytree.tree_map(lambda t: list(t.unbind()), x):
        y, state = cell(x_t, state)
        outputs.append(y)
    return pytree.tree_map(lambda *ys: torch.stack(ys), *outputs), state


def gradients(outputs, state, wanted):
    """The gradient of a loss in which every output and every final state has a part of its own."""
    torch.manual_seed(7)
    leaves = pytree.tree_leaves((outputs, state))
    leaves = [t for t in leaves if t.requires_grad]
    seeds = [torch.randn_like(t) for t in leaves]
    return torch.autograd.grad(leaves, wanted, seeds, allow_unused=True)


def assert_bitwise(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("make", [gru_cell, lstm_cell])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 17, 63])
def test_gradients_are_bitwise_those_of_autograd_whatever_the_policy(make, dtype, length):
    torch.manual_seed(length)
    cell, state, parameters = make(dtype)
    x = torch.randn(length, 4, 3, dtype=dtype, requires_grad=True)
    wanted = [x, *pytree.tree_leaves(state), *parameters]
    y, s = loop(cell, x, state)
    expected = gradients(y, s, wanted)
    for policy, memory, sizes in POLICIES:
        schedule = rg.plan(length, memory, policy=policy, **sizes)
        ours, after = rg.unroll(cell, x, state, schedule=schedule)
        assert_bitwise(pytree.tree_leaves((ours, after)), pytree.tree_leaves((y, s)))
        assert_bitwise(gradients(ours, after, wanted), expected)


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_a_thousand_steps_from_the_least_budget_to_more_than_enough(dtype):
    torch.manual_seed(0)
    cell, state, parameters = gru_cell(dtype)
    x = torch.randn(1000, 4, 3, dtype=dtype, requires_grad=True)
    wanted = [x, state, *parameters]
    y, s = loop(cell, x, state)
    expected = gradients(y, s, wanted)
    for memory in ["1%", "5%", 0.6, 1.0, "1GiB", None]:
        ours, after = rg.unroll(cell, x, state, memory=memory)
        assert_bitwise(gradients(ours, after, wanted), expected)


def test_the_least_budget_works_and_one_byte_less_is_refused():
    torch.manual_seed(0)
    cell, state, parameters = gru_cell(torch.float64)
    x = torch.randn(63, 4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(rg.BudgetError, match=r"need at least (\d+) bytes") as caught:
        rg.unroll(cell, x, state, memory=1)
    least = caught.value.minimum_bytes
    assert str(least) in str(caught.value)
    assert "raise the budget" in str(caught.value)
    y, s = loop(cell, x, state)
    wanted = [x, state, *parameters]
    ours, after = rg.unroll(cell, x, state, memory=least)
    assert_bitwise(gradients(ours, after, wanted), gradients(y, s, wanted))
    with pytest.raises(rg.BudgetError):
        rg.unroll(cell, x, state, memory=least - 1)


@pytest.mark.quick(0)
def test_gradcheck_passes():
    cell, state, _ = gru_cell(torch.float64)
    x = torch.randn(7, 4, 3, dtype=torch.float64, requires_grad=True)
    schedule = rg.plan(7, 2)
    assert torch.autograd.gradcheck(
        lambda x, h: rg.unroll(cell, x, h, schedule=schedule), (x, state)
    )


def peak_of(cell, x, state, memory):
    """Working bytes, with the output gradient made before and every gradient kept."""
    y, _ = loop(cell, x.detach(), state)
    seed = torch.randn_like(y)

    def call():
        y, after = rg.unroll(cell, x, state, memory=memory)
        torch.autograd.backward(y, seed)
        return y, after

    call()
    for t in [x, state, *cell.parameters()]:
        t.grad = None
    return rg.measure(call).working_bytes


class Gru(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.cell = nn.GRUCell(size, size)

    def forward(self, x, h):
        h = self.cell(x, h)
        return h, h


@pytest.mark.quick(0)
def test_the_peak_is_within_the_budget_and_uses_it():
    torch.manual_seed(0)
    cell, length = Gru(32), 200
    x = torch.randn(length, 8, 32, requires_grad=True)
    state = torch.zeros(8, 32, requires_grad=True)
    with pytest.raises(rg.BudgetError) as caught:
        rg.unroll(cell, x, state, memory=1)
    least, ordinary = caught.value.minimum_bytes, peak_of(cell, x, state, None)
    short = x[:40].detach().requires_grad_()  # of more steps each would be run very often
    assert 0.85 * least <= peak_of(cell, short, state, least) <= least
    for budget in [2 * least, *(ordinary * n // 100 for n in (5, 20, 40, 60))]:
        assert 0.85 * budget <= peak_of(cell, x, state, budget) <= budget


@pytest.mark.parametrize("hands_on", ["itself", "detached"])
def test_gradients_that_nobody_asks_for_are_not_computed(hands_on):
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    x, h = torch.randn(9, 1, 64), torch.randn(1, 64, requires_grad=True)

    def cell(x_t, h):
        h = torch.tanh(layer(x_t + h))
        return h, h.detach() if hands_on == "detached" else h

    def gradient(y):
        return torch.autograd.grad(y, [h], torch.ones(9, 1, 64))

    def call(memory):
        return gradient(rg.unroll(cell, x, h, memory=memory)[0])

    with pytest.raises(rg.BudgetError) as refusal:
        call(1)
    found = call(refusal.value.minimum_bytes)
    assert_bitwise(found, gradient(loop(cell, x, h)[0]))
    assert rg.measure(lambda: call(refusal.value.minimum_bytes)).working_bytes < layer.weight.nbytes


def test_any_pytree_integer_parts_and_none():
    Point = namedtuple("Point", ["value", "count"])
    linear = nn.Linear(3, 3)

    def cell(x, state):
        a, skip = x
        value = torch.tanh(linear(a) + state["p"].value)
        point = Point(value, state["p"].count + 1)
        return (value, point.count, skip), {"p": point, "nothing": None}

    x = (torch.randn(9, 2, 3, requires_grad=True), torch.arange(9))
    state = {"p": Point(torch.zeros(2, 3, requires_grad=True), torch.tensor(0)), "nothing": None}
    (values, counts, skip), after = rg.unroll(cell, x, state, schedule=rg.plan(9, 2))
    assert counts.tolist() == list(range(1, 10))
    assert skip.tolist() == list(range(9))
    assert after["p"].count == 9
    assert after["nothing"] is None
    values.square().sum().backward()
    ours = x[0].grad, linear.weight.grad, state["p"].value.grad

    steps, s = [], state["p"].value.detach().requires_grad_()
    h = s
    x0 = x[0].detach().requires_grad_()
    weight = linear.weight.detach().requires_grad_()
    for x_t in x0:
        h = torch.tanh(nn.functional.linear(x_t, weight, linear.bias) + h)
        steps.append(h)
    torch.stack(steps).square().sum().backward()
    assert_bitwise(ours, (x0.grad, weight.grad, s.grad))


def test_captured_tensors_get_their_gradients_leaf_or_not():
    base = torch.randn(3, requires_grad=True)
    scale = torch.randn(3, requires_grad=True)
    derived = base.exp()

    def cell(x, h):
        h = torch.tanh(x * derived + h * scale)
        return h, h

    x, h = torch.randn(12, 3), torch.zeros(3)
    expected = torch.autograd.grad(loop(cell, x, h)[0].sum(), [base, scale], retain_graph=True)
    ours = torch.autograd.grad(
        rg.unroll(cell, x, h, schedule=rg.plan(12, 2))[0].sum(), [base, scale]
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_a_captured_tensor_without_numbers_is_not_one_that_is_written_to():
    holes = torch.tensor([1.0, float("nan"), 2.0])

    def cell(x, h):
        h = (x * holes.nan_to_num() + h).tanh()
        return h, h

    x = torch.randn(12, 3, requires_grad=True)
    expected = torch.autograd.grad(loop(cell, x, torch.zeros(3))[0].sum(), x)
    y, _ = rg.unroll(cell, x, torch.zeros(3), schedule=rg.plan(12, 2))
    assert_bitwise(torch.autograd.grad(y.sum(), x), expected)


def test_a_step_runs_by_the_kernels_that_run_when_it_is_recorded():
    """Without gradients, torch takes another kernel for attention whose bias wants a gradient."""
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)

    def cell(x, h):
        q = (x + h).unflatten(-1, (2, 4)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=2 * bias)
        h = mixed.transpose(1, 2).flatten(2).tanh()
        return h, h

    x, h = torch.randn(12, 3, 9, 8), torch.zeros(3, 9, 8)
    expected = torch.autograd.grad(loop(cell, x, h)[0].square().sum(), bias)
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(12, 2))
    assert_bitwise(torch.autograd.grad(y.square().sum(), bias), expected)


def test_a_captured_tensor_that_cannot_be_found_is_refused():
    base = torch.randn(3, requires_grad=True)
    hidden = [{"deep": [{"deeper": [{"deepest": base.exp()}]}]}]

    def cell(x, h):
        h = x * hidden[0]["deep"][0]["deeper"][0]["deepest"] + h
        return h, h

    with pytest.raises(rg.CellError, match="computed outside of it \\(by ExpBackward0\\)"):
        rg.unroll(cell, torch.randn(4, 3), torch.zeros(3), memory="60%")


def test_a_parameter_first_used_at_a_later_step_is_refused():
    early, late = (torch.randn(3, requires_grad=True) for _ in range(2))

    def cell(x, state):
        h, k = state
        h = torch.tanh(x + h * (late if k > 2 else early))
        return h, (h, k + 1)

    state = (torch.zeros(3), torch.tensor(0))
    with pytest.raises(
        rg.CellError, match=r"at steps? \d+( … \d+)? the cell uses a tensor that requires"
    ):
        rg.unroll(cell, torch.randn(6, 3), state, schedule=rg.plan(6, 2))[0].sum().backward()


@pytest.mark.parametrize("memory", [2, 6])
def test_dropout_belongs_to_the_step_and_leaves_the_generator_as_ordinary_training_does(memory):
    linear, dropout = nn.Linear(5, 5), nn.Dropout(0.5)

    def cell(x, h):
        h = dropout(torch.tanh(linear(x) + h))
        return h, h

    x = torch.randn(11, 2, 5, requires_grad=True)
    h = torch.zeros(2, 5, requires_grad=True)
    torch.manual_seed(3)
    y, _ = loop(cell, x, h)
    expected = torch.autograd.grad(y.square().sum(), [x, h, linear.weight])
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(11, memory))
    ours = torch.autograd.grad(y.square().sum(), [x, h, linear.weight])
    assert_bitwise(ours, expected)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_random_numbers_only_at_later_steps_are_noticed():
    def cell(x, state):
        h, k = state
        h = h * x + (torch.randn(3) if k > 2 else 0)
        return h, (h, k + 1)

    x = torch.randn(6, 3, requires_grad=True)
    y, _ = rg.unroll(cell, x, (torch.zeros(3), torch.tensor(0)), schedule=rg.plan(6, 2))
    with pytest.raises(rg.RetrogradeError, match="computed something else when it ran again"):
        y.sum().backward()


def test_running_statistics_are_updated_once():
    def make():
        torch.manual_seed(5)
        return nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = make()

        def forward(self, x, h):
            h = torch.tanh(self.parts[1](self.parts[0](x)) + h)
            return h, h

    theirs, ours = Normed(), Normed()
    x, h = torch.randn(10, 6, 4), torch.zeros(6, 4)
    loop(theirs, x, h)[0].sum().backward()
    rg.unroll(ours, x, h, schedule=rg.plan(10, 2))[0].sum().backward()
    assert_bitwise(list(ours.buffers()), list(theirs.buffers()))
    assert_bitwise([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_autocast_is_replayed():
    cell, state, parameters = gru_cell(torch.float32)
    x = torch.randn(9, 4, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        y, s = loop(cell, x, state)
        ours, after = rg.unroll(cell, x, state, schedule=rg.plan(9, 2))
    wanted = [x, state, *parameters]
    assert_bitwise(gradients(ours, after, wanted), gradients(y, s, wanted))


def test_hooks_see_the_whole_gradient_once():
    cell, state, parameters = gru_cell(torch.float64)
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    seen = []
    parameters[0].register_hook(lambda g: seen.append(g.clone()) or 2 * g)
    rg.unroll(cell, x, state, schedule=rg.plan(9, 2))[0].sum().backward()
    assert len(seen) == 1
    assert torch.equal(parameters[0].grad, 2 * seen[0])


def test_the_graph_may_be_used_twice_when_it_is_retained():
    cell, state, parameters = gru_cell(torch.float64)
    x = torch.randn(9, 4, 3, dtype=torch.float64, requires_grad=True)
    y, _ = rg.unroll(cell, x, state, schedule=rg.plan(9, 2))
    wanted = [x, state, *parameters]
    first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
    assert_bitwise(torch.autograd.grad(y.sum(), wanted, retain_graph=True), first)


def test_an_input_changed_before_the_backward_pass_is_noticed():
    cell, state, _ = gru_cell(torch.float64)
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    y, _ = rg.unroll(cell, x, state, schedule=rg.plan(9, 2))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_gradients_nothing_is_planned_or_held():
    cell = Gru(16).requires_grad_(False)
    x, h = torch.randn(500, 8, 16), torch.zeros(8, 16)
    gc.collect()
    m = rg.measure(lambda: rg.unroll(cell, x, h, memory=1))  # a byte would not do for a gradient
    assert not m.value[0].requires_grad
    assert m.retained_bytes == m.value[0].nbytes + m.value[1].nbytes
    assert m.working_bytes < 100 * h.nbytes
    with torch.no_grad():
        y, _ = rg.unroll(Gru(16), x, h, memory=1)
    assert not y.requires_grad


def test_an_exception_in_the_cell_leaves_nothing_behind():
    fail_at = ctypes.c_long(5)  # nothing that reruns would set back
    linear = nn.Linear(3, 3)

    def cell(x, state):
        h, k = state
        if k == fail_at.value:
            raise KeyboardInterrupt
        h = torch.tanh(linear(x) + h)
        return h, (h, k + 1)

    x, state = torch.randn(8, 3), (torch.zeros(3), torch.tensor(0))
    with pytest.raises(KeyboardInterrupt):
        rg.unroll(cell, x, state, schedule=rg.plan(8, 2))
    fail_at.value = -1
    y, _ = rg.unroll(cell, x, state, schedule=rg.plan(8, 2))
    fail_at.value = 3
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward(retain_graph=True)
    fail_at.value = -1
    y.sum().backward()
    ours, linear.weight.grad = linear.weight.grad, None
    loop(cell, x, state)[0].sum().backward()
    assert torch.equal(ours, linear.weight.grad)


def test_memory_is_returned_after_each_iteration():
    cell, state, _ = gru_cell(torch.float32)

    def iteration():
        x = torch.randn(50, 4, 3, requires_grad=True)
        rg.unroll(cell, x, state, memory="20%")[0].sum().backward()

    iteration()
    gc.collect()
    gc.disable()
    try:
        assert rg.measure(lambda: [iteration() for _ in range(3)] and None).retained_bytes == 0
    finally:
        gc.enable()


BAD = [
    (lambda x, h: h, "the cell returned Tensor: expected the pair"),
    (lambda x, h: (h, h, h), "the cell returned a tuple of 3: expected the pair"),
    (lambda x, h: (h, (h, h)), "changed the structure of its state"),
    (lambda x, h: (h, h[:1]), r"changed tensor 0 of its state: expected shape \(2, 3\)"),
    (lambda x, h: (h, h.double()), "expected shape .* torch.float32 .* got .* torch.float64"),
    (lambda x, h: (1.0, h), "got a float in the output of the cell"),
    (lambda x, h: (h, x.mul_(2)), "writes in place to its input, or to a parameter"),
]


@pytest.mark.parametrize(("cell", "message"), BAD)
def test_a_cell_that_cannot_be_run_is_refused_with_the_remedy(cell, message):
    memory = "60%" if "writes" in message else None  # a plain loop may do that
    with pytest.raises(rg.CellError, match=message):
        rg.unroll(cell, torch.randn(4, 2, 3), torch.randn(2, 3, requires_grad=True), memory=memory)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "hold no tensor"),
        ([torch.randn(3), 2.0], "got a float in the inputs"),
        ([torch.randn(3, 1), torch.randn(4, 1)], "expected the same number of steps"),
        ([torch.tensor(1.0)], "expected the same number of steps"),
        ([torch.randn(0, 3)], "0 steps: expected at least one"),
    ],
)
def test_bad_inputs_are_refused(inputs, message):
    with pytest.raises(rg.CellError, match=message):
        rg.unroll(lambda x, h: (h, h), inputs, torch.zeros(3))


def test_bad_budgets_and_schedules_are_refused_before_any_work():
    def cell(x, h):
        raise AssertionError("called")

    x, h = torch.randn(4, 3), torch.zeros(3)
    with pytest.raises(rg.UnitError, match="unknown unit"):
        rg.unroll(cell, x, h, memory="3 apples")
    with pytest.raises(
        rg.ScheduleError, match="for 5 steps, but the inputs have 4: plan one for 4"
    ):
        rg.unroll(cell, x, h, schedule=rg.plan(5, 2))
    with pytest.raises(rg.ScheduleError, match="both memory and schedule"):
        rg.unroll(cell, x, h, memory=0.5, schedule=rg.plan(4, 2))


def test_all_there_is_and_a_byte_are_two_budgets():
    cell, x, h = torch.nn.GRUCell(3, 4), torch.randn(20, 2, 3), torch.zeros(2, 4)

    def step(x, h):
        h = cell(x, h)
        return h, h

    rg.unroll(step, x, h, memory=1.0)
    with pytest.raises(rg.BudgetError):
        rg.unroll(step, x, h, memory=1)


@pytest.mark.parametrize("memory", ["1MiB", "90%", None])
def test_a_batch_without_samples(memory):
    cell = torch.nn.GRUCell(3, 4)

    def step(x, h):
        h = cell(x, h)
        return h, h

    outputs, last = rg.unroll(step, torch.ones(50, 0, 3), torch.zeros(0, 4), memory=memory)
    outputs.sum().backward()
    assert outputs.shape == (50, 0, 4)
    assert last.shape == (0, 4)
    assert not any(p.grad.any() for p in cell.parameters())
