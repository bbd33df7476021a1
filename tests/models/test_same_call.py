"""A rerun is the same call: the same objects and surroundings, to the end of the code; and its
result says so (rule 11)."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import retrograde as rg
from retrograde.models.rows.checks import Compared, Noted, Reruns
from retrograde.replay.fingerprints import fingerprint

D = 16


class Block(nn.Module):
    """A layer whose subclasses depend on more than the values of their arguments."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.depth, self.scale = 0, 1.0

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return x + self.inner(x)


class Depth(Block):
    """Counts down behind the last tensor that it saves."""

    def forward(self, x):
        self.depth += 1
        y = x + self.inner(x) * (1 + 0.1 * self.depth)
        self.depth -= 1
        return y


class Steps(Block):
    """Counts its calls, and computes with the number."""

    def forward(self, x):
        self.depth += 1
        return x + self.inner(x / self.depth)


class Once(Block):
    """Makes a mask in its first call."""

    def forward(self, x):
        if not isinstance(self.scale, torch.Tensor):
            self.scale = torch.linspace(0, 1, D)
        return x + self.inner(x * self.scale)


class Attribute(Block):
    """Reads an attribute of its input."""

    def forward(self, x):
        return x + self.inner(x) * getattr(x, "scale", 1.0)


class Leaf(Block):
    """Asks whether its input has a history."""

    def forward(self, x):
        return x + self.inner(x if x.is_leaf else 0.5 * x)


class Noise(Block):
    """Ends with noise that torch saves before it is drawn."""

    def forward(self, x):
        return functional.rrelu(self.inner(x), training=True)


class Attention(Block):
    def forward(self, x):
        q, k = (t.unsqueeze(1) for t in self.up(x).chunk(2, -1))
        found = functional.scaled_dot_product_attention(q, k, x.unsqueeze(1))[:, 0]
        return x + self.down(torch.cat([found, x], -1))


class Model(nn.Module):
    def __init__(self, kind, between=lambda i, x: x):
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(5))
        self.between = between

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(self.between(i, x))
        return x


def budgeted(model, x, memory):
    """The model within a share, or within the least."""
    try:
        rg.budget(model, memory, x)
    except rg.BudgetError as least:
        rg.budget(model, least.minimum_bytes, x)
    return model


def chained(model, x, memory):
    net = rg.Sequential(*model.blocks, memory=memory)
    try:
        net.fit(x)
    except rg.BudgetError as least:
        net.memory = least.minimum_bytes
    return net


def steps_of(model, x, steps=3):
    """Outputs and gradients of some passes."""
    found = []
    for seed in range(steps):
        torch.manual_seed(seed)
        y = model(x)
        found += [y.detach(), *torch.autograd.grad(y.square().mean(), [*model.parameters()])]
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("way", [budgeted, chained])
@pytest.mark.parametrize("memory", ["30%", "60%"])
@pytest.mark.parametrize("kind", [Depth, Steps, Once, Leaf, Noise, Attention])
def test_layers_that_depend_on_more_than_values(kind, memory, way):
    torch.manual_seed(0)
    plain, x = Model(kind), torch.randn(6, 10, D)
    ours = copy.deepcopy(plain)
    ours = way(ours, x, memory)
    junk = [torch.full((6, 10, 2 * D), v) for v in (torch.nan, 5.0)]  # what memory holds
    del junk
    for a, b in zip(steps_of(ours, x), steps_of(plain, x), strict=True):
        assert torch.equal(a, b)


def scaled(i, x):
    x.scale = 1.5 if i % 2 else 0.7
    return x


@pytest.mark.parametrize("memory", ["30%", "60%"])
def test_attributes_of_an_input_come_with_it(memory):
    torch.manual_seed(0)
    plain, x = Model(Attribute, scaled), torch.randn(6, 10, D)
    ours = budgeted(copy.deepcopy(plain), x, memory)
    for a, b in zip(steps_of(ours, x), steps_of(plain, x), strict=True):
        assert torch.equal(a, b)


class Same(Block):
    """Asks whether two arguments are one tensor, as torch's own attention does."""

    def forward(self, q, k):
        return self.inner(q) if q is k else self.inner(q) * 0.5 + k


class Twice(Model):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, x)
        return x


def test_one_tensor_that_is_given_twice_is_one_tensor():
    torch.manual_seed(0)
    plain, x = Twice(Same), torch.randn(6, 10, D)
    ours = budgeted(copy.deepcopy(plain), x, "50%")
    for a, b in zip(steps_of(ours, x), steps_of(plain, x), strict=True):
        assert torch.equal(a, b)


class Halved(TorchFunctionMode):
    """Halves what torch.tanh returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.tanh else result


AROUND = {
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "a mode": Halved,
    "the default type": lambda: Default(torch.float64),
}


class Default:
    def __init__(self, dtype):
        self.dtype = dtype

    def __enter__(self):
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


class Made(Block):
    def forward(self, x):
        return x + self.inner(x * (1 + torch.finfo(torch.ones(()).dtype).eps * 1e5))


@pytest.mark.quick(2)
@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_the_forward_pass_is_there_at_a_rerun(around):
    torch.manual_seed(0)
    plain, x = Model(Attention if around == "attention" else Made), torch.randn(6, 10, D)
    ours = copy.deepcopy(plain)
    with AROUND[around]():
        budgeted(ours, x, "40%")
        losses = [model(x).square().mean() for model in (ours, plain)]
    found, expected = (
        torch.autograd.grad(loss, [*model.parameters()])
        for loss, model in zip(losses, (ours, plain), strict=True)
    )
    assert all(map(torch.equal, found, expected))


def clamped(i, x):
    if i == 1:
        x.data.clamp_(-1, 1)  # no version counts it
    return x


@pytest.mark.parametrize("memory", ["15%", "40%"])
def test_a_state_that_is_changed_unseen_is_noticed(memory):
    """Autograd saved what the next layer was given; a rerun computes the state as it was before."""
    torch.manual_seed(0)
    plain, x = Model(Block, clamped), 3 * torch.randn(6, 10, D)
    ours = copy.deepcopy(plain)
    try:
        budgeted(ours, x, memory)
        found = steps_of(ours, x)
    except rg.RetrogradeError:
        found = None
    assert found is None or all(map(torch.equal, found, steps_of(plain, x)))


def test_a_change_between_the_passes_raises_before_a_gradient_is_seen():
    torch.manual_seed(0)
    model, x = Model(Attribute), torch.randn(6, 10, D)
    budgeted(model, x, "50%")
    for change in (False, True):
        y = model(x).square().mean()
        for block in model.blocks if change else ():
            block.down.register_forward_pre_hook(lambda _, given: (2 * given[0],))
            block.up.register_forward_hook(lambda _, __, result: 2 * result)
        if change:
            with pytest.raises(rg.RetrogradeError, match="something else when it ran again"):
                y.backward()
            assert model.blocks[0].up.weight.grad is None
        else:
            y.backward()
            model.zero_grad()


def test_what_is_noted_and_compared():
    """All tensors in the first call; later the last node's, and a sixteenth of the others."""
    reruns, tensors = Reruns(), [torch.randn(3) for _ in range(20)]

    def note():
        noted = Noted(reruns)
        for t in tensors:
            noted.add(t)
        noted.settle()
        return noted

    assert note().prints == [fingerprint(t) for t in tensors]
    reruns.last = [18, 19]
    turns = [[k for k, one in enumerate(note().prints) if one is not None] for _ in range(16)]
    assert all({18, 19} <= {*turn} and len(turn) <= 5 for turn in turns)
    assert {k for turn in turns for k in turn} == {*range(20)}
    first, compared = note(), None
    for changed in (None, 19):
        compared = Compared(first, lambda: ValueError("differs"))
        for k, t in enumerate(tensors):
            if k == changed:
                with pytest.raises(ValueError, match="differs"):
                    compared.add(t + 1)
            else:
                compared.add(t)
