"""``bptt`` gives the plain loop's gradients, all or nothing, and holds no inputs or outputs."""

import ctypes
import gc
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from retrograde.cells import bptt as streamed

D = torch.float64


class Task:
    """A cell with a read-out in its loss, and the ordinary way to its gradients."""

    def __init__(self, length, kind="gru", seed=0):
        torch.manual_seed(seed)
        self.cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind](3, 5, dtype=D)
        self.head = nn.Linear(5, 2, dtype=D)
        self.scale = torch.rand(2, dtype=D, requires_grad=True)
        self.x = torch.randn(length, 4, 3, dtype=D)
        self.targets = torch.randn(length, 4, 2, dtype=D)
        self.state = torch.randn(4, 5, dtype=D, requires_grad=True)
        if kind == "lstm":
            self.state = (self.state, torch.randn(4, 5, dtype=D, requires_grad=True))
        self.trained = [*pytree.tree_leaves(self.state), *self.cell.parameters()]
        self.trained += [*self.head.parameters(), self.scale]

    def step(self, x, state):
        state = self.cell(x, state)
        h = state[0] if isinstance(state, tuple) else state
        return {"h": h}, state

    def loss(self, t, y):
        return (self.scale * self.head(y["h"]) - self.targets[t]).square().mean()

    def ordinary(self, x):
        """The loop that one would write: total, final state, gradients (of x too, if wanted)."""
        total, state = 0, self.state
        for t in range(len(x)):
            y, state = self.step(x[t], state)
            total = total + self.loss(t, y)
        wanted = [*self.trained, *([x] if x.requires_grad else [])]
        return total.detach(), state, torch.autograd.grad(total, wanted)

    def clear(self):
        for t in self.trained:
            t.grad = None

    def run(self, inputs=None, **options):
        """Ours: total, final state, gradients."""
        self.clear()
        inputs = self.x if inputs is None else inputs
        total, state = rg.bptt(self.step, inputs, self.state, loss=self.loss, **options)
        return total, state, [t.grad for t in self.trained]


def least(call):
    with pytest.raises(rg.BudgetError) as caught:
        call(1)
    return caught.value.minimum_bytes


def assert_equal(ours, theirs):
    """Totals, states and gradients: bit for bit."""
    ours, theirs = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("length", [1, 2, 63, 200])
def test_gradients_are_bitwise_those_of_the_loop_at_every_budget(kind, length):
    task = Task(length, kind)
    x = task.x.requires_grad_()
    expected = task.ordinary(x)
    small = least(lambda memory: task.run(memory=memory))
    for memory in [None, small if length < 100 else 2 * small, max(small, 20_000), "1GiB"]:
        x.grad = None
        total, state, grads = task.run(memory=memory)
        assert total.dtype == torch.float64
        assert_equal((total, state, [*grads, x.grad]), expected)


def test_every_policy_will_do_as_a_schedule():
    task = Task(17)
    expected = task.ordinary(task.x)
    for policy, memory, sizes in [
        ("hsm", 3, {}),
        ("ism", 3, {}),
        ("msm", 12, {"alpha": 5, "beta": 4}),
        ("hsm", 1, {}),
        ("best", 7, {"alpha": 3, "beta": 3}),
    ]:
        schedule = rg.plan(17, memory, policy=policy, **sizes)
        assert_equal(task.run(schedule=schedule), expected)


def test_the_least_budget_works_and_one_byte_less_is_refused():
    task = Task(63)
    small = least(lambda memory: task.run(memory=memory))
    with pytest.raises(rg.BudgetError, match=f"63 steps need at least {small} bytes"):
        task.run(memory=small - 1)
    expected = task.ordinary(task.x)
    assert_equal(task.run(memory=small), expected)


def measured(task, **options):
    task.run(**options)
    task.clear()
    gc.collect()
    return rg.measure(lambda: task.run(**options)).working_bytes


@pytest.mark.quick(0)
def test_the_peak_is_within_the_budget_whatever_the_source():
    task = Task(21, "lstm")
    array = task.x.numpy()
    sources = {"tensor": task.x, "array": array, "function": lambda t: torch.from_numpy(array[t])}
    for source in sources.values():
        small = least(lambda memory, source=source: task.run(source, memory=memory, length=21))
        assert measured(task, inputs=source, memory=small, length=21) <= small
        assert 9_000 < measured(task, inputs=source, memory=12_000, length=21) <= 12_000


MODULES = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "proj_size": 2}),
    (rg.LSTM, {"memory": "1KiB"}),
    (nn.GRU, {"num_layers": 2, "bias": False}),
    (rg.GRU, {"backward": "scan"}),
    (nn.RNN, {"nonlinearity": "relu"}),
    (nn.RNN, {"nonlinearity": "tanh"}),
]


class ModuleTask:
    """A recurrent module, its read-out, and torch's own way to the gradients."""

    def __init__(self, module, length, **options):
        torch.manual_seed(length)
        self.net = module(3, 6, dtype=D, **options)
        layers, width = self.net.num_layers, self.net.proj_size or 6
        self.head = nn.Linear(width, 2, dtype=D)
        self.x = torch.randn(length, 4, 3, dtype=D)
        self.targets = torch.randn(length, 4, 2, dtype=D)
        self.state = torch.randn(layers, 4, width, dtype=D, requires_grad=True)
        if self.net.mode == "LSTM":
            self.state = (self.state, torch.randn(layers, 4, 6, dtype=D, requires_grad=True))
        self.trained = [*pytree.tree_leaves(self.state), *self.net.parameters()]
        self.trained += self.head.parameters()

    def loss(self, steps, y):
        assert isinstance(steps, range)
        assert len(steps) == len(y)
        wrong = self.head(y) - self.targets[steps.start : steps.stop]
        return wrong.square().mean((1, 2)).sum()

    def ordinary(self):
        kind = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(self.net.mode, nn.RNN)
        y, state = kind.forward(self.plain(kind), self.x, self.state)
        total = self.loss(range(len(self.x)), y)
        return total.detach(), state, torch.autograd.grad(total, self.trained)

    def plain(self, kind):
        """The same module as torch's, with the same parameters."""
        if type(self.net) is kind:
            return self.net
        plain = kind(3, 6, dtype=D)
        for name, p in self.net.named_parameters():
            setattr(plain, name, p)
        return plain

    def clear(self):
        for t in self.trained:
            t.grad = None

    def run(self, inputs=None, **options):
        self.clear()
        inputs = self.x if inputs is None else inputs
        total, state = rg.bptt(self.net, inputs, self.state, loss=self.loss, **options)
        return total, state, [t.grad for t in self.trained]


@pytest.mark.quick(1, every=4)
@pytest.mark.parametrize(("module", "options"), MODULES)
@pytest.mark.parametrize("length", [1, 2, 15])
def test_modules_run_in_ranges_and_give_torchs_gradients(module, options, length):
    task = ModuleTask(module, length, **options)
    expected = pytree.tree_leaves(task.ordinary())
    small = least(lambda memory: task.run(memory=memory))
    for memory in [small, 2 * small] if length > 2 else [None, small, "1GiB"]:
        ours = pytree.tree_leaves(task.run(memory=memory))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)
        if length > 2 and isinstance(memory, int):
            assert measured(task, memory=memory) <= memory


def test_a_module_without_a_state_starts_from_zeros():
    net, x = nn.LSTM(3, 5), torch.randn(9, 2, 3)
    total, (h, c) = rg.bptt(net, x, loss=lambda steps, y: y.sum(), memory="50%")
    y, (hs, cs) = net(x)
    torch.testing.assert_close((total.float(), h, c), (y.sum(), hs, cs))
    gru = nn.GRU(3, 5)
    _, h = rg.bptt(gru, x, loss=lambda steps, y: y.sum(), memory="50%")
    torch.testing.assert_close(h, gru(x)[1])


class Indexed:
    """Anything that has a length and is indexed by the step."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, t):
        return self.x[t].numpy()


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [Task, lambda length: ModuleTask(nn.LSTM, length)])
def test_inputs_come_from_anywhere(make, tmp_path):
    task = make(21)
    np.save(tmp_path / "x.npy", task.x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    big_endian = mapped.astype(">f8")
    expected = task.run(memory=20_000)
    for inputs, options in [
        (mapped, {}),
        (big_endian, {}),
        (lambda t: task.x[t], {"length": 21}),
        (Indexed(task.x), {}),
        (torch.cat([task.x, task.x]), {"length": 21}),
    ]:
        ours = task.run(inputs, memory=20_000, **options)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_inputs_come_from_the_last_step_to_the_first():
    task = Task(20)
    x = task.x.requires_grad_()
    *_, gradients = task.ordinary(x)
    for inputs in [task.x.detach(), task.x.detach().numpy()]:
        seen = []
        task.run(inputs, memory="30%", input_gradient=lambda *pair, seen=seen: seen.append(pair))
        assert [t for t, _ in seen] == list(reversed(range(20)))
        assert_equal(torch.stack([g for _, g in reversed(seen)]), gradients[-1])


def test_gradients_of_a_modules_inputs_come_in_ranges():
    task, seen = ModuleTask(nn.LSTM, 63), {}
    x = task.x.requires_grad_()
    total = task.loss(range(63), task.net(x, task.state)[0])
    (expected,) = torch.autograd.grad(total, x)

    def take(steps, gradient):
        assert not seen or steps.stop == min(seen)
        seen.update(zip(steps, gradient, strict=True))

    task.run(x.detach(), memory=60_000, input_gradient=take)
    torch.testing.assert_close(torch.stack([seen[t] for t in range(63)]), expected)


def test_any_pytree_integer_parts_and_none():
    Point = namedtuple("Point", ["value", "count"])
    linear = nn.Linear(3, 3)
    seen = []

    def cell(x, state):
        a, skip, nothing = x["pair"]
        assert nothing is None
        value = torch.tanh(linear(a) + state["p"].value)
        return (value, skip, "a label"), {"p": Point(value, state["p"].count + 1), "none": None}

    def loss(t, y):
        value, skip, _ = y
        assert int(skip) == t
        return value.square().sum()

    values = torch.randn(9, 2, 3)
    inputs = {"pair": (values, np.arange(9), None)}
    state = {"p": Point(torch.zeros(2, 3, requires_grad=True), torch.tensor(0)), "none": None}
    total, after = rg.bptt(
        cell, inputs, state, loss=loss, schedule=rg.plan(9, 2),
        input_gradient=lambda t, g: seen.append(g["pair"]),
    )  # fmt: skip
    assert after["p"].count == 9
    assert after["none"] is None
    assert all(g[1] is None and g[2] is None for g in seen)
    ours = linear.weight.grad.clone(), state["p"].value.grad, seen[0][0]
    x, h = values.clone().requires_grad_(), torch.zeros(2, 3, requires_grad=True)
    start, expected = h, 0
    for x_t in x:
        h = torch.tanh(linear(x_t) + h)
        expected = expected + h.square().sum()
    wanted = torch.autograd.grad(expected, [linear.weight, start, x])
    torch.testing.assert_close((total, ours), (expected.double(), (*wanted[:2], wanted[2][8])))


def test_what_lies_behind_states_inputs_and_captured_tensors_gets_its_gradient():
    base, origin, scale = (torch.randn(3, dtype=D, requires_grad=True) for _ in range(3))
    raw = torch.randn(12, 3, dtype=D)

    def run(call):
        derived, h0, x = base.exp(), origin * 2, raw * scale

        def cell(x, h):
            h = torch.tanh(x * derived + h)
            return h, h

        return call(cell, x, h0, lambda t, y: (y * derived).sum())

    def ordinary(cell, x, h, loss):
        total = 0
        for t in range(12):
            y, h = cell(x[t], h)
            total = total + loss(t, y)
        return torch.autograd.grad(total, [base, origin, scale])

    expected = run(ordinary)
    run(lambda cell, x, h, loss: rg.bptt(cell, x, h, loss=loss, memory="60%"))
    torch.testing.assert_close((base.grad, origin.grad, scale.grad), expected, rtol=1e-12, atol=0)


def test_gradients_accumulate_and_hooks_see_the_whole_once():
    task = Task(20)
    weight = task.cell.weight_hh
    *_, expected = task.ordinary(task.x)
    task.run(memory="20%")
    before = [t.grad for t in task.trained]
    copies = [g.clone() for g in before]
    seen, after = [], []
    first = weight.register_hook(lambda g: seen.append(g.clone()) or 3 * g)
    second = weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    rg.bptt(task.step, task.x, task.state, loss=task.loss, memory="20%")
    first.remove()
    second.remove()
    assert len(seen) == len(after) == 1
    index = next(i for i, t in enumerate(task.trained) if t is weight)
    assert torch.equal(seen[0], expected[index])
    assert torch.equal(after[0], weight.grad)
    for i, (old, copy, share) in enumerate(zip(before, copies, expected, strict=True)):
        torch.testing.assert_close(old, copy + (3 if i == index else 1) * share)


def test_dropout_is_the_same_at_every_budget_and_leaves_the_generator_as_training_does():
    linear, dropout = nn.Linear(5, 5), nn.Dropout(0.5)
    x, h0 = torch.randn(11, 2, 5), torch.zeros(2, 5, requires_grad=True)

    def cell(x, h):
        h = dropout(torch.tanh(linear(x) + h))
        return h, h

    def loss(t, y):
        return dropout(y).square().sum()

    torch.manual_seed(3)
    h, total = h0, 0
    for t in range(11):
        y, h = cell(x[t], h)
        total = total + loss(t, y)
    expected = torch.autograd.grad(total, [h0, linear.weight])
    drawn = torch.get_rng_state()
    for options in [{"schedule": rg.plan(11, 2)}, {"memory": 50_000}, {}]:
        h0.grad = linear.weight.grad = None
        torch.manual_seed(3)
        rg.bptt(cell, x, h0, loss=loss, **options)
        assert_equal((h0.grad, linear.weight.grad), expected)
        assert torch.equal(torch.get_rng_state(), drawn)


def test_a_cell_that_draws_is_within_its_budget():
    linear, dropout = nn.Linear(5, 5), nn.Dropout(0.5)
    x, h = torch.randn(30, 2, 5), torch.zeros(2, 5)

    def cell(x, h):
        h = dropout(torch.tanh(linear(x) + h))
        return h, h

    def run(memory):
        linear.zero_grad()
        return rg.bptt(cell, x, h, loss=square_sum, memory=memory)

    def peak(memory):
        run(memory)
        linear.zero_grad()
        return rg.measure(lambda: run(memory)).working_bytes

    small = least(run)
    assert peak(small) <= small
    budget = 2 * small
    for _ in range(3):  # where the same schedule would be a byte too much
        taken = peak(budget)
        assert taken <= budget
        budget = taken - 1


def square_sum(t, y):
    return y.square().sum()


def test_running_statistics_are_updated_once():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x, h):
            h = torch.tanh(self.norm(self.linear(x)) + h)
            return h, h

    theirs, ours = Normed(), Normed()
    x, h = torch.randn(10, 6, 4), torch.zeros(6, 4)
    total, state = 0, h
    for x_t in x:
        y, state = theirs(x_t, state)
        total = total + y.sum()
    total.backward()
    rg.bptt(ours, x, h, loss=lambda t, y: y.sum(), schedule=rg.plan(10, 2))
    assert_equal(list(ours.buffers()), list(theirs.buffers()))
    torch.testing.assert_close(
        [p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()]
    )


def test_autocast_is_replayed():
    task = Task(9)
    task.cell, task.head, x = nn.GRUCell(3, 5), nn.Linear(5, 2), task.x.float()
    state = torch.zeros(4, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        h, total = state, 0
        for t in range(9):
            y, h = task.step(x[t], h)
            total = total + task.loss(t, y)
    expected = torch.autograd.grad(total, [state, task.cell.weight_hh])
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        rg.bptt(task.step, x, state, loss=task.loss, schedule=rg.plan(9, 2))
    assert_equal((state.grad, task.cell.weight_hh.grad), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("has_loss", [{0}, {12}, {7, 8}, {3, 9}])
@pytest.mark.parametrize("make", [Task, lambda length: ModuleTask(nn.GRU, length)])
def test_a_step_may_have_no_loss(has_loss, make):
    task = make(13)
    whole = task.loss

    def loss(t, y):
        if not isinstance(t, range):
            return whole(t, y) if t in has_loss else None
        mine = [whole(range(k, k + 1), y[k - t.start][None]) for k in t if k in has_loss]
        return torch.stack(mine).sum() if mine else None

    task.loss = loss
    task.clear()
    total, state = 0, task.state
    for t in range(13):
        if isinstance(task, Task):
            y, state = task.step(task.x[t], state)
        else:
            y, state = task.net(task.x[t : t + 1], state)
        share = loss(t if isinstance(task, Task) else range(t, t + 1), y)
        total = total if share is None else total + share
    expected = torch.autograd.grad(total, task.trained)
    budget = least(lambda memory: task.run(memory=memory))
    for memory in [None, 2 * budget]:
        ours, _, grads = task.run(memory=memory)
        torch.testing.assert_close((ours, grads), (total.detach(), list(expected)))
        if memory is not None:
            assert measured(task, memory=memory) <= memory


@pytest.mark.parametrize("when", [0, 5, 8, 12])
def test_a_loss_that_few_steps_have_is_within_the_budget(when):
    torch.manual_seed(0)
    cell, gru, head = nn.GRUCell(3, 5), nn.GRU(3, 5), nn.Linear(5, 500)
    x, h = torch.randn(13, 2, 3), torch.zeros(2, 5)

    def step(x, h):
        h = cell(x, h)
        return h, h

    def loss(t, y):
        return head(y).square().sum() if t == when else None

    def loss_of_range(steps, y):
        return head(y[when - steps.start]).square().sum() if when in steps else None

    def run(memory, ranges):
        for p in [*cell.parameters(), *gru.parameters(), *head.parameters()]:
            p.grad = None
        if ranges:
            return rg.bptt(gru, x, loss=loss_of_range, memory=memory)
        return rg.bptt(step, x, h, loss=loss, memory=memory)

    for ranges in [False, True]:
        small = least(lambda memory, ranges=ranges: run(memory, ranges))
        run(small, ranges)
        for p in [*cell.parameters(), *gru.parameters(), *head.parameters()]:
            p.grad = None
        assert rg.measure(lambda r=ranges, m=small: run(m, r)).working_bytes <= small


def test_progress_counts_forward_and_backward_steps():
    task, schedule = Task(20), rg.plan(20, 3)
    told, runs = [], []

    def read(t):
        runs.append(t)
        return task.x[t]

    task.run(read, length=20, schedule=schedule, progress=lambda *told_: told.append(told_))
    work = schedule.cost + 20
    steps = np.diff([0, *(done for done, _ in told)])
    assert set(steps) == {1, 2}  # a step that is recorded and backpropagated at once is told once
    assert steps.sum() == work
    assert {all_ for _, all_ in told} == {work}
    assert len(runs) == schedule.cost + 3  # step 0 was read before, to learn what it is
    told.clear()
    module = ModuleTask(nn.LSTM, 63)
    module.run(memory=60_000, progress=lambda *told_: told.append(told_))
    assert told[-1][0] == told[-1][1] > 2 * 63
    assert sorted(told) == told


@pytest.mark.parametrize("where", ["cell", "loss", "inputs", "gradient", "progress"])
def test_an_exception_at_any_moment_touches_no_gradient_and_leaves_nothing_behind(where):
    task, schedule = Task(7), rg.plan(7, 2)
    expected = pytree.tree_map(torch.clone, task.run(schedule=schedule))
    kept = [t.grad.clone() for t in task.trained]
    left = ctypes.c_long()  # nothing that a cell's reruns could set back

    def failing(function, name):
        def call(*arguments):
            if name == where:
                left.value -= 1
                if left.value == 0:
                    raise KeyboardInterrupt
            return function(*arguments)

        return call

    cell, loss = failing(task.step, "cell"), failing(task.loss, "loss")
    read = failing(lambda t: task.x[t], "inputs")
    options = {
        "loss": loss,
        "length": 7,
        "schedule": schedule,
        "input_gradient": failing(lambda t, g: None, "gradient"),
        "progress": failing(lambda done, work: None, "progress"),
    }

    def attempt():
        try:
            rg.bptt(cell, read, task.state, **options)
        except KeyboardInterrupt:
            return True
        return False

    failures = 0
    for moment in range(1, 100):
        left.value = moment
        if moment != 6:
            failed = attempt()
        else:
            m = rg.measure(attempt)
            failed = m.value
            assert m.retained_bytes == 0
        if not failed:
            break
        failures += 1
        assert_equal([t.grad for t in task.trained], kept)
    assert failures >= 7
    assert_equal(task.run(schedule=schedule), expected)


def test_memory_is_returned_after_each_call():
    task = Task(30)
    task.run(memory="20%")
    task.clear()
    gc.collect()
    gc.disable()
    try:
        m = rg.measure(lambda: [task.run(memory="20%") and None for _ in range(3)])
        assert m.retained_bytes == sum(t.nbytes for t in task.trained)  # the gradients, once
    finally:
        gc.enable()


def test_tens_of_thousands_of_steps_from_a_file_in_a_hundred_kilobytes(tmp_path):
    length, budget = 20_000, 100 * 1024
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.standard_normal((length, 2, 4), dtype=np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    net, work = nn.LSTM(4, 8), []

    def loss(steps, y):
        return y.square().sum() / length

    def run(steps):
        net.zero_grad()
        progress = lambda done, all_: work.append(all_)  # noqa: E731
        return rg.bptt(net, x, loss=loss, memory=budget, length=steps, progress=progress)

    run(1500)  # fewer, since every byte is followed
    net.zero_grad()
    assert 0.8 * budget <= rg.measure(lambda: run(1500)).working_bytes <= budget
    total, _ = run(length)
    assert 2 * length < work[-1] - length <= 3 * length
    ours = [p.grad for p in net.parameters()]
    y, _ = net(torch.from_numpy(np.array(x)))
    expected = torch.autograd.grad(y.square().sum() / length, list(net.parameters()))
    torch.testing.assert_close(ours, list(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total.float(), y.square().sum() / length)


def test_what_is_learnt_is_remembered_for_as_long_as_cell_and_loss_live(monkeypatch):
    task, measured = Task(20), []
    step, loss = task.step, task.loss
    fit = streamed.fit_fastest
    monkeypatch.setattr(streamed, "fit_fastest", lambda *a: measured.append(1) or fit(*a))
    for memory in ("20%", "20%", "30%"):
        rg.bptt(step, task.x, task.state, loss=loss, memory=memory)
    assert len(measured) == 2


def call(cell=None, x=None, state=None, loss=None, **options):
    gru = nn.GRUCell(3, 3)

    def default(x, h):
        h = gru(x, h)
        return h, h

    x = torch.randn(6, 2, 3) if x is None else x
    state = torch.zeros(2, 3) if state is None else state
    return rg.bptt(cell or default, x, state, loss=loss or (lambda t, y: y.sum()), **options)


def late_parameter():
    early, late = nn.Linear(3, 1), torch.randn(3, requires_grad=True)
    return lambda t, y: (y * late).sum() if t > 2 else early(y).sum()


def changes_parameter(linear):
    def take(t, gradient):
        with torch.no_grad():
            linear.weight.add_(1)

    return take


LINEAR = nn.Linear(3, 3)
REFUSED = [
    ({"loss": lambda t, y: 1.0}, "the loss of step 0 is a float: return a scalar tensor, or None"),
    ({"loss": lambda t, y: y}, r"has the shape \(2, 3\)"),
    ({"loss": lambda t, y: y.detach().sum()}, "of step 0 does not require a gradient"),
    ({"loss": lambda t, y: y.detach().sum() if t == 4 else y.sum()}, "of step 4 does not require"),
    ({"loss": lambda t, y: None}, "no step has a loss"),
    ({"loss": 3}, "loss is a int: expected a function"),
    ({"loss": late_parameter()}, r"at steps? \d+( … \d+)? the cell uses a tensor"),
    ({"cell": lambda x, h: h}, "the cell returned Tensor: expected the pair"),
    ({"cell": lambda x, h: (LINEAR(h), h[:1])}, "changed tensor 0 of its state"),
    (
        {"cell": lambda x, h: (LINEAR(h), h + x.mul_(2))},
        "writes in place to its input, or to a parameter",
    ),
    ({"cell": lambda x, h: (h, h)}, "does not require a gradient"),
    ({"x": []}, "hold no tensor"),
    ({"x": torch.randn(0, 3)}, "0 steps: expected at least one"),
    ({"x": [1.0, 2.0]}, "cannot read inputs from a list"),
    ({"x": 3}, "cannot read inputs from a int"),
    ({"length": 7}, "the inputs have 6 steps: expected 7"),
    ({"length": 0}, "length is 0: expected at least one"),
    ({"length": 2.5}, "length is 2.5: expected a whole number"),
    ({"x": lambda t: torch.randn(2, 3)}, "a function, which does not say how many steps"),
    ({"x": lambda t: torch.randn(2, 3), "length": 4}, "the inputs draw random numbers"),
    ({"x": lambda t: LINEAR(torch.ones(2, 3)), "length": 4}, "input of step 0 requires a gradient"),
    ({"x": lambda t: torch.ones(2, 3 + t), "length": 4}, "input of step 1 is .* expected"),
    ({"x": lambda t: "abc", "length": 4}, "got a str in the input of step 0"),
    ({"x": np.zeros((4, 2, 3), dtype="U3")}, "an array of <U3, which torch has no type for"),
    (
        {
            "cell": lambda x, h: (LINEAR(x + h), h),
            "input_gradient": changes_parameter(LINEAR),
        },
        "(written to in place during the call|modified by an inplace operation)",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_cannot_be_run_is_refused_with_the_remedy(arguments, message):
    with pytest.raises((rg.CellError, RuntimeError), match=message) as caught:
        call(**arguments)
    assert isinstance(caught.value, rg.CellError) or "inplace" in str(caught.value)


def module(kind=nn.LSTM, **options):
    net = kind(3, 5, **options)
    return {"cell": net, "state": ()}


MODULES_REFUSED = [
    (nn.LSTM(3, 5, bidirectional=True), {}, "LSTM with bidirectional=True: expected one direction"),
    (nn.GRU(3, 5, 2, dropout=0.5), {}, "dropout=0.5 between layers"),
    (nn.RNN(3, 5, batch_first=True), {}, "batch_first=True"),
    (nn.LSTM(3, 5), {"x": torch.randn(6, 3)}, r"is \(3,\): expected one tensor \(B, 3\)"),
    (nn.LSTM(3, 5), {"x": torch.randn(6, 2, 4)}, r"is \(2, 4\): expected one tensor \(B, 3\)"),
    (nn.LSTM(3, 5), {"x": torch.randn(6, 2, 3).double()}, "the input is torch.float64 on cpu"),
    (nn.GRU(3, 5), {"state": torch.zeros(1, 3, 5)}, r"expected \[\(1, 2, 5\)\]"),
    (
        nn.GRU(3, 5),
        {"loss": lambda t, y: y.square().mean()},
        "expected the sum, since it depends",
    ),
    (nn.GRU(3, 5), {"loss": lambda t, y: functional.dropout(y).sum()}, "draws random numbers"),
]


@pytest.mark.parametrize(("net", "arguments", "message"), MODULES_REFUSED)
def test_modules_that_cannot_be_run_in_ranges_are_refused(net, arguments, message):
    given = {"x": torch.randn(6, 2, 3), "state": None, "loss": lambda t, y: y.sum()} | arguments
    with pytest.raises(rg.CellError, match=message):
        rg.bptt(net, given["x"], given["state"], loss=given["loss"])


def test_a_modules_parameter_first_used_at_a_later_step_is_refused():
    late = torch.randn(5, requires_grad=True)

    def loss(steps, y):
        return (y * late).sum() if steps.start > 2 else y.sum()

    with pytest.raises(rg.CellError, match="the loss uses a tensor that requires a gradient"):
        rg.bptt(nn.GRU(3, 5), torch.randn(9, 2, 3), loss=loss, schedule=rg.plan(9, 2))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, rg.RNN])
def test_a_module_whose_call_does_more_than_its_forward_is_refused(module, change):
    net, x = module(3, 5), torch.randn(6, 2, 3)
    with Changed(change, net), pytest.raises(rg.CellError, match=f"does not run a .*a {change}:"):
        rg.bptt(net, x, loss=lambda steps, y: y.sum(), memory="60%")
    assert net.weight_hh_l0.grad is None


def test_a_module_with_its_own_forward_is_a_cell():
    class Own(nn.GRU):
        def forward(self, x, h):
            y, h = super().forward(x[None], h)
            return y[0], h

    net, x = Own(3, 5), torch.randn(6, 2, 3)
    rg.bptt(net, x, torch.zeros(1, 2, 5), loss=lambda t, y: y.sum(), schedule=rg.plan(6, 2))
    ours, net.weight_hh_l0.grad = net.weight_hh_l0.grad, None
    nn.GRU.forward(net, x)[0].sum().backward()
    torch.testing.assert_close(ours, net.weight_hh_l0.grad)


def test_without_gradients_it_is_refused():
    with torch.no_grad(), pytest.raises(rg.RetrogradeError, match="gradients are disabled"):
        call()


def test_bad_budgets_and_schedules_are_refused_before_any_work():
    def cell(x, h):
        raise AssertionError("called")

    with pytest.raises(rg.UnitError, match="unknown unit"):
        call(cell, memory="3 apples")
    with pytest.raises(rg.ScheduleError, match="both memory and schedule"):
        call(cell, memory=0.5, schedule=rg.plan(6, 2))
    with pytest.raises(rg.ScheduleError, match="for 5 steps, but the inputs have 6"):
        call(schedule=rg.plan(5, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("memory", ["50%", "20%", "10%"])
def test_main_memory_is_read_on_a_gpu(memory):
    """The loss keeps the card busy, so that a copy that does not wait would be seen."""
    found = []
    for where in ("cuda", "cpu"):
        torch.manual_seed(0)
        module = nn.GRU(64, 64, device="cuda")
        x = torch.randn(2000, 8, 64, device="cuda").to(where)

        def loss(steps, y):
            torch.cuda._sleep(2_000_000)
            return y.square().sum()

        rg.bptt(module, x, loss=loss, memory=memory)
        found.append([p.grad for p in module.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()


def working_bytes(run, *leaves):
    run()  # what is fitted within a measurement is fitted again
    for t in leaves:
        t.grad = None
    return rg.measure(run).working_bytes


@pytest.mark.parametrize(
    ("kind", "sizes", "length"),
    [(nn.GRU, (24, 1), 17), (nn.RNN, (70, 3), 7), (nn.LSTM, (5, 3), 9)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_trying_a_loss_keeps_the_least_budget(kind, sizes, length, dtype):
    """Two steps are tried, of which the inputs may be most."""
    net, x = kind(*sizes, dtype=dtype), torch.randn(length, 19, sizes[0], dtype=dtype)
    state = torch.zeros(1, 19, sizes[1], dtype=dtype)
    state = (state, state.clone()) if kind is nn.LSTM else state

    def run(memory):
        loss = {"loss": lambda steps, y: y.square().sum(), "length": length}
        return rg.bptt(net, lambda t: x[t], state, memory=memory, **loss)

    with pytest.raises(rg.BudgetError) as refused:
        run(1)
    least = refused.value.minimum_bytes
    assert working_bytes(lambda: run(least), *net.parameters()) <= least


def test_numbers_of_steps_count_in_long_ranges():
    """At the end of a range's backward pass they, and the gradients of its inputs, are most."""
    torch.manual_seed(0)
    cell, x = nn.LSTMCell(5, 1), torch.randn(300, 2, 5, requires_grad=True)
    state = torch.randn(2, 1), torch.randn(2, 1)

    def step(x, state):
        state = cell(x, state)
        return state[0], state

    def run():
        return rg.bptt(step, x, state, loss=lambda t, y: y.square().sum(), memory=8004)

    assert working_bytes(run, x, *cell.parameters()) <= 8004
