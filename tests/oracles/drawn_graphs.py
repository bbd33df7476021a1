"""Graphs that are drawn: cheap and expensive operations, and all that may go wrong between them."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 32


def gelu_by_hand(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044 * x**3)))


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


UNARY = [
    functional.gelu,
    functional.silu,
    functional.relu,
    torch.sigmoid,
    torch.tanh,
    torch.exp,
    torch.neg,
    torch.sqrt,
    torch.abs,
    torch.square,
    gelu_by_hand,
    rms_norm,
    functional.hardswish,
    functional.leaky_relu,
    functional.relu6,
    lambda x: functional.gelu(x, approximate="tanh"),
    lambda x: x * 0.5,
    lambda x: 1 - x,
    lambda x: x + 1,
    lambda x: 2 / (3 + x.abs()),
    lambda x: x / 3,
    lambda x: x - 0.25,
    lambda x: functional.softmax(x, -1),
    lambda x: functional.dropout(x, 0.3),
    lambda x: functional.dropout(x, 0.3, False),
    lambda x: functional.layer_norm(x, x.shape[-1:], eps=1e-3),
    lambda x: torch.clamp(x, -1, 1),
    lambda x: functional.group_norm(x[..., None], 4)[..., 0],
    lambda x: x.roll(1, 0),
    lambda x: functional.batch_norm(x, None, None, training=True),
    lambda x: x.float(),
    lambda x: functional.glu(torch.cat([x, x.sin()], -1)),
    lambda x: x.clone(),
    lambda x: x.double(),
    lambda x: x.t().contiguous().t(),
    lambda x: x.repeat(1, 1),
    lambda x: x.bfloat16(),
    lambda x: x[:, ::2].repeat_interleave(2, 1),
    lambda x: functional.log_softmax(x, -1),
]
IN_PLACE = [
    functional.relu_,
    torch.sigmoid_,
    torch.exp_,
    torch.neg_,
    lambda x: x.add_(1),
    lambda x: x.mul_(0.5),
    lambda x: functional.silu(x, inplace=True),
    lambda x: x[0].mul_(2),
    lambda x: x.view(-1).sub_(0.5),
    lambda x: x.clamp_(-1, 1),
    lambda x: functional.dropout(x, 0.2, inplace=True),
]
VIEWS = [
    lambda x: x.view(-1, 2 * WIDTH).view(-1, WIDTH),
    lambda x: x.t().reshape(-1, WIDTH),
    lambda x: x.reshape(2, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH),
    lambda x: x[: len(x) // 2],
    lambda x: x.chunk(2, 0)[1],
    lambda x: x.unflatten(1, (4, -1)).permute(0, 2, 1).flatten(1),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: torch.stack([x, x])[1],
    lambda x: torch.stack(x.unbind(0)[:2]),
]
BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    lambda x, y: x + y.mean(0),
    lambda x, y: x * y[:1],
    torch.maximum,
]


class Graph(nn.Module):
    """A program that is drawn from a seed; it is the same each time that it runs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.products = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, eps=1e-2)]
        )
        self.scale = nn.Parameter(torch.rand(WIDTH))
        for norm in self.norms:
            nn.init.uniform_(norm.weight)
            nn.init.uniform_(norm.bias)
        draw = random.Random(seed)
        for one in draw.sample(list(self.parameters()), 2):
            one.requires_grad_(False)
        self.risky = seed % 4 == 0

    def product(self, draw, x):
        layer = draw.choice(self.products)
        return functional.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs, and inner tensors."""
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        values = [x, self.product(draw, x)]
        for _ in range(draw.randint(4, 20)):
            a = draw.choice(values[-3:])
            kind = draw.random()
            if kind < 0.35:
                new = draw.choice(UNARY)(a)
            elif kind < 0.45:
                b = draw.choice(values)
                new = draw.choice(BINARY)(a, b) if a.shape == b.shape else a * 1.5
            elif kind < 0.6:
                new = self.product(draw, a)
            elif kind < 0.7:
                new = draw.choice(VIEWS)(a) if len(a) % 4 == 0 else a + self.scale
            elif kind < 0.8:
                norm = draw.choice(self.norms) if len(a) > 1 else self.norms[1]
                new = norm(a.float())
            elif kind < 0.85:
                with torch.no_grad():
                    new = draw.choice(UNARY)(a)
                    if self.risky and not new.is_leaf:
                        new.mul_(1.5)
            elif kind < 0.88:
                new = a * self.scale
            elif kind < 0.91:
                new = functional.scaled_dot_product_attention(
                    a[None], a[None], a[None], dropout_p=0.1
                )[0]
            elif kind < 0.93:
                new = a + a.detach()
            else:
                new = self.change(draw, a)
            values.append(new)
        outputs = [values[-1]]
        if draw.random() < 0.4:
            outputs.append(draw.choice(values[2:]))
        return outputs, [v for v in values[2:] if v.requires_grad]

    def change(self, draw, a):
        """Change a value in place: a fresh one, or one that others may have saved."""
        if not self.risky:
            a = draw.choice(UNARY)(self.product(draw, a))
        elif not a.requires_grad or a.is_leaf:
            a = a * 1
        elif draw.random() < 0.3:
            with torch.no_grad():
                a.mul_(0.5)
            return a
        elif draw.random() < 0.2:
            a.detach().mul_(0.5)
            return a
        elif draw.random() < 0.2:
            a.data.mul_(0.5)
            return a
        draw.choice(IN_PLACE)(a)
        return a


def train(seed, way, rows=8):
    """Run a graph and a backward pass of the seed's kind; return what it leaves, or the error."""
    graph = Graph(seed)
    x = torch.rand(rows, WIDTH, requires_grad=seed % 3 > 0)
    draw, kind, context = random.Random(seed), seed % 5, None
    try:
        with way() as context:
            outputs, inner = graph(x)
        loss = sum(one.float().square().mean() for one in outputs)
        found = [one.detach().clone() for one in outputs]
        if not loss.requires_grad:
            return found, context
        parameters = [p for p in graph.parameters() if p.requires_grad]
        if kind == 1:
            loss.backward(retain_graph=True)
        elif kind == 2 and inner:  # a partial backward pass
            one = draw.choice(inner)
            found += torch.autograd.grad(loss, one, retain_graph=True, materialize_grads=True)
        elif kind == 3 and outputs[-1].requires_grad:
            outputs[-1].float().sum().backward(retain_graph=True)
        del inner
        if kind == 4:  # second derivatives
            first = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            penalty = sum(one.square().sum() for one in first)
            loss = penalty if penalty.requires_grad else loss
        loss.backward()
        left = [p.grad for p in (x, *parameters) if p.grad is not None]
        return [*found, *left, *graph.buffers()], context
    except (RuntimeError, ValueError) as error:
        return str(error)[:60], context
