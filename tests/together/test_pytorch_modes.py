"""Autocast, torch.compile and DistributedDataParallel around a budgeted recurrence."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import retrograde as rg
from oracles.autocast import run_or_skip
from oracles.loops import (
    WAYS,
    Looped,
    assert_bitwise,
    assert_near,
    both,
    gradients,
    least,
    loop,
)
from oracles.networks import relative_error
from oracles.processes import leave

DOUBLE = torch.float64


def inputs(*shape, dtype=DOUBLE, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (65, 3, 5), generator=generator, dtype=dtype)


def half():
    """bfloat16, each cast on its own, as a recomputation makes it."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


class Plain(nn.Module):
    """Under autocast its state is in half precision from step 0 on."""

    def __init__(self):
        super().__init__()
        self.inward, self.across = nn.Linear(5, 7), nn.Linear(7, 7)

    def forward(self, x, h):
        h = torch.tanh(self.inward(x) + self.across(h))
        return h, h


class PartlyFull(Plain):
    """A part of it is kept in full precision, and so must its gradient be."""

    def forward(self, x, h):
        with torch.autocast("cpu", enabled=False):
            z = self.across(h.float())
        h = torch.tanh(self.inward(x) + z)
        return self.inward(x), h


@pytest.mark.parametrize("make", [Plain, PartlyFull])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("length", "memory"), [(1, "least"), (63, "least"), (100, "10%"), (63, 1.0)]
)
def test_a_cell_under_autocast(make, state_dtype, length, memory):
    torch.manual_seed(0)
    cell = make()
    x = inputs(length, 8, 5, dtype=torch.float32).requires_grad_()
    h = inputs(8, 7, dtype=torch.float32).to(state_dtype).requires_grad_()
    with half():
        if memory == "least":
            memory = least(lambda memory: rg.unroll(cell, x, h, memory=memory))
        ours, theirs = rg.unroll(cell, x, h, memory=memory), loop(cell, x, h)
    assert_bitwise(ours, theirs)
    wanted = [x, h, *cell.parameters()]
    for inside in (False, True):  # a backward pass is differentiated as its caller has it
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            found, expected = gradients(*ours, wanted), gradients(*theirs, wanted)
        assert_bitwise(found[:2], expected[:2])
        assert_near(found, expected, 1e-5)


def test_a_state_that_changes_its_precision_without_autocast_is_refused():
    h = torch.zeros(2).double().requires_grad_()
    with pytest.raises(rg.CellError, match=r"changed tensor 0 of its state: .* torch\.bfloat16"):
        rg.unroll(lambda x, h: (h, (x + h).bfloat16()), inputs(4, 2), h, memory="60%")


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_network_under_autocast(way):
    x = inputs(200, 3, 5, dtype=torch.float32).requires_grad_()
    theirs, ours = both(way, dtype=torch.float32)
    run_or_skip(theirs, x)
    with half():
        (y, _), (usual, _) = ours(x), theirs(x)
    assert y.dtype == usual.dtype
    found = torch.autograd.grad(y.float().square().sum(), [x, *ours.parameters()])
    expected = torch.autograd.grad(theirs(x)[0].square().sum(), [x, *theirs.parameters()])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert relative_error(a, b) < 0.05


class Model(nn.Module):
    """A network between two layers that torch.compile does compile."""

    def __init__(self, net):
        super().__init__()
        self.before, self.net, self.after = nn.Linear(5, 5), net, nn.Linear(7, 1)
        self.to(DOUBLE)

    def forward(self, x):
        return self.after(self.net(torch.relu(self.before(x)))[0] * 2).square().mean()


def model(way):
    torch.manual_seed(0)
    return Model(both(way)[1])


COMPILED = [("unroll", "eager"), ("LSTM", "eager")]


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("way", "backend"), COMPILED)
def test_what_is_compiled_around_it_breaks_its_graph_and_is_right(way, backend):
    torch.compiler.reset()
    ours, theirs = model(way), model(way)
    compiled = torch.compile(ours, backend=backend)
    for length in (65, 65, 70):
        for net in (compiled, theirs):
            net(inputs(length, 3, 5)).backward()
    assert_near([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    with torch.no_grad():
        assert_near([compiled(inputs())], [theirs(inputs())])


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_backward_pass_within_compiled_code():
    """None of ours is traced, step for step: much of it could not be."""
    torch.compiler.reset()
    counters.clear()
    ours, theirs = model("unroll"), model("unroll")
    torch.compile(lambda: ours(inputs()).backward(), backend="eager")()
    assert counters["frames"]["total"] < 30
    theirs(inputs()).backward()
    assert_near([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_cell_that_is_compiled(backend):
    torch.compiler.reset()
    _, ours = both("unroll")
    x, h = inputs().requires_grad_(), inputs(3, 7).requires_grad_()
    wanted = [x, h, *ours.parameters()]
    cell = torch.compile(ours.step, backend=backend)
    found = [
        torch.autograd.grad(run(cell, x, h)[0].square().sum(), wanted)
        for run in (loop, lambda *a: rg.unroll(*a, memory="40%"))
    ]
    assert_bitwise(*found)


@pytest.mark.quick(0)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_streaming_within_compiled_code():
    torch.compiler.reset()
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        net = both("unroll")[1]

        def train(net=net):
            h = torch.zeros(3, 7, dtype=DOUBLE)
            rg.bptt(net.step, inputs(), h, loss=lambda t, y: y.square().sum(), memory="40%")

        wrap(train)()
        found.append([p.grad for p in net.parameters()])
    assert_bitwise(*found)


def test_streaming_of_parametrized_weights():
    found = []
    for stream in (True, False):
        net = both("LSTM")[0]
        parametrizations.weight_norm(net, "weight_hh_l0")
        for _ in range(2):
            if stream:
                rg.bptt(net, inputs(), loss=lambda t, y: y.square().sum(), schedule=rg.plan(65, 9))
            else:
                net(inputs())[0].square().sum().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(1e-3 * p.grad)
        found.append([p.grad for p in net.parameters()])
    assert_near(*found)


def test_streaming_refuses_transforms():
    net = both("unroll")[1]
    h = torch.zeros(3, 7, dtype=DOUBLE)
    with pytest.raises(rg.RetrogradeError, match=r"torch\.func.* use memory=None"):
        torch.func.grad(lambda x: rg.bptt(net.step, x, h, loss=lambda t, y: y.sum())[0])(inputs())


class Both(nn.Module):
    """Networks on top of one another, the first of which is used twice; with schedules, since two
    processes that measure take long."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.unroll = Looped(5, 7, schedule=rg.plan(65, 5))
        self.lstm = rg.LSTM(7, 7, schedule=rg.plan(65, 9), dtype=DOUBLE)

    def forward(self, x):
        once, twice = (self.unroll(part)[0] for part in (x, 2 * x))
        return self.lstm(once * twice)[1][0].square().mean()


def halves():
    return inputs(65, 4, 5).split(2, dim=1)


def train_on_a_half(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    net = DistributedDataParallel(Both())
    with net.no_sync():
        net(halves()[rank]).backward()
    net(halves()[rank]).backward()
    torch.save([p.grad for p in net.parameters()], f"{folder}/{rank}.pt")
    leave()


@pytest.mark.quick(0)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_two_processes_find_the_gradient_of_one(tmp_path):
    torch.multiprocessing.spawn(train_on_a_half, (str(tmp_path),), nprocs=2)
    alone = Both()
    for part in halves():
        alone(part).backward()
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert_near(found, [p.grad for p in alone.parameters()])
