"""A sequence cut over ranks along time: the numbers of one process."""

import copy
import random
import re
import warnings

import pytest
import torch
from torch import distributed

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from oracles.processes import on_ranks, spawn
from retrograde.errors import CellError, RankError
from retrograde.ranks import crossing, range_map

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
]

DOUBLE = torch.float64
CELLS = {"RNN": rg.RNN, "GRU": rg.GRU, "LSTM": rg.LSTM}
WAYS = ["linear", "tree"]


def make(cell="GRU", layers=1, dtype=DOUBLE, hidden=4, **options):
    torch.manual_seed(0)
    return CELLS[cell](3, hidden, layers, dtype=dtype, **options)


def inputs(length, batch=3, dtype=DOUBLE):
    torch.manual_seed(1)
    return torch.randn(length, batch, 3, dtype=dtype)


def states(net, batch=3):
    torch.manual_seed(2)
    made = [torch.randn(s.shape, dtype=s.dtype) for s in net._zeros(batch, net.weight_ih_l0)]
    return tuple(made) if net.mode == "LSTM" else made[0]


def as_tuple(state):
    return state if isinstance(state, tuple) else (state,)


def weights_of(outputs):
    """A loss at every step, another one for each."""
    found = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return found.view_as(outputs).cos()


def alone(net, x, hx=None, squares=False):
    """One process: outputs, final state, gradients of parameters, inputs and initial state."""
    net, x = copy.deepcopy(net), x.clone().requires_grad_()
    hx = None if hx is None else tuple(s.clone().requires_grad_() for s in as_tuple(hx))
    given = hx if hx is None or net.mode == "LSTM" else hx[0]
    y, last = net(x, given)
    loss = y.square().sum() if squares else (y * weights_of(y)).sum()
    loss = loss + sum(s.square().sum() for s in as_tuple(last))
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


def as_rank(net, x, cuts, hx=None, squares=False, **options):
    """What one of the ranks does, and finds."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    net, edges = copy.deepcopy(net), [0, *cuts, x.shape[0]]
    mine = slice(edges[rank], edges[rank + 1])
    width = net.proj_size or net.hidden_size
    weights = weights_of(torch.empty(*x.shape[:2], width, dtype=x.dtype))[mine].to(x)
    part = x[mine].clone().requires_grad_()
    sharded = rg.TimeSharded(net, **options)
    given = rank == 0 and hx is not None
    hx = tuple(s.clone().requires_grad_() for s in as_tuple(hx)) if given else None
    y, final = sharded(part, hx if hx is None or net.mode == "LSTM" else hx[0])
    assert (final is None) == (rank < size - 1)
    loss = y.square().sum() if squares else (y * weights).sum()
    if final is not None:
        loss = loss + sum(s.square().sum() for s in as_tuple(final))
    loss.backward()
    return (
        y.detach(),
        None if final is None else [s.detach() for s in as_tuple(final)],
        [p.grad for p in net.parameters()],
        part.grad,
        [s.grad for s in hx or ()],
    )


def check(found, expected, tolerance=1e-10):
    def near(a, b):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    outputs, finals, parameters, xs, initial = zip(*found, strict=True)
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


def cases(size):
    """Some modules, shapes, cuts and options for so many ranks; each kind, and drawn ones."""
    rng = random.Random(size)
    dense = [
        {"cell": cell, "layers": layers, "dtype": dtype}
        for cell in CELLS
        for layers, dtype in ((1, torch.float32), (2, DOUBLE))
    ]
    made = [({**how}, {}, 17, 3, True) for how in dense]
    made += [
        ({"cell": "LSTM", "proj_size": 2, "layers": 2}, {"way": "linear"}, 9, 2, True),
        ({"cell": "LSTM", "hidden": 1}, {}, 2, 1, True),  # more ranks than steps
        ({"cell": "GRU", "layers": 2}, {}, 9, 0, False),  # no samples
        ({"cell": "GRU", "bias": False}, {"pieces": 1}, 5, 5, True),
        ({"cell": "RNN", "nonlinearity": "relu"}, {"pieces": 7}, 9, 5, False),
        ({"cell": "GRU"}, {"pieces": 2}, 33, 5, True),
    ]
    for how, options, length, batch, given in made:
        cuts = sorted(rng.randint(0, length) for _ in range(size - 1))
        for way in [options["way"]] if "way" in options else WAYS:
            yield how, {**options, "way": way}, length, batch, given, cuts


def a_case(how, length, batch, given):
    net, x = make(**how), inputs(length, batch, how.get("dtype", DOUBLE))
    return net, x, states(net, batch) if given else None


def every_case(rank, size):
    found = []
    for how, options, length, batch, given, cuts in cases(size):
        net, x, hx = a_case(how, length, batch, given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a Jacobian that is wrong would be noticed
            found.append(as_rank(net, x, cuts, hx, **options))
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_the_numbers_are_those_of_one_process(size, tmp_path):
    ranks = on_ranks(size, tmp_path, every_case, size)
    for k, (how, _, length, batch, given, _) in enumerate(cases(size)):
        net, x, hx = a_case(how, length, batch, given)
        check([found[k] for found in ranks], alone(net, x, hx), within(net, x, hx))


def other_layouts(rank, layout):
    x, net = laid_out(layout)
    dim, found = 1 if layout == "batch_first" else 0, []
    for way in WAYS:
        mine = copy.deepcopy(net)
        y, last = rg.TimeSharded(mine, way=way)(x.tensor_split([4, 5], dim)[rank])
        y.square().sum().backward()
        shapes = None if last is None else [s.shape for s in last]
        found.append((y.detach(), mine.weight_hh_l0.grad, shapes))
    return found


def laid_out(layout):
    whole = inputs(6)
    x = whole.transpose(0, 1) if layout == "batch_first" else whole[:, 0]
    return x, make("LSTM", batch_first=layout == "batch_first")


@pytest.mark.quick(0)
@pytest.mark.parametrize("layout", ["batch_first", "unbatched"])
def test_other_layouts(layout, tmp_path):
    x, net = laid_out(layout)
    expected, last = net(x)
    expected.square().sum().backward()
    for found in zip(*on_ranks(3, tmp_path, other_layouts, layout), strict=True):
        parts, grads, shapes = zip(*found, strict=True)
        torch.testing.assert_close(torch.cat(parts, 1 if layout == "batch_first" else 0), expected)
        torch.testing.assert_close(grads[0], net.weight_hh_l0.grad)
        assert shapes[-1] == [s.shape for s in last]


def train(net, run, optimizer):
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = run(net).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()]


def trained(rank):
    net, x = make(), inputs(12)
    sharded = rg.TimeSharded(net, way="tree")
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    return train(net, lambda _: sharded(x.tensor_split(3)[rank])[0], optimizer)


def test_training_keeps_the_ranks_together(tmp_path):
    net, x = make(), inputs(12)
    expected = train(net, lambda net: net(x)[0], torch.optim.Adam(net.parameters(), 0.05))
    found = on_ranks(3, tmp_path, trained)
    sums = [sum(parts) for parts in zip(*(losses for losses, _ in found), strict=True)]
    assert sums == pytest.approx(expected[0], rel=1e-10)
    for _, mine in found:
        for a, b in zip(mine, expected[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def without_a_gradient_and_twice(rank):
    net, x = make(), inputs(8)
    sharded = rg.TimeSharded(net)
    with torch.no_grad():
        y, _ = sharded(x.tensor_split(2)[rank])
    assert not y.requires_grad
    y, _ = sharded(x.tensor_split(2)[rank])
    y.sum().backward(retain_graph=True)
    with pytest.raises(RankError, match="made already"):
        y.sum().backward()
    head = torch.nn.Linear(4, 1)
    head.weight.grad = torch.full((1, 4), rank + 1.0)
    sharded.add_up(head)
    assert head.weight.grad.tolist() == [[3.0] * 4]
    assert head.bias.grad.tolist() == [0.0]
    return y.detach()


def test_without_a_gradient_twice_and_another_modules_sum(tmp_path):
    found = on_ranks(2, tmp_path, without_a_gradient_and_twice)
    torch.testing.assert_close(torch.cat(found), make()(inputs(8))[0].detach())


def hooked(rank):
    net, x, seen = make(), inputs(12), []
    net.weight_hh_l0.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    y, _ = rg.TimeSharded(net, way="tree")(x.tensor_split(3)[rank])
    y.square().sum().backward()
    return seen, net.weight_hh_l0.grad


def test_hooks_of_parameters_see_the_whole_gradient_once(tmp_path):
    net = make()
    net(inputs(12))[0].square().sum().backward()
    expected = net.weight_hh_l0.grad
    for seen, grad in on_ranks(3, tmp_path, hooked):
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], expected)
        torch.testing.assert_close(grad, 2 * expected)


DROPS = {
    "RNN": {"memory": "100%"},
    "GRU": {"memory": "64KiB"},
    "LSTM": {"memory": "100%", "batch_first": True},
    "scan": {"backward": "scan"},
    "nothing": {},
}


def dropping(what):
    return make(what if what in CELLS else "GRU", 3, dropout=0.4, **DROPS[what])


def seeded(net, run, x):
    """Outputs, gradients, and where the generator is afterwards."""
    torch.manual_seed(7)
    y = run(x.transpose(0, 1) if net.batch_first else x)[0]
    y = y.transpose(0, 1) if net.batch_first else y
    y.square().sum().backward()
    return y.detach(), [p.grad for p in net.parameters()], torch.get_rng_state()


def with_dropout(rank, cuts, pieces):
    x, found = inputs(30), {}
    for what in DROPS:
        net = dropping(what)
        part = x.tensor_split(cuts)[rank]
        found[what] = seeded(net, rg.TimeSharded(net, pieces=pieces), part)
    return found


@pytest.mark.parametrize(("cuts", "pieces"), [([13], None), ([2, 2], 2)], ids=str)
def test_dropout_is_that_of_one_process(cuts, pieces, tmp_path):
    """A mask follows from the place in the sequence and the batch, on short ranks too."""
    ranks = on_ranks(len(cuts) + 1, tmp_path, with_dropout, cuts, pieces)
    for what in DROPS:
        net = dropping(what)
        net.memory = net.memory or "1MiB"  # torch's own dropout has other masks
        y, gradients, after = seeded(net, net, inputs(30))
        torch.testing.assert_close(torch.cat([found[what][0] for found in ranks]), y)
        for found in ranks:
            torch.testing.assert_close(found[what][1], gradients)
            assert torch.equal(found[what][2], after)


def changed(rank):
    """The calls of a module that does more than its forward, by a line; and the refusals."""
    x, found = inputs(12).tensor_split(3)[rank], {}
    for change in CHANGES:
        for way in WAYS:
            net = make(memory="64KiB")
            with Changed(change, net), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a tree goes back by a line
                try:
                    y, _ = rg.TimeSharded(net, way=way)(x)
                    y.square().sum().backward()
                    found[change, way] = y.detach(), [p.grad for p in net.parameters()]
                except RankError as error:
                    found[change, way] = str(error)
    return found


def test_a_module_whose_call_does_more_than_its_forward(tmp_path):
    ranks = on_ranks(3, tmp_path, changed)
    for (change, way), first in ranks[0].items():
        if "backward" in change:
            assert f"has a {change}, which would get the gradients of parts" in first
            continue
        net = make()
        with Changed(change, net):
            y = net(inputs(12))[0]
        y.square().sum().backward()
        found = torch.cat([one[change, way][0] for one in ranks])
        torch.testing.assert_close(found, y.detach())
        torch.testing.assert_close(first[1], [p.grad for p in net.parameters()])


DISAGREE = {
    "batch": "the batch is 2 on rank 1 and 3 on rank 0",
    "cell": r"the module is LSTM\(3, 4\) on rank 1 and GRU",
    "layers": r"the module is GRU\(3, 4, num_layers=2\) on rank 1",
    "type": "the type is torch.float32 on rank 1",
    "state": "rank 1 cannot run: rank 1 was given an initial state",
    "features": "rank 1 cannot run: the input has 2 features: expected 3",
    "way": "way= is tree on rank 1 and linear on rank 0",
    "pieces": "pieces= is 2 on rank 1 and None on rank 0",
    "unbatched": "the batch is None on rank 1 and 3 on rank 0",
    "weights": r"the parameters' sum \(seed them alike",
    "frozen": "whether a gradient is wanted is False on rank 1",
    "mode": "whether the module is training is False on rank 1",
    "dimensions": "rank 1 cannot run: the input has 4 dimensions",
    "budget": "rank 1 cannot run: .*budget",
    "dropout": "rank 1 cannot run: way='tree' knows no dropout between layers, no proj_size=",
}


def called_wrongly(what):
    """Module, options, input and initial state of a rank that does not call as rank 0 does."""
    x = inputs(4)
    modules = {
        "cell": {"cell": "LSTM"},
        "layers": {"layers": 2},
        "type": {"dtype": torch.float32},
        "budget": {"memory": "1KiB"},
        "dropout": {"layers": 2, "dropout": 0.5},
    }
    given = {
        "batch": x[:, :2],
        "type": x.float(),
        "features": x[..., :2],
        "unbatched": x[:, 0],
        "dimensions": x[None],
        "budget": inputs(400),
    }
    options = {"way": {"way": "tree"}, "dropout": {"way": "tree"}, "pieces": {"pieces": 2}}
    net = make(**modules.get(what, {}))
    net.requires_grad_(what != "frozen").train(what != "mode")
    if what == "weights":
        with torch.no_grad():
            net.weight_hh_l0 += 1
    hx = states(net) if what == "state" else None
    return net, options.get(what, {}), given.get(what, x), hx


def disagreeing(rank):
    """Rank 0 calls well, rank 1 does not."""
    found = {}
    for what in DISAGREE:
        net, options, x, hx = called_wrongly(what if rank else "")
        sharded = rg.TimeSharded(net, **options)
        with pytest.raises(RankError) as error:
            sharded(x, hx)
        found[what] = str(error.value)
        if what in ("batch", "features"):
            sharded(inputs(4))[0].sum().backward()  # nobody waits, so work goes on
    return found


def test_ranks_that_disagree_are_told_which_and_how_before_any_work(tmp_path):
    for found in on_ranks(2, tmp_path, disagreeing):
        for what, message in DISAGREE.items():
            assert re.search(message, found[what], re.DOTALL), (what, found[what])


def test_what_cannot_be_sharded_is_refused():
    for rnn, why in [
        (make(bidirectional=True), "got two directions"),
        (torch.nn.GRU(3, 4), "got GRU: expected an rg.RNN"),
    ]:
        with pytest.raises(CellError, match=why):
            rg.TimeSharded(rnn)
    for options in ({"way": "auto"}, {"way": "gather"}, {"pieces": 0}):
        with pytest.raises(CellError, match="expected"):
            rg.TimeSharded(make(), **options)
    with pytest.raises(RankError, match="no process group"):
        rg.TimeSharded(make())


def within_a_budget(rank):
    found = []
    for options, memory in BUDGETS:
        net, x = make("LSTM", layers=2, memory=memory), inputs(90)
        found.append(as_rank(net, x, [20, 50], states(net), **options))
    return found


BUDGETS = [({"way": "linear"}, "60%"), ({"way": "tree", "pieces": 1}, "16KiB")]


@pytest.mark.quick(0)
def test_ranks_keep_to_a_budget_each(tmp_path):
    net, x = make("LSTM", layers=2), inputs(90)
    expected = alone(net, x, states(net))
    for found in zip(*on_ranks(3, tmp_path, within_a_budget), strict=True):
        check(found, expected)


def memory_of_a_rank(rank):
    torch.manual_seed(0)
    x = torch.randn(1600, 4, 3).tensor_split(distributed.get_world_size())[rank]
    found = []
    for memory in (None, "20%"):
        net = rg.TimeSharded(rg.LSTM(3, 32, memory=memory), pieces=1)

        def call(net=net):
            outputs, _ = net(x)
            outputs.square().sum().backward()
            return outputs.detach()

        call()
        net.zero_grad()
        found.append(rg.measure(call).working_bytes)
    return found


@pytest.mark.quick(0)
def test_a_ranks_memory_falls_with_the_number_of_ranks(tmp_path):
    """And again within a budget; parameters' gradients are a small part that does not fall."""
    whole, budgeted = on_ranks(1, tmp_path, memory_of_a_rank)[0]
    for here, kept in on_ranks(4, tmp_path, memory_of_a_rank):
        assert here < 0.35 * whole
        assert kept < 0.5 * here
        assert kept < 0.5 * budgeted


def products_that_overflow(rank):
    """One direction of the state grows tenfold a step, and nothing ever enters it."""
    net, x = overflowing()
    with pytest.warns(RuntimeWarning, match="overflowed, cancelled"):
        return as_rank(net, x, [50, 100, 150], squares=True, way="tree")


def overflowing():
    net = rg.RNN(2, 2, bias=False)
    with torch.no_grad():
        net.weight_ih_l0.copy_(torch.tensor([[0.0, 0.0], [0.1, 0.2]]))
        net.weight_hh_l0.copy_(torch.tensor([[10.0, 0.0], [0.0, 0.5]]))
    torch.manual_seed(0)
    return net, torch.rand(200, 2, 2)


def test_products_that_overflow_are_not_used(tmp_path):
    net, x = overflowing()
    expected = alone(net, x, squares=True)
    assert all(g.isfinite().all() for g in expected[2])
    check(on_ranks(4, tmp_path, products_that_overflow), expected, 2e-6)


WRONG = [1e-3, 1.0, torch.inf, torch.nan]


def wrong_jacobians(rank):
    """As one would be whose digits had cancelled."""
    found = []
    for wrong in WRONG:

        def rows_of(*given, wrong=wrong):
            rows = range_map.rows_of(*given)
            rows[1, 2, 0] += wrong
            return rows

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(crossing, "rows_of", rows_of)
            with pytest.warns(RuntimeWarning, match="overflowed, cancelled"):
                found.append(as_rank(make(), inputs(12), [3, 6, 9], way="tree"))
    return found


def test_a_jacobian_that_is_wrong_is_noticed(tmp_path):
    for found in zip(*on_ranks(4, tmp_path, wrong_jacobians), strict=True):
        check(found, alone(make(), inputs(12)))


def long_sequences(rank, length):
    """Gradients that neither grow nor fall, in single precision, over many steps."""
    torch.manual_seed(0)
    net = rg.RNN(3, 8, nonlinearity="relu", bias=False)
    with torch.no_grad():
        net.weight_hh_l0.copy_(torch.eye(8)[torch.randperm(8)])
        net.weight_ih_l0.abs_()
    for each in (net, rg.GRU(3, 8)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = torch.rand(length, 2, 3)
            as_rank(each, x, [length // 4, length // 2, 3 * length // 4], way="tree")


@pytest.mark.quick(0)
@pytest.mark.parametrize("length", [400, 3000])
def test_rounding_alone_sets_off_no_alarm(length, tmp_path):
    on_ranks(4, tmp_path, long_sequences, length)


def on_a_gpu(rank, size, folder, backend):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    found = []
    for cell in CELLS:
        for way in WAYS:
            net, x = make(cell, layers=2).cuda(), inputs(23).cuda()
            hx = states(net)
            hx = tuple(s.cuda() for s in hx) if isinstance(hx, tuple) else hx.cuda()
            cuts = sorted((7 * k) % 23 for k in range(1, size))
            numbers = as_rank(net, x, cuts, hx, way=way)
            found.append(torch.utils._pytree.tree_map(on_the_cpu, numbers))
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def on_the_cpu(t):
    assert t is None or t.is_cuda
    return None if t is None else t.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("backend", "size"), [("gloo", 3), ("nccl", None)])
def test_gpus_find_the_same(backend, size, tmp_path):
    """Ranks that share a GPU meet over gloo; NCCL wants one each."""
    size = size or torch.cuda.device_count()
    spawn(on_a_gpu, (size, str(tmp_path), backend), nprocs=size)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    for k, cell in enumerate(cell for cell in CELLS for _ in WAYS):
        net, x = make(cell, layers=2), inputs(23)
        check([found[k] for found in ranks], alone(net, x, states(net)))
