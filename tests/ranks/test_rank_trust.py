"""What crosses ranks is exact, or goes by a line; a rank that fails on its way back is named."""

import copy
import warnings

import pytest
import torch

import retrograde as rg
from retrograde.errors import RankError
from retrograde.ranks import way_back
from retrograde.ranks.time import crossing, range_map
from retrograde.ranks.time import sharded as time_sharded
from retrograde.ranks.time.piece import Piece, by_sweeps
from retrograde.ranks.transport import simulate

DOUBLE = torch.float64


def cut(x, size):
    return x.tensor_split(size)


def run(net, links, x, **options):
    """The gradients of inputs and parameters that a rank finds, and what it did."""
    net, part = copy.deepcopy(net), cut(x, links.size)[links.rank].clone().requires_grad_()
    sharded = rg.TimeSharded(net, links, **options)
    y, last = sharded(part)
    loss = y.square().sum()
    if last is not None:
        loss = loss + sum(s.square().sum() for s in (last if isinstance(last, tuple) else (last,)))
    loss.backward()
    return part.grad, [p.grad for p in net.parameters()], sharded.report


def alone(net, x):
    net, x = copy.deepcopy(net), x.clone().requires_grad_()
    y, last = net(x)
    last = last if isinstance(last, tuple) else (last,)
    (y.square().sum() + sum(s.square().sum() for s in last)).backward()
    return x.grad, [p.grad for p in net.parameters()]


def check(found, expected, tolerance):
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(torch.cat([x for x, *_ in found]), expected[0], **near)
    for _, mine, _ in found:
        for a, b in zip(mine, expected[1], strict=True):
            torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize("more", [{"proj_size": 2}, {"num_layers": 2, "proj_size": 2}])
def test_projections_are_swept(more, monkeypatch):
    monkeypatch.setattr(range_map, "range_map", None)  # not to be called
    torch.manual_seed(0)
    net, x = rg.LSTM(3, 4, dtype=DOUBLE, **more), torch.randn(13, 2, 3, dtype=DOUBLE)
    check(simulate(4, lambda links: run(net, links, x, way="tree")), alone(net, x), 1e-10)


@pytest.mark.parametrize("cell", [rg.RNN, rg.GRU, rg.LSTM])
def test_sweeps_and_slopes_find_the_same(cell):
    """By either, of a network whose dropout is drawn once, when it is run."""
    torch.manual_seed(0)
    for dropout in (0.0, 0.5):
        net = cell(3, 4, 2, dropout=dropout, dtype=DOUBLE)
        x = torch.randn(9, 2, 3, dtype=DOUBLE)
        before = tuple(s.requires_grad_() for s in net._zeros(2, x))
        outputs, after = net(x, before if net.mode == "LSTM" else before[0])
        after = after if isinstance(after, tuple) else (after,)
        dy = torch.randn(9, 2, 4, dtype=DOUBLE)
        piece = Piece(x, before, outputs, after)
        swept = [
            by_sweeps([piece], [dy], apart=apart)
            for apart in ([True] if net.mode == "LSTM" or dropout else [True, False])
        ]
        assert range_map.has_closed_form(net, x) == (not dropout)
        if not dropout:
            swept.append(range_map.by_slopes(net, x, before, dy))
        for other in swept[1:]:
            for name in ("jacobian", "offset"):
                a, b = getattr(swept[0], name).data, getattr(other, name).data
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", ["tree", "gather"])
def test_products_that_overflow_are_not_used(way):
    """One direction of the state grows tenfold a step, and nothing ever enters it."""
    net = rg.RNN(2, 2, bias=False)
    with torch.no_grad():
        net.weight_ih_l0.copy_(torch.tensor([[0.0, 0.0], [0.1, 0.2]]))
        net.weight_hh_l0.copy_(torch.tensor([[10.0, 0.0], [0.0, 0.5]]))
    torch.manual_seed(0)
    x = torch.rand(200, 2, 2)
    expected = alone(net, x)
    assert all(g.isfinite().all() for g in expected[1])
    with pytest.warns(RuntimeWarning, match="overflowed, cancelled"):
        found = simulate(4, lambda links: run(net, links, x, way=way))
    for *_, report in found:  # is that of the line
        assert (report.way, report.up, report.down, report.products) == ("linear", 3, 0, 0)
    check(found, expected, 2e-6)


@pytest.mark.parametrize("wrong", [1e-3, 1.0, torch.inf, torch.nan])
@pytest.mark.parametrize("way", ["tree", "gather"])
def test_a_jacobian_that_is_wrong_is_noticed(way, wrong, monkeypatch):
    """As one would be whose digits had cancelled."""
    net, x = rg.GRU(3, 4), torch.randn(12, 2, 3)
    expected, exact = alone(net, x), crossing.by_slopes

    def by_slopes(*given):
        found = exact(*given)
        found.jacobian.data[1, 2, 0] += wrong
        return found

    monkeypatch.setattr(crossing, "by_slopes", by_slopes)
    with pytest.warns(RuntimeWarning, match="overflowed, cancelled"):
        found = simulate(4, lambda links: run(net, links, x, way=way))
    for *_, report in found:  # is that of the line
        assert (report.way, report.up, report.down, report.products) == ("linear", 3, 0, 0)
    check(found, expected, 2e-6)


@pytest.mark.quick(0)
def test_what_failed_once_is_not_chosen_again(monkeypatch):
    net = rg.GRU(3, 4)
    monkeypatch.setattr(time_sharded, "choose", lambda *_: "tree")

    def by_slopes(net, x, *given):
        found = range_map.by_slopes(net, x, *given)
        found.jacobian.data[:] = torch.nan
        return found

    monkeypatch.setattr(crossing, "by_slopes", by_slopes)

    def rank(links):
        sharded, ways = rg.TimeSharded(copy.deepcopy(net), links), []
        for length in (3, 3, 12):
            sharded(torch.ones(length, 2, 3))[0].sum().backward()
            ways.append((sharded.report.way, sharded.report.products))
        return ways

    with pytest.warns(RuntimeWarning, match="overflowed, cancelled") as told:
        assert simulate(4, rank) == [[("linear", 0)] * 3] * 4
    assert len(told) == 8  # each rank's, of the first call and of the first that is longer


@pytest.mark.quick(1)
@pytest.mark.parametrize("length", [400, 3000])
def test_rounding_alone_sets_off_no_alarm(length):
    """Gradients that neither grow nor fall, in single precision, over many steps."""
    torch.manual_seed(0)
    net = rg.RNN(3, 8, nonlinearity="relu", bias=False)
    with torch.no_grad():
        net.weight_hh_l0.copy_(torch.eye(8)[torch.randperm(8)])
        net.weight_ih_l0.abs_()
    gru = rg.GRU(3, 8)
    for each in (net, gru):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = torch.rand(length, 2, 3)
            found = simulate(4, lambda links, each=each, x=x: run(each, links, x, way="tree"))
        assert {report.way for *_, report in found} == {"tree"}


class Fails(rg.GRU):
    """Its backward pass fails, on one rank."""

    bad = False

    def forward(self, x, hx=None):
        y, last = super().forward(x, hx)
        return (_Fail.apply(y) if self.bad else y), last


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        raise ValueError("the disk is full")


class Refuses(rg.GRU):
    """Its forward pass fails, on one rank."""

    bad = False

    def forward(self, x, hx=None):
        if self.bad:
            raise ValueError("the disk is full")
        return super().forward(x, hx)


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_all_hear_of_a_rank_that_fails_on_its_way_forward(bad):
    net, x = Refuses(3, 4), torch.randn(12, 2, 3)

    def rank(links):
        mine = copy.deepcopy(net)
        mine.bad = links.rank == bad
        with pytest.raises(RankError, match=f"rank {bad} cannot run: the disk is full") as found:
            run(mine, links, x)
        return found.value.__cause__

    causes = simulate(4, rank, timeout=5)
    assert [isinstance(cause, ValueError) for cause in causes] == [k == bad for k in range(4)]


@pytest.mark.parametrize("way", ["linear", "tree", "gather", "auto"])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_all_hear_of_a_rank_that_fails_on_its_way_back(way, bad):
    net, x = Fails(3, 4), torch.randn(12, 2, 3)

    def rank(links):
        mine = copy.deepcopy(net)
        mine.bad = links.rank == bad
        with pytest.raises(RankError, match=f"rank {bad} cannot run: the disk is full") as found:
            run(mine, links, x, way=way)
        return found.value.__cause__

    causes = simulate(4, rank, timeout=5)
    assert [isinstance(cause, ValueError) for cause in causes] == [k == bad for k in range(4)]


def test_all_hear_of_a_product_that_fails(monkeypatch):
    net, x = rg.GRU(3, 4), torch.randn(12, 2, 3)

    def broken(a, b):
        raise MemoryError("no room for a product")

    monkeypatch.setattr(way_back, "combine", broken)

    def rank(links):
        with pytest.raises(RankError, match=r"rank \d cannot run: no room for a product"):
            run(net, links, x, way="tree")

    simulate(4, rank, timeout=5)


def test_hooks_of_parameters_see_the_whole_gradient_once():
    net, x = rg.GRU(3, 4), torch.randn(12, 3, 3)
    (_, expected) = alone(net, x)

    def rank(links):
        mine, seen = copy.deepcopy(net), []
        mine.weight_hh_l0.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        part = cut(x, links.size)[links.rank]
        y, last = rg.TimeSharded(mine, links, way="tree")(part)
        (y.square().sum() + (0 if last is None else last.square().sum())).backward()
        return seen, mine.weight_hh_l0.grad

    for seen, grad in simulate(3, rank):
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], expected[1])
        torch.testing.assert_close(grad, 2 * expected[1])
