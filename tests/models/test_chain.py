"""``Sequential`` within a budget: torch's numbers, bit for bit, and no more memory than allowed."""

import copy
import ctypes
import math
import pickle
import random
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from oracles.processes import join, leave, spawn
from retrograde.errors import BudgetError, CellError, RetrogradeError, UnitError
from retrograde.models import sequential
from retrograde.models.rows import call_sizes, trials
from retrograde.models.rows.arguments import Arguments
from retrograde.models.rows.rerun import DROPPED, DROPPED_LEAN, LEAN, RecomputedCall
from retrograde.plan.calls import Part
from retrograde.sizes.cache import Recent

PARTS = [1.0, 0.6, 0.2, 0.0]  # of what lies between the least budget and the ordinary one


def residual(width):
    return rg.Residual(
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    )


def convolutional():
    return [
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        residual(8), nn.Dropout(0.3), residual(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.Tanh()), nn.Identity(), nn.Flatten(),
        nn.Linear(24, 9), nn.GELU(), nn.Linear(9, 4),
    ]  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return [nn.Embedding(11, 16), *(copy.deepcopy(layer) for _ in range(4)), nn.Linear(16, 3)]


class Masked(nn.Module):
    """Hands a mask on as it is."""

    def __init__(self, first=False, last=False):
        super().__init__()
        self.first, self.last, self.inner = first, last, nn.Linear(6, 6)

    def forward(self, given):
        x, mask = (given, given > 0) if self.first else (given["x"], given["mask"])
        x = torch.tanh(self.inner(x)) * mask
        return x if self.last else {"x": x, "mask": mask, "none": None}


def masked():
    return [Masked(first=True), Masked(), Masked(), Masked(), Masked(last=True)]


class Skipped(nn.Module):
    """A layer that is skipped for some samples, by a drawn mask."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.inner(x) * torch.bernoulli(torch.full((len(x), 1), 0.5))


class OnGraph(nn.Module):
    """Has a sparse matrix as a buffer, and a vector with a NaN; returns a number, if it is last."""

    def __init__(self, last=False):
        super().__init__()
        self.last, self.inner = last, nn.Linear(6, 6)
        self.register_buffer("edges", (torch.rand(30, 30) < 0.1).float().to_sparse())
        self.register_buffer("known", torch.tensor([1.0, float("nan")]))

    def forward(self, x):
        x = torch.sparse.mm(self.edges, self.inner(x)).relu() * self.known[0]
        return x.square().mean() if self.last else x


NETWORKS = {
    "convolutional": (convolutional, lambda: torch.randn(5, 3, 8, 8)),
    "encoder": (encoder, lambda: torch.randint(11, (3, 7))),
    "masked": (masked, lambda: torch.randn(4, 6)),
    "graph": (lambda: [*(OnGraph() for _ in range(5)), OnGraph(True)], lambda: torch.randn(30, 6)),
    "dropped": (lambda: [Skipped() for _ in range(7)], lambda: torch.randn(4, 6)),
}


def step(net, x, seed=1):
    """Everything that a training step leaves behind."""
    torch.manual_seed(seed)
    random.seed(seed)
    net.zero_grad()
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = net(x)
    y.float().square().sum().backward()
    grads = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    random_state = torch.rand(3), random.random()
    return y.detach(), x.grad, grads, [b.clone() for b in net.buffers()], random_state


def same(a, b):
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape)
        return alike and torch.allclose(a.to_dense(), b.to_dense(), 0, 0, equal_nan=True)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def pair(layers, x, part=0.2):
    """The same layers twice: torch's, and ours within a budget."""
    plain, ours = nn.Sequential(*copy.deepcopy(layers)), rg.Sequential(*layers, memory=1.0)
    squeeze(ours, x, part)
    return plain, ours


def squeeze(ours, x, part=0.2):
    ours.memory = 1.0
    found = ours.fit(x.clone().requires_grad_(x.is_floating_point()))
    between = found.ordinary_bytes - found.minimum_bytes
    ours.memory = math.ceil(found.minimum_bytes + part * between)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_gradients_buffers_and_random_states_are_torchs(name, part):
    torch.manual_seed(0)
    make, sample = NETWORKS[name]
    x = sample()
    plain, ours = pair(make(), x, part)
    for seed in (1, 2):
        assert same(step(plain, x, seed), step(ours, x, seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_least_budget_works_and_one_byte_less_is_refused(name):
    make, sample = NETWORKS[name]
    x = sample()
    plain, ours = pair(make(), x, 0.0)
    least = ours.memory
    assert same(step(plain, x), step(ours, x))
    ours.memory = least - 1
    with pytest.raises(BudgetError, match=f"expected at least {least}") as refusal:
        step(ours, x)
    assert refusal.value.minimum_bytes == least


def deep():
    blocks = [nn.Sequential(residual(8), nn.ReLU(inplace=True)) for _ in range(9)]
    return [nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(32, 4)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [convolutional, deep])
def test_what_is_held_is_what_was_foreseen_to_the_byte(make):
    torch.manual_seed(0)
    x, g = torch.randn(32, 3, 8, 8), torch.ones(32, 4)
    plain, ours = pair(make(), x, 1.0)

    def run(net):
        def call():
            y = net(x)
            y.backward(g)
            return y.detach()  # the caller's, and so not counted

        net.zero_grad()
        return rg.measure(call).working_bytes

    run(plain)
    ordinary, whole = run(plain), ours.fit(x)
    # The output's gradient is the caller's here, and counted.
    slack = g.nbytes + sum(size.noted_bytes + size.left_bytes for size in whole.sizes)
    assert ordinary <= whole.ordinary_bytes <= ordinary + slack
    for share in torch.linspace(whole.minimum_bytes / whole.ordinary_bytes, 0.98, 9).tolist():
        ours.memory = math.ceil(share * whole.ordinary_bytes)
        found = ours.fit(x)
        run(ours)
        held = run(ours)
        assert held <= found.peak_bytes <= found.budget_bytes
        assert found.peak_bytes - held <= slack


class Of(nn.Module):
    """A layer of a function, or of a layer for the first of what is handed on."""

    def __init__(self, of, first=False):
        super().__init__()
        self.of, self.first = of, first

    def forward(self, x):
        return (self.of(x[0]), x[1]) if self.first else self.of(x)


JOINS = {
    "added": (32, lambda xs: xs[0] + xs[1]),
    "beside": (64, lambda xs: torch.cat(xs, -1)),
    "times": (32, lambda xs: xs[0] * xs[1]),
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("forks", [1, 3])
def test_what_layers_hand_on_and_its_gradient_are_in_the_budget(join, forks):
    width, function = JOINS[join]
    torch.manual_seed(0)
    layers = []
    for _ in range(forks):
        inner = [layer for _ in range(8 // forks) for layer in (nn.Linear(32, 32), nn.Tanh())]
        layers += [nn.Linear(32, 32), nn.Tanh(), Of(lambda x: (x, x))]
        layers += [*(Of(layer, first=True) for layer in inner), Of(function)]
        layers += [nn.Linear(width, 32), nn.Tanh()]
    x, g = torch.randn(256, 32), torch.ones(256, 32)
    plain, ours = pair(layers, x, 1.0)

    def run(net):
        y = net(x)
        return [y.detach(), *torch.autograd.grad(y, [*net.parameters()], g)]

    run(plain)
    ordinary, fit = rg.measure(lambda: run(plain)).working_bytes, ours.fit(x)
    noted = sum(size.noted_bytes + size.left_bytes for size in fit.sizes)
    assert ordinary <= fit.ordinary_bytes <= ordinary + x.nbytes + noted
    for memory in (fit.minimum_bytes, (fit.minimum_bytes + ordinary) // 2, "60%", "80%"):
        ours.memory = memory
        if ours.fit(x).budget_bytes < fit.minimum_bytes:
            continue
        run(ours)
        assert rg.measure(lambda: run(ours)).working_bytes <= ours.fit(x).budget_bytes
        assert same(run(ours), run(plain))


def drawn(seed):
    """Layers of any kinds and sizes; what writes in place stands where torch allows it."""
    draw, width = random.Random(seed), 8
    layers = [nn.Linear(8, 8)]
    for _ in range(draw.randint(3, 14)):
        kind = draw.choice(["linear", "tanh", "dropout", "norm", "relu", "gelu"])
        if kind == "linear":
            layers.append(nn.Linear(width, width := draw.choice([4, 8, 32, 64])))
        elif kind == "relu":
            inplace = isinstance(layers[-1], nn.Linear | nn.BatchNorm1d | nn.GELU)
            layers.append(nn.ReLU(inplace=inplace))
        elif kind == "norm":
            layers.append(nn.BatchNorm1d(width))
        else:
            layers.append({"tanh": nn.Tanh, "dropout": nn.Dropout, "gelu": nn.GELU}[kind]())
    return layers


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(6))
def test_drawn_chains_keep_drawn_budgets_and_torchs_numbers(seed):
    torch.manual_seed(seed)
    x = torch.randn(256, 8)
    plain, ours = pair(drawn(seed), x, 1.0)
    whole = ours.fit(x)
    for part in range(5):
        between = whole.ordinary_bytes - whole.minimum_bytes
        ours.memory = whole.minimum_bytes + between * part // 5
        kept = copy.deepcopy(ours.state_dict())
        for net in (plain, ours):
            net.load_state_dict(kept)
        assert same(step_twice(plain, x), step_twice(ours, x))
        assert same(step(plain, x), step(ours, x))
        ours.zero_grad()
        g = torch.ones_like(plain(x).detach())

        def call(g=g):
            y = ours(x)
            y.backward(g)
            return y.detach()

        assert rg.measure(call).working_bytes <= ours.fit(x).peak_bytes


def step_twice(net, x):
    """Two backward passes through one graph."""
    torch.manual_seed(1)
    net.zero_grad()
    y = net(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return [p.grad.clone() for p in net.parameters()], [b.clone() for b in net.buffers()]


def test_a_smaller_budget_takes_no_less_work():
    x = torch.randn(8, 3, 8, 8)
    _, ours = pair(convolutional(), x)
    found = []
    for part in PARTS:
        squeeze(ours, x, part)
        found.append(ours.fit(x.requires_grad_()).forward_layers)
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_layers_that_run_forward_are_counted_by_the_plan():
    fit = rg.Sequential(*(nn.Linear(4, 4) for _ in range(3)), memory="100%").fit(torch.ones(2, 4))
    assert fit.forward_layers == 3
    dropped, group = (
        Part(0, 1, DROPPED),
        Part(1, 3, 0, (Part(1, 2, LEAN), Part(2, 3, DROPPED_LEAN))),
    )
    assert replace(fit, parts=(dropped, Part(1, 2), Part(2, 3, LEAN))).forward_layers == 3 + 1
    assert replace(fit, parts=(dropped, group)).forward_layers == 3 + 1 + 2


@pytest.mark.quick(0)
def test_a_module_of_torchs_can_be_loaded_and_back():
    plain, ours = pair(convolutional(), torch.ones(2, 3, 8, 8))
    ours.load_state_dict(plain.state_dict())
    assert list(ours.state_dict()) == list(plain.state_dict())
    x = torch.ones(2, 3, 8, 8)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), ours[:]):
        assert other.memory == ours.memory
        assert same(step(copy.deepcopy(plain), x), step(other, x))


def test_shapes_and_modes_are_planned_anew():
    plain, ours = pair(convolutional(), torch.randn(9, 3, 8, 8))
    for mode in (True, False, True):
        plain.train(mode), ours.train(mode)
        for batch in (3, 9, 3):
            x = torch.randn(batch, 3, 8, 8)
            assert same(step(plain, x), step(ours, x))


def test_frozen_layers_stay_frozen_and_can_be_thawed():
    x = torch.randn(4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)
    for net in (plain, ours):
        for layer in (*net[:3], net[5]):
            layer.requires_grad_(False)
    assert same(step(plain, x), step(ours, x))

    def without_input(net):  # the first layers are then run once and for all
        torch.manual_seed(0)
        net(x).sum().backward()
        return [p.grad for p in net.parameters()], list(net.buffers())

    assert same(without_input(plain), without_input(ours))
    for net in (plain, ours):
        net.requires_grad_(True)
    assert same(step(plain, x), step(ours, x))


def test_parameters_that_layers_share():
    linear = nn.Linear(6, 6)
    layers = [linear, nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), linear, nn.Tanh(), linear]
    x = torch.randn(40, 6)
    plain, ours = pair(layers, x)
    assert same(step(plain, x), step(ours, x))


def test_shared_parameters_of_links_that_are_run_again_together():
    """A node has the parameters of several links, but each only once, and added up in turn."""
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    x = torch.randn(4096, 6)
    for part in (0.0, 0.4):
        layers = [m for _ in range(8) for m in (shared, nn.Tanh(), nn.Linear(6, 6), nn.Tanh())]
        plain, ours = pair(layers, x, part)
        assert same(step(plain, x), step(ours, x))


def test_a_layer_through_which_no_gradient_passes():
    class Stop(nn.Module):
        def forward(self, x):
            return x.detach() * 2

    x = torch.randn(40, 6)
    plain, ours = pair([nn.Linear(6, 6), Stop(), *[nn.Linear(6, 6) for _ in range(4)]], x)
    assert same(step(plain, x), step(ours, x))


def test_nothing_to_backpropagate_is_run_plainly():
    x = torch.randn(4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)
    for net in (plain, ours):
        net.requires_grad_(False)
        torch.manual_seed(0)
    torch.manual_seed(0)
    expected = plain(x)
    torch.manual_seed(0)
    assert torch.equal(expected, ours(x))
    ours.requires_grad_(True)
    with torch.no_grad():
        assert not ours(x).requires_grad
    with torch.inference_mode():
        assert not ours(x).requires_grad


def test_two_forward_passes_before_the_backward_passes():
    x, z = torch.randn(2, 4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)

    def both(net):
        torch.manual_seed(0)
        net.zero_grad()
        (net(x).sum() * net(z).sum()).backward()
        return [p.grad for p in net.parameters()], list(net.buffers()), torch.rand(2)

    assert same(both(plain), both(ours))


def test_a_backward_pass_again_and_one_for_a_few_parameters():
    x = torch.randn(4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)

    def several(net):
        torch.manual_seed(0)
        loss = net(x).square().sum()
        last = torch.autograd.grad(loss, net[-1].weight, retain_graph=True)
        once = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        loss.backward()
        return last, once, [p.grad for p in net.parameters()], list(net.buffers()), torch.rand(2)

    assert same(several(plain), several(ours))


def test_gradients_add_up_and_hooks_are_called_once():
    x = torch.randn(4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)
    calls = []
    for net in (plain, ours):
        net[0].weight.register_hook(lambda g: calls.append(g.clone()))

    def twice(net):
        torch.manual_seed(0)
        for _ in range(2):
            net(x).sum().backward()
        return [p.grad for p in net.parameters()]

    assert same(twice(plain), twice(ours))
    assert len(calls) == 4
    assert same(calls[:2], calls[2:])


@pytest.fixture(params=[False, True], ids=["alone", "beside_a_thread"])
def beside_a_thread(request):
    """Whether another thread lives, which might draw random numbers."""
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    if request.param:
        other.start()
    yield
    done.set()


@pytest.mark.quick(4)
@pytest.mark.usefixtures("beside_a_thread")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_replayed(dtype):
    x = torch.randint(11, (3, 7))
    plain, ours = pair(encoder(), x, 0.7)

    def cast(net):
        torch.manual_seed(0)
        net.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            y = net(x)
        y.float().sum().backward()
        return y, [p.grad for p in net.parameters()]

    assert same(cast(plain), cast(ours))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_other_types(dtype):
    layers = [nn.Linear(6, 6, dtype=dtype) for _ in range(8)]
    x = torch.randn(50, 6, dtype=dtype)
    plain, ours = pair(layers, x)

    def run(net):
        net.zero_grad()
        net(x).abs().sum().backward()
        return [p.grad for p in net.parameters()]

    assert same(run(plain), run(ours))


def test_a_budget_within_a_budget():
    x = torch.randn(50, 6)
    inner = rg.Sequential(*[nn.Linear(6, 6) for _ in range(9)])
    squeeze(inner, x)
    plain, ours = pair([nn.Linear(6, 6), inner, nn.Linear(6, 6), nn.Linear(6, 6)], x, 0.5)
    assert same(step(plain, x), step(ours, x))


def test_parameters_put_in_by_functional_call():
    x = torch.randn(50, 6)
    plain, ours = pair([m for _ in range(5) for m in (nn.Linear(6, 6), nn.Tanh())], x)
    others = {name: (p * 2).detach() for name, p in plain.named_parameters()}

    def run(net):
        mine = {name: p.clone().requires_grad_() for name, p in others.items()}
        y = torch.func.functional_call(net, mine, x)
        y.sum().backward()
        return y, [p.grad for p in mine.values()], [p.grad for p in net.parameters()]

    assert same(run(plain), run(ours))

    def computed(net):
        leaves = {name: p.clone().requires_grad_() for name, p in others.items()}
        y = torch.func.functional_call(net, {name: p * 2 for name, p in leaves.items()}, x)
        return y, torch.autograd.grad(y.sum(), [*leaves.values()])

    assert same(computed(plain), computed(ours))


def test_an_optimizer_trains_as_ever():
    plain, ours = pair(convolutional(), torch.randn(16, 3, 8, 8))
    x, t = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    losses = []
    for net in (plain, ours):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(x), t)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == losses[4:]
    assert same(list(plain.parameters()), list(ours.parameters()))


def test_one_opaque_call_within_compiled_code():
    layers = [m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())]
    plain, ours = pair(layers, torch.randn(20, 6))
    compiled = torch.compile(lambda x: ours(x * 2) + 1, backend="eager")
    x = torch.randn(20, 6)
    compiled(x).sum().backward()
    (plain(x * 2) + 1).sum().backward()
    assert same([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])


def train_in_a_group(_, folder):
    x = torch.randn(4, 3, 8, 8)
    plain, ours = pair(convolutional(), x)
    join(0, 1, folder)
    wrapped = nn.parallel.DistributedDataParallel(ours)
    torch.manual_seed(0)
    wrapped(x).sum().backward()
    torch.manual_seed(0)
    plain(x).sum().backward()
    grads = [[p.grad for p in net.parameters()] for net in (plain, ours)]
    torch.save(grads, f"{folder}/grads.pt")
    leave()


def test_distributed_data_parallel(tmp_path):
    spawn(train_in_a_group, (str(tmp_path),), 1)
    assert same(*torch.load(tmp_path / "grads.pt"))


class Captured(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.outside = [outside]

    def forward(self, x):
        return x * self.outside[0]


class Changing(nn.Module):
    """Returns another shape every time, by a count that nobody can set back."""

    def __init__(self):
        super().__init__()
        self.calls = ctypes.c_long()

    def forward(self, x):
        self.calls.value += 1
        return x if self.calls.value == 1 else x[: -self.calls.value]


class Noting(nn.Module):
    """Returns more than tensors."""

    def forward(self, x):
        return [x * 2, "text"]


class Reading(nn.Module):
    def forward(self, given):
        x, text = given
        return x + len(text)


class Squaring(nn.Module):
    """Writes to what the layer before the last one made."""

    def forward(self, given):
        x, y = given
        x.mul_(2)
        return x + y


class Forking(nn.Module):
    def forward(self, x):
        return x, x + 1


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (lambda: [nn.ReLU(inplace=True)], "layer 0 writes in place to the chain's input"),
        (lambda: [nn.Flatten(0), nn.ReLU(inplace=True)], "layer 1 writes in place to the chain's"),
        (lambda: [nn.Linear(6, 6), nn.Tanh(), Forking(), Squaring()],
         "layer 3 writes in place to what layer 2 was given"),
        (lambda: [nn.LazyLinear(6)], "parameters without a shape yet"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_run_exactly_are_refused(first, reason):
    ours = rg.Sequential(*first(), nn.Linear(6, 6), nn.Linear(6, 6), memory=10**6)
    ours.memory = 10**4
    with pytest.raises(CellError, match=reason):
        ours(torch.randn(200, 6))


def test_what_has_a_gradient_besides_parameters_and_what_is_no_tensor():
    outside = torch.randn(6, requires_grad=True)
    layers = [nn.Linear(6, 6), nn.Tanh(), Captured(outside), Noting(), Reading(), nn.Linear(6, 6)]
    plain, x = nn.Sequential(*layers), torch.randn(200, 6)
    ours = rg.Sequential(*layers, memory=1.0)
    squeeze(ours, x, 0.0)
    wanted = [outside, *plain.parameters()]
    assert same(*(torch.autograd.grad(net(x).square().sum(), wanted) for net in (plain, ours)))


def test_a_layer_that_computes_otherwise_when_it_runs_again():
    ours = rg.Sequential(nn.Linear(6, 6), Changing(), nn.Linear(6, 6), nn.Tanh(), memory=1.0)
    with pytest.raises(CellError, match="layer 0-1 computes another gradient when it runs again"):
        ours(torch.randn(200, 6))


def test_a_first_layer_may_only_reshape():
    layers = [nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 6)]
    plain, ours = pair(layers, torch.ones(70, 3, 4))
    assert same(step(plain, torch.ones(70, 3, 4)), step(ours, torch.ones(70, 3, 4)))


def test_what_changes_between_the_passes_is_noticed():
    x = torch.randn(50, 6)
    _, ours = pair([nn.Linear(6, 6) for _ in range(9)], x)
    y = ours(x)
    with torch.no_grad():
        ours[0].weight.mul_(2)
    with pytest.raises(RetrogradeError, match="layer 0 has been modified by an inplace"):
        y.sum().backward()
    y = ours(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    ours(x).sum().backward()


def test_layers_may_be_exchanged():
    x = torch.randn(50, 6)
    plain, ours = pair([m for _ in range(6) for m in (nn.Linear(6, 6), nn.ReLU())], x)
    assert same(step(plain, x), step(ours, x))
    for net in (plain, ours):
        net[1] = nn.Identity()  # shares its input's memory, and so makes one link fewer
    assert same(step(plain, x), step(ours, x))
    plain[3].inplace = ours[3].inplace = True  # tried anew, and joined with the one before
    ours.memory = "95%"
    assert same(step(plain, x), step(ours, x))


class Unseen:
    """A count that no search finds, as that of an extension in C; such is this library's own."""

    __module__ = "retrograde.unseen"
    calls = 0


class Whimsical(nn.Module):
    """Draws from torch's generator, or writes to its buffer, from some call on."""

    def __init__(self, draws):
        super().__init__()
        self.draws, self.unseen = draws, Unseen()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.unseen.calls += 1
        if self.unseen.calls > 300 and self.draws:
            return functional.dropout(x, 0.5)
        if self.unseen.calls > 300:
            self.seen += 1
        return x * 1.5


@pytest.mark.quick(4)
@pytest.mark.usefixtures("beside_a_thread")
@pytest.mark.parametrize("draws", [True, False])
def test_a_layer_that_draws_or_writes_later_only_is_refused(draws):
    whimsical = Whimsical(draws)
    before, after = ([nn.Linear(6, 6) for _ in range(count)] for count in (3, 6))
    ours = rg.Sequential(*before, whimsical, *after, memory=1.0)
    x = torch.randn(50, 6)
    squeeze(ours, x, 0.0)
    step(ours, x)
    whimsical.unseen.calls = 300
    who = "layer 3 has been modified by an inplace|layer 4 computed something else"
    with pytest.raises(RetrogradeError, match=who):
        step(ours, x)


def test_second_derivatives_work_beyond_the_budget():
    x = torch.randn(50, 6, requires_grad=True)
    plain, ours = pair([m for _ in range(5) for m in (nn.Linear(6, 6), nn.Tanh())], x.detach(), 0)

    def penalty(net):
        (g,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [*net.parameters()])

    with pytest.warns(UserWarning, match="the budget does not cover it"):
        found = penalty(ours)
    assert same(penalty(plain), found)


def test_forward_mode_is_refused():
    _, ours = pair([nn.Linear(6, 6) for _ in range(9)], torch.randn(50, 6))
    x = torch.randn(50, 6)
    with pytest.raises(RetrogradeError, match="forward-mode"):
        torch.func.jvp(ours, (x,), (x,))


def test_options_are_checked_when_the_module_is_made():
    for memory in ("lots", 0, -5, 1.5):
        with pytest.raises(UnitError):
            rg.Sequential(nn.Linear(2, 2), memory=memory)
    with pytest.raises(CellError, match="expected a memory and no backward"):
        rg.Sequential(nn.Linear(2, 2)).fit(torch.ones(1, 2))
    frozen = rg.Sequential(nn.Linear(2, 2).requires_grad_(False), memory=0.5)
    with pytest.raises(CellError, match="there is nothing to backpropagate"):
        frozen.fit(torch.ones(1, 2))


def test_measuring_leaves_no_trace():
    ours = rg.Sequential(*convolutional(), memory=1.0)
    buffers = [b.clone() for b in ours.buffers()]
    torch.manual_seed(3)
    ours.fit(torch.randn(4, 3, 8, 8))
    drawn = torch.rand(2)
    torch.manual_seed(3)
    torch.randn(4, 3, 8, 8)
    assert torch.equal(drawn, torch.rand(2))
    assert same(buffers, list(ours.buffers()))
    assert all(p.grad is None for p in ours.parameters())


class Mixed(nn.Module):
    """Two chains, one of them called twice in a row, a recurrent module, and what has no budget."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(6, 6), nn.Tanh())])
        self.gru = nn.GRU(6, 6)
        self.head = nn.ModuleDict({"deep": nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))})
        self.short = nn.Sequential(nn.Linear(6, 2))

    def forward(self, x):
        x = self.first(self.first(x))
        return self.short(self.head["deep"](self.gru(x)[0]))


def test_one_budget_for_chains_and_recurrent_modules():
    torch.manual_seed(0)
    x = torch.randn(30, 9, 6)
    model = Mixed()
    plain, names = copy.deepcopy(model), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = rg.budget(copy.deepcopy(model), "100%", x)
    division = rg.budget(model, whole.minimum_bytes + 2000, x)
    assert list(division.shares) == ["gru", "first.0 … first.7", "head.deep.0 … short.0"]
    assert division.shares["first.0 … first.7"].calls == 1  # of a row that has them twice
    assert [type(m) for m in (model.first, model.gru)] == [nn.Sequential, rg.GRU]
    assert list(model.state_dict()) == names
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == set(map(id, model.parameters()))
    torch.testing.assert_close(step(plain, x)[2], step(model, x)[2])
    with pytest.raises(BudgetError, match="budgeted modules need at least"):
        rg.budget(model, whole.minimum_bytes - 1, x)


def test_a_model_that_is_a_chain_is_budgeted_in_place():
    x = torch.randn(16, 3, 8, 8)
    plain, _ = pair(convolutional(), x)
    model = copy.deepcopy(plain)
    division = rg.budget(model, "80%", x)
    assert type(model) is nn.Sequential
    assert same(step(plain, x), step(model, x))
    again = rg.budget(model, "100%", x)
    assert again.ordinary_bytes == division.ordinary_bytes


def test_the_profile_of_a_network_is_its_chain():
    chain = rg.profile(nn.Sequential(*convolutional()), torch.randn(4, 3, 8, 8), repeats=1)
    assert chain.names[:3] == ("0", "1-2", "3")
    assert chain.output_bytes[:3] == (4 * 8 * 8 * 8 * 4,) * 3
    assert min(chain.forward_seconds) > 0 < sum(chain.backward_seconds)
    assert rg.plan(chain, "80%").peak <= 0.8 * rg.plan(chain, policy="store-all").peak
    assert "1-2" in str(chain)
    with pytest.raises(CellError, match="a Sequential has no state"):
        rg.profile(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), torch.ones(1))


def triples(inplace):
    triple = lambda: (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace))  # noqa: E731
    return [layer for _ in range(4) for layer in triple()]


def tied():
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    third.weight = first.weight
    return [nn.Sequential(first, second), nn.Sequential(first, third), nn.Sequential(first, first)]


IMAGE, ROW = torch.randn(2, 3, 5, 5), torch.randn(3, 4)
REPEATED = {
    "convolutions": (lambda: [*triples(False), nn.Flatten(), nn.Linear(75, 4)], IMAGE, 6),
    "in place": (lambda: triples(True), IMAGE, 3),
    "evaluation": (lambda: [layer.eval() for layer in triples(False)], IMAGE, 4),
    "dropout": (lambda: [m for _ in range(3) for m in (nn.Linear(4, 4), nn.Dropout())], ROW, 3),
    "one layer twice": (lambda: [nn.Linear(4, 4), *[nn.BatchNorm1d(4)] * 3], ROW, 2),
    "tied": (tied, ROW, 3),
    "frozen": (lambda: [nn.Linear(4, 4).requires_grad_(k != 1) for k in range(3)], ROW, 3),
}


@pytest.mark.parametrize("name", REPEATED)
def test_layers_of_one_make_are_measured_once(name, monkeypatch):
    make, x, most = REPEATED[name]
    layers = [(str(k), layer) for k, layer in enumerate(make())]
    calls, real = [], call_sizes.measure_phases
    monkeypatch.setattr(
        call_sizes, "measure_phases", lambda *a, **b: calls.append(0) or real(*a, **b)
    )
    kind = sequential.measured(layers, x, call_sizes.Plans())
    assert len(calls) == most <= len(kind.sizes)
    calls.clear()
    monkeypatch.setattr(call_sizes, "architecture_key", lambda _: None)
    by_class, apart = call_sizes.Plans(), call_sizes.Plans()
    apart.seen = Forgetful()
    for plans in (by_class, apart):
        found = sequential.measured(layers, x, plans)
        assert len(calls) == len(found.sizes)
        assert [*map(in_bytes, kind.sizes)] == [*map(in_bytes, found.sizes)]
        calls.clear()


class Forgetful(dict):
    def setdefault(self, key, value):
        return value


def in_bytes(size):
    """All sizes but the seconds."""
    ways = tuple(replace(way, seconds=0.0, again_seconds=0.0) for way in size.ways)
    return replace(size, ways=ways, forward_seconds=0.0, ordinary_seconds=0.0)


def test_modules_that_nest_otherwise_are_of_another_make():
    a, b = nn.Linear(4, 4), nn.ReLU()
    nets = nn.Sequential(a, b, a), nn.Sequential(a, b, b), nn.Sequential(a, b, a)
    makes = [trials.architecture_key(trials.parts_of([net])) for net in nets]
    assert makes[0] == makes[2] != makes[1]


@pytest.mark.quick(0)
def test_of_very_many_layers_neighbours_are_taken_together():
    layers = [m for _ in range(120) for m in (nn.Linear(6, 6), nn.Tanh())]
    x = torch.randn(50, 6)
    plain, ours = pair(layers, x)
    assert ours.fit(x).names[:2] == ("0-1", "2-3")
    assert same(step(plain, x), step(ours, x))


def test_a_fit_may_be_copied():
    fit = rg.Sequential(nn.Linear(2, 2), nn.Tanh(), memory="100%").fit(torch.ones(4, 2))
    assert copy.deepcopy(fit).names == pickle.loads(pickle.dumps(fit)).names == ("0", "1")


class Disturbed(nn.Module):
    """Its first run draws one number more, as another thread would."""

    def forward(self, x):
        if torch._C._current_graph_task_id() < 0:
            torch.rand(())
        return functional.dropout(x, 0.5)


def test_a_rerun_that_ends_early_notices_draws_of_another_thread():
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    try:
        given = Arguments((torch.ones(9, 9),))
        unit = trials.try_call("0", Disturbed(), [Disturbed()], given)[0]
        x = torch.ones(9, 9, requires_grad=True)
        call = RecomputedCall(unit, Arguments((x,)), lean=False)
        y = call.run(unit.forward, Arguments((x,)))
        with pytest.raises(RetrogradeError, match="something else when it ran again"):
            y.sum().backward()
    finally:
        done.set()


class Writing(nn.Module):
    """Writes to its input from some call on."""

    def __init__(self):
        super().__init__()
        self.unseen = Unseen()

    def forward(self, x):
        return (x.add_(1) if self.unseen.calls else x + 1) * 2


def test_a_dropped_layer_that_writes_to_its_input_later_only_is_refused():
    writing, x = Writing(), torch.randn(50, 6)
    unit = trials.try_call("0", writing, [writing], Arguments((x,)))[0]
    RecomputedCall(unit, Arguments((x,)), lean=False).run(writing, Arguments((x,)))
    writing.unseen.calls = 1
    with pytest.raises(CellError, match="layer 0 writes in place to what it is given"):
        RecomputedCall(unit, Arguments((x,)), lean=False).run(writing, Arguments((x,)))


class Doubled(rg.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("change", [*CHANGES, None])
@pytest.mark.parametrize("kind", [nn.Sequential, rg.Sequential])
def test_a_nested_chain_whose_call_does_more_runs_by_its_call(kind, change):
    inner = kind(nn.Linear(8, 8), nn.Tanh()) if change else Doubled(nn.Linear(8, 8), nn.Tanh())
    layers = [inner, *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))]
    x, found = torch.randn(64, 8, requires_grad=True), []
    with Changed(change, inner) if change else nullcontext():
        for net in (nn.Sequential(*layers), rg.Sequential(*layers, memory="90%")):
            y = net(x)
            y.square().sum().backward()
            found.append((y.detach(), x.grad))
            x.grad = None
    assert all(map(torch.equal, *found))


def test_a_part_with_a_forward_of_its_own_is_measured_by_itself():
    """It holds more than the parts of other layers of its make."""
    layers = [nn.TransformerEncoderLayer(8, 1, 16, 0.0, batch_first=True) for _ in range(4)]
    forward = layers[2].linear1.forward
    layers[2].linear1.forward = lambda x: forward(x).exp().sin().exp().sin()
    sizes = rg.Sequential(*layers, memory="100%").fit(torch.randn(8, 64, 8)).sizes
    held = [size.ways[0].held_bytes for size in sizes]
    assert held[2] >= held[1] + 2 * 512 * 16 * 4


class Chancy(nn.Module):
    """A block that a number, drawn by Python or by torch, mostly leaves out."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.norm = draw, nn.BatchNorm1d(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        if self.draw() < 0.9:
            return x
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(())], ids=["python", "torch"])
@pytest.mark.parametrize("way", ["sequential", "budget"])
def test_a_layer_that_chance_mostly_leaves_out_is_planned_as_if_it_ran(draw, way, recwarn):
    """What a trial that left it out shows would be exceeded, and its statistics not put back."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Chancy(draw) for _ in range(6)), nn.Linear(16, 16))
    x = torch.randn(64, 16)
    inner = rg.Sequential(*copy.deepcopy(plain), memory=1) if way == "sequential" else None
    model = inner or copy.deepcopy(plain)
    with pytest.raises(BudgetError) as refusal:
        inner.fit(x) if inner else rg.budget(model, 1, x)
    least = refusal.value.minimum_bytes
    if inner:
        inner.memory = least
        elsewhere = 0
    else:
        elsewhere = rg.budget(model, least, x).elsewhere_bytes
    for seed in range(12):
        found = []
        for one in (plain, model):
            torch.manual_seed(seed)
            random.seed(seed)
            one.zero_grad(set_to_none=True)
            taken = rg.measure(lambda one=one: one(x).sum().backward()).working_bytes
            assert one is plain or taken <= least + elsewhere + 64
            found.append([*(p.grad for p in one.parameters()), *one.buffers()])
        assert all(a is b or torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not recwarn.list


def test_what_is_known_of_calls_is_bounded():
    net = rg.Sequential(*(nn.Linear(8, 8) for _ in range(3)), memory="100%")
    for table in ("sizes", "seen", "seconds"):
        setattr(net._plans, table, Recent(4))
    for rows in range(1, 9):
        net(torch.randn(rows, 8)).sum().backward()
        assert all(len(getattr(net._plans, table)) <= 4 for table in ("sizes", "seen", "seconds"))
    assert len(net._plans.seen) == 4
