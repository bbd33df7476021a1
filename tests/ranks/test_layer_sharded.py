"""A chain of layers cut over ranks: the numbers of one process."""

import copy
import itertools
import pickle
import re

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.processes import spawn
from retrograde.errors import CellError, RankError
from retrograde.jacobians.factor import from_pairs, full, identity
from retrograde.jacobians.pattern import Pattern, Product
from retrograde.ranks.group_transport import GroupLinks
from retrograde.ranks.transport import Parcel, Simulated, simulate
from retrograde_papers.networks import lenet5

DOUBLE = torch.float64
WAYS = ["linear", "tree", "gather"]


def mlp(dtype=DOUBLE):
    torch.manual_seed(0)
    sizes = [7, 9, 6, 8, 5, 4]
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def lenet():
    torch.manual_seed(0)
    return nn.Sequential(*lenet5()).to(DOUBLE)


def batch(*shape, dtype=DOUBLE):
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=dtype)


def loss_of(y):
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).cos().view_as(y)).sum()


def grads_of(net):
    return {name: None if p.grad is None else p.grad for name, p in net.named_parameters()}


def alone(net, x):
    net, x = copy.deepcopy(net), x.clone()
    x = x.requires_grad_() if x.is_floating_point() else x
    y = net(x)
    loss_of(y).backward()
    return y.detach(), grads_of(net), x.grad


def as_rank(links, net, x, **options):
    """What one of the ranks does, and finds."""
    sharded = rg.LayerSharded.cut(copy.deepcopy(net), links, **options)
    first, last = links.rank == 0, links.rank == links.size - 1
    given = x.clone() if first else None
    if first and x.is_floating_point():
        given.requires_grad_()
    y = sharded(given)
    if not last:
        assert y.shape == ()
        assert y == 0
    (loss_of(y) if last else y).backward()
    return y.detach(), grads_of(sharded.layers), given.grad if first else None, sharded.report


def check(found, expected, tolerance=1e-10):
    def near(a, b):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    outputs, grads, inputs, _ = zip(*found, strict=True)
    near(outputs[-1], expected[0])
    whole = {name: grad for mine in grads for name, grad in mine.items()}
    assert sum(map(len, grads)) == len(whole)
    assert whole.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (grad is None) == (whole[name] is None)
        if grad is not None:
            near(whole[name], grad)
    if expected[2] is not None:
        near(inputs[0], expected[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_the_numbers_are_those_of_one_process(size, way):
    net, x = mlp(), batch(5, 7)
    check(simulate(size, lambda links: as_rank(links, net, x, way=way)), alone(net, x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_lenet(size, way):
    net, x = lenet(), batch(2, 3, 32, 32)
    check(simulate(size, lambda links: as_rank(links, net, x, way=way)), alone(net, x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_more_ranks_than_layers(layers, way):
    net, x = mlp()[:layers], batch(3, 7)
    check(simulate(5, lambda links: as_rank(links, net, x, way=way)), alone(net, x))


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_pieces_of_the_batch_and_cuts(pieces):
    net, x = mlp(), batch(5, 7)
    for way, cuts in [("linear", [1, 2, 8]), ("tree", [0, 4, 4]), ("gather", [2, 9, 9])]:
        options = {"way": way, "pieces": pieces, "cuts": cuts}
        check(simulate(4, lambda links, o=options: as_rank(links, net, x, **o)), alone(net, x))


@pytest.mark.parametrize("way", WAYS)
def test_float32_and_a_reports_bytes(way):
    net, x = mlp(torch.float32), batch(4, 7, dtype=torch.float32)
    found = simulate(4, lambda links: as_rank(links, net, x, way=way, pieces=2))
    check(found, alone(net, x), 2e-6)
    reports = [report for *_, report in found]
    assert {report.way for report in reports} == {way}
    if way == "linear":  # for each piece the gradient of what was handed on
        sizes = [0] + [net[:cut](x).shape[1] for cut in (2, 4, 6)]
        assert [report.messages for report in reports] == [0, 2, 2, 2]
        assert [report.sent_bytes for report in reports] == [16 * size for size in sizes]


class Odd(nn.Module):
    """No rule knows it."""

    def __init__(self, size=9):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, size, dtype=DOUBLE))

    def forward(self, x):
        return (x * self.weight).sin().cumsum(1)


class Centred(nn.Module):
    """Couples samples."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("way", WAYS)
def test_layers_without_a_rule_in_place_and_frozen(way):
    net, x = mlp(), batch(5, 7)
    net[4].weight.requires_grad_(False)
    net = nn.Sequential(net[0], nn.ReLU(True), Odd(), *net[2:5], nn.ReLU(True), *net[5:])
    for cuts in ([1, 4], [2, 6], [6, 9]):
        options = {"way": way, "cuts": cuts}
        check(simulate(3, lambda links, o=options: as_rank(links, net, x, **o)), alone(net, x))


def test_batch_normalisation_embeddings_and_budgets():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net, x = net.to(DOUBLE), torch.arange(12).view(6, 2) % 5
    for cuts in ([0, 2], [1, 3], [2, 2]):
        options = {"cuts": cuts, "pieces": 1}
        check(simulate(3, lambda links, o=options: as_rank(links, net, x, **o)), alone(net, x))
    net, x = mlp()[:3], batch(32, 7)
    deep = rg.Sequential(*net, memory="1MiB")
    check(simulate(1, lambda links: as_rank(links, deep, x)), alone(net, x))


@pytest.mark.parametrize("way", WAYS)
def test_a_training_is_that_of_one_process(way):
    x, start = batch(6, 7), mlp()

    def train(net, run):
        optimizer = torch.optim.Adam(net.parameters(), 0.05) if list(net.parameters()) else None
        losses = []
        for _ in range(4):
            net.zero_grad()
            y = run()
            loss = y.square().sum()
            (loss if y.ndim else y).backward()
            if optimizer is not None:
                optimizer.step()
            losses.append(loss.item())
        return losses, {name: p.detach() for name, p in net.named_parameters()}

    def rank(links):
        net = rg.LayerSharded.cut(copy.deepcopy(start), links, way=way)
        return train(net.layers, lambda: net(None if links.rank else x))

    net = copy.deepcopy(start)
    losses, parameters = train(net, lambda: net(x))
    found = simulate(3, rank)
    assert found[-1][0] == pytest.approx(losses, rel=1e-10)
    whole = {name: p for _, mine in found for name, p in mine.items()}
    assert whole.keys() == parameters.keys()
    for name, p in parameters.items():
        torch.testing.assert_close(whole[name], p, rtol=1e-9, atol=1e-9)


def test_without_a_gradient_and_twice():
    net, x = mlp(), batch(4, 7)

    def rank(links):
        sharded = rg.LayerSharded.cut(copy.deepcopy(net), links, way="tree")
        given = None if links.rank else x
        with torch.no_grad():
            y = sharded(given)
        assert not y.requires_grad
        again = sharded(given)
        again.sum().backward(retain_graph=True)
        with pytest.raises(RankError, match="made already"):
            again.sum().backward()
        return y

    torch.testing.assert_close(simulate(3, rank)[-1], net(x).detach())


def test_hooks_of_parameters_are_called_once():
    net, x = mlp(), batch(4, 7)

    def rank(links):
        sharded, seen = rg.LayerSharded.cut(copy.deepcopy(net), links, pieces=2), []
        for p in sharded.parameters():
            p.register_hook(lambda g: seen.append(g.shape))
        sharded(None if links.rank else x).sum().backward()
        return len(seen) == len(list(sharded.parameters()))

    assert simulate(2, rank) == [True, True]


def said(size, make, given=None):
    """What ranks say that are made and called like this."""

    def caught(links):
        sharded = make(links)
        x = batch(4, 7) if given is None else given
        with pytest.raises(RankError) as error:
            sharded(None if links.rank else x)
        return str(error.value)

    return simulate(size, caught, timeout=5)


def cut(links, net, options=(), others=()):
    """Rank 1 has other options than the others."""
    net = copy.deepcopy(net)
    return rg.LayerSharded.cut(net, links, **dict(options if links.rank == 1 else others))


def test_ranks_that_disagree_are_told_which_and_how():
    net = mlp()
    cases = [
        ({"way": "tree"}, "way= is tree on rank 1 and linear on rank 0"),
        ({"pieces": 3}, "pieces= is 3 on rank 1 and 0 on rank 0"),
    ]
    for options, message in cases:
        for told in said(3, lambda links, o=options: cut(links, net, o)):
            assert re.search(message, told), told

    def evaluating(links):
        return cut(links, net).train(links.rank == 0)

    def narrow(links):
        return cut(links, net.float() if links.rank == 1 else mlp())

    for make, message in [
        (evaluating, "whether the module is training is False on rank 1 and True on rank 0"),
        (narrow, "the type is torch.float32 on rank 1 and torch.float64 on rank 0"),
    ]:
        for told in said(2, make):
            assert message in told


def test_ranks_that_cannot_run_are_named():
    hooked = mlp()
    hooked[4].register_full_backward_hook(lambda *_: None)
    normed = nn.Sequential(mlp()[0], nn.BatchNorm1d(9), nn.ReLU()).to(DOUBLE)
    centred = nn.Sequential(mlp()[0], Centred(), nn.ReLU())
    pair = nn.Sequential(mlp()[0], nn.LSTM(9, 9), nn.ReLU()).to(DOUBLE)
    stray = torch.ones(9, dtype=DOUBLE, requires_grad=True)

    class Stray(nn.Module):
        def forward(self, x):
            return x * stray

    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError

    tree, one = {"way": "tree"}, {"pieces": 1}
    cases = [
        (mlp(), {}, batch(4, 6), "rank 0 cannot run: .*shapes cannot be multiplied"),
        (mlp(), {}, batch(7), "rank 0 cannot run: the input has 1 dimensions"),
        (mlp(), {}, [1], "rank 0 cannot run: it was given a list"),
        (nn.Sequential(mlp()[0], mlp()[4], mlp()[6]), {}, None, "rank 1 cannot run: .*multiplied"),
        (nn.Sequential(mlp()[0], Broken(), mlp()[2]), {}, None, "rank 1 cannot run: KeyError"),
        (normed, {}, None, "rank 1 cannot run: BatchNorm1d takes its .* 3 pieces: expected piec"),
        (normed, {**tree, **one}, None, "rank 1 cannot run: BatchNorm1d in training mode"),
        (centred, tree, None, "rank 1 cannot run: a sample's output depends on other samples"),
        (pair, {}, None, "rank 1 cannot run: the layers returned a tuple: expected one tensor"),
        (hooked, tree, None, "rank 1 cannot run: Linear has a backward hook"),
        (nn.Sequential(mlp()[0], Stray()), {"cuts": [1, 2]}, None, "a tensor that requires a grad"),
        (nn.Sequential(mlp()[0], Stray()), {**tree, "cuts": [1, 2]}, None, "is not one of their p"),
        (nn.Sequential(nn.Flatten(0), mlp()[0]), {}, None, "rank 1 .* took .*: expected samples f"),
    ]
    for net, options, x, message in cases:
        for told in said(3, lambda links, n=net, o=options: cut(links, n, o, o), x):
            assert re.search(message, told), told

    def given_to_both(links):
        with pytest.raises(RankError, match="rank 1 cannot run: it was given an input"):
            cut(links, mlp())(batch(4, 7))

    simulate(2, given_to_both, timeout=5)


def test_what_cannot_be_cut_is_refused():
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    tied.append(tied[0])

    def refused(links):
        for whole, options, why in [
            (nn.Linear(3, 3), {}, "got Linear: expected a torch.nn.Sequential"),
            (mlp(), {"cuts": [3]}, "expected 2 ascending numbers from 0 to 9"),
            (mlp(), {"cuts": [5, 3]}, "ascending"),
            (mlp(), {"way": "ring"}, "unknown way='ring'"),
            (mlp(), {"pieces": 0}, "pieces=0"),
            (tied, {}, "the parameter 2.weight is in layers of rank 0 and of rank 2"),
        ]:
            with pytest.raises(CellError, match=why):
                rg.LayerSharded.cut(whole, links, **options)
        with pytest.raises(CellError, match="got GRU"):
            rg.LayerSharded(nn.GRU(3, 3), links)

    simulate(3, refused)


def test_patterns_travel_and_are_one_object_where_they_arrive():
    sparse = from_pairs(torch.tensor([0, 1]).numpy(), torch.tensor([2, 0]).numpy(), (2, 3))
    pattern = Pattern(identity(4), sparse, full(2, 5))
    parcel = Parcel.of(pattern)
    found, again = (Parcel.open(parcel.letter, parcel.block()) for _ in range(2))
    assert found is again is pickle.loads(pickle.dumps(pattern))
    assert found is not pattern
    assert found.shape == pattern.shape
    assert found.nnz == pattern.nnz
    assert (found.indices == pattern.indices).all()
    assert (found.indptr == pattern.indptr).all()
    assert parcel.nbytes == sparse.arrays[0].nbytes + sparse.arrays[1].nbytes
    assert copy.deepcopy(pattern) is pattern


def test_plans_for_products_are_found_again_after_a_journey(monkeypatch):
    made, send = [], Simulated.send

    def packed(links, element, to):
        parcel = Parcel.of(element)
        send(links, Parcel.open(parcel.letter, parcel.block()), to)

    def planned(plan, left, right, *rest):
        made.append(left.shape)
        plan_of(plan, left, right, *rest)

    plan_of = Product.__init__
    monkeypatch.setattr(Simulated, "send", packed)
    monkeypatch.setattr(Product, "__init__", planned)
    net, x = lenet(), batch(2, 3, 32, 32)
    expected, counts = alone(net, x), []

    def rank(links):
        sharded = rg.LayerSharded.cut(copy.deepcopy(net), links, way="tree")
        for _ in range(3):
            sharded.zero_grad()
            found = sharded(None if links.rank else x)
            (found if links.rank < 7 else loss_of(found)).backward()
            links.gather(None)
            counts.append(len(made))
            links.gather(None)
        return None, grads_of(sharded.layers), None, sharded.report

    found = simulate(8, rank)
    check([(expected[0], *each[1:]) for each in found], (*expected[:2], None))
    assert counts[7] == counts[-1] > 0
    assert sum(report.products for *_, report in found) > 7


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_without_samples(way):
    net, x = mlp(), batch(0, 7)
    net.insert(3, Odd(6))
    check(simulate(3, lambda links: as_rank(links, net, x, way=way)), alone(net, x))


def in_a_process(rank, size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    links, found = GroupLinks(), {}
    for way in WAYS:
        found[way] = [as_rank(links, lenet(), batch(2, 3, 32, 32), way=way) for _ in range(2)]
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.quick(0)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 2, 4, 5, 8))]
)
def test_processes_find_the_same(size, tmp_path):
    spawn(in_a_process, (size, str(tmp_path)), nprocs=size)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(size)]
    expected = alone(lenet(), batch(2, 3, 32, 32))
    for way in WAYS:
        for turn in range(2):
            check([each[way][turn] for each in found], expected)
