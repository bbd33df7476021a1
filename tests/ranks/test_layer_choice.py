"""Chains across ranks: the way that is found by trying, the cuts that are found by measuring."""

import copy
import itertools
import time

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.errors import CellError, RankError
from retrograde.ranks.layers import crossing, jacobian
from retrograde.ranks.layers.cuts import balanced, layer_seconds, where_to_cut
from retrograde.ranks.layers.way_timer import WayTimer
from retrograde.ranks.transport import simulate

DOUBLE = torch.float64


def chain(count=6, width=5):
    torch.manual_seed(0)
    layers = [(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*itertools.chain(*layers)).to(DOUBLE)


def batch(samples=4, width=5):
    torch.manual_seed(1)
    return torch.randn(samples, width, dtype=DOUBLE)


def loss_of(y):
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


def passes(links, net, x, count=8, **options):
    """The ways that some passes go, each with the gradients of this rank's layers."""
    sharded = rg.LayerSharded.cut(copy.deepcopy(net), links, **options)
    found = []
    for _ in range(count):
        sharded.zero_grad()
        y = sharded(None if links.rank else x)
        (loss_of(y) if links.rank == links.size - 1 else y).backward()
        found.append((sharded.report.way, gradients(sharded.layers)))
    return found


def check(found, net, x):
    """Every pass of every rank has the gradients of one process."""
    net = copy.deepcopy(net)
    loss_of(net(x)).backward()
    expected = gradients(net)
    for each in zip(*found, strict=True):
        whole = {name: g for _, mine in each for name, g in mine.items()}
        assert whole.keys() == expected.keys()
        for name, g in expected.items():
            torch.testing.assert_close(whole[name], g, rtol=1e-10, atol=1e-10)


class Slow(torch.autograd.Function):
    """Takes its time on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        time.sleep(0.02)
        return g


class Lingers(nn.Module):
    def forward(self, x):
        return Slow.apply(x)


def test_each_way_is_tried_and_the_fastest_goes_on():
    """In a line of five ranks five wait for one another; in a tree all linger at once."""
    net, x = chain(5), batch()
    for k in range(5):
        net.insert(3 * k, Lingers())
    ways = ["linear", "linear", "tree", "tree", "gather", "gather"]
    # Its Jacobian is the identity; else it would be found by sweeps, which linger too.
    rg.scan.register_layer(
        Lingers, jacobian=lambda layer, x, y: rg.scan.CSR.from_dense(torch.eye(5, dtype=DOUBLE))
    )
    found = simulate(5, lambda links: passes(links, net, x, way="auto", pieces=1))
    for rank in found:
        taken = [way for way, _ in rank]
        assert taken[:6] == ways
        assert taken[6] == taken[7] != "linear"
    check(found, net, x)


def test_what_was_given_up_is_not_tried_again():
    timer = WayTimer(4)
    for seconds in (9.0, 5.0):
        timer.done("linear", seconds, by="linear")
    assert timer.patience == 5.0
    timer.done("tree", 1.0, by="linear")
    assert (timer.over, timer.way, timer.patience) == (True, "linear", None)
    timer.done("linear", 1.0, by="linear")  # nobody wants to know
    assert timer.seconds == {"linear": [9.0, 5.0]}


def test_two_ranks_hand_over():
    net, x = chain(), batch()
    found = simulate(2, lambda links: passes(links, net, x, 2, way="auto"))
    assert {way for rank in found for way, _ in rank} == {"linear"}
    check(found, net, x)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_what_has_no_jacobian_goes_by_a_line():
    hooked, centred = chain(), chain()
    hooked[4].register_full_backward_hook(lambda *_: None)
    centred.insert(5, Centred())
    x = batch()
    for net in (hooked, centred):
        found = simulate(3, lambda links, n=net: passes(links, n, x, 5, way="auto", pieces=1))
        assert {way for rank in found for way, _ in rank} == {"linear"}
        check(found, net, x)


@pytest.mark.parametrize("where", [crossing, jacobian])
def test_what_would_take_too_long_goes_by_a_line(where, monkeypatch):
    """A Jacobian, or a product of two of them."""
    net, x = chain(8), batch()
    monkeypatch.setattr(where, "operations_a_second", lambda device: 1e-3)
    found = simulate(5, lambda links: passes(links, net, x, 5, way="auto"))
    assert {way for rank in found for way, _ in rank} == {"linear"}
    check(found, net, x)


@pytest.mark.parametrize("way", ["tree", "gather"])
def test_a_jacobian_that_is_wrong_is_noticed(way, monkeypatch):
    net, x, exact = chain(8), batch(), crossing.joined

    def joined(*given):
        found = exact(*given)
        found.data[0] += 1e-6
        return found

    monkeypatch.setattr(crossing, "joined", joined)
    with pytest.warns(RuntimeWarning, match="overflowed, cancelled"):
        found = simulate(4, lambda links: passes(links, net, x, 1, way=way))
    assert {way for rank in found for way, _ in rank} == {"linear"}
    check(found, net, x)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("the disk is full")


@pytest.mark.parametrize("way", ["linear", "auto"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_all_hear_of_a_rank_that_fails_on_its_way_back(way, bad):
    class Failing(nn.Module):
        def forward(self, x):
            return Fails.apply(x)

    net, x = chain(3), batch()
    net.insert(2 * bad + 1, Failing())
    cuts = [2 + (bad == 0), 4 + (bad <= 1)]

    def rank(links):
        with pytest.raises(RankError, match=f"rank {bad} cannot run: the disk is full") as found:
            passes(links, net, x, 1, way=way, cuts=cuts)
        return isinstance(found.value.__cause__, ValueError)

    assert simulate(3, rank, timeout=5) == [k == bad for k in range(3)]


def slowest(seconds, cuts):
    edges = [0, *cuts, len(seconds)]
    return max(sum(seconds[a:b]) for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(6))
def test_no_cuts_are_better(ranks, seed):
    torch.manual_seed(seed)
    count = 1 + 2 * seed % 7
    seconds = torch.rand(count).tolist()
    places = [k > 0 and bool(p) for k, p in enumerate(torch.rand(count) < 0.7)]
    for allowed in ([], places):
        found = balanced(seconds, ranks, allowed)
        inner = [k for k in range(1, count) if not allowed or allowed[k]]
        assert set(found) <= {*inner, count}
        every = itertools.combinations_with_replacement([*inner, count], ranks - 1)
        assert slowest(seconds, found) == min(slowest(seconds, cuts) for cuts in every)


def test_cuts_keep_tied_layers_and_pairs_together():
    tied = chain(4)
    tied[4].weight = tied[2].weight
    assert where_to_cut(tied, [True] * 8) == [False, True, True, False, False, True, True, True]
    net = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), First(), nn.Linear(2, 2))
    _, alone = layer_seconds(net, torch.ones(3, 1, 2))
    assert alone == [True, True, False, True]


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_sample_finds_the_cuts_and_leaves_no_trace():
    torch.manual_seed(0)
    wide = nn.Sequential(
        *(nn.Linear(5, 5) for _ in range(6)),
        nn.Sequential(nn.Linear(5, 700), nn.Tanh(), nn.Linear(700, 700), nn.Linear(700, 5)),
        nn.BatchNorm1d(5),
        nn.Dropout(),
    ).to(DOUBLE)
    state, sample = copy.deepcopy(wide.state_dict()), batch(64)
    drawn = torch.get_rng_state()
    shares = simulate(
        3, lambda links: rg.LayerSharded.cut(copy.deepcopy(wide), links, sample=sample)
    )
    names = [sorted({int(name.split(".")[1]) for name in s.state_dict()}) for s in shares]
    (alone,) = [own for own in names if 6 in own]
    assert set(alone) <= {6, 7}
    assert [*itertools.chain(*names)] == [*range(8)]  # dropout has nothing in a state
    assert torch.equal(drawn, torch.get_rng_state())
    for share in shares:
        assert all(p.grad is None for p in share.parameters())
        for name, t in share.layers.state_dict().items():
            assert torch.equal(t, state[name])
    net, x = chain(), batch()
    found = simulate(3, lambda links: passes(links, net, x, 1, way="tree", sample=x))
    check(found, net, x)


def test_samples_that_cannot_be_run():
    def told(links, net, sample, **options):
        with pytest.raises((CellError, RankError)) as error:
            rg.LayerSharded.cut(net(links), links, sample=sample, **options)
        return str(error.value)

    for said in simulate(3, lambda links: told(links, lambda _: chain(), batch(width=4))):
        assert "rank 0 cannot run: mat1 and mat2 shapes cannot be multiplied" in said
    for said in simulate(2, lambda links: told(links, lambda k: chain(3 + k.rank), batch())):
        assert "the number of layers to be cut is 8 on rank 1 and 6 on rank 0" in said
    for said in simulate(2, lambda links: told(links, lambda _: chain(), batch(), cuts=[1])):
        assert "cuts= and sample= are given" in said
