"""A sequence cut over ranks along time: the numbers of one process."""

import copy
import itertools
import re
import warnings

import pytest
import torch

import retrograde as rg
from oracles.processes import spawn
from retrograde.errors import CellError, RankError
from retrograde.ranks.group_transport import GroupLinks
from retrograde.ranks.transport import simulate

DOUBLE = torch.float64
CELLS = {"RNN": rg.RNN, "GRU": rg.GRU, "LSTM": rg.LSTM}


def make(cell="GRU", layers=1, dtype=DOUBLE, **options):
    torch.manual_seed(0)
    return CELLS[cell](3, 4, layers, dtype=dtype, **options)


def inputs(length, batch=3, dtype=DOUBLE):
    torch.manual_seed(1)
    return torch.randn(length, batch, 3, dtype=dtype)


def states(net, batch=3):
    torch.manual_seed(2)
    shape = (net.num_layers, batch, 4)
    made = [torch.randn(shape, dtype=net.weight_ih_l0.dtype) for _ in range(2)]
    return tuple(made) if net.mode == "LSTM" else made[0]


def as_tuple(state):
    return state if isinstance(state, tuple) else (state,)


def weights_of(outputs):
    """A loss at every step, another one for each."""
    found = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return found.view_as(outputs).cos()


def alone(net, x, hx=None):
    """One process: outputs, final state, gradients of parameters, inputs and initial state."""
    net, x = copy.deepcopy(net), x.clone().requires_grad_()
    hx = None if hx is None else tuple(s.clone().requires_grad_() for s in as_tuple(hx))
    given = hx if hx is None or net.mode == "LSTM" else hx[0]
    y, last = net(x, given)
    loss = (y * weights_of(y)).sum() + sum(s.square().sum() for s in as_tuple(last))
    loss.backward()
    return (
        y.detach(),
        as_tuple(last),
        [p.grad for p in net.parameters()],
        x.grad,
        [s.grad for s in hx or ()],
    )


def within(net, x, hx=None):
    """What is asked; or how far torch's own float32 is from float64 here, if that is more.

    For an LSTM that is 1.4e-6 on some processors, and what is compared is off twice.
    """
    if x.dtype is DOUBLE:
        return 1e-10
    exact = copy.deepcopy(net).double()
    given = None if hx is None else tuple(s.double() for s in as_tuple(hx))
    mine, theirs = alone(net, x, hx), alone(exact, x.double(), given)
    pairs = zip((*mine[2], mine[3], mine[0]), (*theirs[2], theirs[3], theirs[0]), strict=True)
    return max(2e-6, *(2 * float(((a - b).abs() / (1 + b.abs())).max()) for a, b in pairs))


def as_rank(links, net, x, cuts, hx=None, **options):
    """What one of the ranks does, and finds."""
    net, edges = copy.deepcopy(net), [0, *cuts, x.shape[0]]
    mine = slice(edges[links.rank], edges[links.rank + 1])
    weights = weights_of(torch.empty(*x.shape[:2], net.hidden_size, dtype=x.dtype))[mine].to(x)
    part = x[mine].clone().requires_grad_()
    sharded = rg.TimeSharded(net, links, **options)
    first, last = links.rank == 0, links.rank == links.size - 1
    hx = (
        tuple(s.clone().requires_grad_() for s in as_tuple(hx))
        if first and hx is not None
        else None
    )
    y, final = sharded(part, hx if hx is None or net.mode == "LSTM" else hx[0])
    assert (final is None) == (not last)
    loss = (y * weights).sum()
    if last:
        loss = loss + sum(s.square().sum() for s in as_tuple(final))
    loss.backward()
    return (
        y.detach(),
        None if final is None else [s.detach() for s in as_tuple(final)],
        [p.grad for p in net.parameters()],
        part.grad,
        [s.grad for s in hx or ()],
        sharded.report,
    )


def check(found, expected, tolerance=1e-10):
    def near(a, b):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    outputs, finals, parameters, xs, initial, _ = zip(*found, strict=True)
    near(torch.cat(outputs), expected[0])
    for a, b in zip(finals[-1], expected[1], strict=True):
        near(a, b.detach())
    for mine in parameters:
        for a, b, c in zip(mine, expected[2], parameters[0], strict=True):
            near(a, b)
            assert torch.equal(a, c)  # else the ranks would drift apart
    near(torch.cat(xs), expected[3])
    for a, b in zip(initial[0], expected[4], strict=True):
        near(a, b)


@pytest.mark.parametrize("way", ["auto", "linear", "tree", "gather"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_numbers_are_those_of_one_process(size, way):
    net, x = make("GRU", layers=2), inputs(17)
    hx, cuts = states(net), sorted((5 * k) % 17 for k in range(1, size))
    found = simulate(size, lambda links: as_rank(links, net, x, cuts, hx, way=way))
    check(found, alone(net, x, hx))


@pytest.mark.parametrize("way", ["linear", "tree"])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_cells_types_and_no_initial_state(cell, way, dtype):
    net, x = make(cell, layers=2, dtype=dtype), inputs(11, dtype=dtype)
    found = simulate(3, lambda links: as_rank(links, net, x, [4, 5], way=way))
    check(found, alone(net, x), within(net, x))


@pytest.mark.parametrize("way", ["linear", "tree", "gather"])
@pytest.mark.parametrize("cuts", [[0, 0, 0], [2, 2, 2], [0, 1, 1], [1, 2, 2]])
def test_more_ranks_than_steps(cuts, way):
    net, x = make("LSTM"), inputs(2)
    hx = states(net)
    found = simulate(4, lambda links: as_rank(links, net, x, cuts, hx, way=way))
    check(found, alone(net, x, hx))


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_of_the_batch(pieces):
    net, x = make("GRU"), inputs(9, batch=5)
    hx = states(net, batch=5)
    for way in ("linear", "tree"):
        found = simulate(
            2, lambda links, way=way: as_rank(links, net, x, [4], hx, way=way, pieces=pieces)
        )
        check(found, alone(net, x, hx))


@pytest.mark.parametrize("way", ["linear", "tree"])
@pytest.mark.parametrize("layout", ["batch_first", "unbatched"])
def test_other_layouts(layout, way):
    net = make("LSTM", batch_first=layout == "batch_first")
    whole = inputs(6)
    x = whole.transpose(0, 1) if layout == "batch_first" else whole[:, 0]
    expected, _ = net(x)
    expected.square().sum().backward()

    def rank(links):
        mine = copy.deepcopy(net)
        mine.zero_grad()
        part = x.tensor_split([4, 5], dim=1 if layout == "batch_first" else 0)[links.rank]
        y, _ = rg.TimeSharded(mine, links, way=way)(part)
        y.square().sum().backward()
        return y.detach(), mine.weight_hh_l0.grad

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a Jacobian that is wrong would be noticed
        parts, grads = zip(*simulate(3, rank), strict=True)
    torch.testing.assert_close(torch.cat(parts, 1 if layout == "batch_first" else 0), expected)
    torch.testing.assert_close(grads[0], net.weight_hh_l0.grad)


@pytest.mark.quick(0)
def test_auto_hands_over_in_a_line_until_waiting_is_dearer_than_a_jacobian():
    """Sweeps that take long make ranks wait; a state of few numbers makes a Jacobian cheap."""
    thin, wide = rg.RNN(2, 2), rg.RNN(2, 400)

    def rank(links, net, size, steps):
        net = copy.deepcopy(net)
        sharded = rg.TimeSharded(net, links, pieces=1)
        ways = set()
        for _ in range(2):
            sharded(torch.ones(steps, 2, 2))[0].sum().backward()
            ways.add(sharded.report.way)
        return ways

    one_thread = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways = simulate(3, lambda links: rank(links, wide, 400, 20))
        assert ways == [{"linear"}] * 3
        ways = simulate(12, lambda links: rank(links, thin, 2, 60), latency=0.02)
        assert ways in ([{"tree"}] * 12, [{"gather"}] * 12)
    finally:
        torch.set_num_threads(one_thread)


@pytest.mark.parametrize("way", ["auto", "linear", "tree", "gather"])
@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_without_samples(cell, way):
    net, x = make(cell, layers=2), inputs(9, batch=0)
    check(simulate(4, lambda links: as_rank(links, net, x, [2, 4, 4], way=way)), alone(net, x))


def test_training_keeps_the_ranks_together():
    x = inputs(12)

    def train(net, run):
        optimizer = torch.optim.Adam(net.parameters(), 0.05)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            y = run(net)
            loss = y.square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [p.detach() for p in net.parameters()]

    def rank(links):
        sharded = {}

        def run(net):
            made = sharded.setdefault(0, rg.TimeSharded(net, links, way="tree"))
            return made(x.tensor_split(3)[links.rank])[0]

        return train(copy.deepcopy(start), run)

    start = make("GRU")
    expected, parameters = train(copy.deepcopy(start), lambda net: net(x)[0])
    found = simulate(3, rank)
    sums = [sum(parts) for parts in zip(*(losses for losses, _ in found), strict=True)]
    assert sums == pytest.approx(expected, rel=1e-10)
    for _, mine in found:
        for a, b in zip(mine, parameters, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_without_a_gradient_and_twice():
    net, x = make("GRU"), inputs(8)

    def rank(links):
        sharded = rg.TimeSharded(copy.deepcopy(net), links)
        with torch.no_grad():
            y, _ = sharded(x.tensor_split(2)[links.rank])
        assert not y.requires_grad
        y, _ = sharded(x.tensor_split(2)[links.rank])
        y.sum().backward(retain_graph=True)
        with pytest.raises(RankError, match="made already"):
            y.sum().backward()
        return y.detach()

    found = simulate(2, rank)
    torch.testing.assert_close(torch.cat(found), net(x)[0].detach())


def told(*nets_and_inputs):
    """What ranks say that are called with these."""

    def rank(links):
        net, x, hx, options = nets_and_inputs[links.rank]
        rg.TimeSharded(net, links, **options)(x, hx)

    def caught(links):
        with pytest.raises(RankError) as error:
            rank(links)
        return str(error.value)

    return simulate(len(nets_and_inputs), caught, timeout=5)


def test_ranks_that_disagree_are_told_which_and_how():
    net, x = make(), inputs(4)
    cases = [
        ((net, x[:, :2], None, {}), "the batch is 2 on rank 1 and 3 on rank 0"),
        ((make("LSTM"), x, None, {}), r"the module is LSTM\(3, 4\) on rank 1 and GRU"),
        ((make(layers=2), x, None, {}), r"the module is GRU\(3, 4, num_layers=2\) on rank 1"),
        ((make(dtype=torch.float32), x.float(), None, {}), "the type is torch.float32 on rank 1"),
        ((net, x, states(net), {}), "rank 1 cannot run: rank 1 was given an initial state"),
        ((net, x[..., :2], None, {}), "rank 1 cannot run: the input has 2 features: expected 3"),
        ((net, x, None, {"way": "tree"}), "way= is tree on rank 1 and auto on rank 0"),
        ((net, x[:, 0], None, {}), "the batch is None on rank 1 and 3 on rank 0"),
    ]
    other = make()
    with torch.no_grad():
        other.weight_hh_l0 += 1
    cases.append(((other, x, None, {}), r"the parameters' sum \(seed them alike"))
    for wrong, message in cases:
        for said in told((net, x, None, {}), wrong):
            assert re.search(message, said), said


def test_what_cannot_be_sharded_is_refused():
    for rnn, why in [
        (make(bidirectional=True), "got two directions"),
        (torch.nn.GRU(3, 4), "got GRU: expected an rg.RNN"),
    ]:
        with pytest.raises(CellError, match=why):
            rg.TimeSharded(rnn)
    for options in ({"way": "ring"}, {"pieces": 0}):
        with pytest.raises(CellError, match="expected"):
            rg.TimeSharded(make(), **options)


def in_a_process(rank, size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    links, found = GroupLinks(), {}
    for name, options, memory in [
        ("linear", {"way": "linear"}, None),
        ("tree", {"way": "tree"}, None),
        ("gather", {"way": "gather"}, None),
        ("memory", {"way": "linear"}, "60%"),
        ("memory in a tree", {"way": "tree", "pieces": 1}, "16KiB"),
    ]:
        net, x = make("LSTM", layers=2), inputs(90)
        net.memory = memory
        found[name] = as_rank(links, net, x, [20, 50], states(net), **options)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_processes_find_the_same_within_a_budget_each(tmp_path):
    size = 3
    spawn(in_a_process, (size, str(tmp_path)), nprocs=size)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    net, x = make("LSTM", layers=2), inputs(90)
    expected = alone(net, x, states(net))
    for name in found[0]:
        check([each[name] for each in found], expected)


def every_kind(rank, size, folder):
    torch.set_num_threads(1)
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    found = {}
    for cell, dtype, way in KINDS:
        net, x = make(cell, layers=2, dtype=dtype), inputs(23, dtype=dtype)
        cuts = sorted((7 * k) % 23 for k in range(1, size))
        found[cell, dtype, way] = as_rank(GroupLinks(), net, x, cuts, states(net), way=way)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


KINDS = list(
    itertools.product(CELLS, [DOUBLE, torch.float32], ["auto", "linear", "tree", "gather"])
)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_any_number_of_processes(size, tmp_path):
    spawn(every_kind, (size, str(tmp_path)), nprocs=size)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for cell, dtype, way in KINDS:
        net, x = make(cell, layers=2, dtype=dtype), inputs(23, dtype=dtype)
        expected, tolerance = alone(net, x, states(net)), within(net, x, states(net))
        check([each[cell, dtype, way] for each in found], expected, tolerance)


def on_a_gpu(rank, size, folder, backend):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    found = {}
    for cell, way in itertools.product(CELLS, ["auto", "linear", "tree", "gather"]):
        net, x = make(cell, layers=2).cuda(), inputs(23).cuda()
        hx = states(net)
        hx = tuple(s.cuda() for s in hx) if isinstance(hx, tuple) else hx.cuda()
        cuts = sorted((7 * k) % 23 for k in range(1, size))
        *numbers, report = as_rank(GroupLinks(), net, x, cuts, hx, way=way)
        found[cell, way] = *torch.utils._pytree.tree_map(on_the_cpu, numbers), report
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def on_the_cpu(t):
    assert t is None or t.is_cuda
    return None if t is None else t.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("nccl", None)])
def test_gpus_find_the_same(backend, size, tmp_path):
    """Ranks that share a GPU meet over gloo; NCCL wants one each."""
    size = size or torch.cuda.device_count()
    torch.multiprocessing.spawn(on_a_gpu, (size, str(tmp_path), backend), nprocs=size)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for cell, way in found[0]:
        net, x = make(cell, layers=2), inputs(23)
        check([each[cell, way] for each in found], alone(net, x, states(net)))
