"""Layers that depend on something hidden, as real code does: each is a function of a few lines.

A program is a maker. It gets a ``World``, which holds what is hidden and is made anew for each run,
and returns ``f(net, x)``: what a layer computes, with ``net.a`` and ``net.b`` as its weights.
Besides, it may say what is told of the hidden state (``w.told``), what happens between the passes
(``w.between``) and after a step (``w.after``), how layers are called (``w.call``), how a step is
made (``w.drive``), and what to undo at the end (``w.close``).

An ``unrepeatable`` program depends on a clock, an address or the system's entropy: no second run
gives its numbers. Its layers are linear in ``net.b``, so that by Euler's identity the product of
that weight and its gradient is the loss, whatever was drawn (``judged`` in the benchmark).
"""

import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import decimal
import functools
import gc
import inspect
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import retrograde as rg

__all__ = ["PROGRAMS", "Habit", "World"]

CHAIN, CELL = ("budget", "Sequential", "lean"), ("unroll", "bptt", "Recurrent")


class World:
    """What is hidden from a layer's arguments, and how a program is run."""

    def __init__(self, width: int) -> None:
        self.width, self.n, self.made = width, 0, 0
        self.dtype = torch.float64
        self.ways: tuple[str, ...] = (*CHAIN, *CELL)
        self.unrepeatable = False
        self.tolerance = 0.0  # of a program that does not repeat its own last bits
        self.prepare: Callable[[Any], Any] = lambda net: None
        self.call: Callable[[Any, Any], Any] = lambda layer, x: layer(x)
        self.between: Callable[[Any], Any] = lambda model: None
        self.after: Callable[[Any], Any] = lambda model: None
        self.told: Callable[[], Any] = lambda: self.n
        self.around: Callable[[], Any] = contextlib.nullcontext
        self.casts: Callable[[], Any] = contextlib.nullcontext
        self.drive: Callable[..., Tensor] | None = None
        self.close: Callable[[], Any] = lambda: None


class Habit(nn.Module):
    """A layer (…, W) → (…, W) that computes what a program says."""

    def __init__(self, world: World, function: Callable[..., Any]) -> None:
        super().__init__()
        options: Any = {"dtype": world.dtype, "bias": not world.unrepeatable}
        self.a = nn.Linear(world.width, 2 * world.width, **options)
        self.b = nn.Linear(2 * world.width, world.width, **options)
        self.function, self.number = function, world.made
        world.made += 1
        world.prepare(self)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


PROGRAMS: dict[str, Callable[[World], Callable[..., Any]]] = {}


def program(name: str) -> Callable[[Any], Any]:
    def keep(maker: Any) -> Any:
        PROGRAMS[name] = maker
        return maker

    return keep


def body(net: Any, x: Tensor, s: Any = 1.0) -> Tensor:
    """A residual block, whose scale is in what it saves."""
    return x + s * net.b(torch.tanh(s * net.a(x)))


def scaled(net: Any, x: Tensor, s: float) -> Tensor:
    """A layer for unrepeatable scales: homogeneous, and linear in its last weight."""
    return net.b(torch.relu(s * net.a(x)))


def few(k: int) -> float:
    """A scale that tells neighbouring counts apart."""
    return 0.5 + 0.1 * (k % 7)


# Counters and other Python state, in every place that a program may keep it.


@program("a context variable that each call sets")
def _(w):
    var = contextvars.ContextVar("scale", default=0)
    w.told = lambda: var.get()

    def f(net, x):
        var.set(var.get() + 1)
        return body(net, x, few(var.get()))

    return f


@program("a counter in threading.local")
def _(w):
    local = threading.local()
    local.n = 0
    w.told = lambda: local.n

    def f(net, x):
        local.n += 1
        return body(net, x, few(local.n))

    return f


@program("itertools.count in a closure")
def _(w):
    count = itertools.count()
    w.told = lambda: repr(count)
    return lambda net, x: body(net, x, few(next(count)))


@program("itertools.cycle of scales")
def _(w):
    scales = itertools.cycle((0.5, 0.9, 1.3, 0.7, 1.1, 0.6, 1.2))
    return lambda net, x: body(net, x, next(scales))


@program("a generator function that yields scales")
def _(w):
    def draws():
        while True:
            yield from (0.5, 0.9, 1.3, 0.7, 1.1)

    scales = draws()
    return lambda net, x: body(net, x, next(scales))


@program("a counter of ctypes")
def _(w):
    n = ctypes.c_int(0)
    w.told = lambda: n.value

    def f(net, x):
        n.value += 1
        return body(net, x, few(n.value))

    return f


@program("a class attribute that counts calls")
def _(w):
    class Counts:
        n = 0

    w.told = lambda: Counts.n

    def f(net, x):
        Counts.n += 1
        return body(net, x, few(Counts.n))

    return f


@program("an object with __slots__ that counts")
def _(w):
    class Slotted:
        __slots__ = ("n",)

    one = Slotted()
    one.n = 0
    w.told = lambda: one.n

    def f(net, x):
        one.n += 1
        return body(net, x, few(one.n))

    return f


@program("a property whose reading counts")
def _(w):
    class Meter:
        def __init__(self):
            self.reads = 0

        @property
        def scale(self):
            self.reads += 1
            return few(self.reads)

    meter = Meter()
    w.told = lambda: meter.reads
    return lambda net, x: body(net, x, meter.scale)


@program("a module whose __getattr__ counts")
def _(w):
    module, count = types.ModuleType("settings"), []

    def attribute(name):
        count.append(name)
        return few(len(count))

    module.__getattr__ = attribute
    w.told = lambda: len(count)
    return lambda net, x: body(net, x, module.scale)


@program("a mutable default argument")
def _(w):
    def f(net, x, seen=[0]):  # noqa: B006
        seen[0] += 1
        return body(net, x, few(seen[0]))

    w.told = lambda: f.__defaults__[0][0]
    return f


@program("an attribute of the function itself")
def _(w):
    def f(net, x):
        f.n += 1
        return body(net, x, few(f.n))

    f.n = 0
    w.told = lambda: f.n
    return f


@program("an integer of the module that rolls")
def _(w):
    def f(net, x):
        net.shift = getattr(net, "shift", 0) + 1
        return body(net, torch.roll(x, net.shift, -1))

    return f


@program("a bytearray that is written")
def _(w):
    data = bytearray(1)
    w.told = lambda: data[0]

    def f(net, x):
        data[0] = (data[0] + 1) % 251
        return body(net, x, few(data[0]))

    return f


@program("io.BytesIO that is read on")
def _(w):
    file = io.BytesIO(bytes(random.Random(1).choices(range(7), k=100_000)))
    w.told = file.tell
    return lambda net, x: body(net, x, few(file.read(1)[0]))


@program("a file that counts")
def _(w):
    handle, path = tempfile.mkstemp()
    os.write(handle, b"0")
    os.close(handle)
    w.close = lambda: os.path.exists(path) and os.unlink(path)

    def read():
        with open(path) as file:
            return int(file.read())

    w.told = read

    def f(net, x):
        n = read() + 1
        with open(path, "w") as file:
            file.write(str(n))
        return body(net, x, few(n))

    return f


@program("a deque of recent means")
def _(w):
    recent = collections.deque([1.0], maxlen=5)
    w.told = lambda: list(recent)

    def f(net, x):
        recent.append(0.5 + float(x.detach().abs().mean()))
        return body(net, x, sum(recent) / len(recent))

    return f


@program("metrics in a list")
def _(w):
    seen = []
    w.told = lambda: list(seen)

    def f(net, x):
        y = body(net, x)
        seen.append(y.detach().mean().item())
        return y

    return f


@program("a first call that fails and falls back")
def _(w):
    w.fast = True
    w.told = lambda: w.fast

    def f(net, x):
        try:
            if w.fast:
                raise NotImplementedError
            return body(net, x, 0.9)
        except NotImplementedError:
            w.fast = False
            return body(net, x)

    return f


@program("a weak reference that may be dead")
def _(w):
    w.ways, w.last = CHAIN, lambda: None

    def f(net, x):
        y = body(net, x, 0.8 if w.last() is None else 1.2)
        w.last = weakref.ref(y)
        return y

    return f


@program("__getattribute__ that counts")
def _(w):
    class Noted:
        scale = 1.0

        def __getattribute__(self, name):
            w.n += 1
            return few(w.n)

    noted = Noted()
    return lambda net, x: body(net, x, noted.scale)


# Settings of the process that change between the passes.


@program("an environment variable changed between the passes")
def _(w):
    os.environ["HIDDEN_SCALE"] = "0.8"
    w.between = lambda model: os.environ.update(HIDDEN_SCALE="1.2")
    w.after = lambda model: os.environ.update(HIDDEN_SCALE="0.8")
    w.close = lambda: os.environ.pop("HIDDEN_SCALE", None)
    return lambda net, x: body(net, x, float(os.environ["HIDDEN_SCALE"]))


@program("the number of threads as a setting")
def _(w):
    w.between = lambda model: torch.set_num_threads(2)
    w.after = lambda model: torch.set_num_threads(1)
    w.close = lambda: torch.set_num_threads(1)
    return lambda net, x: body(net, x, 0.5 * torch.get_num_threads())


@program("deterministic algorithms switched between the passes")
def _(w):
    w.between = lambda model: torch.use_deterministic_algorithms(True, warn_only=True)
    w.after = w.close = lambda *_: torch.use_deterministic_algorithms(False)
    return lambda net, x: body(net, x, 0.7 + torch.are_deterministic_algorithms_enabled())


@program("the precision of products switched between the passes")
def _(w):
    w.between = lambda model: torch.set_float32_matmul_precision("high")
    w.after = w.close = lambda *_: torch.set_float32_matmul_precision("highest")
    return lambda net, x: body(net, x, few(len(torch.get_float32_matmul_precision())))


@program("decimal's precision switched between the passes")
def _(w):
    context = decimal.getcontext()
    context.prec = 3
    w.between = lambda model: setattr(context, "prec", 1)
    w.after = lambda model: setattr(context, "prec", 3)
    w.close = lambda: setattr(context, "prec", 28)
    return lambda net, x: body(net, x, float(decimal.Decimal(5) / decimal.Decimal(7)))


@program("a memory map written between the passes")
def _(w):
    w.file = file = tempfile.NamedTemporaryFile()  # noqa: SIM115
    scales = np.memmap(file.name, np.float64, "w+", shape=(3,))
    scales[:] = 0.8
    w.between = lambda model: scales.__setitem__(0, 1.2)
    w.after = lambda model: scales.__setitem__(0, 0.8)
    return lambda net, x: body(net, x, float(scales[0]))


@program("an array of NumPy under a captured tensor, written between the passes")
def _(w):
    array = np.full(2 * w.width, 0.8)
    table = torch.from_numpy(array)
    w.between = lambda model: array.fill(1.2)
    w.after = lambda model: array.fill(0.8)
    return lambda net, x: x + net.b(torch.tanh(net.a(x) + table))


@program("an activation in a registry, exchanged between the passes")
def _(w):
    w.act = torch.tanh
    w.between = lambda model: setattr(w, "act", torch.sin)
    w.after = lambda model: setattr(w, "act", torch.tanh)
    return lambda net, x: x + net.b(w.act(net.a(x)))


@program("train and eval between the passes")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")
    w.between, w.after = lambda model: model.eval(), lambda model: model.train()
    return lambda net, x: x + functional.dropout(net.b(torch.tanh(net.a(x))), 0.3, net.training)


# Random numbers.


@program("torch's own generator object")
def _(w):
    g = torch.Generator().manual_seed(3)
    w.told = lambda: g.get_state()
    return lambda net, x: body(net, x, torch.rand((), generator=g, dtype=x.dtype))


@program("a generator that the loader draws from between the passes")
def _(w):
    g = torch.Generator().manual_seed(3)
    w.told, w.between = lambda: g.get_state(), lambda model: torch.rand(5, generator=g)
    return lambda net, x: body(net, x, torch.rand((), generator=g, dtype=x.dtype))


@program("random.Random of its own")
def _(w):
    g = random.Random(3)
    w.told = g.getstate
    return lambda net, x: body(net, x, few(g.randrange(7)))


@program("stochastic depth by random.Random of its own")
def _(w):
    g = random.Random(3)
    w.told = g.getstate
    return lambda net, x: x if net.training and g.random() < 0.3 else body(net, x)


@program("numpy's default_rng")
def _(w):
    g = np.random.default_rng(3)
    w.told = lambda: str(g.bit_generator.state)
    return lambda net, x: body(net, x, float(g.random()))


@program("numpy's global numbers")
def _(w):
    w.told = lambda: str(np.random.get_state())
    return lambda net, x: body(net, x, float(np.random.rand()))


@program("torch.manual_seed within a layer")
def _(w):
    def f(net, x):
        torch.manual_seed(net.number)
        return body(net, x, torch.rand_like(x[..., :1]))

    return f


@program("fork_rng within a layer, beside dropout")
def _(w):
    def f(net, x):
        with torch.random.fork_rng():
            torch.manual_seed(net.number)
            noise = torch.rand_like(x[..., :1])
        return functional.dropout(body(net, x, noise), 0.2)

    return f


@program("multinomial and Gumbel draws")
def _(w):
    def f(net, x):
        chosen = functional.gumbel_softmax(x, hard=True)
        at = torch.multinomial(torch.softmax(x.detach(), -1).reshape(-1, x.shape[-1]), 1)
        return body(net, x + chosen) + 0.01 * at.reshape(*x.shape[:-1], 1)

    return f


@program("a dropout rate from a counting buffer")
def _(w):
    w.prepare = lambda net: net.register_buffer("step", torch.tensor(0))

    def f(net, x):
        net.step += 1
        return functional.dropout(body(net, x), 0.05 * (int(net.step) % 7))

    return f


@program("a random table made at the first call")
def _(w):
    w.tables = {}
    w.told = lambda: [t.sum() for t in w.tables.values()]

    def f(net, x):
        if net.number not in w.tables:
            w.tables[net.number] = torch.rand(x.shape[-1], dtype=x.dtype)
        return body(net, x * w.tables[net.number])

    return f


@program("a buffer registered at the first call")
def _(w):
    def f(net, x):
        if not hasattr(net, "table"):
            net.register_buffer("table", torch.rand(x.shape[-1], dtype=x.dtype))
        return body(net, x * net.table)

    return f


@program("a table made in inference mode at the first call")
def _(w):
    w.tables = {}

    def f(net, x):
        if net.number not in w.tables:
            with torch.inference_mode():
                w.tables[net.number] = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        return body(net, x + w.tables[net.number])

    return f


# Weights and buffers that a forward pass changes.


@program("weight norm as a parametrization")
def _(w):
    w.prepare = lambda net: parametrizations.weight_norm(net.a)
    return body


@program("weight norm by a hook")
def _(w):
    w.prepare = lambda net: nn.utils.weight_norm(net.a)
    return body


@program("spectral norm with its power iteration")
def _(w):
    w.prepare = lambda net: parametrizations.spectral_norm(net.a)
    return body


@program("parametrizations that are cached for a pass")
def _(w):
    w.prepare = lambda net: parametrizations.weight_norm(net.a)
    w.around = parametrize.cached
    return lambda net, x: body(net, body(net, x))


@program("pruned weights")
def _(w):
    w.prepare = lambda net: prune.random_unstructured(net.a, "weight", 0.3)
    return body


@program("a moving average in a buffer, which the layer uses")
def _(w):
    w.prepare = lambda net: net.register_buffer("mean", torch.zeros(w.width, dtype=w.dtype))

    def f(net, x):
        net.mean.lerp_(x.detach().mean(tuple(range(x.dim() - 1))), 0.3)
        return body(net, x - net.mean)

    return f


@program("a moving average in a plain attribute")
def _(w):
    def f(net, x):
        mean = x.detach().mean(tuple(range(x.dim() - 1)))
        net.mean = mean if not hasattr(net, "mean") else 0.7 * net.mean + 0.3 * mean
        return body(net, x - net.mean)

    return f


@program("a codebook updated in forward")
def _(w):
    w.prepare = lambda net: net.register_buffer("codes", torch.randn(9, w.width, dtype=w.dtype))

    def f(net, x):
        flat = x.detach().reshape(-1, x.shape[-1])
        near = torch.cdist(flat, net.codes).argmin(1)
        with torch.no_grad():
            for k in near.unique():
                net.codes[k].lerp_(flat[near == k].mean(0), 0.2)
        quantized = net.codes[near].reshape(x.shape)
        return body(net, x + (quantized - x).detach())

    return f


@program("a memory bank with a pointer")
def _(w):
    def prepare(net):
        net.register_buffer("bank", torch.zeros(8, w.width, dtype=w.dtype))
        net.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def f(net, x):
        at = int(net.at)
        net.bank[at] = x.detach().reshape(-1, x.shape[-1])[0]
        net.at[0] = (at + 1) % 8
        return body(net, x) + torch.tanh(x @ net.bank.T.clone()) @ net.bank.clone()

    w.prepare = prepare
    return f


@program("a target network that forward moves")
def _(w):
    def prepare(net):
        net.target = nn.Linear(w.width, 2 * w.width, dtype=w.dtype).requires_grad_(False)

    def f(net, x):
        with torch.no_grad():
            for mine, theirs in zip(net.target.parameters(), net.a.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)
        return x + net.b(torch.tanh(net.a(x)) * net.target(x))

    w.prepare = prepare
    return f


@program("an embedding that renormalizes its weight")
def _(w):
    def prepare(net):
        net.table = nn.Embedding(11, w.width, max_norm=0.5, dtype=w.dtype)

    def f(net, x):
        return body(net, x + net.table((x.detach().abs() * 100).long()[..., 0] % 11))

    w.prepare = prepare
    return f


@program("fake quantization with observers")
def _(w):
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    w.dtype = torch.float32
    w.prepare = lambda net: setattr(net, "fake", FakeQuantize(MovingAverageMinMaxObserver))
    return lambda net, x: body(net, net.fake(x))


@program("instance statistics that accumulate")
def _(w):
    w.ways = CHAIN

    def prepare(net):
        net.norm = nn.BatchNorm1d(w.width, momentum=None, dtype=w.dtype)

    w.prepare = prepare
    return lambda net, x: body(net, net.norm(x))


@program("a recurrent state kept from pass to pass")
def _(w):
    w.ways = CHAIN
    w.prepare = lambda net: setattr(net, "core", nn.GRUCell(w.width, w.width, dtype=w.dtype))

    def f(net, x):
        net.h = net.core(x, getattr(net, "h", None)).detach()
        return body(net, x + net.h)

    return f


@program("a cache of earlier inputs that is attended to")
def _(w):
    def f(net, x):
        flat = x.detach().reshape(-1, x.shape[-1])[:4]
        net.cache = torch.cat([getattr(net, "cache", flat[:0]), flat])[-12:]
        return body(net, x) + torch.softmax(x @ net.cache.T, -1) @ net.cache

    return f


# Autograd's own state.


@program("asks whether its input requires a gradient")
def _(w):
    return lambda net, x: body(net, x, 1.1 if x.requires_grad else 0.7)


@program("asks whether its input is a leaf")
def _(w):
    return lambda net, x: body(net, x, 1.1 if x.is_leaf else 0.7)


@program("asks for the name of grad_fn")
def _(w):
    return lambda net, x: body(net, x, few(len(type(x.grad_fn).__name__)))


@program("asks whether gradients are enabled")
def _(w):
    def f(net, x):
        return body(net, x, 1.1 if torch.is_grad_enabled() else 0.7)

    return f


@program("asks for its input's version")
def _(w):
    w.call = lambda layer, x: layer(x.clone().add_(0.1).mul_(0.9))
    w.ways = ("budget", "lean", *CELL)
    return lambda net, x: body(net, x, few(x._version))


@program("asks whether its input is a view")
def _(w):
    w.call = lambda layer, x: layer(torch.cat([x, x])[: len(x)])
    w.ways = ("budget", "lean", *CELL)
    return lambda net, x: body(net, x, 1.1 if x._is_view() else 0.7)


@program("asks for its input's strides")
def _(w):
    w.call = lambda layer, x: layer(x.mT.contiguous().mT if x.dim() > 1 else x)
    w.ways = ("budget", "lean", *CELL)
    return lambda net, x: body(net, x, few(x.stride()[-1]))


@program("a hook on an intermediate tensor")
def _(w):
    def f(net, x):
        h = torch.tanh(net.a(x))
        h.register_hook(lambda g: 0.5 * g)
        return x + net.b(h)

    return f


@program("a hook that counts on an intermediate tensor")
def _(w):
    def hook(g):
        w.n += 1
        return few(w.n) * g

    def f(net, x):
        h = torch.tanh(net.a(x))
        h.register_hook(hook)
        return x + net.b(h)

    return f


@program("retain_grad on an intermediate tensor")
def _(w):
    w.ways, w.held = CHAIN, {}
    w.told = lambda: [None if t.grad is None else t.grad.sum() for t in w.held.values()]
    w.after = lambda model: w.held.clear()

    def f(net, x):
        h = torch.tanh(net.a(x))
        h.retain_grad()
        w.held[net.number] = h
        return x + net.b(h)

    return f


class Counting(Function):
    """Its scale is a count, and its backward pass counts too."""

    @staticmethod
    def forward(ctx, x, w):
        w.n += 1
        ctx.w, ctx.s = w, few(w.n)
        ctx.save_for_backward(x)
        return ctx.s * x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ctx.w.n += 100
        return ctx.s * g * (1 - x.tanh() ** 2), None


@program("a Function whose context holds a count")
def _(w):
    return lambda net, x: x + net.b(Counting.apply(net.a(x), w))


class Late(Function):
    """Its backward pass reads a number that forward passes change."""

    @staticmethod
    def forward(ctx, x, w):
        w.n += 1
        ctx.w = w
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        return few(ctx.w.n) * g, None


@program("a Function whose backward pass reads a global count")
def _(w):
    return lambda net, x: x + net.b(Late.apply(net.a(x), w))


@program("torch.func.grad within a layer")
def _(w):
    inner = torch.func.grad(lambda z: z.tanh().pow(2).sum())
    return lambda net, x: x + net.b(inner(net.a(x)))


@program("autograd.grad within a layer")
def _(w):
    def f(net, x):
        with torch.enable_grad():
            z = net.a(x)
            z = z if z.requires_grad else z.requires_grad_()
            (slope,) = torch.autograd.grad(z.tanh().pow(2).sum(), z, create_graph=True)
        return x + net.b(slope)

    return f


@program("an equilibrium layer, whose backward hook solves")
def _(w):
    def f(net, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = 0.3 * net.b(torch.tanh(net.a(z + x)))
        z = 0.3 * net.b(torch.tanh(net.a(z + x)))
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            f0 = 0.3 * net.b(torch.tanh(net.a(z0 + x.detach())))

            def hook(g):
                v = g
                for _ in range(8):
                    v = torch.autograd.grad(f0, z0, v, retain_graph=True)[0] + g
                return v

            z.register_hook(hook)
        return x + z

    return f


@program("checkpoint within a layer, with dropout")
def _(w):
    def f(net, x):
        def inner(x):
            return functional.dropout(net.b(torch.tanh(net.a(x))), 0.2, net.training)

        return x + checkpoint(inner, x, use_reentrant=False)

    return f


@program("half of the layer without gradients")
def _(w):
    def f(net, x):
        with torch.no_grad():
            gate = torch.sigmoid(net.a(x))
        return x + net.b(torch.tanh(net.a(x.detach() + 0.1 * x)) * gate)

    return f


@program("an inner thread that computes")
def _(w):
    pool = ThreadPoolExecutor(1)
    w.close = pool.shutdown

    def f(net, x):
        return x + net.b(pool.submit(lambda: torch.tanh(net.a(x))).result())

    return f


@program("a scripted part with dropout")
def _(w):
    w.tolerance = 1e-12  # the compiler joins operations after some calls

    @torch.jit.script
    def inner(h: Tensor, training: bool):
        return torch.dropout(torch.tanh(h), 0.2, training)

    return lambda net, x: x + net.b(inner(net.a(x), net.training))


# Autocast and types.


@program("autocast switched off within")
def _(w):
    w.dtype, w.casts = torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)

    def f(net, x):
        h = net.a(x)
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(h.float()) * net.b.bias.sum()
        return x + net.b(h)

    return f


@program("asks whether autocast is on")
def _(w):
    w.dtype, w.casts = torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)

    def f(net, x):
        return body(net, x, 1.1 if torch.is_autocast_enabled("cpu") else 0.7)

    return f


@program("asks for autocast's type, which changes between the passes")
def _(w):
    w.dtype, w.casts = torch.float32, lambda: torch.autocast("cpu", torch.bfloat16)
    w.between = lambda model: torch.set_autocast_dtype("cpu", torch.float16)
    w.after = w.close = lambda *_: torch.set_autocast_dtype("cpu", torch.bfloat16)
    return lambda net, x: body(net, x, 0.6 + (torch.get_autocast_dtype("cpu") == torch.float16))


@program("layers that hand over other types")
def _(w):
    w.ways = CHAIN
    types_ = (torch.float64, torch.float32, torch.bfloat16)
    return lambda net, x: body(net, x.double()).to(types_[net.number % 3])


# What is handed from layer to layer.


class Stamped(Tensor):
    """A subclass that torch keeps through operations."""


@program("a subclass of Tensor between the layers")
def _(w):
    def f(net, x):
        y = body(net, x, 1.1 if isinstance(x, Stamped) else 0.7)
        return y if isinstance(y, Stamped) else y.as_subclass(Stamped)

    w.ways = CHAIN
    return f


class Two(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Held:
    x: Tensor
    more: Any = None


@program("a named tuple from each layer")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(x).y
    return lambda net, x: Two(x, body(net, x))


@program("a dataclass from each layer")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(x).x
    return lambda net, x: Held(body(net, x), more=x.detach())


@program("a dict with the same tensor twice")
def _(w):
    def call(layer, x):
        found = layer(x)
        return found["x"] if found["x"] is found["again"] else 0.5 * found["again"]

    w.ways, w.call = ("budget", "lean"), call
    return lambda net, x: (lambda y: {"x": y, "again": y})(body(net, x))


@program("a mask that is compared by identity")
def _(w):
    w.ways, mask = ("budget", "lean"), torch.rand(w.width, dtype=w.dtype) < 0.7
    w.call = lambda layer, x: layer(x, mask)
    return lambda net, x, m: body(net, x * m, 1.1 if m is mask else 0.7)


@program("two views of one base as arguments")
def _(w):
    def f(net, a, b):
        with torch.no_grad():
            shared = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        return body(net, torch.cat([a, b], -1), 1.1 if shared else 0.7)

    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(*x.chunk(2, -1))
    return f


@program("an argument scaled in place")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(x + 0.0)
    return lambda net, x: body(net, x.mul_(0.9))


@program("a view of an argument written in place")
def _(w):
    def f(net, x):
        x[..., :2].mul_(0.5)
        return body(net, x)

    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(x + 0.0)
    return f


@program("the output is the input, changed in place by the next layer")
def _(w):
    w.ways = CHAIN

    def f(net, x):
        y = body(net, x)
        return y.add_(0.1) if net.number % 2 else y.view_as(y)

    return f


@program("reads its neighbour's last output")
def _(w):
    w.ways, w.last = CHAIN, {}
    w.after = lambda model: w.last.clear()

    def f(net, x):
        before = w.last.get(net.number - 2)
        y = body(net, x if before is None else x + 0.1 * before)
        w.last[net.number] = y
        return y

    return f


@program("reads its own output of the step before")
def _(w):
    w.ways, w.last = CHAIN, {}
    w.told = lambda: [t.sum() for t in w.last.values()]

    def f(net, x):
        y = body(net, x + 0.1 * w.last.get(net.number, 0.0))
        w.last[net.number] = y.detach()
        return y

    return f


@program("a table made with a gradient by the first layer, for all")
def _(w):
    w.ways = CHAIN
    w.table, w.prepare = None, lambda net: setattr(w, "net", getattr(w, "net", net))
    w.after = lambda model: setattr(w, "table", None)

    def f(net, x):
        if w.table is None:
            w.table = torch.softmax(w.net.a.weight, 0).sum(1)
        return x + net.b(torch.tanh(net.a(x) * w.table))

    return f


@program("each layer twice in one pass")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(layer(x))
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("lru_cache of masks by length")
def _(w):
    @functools.lru_cache
    def mask(width):
        return torch.linspace(0.5, 1, width, dtype=torch.float64)

    return lambda net, x: body(net, x * mask(x.shape[-1]))


# Hooks.


@program("a forward hook that counts and scales")
def _(w):
    def hook(net, given, y):
        w.n += 1
        return few(w.n) * y

    w.prepare = lambda net: net.a.register_forward_hook(hook)
    return body


@program("a forward hook of all modules")
def _(w):
    def hook(net, given, y):
        if isinstance(net, Habit):
            w.n += 1
        return y

    handle = nn.modules.module.register_module_forward_hook(hook)
    w.close = handle.remove
    return body


@program("a full backward hook that scales")
def _(w):
    def hook(net, given, got):
        w.n += 1
        return tuple(None if g is None else 0.5 * g for g in given)

    w.prepare = lambda net: net.a.register_full_backward_hook(hook)
    return body


@program("hooks of parameters that count and scale")
def _(w):
    def hook(g):
        w.n += 1
        return 0.5 * g

    w.prepare = lambda net: net.a.weight.register_hook(hook)
    w.ways = CHAIN
    return body


@program("an optimizer in the backward pass")
def _(w):
    w.ways = CHAIN

    def move(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.01)

    def prepare(net):
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(move)

    w.prepare = prepare
    return body


# Ways to make a step.


@program("the same graph twice")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def drive(model, x, v):
        y = model(x)
        (y * v).sum().backward(retain_graph=True)
        (y * v).square().sum().backward()
        return y

    w.drive = drive
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("gradients accumulated over two batches")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def drive(model, x, v):
        for k in (1.0, 0.7):
            y = model(k * x)
            (y * v).sum().backward()
        return y

    w.drive = drive
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("two forward passes, then one backward pass")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def drive(model, x, v):
        y, z = model(x), model(0.7 * x)
        (y * z * v).sum().backward()
        return y

    w.drive = drive
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("a pass without gradients first, which counts")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def drive(model, x, v):
        with torch.no_grad():
            target = model(x)
        y = model(x)
        ((y - 0.5 * target) * v).sum().backward()
        return y

    w.drive = drive
    w.prepare = lambda net: net.register_buffer("step", torch.tensor(0))

    def f(net, x):
        net.step += 1
        return body(net, x, few(int(net.step)))

    return f


@program("a penalty of gradients")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def drive(model, x, v):
        x = x.detach().requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad((y * v).sum(), x, create_graph=True)
        (y.sum() + g.square().sum()).backward()
        return y

    w.drive = drive
    return body


@program("a backward pass in another thread, beside threading.local")
def _(w):
    w.ways, local = (*CHAIN, "unroll", "Recurrent"), threading.local()
    local.scale = 1.2

    def drive(model, x, v):
        y, errors = model(x), []

        def go():
            try:
                (y * v).sum().backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return y

    w.drive = drive
    return lambda net, x: body(net, x, getattr(local, "scale", 0.7))


@program("a weight moved between the passes, where nothing saves it")
def _(w):
    w.ways = CHAIN

    def between(model):
        for layer in model.modules():
            if isinstance(layer, Habit):
                with torch.no_grad():
                    layer.gain.mul_(1.1)

    def prepare(net):
        net.gain = nn.Parameter(torch.zeros(w.width, dtype=w.dtype))
        nn.init.constant_(net.gain, 0.3)

    w.prepare, w.between = prepare, between
    return lambda net, x: body(net, x + net.gain)


@program("other weights by functional_call")
def _(w):
    w.ways = ("budget", "Sequential")

    def drive(model, x, v):
        mine = {k: 0.9 * p for k, p in model.named_parameters()}
        y = torch.func.functional_call(model, mine, (x,))
        (y * v).sum().backward()
        return y

    w.drive = drive
    return body


@program("saved tensors kept elsewhere by the caller")
def _(w):
    w.ways = ("budget", "Sequential")

    def pack(t):
        w.n += 1
        return t.clone()

    w.around = lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    w.told = lambda: None
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("anomaly detection around a step")
def _(w):
    w.around = lambda: torch.autograd.detect_anomaly(check_nan=True)
    return lambda net, x: functional.dropout(body(net, x), 0.2)


@program("mutation of saved tensors allowed")
def _(w):
    w.ways = CHAIN
    w.around = torch.autograd.graph.allow_mutation_on_saved_tensors

    def f(net, x):
        h = torch.tanh(net.a(x))
        y = x + net.b(h)
        h.mul_(0.5)
        return y + 0.1 * net.b(h)

    return f


# What backward passes draw and change.


@program("gradient noise that a hook draws, beside dropout")
def _(w):
    def f(net, x):
        h = functional.dropout(torch.tanh(net.a(x)), 0.2)
        if h.requires_grad:
            h.register_hook(lambda g: g + 0.1 * torch.randn_like(g))
        return x + net.b(h)

    return f


class Rounded(Function):
    """Its backward pass draws, as stochastic rounding of gradients does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + 0.1 * torch.rand_like(g).round())


@program("a Function whose backward pass draws, beside dropout")
def _(w):
    return lambda net, x: functional.dropout(x + net.b(Rounded.apply(torch.tanh(net.a(x)))), 0.2)


class Reversed(Function):
    """Reverses gradients, by a factor that grows with its backward passes."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.w.n += 1
        return -0.1 * few(ctx.w.n) * g, None


@program("a gradient reversal whose factor grows with each backward pass")
def _(w):
    return lambda net, x: x + net.b(Reversed.apply(torch.tanh(net.a(x)), w))


@program("statistics of gradients in a buffer, beside those of activations")
def _(w):
    def prepare(net):
        net.register_buffer("of_x", torch.zeros(w.width, dtype=w.dtype))
        net.register_buffer("of_g", torch.zeros(w.width, dtype=w.dtype))

    def f(net, x):
        with torch.no_grad():
            net.of_x.mul_(0.9).add_(x.mean(0), alpha=0.1)

        def hook(g):
            net.of_g.mul_(0.9).add_(g.mean(0), alpha=0.1)

        y = body(net, x * (1 + net.of_x + net.of_g))
        if y.requires_grad:
            y.register_hook(hook)
        return y

    w.prepare = prepare
    return f


@program("a backward hook of the node, which scales by a count")
def _(w):
    def hook(given, got):
        w.n += 1
        return tuple(None if g is None else few(w.n) * g for g in given)

    def f(net, x):
        h = torch.tanh(net.a(x))
        if h.grad_fn is not None:
            h.grad_fn.register_hook(hook)
        return x + net.b(h)

    return f


@program("a full backward pre-hook that counts and scales")
def _(w):
    def hook(net, got):
        w.n += 1
        return tuple(few(w.n) * g for g in got)

    w.prepare = lambda net: net.b.register_full_backward_pre_hook(hook)
    return body


# Routing, caches and schedules.


@program("experts whose use is counted and evened out")
def _(w):
    def prepare(net):
        net.register_buffer("used", torch.zeros(4, dtype=w.dtype))

    def f(net, x):
        parts = net.a(x).unflatten(-1, (4, -1))
        best = (parts.detach().mean(-1) - 0.1 * net.used).argmax(-1)
        with torch.no_grad():
            net.used += functional.one_hot(best, 4).sum(0)
        gate = functional.one_hot(best, 4).to(x.dtype).unsqueeze(-1)
        return x + net.b((torch.tanh(parts) * gate).flatten(-2))

    w.prepare = prepare
    return f


@program("an auxiliary loss that layers add to a list")
def _(w):
    w.ways, w.losses = CHAIN, []

    def drive(model, x, v):
        w.losses.clear()
        y = model(x)
        ((y * v).sum() + 0.1 * sum(w.losses)).backward()
        return y

    def f(net, x):
        h = net.a(x)
        w.losses.append(h.square().mean())
        return x + net.b(torch.tanh(h))

    w.drive, w.told = drive, lambda: None
    return f


@program("a weak dictionary of scales by weight, for each version")
def _(w):
    known = weakref.WeakKeyDictionary()

    def f(net, x):
        if known.get(net, (None,))[0] != net.a.weight._version:
            known[net] = net.a.weight._version, float(net.a.weight.detach().norm())
        return body(net, x, 1 / known[net][1])

    return f


@program("a cache keyed by the identity of the input")
def _(w):
    known = {}
    w.after = lambda model: known.clear()

    def f(net, x):
        if id(x) not in known:
            w.n += 1
            known[id(x)] = few(w.n)
        return body(net, x, known[id(x)])

    return f


@program("keys and values of this pass, which later layers read")
def _(w):
    w.ways, w.keys = CHAIN, []
    w.after = lambda model: w.keys.clear()

    def f(net, x):
        w.keys.append(net.a(x))
        kept = torch.stack(w.keys)
        return x + net.b(torch.tanh((kept.softmax(0) * kept).sum(0)))

    w.told = lambda: None
    return f


@program("a rate that falls from call to call, in a tensor attribute")
def _(w):
    w.prepare = lambda net: setattr(net, "rate", torch.tensor(1.0, dtype=w.dtype))

    def f(net, x):
        net.rate = net.rate * 0.97
        return body(net, x, net.rate)

    return f


@program("a buffer that each call replaces by another")
def _(w):
    w.prepare = lambda net: net.register_buffer("mean", torch.zeros(w.width, dtype=w.dtype))

    def f(net, x):
        net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)
        return body(net, x, 1 + net.mean.mean())

    return f


@program("observers of the least and the greatest number, in Python")
def _(w):
    w.prepare = lambda net: vars(net).update(least=0.0, most=0.0)

    def f(net, x):
        net.least, net.most = min(net.least, float(x.min())), max(net.most, float(x.max()))
        return body(net, x, 1 / (net.most - net.least))

    return f


@program("a scale that doubles after calls without overflow")
def _(w):
    w.scale, w.good = 1.0, 0
    w.told = lambda: (w.scale, w.good)

    def f(net, x):
        y = body(net, x, w.scale)
        w.good = w.good + 1 if bool(y.isfinite().all()) else 0
        if w.good % 3 == 0:
            w.scale = 1.5 if w.scale == 0.75 else 0.75
        return y

    return f


@program("counts in an array of NumPy's")
def _(w):
    counts = np.zeros(2)
    w.told = lambda: counts.tolist()

    def f(net, x):
        counts[1] += 1
        return body(net, x, few(int(counts[1])))

    return f


@program("a count in a data base")
def _(w):
    base = sqlite3.connect(":memory:")
    base.execute("create table calls (n)")
    w.told = lambda: base.execute("select count(*) from calls").fetchone()[0]
    w.close = base.close

    def f(net, x):
        base.execute("insert into calls values (1)")
        return body(net, x, few(w.told()))

    return f


@program("a count in shared memory")
def _(w):
    count = multiprocessing.Value("i", 0)
    w.told = lambda: count.value

    def f(net, x):
        with count.get_lock():
            count.value += 1
        return body(net, x, few(count.value))

    return f


@program("a semaphore that each call lowers")
def _(w):
    free = threading.Semaphore(10_000)
    w.told = lambda: free._value

    def f(net, x):
        free.acquire()
        return body(net, x, few(free._value))

    return f


@program("a coroutine that is sent the means")
def _(w):
    def averaged():
        mean = 1.0
        while True:
            mean = 0.9 * mean + 0.1 * (yield mean)

    average = averaged()
    next(average)
    return lambda net, x: body(net, x, average.send(float(x.detach().abs().mean())))


@program("the records that a logger has handled")
def _(w):
    class Counts(logging.Handler):
        def emit(self, record):
            w.n += 1

    logger = logging.Logger("programs")
    logger.addHandler(Counts())

    def f(net, x):
        logger.warning("called")
        return body(net, x, few(w.n))

    return f


# Weights and graphs made at each call.


@program("weights that a step freezes and thaws")
def _(w):
    w.ways = CHAIN

    def f(net, x):
        w.n += 1
        net.a.weight.requires_grad_(w.n % 3 != 0)
        return body(net, x)

    w.told = lambda: w.n % 3
    return f


@program("weights dropped at each call, under the name of the weight")
def _(w):
    def prepare(net):
        raw = net.a.weight
        del net.a._parameters["weight"]
        net.a.register_parameter("weight_raw", nn.Parameter(raw.detach()))
        net.a.weight = raw.detach()

    def f(net, x):
        net.a.weight = functional.dropout(net.a.weight_raw, 0.2)
        return body(net, x)

    w.prepare = prepare
    return f


@program("a weight's numbers exchanged between the passes")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def between(model):
        for p in model.parameters():
            p.data = 1.1 * p.data

    w.between = between
    return body


@program("a layer exchanged between the passes")
def _(w):
    w.ways = (*CHAIN, "unroll", "Recurrent")

    def between(model):
        for net in (m for m in model.modules() if isinstance(m, Habit)):
            net.shape = nn.Tanh() if w.n % 2 else nn.Sigmoid()
        w.n += 1

    w.between, w.prepare = between, lambda net: setattr(net, "shape", nn.Tanh())
    return lambda net, x: x + net.b(net.shape(net.a(x)))


@program("torch.vmap within a layer")
def _(w):
    return lambda net, x: x + net.b(torch.vmap(lambda row: torch.tanh(row) * row.sum())(net.a(x)))


@program("torch.func.jvp within a layer")
def _(w):
    def f(net, x):
        h = net.a(x)
        return x + net.b(torch.func.jvp(torch.tanh, (h,), (h.cos(),))[1])

    return f


@program("no hooks for saved tensors within a layer")
def _(w):
    def f(net, x):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            return body(net, x)

    return f


@program("checkpoint within checkpoint")
def _(w):
    def inner(net, x):
        return torch.tanh(checkpoint(net.a, x, use_reentrant=False))

    return lambda net, x: x + net.b(checkpoint(inner, net, x, use_reentrant=False))


@program("a reentrant checkpoint with a count")
def _(w):
    def inner(net, x):
        w.n += 1
        return torch.tanh(net.a(x))

    w.told = lambda: None
    return lambda net, x: x + net.b(checkpoint(inner, net, x, use_reentrant=True))


@program("a lean part within a layer")
def _(w):
    def f(net, x):
        with rg.lean():
            return body(net, x)

    return f


@program("saved tensors packed by the layer itself")
def _(w):
    def pack(t):
        w.n += 1
        return t.clone()

    def f(net, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return functional.dropout(body(net, x), 0.2)

    w.told = lambda: None
    return f


@program("asks whether a backward pass is running")
def _(w):
    def f(net, x):
        return body(net, x, 1.1 if torch._C._current_graph_task_id() < 0 else 0.7)

    return f


@program("asks whether hooks save its tensors")
def _(w):
    w.ways = ("budget", "Sequential", *CELL)  # a lean pass is such hooks

    def f(net, x):
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return body(net, x, 1.1 if hooks is None else 0.7)

    return f


@program("asks for the size of its input's memory")
def _(w):
    return lambda net, x: body(net, x, 1.1 if x.untyped_storage().nbytes() == x.nbytes else 0.7)


@program("asks whether a mode of torch's functions is on")
def _(w):
    w.ways = ("budget", "Sequential", *CELL)  # a lean pass is such a mode

    def f(net, x):
        modes = torch.overrides._get_current_function_mode_stack()
        return body(net, x, 1.1 if not modes else 0.7)

    return f


# Tensors of other kinds.


@program("a learnt filter of complex numbers")
def _(w):
    def prepare(net):
        kind = torch.complex128 if w.dtype == torch.float64 else torch.complex64
        net.filter = nn.Parameter(torch.randn(w.width + 1, dtype=kind))

    def f(net, x):
        waves = torch.fft.rfft(net.a(x)) * net.filter
        return x + net.b(torch.tanh(torch.fft.irfft(waves, 2 * w.width)))

    w.prepare = prepare
    return f


@program("complex states between the layers")
def _(w):
    w.ways, w.call = CHAIN, lambda layer, x: layer(x)

    def f(net, x):
        real = x.real if x.is_complex() else x
        y = body(net, real)
        return y if net.number == 4 else torch.complex(y, 0.1 * real)

    return f


@program("a product with a sparse table that counts its uses")
def _(w):
    table = torch.eye(2 * w.width, dtype=w.dtype).roll(1, 0).to_sparse()

    def f(net, x):
        w.n += 1
        return x + net.b(torch.sparse.mm(few(w.n) * table, torch.tanh(net.a(x)).t()).t())

    return f


@program("a subclass that counts the functions that it meets")
def _(w):
    class Counted(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            w.n += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    def f(net, x):
        scale = few(w.n)
        h = net.a(x).as_subclass(Counted)
        return x + net.b(torch.tanh(scale * h).as_subclass(Tensor))

    return f


@program("a result without its auxiliary part")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: layer(x)[0]
    return lambda net, x: (body(net, x), None)


@program("a generator as the result")
def _(w):
    w.ways, w.call = ("budget", "lean"), lambda layer, x: sum(layer(x))

    def f(net, x):
        h = torch.tanh(net.a(x))
        yield x
        w.n += 1
        yield few(w.n) * net.b(h)

    return f


@program("views of the result written in place")
def _(w):
    def f(net, x):
        y = body(net, x)
        w.n += 1
        y[..., ::2].mul_(few(w.n))
        y[..., :3] += 0.1 * x[..., -3:]
        return y

    return f


@program("numbers that another thread puts into a queue")
def _(w):
    numbers = queue.Queue()
    w.pool = ThreadPoolExecutor(1)
    w.close = w.pool.shutdown
    count = itertools.count()

    def f(net, x):
        w.pool.submit(lambda: numbers.put(few(next(count)))).result()
        return body(net, x, numbers.get())

    w.told = lambda: repr(count)
    return f


@program("a generator seeded by the call's number")
def _(w):
    def f(net, x):
        w.n += 1
        generator = torch.Generator().manual_seed(w.n)
        return body(net, x, torch.rand((), generator=generator, dtype=x.dtype))

    return f


# What no second run repeats.


def unrepeatable(name: str, scale: Callable[[Any, Tensor, World], float]) -> None:
    def maker(w):
        w.unrepeatable = True
        return lambda net, x: scaled(net, x, scale(net, x, w))

    PROGRAMS[name] = maker


unrepeatable("the system's entropy", lambda net, x, w: few(os.urandom(1)[0]))
unrepeatable("a clock", lambda net, x, w: few(time.perf_counter_ns() // 1000))
unrepeatable("an address in memory", lambda net, x, w: few(x.data_ptr() >> 6))
unrepeatable("the identity of its input", lambda net, x, w: few(id(x) >> 4))
unrepeatable("the depth of the call stack", lambda net, x, w: few(len(inspect.stack(0))))
unrepeatable("the references to its input", lambda net, x, w: few(sys.getrefcount(x)))
unrepeatable("how often memory was collected", lambda net, x, w: few(gc.get_count()[0]))
unrepeatable("torch.seed", lambda net, x, w: few(torch.seed()))
unrepeatable("the hash of a new object", lambda net, x, w: few(hash(object())))
