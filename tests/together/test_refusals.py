"""What would be wrong or over budget in silence is right, or refused by name before it is trained.

Each test fails if its repair is taken out.
"""

import copy
import gc
import itertools
import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from oracles.drawn_models import BUDGETS, draw, read
from oracles.loops import loop
from retrograde.models.rows.call_sizes import PassMeasurements
from retrograde.models.rows.rerun import DROPPED
from retrograde.plan.calls import Part, peak_of

WIDTH = 24
LOSS = 8  # bytes of a loss and of its gradient


class Block(nn.Module):
    """A residual block; ``habit`` is called with the block, its input and its output."""

    def __init__(self, habit=None, enter=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.habit, self.enter = habit, enter

    def forward(self, x):
        if self.enter is not None and self.enter(self):
            return x
        y = x + self.down(torch.relu(self.up(x)))
        if self.habit is not None:
            self.habit(self, y)
        return y


class Loop(nn.Module):
    """Blocks in a loop; ``between`` is called before each, and skips it if it returns true."""

    def __init__(self, blocks, between=lambda model: False, run=lambda block, x: block(x)):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.between, self.run = between, run

    def forward(self, x):
        for block in self.blocks:
            if not self.between(self):
                x = self.run(block, x)
        return x


def inputs(*, grad=False):
    torch.manual_seed(1)
    return torch.randn(64, WIDTH, requires_grad=grad)


def blocks(count=6, **options):
    torch.manual_seed(0)
    return [Block(**options) for _ in range(count)]


def gradients(model, x, loss=lambda model, y: y.square().mean(), seed=2):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    random.seed(seed)
    loss(model, model(x)).backward()
    return [p.grad for p in model.parameters()]


def assert_same(a, b):
    assert len(a) == len(b) > 0
    for mine, theirs in zip(a, b, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def assert_as_without(ours, theirs, x, **options):
    for seed in range(4):
        mine = gradients(ours, x, seed=seed, **options)
        assert_same(mine, gradients(theirs, x, seed=seed, **options))


def leave_deep(block, y):
    HIDDEN["a"]["b"]["c"]["d"].append(y.square().mean())


HIDDEN = {"a": {"b": {"c": {"d": []}}}}


@pytest.mark.quick(2)
@pytest.mark.parametrize("memory", ["60%", "48%"])
@pytest.mark.parametrize("within", [rg.Sequential, Loop], ids=["Sequential", "budget"])
def test_an_auxiliary_loss_may_be_left_in_an_attribute(within, memory):
    """So may a state that enters the next pass, as that of a spiking layer does."""

    def carry(block, y):
        block.aux = y.square().mean() + getattr(block, "aux", 0.0) / 2

    def loss(model, y):
        with torch.random.fork_rng():
            more = model(x * 0.5).square().mean()
        found = [m.aux for m in model.modules() if isinstance(m, Block)]
        for block in model.modules():
            vars(block).pop("aux", None)
        return y.square().mean() + more + sum(found)

    x = inputs()
    ours = within(blocks(habit=carry)) if within is Loop else within(*blocks(habit=carry))
    if within is Loop:
        rg.budget(ours, memory, x)
    else:
        ours.memory = memory
    theirs = nn.Sequential(*blocks(habit=carry))
    assert_as_without(ours, theirs, x, loss=loss)


def test_what_is_left_where_nothing_finds_it_is_refused_by_name():
    x = inputs()
    told = r"layer \S+ leaves a tensor with a gradient in a place that cannot be found: expected"
    with pytest.raises(rg.CellError, match=told):
        rg.Sequential(*blocks(habit=leave_deep), memory="50%")(x)
    with pytest.raises(rg.CellError, match=told):
        rg.budget(Loop(blocks(habit=leave_deep)), "50%", x)
    with pytest.raises(rg.CellError, match=told):  # nothing that the first is given has a gradient
        rg.Sequential(*blocks(1, habit=leave_deep), *blocks(), memory="50%")(x)
    HIDDEN["a"]["b"]["c"]["d"].clear()


def test_a_pruned_weight_may_be_a_part_of_the_loss():
    def pruned():
        found = blocks()
        for block in found:
            prune.l1_unstructured(block.up, "weight", 0.5)
        return found

    def loss(model, y):
        return y.square().mean() + model[1].up.weight.square().sum()

    x = inputs()
    ours, theirs = rg.Sequential(*pruned(), memory="45%"), nn.Sequential(*pruned())
    assert_as_without(ours, theirs, x)
    pairs = zip(gradients(ours, x, loss=loss), gradients(theirs, x, loss=loss), strict=True)
    assert all(map(torch.equal, *zip(*pairs, strict=True)))


def by_torch(_):
    return torch.rand(()) < 0.5


def by_python(_):
    return random.random() < 0.5


def by_a_list(_):
    return torch.empty(3).uniform_()[1:].tolist()[0] < 0.5


def by_one_of_several(_):
    return any(p < 0.3 for p in torch.rand(3))


def by_a_stack(_):
    return bool(torch.stack([torch.rand(()), torch.rand(())]).min() < 0.5)


@pytest.mark.parametrize("enter", [by_torch, by_python, by_a_list, by_one_of_several, by_a_stack])
@pytest.mark.quick(5)
def test_a_layer_that_may_skip_itself_is_exact(enter):
    x = inputs()
    nets = rg.Sequential(*blocks(enter=enter), memory="60%"), nn.Sequential(*blocks(enter=enter))
    try:
        nets[0].fit(x.clone().requires_grad_())
    except rg.BudgetError as least:  # layers that were skipped when tried are one with others
        nets[0].memory = least.minimum_bytes
    for seed in range(4):
        found = []
        for net in nets:
            random.seed(seed)
            found.append(gradients(net, x.clone().requires_grad_(), seed=seed))
        assert_same(*found)


def test_stochastic_depth_by_a_mask_is_exact():
    class Masked(Block):
        def forward(self, x):
            keep = torch.bernoulli(torch.full((len(x), 1), 0.7))
            return x + (super().forward(x) - x) * keep

    def masked():
        torch.manual_seed(0)
        return [Masked() for _ in range(6)]

    x = inputs()
    ours, theirs = Loop(masked()), Loop(masked())
    rg.budget(ours, "50%", x)
    assert_as_without(ours, theirs, x)


def test_a_first_layer_that_passes_no_gradient_when_tried():
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x) if x[0, 0] > 0 else x * 1.0

    x = inputs()
    x[0, 0] = -1.0
    layers = [Warm(), *blocks()]
    ours, theirs = rg.Sequential(*copy.deepcopy(layers), memory="45%"), nn.Sequential(*layers)
    assert_as_without(ours, theirs, x)
    x[0, 0] = 1.0
    assert_as_without(ours, theirs, x)


def test_a_schedule_has_the_length_of_what_it_runs():
    class Toggled(nn.Module):
        """It returns its input, depending on a parameter that may be replaced."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(x) if self.inner.weight[0, 0] > 0 else x

    x, toggled = inputs(), Toggled()
    ours = rg.Sequential(*blocks(3), toggled, *blocks(3), memory="45%")
    theirs = nn.Sequential(*ours)
    for value in (1.0, -1.0, 1.0):
        weight = toggled.inner.weight.detach().clone()
        weight[0, 0] = value
        toggled.inner.weight = nn.Parameter(weight)
        mine = gradients(ours, x)
        assert_same(mine, gradients(theirs, x))


@pytest.mark.parametrize("p", [0.0, 0.01, 0.5, 0.99])
def test_layer_drop_of_a_model_is_exact(p):
    x = inputs()
    for number in (lambda: torch.rand([]), random.random):
        ours, theirs = (Loop(blocks(), lambda _, number=number: number() < p) for _ in range(2))
        assert len(rg.budget(ours, "60%", x).shares) == 1
        for seed in range(4):
            random.seed(seed)
            mine = gradients(ours, x.clone().requires_grad_(), seed=seed)
            random.seed(seed)
            assert_same(mine, gradients(theirs, x.clone().requires_grad_(), seed=seed))


def test_numbers_drawn_between_layers_change_nothing():
    def draws(_):
        torch.rand(3)

    x = inputs()
    ours, theirs = Loop(blocks(), draws), Loop(blocks(), draws)
    rg.budget(ours, "45%", x)
    assert_as_without(ours, theirs, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle([1.0, 2.0, 3.0]),
        lambda: map(float, itertools.cycle([1, 2])),
        lambda: zip(itertools.count(), itertools.cycle([1.0, 2.0]), strict=False),
    ],
)
@pytest.mark.parametrize("memory", [None, "40%"])
@pytest.mark.parametrize("advanced", [0, 1, 5])
@pytest.mark.quick(2)
def test_a_cycle_is_refused_within_a_budget(make, memory, advanced):
    def cell_of(numbers):
        def cell(x, h):
            factor = next(numbers)
            h = torch.tanh(x + h) * (factor if isinstance(factor, float) else factor[1])
            return h, h

        return cell

    def numbers():
        found = make()
        for _ in range(advanced):
            next(found)
        return found

    x, state = torch.randn(20, 2, 3), torch.zeros(2, 3, requires_grad=True)
    if memory is None:
        expected = loop(cell_of(numbers()), x, state)[0]
        assert torch.equal(rg.unroll(cell_of(numbers()), x, state)[0], expected)
        return
    with pytest.raises(rg.CellError, match="computes something else when it is run again"):
        rg.unroll(cell_of(numbers()), x, state, memory=memory)


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.Tanh(), nn.LayerNorm(64)])
@pytest.mark.parametrize("loss", ["strided", "expanded"])
@pytest.mark.quick(2)
def test_the_gradient_of_the_output_may_lie_in_memory_in_any_way(last, loss):
    size = 64
    x = torch.randn(256, size)

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(size, size), nn.Linear(size, size)

        def forward(self, x):
            return torch.tanh(x + self.b(torch.relu(self.a(x))))

    net = rg.Sequential(*(Narrow() for _ in range(4)), copy.deepcopy(last), memory=1)
    with pytest.raises(rg.BudgetError) as caught:
        net(x)
    net.memory = caught.value.minimum_bytes
    given = torch.randn(size, 256).t() if loss == "strided" else torch.ones(()).expand(256, size)

    def call():
        y = net(x)
        y.backward(given)
        return y

    call()
    net.zero_grad()
    assert rg.measure(call).working_bytes <= net.memory
    net.zero_grad()  # an output that nobody but the last layer holds counts
    assert rg.measure(lambda: net(x).sum().backward()).working_bytes <= net.memory + LOSS


def test_the_least_is_not_more_than_ordinary_backpropagation_takes():
    class Pair(nn.Module):
        def __init__(self, last=False):
            super().__init__()
            self.inner, self.last = nn.Linear(WIDTH, WIDTH), last

        def forward(self, given):
            x, more = given if isinstance(given, tuple) else (given, (given > 0).float())
            y = torch.tanh(self.inner(x))
            return y + more if self.last else (y, more)

    net = rg.Sequential(Pair(), Pair(), Pair(last=True), memory="100%")
    x = inputs()
    ordinary = net.fit(x).ordinary_bytes
    net.memory = 1
    with pytest.raises(rg.BudgetError, match="expected at least ") as caught:
        net(x)
    assert caught.value.minimum_bytes <= ordinary
    for net.memory in (ordinary, caught.value.minimum_bytes):
        net(x).sum().backward()
    net.memory = caught.value.minimum_bytes - 1
    with pytest.raises(rg.BudgetError):
        net(x)


class Staged(nn.Module):
    """A stem that can be budgeted, before blocks that leave tensors, which cannot."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = (m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
        self.stem = nn.Sequential(*layers)
        self.rest = Loop(blocks(habit=leave_deep))

    def forward(self, x):
        return self.rest(self.stem(x))


def test_what_a_budget_covers_is_said():
    x, model = inputs(), Staged()
    division = rg.budget(model, "100%", x)
    saved = set()

    def pack(t):
        saved.add((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()))
        return t

    theirs = Staged()
    h = theirs.stem(x).detach()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = theirs.rest(h)
    own = {t.untyped_storage().data_ptr() for t in (*theirs.parameters(), y)}
    left = 4 * len(theirs.rest.blocks)  # each block leaves a number
    assert division.elsewhere_bytes == left + sum(size for at, size in saved if at not in own)
    assert "budgeted modules hold" in str(division)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_within_a_model_are_refused_in_the_run_on_the_sample(reentrant):
    run = partial(checkpoint, use_reentrant=reentrant)
    model = Loop(blocks(), run=run)
    with pytest.raises(rg.CellError, match=r"run again by torch\.utils\.checkpoint: turn the"):
        rg.budget(model, "60%", inputs())

    class Inside(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    layers = [Inside() for _ in range(4)]
    ours, theirs = rg.Sequential(*layers, memory="90%"), nn.Sequential(*copy.deepcopy(layers))
    if reentrant:
        with pytest.raises(rg.RetrogradeError, match="layer 0 raises RuntimeError"):
            ours(inputs(grad=True))
    else:
        x = inputs(grad=True)
        ours.memory = ours.fit(x).minimum_bytes
        assert_as_without(ours, theirs, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_within_a_checkpoint_of_the_callers_are_exact(reentrant):
    run = partial(checkpoint, use_reentrant=reentrant)
    found = []
    for net in (rg.Sequential(*blocks(), memory="45%"), nn.Sequential(*blocks())):
        x = inputs(grad=True)
        y = run(net, x)
        y.square().mean().backward()
        found.append([y, x.grad, *(p.grad for p in net.parameters())])
    assert_same(*found)


def test_a_model_that_draws_until_a_number_is_large_is_tried_to_the_end():
    def draws_on(_):
        while torch.rand(()) < 0.5:
            pass

    x = inputs()
    ours, theirs = Loop(blocks(), draws_on), Loop(blocks(), draws_on)
    rg.budget(ours, "50%", x)
    assert_as_without(ours, theirs, x)


def step_with(gradient_of):
    w = torch.randn(3, 3, requires_grad=True)

    def cell(x, h):
        h = torch.tanh(h - 0.1 * gradient_of(lambda v: ((v @ w) - x).square().sum(), h) + x)
        return h, h

    return cell, w


def by_grad(f, h):
    h = h if h.requires_grad else h.detach().requires_grad_()
    return torch.autograd.grad(f(h), h, create_graph=True)[0]


def by_func(f, h):
    return torch.func.grad(f)(h)


def by_checkpoint(f, h):
    return h * checkpoint(f, h, use_reentrant=False)


@pytest.mark.parametrize("inside", [by_grad, by_func, by_checkpoint])
def test_a_cell_may_take_gradients_and_checkpoint_inside(inside):
    x, state = torch.randn(12, 2, 3), torch.zeros(2, 3, requires_grad=True)
    cell, w = step_with(inside)
    found = []
    for memory in (None, "60%", "60%"):  # later passes run some steps without a graph
        w.grad = None
        rg.unroll(cell, x, state, memory=memory)[0].sum().backward()
        found.append(w.grad)
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=1e-5, atol=1e-6)


def test_a_reentrant_checkpoint_inside_a_cell_is_refused():
    x, state = torch.randn(12, 2, 3), torch.zeros(2, 3, requires_grad=True)

    def cell(x, h):
        h = checkpoint(lambda v: torch.tanh(v + x), h, use_reentrant=True)
        return h, h

    with pytest.raises(rg.RetrogradeError, match="the cell raises RuntimeError"):
        rg.unroll(cell, x, state, memory="60%")


def test_a_list_of_steps_is_refused():
    x, state = [torch.randn(2, 3) for _ in range(4)], torch.zeros(2, 3)

    def cell(x, h):
        h = torch.tanh(h + (x[0] + x[1] if isinstance(x, list | tuple) else x))
        return h, h

    with pytest.raises(rg.CellError, match=r"list of 4 tensors of shape \(2, 3\).*torch\.stack"):
        rg.unroll(cell, x, state)
    with pytest.raises(rg.CellError, match=r"torch\.stack"):
        rg.fit(cell, x, state, memory="50%")
    rg.unroll(cell, tuple(x[:2]), torch.zeros(3))  # two tensors, of two steps each
    rg.unroll(cell, torch.stack(x), state)


def test_attention_in_eval_mode_has_the_bits_of_a_recorded_call():
    torch.manual_seed(0)
    make = partial(nn.TransformerEncoderLayer, WIDTH, 4, 2 * WIDTH, batch_first=True)
    layers = [make() for _ in range(5)]
    x = torch.randn(4, 16, WIDTH, requires_grad=True)
    ours = rg.Sequential(*copy.deepcopy(layers), memory="45%").eval()
    theirs = nn.Sequential(*layers).eval()
    assert torch.equal(ours(x), theirs(x))
    assert_as_without(ours, theirs, x)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))
    called = Loop(copy.deepcopy(layers)).eval()
    rg.budget(called, "45%", x)
    assert torch.equal(called(x), theirs(x))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture
def mesh(tmp_path):
    pytest.importorskip("torch.distributed.fsdp")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("each", [True, False])
def test_parameters_that_fsdp2_shards_are_refused(mesh, each):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    x, told = inputs(), r"parameters that torch\.distributed shards, and gathers only for a call"
    chain, loop = nn.Sequential(*blocks()), Loop(blocks())
    model = nn.Sequential(nn.LSTM(WIDTH, WIDTH), nn.Identity())
    sequence = torch.randn(60, 4, WIDTH)
    for net, sample in ((chain, x), (loop, x), (model, sequence)):
        rg.budget(net, "60%", sample)
        parts = {chain: [*chain], loop: [*loop.blocks], model: [model[0]]}[net]
        for part in parts if each else []:
            fully_shard(part, mesh=mesh)
        fully_shard(net, mesh=mesh)
        with pytest.raises(rg.RetrogradeError, match=told):
            net(sample)


@pytest.fixture
def small_heap():
    """The collector looks at what the test makes, not at what all tests before it left alive."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.quick(2, every=8)
@pytest.mark.parametrize("number", range(40))
def test_drawn_models_are_right_within_their_budgets_or_refused(number, small_heap):
    for share in BUDGETS[:: 2 if number % 2 else 1]:
        reading = read(number, share)
        assert reading.good, reading
        if reading.refused:
            return


def test_a_group_runs_again_beside_what_was_made_of_a_gradient(monkeypatch):
    """An addition reads nothing saved: autocast casts its gradient before a group is run again."""
    pair = Part(0, 2, parts=(Part(0, 1, DROPPED), Part(1, 2)))
    four = Part(0, 4, parts=(pair, Part(2, 3, DROPPED), Part(3, 4)))
    six = Part(0, 6, parts=(four, Part(4, 5, DROPPED), Part(5, 6)))
    plan, kinds = (six, Part(6, 7), Part(7, 8)), []
    monkeypatch.setattr(PassMeasurements, "plan", lambda kind, _: kinds.append(kind) or plan)
    reading = read(278, 0.0)
    assert reading.drawn.autocast
    assert not reading.wrong
    assert 0 < reading.peak_bytes <= peak_of(kinds[-1].sizes, plan)


def test_the_drawn_models_are_of_all_kinds():
    drawn = [draw(number) for number in range(500)]
    names = "how", "last", "aux", "skip", "p", "between", "loss", "frozen", "autocast", "levels"
    for name in names:
        counts = [
            sum(getattr(one, name) == value for one in drawn)
            for value in {getattr(one, name) for one in drawn}
        ]
        assert len(counts) > 1 < min(counts)


SECOND = {
    "LSTM": lambda x: rg.LSTM(3, 5, memory="70%")(x)[0],
    "all": lambda x: rg.GRU(3, 5, memory="100%")(x)[0],
    "scan": lambda x: rg.RNN(3, 5, backward="scan")(x)[0],
    "schedule": lambda x: rg.GRU(3, 5, schedule=rg.plan(20, 3))(x)[0],
    "unroll": lambda x: rg.unroll(lambda a, h: (h, torch.tanh(a + h)), x, x[0] * 0, memory="90%")[
        0
    ],
}


@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_of_a_recurrence_are_refused(how):
    x = torch.randn(20, 4, 3, requires_grad=True)
    y = SECOND[how](x)
    with pytest.raises(rg.RetrogradeError, match=r"cannot itself be differentiated.* memory=None"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(y.square().sum(), x)[0].any()  # a first one still works
