"""Objects among the arguments of a layer, such as the cache of a decoder: a rerun finds what the
call found in them, and what the call left stays (DESIGN's journal)."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import retrograde as rg

D, LAYERS = 32, 6


@dataclass
class Slot:
    """The keys and values of one layer."""

    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def grow(self, k, v):
        old = (
            () if self.keys is None else (self.keys,),
            () if self.values is None else (self.values,),
        )
        self.keys, self.values = torch.cat((*old[0], k), 1), torch.cat((*old[1], v), 1)
        return self.keys, self.values


class Cache:
    """The slots of all layers, a count of its calls, and what layers append."""

    def __init__(self):
        self.slots, self.calls, self.notes = [], 0, {"norms": []}

    def slot(self, at):
        while len(self.slots) <= at:
            self.slots.append(Slot())
        return self.slots[at]


class Block(nn.Module):
    """Attends to all that the cache has, and counts."""

    def __init__(self, at):
        super().__init__()
        self.at, self.norm, self.drop = at, nn.LayerNorm(D), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if cache is not None:
            k, v = cache.slot(self.at).grow(k, v)
            cache.calls += 1
            cache.notes["norms"].append(x.detach().norm())
            q = q / cache.calls
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v))
        return x + self.drop(self.down(functional.gelu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, block=Block, layers=LAYERS):
        super().__init__()
        self.blocks = nn.ModuleList(block(at) for at in range(layers))

    def forward(self, x, cache=None):
        for block in self.blocks:
            x = block(x, cache=cache)
        return x


class Chunked(nn.Module):
    """Gives a decoder a sequence in chunks, which share a cache."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, None

    def forward(self, x):
        cache = Cache()
        self.last = [cache]
        return sum(self.inner(one, cache).square().mean() for one in x.chunk(3, 1))


def trained(model, x, passes=2):
    """Losses, gradients, and what the cache has at the end."""
    found = []
    for seed in range(passes):
        torch.manual_seed(seed)
        model.zero_grad()
        loss = model(x)
        cache = model.last[0]
        left = [t for slot in cache.slots for t in (slot.keys, slot.values)]
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found += [t.detach() for t in left] + cache.notes["norms"]
        found += [torch.tensor([t.requires_grad for t in left]), torch.tensor(cache.calls)]
        del cache, left
        model.last = None
    return found


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.quick(2)
@pytest.mark.parametrize("share", ["30%", "80%", "60%", "45%"])
def test_chunks_that_share_a_growing_cache(share):
    torch.manual_seed(0)
    model, x = Chunked(Decoder()), torch.randn(8, 48, D)
    plain = trained(copy.deepcopy(model), x)
    division = rg.budget(model, memory=share, sample=x)
    assert [*division.shares] == ["inner.blocks.0 … inner.blocks.5"]
    assert not division.refused
    assert same(trained(model, x), plain)


def test_the_cache_of_a_chunk_is_left_as_the_call_left_it():
    """The decoder has the budget, and the caller holds the cache."""
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(8, 48, D)
    plain = trained(Chunked(copy.deepcopy(model)), x)
    rg.budget(model, memory="40%", sample=(x[:, :16], Cache()))
    assert same(trained(Chunked(model), x), plain)


def test_a_budget_beside_a_cache_is_kept():
    torch.manual_seed(0)
    model, x = Decoder(layers=12), torch.randn(16, 64, D)

    def step(model):
        cache = Cache()
        loss = model(x, cache).square().mean()
        loss.backward()
        return cache

    step(model)
    division = rg.budget(model, memory="30%", sample=(x, Cache()))
    step(model)
    held = sum(t.nbytes for s in step(model).slots for t in (s.keys, s.values))
    peak = rg.measure(lambda: step(model)).peak_bytes
    weights = sum(p.nbytes for p in model.parameters())
    assert division.elsewhere_bytes == pytest.approx(held, rel=0.1)  # all but the last layer's
    assert peak - held - weights <= 1.02 * division.total_bytes, (peak, held, weights)


class Held:
    """An object that refers to itself, and has its tensor under two names."""

    def __init__(self, t):
        self.one, self.other, self.me = t, t, self


class Both(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, cache):
        one, other = cache
        factor = 2.0 if one is other and one.me is one and one.one is one.other else 0.5
        return x + torch.tanh(self.linear(x * one.one)) * factor


def test_one_object_given_twice_is_one_again():
    torch.manual_seed(0)
    model, x = Decoder(Both), torch.randn(4, 8, D)
    scale = torch.rand(D, requires_grad=True)

    def gradients(model):
        scale.grad, given = None, Held(scale * 2)
        model.zero_grad()
        model(x, (given, given)).sum().backward()
        return [scale.grad, *(p.grad for p in model.parameters())]

    plain = gradients(copy.deepcopy(model))
    rg.budget(model, memory="40%", sample=(x, (Held(scale * 2),) * 2))
    one = Held(scale * 2)
    rg.budget(model, memory="40%", sample=(x, (one, one)))
    assert same(gradients(model), plain)


class Locked:
    def __init__(self):
        self.lock, self.scale = threading.Lock(), 1.0


class Scaled(Both):
    def forward(self, x, cache):
        with cache.lock:
            return x + torch.tanh(self.linear(x)) * cache.scale


def test_an_object_of_which_no_copy_can_be_made_is_refused():
    model, x = Decoder(Scaled), torch.randn(4, 8, D)
    with pytest.raises(
        rg.NotExactError, match=r"given a Locked with a lock, .* no copy can be made"
    ):
        rg.budget(model, memory="40%", sample=(x, Locked()))


class Buffered(Block):
    """Writes its keys into memory that the cache has had from the start."""

    def forward(self, x, cache=None):
        k = self.qkv(self.norm(x))[..., :D]
        cache.table[self.at].copy_(k.detach())
        return x + self.down(functional.gelu(self.up(x))) * cache.table[self.at].mean()


class Table:
    def __init__(self):
        self.table = torch.zeros(LAYERS, 4, 8, D)


def test_writes_to_a_table_in_a_cache_are_exact_or_refused():
    torch.manual_seed(0)
    model, x = Decoder(Buffered), torch.randn(4, 8, D)

    def gradients(model):
        model.zero_grad()
        cache = Table()
        model(x, cache).sum().backward()
        return [cache.table, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = gradients(copy.deepcopy(model))
    try:
        rg.budget(model, memory="90%", sample=(x, Table()))
        found = gradients(model)
    except rg.CellError:
        return
    assert same(found, plain)


class Streaming(nn.Module):
    """A layer that keeps its last input, without a gradient, for the next chunk."""

    def __init__(self, _):
        super().__init__()
        self.up, self.down = nn.Linear(2 * D, 4 * D), nn.Linear(4 * D, D)
        self.tail = None

    def forward(self, x, cache=None):
        before = torch.zeros_like(x[:1]) if self.tail is None else self.tail
        both = torch.cat([torch.cat([before, x[:-1]]), x], -1)
        self.tail = x[-1:].detach()
        return x + self.down(torch.tanh(self.up(both)))


class Watched(Block):
    """A block that leaves what it computes in attributes, to be looked at."""

    def forward(self, x, cache=None):
        y = super().forward(x)
        self.seen, self.aux = y.detach(), y.square().mean()
        return y


def passes(model, x, chunks=3):
    """Gradients of passes over chunks in turn, whose losses are added."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        for block in model.blocks:
            block.tail = None
        loss = sum(model(chunk).square().mean() for chunk in x.chunk(chunks))
        (loss + sum(getattr(block, "aux", 0.0) for block in model.blocks)).backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found += [block.tail for block in model.blocks if block.tail is not None]
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("share", ["40%", "70%"])
@pytest.mark.parametrize("kind", [Streaming, Watched])
def test_a_state_or_a_loss_in_an_attribute(kind, share):
    torch.manual_seed(0)
    model, x = Decoder(kind), torch.randn(192, D)
    plain = passes(copy.deepcopy(model), x)
    division = rg.budget(model, memory=share, sample=x[:64])
    assert not division.refused
    assert same(passes(model, x), plain)


@pytest.mark.parametrize(("kind", "holds"), [(Streaming, True), (Watched, False)])
def test_only_what_the_next_call_reads_is_noted_before_a_call(kind, holds):
    model, x = Decoder(kind), torch.randn(64, D)
    rg.budget(model, memory="70%", sample=x)
    model(x)
    (row,) = {row for row, _ in model.blocks[0].__dict__["forward"].places}
    for known in row.plans.kinds._found.values():
        moving = known.result.units[0].surroundings.moving
        assert [slot.key for slot in moving] == (["tail"] if holds else [])
