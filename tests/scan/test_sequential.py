"""``rg.Sequential``: gradients of the input and of all parameters are the ordinary ones."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from retrograde.errors import RetrogradeError, ScanError, UnitError
from retrograde.scan import CSR, chain_scan
from retrograde.scan.blelloch import most_levels
from retrograde.scan.sparse import pattern
from retrograde.scan.sparse.arithmetic import plain
from retrograde_papers.networks import lenet5, vgg11

DOUBLE = torch.float64
TOLERANCE = {DOUBLE: 1e-10, torch.float32: 1e-5}


def resnet():
    """Two residual blocks, the second one with a convolution in its shortcut."""
    return [
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        rg.Residual(
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
        ),
        nn.ReLU(inplace=True),
        rg.Residual(
            nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            shortcut=nn.Sequential(nn.Conv2d(4, 6, 1, stride=2), nn.BatchNorm2d(6)),
        ),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ]


def mlp():
    return [
        nn.Linear(7, 9),
        nn.Tanh(),
        nn.Dropout(0.4),
        nn.Linear(9, 9, bias=False),
        nn.Dropout(0.2, inplace=True),
        nn.ReLU(),
        nn.Linear(9, 3),
    ]


def convolutions():
    """Quick: a convolution, in place what can be, a pooling, linear layers."""
    return [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    ]


#: By name: the layers, the shape of a sample, and whether it is in training mode.
NETWORKS = {
    "LeNet-5": (lenet5, (3, 32, 32), True),
    "VGG-11": (lambda: vgg11(width=8), (3, 32, 32), True),
    "ResNet": (resnet, (3, 6, 5), False),
    "MLP": (mlp, (7,), True),
    "convolutions": (convolutions, (2, 4, 5), True),
}


def seeded(make, dtype=DOUBLE, training=True):
    """A torch.nn.Sequential with drawn weights and drawn statistics."""
    torch.manual_seed(0)
    net = nn.Sequential(*make()).to(dtype)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.running_mean, -0.5, 0.5)
            nn.init.uniform_(layer.running_var, 0.5, 2.0)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    return net.train(training)


def ours_of(theirs, **options):
    """Ours, of the same layers."""
    return rg.Sequential(*theirs, backward="scan", **options).train(theirs.training)


def draw(*shape, dtype=DOUBLE, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def gradients(net, x, seed=7):
    """By name, of the input and all parameters; the output besides."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = net(x)
    wanted = {"x": x, **{name: p for name, p in net.named_parameters() if p.requires_grad}}
    found = torch.autograd.grad(y, list(wanted.values()), draw(*y.shape).to(y), allow_unused=True)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


def assert_close(ours, theirs, tolerance):
    """Each to within a share of its largest entry."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = ours[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            assert found.shape == expected.shape
            assert found.dtype == expected.dtype
            error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
            assert error <= tolerance, f"{name}: {error:.1e}"


def check(name, samples, dtype=DOUBLE, **options):
    make, shape, training = NETWORKS[name]
    theirs = seeded(make, dtype, training)
    ours, x = ours_of(theirs, **options), draw(samples, *shape, dtype=dtype)
    assert_close(gradients(ours, x), gradients(theirs, x), TOLERANCE[dtype])
    return ours, x


SMALL = ("ResNet", "MLP", "convolutions")
WAYS = [
    {"algorithm": "linear"},
    {"algorithm": "blelloch"},
    {"algorithm": "auto"},
    *({"algorithm": "hybrid", "levels": k} for k in range(4)),
]


@pytest.mark.parametrize("samples", [1, 2, 9])
@pytest.mark.parametrize("options", WAYS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_ordinary_ones(name, options, samples):
    check(name, samples, **options)


@pytest.mark.parametrize("samples", [1, 9])
@pytest.mark.parametrize("name", SMALL)
def test_gradients_in_single_precision(name, samples):
    for options in WAYS[:3]:
        check(name, samples, torch.float32, **options)


@pytest.mark.parametrize("options", WAYS[:5], ids=lambda o: "-".join(map(str, o.values())))
def test_lenet(options):
    check("LeNet-5", 2, **options)


def test_lenet_in_single_precision():
    check("LeNet-5", 3, torch.float32, algorithm="hybrid", levels=1)


@pytest.mark.parametrize("algorithm", ["blelloch", "linear"])
def test_products_that_overflow_leave_the_exact_gradient(algorithm, recwarn):
    """Layers that stretch half of their units, where the gradient meets only zeros."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(8)]
    for layer in layers:
        layer.weight.data = torch.diag(torch.tensor([1.5, -0.5, 1e25, 1e25]))
    x = torch.randn(3, 4) * torch.tensor([1.0, 1.0, 0.0, 0.0])
    seed = torch.tensor([[1.0, 2.0, 0.0, 0.0]]).expand(3, 4)
    net = rg.Sequential(*layers, backward="scan", algorithm=algorithm)
    found = torch.autograd.grad(net(x), list(net.parameters()), seed)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x), list(net.parameters()), seed)
    assert all(g.isfinite().all() for g in expected)
    torch.testing.assert_close(found, expected)
    told = [str(w.message) for w in recwarn if "not finite" in str(w.message)]
    assert len(told) == (algorithm == "blelloch")


def test_vgg():
    check("VGG-11", 1, algorithm="linear")
    check("VGG-11", 2, algorithm="hybrid", levels=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
@pytest.mark.parametrize("samples", [1, 2, 9])
@pytest.mark.parametrize("name", ["LeNet-5", "VGG-11"])
def test_gradients_of_large_networks(name, samples, dtype):
    most = most_levels(len(NETWORKS[name][0]()) + 1)
    for options in (*WAYS[:3], *({"algorithm": "hybrid", "levels": k} for k in range(most + 1))):
        check(name, samples, dtype, memory="8GiB", **options)


def choice_and_net(name, samples, **options):
    make, shape, training = NETWORKS[name]
    theirs = seeded(make, training=training)
    ours, x = ours_of(theirs, **options), draw(samples, *shape)
    return theirs, ours, x, ours.explain(x.requires_grad_())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("samples", [2, 21])
def test_samples_are_taken_a_few_at_a_time_where_memory_is_short(name, samples):
    options = {"algorithm": "hybrid", "levels": 2}
    theirs, ours, x, whole = choice_and_net(name, samples, **options)
    assert whole.chosen.samples == samples
    split = whole.chosen
    for at_once in {1, 2, 8 if samples > 8 else 1}:
        ours.memory = split.fixed_bytes + at_once * split.sample_bytes
        assert ours.explain(x).chosen.samples == at_once
        assert_close(gradients(ours, x.detach()), gradients(theirs, x.detach()), 1e-10)
    ours.memory = split.fixed_bytes + 15 * split.sample_bytes  # in eights, if in any
    assert ours.explain(x).chosen.samples == (8 if samples == 21 else 2)


@pytest.mark.parametrize("name", SMALL)
def test_what_fits_for_no_sample_is_refused_with_its_size(name):
    theirs, ours, x, whole = choice_and_net(name, 9, algorithm="blelloch")
    split = whole.chosen
    least = split.fixed_bytes + split.sample_bytes
    ours.memory = least - 1
    text = (
        r"algorithm='blelloch' does not fit into .*: for one sample it takes .*B; give more memory"
    )
    with pytest.raises(ScanError, match=text):
        ours(x)
    with pytest.raises(ScanError, match=text):
        ours.explain(x)
    for algorithm, memory in (("linear", 100), ("blelloch", 100)):
        with pytest.raises(ScanError, match=f"algorithm='{algorithm}' does not fit into 100 B"):
            ours_of(theirs, algorithm=algorithm, memory=memory)(x)


def test_auto_does_without_jacobians_where_none_fit():
    theirs, ours, x, _ = choice_and_net("convolutions", 9, algorithm="auto", memory=100)
    found = ours.explain(x)
    assert (found.jacobians, found.chosen.levels) == (False, 0)
    assert found.why.endswith("without Jacobians: no products fit")
    assert "does not fit" in str(found)
    assert_close(gradients(ours, x.detach()), gradients(theirs, x.detach()), 1e-14)


def test_a_product_too_large_for_the_room_is_told_before_it_is_made():
    """Those of pruned layers are written out."""
    theirs = seeded(lambda: [nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)])
    for layer in theirs:
        prune.random_unstructured(layer, "weight", amount=0.5)
    x = draw(2, 3, 12, 12)
    text = (
        r"algorithm='blelloch' does not fit into 4 KiB: a pattern of 432×432 has [\d,]+ entries: "
        r"expected at most 256; use the linear scan, which needs no products, or give more memory"
    )
    with pytest.raises(ScanError, match=text):
        ours_of(theirs, algorithm="blelloch", memory="4KiB")(x)
    auto = ours_of(theirs, memory="4KiB")
    assert "entries" in auto.explain(x).splits[-1].problem
    assert_close(gradients(auto, x), gradients(theirs, x), 1e-10)
    assert_close(gradients(ours_of(theirs, algorithm="blelloch"), x), gradients(theirs, x), 1e-10)


def test_terms_are_counted_where_a_device_lists_them(monkeypatch):
    theirs = seeded(lambda: [nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)])
    for layer in theirs:
        prune.random_unstructured(layer, "weight", amount=0.9)
    x = draw(2, 3, 12, 12)
    compiled = ours_of(theirs, algorithm="blelloch").explain(x).chosen
    monkeypatch.setattr(chain_scan, "sparse_kernels", lambda *_: plain)
    listed = ours_of(theirs, algorithm="blelloch").explain(x).chosen
    products = [p for level in listed.report.levels for p in level.products]
    terms = sum(p.flops // 2 for p in products if p.a.kind == p.b.kind == "Outline")
    assert terms
    assert 8 * terms < listed.fixed_bytes - compiled.fixed_bytes <= 16 * terms
    assert listed.sample_bytes == compiled.sample_bytes
    monkeypatch.setattr(pattern, "MOST_ENTRIES", 100)
    with pytest.raises(ScanError, match=r"'blelloch' does not fit .* terms: expected at most 100"):
        ours_of(theirs, algorithm="blelloch").explain(x)


@pytest.mark.parametrize("name", [*SMALL, "LeNet-5"])
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_no_more_memory_is_taken_than_foreseen(name, levels):
    """What torch allocates backward: the Jacobians, what is handed back, and the layers' own."""
    theirs, ours, x, _ = choice_and_net(name, 4, algorithm="hybrid", levels=levels)

    def peaks(net):
        y = net(x)
        return rg.measure(lambda: torch.autograd.grad(y, [x, *net.parameters()], seed)).peak_bytes

    seed = torch.ones_like(theirs(x))
    ordinary = peaks(theirs)
    for memory in (None, "tight"):
        if memory:
            split = ours.explain(x).chosen
            ours.memory = split.fixed_bytes + split.sample_bytes
        found = ours.explain(x).chosen
        assert found.samples == (1 if memory and found.sample_bytes else 4)
        peaks(ours)  # patterns are made
        assert peaks(ours) <= found.bytes + ordinary


def test_explain_tells_of_every_scan_and_of_the_chosen_one():
    _, ours, x, found = choice_and_net("convolutions", 9, algorithm="auto", memory="1GiB")
    assert [split.levels for split in found.splits] == [0, 1, 2, 3]
    assert found.room == 2**30
    best = min(found.splits, key=lambda split: split.report.critical_flops)
    assert found.chosen is best
    assert found.jacobians == (best.levels > 0)
    why, header, *rows = str(found).splitlines()
    assert why == found.why
    assert header.split("  ")[0] == "levels"
    for word in ("steps", "FLOPs", "critical path", "memory", "samples at a time"):
        assert word in header
    assert [row.split()[0] == "*" for row in rows] == [split is best for split in found.splits]
    assert all(row.endswith("9") for row in rows)
    assert ours.explain(x) is found
    linear = found.splits[0].report
    assert linear.flops == linear.critical_flops
    assert linear.steps() == 6  # the layers but the flattening


def test_explain_says_why():
    theirs = seeded(convolutions)
    x = draw(2, 2, 4, 5)
    asked = ours_of(theirs, algorithm="hybrid", levels=1).explain(x)
    assert asked.why == "algorithm='hybrid' asks for it"
    assert [split.levels for split in asked.splits] == [0, 1]
    assert [s.levels for s in ours_of(theirs, algorithm="linear").explain(x).splits] == [0]
    assert ours_of(theirs, algorithm="linear").explain(x).jacobians
    one = ours_of(nn.Sequential(nn.Linear(3, 3))).explain(draw(2, 3).float())
    text = "linear, through the layers themselves, without Jacobians: no products shorten"
    assert one.why.startswith(text) or one.why.endswith("no products fit")
    # Small square layers: products cost as much as a batch's vectors, and there are fewer of them.
    deep = rg.Sequential(*[nn.Linear(2, 2) for _ in range(64)], backward="scan")
    chosen = deep.explain(torch.ones(16, 2))
    assert chosen.chosen.levels > 0
    text = "levels: the shortest critical path of those that fit, in FLOPs"
    assert chosen.why == f"{chosen.chosen.levels} {text}"


def test_explain_of_layers_without_parameters():
    assert rg.Sequential(nn.Tanh(), backward="scan").explain(torch.ones(2, 3)).chosen


@pytest.mark.quick(0)
def test_the_scan_is_chosen_once_a_shape():
    """Also where patterns are put together: residual blocks, pruned layers, padding of any mode."""
    layers = [
        nn.CircularPad2d(1),
        nn.Conv2d(2, 2, 3),
        nn.ReLU(),
        rg.Residual(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU()),
        nn.Conv2d(2, 2, 3, padding=1),
    ]
    prune.random_unstructured(layers[4], "weight", amount=0.5)
    net, found = rg.Sequential(*layers, backward="scan", algorithm="blelloch"), []
    for _ in range(3):
        found.append(net.explain(torch.ones(2, 2, 5, 6)))
        net(torch.ones(2, 2, 5, 6)).sum().backward()
        gc.collect()
    assert found[0] is found[1] is found[2]
    for samples in range(1, 20):
        net.explain(torch.ones(samples, 2, 5, 6))
    assert len(net._scan_choices) == 4
    assert net.explain(torch.ones(2, 2, 5, 6)) is not found[0]


def test_a_scan_without_products_puts_no_residual_jacobian_together(monkeypatch):
    """Nor does it foresee any memory for it."""
    theirs, _, x, _ = choice_and_net("ResNet", 2)
    added = []
    monkeypatch.setattr(CSR, "__add__", lambda self, other: added.append(1))
    ours = ours_of(theirs, algorithm="linear")
    assert ours.explain(x).chosen.sample_bytes == 0
    assert_close(gradients(ours, x.detach()), gradients(theirs, x.detach()), 1e-10)
    assert not added


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "auto"])
def test_frozen_layers_and_inputs_without_a_gradient(algorithm):
    theirs = seeded(convolutions)
    ours, x = ours_of(theirs, algorithm=algorithm), draw(3, 2, 4, 5)
    for frozen in ((0,), (4,), (6,), (0, 4), (0, 4, 6)):
        for i in (0, 4, 6):
            theirs[i].requires_grad_(i not in frozen)
        assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)
        results = []
        for net in (ours, theirs):
            y = net(x)
            assert y.requires_grad == (len(frozen) < 3)
            if y.requires_grad:
                wanted = [p for p in net.parameters() if p.requires_grad]
                found = torch.autograd.grad(y.square().sum(), wanted)
                results.append(dict(enumerate(found)))
        if results:
            assert_close(*results, 1e-10)
    theirs[4].requires_grad_()
    theirs[4].weight.requires_grad_(False)  # the bias only
    assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)


@pytest.mark.parametrize("algorithm", ["linear", "blelloch", "auto"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: [nn.Linear(5, 3)], (5,)),
        (lambda: [nn.Tanh()], (5,)),
        (lambda: [nn.Flatten()], (2, 3)),
        (lambda: [nn.Flatten(), nn.Linear(6, 4), nn.Tanh()], (2, 3)),
        (lambda: [nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ELU(inplace=True)], (5,)),
        (lambda: [(shared := nn.Linear(5, 5)), nn.Tanh(), shared, shared], (5,)),
        (lambda: [nn.Sequential(nn.Linear(5, 4), nn.Sequential(nn.Tanh())), nn.Linear(4, 2)], (5,)),
        (lambda: [rg.Sequential(nn.Linear(5, 4), nn.ReLU()), nn.Linear(4, 2)], (5,)),
        (lambda: [rg.Residual(rg.Sequential(nn.Linear(5, 5), nn.ReLU())), nn.Linear(5, 2)], (5,)),
        (lambda: [nn.Sequential(), nn.Linear(5, 2), nn.Identity()], (5,)),
        (lambda: [nn.Linear(5, 4), nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)], (5,)),
        (lambda: [parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 1)], (5,)),
        (lambda: [nn.PReLU(), nn.Linear(5, 2), nn.Softplus()], (3, 5)),
    ],
)
def test_chains_of_every_kind(make, shape, algorithm):
    theirs = seeded(make)
    ours = ours_of(theirs, algorithm=algorithm)
    for samples in (1, 3):
        x = draw(samples, *shape)
        found = []
        for net in (ours, theirs):
            given = x.clone().requires_grad_()
            y = net(given * 1)  # so that it may be overwritten
            wanted = [given, *net.parameters()]
            grads = torch.autograd.grad(y, wanted, draw(*y.shape), allow_unused=True)
            found.append({"y": y.detach(), **dict(enumerate(grads))})
        assert_close(*found, 1e-10)


@pytest.mark.parametrize("shortcut", [None, nn.Tanh()])
def test_a_block_that_begins_in_place_leaves_its_input_to_the_shortcut(shortcut):
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    x, found = draw(3, 5), []
    for inner in (nn.ReLU(inplace=True), nn.Sequential(nn.ReLU(inplace=True)), nn.ReLU()):
        layers = nn.Sequential(first, rg.Residual(inner, last, shortcut=shortcut)).double()
        for net in (layers, ours_of(layers, algorithm="blelloch")):
            found.append(dict(enumerate(gradients(net, x).values())))
    for each in found:
        assert_close(each, found[-2], 1e-10)


def test_no_more_is_done_than_is_wanted():
    """Products of the linear scan: from the last layer to the first that is trained."""
    net, x = ours_of(seeded(convolutions), algorithm="linear"), draw(2, 2, 4, 5)

    def products(x):
        return net.explain(x).chosen.report.steps()

    assert products(x.clone().requires_grad_()) == 6
    assert products(x) == 5
    net[0].requires_grad_(False)
    assert products(x) == 2
    assert products(x.clone().requires_grad_()) == 6
    net[4].requires_grad_(False)
    assert products(x) == 0


def test_an_input_is_not_overwritten():
    x = draw(3, 5).requires_grad_()
    rg.Sequential(nn.ReLU(inplace=True), backward="scan")(x).sum().backward()
    assert torch.equal(x.grad, (x > 0).double())
    assert torch.equal(x.detach(), draw(3, 5))


def pair(algorithm="blelloch"):
    theirs = seeded(convolutions)
    ours = ours_of(copy.deepcopy(theirs), algorithm=algorithm)
    return ours, theirs


def grads_of(net):
    return {name: p.grad for name, p in net.named_parameters()}


def test_gradients_add_up_over_calls():
    ours, theirs = pair()
    for net in (ours, theirs):
        for seed in (1, 2):
            net(draw(2, 2, 4, 5, seed=seed)).square().sum().backward()
    assert_close(grads_of(ours), grads_of(theirs), 1e-10)


def test_two_forward_passes_before_the_backward_passes():
    ours, theirs = pair()
    for net in (ours, theirs):
        losses = [net(draw(2, 2, 4, 5, seed=seed)).square().sum() for seed in (1, 2)]
        losses[1].backward()
        losses[0].backward()
    assert_close(grads_of(ours), grads_of(theirs), 1e-10)


@pytest.mark.parametrize("algorithm", ["blelloch", "auto"])
def test_a_graph_that_is_retained_serves_again(algorithm):
    ours, theirs = pair(algorithm)
    for net in (ours, theirs):
        loss = net(draw(2, 2, 4, 5)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_close(grads_of(ours), grads_of(theirs), 1e-10)
    loss = ours(draw(2, 2, 4, 5)).sum()
    loss.backward()
    with pytest.raises((RetrogradeError, RuntimeError), match="a second time"):
        loss.backward()


def test_a_second_backward_pass_is_refused_and_nothing_is_held_for_it(monkeypatch):
    held, observe = [], chain_scan.observe_steps

    def noting(*args):
        steps = observe(*args)
        held.extend(weakref.ref(step) for step in steps)
        return steps

    monkeypatch.setattr(chain_scan, "observe_steps", noting)
    ours, _ = pair()
    y = ours(draw(2, 2, 4, 5))
    y.backward(torch.ones_like(y), retain_graph=True)
    gc.collect()
    assert all(ref() is not None for ref in held)
    y.backward(torch.ones_like(y))
    gc.collect()
    assert all(ref() is None for ref in held)
    text = (
        "was backpropagated a second time, .*: expected one backward pass; give retain_graph=True"
    )
    with pytest.raises(RetrogradeError, match=text):
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training(kind):
    ours, theirs = pair()
    for net in (ours, theirs):
        optimizer = kind(net.parameters(), lr=0.05)
        for step in range(4):
            optimizer.zero_grad()
            net(draw(3, 2, 4, 5, seed=step)).square().sum().backward()
            optimizer.step()
    assert_close(ours.state_dict(), theirs.state_dict(), 1e-9)


def test_pruned_while_training():
    ours, theirs = pair()
    for net in (ours, theirs):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(3):
            net(draw(3, 2, 4, 5, seed=step)).square().sum().backward()
            optimizer.step()
            if step == 0:
                prune.l1_unstructured(net[0], "weight", amount=0.6)
                prune.l1_unstructured(net[4], "weight", amount=0.9)
    assert_close(ours.state_dict(), theirs.state_dict(), 1e-9)


def test_state_is_torchs():
    theirs = seeded(resnet)
    ours = rg.Sequential(*resnet(), backward="scan").double()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    back = nn.Sequential(*resnet()).double()
    back.load_state_dict(ours.state_dict())
    assert all(torch.equal(v, back.state_dict()[k]) for k, v in theirs.state_dict().items())


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: torch.load(saved(net), weights_only=False),
    ],
)
def test_copies_keep_options_and_give_the_same(copied):
    ours, theirs = pair()
    ours.memory = "1GiB"
    x = draw(2, 2, 4, 5)
    ours(x)
    assert len(ours._scan_choices)
    twin = copied(ours)
    assert copied is copy.copy or not len(twin._scan_choices)  # that shares the layers too
    kept = (twin.backward, twin.algorithm, twin.levels, twin.memory)
    assert kept == ("scan", "blelloch", None, "1GiB")
    assert_close(gradients(twin, x), gradients(theirs, x), 1e-10)


def saved(net):
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return buffer


def test_slices_and_indices():
    net = rg.Sequential(
        *convolutions(), backward="scan", algorithm="hybrid", levels=2, memory="2GiB"
    ).double()
    part = net[2:5]
    assert type(part) is rg.Sequential
    assert [type(layer) for layer in part] == [nn.MaxPool2d, nn.Flatten, nn.Linear]
    kept = (part.backward, part.algorithm, part.levels, part.memory)
    assert kept == ("scan", "hybrid", 2, "2GiB")
    assert part[2] is net[4]
    assert net[-1] is net[6]
    assert list(part.state_dict()) == ["4.weight", "4.bias"]  # as torch.nn.Sequential's
    net.append(nn.Tanh())
    assert_close(
        {"y": gradients(net, draw(2, 2, 4, 5))["x"]},
        {"y": gradients(nn.Sequential(*net), draw(2, 2, 4, 5))["x"]},
        1e-10,
    )


def test_layers_by_name_and_what_is_printed():
    from collections import OrderedDict

    net = rg.Sequential(OrderedDict(one=nn.Linear(2, 3), two=nn.Tanh()), backward="scan")
    assert list(net.state_dict()) == ["one.weight", "one.bias"]
    assert net.extra_repr() == "backward='scan'"
    assert "Linear(in_features=2" in repr(net)
    hybrid = rg.Sequential(nn.Tanh(), backward="scan", algorithm="hybrid", levels=2)
    assert hybrid.extra_repr() == "backward='scan', algorithm='hybrid', levels=2"
    assert rg.Sequential(nn.Tanh()).extra_repr() == ""


def turn_round(p):
    p.grad.neg_()


def test_parameter_hooks_are_called_once_with_the_whole_gradient():
    ours, theirs = pair()
    for net in (ours, theirs):
        seen = []
        net[0].weight.register_hook(lambda g: 2 * g)
        net[4].bias.register_hook(seen.append)
        net[4].weight.register_post_accumulate_grad_hook(turn_round)
        net(draw(2, 2, 4, 5)).square().sum().backward()
        assert len(seen) == 1
    assert_close(grads_of(ours), grads_of(theirs), 1e-10)


def test_hooks_on_what_it_gives_and_takes():
    ours, theirs = pair()
    for net in (ours, theirs):
        seen = []
        net.register_full_backward_hook(
            lambda m, gx, gy, seen=seen: seen.append((gx[0].clone(), gy[0].clone()))
        )
        net.register_forward_hook(lambda m, args, y: 3 * y)
        x = draw(2, 2, 4, 5).requires_grad_()
        net(x).square().sum().backward()
        net.seen = {"x": seen[0][0], "y": seen[0][1], "grad": x.grad}
        assert len(seen) == 1
    assert_close(ours.seen, theirs.seen, 1e-10)
    assert_close(grads_of(ours), grads_of(theirs), 1e-10)


def test_forward_hooks_on_layers_see_what_they_would_anyway():
    layers = [nn.Linear(5, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), rg.Residual(nn.ReLU())]
    net = nn.Sequential(*layers).double()
    seen = []
    for layer in (*layers, layers[1][1]):
        layer.register_forward_hook(
            lambda m, args, y: seen.append((m, args[0].detach(), y.detach()))
        )
        layer.register_forward_pre_hook(lambda m, args: seen.append((m, args[0].detach())))
    x = draw(2, 5)
    found = []
    for one in (rg.Sequential(*net, backward="scan"), net):
        found.append(gradients(one, x))
        found.append(list(seen))
        seen.clear()
    assert_close(found[0], found[2], 1e-10)
    assert [each[0] for each in found[1]] == [each[0] for each in found[3]]
    for ours, theirs in zip(found[1], found[3], strict=True):
        assert all(map(torch.equal, ours[1:], theirs[1:]))


def test_without_gradients_and_in_evaluation():
    net = rg.Sequential(*mlp(), backward="scan", algorithm="blelloch").double()
    x = draw(3, 7)
    with torch.no_grad():
        assert net(x).grad_fn is None
    with torch.inference_mode():
        net(x)
    net.eval()
    plain = nn.Sequential(*net).eval()
    assert torch.equal(net(x), plain(x))
    assert_close(gradients(net, x), gradients(plain, x), 1e-10)
    net.requires_grad_(False)
    assert not net(x).requires_grad
    half = rg.Sequential(nn.BatchNorm1d(7), nn.Dropout(), backward="scan")
    with torch.no_grad():
        half(x.float())  # nothing is wanted: what has no Jacobian may run


def test_without_backward_it_is_torchs():
    theirs = seeded(resnet)
    ours = rg.Sequential(*theirs)
    assert ours.backward is None
    x = draw(2, 3, 6, 5)
    for net in (ours, theirs):
        net.train()
    first = gradients(ours, x)
    assert_close(first, gradients(theirs, x), 1e-12)
    y = ours(x.requires_grad_())
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert g.requires_grad


def test_a_gradient_that_nobody_asks_for():
    ours, theirs = pair()
    found = []
    for net in (ours, theirs):
        y = net(draw(2, 2, 4, 5).requires_grad_())
        (g,) = torch.autograd.grad(y.sum(), net[4].weight)
        found.append({"g": g})
    assert_close(*found, 1e-10)
    x = draw(2, 2, 4, 5).requires_grad_()
    y = ours(x)
    unused = torch.ones(1, requires_grad=True)
    assert torch.autograd.grad(unused * 2, x, allow_unused=True) == (None,)
    assert y.requires_grad


def test_a_max_pooling_whose_places_were_left_does_not_read_its_input_again():
    x = draw(2, 2, 4, 4).requires_grad_()
    net = rg.Sequential(nn.MaxPool2d(2, 1), backward="scan", algorithm="linear")
    given = x * 1
    y = net(given)
    with torch.no_grad():
        given.zero_()
    y.sum().backward()
    expected = torch.autograd.grad(nn.functional.max_pool2d(x, 2, 1).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_an_output_or_an_input_changed_in_place_is_noticed():
    x = draw(2, 2, 4).requires_grad_()
    net = rg.Sequential(nn.MaxPool1d(2, 1), nn.Tanh(), backward="scan", algorithm="linear")
    given = x * 1
    y = net(given)
    with torch.no_grad():
        given.zero_()
    with pytest.raises(RetrogradeError, match=r"the input of a max-pooling, \(2, 2, 4\), was"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x).mul_(2).sum().backward()


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Tanh(), nn.MaxPool1d(2)])
def test_what_torch_would_refuse_after_a_change_in_place_is_refused(layer):
    x = draw(2, 2, 4).requires_grad_()
    net = rg.Sequential(layer, backward="scan", algorithm="linear")
    given = x * 1
    y = net(given)
    with torch.no_grad():
        (given if isinstance(layer, nn.MaxPool1d) else y).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Reads(nn.Module):
    """Uses a tensor that is none of its parameters."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        return x * self.other[0]


class Halves(nn.Module):
    def forward(self, x):
        return (x / 2).half().to(torch.bfloat16)


def scaled(layer, x, y):
    return CSR.from_dense(torch.eye(x[0].numel()).to(x))


rg.scan.register_layer(Reads, Halves, jacobian=scaled)


def scan(*layers, **options):
    return rg.Sequential(*layers, backward="scan", **options)


def hooked(register):
    layer = nn.Linear(3, 3)
    getattr(layer, register)(lambda *args: None)
    return layer


def nested_and_hooked():
    inner = nn.Sequential(nn.Linear(3, 3))
    inner.register_full_backward_hook(lambda *args: None)
    return inner


def under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        scan(nn.Linear(3, 3))(torch.ones(2, 3))


def changed_between():
    net = scan(nn.Linear(3, 3), nn.Tanh(), algorithm="linear")
    y = net(torch.ones(2, 3))
    with torch.no_grad():
        net[0].weight.mul_(2)
    y.sum().backward()


def twice_differentiated():
    x = torch.ones(2, 3, requires_grad=True)
    y = scan(nn.Linear(3, 3), nn.Tanh())(x)
    torch.autograd.grad(y.sum(), x, create_graph=True)


def in_forward_mode():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        scan(nn.Linear(3, 3))(forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3)))


REFUSED = [
    (
        lambda: scan(hooked("register_full_backward_hook"))(torch.ones(2, 3)),
        r"Linear has a backward hook, which a scan over Jacobians would not pass through: expected "
        r"none on the layers; hook the Sequential itself, or its parameters, or use backward=None",
    ),
    (
        lambda: scan(hooked("register_full_backward_pre_hook"))(torch.ones(2, 3)),
        "Linear has a full backward pre-hook",
    ),
    (lambda: scan(nested_and_hooked())(torch.ones(2, 3)), "Sequential has a backward hook"),
    (
        lambda: scan(rg.Residual(hooked("register_full_backward_hook")))(torch.ones(2, 3)),
        "Linear has a backward hook",
    ),
    (
        twice_differentiated,
        r"the gradient of a Sequential with backward='scan' cannot itself be differentiated: "
        r"expected create_graph=False; for second derivatives use backward=None",
    ),
    (
        under_autocast,
        r"Linear took torch.float32 to torch.bfloat16: expected one type throughout; leave auto",
    ),
    (lambda: scan(Halves())(torch.ones(2, 3, requires_grad=True)), "Halves took torch.float32 to"),
    (
        lambda: scan(nn.Linear(3, 3).half())(torch.ones(2, 3).half()),
        r"the input is of torch.float16: expected a tensor of float32 or float64; cast it, or use",
    ),
    (lambda: scan(nn.Linear(3, 3))(torch.ones(2, 3).long()), "the input is of torch.int64"),
    (lambda: scan(nn.Linear(3, 3))([1, 2]), "the input is of list: expected a tensor of float32"),
    (
        lambda: scan(Reads(torch.ones(3, requires_grad=True)))(
            torch.ones(2, 3, requires_grad=True)
        ),
        r"Reads uses a tensor that requires a gradient and is not one of its parameters: expected "
        r"parameters only; register it as one, or use backward=None",
    ),
    (
        lambda: scan(Reads(torch.ones(3, requires_grad=True) * 2), nn.Linear(3, 1))(
            torch.ones(2, 3)
        ),
        "Reads uses a tensor that requires a gradient",
    ),
    (
        changed_between,
        r"a parameter or buffer of a Sequential with backward='scan' was changed in place between "
        r"the forward pass and the backward pass: expected both passes with the same weights; step",
    ),
    (
        in_forward_mode,
        r"forward-mode derivatives .* cannot go through",
    ),
    (
        lambda: scan(nn.Linear(3, 3))(torch.ones(0, 3)),
        "the input has no samples: expected at least one; leave the batch out",
    ),
    (lambda: scan(nn.Tanh())(torch.tensor(1.0, requires_grad=True)), "the input has no samples"),
    (
        lambda: scan(nn.Linear(3, 3), nn.BatchNorm1d(3))(torch.ones(2, 3)),
        r"BatchNorm1d in training mode takes its mean and variance from the batch",
    ),
    (
        lambda: scan(nn.Linear(3, 3), nn.Softmax(1))(torch.ones(2, 3)),
        "Softmax has no transposed Jacobian here: expected a layer with a rule",
    ),
    (
        lambda: rg.Sequential(backward="backwards"),
        r"backward='backwards': expected 'scan', or None",
    ),
    (
        lambda: rg.Sequential(backward="scan", algorithm="quick"),
        "algorithm='quick': expected one of auto, linear, blelloch, hybrid",
    ),
    (
        lambda: rg.Sequential(backward="scan", algorithm="hybrid"),
        "algorithm='hybrid' and levels=None: expected levels with 'hybrid', and with no other",
    ),
    (
        lambda: rg.Sequential(backward="scan", algorithm="blelloch", levels=2),
        "algorithm='blelloch' and levels=2: expected levels with 'hybrid'",
    ),
    (
        lambda: rg.Sequential(backward="scan", algorithm="hybrid", levels=-1),
        r"levels=-1: expected 0 \(linear\) or more",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(RetrogradeError, match=message):
        call()


def test_a_size_that_cannot_be_read_is_refused():
    with pytest.raises(UnitError):
        rg.Sequential(backward="scan", memory="plenty")


def test_a_captured_tensor_that_wants_nothing_is_fine():
    x = torch.ones(2, 3, requires_grad=True)
    scan(Reads(torch.ones(3)))(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 3))


def test_gradcheck_passes():
    net = ours_of(
        seeded(lambda: [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]), algorithm="blelloch"
    )
    x = draw(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *p: net(x), (x, *net.parameters()))


@pytest.mark.parametrize("strided", ["channels_last", "expanded", "transposed"])
def test_inputs_and_gradients_may_lie_anyhow(strided):
    ours, theirs = pair()
    x = draw(3, 2, 4, 5)
    x = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "expanded": lambda: x[:1].expand(3, -1, -1, -1),
        "transposed": lambda: x.transpose(2, 3).contiguous().transpose(2, 3),
    }[strided]()
    found = []
    for net in (ours, theirs):
        given = x.detach().requires_grad_()
        seed = torch.ones(1, 1, dtype=DOUBLE).expand(3, 4)
        grads = torch.autograd.grad(net(given), [given, *net.parameters()], seed)
        found.append(dict(enumerate(grads)))
    assert_close(*found, 1e-10)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_or_chain_whose_call_does_more_is_refused(number, change):
    net = scan(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3))
    x, name = torch.ones(2, 3), "no transposed Jacobian" if change[:9] == "forward o" else change
    with Changed(change, net[number]), pytest.raises(ScanError, match=name):
        net(x)
