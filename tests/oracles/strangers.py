"""Strange programs, drawn by seed: cells and chains as users write them, each run within budgets.

A seed is all that it takes to draw a program again. Every draw makes new objects, so that the first
call of each can be looked at:

    for reading in readings(lambda: draw_cell(17).unrolled()):  # streamed(), or draw_chain(17)
        print(reading)
"""

import functools
import gc
import itertools
import math
import os
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once, when torch's profiler first starts

import torch
from torch import Tensor, nn
from torch._C import _autograd, _profiler
from torch.nn import functional
from torch.utils import _pytree as pytree

import retrograde as rg
from oracles.loops import leaves_of, loop
from retrograde.cells import rehearsal
from retrograde.sizes.ordinary import FEW_BYTES, FEW_STEPS

#: Bytes that a call may take besides its budget.
SLACK_BYTES = 0

#: The most steps of a cell, and the most layers of a chain.
LONGEST, DEEPEST = 120, 24

#: The budgets that a program is run within; :func:`readings` says what they are.
LABELS = ("least", "between", "50%", "enough")

#: How near the gradients of parameters are to the plain loop's.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-3}

SIZES = (1, 2, 3, 7, 63, 65)
CHANNELS, IMAGES = (1, 2, 3, 7), (4, 5, 7, 9)

Results = tuple[list[Tensor], list[Tensor | None]]  # and the gradients
Pair = namedtuple("Pair", ["first", "rest"])

#: How a state is handed on: a tensor (B, W) from those that the inner steps gave.
HANDED_ON = {
    "itself": lambda path: path[-1],
    "last of a stack": lambda path: torch.stack(path)[-1],
    "column of a stack": lambda path: torch.stack(path, -1)[..., -1],
    "part of a concatenation": lambda path: torch.cat(path[::-1], -1)[:, : path[0].shape[1]],
    "chunk": lambda path: torch.cat([path[-1], path[0]], -1).chunk(2, -1)[0],
    "unbound": lambda path: torch.stack([path[0], path[-1]], 1).unbind(1)[1],
    "part of what is padded": lambda path: functional.pad(path[-1], (3, 9))[:, 3:-9],
    "transposed": lambda path: path[-1].T.contiguous().T,
    "expanded": lambda path: path[-1].mean(-1, keepdim=True).expand_as(path[-1]),
    "cloned": lambda path: path[-1].clone(),
    "detached": lambda path: path[-1].detach(),
    "not at all": lambda path: path[-1],
}

#: What else is in a state: its first value, for a state (B, W), and its next one.
PARTS = {
    "trace": (torch.randn_like, lambda old, m: 0.9 * old + 0.1 * m.h),
    "the state again": (torch.randn_like, lambda old, m: m.h),
    "the state before": (torch.randn_like, lambda old, m: m.before),
    "a constant": (torch.randn_like, lambda old, m: old),
    "a column": (lambda h: torch.randn_like(h[:, :1]), lambda old, m: m.h[:, :1]),
    "a detached trace": (torch.randn_like, lambda old, m: (0.5 * old + m.h).detach()),
    "a mean": (lambda h: torch.zeros_like(h[0, 0]), lambda old, m: 0.5 * old + m.h.mean()),
    "halves": (lambda h: h.sum(1).bfloat16(), lambda old, m: m.h.mean(-1).bfloat16()),
    "a ring": (
        lambda h: torch.randn_like(h.unsqueeze(1).repeat(1, 5, 1)),
        lambda old, m: torch.cat([old[:, 1:], m.h.unsqueeze(1)], 1),
    ),
    "fast weights": (
        lambda h: torch.randn_like(h.unsqueeze(1).repeat(1, h.shape[1], 1)),
        lambda old, m: 0.9 * old + 0.1 * m.h.unsqueeze(2) * m.before.unsqueeze(1),
    ),
    "a count": (lambda h: torch.tensor(0), lambda old, m: old + 1),
    "a mask": (lambda h: h > 0, lambda old, m: m.h > 0),
    "none": (lambda h: None, lambda old, m: None),
}

#: What several parts of a state or of an output are packed into.
CONTAINERS = {
    "bare": lambda parts: parts[0] if len(parts) == 1 else tuple(parts),
    "tuple": tuple,
    "list": list,
    "dict": lambda parts: {f"part {i}": part for i, part in enumerate(parts)},
    "nested": lambda parts: {"first": parts[0], "more": (parts[1:], {})} if parts else (),
    "named tuple": lambda parts: Pair(tuple(parts[:1]), parts[1:]),
}

#: What a step returns, from what there is at its end.
OUTPUTS = {
    "nothing": lambda m: None,
    "the state": lambda m: m.h,
    "the whole state": lambda m: m.state,
    "a column of the state": lambda m: m.h[:, :1],
    "the state before": lambda m: m.before,
    "the input": lambda m: m.given,
    "of the input": lambda m: m.net.head(m.x).tanh(),
    "the input's sum": lambda m: m.x.sum(),
    "the state, detached": lambda m: m.h.detach(),
    "a constant": lambda m: torch.ones(3),
    "a buffer": lambda m: m.net.get_buffer("a buffer"),
    "of parameters": lambda m: m.net.head.weight.square().sum(),
    "a projection": lambda m: m.net.read_out(m.h),
    "a wide one": lambda m: m.net.read_out(m.h).repeat(1, 9),
    "a chunk": lambda m: m.net.read_out(torch.cat([m.h, m.h])).chunk(2)[1],
    "a mean": lambda m: m.h.mean(),
    "a product": lambda m: m.h * m.before,
    "the inner states": lambda m: torch.stack(m.path),
    "flags": lambda m: m.h > 0,
    "the same twice": lambda m: [m.h.tanh()] * 2,
}

#: An inner step: from an input (B, I) and a state (B, W) to another state.
INNER = {
    "tanh": lambda net, x, h: torch.tanh(net.head(x) + net.read_out(h)),
    "GRU": lambda net, x, h: net.gru(x, h),
    "perceptron": lambda net, x, h: torch.tanh(h + net.deep(torch.cat([x, h], -1))),
    "gate": lambda net, x, h: torch.sigmoid(net.scale * h) * h + x.mean(-1, keepdim=True).tanh(),
    "attention": lambda net, x, h: torch.tanh(net.head(x) + attended(h)),
    "convolution": lambda net, x, h: torch.tanh(net.filters(h.unsqueeze(1)).mean(1) + net.head(x)),
    "norm": lambda net, x, h: torch.tanh(net.norm(net.head(x) + net.read_out(h))),
}

#: What else a step does.
EFFECTS = (
    *("dropout", "noise", "a count", "an average", "a buffer that is not used", "batch norm"),
    *("leaves its state", "leaves its inner states"),
)

#: Buffers by what they are for, and their dimensions before the last one.
BUFFERS = {"a buffer": (), "a buffer that is not used": (5,), "a count": (), "an average": ()}

#: The inputs as the cell is given them, from (T, B, I).
GIVEN = {
    "themselves": lambda x: x,
    "beside a mask": lambda x: (x, torch.rand(x.shape[:2]) < 0.8),
    "in a dict": lambda x: {"x": x, "none": None},
    "beside others": lambda x: (x, torch.randn_like(x[..., :1]).requires_grad_(x.requires_grad)),
    "tokens": lambda x: torch.randint(7, x.shape[:2]),
}

#: What a cell is in the program.
FORMS = {
    "module": lambda net, scale: net,
    "closure": lambda net, scale: lambda x, state: net(x, state),
    "closure over a tensor": lambda net, scale: lambda x, state: net(x, state, scale),
    "partial": lambda net, scale: functools.partial(Net.forward, net),
    "method": lambda net, scale: net.forward,
    "object": lambda net, scale: Holder(net),
}


def attended(h: Tensor) -> Tensor:
    """A state whose units look at one another: (B, W, W) numbers on the way."""
    return (torch.softmax(h.unsqueeze(2) * h.unsqueeze(1), 2) @ h.unsqueeze(2)).squeeze(2)


class Holder:
    """An object that is no module, and holds one."""

    def __init__(self, net: "Net") -> None:
        self.nets = {"net": net}

    def __call__(self, x: Any, state: Any) -> Any:
        return self.nets["net"](x, state)


class Net(nn.Module):
    """A cell of the features ``f``, which :func:`features` draws."""

    def __init__(self, f: SimpleNamespace) -> None:
        super().__init__()
        self.f, self.last = f, None
        self.head, self.read_out = nn.Linear(f.size, f.width), nn.Linear(f.width, f.width)
        self.gru, self.norm = nn.GRUCell(f.size, f.width), nn.LayerNorm(f.width)
        wide = nn.Linear(f.size + f.width, 4 * f.width), nn.Linear(4 * f.width, f.width)
        self.deep = nn.Sequential(wide[0], nn.GELU(), wide[1])
        self.filters, self.table = nn.Conv1d(1, 6, 3, padding=1), nn.Embedding(7, f.size)
        self.scale = nn.Parameter(torch.randn(f.width))
        if "batch norm" in f.effects:
            self.batch_norm = nn.BatchNorm1d(f.width)
        for name, shape in BUFFERS.items():
            if name in (*f.effects, *f.outputs):
                self.register_buffer(name, torch.ones(*shape, f.width))

    def forward(self, given: Any, state: Any, scale: Any = 1.0) -> tuple[Any, Any]:
        f, parts = self.f, pytree.tree_leaves(state)
        x = self.read(given) * scale
        kept = f.handed_on != "not at all"
        before = parts.pop(0) if kept else x.new_zeros(len(x), f.width)
        h, path = self.drive(before, parts), []
        for _ in range(f.substeps):
            h = INNER[f.inner](self, x, h)
            path.append(h)
        h = HANDED_ON[f.handed_on](path)
        m = SimpleNamespace(net=self, given=given, x=x, before=before, path=path, h=h)
        new = [PARTS[name][1](old, m) for name, old in zip(f.parts, parts, strict=True)]
        m.state = CONTAINERS[f.container]([h, *new] if kept else new)
        self.affect(m)
        return CONTAINERS[f.packed]([OUTPUTS[name](m) for name in f.outputs]), m.state

    def read(self, given: Any) -> Tensor:
        """The input (B, I)."""
        match self.f.given:
            case "tokens":
                return self.table(given)
            case "beside a mask":
                return torch.where(given[1].unsqueeze(-1), given[0], 0)
            case "beside others":
                return given[0] + given[1]
            case "in a dict":
                return given["x"]
        return given

    def drive(self, before: Tensor, parts: list[Any]) -> Tensor:
        """What the inner steps begin with."""
        h = before
        for part in parts:
            if alike(part, h):
                h = h + 0.1 * part
        if "dropout" in self.f.effects:
            h = functional.dropout(h, 0.3)
        if "noise" in self.f.effects:
            h = h + 0.1 * torch.randn_like(h)
        if "an average" in self.f.effects:
            h = h - 0.1 * self.get_buffer("an average")
        return self.batch_norm(h) if "batch norm" in self.f.effects else h

    def affect(self, m: SimpleNamespace) -> None:
        """Change what a step changes besides its state."""
        if "a count" in self.f.effects:
            self.get_buffer("a count").add_(1)
        if "an average" in self.f.effects:
            self.get_buffer("an average").lerp_(m.h.detach().mean(0), 0.1)
        if "leaves its state" in self.f.effects:
            self.last = m.h
        if "leaves its inner states" in self.f.effects:
            self.last = m.path


def alike(part: Any, like: Tensor) -> bool:
    """Whether a part of a state has the shape and the dtype of another."""
    return part is not None and (part.shape, part.dtype) == (like.shape, like.dtype)


def distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Each of those that want a gradient, once."""
    return [*{id(t): t for t in tensors if t.requires_grad}.values()]


def features(seed: int, longest: int, attempt: int) -> SimpleNamespace:
    """What a cell is like, by the names of the tables above, and its sizes."""
    dice = random.Random(f"cell {seed} {attempt}")
    one = dice.choice

    def some(names: Any, most: int) -> tuple[str, ...]:
        return tuple(dice.sample([*names], one(range(most + 1))))

    f = SimpleNamespace(
        inner=one([*INNER]),
        substeps=one([1, 1, 2, 3, 4, 5, 6]),
        handed_on=one(["itself"] * 4 + [*HANDED_ON]),
        parts=some(PARTS, one([0, 0, 1, 3])),
        container=one([*CONTAINERS]),
        outputs=one([("the state",), some(OUTPUTS, 3) or ("nothing",), (one([*OUTPUTS]),)]),
        packed=one([*CONTAINERS]),
        effects=some(EFFECTS, one([0, 0, 1, 2])),
        form=one([*FORMS]),
        given=one(["themselves"] * 3 + [*GIVEN]),
        layout=one(["plain", "plain", "transposed", "expanded"]),
        begin=one(["apart", "apart", "together", "expanded"]),
        wanted=one([("x", "state")] * 3 + [("x",), ("state",), ()]),
        frozen=one([0.0, 0.0, 0.3, 1.0]),
        loss=one(["outputs", "outputs", "final state", "both"]),
        seeds=one(["dense", "expanded"]),
        dtype=one([torch.float64, torch.float64, torch.float32]),
        batch=one(range(1, 10)),
        width=one(SIZES),
        size=one(SIZES),
    )
    f.length = round(longest ** dice.random())
    if f.batch == 1:
        f.effects = tuple(name for name in f.effects if name != "batch norm")
    return f


def draw_cell(seed: int, longest: int = LONGEST) -> "DrawnCell":
    """The cell of a seed, with inputs, a state, and what its loss depends on."""
    return DrawnCell(seed, settled(seed, longest), f"draw_cell({seed}, {longest})")


@functools.cache
def settled(seed: int, longest: int) -> SimpleNamespace:
    """The features of a seed: the first that are drawn with something to backpropagate."""
    drawn = (features(seed, longest, attempt) for attempt in itertools.count())
    return next(f for f in drawn if settle(seed, f))


def settle(seed: int, f: SimpleNamespace) -> bool:
    """Find out which results a loss depends on, and tell whether there are any."""
    drawn = DrawnCell(seed, f)
    outputs, final = loop(drawn.cell, drawn.x, drawn.state)
    for loss in (f.loss, "both"):
        f.loss = loss
        f.of_outputs = [t.requires_grad and f.loss != "final state" for t in leaves_of(outputs)]
        f.of_state = [t.requires_grad and f.loss != "outputs" for t in leaves_of(final)]
        if any(f.of_outputs + f.of_state):
            return True
    return False


class DrawnCell:
    """A cell, its inputs and its initial state, all of them new."""

    def __init__(self, seed: int, f: SimpleNamespace, name: str = "") -> None:
        torch.manual_seed(seed)
        dice = random.Random(seed)
        self.seed, self.f, self.name = seed, f, name
        self.net = Net(f).to(f.dtype)
        for p in self.net.parameters():
            p.requires_grad_(dice.random() >= f.frozen)
        scale = torch.rand(f.size, dtype=f.dtype).requires_grad_()
        self.cell = FORMS[f.form](self.net, scale)
        self.x, self.state = self._x(), self._state()
        self.arguments = distinct(leaves_of((self.x, self.state)))
        captured = [scale] if f.form == "closure over a tensor" else []
        self.parameters = distinct([*self.net.parameters(), *captured])
        self.seeds: list[Tensor] = []

    def _x(self) -> Any:
        f = self.f
        x = torch.randn(f.batch, f.length, f.size, dtype=f.dtype).transpose(0, 1)
        if f.layout == "expanded":
            x = x[:1].expand(f.length, -1, -1)
        x = x.contiguous() if f.layout == "plain" else x
        return GIVEN[f.given](x.requires_grad_("x" in f.wanted))

    def _state(self) -> Any:
        f = self.f
        like = torch.randn(f.batch, f.width, dtype=f.dtype)
        parts = [PARTS[name][0](like) for name in f.parts]
        parts = parts if f.handed_on == "not at all" else [like, *parts]
        if f.begin == "together":
            parts = [like if alike(part, like) else part for part in parts]
        if f.begin == "expanded":
            zero = torch.zeros(1, 1, dtype=f.dtype).expand(f.batch, f.width)
            parts = [zero.detach() if alike(part, like) else part for part in parts]
        for part in leaves_of(parts):
            part.requires_grad_(part.is_floating_point() and "state" in f.wanted)
        return CONTAINERS[f.container](parts)

    def unrolled(self) -> "Trial":
        """The cell under ``rg.unroll``."""
        chosen = [*self.f.of_outputs, *self.f.of_state]
        wanted = [*self.arguments, *self.parameters]

        def backpropagated(results: Any) -> Results:
            leaves = leaves_of(results)
            roots = [t for t, is_root in zip(leaves, chosen, strict=True) if is_root]
            self.seeds = self.seeds or seeds_for(roots, self.seed, self.f.seeds == "expanded")
            found = torch.autograd.grad(roots, wanted, self.seeds, allow_unused=True)
            return [t.detach() for t in leaves], [*found]  # no graph, which would be retained

        def call(memory: Any) -> Results:
            return backpropagated(rg.unroll(self.cell, self.x, self.state, memory=memory))

        def plain() -> Results:
            return backpropagated(loop(self.cell, self.x, self.state))

        return self._trial("unrolled", plain, call, lambda: call(None))

    def streamed(self) -> "Trial":
        """The cell under ``rg.bptt``, as an output its state too, where a loss depends on that."""
        f, wanted = self.f, [*self.arguments, *self.parameters]
        cell = functools.partial(with_state, self.cell) if any(f.of_state) else self.cell

        def loss(t: int, y: Any) -> Tensor | None:
            y, state = y if any(f.of_state) else (y, ())
            parts = [y for y, chosen in zip(leaves_of(y), f.of_outputs, strict=True) if chosen]
            if any(f.of_state) and (parts or t == f.length - 1):
                pairs = zip(leaves_of(state), f.of_state, strict=True)
                parts += [part for part, chosen in pairs if chosen]
            power = 1 if f.seeds == "expanded" else 2
            return sum(part.double().pow(power).sum() for part in parts) if parts else None

        def begin() -> None:
            for t in wanted:
                t.grad = None

        def call(memory: Any) -> Results:
            begin()
            total, final = rg.bptt(cell, self.x, self.state, loss=loss, memory=memory)
            return [total, *leaves_of(final)], [t.grad for t in wanted]

        def plain() -> Results:
            begin()
            total, state = 0.0, self.state
            leaves, structure = pytree.tree_flatten(self.x)
            rows = [[None] * f.length if leaf is None else leaf.unbind() for leaf in leaves]
            for t, row in enumerate(zip(*rows, strict=True)):
                y, state = cell(pytree.tree_unflatten(row, structure), state)
                value = loss(t, y)
                total = total if value is None else total + value
            total.backward()
            return [total, *leaves_of(state)], [t.grad for t in wanted]

        return self._trial("streamed", plain, call, plain)

    def _trial(self, way: str, plain: Any, call: Any, ordinary: Any) -> "Trial":
        traits = {name: value for name, value in vars(self.f).items() if name[:3] != "of_"}
        short = SimpleNamespace(**{**vars(self.f), "length": min(self.f.length, FEW_STEPS)})
        return Trial(
            name=f"{self.name}.{way}()",
            traits=", ".join(f"{name}={value}" for name, value in traits.items()),
            module=self.net,
            exact=len(self.arguments),
            tolerance=TOLERANCES[self.f.dtype],
            plain=plain,
            ordinary=ordinary,
            call=call,
            few=lambda: getattr(DrawnCell(self.seed, short), way)().plain(),
        )


def with_state(cell: Any, x: Any, state: Any) -> Any:
    """A step of a cell that returns its new state as an output too."""
    y, state = cell(x, state)
    return (y, state), state


def seeds_for(roots: list[Tensor], seed: int, expanded: bool = False) -> list[Tensor]:
    """A gradient for each result; random, or of ones that take no memory."""
    generator = torch.Generator().manual_seed(seed)
    if expanded:
        return [torch.ones((), dtype=t.dtype).expand(t.shape) for t in roots]
    return [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in roots]


#: Layers: the shapes of a sample that each is for, and how it is made; ``one`` draws.
LAYERS = {
    "linear": (lambda s: True, lambda s, one: nn.Linear(s[-1], one(SIZES))),
    "convolution": (
        lambda s: len(s) == 3,
        lambda s, one: nn.Conv2d(s[0], one(CHANNELS), 3, padding=1, bias=one([True, False])),
    ),
    "batch norm": (
        lambda s: len(s) in (1, 3),
        lambda s, one: (nn.BatchNorm1d if len(s) == 1 else nn.BatchNorm2d)(s[0]),
    ),
    "layer norm": (lambda s: True, lambda s, one: nn.LayerNorm(s[-1])),
    "group norm": (lambda s: len(s) == 3, lambda s, one: nn.GroupNorm(1, s[0])),
    "ReLU": (lambda s: True, lambda s, one: nn.ReLU()),
    "ReLU in place": (lambda s: True, lambda s, one: nn.ReLU(inplace=True)),
    "GELU": (lambda s: True, lambda s, one: nn.GELU()),
    "tanh": (lambda s: True, lambda s, one: nn.Tanh()),
    "dropout": (lambda s: True, lambda s, one: nn.Dropout(0.3)),
    "pooling": (lambda s: len(s) == 3 and min(s[1:]) > 1, lambda s, one: nn.MaxPool2d(2)),
    "upsampling": (
        lambda s: len(s) == 3 and math.prod(s) < 500,
        lambda s, one: nn.Upsample(None, 2),
    ),
    "flatten": (lambda s: len(s) > 1, lambda s, one: nn.Flatten()),
    "unflatten": (
        lambda s: len(s) == 1,
        lambda s, one: nn.Unflatten(1, one([(*s, 1, 1), (1, *s)])),
    ),
    "residual": (
        lambda s: True,
        lambda s, one: rg.Residual(
            nn.Linear(s[-1], s[-1]), nn.ReLU(inplace=True), nn.Linear(s[-1], s[-1])
        ),
    ),
    "nested": (lambda s: True, lambda s, one: nn.Sequential(nn.Linear(s[-1], 7), nn.Tanh())),
    "attention": (
        lambda s: len(s) == 2,
        lambda s, one: nn.TransformerEncoderLayer(s[-1], 1, 9, batch_first=True),
    ),
    "chunk": (lambda s: s[0] > 1, lambda s, one: Plain(lambda x: x.chunk(2, 1)[0])),
    "narrow": (lambda s: s[0] > 1, lambda s, one: Plain(lambda x: x[:, 1:])),
    "transpose": (lambda s: len(s) > 1, lambda s, one: Plain(lambda x: x.transpose(-1, -2))),
    "double": (lambda s: math.prod(s) < 500, lambda s, one: Plain(lambda x: torch.cat([x, x], 1))),
    "the same": (lambda s: True, lambda s, one: Plain(lambda x: x)),
}
#: After these a layer may write to its input, and after those if it might before.
FRESH = {"linear", "convolution", "batch norm", "layer norm", "group norm", "residual", "double"}
SHARING = {"flatten", "unflatten", "narrow", "transpose", "the same"}
#: A layer of these may stand at several places.
SHARED = {"linear", "convolution", "layer norm", "residual"}

#: What a layer may hand on besides its output x.
FORKS = {
    "the same": lambda x: (x, x),
    "a dict": lambda x: {"x": x, "skip": x},
    "a mask": lambda x: [x, x > 0],
    "another": lambda x: (x, x.square()),
    "none": lambda x: {"x": x, "none": None, "number": torch.tensor(3)},
}


class Plain(nn.Module):
    """A layer without parameters."""

    def __init__(self, of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Any) -> Any:
        return self.of(x)


class First(nn.Module):
    """A layer on the first of what is handed on; the rest stays as it is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given: Any) -> Any:
        if isinstance(given, dict):
            return {**given, "x": self.layer(given["x"])}
        return type(given)([self.layer(given[0]), *given[1:]])


def join(given: Any) -> Tensor:
    """One tensor again; what has its shape is added whole."""
    first, *rest = leaves_of(given)
    return first + sum(part if alike(part, first) else part.to(first.dtype).mean() for part in rest)


def draw_chain(seed: int, deepest: int = DEEPEST) -> "Trial":
    """The chain of a seed under ``rg.Sequential``, with its input."""
    torch.manual_seed(seed)
    dice = random.Random(f"chain {seed}")
    draft = Draft(dice)
    for _ in range(dice.choice(range(2, deepest + 1))):
        draft.draw()
    net = rg.Sequential(*draft.layers).train(dice.random() < 0.85)
    some = any(p.requires_grad for p in net.parameters())
    x = draft.x.requires_grad_(dice.random() < 0.5 or not some)
    traits = f"{tuple(x.shape)} x.grad={x.requires_grad}: {', '.join(draft.names)}"
    return chained(net, x, seed, f"draw_chain({seed}, {deepest})", traits)


def chained(net: rg.Sequential, x: Tensor, seed: int, name: str, traits: str) -> "Trial":
    """A chain that is called with an input."""
    wanted, seeds = distinct([x, *net.parameters()]), []

    def call(memory: Any) -> Results:
        net.memory = memory
        leaves = leaves_of(net(x))
        roots = [t for t in leaves if t.requires_grad]
        seeds[:] = seeds or seeds_for(roots, seed)
        return leaves, [*torch.autograd.grad(roots, wanted, seeds, allow_unused=True)]

    def fit(memory: Any) -> None:
        net.memory = memory
        net.fit(x)

    def plain() -> Results:
        return call(None)

    return Trial(name, traits, net, len(wanted), 0.0, plain, plain, call, fit, twice(net))


def twice(net: rg.Sequential) -> int:
    """Bytes of gradients that a chain adds up: of all layers at several places, and of the largest.

    What was found for one place is held until the next is added, and that is not in the budget.
    """
    layers = [layer.layer if isinstance(layer, First) else layer for layer in net]
    shared = {id(layer): layer for layer in layers if layers.count(layer) > 1}.values()
    sizes = [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in shared]
    return sum(sizes) + max(sizes, default=0)


class Draft:
    """Layers, drawn one after the other, and a sample that has gone through them."""

    def __init__(self, dice: random.Random) -> None:
        one = dice.choice
        self.dice, self.one = dice, one
        self.frozen, self.dtype = one([0.0, 0.0, 0.3]), one([torch.float32] * 2 + [torch.float64])
        image = one(CHANNELS), one(IMAGES), one(IMAGES)
        shape = one([(one(SIZES),), (one((2, 3, 7)), one(SIZES)), image, image])
        self.x = self.value = torch.randn(one(range(1, 10)), *shape, dtype=self.dtype)
        self.forked = self.writable = False
        self.names: list[str] = []
        self.layers: list[nn.Module] = []
        self.shared: list[tuple[tuple[int, ...], str, nn.Module]] = []

    def draw(self) -> None:
        """Add a layer."""
        if self.forked and self.dice.random() < 0.3:
            self.forked = False
            self.add("join", Plain(join))
        elif not self.forked and self.dice.random() < 0.1:
            self.forked, name = True, self.one([*FORKS])
            self.add(f"fork: {name}", Plain(FORKS[name]))
        else:
            name, layer = self.made()
            self.add(name, First(layer) if self.forked else layer)

    def made(self) -> tuple[str, nn.Module]:
        """A layer for the sample, new or one that stands at another place too."""
        x = leaves_of(self.value)[0]
        shape = tuple(x.shape[1:])
        known = [(name, layer) for given, name, layer in self.shared if given == shape]
        if known and self.dice.random() < 0.1:
            return self.one(known)
        names = [name for name, (fits, _) in LAYERS.items() if fits(shape)]
        alone = len(x) * math.prod(shape[1:]) == 1
        refused = {"ReLU in place": not self.writable, "batch norm": alone}
        name = self.one([name for name in names if not refused.get(name)])
        layer = LAYERS[name][1](shape, self.one).to(self.dtype)
        layer.requires_grad_(self.dice.random() >= self.frozen)
        if name in SHARED:
            self.shared.append((shape, name, layer))
        return name, layer

    def add(self, name: str, layer: nn.Module) -> None:
        """Add a layer that is made."""
        self.names.append(name)
        self.layers.append(layer)
        with torch.no_grad():
            copy = pytree.tree_map(lambda t: None if t is None else t.clone(), self.value)
            self.value = layer(copy)
        self.writable = name in FRESH or (self.writable and name in SHARING)


@dataclass(frozen=True)
class Trial:
    """A program that was just made, to be run in the plain way, or within a budget.

    Attributes:
        name: how to draw it again.
        traits: what it is like.
        module: whose buffers a call changes.
        exact: how many of the gradients, the first ones, are the same bit for bit.
        tolerance: how near the others are.
        plain: gives the results and gradients to be found.
        ordinary: is what a fraction is a fraction of.
        call: gives results and gradients within a budget.
        fit: takes the measurements of a first call, where that can be asked for.
        spare: bytes that the documentation allows a call besides its budget.
        few: is the plain way through as many steps as any first call may measure.
    """

    name: str
    traits: str
    module: nn.Module
    exact: int
    tolerance: float
    plain: Callable[[], Results]
    ordinary: Callable[[], Results]
    call: Callable[[Any], Results]
    fit: Callable[[Any], None] | None = None
    spare: int = 0
    few: Callable[[], Results] | None = None


@dataclass(frozen=True)
class Reading:
    """What came of a program within a budget.

    Attributes:
        program: how to draw it again.
        label: one of :data:`LABELS`.
        budget_bytes: what is allowed, with what the documentation allows besides.
        first_bytes: the peak of the first call, its measurements included.
        apart_bytes: the peak of the first call's own work.
        later_bytes: the peak of the second call.
        measuring_bytes: what the documentation allows the first call's measurements.
        wrong: what is not as it should be, in words.
        refused: why the program was refused.
    """

    program: str
    label: str
    budget_bytes: int
    first_bytes: int = 0
    apart_bytes: int = 0
    later_bytes: int = 0
    measuring_bytes: int = 0
    wrong: str = ""
    refused: str = ""

    @property
    def kept(self) -> bool:
        """Whether the budget was kept, in all but the measurements."""
        return max(self.apart_bytes, self.later_bytes) <= self.budget_bytes + SLACK_BYTES

    def __str__(self) -> str:
        told = f"{self.program} within {self.label}, {self.budget_bytes} bytes"
        if self.refused or self.wrong:
            told += f": {self.refused or self.wrong}"
        for name in ("first", "apart", "later"):
            size = getattr(self, f"{name}_bytes")
            told += f", {name} {size} ({size / self.budget_bytes:.3f})"
        return told


def readings(make: Callable[[], Trial], labels: tuple[str, ...] = LABELS) -> Iterator[Reading]:
    """Run a program within budgets, each time made anew.

    "least" is the one that a refusal names; "between" lies between that and the ordinary peak, in
    logarithms; "50%" is a half of the ordinary peak, left out where that is less than the least;
    "enough" is twice as much as is needed.
    """
    one = make()
    expected = outcome(one, one.plain)
    ordinary = max(1, watched(one.ordinary)[1].working_bytes() - one.spare)
    handing = max(1, peak(one.plain) / ordinary)
    few = max(FEW_BYTES, 2 * peak(one.few) if one.few else 0)
    try:
        least = minimum(make())
    except rg.CellError as refusal:
        yield Reading(one.name, "least", 1, refused=str(refusal))
        return
    budgets = {
        "least": least,
        "between": max(least, math.isqrt(least * ordinary)),
        "50%": ordinary // 2,
        "enough": 2 * max(least, ordinary),
    }
    for label in labels:
        if label != "50%" or budgets[label] >= least:
            allowed = int(max(few, handing * budgets[label]))
            reading = Reading(one.name, label, budgets[label], measuring_bytes=allowed)
            yield read(make(), reading, expected)


def peak(run: Callable[[], Results]) -> int:
    """What a run takes in all, with its results, which nobody keeps here."""
    return watched(lambda: run() and None)[1].working_bytes()


def minimum(trial: Trial) -> int:
    """The least budget, as the refusal of a byte names it."""
    try:
        watched(lambda: trial.call(1))
    except rg.BudgetError as error:
        return error.minimum_bytes
    return 1


def read(trial: Trial, reading: Reading, expected: dict[str, list[Any]]) -> Reading:
    """Run a program that was just made twice within a budget."""
    memory = reading.label if reading.label == "50%" else reading.budget_bytes
    try:
        measured = watched(lambda: trial.fit(memory))[1].working_bytes() if trial.fit else 0
        found, first = watched(lambda: outcome(trial, lambda: trial.call(memory)))
        _, later = watched(lambda: trial.call(memory))
    except rg.CellError as refusal:
        return replace(reading, refused=str(refusal))
    except Exception as error:
        return replace(reading, wrong=f"{type(error).__name__}: {error}")
    return replace(
        reading,
        budget_bytes=reading.budget_bytes + trial.spare,
        first_bytes=max(measured, first.working_bytes()),
        apart_bytes=first.working_bytes(measuring=False),
        later_bytes=later.working_bytes(),
        wrong=difference(found, expected, trial),
    )


def outcome(trial: Trial, run: Callable[[], Results]) -> dict[str, list[Any]]:
    """All that a call gives and leaves behind, from the same random state."""
    torch.manual_seed(11)
    values, gradients = run()
    return {
        "result": values,
        "gradient of an argument": gradients[: trial.exact],
        "gradient of a parameter": gradients[trial.exact :],
        "buffer": [b.clone() for b in trial.module.buffers()],
        "random state": [torch.get_rng_state()],
    }


def difference(found: dict[str, list[Any]], expected: dict[str, list[Any]], trial: Trial) -> str:
    """What is not the same, in words."""
    told = []
    for kind, theirs in expected.items():
        tolerance = trial.tolerance if kind == "gradient of a parameter" else 0.0
        for number, (a, b) in enumerate(zip(found[kind], theirs, strict=True)):
            if (a is None) != (b is None):
                told.append(f"{kind}, number {number}, is {'absent' if a is None else 'there'}")
            elif a is not None and (a.shape, a.dtype) != (b.shape, b.dtype):
                told.append(f"{kind}, number {number}, is {a.dtype} {tuple(a.shape)}")
            elif a is not None and not torch.equal(a, b):
                error = float((a.double() - b.double()).norm() / b.double().norm())
                if not error <= tolerance:
                    told.append(f"{kind}, number {number}, differs by {error:.1e}")
    return "; ".join(told)


class Watched:
    """The allocations of a call: blocks, bytes, and whether it was measuring itself then."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, bool]] = []

    def working_bytes(self, *, measuring: bool = True) -> int:
        """The peak of what is released again; or of that part which no measurement allocated.

        From the first measurement to the last all is measuring, as is what is run between them.
        """
        inner = [i for i, (_, _, is_inner) in enumerate(self.events) if is_inner]
        apart = range(inner[0], inner[-1] + 1) if inner and not measuring else range(0)
        live: dict[int, tuple[int, int]] = {}
        sizes = [0] * len(self.events)
        for i, (block, size, _) in enumerate(self.events):
            if size > 0:
                live[block] = i, size
            elif block in live:
                born, size = live.pop(block)
                if born not in apart:
                    sizes[born], sizes[i] = size, -size
        return max(itertools.accumulate(sizes), default=0)


def watched(call: Callable[[], Any]) -> tuple[Any, Watched]:
    """What a call returned, and what it allocated."""
    with watching() as found:
        value = call()
    return value, found


@contextmanager
def watching() -> Iterator[Watched]:
    """Follow every allocation, also of a call that takes measurements itself.

    Profilers do not nest: where one is to start, the watching one stops, and then starts anew.
    Operators are not followed, which would take three times as long.
    """
    names = ("_prepare_profiler", "_enable_profiler", "_disable_profiler", "_profiler_enabled")
    real = {name: getattr(_autograd, name) for name in names}
    scopes, found = {_profiler.RecordScope.USER_SCOPE}, Watched()
    options = _profiler.ProfilerState.KINETO, False, True, False, False, False
    config = _profiler.ProfilerConfig(*options, _profiler._ExperimentalConfig())
    activities = {_profiler.ProfilerActivity.CPU}

    def start() -> None:
        real["_prepare_profiler"](config, activities)
        real["_enable_profiler"](config, activities, scopes)

    def stop(inner: bool) -> Any:
        result = real["_disable_profiler"]()
        events, pending = [], [*result.experimental_event_tree()]
        while pending:
            events.append(pending.pop())
            pending += events[-1].children
        events = [event for event in events if event.tag == _profiler._EventType.Allocation]
        for event in sorted(events, key=lambda event: event.start_time_ns):
            fields = event.extra_fields
            found.events.append((fields.ptr, fields.alloc_size, inner))
        return result

    def prepare(*arguments: Any) -> None:
        stop(False)
        real["_prepare_profiler"](*arguments)

    def disable() -> Any:
        result = stop(True)
        start()
        return result

    apart = rehearsal.apart

    def rehearse(*arguments: Any) -> Any:
        stop(False)
        start()
        try:
            return apart(*arguments)
        finally:
            stop(True)
            start()

    rehearsal.apart = rehearse  # which measures no bytes, and counts as measuring
    _autograd._prepare_profiler, _autograd._disable_profiler = prepare, disable
    _autograd._enable_profiler = lambda *given: real["_enable_profiler"](*given[:2], scopes)
    _autograd._profiler_enabled = lambda: False
    collects = gc.isenabled()
    gc.disable()  # what it released, of whoever it was, would pass for the call's
    start()
    try:
        yield found
    finally:
        stop(False)
        rehearsal.apart = apart
        for name, function in real.items():
            setattr(_autograd, name, function)
        if collects:
            gc.enable()
