"""A rerun is the first run, whatever a program does in between; nothing is over budget in silence.

Each case is tried in ``unroll``, in ``bptt`` and in ``Sequential`` where it applies, and compared
with the plain loop, or with torch's own ``Sequential``.
"""

import functools
import io
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import retrograde as rg
from oracles.loops import assert_bitwise, loop
from retrograde.cells import bptt as streaming
from retrograde.cells import unroll as unrolling

DOUBLE = torch.float64
STEPS, SAMPLES, SIZE = 40, 4, 6
SCALE, CALLS = 1.0, 0


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS, SAMPLES, SIZE, generator=generator, dtype=DOUBLE)
    return x, torch.zeros(SAMPLES, SIZE, dtype=DOUBLE)


def linear():
    torch.manual_seed(1)
    return nn.Linear(SIZE, SIZE, dtype=DOUBLE)


def masks(*shape):
    generator = torch.Generator().manual_seed(2)
    return [torch.rand(*shape, generator=generator, dtype=DOUBLE) for _ in range(2)]


class Scaled(nn.Module):
    """A cell (x, h) and a layer (x), whose attributes somebody replaces."""

    def __init__(self, layer=nn.Identity):
        super().__init__()
        self.net, self.layer = linear(), layer()
        self.mask, self.scale, self.factors = masks(SIZE)[0], 1.0, {"by": 1.0}

    def forward(self, x, h=0.0):
        h = torch.tanh(self.layer(self.net(x + h))) * self.mask * self.scale * self.factors["by"]
        return (h, h) if isinstance(x, torch.Tensor) and self.as_cell else h

    as_cell = True


def scaled(**change):
    def make():
        cell = Scaled()

        def mutate():
            for name, value in change.items():
                setattr(cell, name, value)

        return cell, mutate

    return make


def in_a_dict():
    cell = Scaled()
    return cell, lambda: cell.factors.update(by=3.0)


def of_a_class():
    class Local(Scaled):
        power = 1

        def forward(self, x, h=0.0):
            y, h = super().forward(x, h)
            return y**self.power, h**self.power

    return Local(), lambda: setattr(Local, "power", 3)


def bound_late():
    """A closure in a loop over batches."""
    net, (mask, other) = linear(), masks(SIZE)

    def cell(x, h):
        h = torch.tanh(net(x + h)) * mask
        return h, h

    def mutate():
        nonlocal mask
        mask = other

    cell.net = net
    return cell, mutate


def in_globals():
    net = linear()

    def cell(x, h):
        h = torch.tanh(net(x + h)) * SCALE
        return h, h

    cell.net = net
    return cell, lambda: globals().update(SCALE=3.0)


def in_defaults():
    net = linear()

    def cell(x, h, scale=(1.0,)):
        h = torch.tanh(net(x + h)) * scale[0]
        return h, h

    def mutate():
        cell.__defaults__ = ((3.0,),)

    cell.net = net
    return cell, mutate


def in_a_helper():
    net, factors = linear(), [1.0]

    def helper(h):
        return torch.tanh(h) * factors[0]

    def cell(x, h):
        h = helper(net(x + h))
        return h, h

    cell.net = net
    return cell, lambda: factors.__setitem__(0, 3.0)


def in_a_property():
    class Box:
        kept = 1.0

        @property
        def gain(self):
            return self.kept

    net, box = linear(), Box()

    def cell(x, h):
        h = torch.tanh(net(x + h)) * box.gain
        return h, h

    cell.net = net
    return cell, lambda: setattr(box, "kept", 3.0)


def another_mode(layer, train):
    def make():
        cell = Scaled(layer)
        cell.train(not train)
        return cell, lambda: cell.train(train)

    return make


def hooked():
    cell = Scaled()
    handle = cell.net.register_forward_hook(lambda module, inputs, output: 3 * output)
    return cell, handle.remove


def replaced_weight():
    cell = Scaled()
    return cell, lambda: setattr(cell.net, "bias", nn.Parameter(torch.ones(SIZE, dtype=DOUBLE)))


def batch_norm():
    return nn.BatchNorm1d(SIZE, dtype=DOUBLE)


MODES = {
    "dropout, to evaluation": another_mode(lambda: nn.Dropout(0.5), False),
    "dropout, to training": another_mode(lambda: nn.Dropout(0.5), True),
    "batch normalization, to evaluation": another_mode(batch_norm, False),
    "batch normalization, to training": another_mode(batch_norm, True),
    "a parameter": replaced_weight,
}

#: What somebody may replace before the backward pass.
REPLACED = {
    "a mask of a module": scaled(mask=masks(SIZE)[1]),
    "a number of a module": scaled(scale=3.0),
    "a number in a dict": in_a_dict,
    "a class attribute": of_a_class,
    "a variable of a closure": bound_late,
    "a global": in_globals,
    "a default": in_defaults,
    "what a helper reads": in_a_helper,
    "what a property reads": in_a_property,
    "a hook": hooked,
}
OTHERWISE = "computed something else when it ran again"


def gradient(run, cell, mutate, parameters):
    """A pass, something happening between forward and backward; what is left."""
    x, h = data()
    x.requires_grad_()
    torch.manual_seed(3)
    y, last = run(cell, x, h)
    loss = y.square().sum() + last.sum()
    mutate()
    return [y.detach(), *torch.autograd.grad(loss, [x, *parameters])]


@pytest.fixture(autouse=True)
def scale():
    yield
    globals().update(SCALE=1.0)


@pytest.mark.parametrize("memory", ["schedule", "90%"])
@pytest.mark.parametrize("what", MODES)
def test_modes_and_parameters_are_those_of_the_forward_pass(what, memory):
    def ours(cell, x, h):
        asked = {"schedule": rg.plan(STEPS, 3)} if memory == "schedule" else {"memory": memory}
        return rg.unroll(cell, x, h, **asked)

    found = []
    for run in (loop, ours):
        cell, mutate = MODES[what]()
        net = cell.net
        found.append(gradient(run, cell, mutate, [net.weight, net.bias]))
        modes = [m.training for m in cell.modules()]
        assert modes == [cell.training] * len(modes)
    assert_bitwise(found[1][:2], found[0][:2])
    for a, b in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("what", REPLACED)
def test_what_a_cell_reads_must_not_be_replaced_before_the_backward_pass(what):
    cell, mutate = REPLACED[what]()
    x, h = data()
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(STEPS, 3))
    mutate()
    with pytest.raises(rg.RetrogradeError, match=OTHERWISE):
        y.sum().backward()
    assert cell.net.weight.grad is None


def test_the_likeliest_cause_is_named():
    cell, mutate = scaled(scale=3.0)()
    y, _ = rg.unroll(cell, *data(), schedule=rg.plan(STEPS, 3))
    mutate()
    with pytest.raises(rg.RetrogradeError, match=r"perhaps since Scaled\.scale changed"):
        y.sum().backward()


@pytest.mark.parametrize("what", REPLACED)
def test_what_a_layer_reads_must_not_be_replaced_before_the_backward_pass(what):
    """A rerun that ends before it reads what was replaced needs no error: its gradient is exact."""
    x = torch.randn(90, SIZE, dtype=DOUBLE, requires_grad=True)
    found, error = [], None
    for container in (nn.Sequential, functools.partial(rg.Sequential, memory="80%")):
        globals().update(SCALE=1.0)
        cells = [REPLACED[what]() for _ in range(8)]
        loss = container(*(Layer(cell) for cell, _ in cells))(x).square().sum()
        for _, mutate in cells if found else ():
            mutate()
        try:
            found.append(torch.autograd.grad(loss, [x, *(cell.net.weight for cell, _ in cells)]))
        except rg.RetrogradeError as raised:
            error = raised
    if error is None:
        assert_bitwise(*found)
    else:
        assert OTHERWISE in str(error)


@pytest.mark.parametrize("what", MODES)
def test_a_layer_runs_again_in_the_mode_of_the_forward_pass(what):
    found = []
    for ours in (False, True):
        torch.manual_seed(5)
        cells = [MODES[what]() for _ in range(8)]
        layers = [Layer(cell) for cell, _ in cells]
        net = rg.Sequential(*layers, memory="80%") if ours else nn.Sequential(*layers)
        x = torch.randn(90, SIZE, dtype=DOUBLE, requires_grad=True)
        y = net(x)
        parameters = [cell.net.weight for cell, _ in cells]
        for _, mutate in cells:
            mutate()
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])])
    assert_bitwise(found[1], found[0])


class Model(nn.Module):
    """A model whose method is the cell: what only the rest of the model reads may change."""

    def __init__(self):
        super().__init__()
        self.net, self.head, self.norm = linear(), linear(), batch_norm()
        self.hidden, self.outputs, self.gain = None, [], 1.0

    def step(self, x, h):
        h = torch.tanh(self.net(x + h)) * self.factor()
        return h, h

    def factor(self):
        return self.gain

    def forward(self, x, memory=None, closure=False):
        state = torch.zeros(SAMPLES, SIZE, dtype=DOUBLE) if self.hidden is None else self.hidden
        step = (lambda x, h: self.step(x, h)) if closure else self.step
        y, last = rg.unroll(step, x, state, memory=memory)
        self.hidden = last.detach()
        self.outputs.append(float(last.sum()))
        return self.norm(self.head(y).flatten(0, 1))


@pytest.mark.parametrize("closure", [False, True])
def test_what_only_the_rest_of_a_model_reads_may_change(closure):
    found = []
    for memory in (None, "40%"):
        torch.manual_seed(9)
        model, (x, _) = Model(), data()
        for _ in range(2):
            loss = model(x, memory, closure).square().sum()
            found.append(torch.autograd.grad(loss, model.net.weight)[0])
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-9, atol=1e-12)
    loss = model(x, "40%", closure).square().sum()
    model.gain = 2.0
    with pytest.raises(rg.RetrogradeError, match=r"Model\.gain changed"):
        loss.backward()


class Layer(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        if not isinstance(cell, nn.Module):
            self.net = getattr(cell, "net", None)

    def forward(self, x):
        return self.cell(x, torch.zeros((), dtype=DOUBLE))[0]


@pytest.mark.parametrize("held", ["buffer", "captured", "frozen"])
def test_a_tensor_changed_in_place_raises_if_it_is_read_and_not_otherwise(held):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear()
            for name, value in (("read", masks(SIZE)[0]), ("unread", masks(SIZE)[1])):
                if held == "buffer":
                    self.register_buffer(name, value)
                elif held == "frozen":
                    setattr(self, name, nn.Parameter(value, requires_grad=False))
                else:
                    setattr(self, name, value)

        def forward(self, x, h):
            h = torch.tanh(self.net(x + h)) * self.read
            return h, h

    cell, (x, h) = Masked(), data()
    expected = torch.autograd.grad(loop(cell, x, h)[0].sum(), cell.net.weight)
    y, _ = rg.unroll(cell, x, h, schedule=rg.plan(STEPS, 3))
    cell.unread.mul_(2)
    found = torch.autograd.grad(y.sum(), cell.net.weight, retain_graph=True)
    torch.testing.assert_close(found, expected)
    cell.read.mul_(2)
    with pytest.raises(rg.RetrogradeError, match=OTHERWISE):
        torch.autograd.grad(y.sum(), cell.net.weight)


def counters():
    """Cells that count in Python, each with what it counts by, which a rerun would find changed."""
    net, n, table, steps = linear(), [0], {"t": 0}, itertools.count()
    it = iter([0.1 * k for k in range(1000)])
    array = np.zeros(2)

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.t, self.seen, self.memory = net, 0, [], None

        def forward(self, x, h):
            self.t += 1
            self.seen.append(float(x.sum()))
            self.memory = x.detach() if self.memory is None else 0.5 * self.memory + x.detach()
            h = torch.tanh(net(x * self.t / 30 + h) + 0.1 * len(self.seen) + self.memory)
            return h, h

    def by_list(x, h):
        n[0] += 1
        h = torch.tanh(net(x + h)) * n[0]
        return h, h

    def by_dict(x, h):
        table["t"] += 1
        h = torch.tanh(net(x + h)) * table["t"]
        return h, h

    def by_iterator(x, h):
        h = torch.tanh(net(x + h)) * next(it)
        return h, h

    def by_count(x, h):
        h = torch.tanh(net(x + h)) * next(steps)
        return h, h

    def by_array(x, h):
        array[1] += 1
        h = torch.tanh(net(x + h)) * float(array[1])
        return h, h

    def by_itself(x, h):
        by_itself.t += 1
        h = torch.tanh(net(x + h)) * by_itself.t
        return h, h

    by_itself.t = 0
    module = Counting()
    met, lines = set(), io.StringIO("1\n" * 9999)

    def by_set(x, h):
        met.add(len(met))
        h = torch.tanh(net(x + h)) * len(met)
        return h, h

    def by_global(x, h):
        global CALLS
        CALLS += 1
        h = torch.tanh(net(x + h)) * CALLS
        return h, h

    class Tally:
        calls = 0

        def __call__(self, x, h):
            Tally.calls += 1
            h = torch.tanh(net(x + h)) * Tally.calls
            return h, h

    def by_file(x, h):
        h = torch.tanh(net(x + h)) * float(lines.readline())
        return h, h

    return {
        "a set": (by_set, lambda: met),
        "a global": (by_global, lambda: CALLS),
        "a class": (Tally(), lambda: Tally.calls),
        "a file": (by_file, lambda: lines.tell()),
        "a module": (module, lambda: (module.t, module.seen, module.memory)),
        "a list": (by_list, lambda: n),
        "a dict": (by_dict, lambda: table),
        "an iterator": (by_iterator, lambda: it.__length_hint__()),
        "a count": (by_count, lambda: repr(steps)),
        "an array": (by_array, lambda: array),
        "a function": (by_itself, lambda: by_itself.t),
    }, net


COUNTED = [*counters()[0]]


def exact_or_refused(ours, plain):
    """Whether two functions return the same, or the first one raises an error of this library."""
    expected = plain()
    try:
        found = ours()
    except rg.RetrogradeError:
        return
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("asked", [{"memory": "40%"}, {"memory": "100%"}, {"memory": 1}])
@pytest.mark.parametrize("what", COUNTED)
def test_what_a_cell_counts_is_exact_or_refused(what, asked):
    def step(run):
        cells, net = counters()
        y, last = run(cells[what][0], *data())
        return [y.detach(), *torch.autograd.grad(y.square().sum() + last.sum(), net.weight)]

    exact_or_refused(lambda: step(lambda *a: rg.unroll(*a, **asked)), lambda: step(loop))


@pytest.mark.parametrize("what", COUNTED)
def test_what_a_cell_counts_in_a_stream_is_exact_or_refused(what):
    def plain():
        cells, net = counters()
        return torch.autograd.grad(loop(cells[what][0], *data())[0].square().sum(), net.weight)

    def ours():
        cells, net = counters()
        rg.bptt(cells[what][0], *data(), loss=lambda t, y: y.square().sum(), memory="30%")
        return (net.weight.grad,)

    exact_or_refused(ours, plain)


@pytest.mark.parametrize("what", COUNTED)
def test_what_a_layer_counts_is_exact_or_refused(what):
    def step(kind, **asked):
        made = [counters() for _ in range(8)]
        layers = [Layer(cells[what][0]) for cells, _ in made]
        for layer, (_, net) in zip(layers, made, strict=True):
            layer.net = net
        net = kind(*layers, **asked)
        x = torch.ones(30, SIZE, dtype=DOUBLE, requires_grad=True)
        return torch.autograd.grad(net(x).square().sum(), [x, *(n.weight for _, n in made)])

    exact_or_refused(lambda: step(rg.Sequential, memory="60%"), lambda: step(nn.Sequential))


def test_a_count_is_part_of_the_state_by_stateful():
    class Neuron(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.t, self.v = linear(), 0, None

        def forward(self, x):
            self.t += 1
            self.v = self.net(x) if self.v is None else torch.tanh(self.v * self.t / 30 + x)
            return self.v

    found = []
    for memory in (None, "60%"):
        cell, (x, _) = Neuron(), data()
        y, _ = rg.unroll(cell, x, stateful=[cell], memory=memory)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), cell.net.weight)])
        assert cell.t == STEPS
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


class Caching(nn.Module):
    """Makes what it needs at its first step: a mask, an entry of a table, a flag."""

    def __init__(self, factor=1.0, drawn=False):
        super().__init__()
        self.net, self.mask, self.table, self.fresh = linear(), None, {}, True
        self.factor, self.drawn = factor, drawn

    def forward(self, x, h):
        if self.fresh:
            h = h * self.factor
            self.fresh = False
        if self.mask is None:
            self.mask = torch.rand(SIZE) if self.drawn else torch.arange(SIZE) / SIZE
        key = tuple(x.shape)
        self.table[key] = self.table.get(key, 2.0)
        h = torch.tanh(self.net(x + h)) * self.mask * self.table[key]
        return h, h


@pytest.mark.parametrize("memory", ["60%", "100%"])
def test_what_settles_in_the_first_step_is_a_cache(memory):
    found = []
    for run in (loop, lambda *a: rg.unroll(*a, memory=memory)):
        cell, (x, h) = Caching(), data()
        for _ in range(2):
            y, _ = run(cell, x, h)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), cell.net.weight)])
        assert not cell.fresh
        assert cell.mask is not None
        assert list(cell.table) == [(SAMPLES, SIZE)]
    torch.testing.assert_close(found[2:], found[:2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"factor": 2.0}, {"drawn": True}])
def test_what_settles_and_changes_what_the_first_step_computes(options):
    """Where h is 0, only its gradient shows the factor."""

    def step(run):
        torch.manual_seed(7)
        cell, (x, h) = Caching(**options), data()
        try:
            y, _ = run(cell, x, h.requires_grad_())
        except rg.CellError:
            assert (cell.fresh, cell.mask, cell.table) == (True, None, {})
            raise
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [h, cell.net.weight])]

    for asked in ({"memory": "60%"}, {"schedule": rg.plan(STEPS, 3)}):
        exact_or_refused(lambda a=asked: step(lambda *c: rg.unroll(*c, **a)), lambda: step(loop))


def test_a_value_that_changes_at_a_later_step_is_exact_or_refused():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.k = linear(), 1

        def forward(self, x, s):
            h, t = s
            if t == 5:
                self.k = 3
            h = torch.tanh(self.net(x + h)) * self.k
            return h, (h, t + 1)

    def step(run):
        cell, (x, h) = Late(), data()
        y, _ = run(cell, x, (h, torch.tensor(0)))
        return [y.detach(), *torch.autograd.grad(y.square().sum(), cell.net.weight)]

    exact_or_refused(lambda: step(lambda *a: rg.unroll(*a, memory="40%")), lambda: step(loop))


class Membrane(nn.Module):
    """A neuron that keeps its potential in itself; at first nothing shows."""

    def __init__(self, detach=False):
        super().__init__()
        self.net, self.potential, self.detach = linear(), torch.zeros(SIZE, dtype=DOUBLE), detach

    def forward(self, x, h):
        spike = torch.sigmoid(self.potential)
        self.potential = 0.9 * self.potential + nn.functional.linear(x, self.net.weight)
        if self.detach:
            self.potential = self.potential.detach()
        h = torch.tanh(self.net(h)) + spike
        return h, h


def test_a_potential_in_an_attribute_is_exact_or_refused_where_nothing_shows():
    def step(run):
        (x, h), cell = data(), Membrane()
        x = torch.cat([torch.zeros_like(x[:20]), x[20:]])
        y, _ = run(cell, x, h)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), cell.net.weight)]

    for asked in ({"memory": "40%"}, {"schedule": rg.plan(STEPS, 3)}):
        exact_or_refused(lambda a=asked: step(lambda *c: rg.unroll(*c, **a)), lambda: step(loop))


def test_a_detached_potential_is_refused_by_name_and_is_part_of_the_state_by_stateful():
    x, h = data()
    with pytest.raises(
        rg.CellError, match=r"keeps a state of its own in Membrane\.potential.*state"
    ):
        rg.unroll(Membrane(detach=True), x, h, memory="40%")
    found = []
    for memory in (None, "60%"):
        cell = Membrane(detach=True)
        y, _ = rg.unroll(cell, x, h, memory=memory, stateful=[cell])
        grads = torch.autograd.grad(y.square().sum(), cell.net.weight)
        found.append([y.detach(), *grads, cell.potential])
    assert_bitwise(found[1][::2], found[0][::2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


class Begun(nn.Module):
    """Adds a trained first state in its first step, or sets its potential up by its type."""

    def __init__(self, typed):
        super().__init__()
        self.net, self.first, self.typed, self.potential = linear(), True, typed, 0.0
        self.begin = nn.Parameter(torch.zeros(SIZE, dtype=DOUBLE))

    def forward(self, x, h):
        if self.typed:
            if not isinstance(self.potential, torch.Tensor):
                self.potential = torch.zeros_like(x)
            self.potential = 0.9 * self.potential + x
            x = self.potential
        elif self.first:
            h, self.first = h + self.begin, False
        h = torch.tanh(self.net(x + h))
        return h, h


@pytest.mark.parametrize("typed", [False, True])
def test_a_first_step_of_another_kind_is_exact_or_refused(typed):
    def step(run):
        cell = Begun(typed)
        y, _ = run(cell, *data())
        owned = [cell.net.weight] if typed else [cell.net.weight, cell.begin]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), owned)]

    exact_or_refused(lambda: step(lambda *a: rg.unroll(*a, memory="60%")), lambda: step(loop))


def test_a_captured_tensor_is_not_to_be_written_to():
    net, count = linear(), torch.zeros(())

    def cell(x, h):
        count.add_(1)
        h = torch.tanh(net(x + h)) * count
        return h, h

    with pytest.raises(rg.CellError, match="writes in place to a tensor of shape"):
        rg.unroll(cell, *data(), memory="40%")
    assert count == 0


def test_captured_statistics_are_not_to_be_written_to_though_no_version_counts_it():
    wide = 40  # more than what is put back
    net, mean, variance = nn.Linear(wide, wide), torch.zeros(wide), torch.ones(wide)

    def cell(x, h):
        h = nn.functional.batch_norm(net(x + h), mean, variance, training=True)
        return h, h

    with pytest.raises(rg.CellError, match="writes in place to a tensor of shape"):
        rg.unroll(cell, torch.randn(STEPS, SAMPLES, wide), torch.zeros(SAMPLES, wide), memory="40%")


class Leaving(nn.Module):
    """Leaves a tensor to be looked at."""

    def __init__(self, reads_late=False):
        super().__init__()
        self.net, self.aux, self.reads_late = linear(), None, reads_late

    def forward(self, x, s):
        h, t = s
        extra = self.aux.sum() if self.reads_late and t > 3 else 0.0
        h = torch.tanh(self.net(x + h)) + extra
        self.aux = h.square().mean()
        return h, (h, t + 1)


def test_what_a_step_leaves_can_be_looked_at_but_not_differentiated():
    cell, (x, h) = Leaving(), data()
    y, _ = rg.unroll(cell, x, (h, torch.tensor(0)), memory="40%")
    assert float(cell.aux) == pytest.approx(
        float(loop(cell, x, (h, torch.tensor(0)))[0][-1].square().mean())
    )
    y, _ = rg.unroll(cell, x, (h, torch.tensor(0)), memory="40%")
    y.sum().backward(retain_graph=True)
    with pytest.raises(rg.RetrogradeError, match=r"the loss depends on Leaving\.aux"):
        (y.sum() + cell.aux).backward()


def test_a_later_step_that_reads_what_was_left_is_refused():
    x, h = data()
    for asked in ({"schedule": rg.plan(STEPS, 3)}, {"memory": "40%"}):
        with pytest.raises(rg.RetrogradeError):
            rg.unroll(Leaving(reads_late=True), x, (h, torch.tensor(0)), **asked)[
                0
            ].sum().backward()


def test_tensors_with_a_gradient_that_are_collected_are_as_many_as_in_the_loop():
    net, kept = linear(), []

    def cell(x, h):
        h = torch.tanh(net(x + h))
        kept.append(h.detach())
        return h, h

    y, _ = rg.unroll(cell, *data(), memory="40%")
    assert torch.equal(torch.stack(kept), y)
    y.sum().backward()
    assert len(kept) == STEPS


def test_a_state_that_the_cell_writes_to_is_given_as_a_copy():
    net = linear()

    def cell(x, s):
        h, total = s
        h = torch.tanh(net(x + h))
        total += h
        return h * torch.sigmoid(total), (h, total)

    x, h = data()
    for memory in ("30%", "100%"):
        found = []
        for run in (loop, lambda *a, m=memory: rg.unroll(*a, memory=m)):
            state = h.clone(), torch.zeros_like(h)
            y, after = run(cell, x, state)
            found.append([y.detach(), *after, *torch.autograd.grad(y.square().sum(), net.weight)])
        assert_bitwise(found[1][:3], found[0][:3])
        torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    rg.bptt(cell, x, (h.clone(), h.clone()), loss=lambda t, y: y.square().sum(), memory="30%")
    torch.testing.assert_close(net.weight.grad, found[0][3], rtol=1e-9, atol=1e-12)


def test_a_state_that_is_written_to_and_handed_out_is_refused():
    net = linear()

    def cell(x, h):
        h += torch.tanh(net(x))
        return h, h

    with pytest.raises(
        rg.CellError, match=r"writes in place to tensor 0 of its state.* not h \+= 1"
    ):
        rg.unroll(cell, *data(), memory="40%")


WRAPPED = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "spectral norm": spectral_norm,
    "weight norm": weight_norm,
    "parametrized spectral norm": parametrizations.spectral_norm,
    "parametrized weight norm": parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("what", WRAPPED)
def test_layers_and_cells_with_computed_parameters(what):
    def made():
        torch.manual_seed(7)
        layers = [nn.Linear(SIZE, SIZE, dtype=DOUBLE) for _ in range(8)]
        for layer in layers:
            WRAPPED[what](layer)
        return layers

    x = torch.randn(30, SIZE, dtype=DOUBLE, generator=torch.Generator().manual_seed(8))
    found = []
    for make in (nn.Sequential, lambda *a: rg.Sequential(*a, memory="70%")):
        net = make(*(nn.Sequential(layer, nn.Tanh()) for layer in made()))
        for _ in range(2):
            grads = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        found.append([*grads, *net.buffers()])
    assert_bitwise(found[1], found[0])
    found = []
    for run in (loop, lambda *a: rg.unroll(*a, memory="40%")):
        (net, *_), (x, h) = made(), data()

        def cell(x, h, net=net):
            h = torch.tanh(net(x) + h)
            return h, h

        y, _ = run(cell, x, h)
        found.append(
            [y.detach(), *torch.autograd.grad(y.sum(), list(net.parameters())), *net.buffers()]
        )
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_measuring_calls_no_backward_hook():
    fired = []
    layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()) for _ in range(10)]
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: fired.append(1))
    net = rg.Sequential(*layers, memory="60%")
    for _ in range(2):
        fired.clear()
        net(torch.randn(64, SIZE)).sum().backward()
        assert len(fired) == 10
    cell, x = nn.GRUCell(SIZE, SIZE), torch.randn(STEPS, SAMPLES, SIZE)
    cell.register_full_backward_hook(lambda *_: fired.append(1))
    for memory in ("40%", "40%"):
        fired.clear()
        y, _ = rg.unroll(lambda x, h: (h, cell(x, h)), x, torch.zeros(SAMPLES, SIZE), memory=memory)
        y.sum().backward()
        assert len(fired) == STEPS - 1


def peak(run, parameters):
    """The working bytes of a call and its backward pass, the first call having been made."""

    def call():
        y, last = run()
        roots = [t for t in (y, last) if t is not None and t.requires_grad]
        return y, last, torch.autograd.grad([t.sum() for t in roots], parameters)

    call()
    return rg.measure(call).working_bytes


def final_only(a, h, net):
    return None, net(a, h)


def detached(a, h, net):
    h = net(a, h)
    return h.detach(), h


def of_the_input(a, h, net):
    return a * 2, net(a, h)


@pytest.mark.quick(1)
@pytest.mark.parametrize("output", [final_only, detached, of_the_input])
def test_outputs_need_not_depend_on_the_state(output):
    net, x, h = nn.GRUCell(32, 32), torch.randn(100, 8, 32), torch.zeros(8, 32)
    parameters = list(net.parameters())

    def cell(a, h):
        return output(a, h, net)

    def ordinary():
        state, ys = h, []
        for a in x:
            y, state = cell(a, state)
            ys.append(y)
        return None if ys[0] is None else torch.stack(ys), state

    def call():
        y, last = ordinary()
        roots = [t for t in (y, last) if t is not None and t.requires_grad]
        return y, last, torch.autograd.grad([t.sum() for t in roots], parameters)

    whole = rg.measure(call).working_bytes
    for memory, allowed in (("20%", 0.2 * whole), ("50%", 0.5 * whole), (100_000, 100_000)):

        def ours(memory=memory):
            return rg.unroll(cell, x, h, memory=memory)

        assert peak(ours, parameters) <= allowed


def through_a_stack(path):
    return torch.stack(path)[-1]


def through_a_chunk(path):
    return torch.cat([path[-1], path[-1], path[-1]], -1).chunk(3, -1)[1]


@pytest.mark.quick(0)
@pytest.mark.parametrize("view", [through_a_stack, through_a_chunk])
@pytest.mark.parametrize("memory", ["10%", "30%"])
def test_a_stored_state_that_is_a_view_holds_no_more_than_itself(view, memory):
    net, x, h = nn.Linear(32, 32), torch.randn(200, 8, 32), torch.zeros(8, 32)

    def cell(a, h):
        path = [h]
        for _ in range(6):
            path.append(torch.tanh(net(path[-1]) + a))
        h = view(path)
        return h, h

    budget = rg.fit(cell, x, h, memory=memory).budget_bytes
    assert (
        peak(lambda: rg.unroll(cell, x, h, memory=memory), list(net.parameters())) <= budget * 1.01
    )

    def streamed():
        rg.bptt(cell, x, h, loss=lambda t, y: y.square().sum(), memory=budget)

    streamed()
    m = rg.measure(streamed)
    assert m.working_bytes - sum(p.nbytes for p in net.parameters()) <= budget


def test_a_number_that_changes_at_every_call_costs_one_step(monkeypatch):
    measured = []
    for module, name in ((unrolling, "footprint"), (streaming, "footprints")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, real=real, **k: measured.append(1) or real(*a, **k)
        )
    cell, (x, h) = Scaled(), data()
    for step in range(5):
        cell.scale = 1 / (1 + step)
        rg.unroll(cell, x, h, memory="60%")
        rg.bptt(cell, x, h, loss=lambda t, y: y.sum() * cell.scale, memory="60%")
    assert len(measured) == 2


class Inner(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.net, self.k = nn.Linear(32, 32), k

    def forward(self, a, h=None):
        given, h = h, a if h is None else h
        for _ in range(self.k):
            h = torch.tanh(self.net(h) + a)
        return h if given is None else (h, h)


@pytest.mark.quick(0)
def test_an_attribute_that_changes_what_is_computed_is_measured_anew():
    x, h, budget = torch.randn(100, 8, 32), torch.zeros(8, 32), 80_000
    cell = Inner(1)
    for k in (1, 8, 3):
        cell.k = k
        run = lambda: rg.unroll(cell, x, h, memory=budget)  # noqa: E731
        assert peak(run, list(cell.parameters())) <= budget

        def streamed():
            rg.bptt(cell, x, h, loss=lambda t, y: y.square().sum(), memory=budget)

        streamed()
        assert rg.measure(streamed).working_bytes <= budget + 2 * sum(
            p.nbytes for p in cell.parameters()
        )
    layers = [Inner(1) for _ in range(12)]
    net, x = rg.Sequential(*layers, memory=400_000), torch.randn(64, 32)
    for k in (1, 4):
        for layer in layers:
            layer.k = k
        assert net.fit(x).peak_bytes <= 400_000
        assert peak(lambda: (net(x), None), list(net.parameters())) <= 400_000
