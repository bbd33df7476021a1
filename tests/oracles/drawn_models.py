"""Models with habits that a budget must keep exact or refuse: drawn by number, each by itself.

A model is a few blocks, called by a loop or a ``Sequential``. Drawn for each: the blocks, whether
they are one or two that are called again and again, the last layer, where auxiliary losses are
left, how layers are skipped at random, what is drawn between layers, and how the gradient of the
output lies in memory.

    reading = read(17, 1.15)   # model 17 within 1.15 times its least budget
"""

import gc
import random
import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

import retrograde as rg

__all__ = ["BUDGETS", "Reading", "draw", "read"]

#: Budgets: the least, shares between it and ordinary backpropagation, and all of the latter.
BUDGETS = (0.0, 0.1, 0.35, 0.7, 1.0)
SLACK_BYTES = 64  # torch's own scalars


class Registry:
    """A place for losses that no attribute of a module leads to."""

    def __init__(self):
        self.inner = {"more": {"even more": {"losses": []}}}

    @property
    def losses(self):
        return self.inner["more"]["even more"]["losses"]


class Block(nn.Module):
    """A block with a habit; ``aux`` and ``skip`` name it."""

    def __init__(self, kind, width, aux, skip, p, registry):
        super().__init__()
        self.kind, self.leaves, self.skip, self.p = kind, aux, skip, p
        self.registry = registry
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2 if kind == "dropout" else 0.0)

    def inner(self, x):
        if self.kind == "tanh":
            return torch.tanh(self.down(torch.relu(self.up(x))))
        if self.kind == "in place":
            return x + self.down(functional.relu_(self.up(x)))
        if self.kind == "gated":
            return x * torch.sigmoid(self.down(functional.gelu(self.up(x))))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))

    def forward(self, x):
        if self.training and self.skip == "torch" and torch.rand(()) < self.p:
            return x
        if self.training and self.skip == "python" and random.random() < self.p:
            return x
        y = self.inner(x)
        if self.training and self.skip == "mask":
            y = x + (y - x) * torch.bernoulli(torch.full((len(x), 1), 1 - self.p, device=x.device))
        if self.leaves == "attribute":
            self.aux = y.square().mean()
        elif self.leaves == "detached":
            self.aux = y.detach().square().mean()
        elif self.leaves == "registry":
            self.registry.losses.append(y.square().mean())
        return y


class LayerDrop(nn.Module):
    """A wrapper that skips its layer at random."""

    def __init__(self, layer, p):
        super().__init__()
        self.layer, self.p = layer, p

    def forward(self, x):
        return x if self.training and torch.rand(1) < self.p else self.layer(x)


class Level(nn.Module):
    """One level of a U-Net: the others lie between its two blocks."""

    def __init__(self, before, below, after):
        super().__init__()
        self.before, self.below, self.after = before, below, after

    def forward(self, x):
        return self.after(x + 0.5 * self.below(self.before(x)))


def nested(layers):
    """The layers as levels within one another."""
    if len(layers) < 3:
        return nn.Sequential(*layers)
    return Level(layers[0], nested(layers[1:-1]), layers[-1])


class Model(nn.Module):
    """Blocks in a loop."""

    def __init__(self, layers, drop, p, between, registry):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.drop, self.p, self.between = drop, p, between
        self.registry = registry

    def forward(self, x):
        for layer in self.layers:
            if self.between == "noise":
                x = x + 0.1 * torch.randn_like(x)
            elif self.between == "discarded":
                torch.rand(3)
            if self.training and self.drop == "torch" and torch.rand([]) < self.p:
                continue
            if self.training and self.drop == "python" and random.random() < self.p:
                continue
            x = layer(x)
        return x


@dataclass(frozen=True)
class Drawn:
    """What was drawn; ``print`` shows it."""

    number: int
    how: str
    kinds: tuple[str, ...]
    width: int
    batch: int
    last: str
    aux: str
    skip: str
    p: float
    between: str
    loss: str
    frozen: str
    autocast: bool
    levels: bool
    shared: int  # the layers are the first one or two of them, again and again

    def model(self, device):
        model = self.trained().to(device)
        for k, p in enumerate(model.parameters()):
            frozen = {"": False, "weights": p.dim() > 1, "biases": p.dim() == 1, "some": k % 3 == 1}
            p.requires_grad_(not frozen[self.frozen])
        return model

    def casts(self, device):
        return torch.autocast(device, torch.bfloat16, enabled=self.autocast)

    def trained(self):
        torch.manual_seed(self.number)
        registry = Registry()
        layers = []
        for k, kind in enumerate(self.kinds):
            odd = k % 2 or self.number % 3
            skip = self.skip if odd and self.skip in ("torch", "python", "mask") else ""
            block = Block(kind, self.width, self.aux if odd else "", skip, self.p, registry)
            layers.append(LayerDrop(block, self.p) if self.skip == "wrapper" else block)
        last = {
            "softmax": lambda: nn.Softmax(-1),
            "tanh": nn.Tanh,
            "norm": lambda: nn.LayerNorm(self.width),
            "linear": lambda: nn.Linear(self.width, self.width),
        }
        if self.shared:
            layers = [layers[k % self.shared] for k in range(len(layers))]
        layers += [last[self.last]()] if self.last else []
        if self.aux == "hook":
            for layer in layers[1:3]:
                layer.register_forward_hook(
                    lambda *a: registry.losses.append(a[-1].square().mean())
                )
        if self.how == "Sequential":
            model = nn.Sequential(*layers)
            model.registry = registry
            return model
        layers = [nested(layers)] if self.levels else layers
        drop = self.skip.removeprefix("model ") if self.skip.startswith("model ") else ""
        return Model(layers, drop, self.p, self.between, registry)

    def input(self, device):
        torch.manual_seed(self.number + 1)
        return torch.randn(self.batch, self.width).to(device).requires_grad_(self.number % 2 == 0)


def draw(number):
    """Draw a model; the number is all that it takes."""
    of = random.Random(number).choice
    kinds = ("plain", "tanh", "in place", "gated", "dropout")
    one = of([True, False])
    blocks = of([3, 4, 5, 7])
    how = of(["Sequential", "loop", "loop"])
    return Drawn(
        number=number,
        how=how,
        kinds=(of(kinds),) * blocks if one else tuple(of(kinds) for _ in range(blocks)),
        width=of([8, 33, 64]),
        batch=of([16, 65, 200]),
        last=of(["", "", "linear", "softmax", "tanh", "norm"]),
        aux=of(["", "", "", "", "", "", "attribute", "detached", "detached", "registry", "hook"]),
        skip=of(
            [
                "",
                "",
                "",
                "",
                "",
                "torch",
                "python",
                "mask",
                "mask",
                "wrapper",
                "model torch",
                "model python",
            ]
        ),
        p=of([0.0, 0.1, 0.5, 0.9]),
        between=of(["", "", "noise", "discarded"]),
        loss=of(["sum", "dense", "strided", "expanded", "part"]),
        frozen=of(["", "", "", "weights", "biases", "some"]),
        autocast=of([False, False, True]),
        levels=of([False, False, True]) and how == "loop",
        shared=of([0, 0, 0, 1, 2]),
    )


def auxiliary(model):
    """The auxiliary losses that a forward pass has left, as far as they have a gradient."""
    left = [m.aux for m in model.modules() if isinstance(getattr(m, "aux", None), torch.Tensor)]
    return [t for t in (*left, *model.registry.losses) if t.requires_grad]


def given_gradient(drawn, device):
    """The gradient of the output, as the loss hands it in; None for a loss that is a sum. Under
    autocast all are, since a gradient would be cast to the type of the output."""
    if drawn.autocast:
        return None
    torch.manual_seed(drawn.number + 2)
    shape = drawn.batch, drawn.width
    if drawn.loss == "strided":
        return torch.randn(shape[::-1]).to(device).t()
    if drawn.loss == "expanded":
        return torch.randn(drawn.width).to(device).expand(shape)
    return torch.randn(shape).to(device) if drawn.loss == "dense" else None


def step(drawn, model, x, seed, gradient):
    """One training step, up to the gradients. Returns the output, as the caller holds it."""
    model.registry.losses.clear()
    torch.manual_seed(seed)
    random.seed(seed)
    with drawn.casts(x.device.type):
        y = model(x)
    more = auxiliary(model)
    if gradient is None:
        given, gradients = [(y[..., ::2] if drawn.loss == "part" else y).sum()], [None]
    else:
        given, gradients = [y], [gradient]
    torch.autograd.backward([*given, *more], [*gradients, *(None for _ in more)])
    model.registry.losses.clear()
    return y


def left_behind(model, x):
    """Everything that a step leaves behind, to compare."""
    grads = [p.grad for p in (*model.parameters(), x)]
    return [*grads, torch.rand(2), torch.rand(2, device=x.device), random.random()]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    return a == b


@dataclass(frozen=True)
class Reading:
    """What came of one model within one budget: refused before training, wrong, or its peak."""

    drawn: Drawn
    budget: float
    refused: str = ""
    wrong: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    warned: str = ""
    elsewhere_bytes: int = 0  # what the model holds that the budget does not cover, as it is told

    @property
    def over(self):
        return self.peak_bytes > self.budget_bytes + self.elsewhere_bytes + SLACK_BYTES

    @property
    def good(self):
        told = self.warned and not self.drawn.skip  # a layer that was left out may be told
        return not (self.wrong or self.over or told)


def clear(model, x):
    for t in (*model.parameters(), x):
        t.grad = None
    gc.collect()


def budgeted(drawn, model, x, share):
    """Give a model a share of what is between its least and its ordinary bytes.

    Returns the model, its budget, and what that does not cover.
    """
    if drawn.how == "Sequential":
        registry, model = model.registry, rg.Sequential(*model, memory=1)
        model.registry = registry

    def apply(memory):
        with drawn.casts(x.device.type):
            if drawn.how == "loop":
                return rg.budget(model, memory, (x,))
            model.memory = memory
            return model.fit(x)

    try:
        least = apply(1).minimum_bytes
    except rg.BudgetError as refusal:
        least = refusal.minimum_bytes
    ordinary = apply("100%").ordinary_bytes
    total = least + max(0, round(share * (ordinary - least)))
    found = apply(total)
    return model, total, getattr(found, "elsewhere_bytes", 0)


def raised_by(*given):
    """The message of the error that a step of the plain model ends in, if it does."""
    try:
        step(*given)
    except Exception as error:
        return str(error)
    return None


def read(number, share, steps=4, device="cpu"):
    """Train a drawn model within a budget, beside the same model without one."""
    drawn = draw(number)
    plain, ours, x = drawn.model(device), drawn.model(device), drawn.input(device)
    theirs_x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(number + 3)
    random.seed(number + 3)
    gradient = given_gradient(drawn, device)
    try:
        ours, total, elsewhere = budgeted(drawn, ours, x, share)
    except rg.RetrogradeError as refusal:
        return Reading(drawn, share, refused=str(refusal))
    peak = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(steps):
            clear(ours, x)
            clear(plain, theirs_x)
            try:
                if seed > 1:  # the first two measure layers, before and after a value is left
                    measured = rg.measure(
                        partial(step, drawn, ours, x, seed, gradient), device=device
                    )
                    y, peak = measured.value, max(peak, measured.working_bytes)
                else:
                    y = step(drawn, ours, x, seed, gradient)
            except Exception as error:
                if str(error) == raised_by(drawn, plain, theirs_x, seed, gradient):
                    continue  # all layers are left out: nothing requires a gradient
                return Reading(drawn, share, wrong=f"step {seed}: {type(error).__name__} {error}")
            mine = [y.detach(), *left_behind(ours, x)]
            y = None
            other = step(drawn, plain, theirs_x, seed, gradient)
            theirs = [other.detach(), *left_behind(plain, theirs_x)]
            if not all(map(equal, mine, theirs)):
                return Reading(drawn, share, wrong=f"step {seed}: other bits")
            other = None
    warned = "; ".join(str(one.message) for one in told)
    return Reading(drawn, share, "", "", total, peak, warned, elsewhere)
