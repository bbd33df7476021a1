"""``rg.budget`` on layers that a model calls itself, one after the other."""

import copy
import gc
import inspect
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.drawn_changes import read_changed
from retrograde.models.rows import call_sizes
from retrograde.models.rows.joint_plan import JointPlan
from retrograde.models.rows.rerun import RecomputedCall
from retrograde.models.rows.row_forward import RowForward
from retrograde.plan.calls import Part
from retrograde.units import format_bytes

WIDTH = 24
LOSS = 64  # bytes of a loss and of its gradient


class Block(nn.Module):
    """A block of a transformer in small: mixes positions under a mask, adds, and widens."""

    def __init__(self, width=WIDTH, dropout=0.0, inplace=False):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act, self.dropout = nn.ReLU(inplace=inplace), nn.Dropout(dropout)

    def forward(self, x, mask=None, *, scale=1.0, memory=None, cache=None):
        weights = x @ x.transpose(1, 2) / x.shape[-1]
        if mask is not None:
            weights = weights.masked_fill(mask, float("-inf"))
        y = x + self.mix(weights.softmax(-1) @ self.norm(x)) * scale
        if memory is not None:
            y = y + memory.mean(1, keepdim=True) * y
        return y + self.dropout(self.down(self.act(self.up(y))))


class Loop(nn.Module):
    """A model that calls its blocks in a loop of its own."""

    def __init__(self, depth=10, dropout=0.1, inplace=False, stop=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, dropout, inplace) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.stop, self.keeps, self.seen = stop, False, []

    def forward(self, x, memory=None):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.embed(x)
        self.seen = []
        for k, block in enumerate(self.blocks):
            if k == self.stop:
                break
            h = block(h, mask, scale=0.5, memory=memory)
            if self.keeps:
                self.seen.append(h)
        return self.norm(h)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


class Chained(nn.Module):
    """Layers in a loop."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Residual(nn.Module):
    """A block of a ResNet, its activation shared and in place."""

    def __init__(self, channels, wanted, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wanted, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(wanted), nn.BatchNorm2d(wanted)
        self.conv2 = nn.Conv2d(wanted, wanted, 3, 1, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(channels, wanted, 1, stride) if stride > 1 else None

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Stages(nn.Module):
    """Sequentials that are called one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(*(Residual(8, 8, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1), Residual(16, 16, 1))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x):
        x = self.conv(x)
        x = self.bn(x)
        x = self.relu(x)
        x = self.layer1(x)
        x = self.layer2(x)
        return self.fc(self.pool(x).flatten(1))


class Forked(nn.Module):
    """Two loops of blocks, one block between them, and a connection that skips it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, WIDTH)
        self.first, self.last = (nn.ModuleList(Block(WIDTH, 0.1) for _ in range(4)) for _ in "ab")
        self.middle = Block(WIDTH, 0.1)

    def forward(self, x):
        h = self.embed(x)
        for block in self.first:
            h = block(h)
        deep = self.middle(h[:, ::2] * 0.5).repeat_interleave(2, 1)
        h = h + deep
        for block in self.last:
            h = block(h)
        return h


def inputs(batch=16, length=12):
    torch.manual_seed(1)
    return torch.randn(batch, length, 6)


def images(batch=8):
    torch.manual_seed(1)
    return torch.randn(batch, 3, 16, 16)


def trained(model, *given, loss=None, passes=1):
    """All that one training step leaves behind."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    y = model(*given)
    value = y.square().mean() if loss is None else loss(model, y)
    for k in range(passes):
        value.backward(retain_graph=k + 1 < passes)
    found = {name: p.grad for name, p in model.named_parameters()}
    found |= {f"{name} (buffer)": b.clone() for name, b in model.named_buffers()}
    found |= {f"input {k}": t.grad for k, t in enumerate(given) if t.requires_grad}
    for t in given:
        t.grad = None
    return {"": y.detach().clone(), **{k: t.clone() for k, t in found.items() if t is not None}}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def working_bytes(model, *given):
    def call():
        torch.manual_seed(2)
        model(*given).sum().backward()

    call()
    model.zero_grad(set_to_none=True)
    found = rg.measure(call).working_bytes
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("memory", ["least", "30%", "50%", "70%", "100%"])
def test_rows_one_after_the_other_have_one_plan(memory):
    """What the later ones held is free when the earlier ones go back."""
    plain, model, x = Forked(), Forked(), inputs()
    least = least_of(model, x)
    division = rg.budget(model, least if memory == "least" else memory, x)
    assert [*division.shares] == ["embed … first.3", "middle", "last.0 … last.3"]
    shares = [*division.shares.values()]
    assert division.minimum_bytes == least < 0.8 * sum(share.minimum_bytes for share in shares)
    assert division.ordinary_bytes < sum(share.ordinary_bytes for share in shares)
    assert max(share.budget_bytes for share in shares) <= division.total_bytes
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    allowed = division.total_bytes + division.elsewhere_bytes + 3 * x.nbytes * WIDTH // 6
    assert working_bytes(model, x) <= allowed
    for other in (inputs(3), inputs(16, 6)):
        same(trained(model, other), trained(plain, other))
    if memory not in ("least", "30%"):
        same(trained(copy.deepcopy(model), x), trained(plain, x))


class Skipping(Forked):
    """Each block of the second loop is given the output of one of the first, too."""

    def forward(self, x):
        h, outputs = self.embed(x), []
        for block in self.first:
            h = block(h)
            outputs.append(h)
        h = self.middle(h)
        for block in self.last:
            h = block(h + 0.5 * outputs.pop())
        return h


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["least", "40%", "70%"])
def test_states_that_are_kept_for_later_count_until_their_blocks_go_back(memory):
    plain, model, x = Skipping(), Skipping(), inputs()
    division = rg.budget(model, least_of(model, x) if memory == "least" else memory, x)
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * x.nbytes * WIDTH // 6
    assert working_bytes(model, x) <= allowed


class Decoding(Forked):
    """The second loop is given the output of the first."""

    def forward(self, x):
        h = self.embed(x)
        for block in self.first:
            h = block(h)
        y = self.embed(x)
        for block in self.last:
            y = block(y, memory=h)
        return y


@pytest.mark.quick(3, every=4)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_what_a_later_row_is_given_counts_until_the_first_goes_back(share):
    """However the first row's last block is kept: by itself, or in a group."""
    plain, model, x = Decoding(), Decoding(), inputs(32, 6)
    least, most = least_of(model, x), rg.budget(Decoding(), "100%", x).ordinary_bytes
    division = rg.budget(model, least + int(share * (most - least)), x)
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    result = 4 * len(x) * x.shape[1] * WIDTH
    allowed = division.total_bytes + division.elsewhere_bytes + result + LOSS
    assert working_bytes(model, x) <= allowed


class Levels(nn.Module):
    """A U-Net whose rows are single blocks; some outputs wait for one that is called later."""

    def __init__(self, skips):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.skips = nn.Linear(6, WIDTH), skips
        self.blocks = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(5))

    def forward(self, x):
        h, kept = self.embed(x), []
        for k, blocks in enumerate(self.blocks):
            h = 1.5 * blocks[1](blocks[0](h))
            if k in self.skips:
                kept.append(h)
            if k > 2 and kept:
                h = h + kept.pop().flip(0)
        return h


@pytest.mark.quick(1, every=3)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("skips", [(), (0,), (0, 1)])
def test_outputs_of_rows_count_while_they_wait(skips, share):
    plain, model, x = Levels(skips), Levels(skips), inputs(8, 16)
    least, most = least_of(model, x), rg.budget(Levels(skips), "100%", x).ordinary_bytes
    division = rg.budget(model, least + int(share * (most - least)), x)
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    state = 4 * len(x) * x.shape[1] * WIDTH
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * state
    assert working_bytes(model, x) <= allowed
    assert most <= working_bytes(plain, x) + 3 * state


class Wide(nn.Module):
    """The output of its first block is joined to something wider, which the last one is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.down = nn.Linear(6, WIDTH), Block()
        self.below = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.Sequential(nn.Linear(9 * WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        h = self.down(self.embed(x))
        y = h * 0.5
        for block in self.below:
            y = block(y)
        return self.up(torch.cat([h, *[y] * 8], -1))


def test_a_gradient_that_waits_is_counted_with_all_of_its_memory():
    plain, model, x = Wide(), Wide(), inputs(32, 6)
    division = rg.budget(model, least_of(model, x), x)
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    state = 4 * len(x) * x.shape[1] * WIDTH
    told = division.total_bytes + division.elsewhere_bytes
    assert 9 * state < working_bytes(model, x) <= told + state + LOSS


class Level(nn.Module):
    """One level of a U-Net: the levels below it lie between its two blocks."""

    def __init__(self, below):
        super().__init__()
        self.down, self.below, self.up = Block(dropout=0.1), below, Block(dropout=0.1)

    def forward(self, x):
        return self.up(x + 0.5 * self.below(self.down(x)))


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_levels_within_one_another_are_opened(depth):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(5, 16, WIDTH)
    for _ in range(depth):
        model = Level(model)
    plain = copy.deepcopy(model)
    division = rg.budget(model, least_of(model, x), x)
    assert division.minimum_bytes < 0.45 * division.ordinary_bytes
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    outputs = 2 * x.nbytes
    assert working_bytes(model, x) <= division.total_bytes + division.elsewhere_bytes + outputs


class Masking(nn.Module):
    """Makes a mask that is larger than a state, and gives it to all its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0) for _ in range(6))

    def forward(self, x):
        mask = torch.zeros(2 * x.shape[1], len(x), len(x)).triu(1) - x.shape[2]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return x


def test_what_the_model_makes_for_all_its_blocks_is_told():
    model, x = Masking(), torch.randn(128, 2, 16)
    plain = copy.deepcopy(model)
    division = rg.budget(model, least_of(model, x), x)
    mask, states = 4 * 4 * 128 * 128, 2 * x.nbytes  # the first and the last
    assert mask <= division.elsewhere_bytes <= mask + states
    same(trained(model, x), trained(plain, x))
    assert working_bytes(model, x) <= division.total_bytes + division.elsewhere_bytes + 2**10


class Later(Forked):
    """Keeps something wide of its own, which nothing saves, while the second loop runs."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide

    def forward(self, x):
        h = self.embed(x)
        for block in self.first:
            h = block(h)
        kept, h = torch.cat([h + 1] * self.wide, -1), self.middle(h)
        for block in self.last:
            h = block(h)
        return h + kept.unflatten(-1, (self.wide, WIDTH)).sum(-2)


@pytest.mark.parametrize("memory", ["least", "60%"])
@pytest.mark.parametrize("wide", [1, 8, 40])
def test_what_the_model_keeps_for_later_is_told(wide, memory):
    plain, model, x = Later(wide), Later(wide), inputs()
    division = rg.budget(model, least_of(model, x) if memory == "least" else memory, x)
    state = x.nbytes * WIDTH // 6
    assert wide * state <= division.elsewhere_bytes <= (wide + 2) * state
    same(trained(model, x), trained(plain, x))
    same(trained(model, x), trained(plain, x))
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * state
    assert working_bytes(model, x) <= allowed


class Staged(nn.Module):
    """Two stages. The first one's output lives in a variable while the second runs."""

    def __init__(self):
        super().__init__()
        wide = 4 * WIDTH
        self.first = nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh())
        rest = [nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(9)]
        self.second = nn.Sequential(*rest, nn.Linear(wide, 1))

    def forward(self, x):
        h = self.first(x)
        return self.second(h)


class LastFirst(nn.Module):
    """A convolution on channels that come last, as behind a block of attention."""

    def __init__(self):
        super().__init__()
        self.mix, self.conv = nn.Linear(64, 64), nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x):
        x = self.mix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.conv(x).tanh()


class Biased(nn.Module):
    """Attention with a trained bias: without gradients, torch would take another kernel."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(32), nn.Linear(32, 96)
        self.bias = nn.Parameter(torch.randn(1, 2, 50, 50))

    def forward(self, x):
        parts = self.mix(self.norm(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, attn_mask=2 * self.bias)
        return x + mixed.transpose(1, 2).flatten(2)


class InTurn(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("memory", ["least", "80%"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Staged, (500, WIDTH)),
        (partial(InTurn, LastFirst), (2, 64, 6, 6)),
        (partial(InTurn, Biased), (4, 50, 32)),
    ],
    ids=["staged", "last first", "biased"],
)
def test_what_other_peoples_models_showed(make, shape, memory):
    """A state lives longer than it is used; a gradient is copied; kernels depend on gradients."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plain = copy.deepcopy(model)
    division = rg.budget(model, least_of(model, x) if memory == "least" else memory, x)
    same(trained(model, x), trained(plain, x))
    allowed = division.total_bytes + division.elsewhere_bytes
    assert working_bytes(model, x) <= allowed + 2 * plain(x).nbytes  # it and its gradient


class Paired(nn.Module):
    """An encoder and a decoder, whose inputs have lengths of their own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Loop(4), Loop(4)

    def forward(self, x, y):
        return self.decoder(y, self.encoder(x).mean(1, keepdim=True))


def test_a_batch_that_needs_more_is_refused_and_the_budget_is_divided_anew():
    plain, model = Loop(), Loop()
    rg.budget(model, least_of(model, inputs()), inputs())
    larger = inputs(length=40)
    with pytest.raises(rg.BudgetError):
        trained(model, larger)
    division = rg.budget(model, "30%", larger)
    same(trained(model, larger), trained(plain, larger))
    assert working_bytes(model, larger) <= division.peak_bytes + LOSS + larger.nbytes * WIDTH // 6


class Momentary(Loop):
    """Blocks, and something beside them that takes much for a moment and saves nothing."""

    def forward(self, x):
        y = super().forward(x)
        return y + y.detach().repeat(400, 1, 1).mean(0)


@pytest.mark.parametrize("memory", ["least", "60%"])
def test_what_a_pass_takes_is_measured(memory):
    """No budget covers what other layers take for a moment, so a pass on the sample tells it."""
    model, x = Momentary(), inputs()
    division = rg.budget(model, least_of(model, x) if memory == "least" else memory, x)
    peak = working_bytes(model, x)
    assert peak > division.total_bytes + division.elsewhere_bytes + 100 * x.nbytes
    assert division.peak_bytes <= peak <= division.peak_bytes + LOSS + x.nbytes * WIDTH // 6
    assert f"takes {format_bytes(division.peak_bytes)} in all" in str(division)


def test_the_pass_that_is_measured_leaves_no_trace():
    plain, model, x = Loop(), Loop(), inputs().requires_grad_()
    fired = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(fired.append)
        p.register_hook(fired.append)
    model.norm.register_full_backward_hook(lambda *_: fired.append(0))
    assert rg.budget(model, "50%", x).peak_bytes > 0
    assert fired == []
    assert x.grad is None
    assert all(p.grad is None for p in model.parameters())
    same(trained(model, x.detach()), trained(plain, x.detach()))


class Capturing(Loop):
    """Hooks its blocks in its first pass, and notes so, as transformers' models do."""

    def forward(self, x):
        if not getattr(self, "is_hooked", False):
            self.is_hooked = True
            for block in self.blocks:
                block.register_forward_hook(self.note)
        self.made = []
        return super().forward(x) + len(self.made)

    def note(self, module, given, result):
        self.made.append(None)


def test_hooks_of_a_first_pass_leave_no_trace():
    plain, model, x = Capturing(), Capturing(), inputs()
    rg.budget(model, "50%", x)
    for _ in range(2):
        same(trained(model, x), trained(plain, x))


class Never(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError


def test_a_model_that_cannot_go_back_on_its_sample_is_not_measured():
    model, x = Momentary(), inputs()
    model.register_forward_hook(lambda *given: Never.apply(given[-1]))
    division = rg.budget(model, "50%", x)
    assert division.peak_bytes == 0
    assert "in all" not in str(division)


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["least", "50%", "80%"])
def test_lengths_that_vary_beside_each_other(memory):
    """The first row's input does not tell the second's: each pass is right all the same."""
    plain, model = Paired(), Paired()
    pair = inputs(), inputs()
    division = rg.budget(model, least_of(model, pair) if memory == "least" else memory, pair)
    lengths = [(12, 12), (12, 6), (12, 12), (12, 6), (6, 6), (6, 12), (6, 6), (6, 3), (12, 6)]
    for x, y in [(inputs(length=a), inputs(length=b)) for a, b in lengths]:
        same(trained(model, x, y), trained(plain, x, y))
    allowed = division.total_bytes + division.elsewhere_bytes + 2**14
    for x, y in [(inputs(length=a), inputs(length=b)) for a, b in lengths]:
        assert working_bytes(model, x, y) <= allowed


def test_a_pass_that_needs_more_than_its_beginning_told_says_so():
    """The next ones are planned by it, or refused if the budget is too small for that."""
    plain, model = Paired(), Paired()
    pair = inputs(), inputs(length=4)
    division = rg.budget(model, "90%", pair)
    longer, too_long = (inputs(), inputs(length=24)), (inputs(), inputs(length=400))
    for given in (longer, too_long):
        with pytest.warns(UserWarning, match=r"layer decoder\.\S+ was given another kind of input"):
            same(trained(model, *given), trained(plain, *given))
        if given is longer:
            taken = working_bytes(model, *longer)
            assert taken <= division.total_bytes + division.elsewhere_bytes + 2**14
    with pytest.raises(rg.BudgetError, match="most of it for layer decoder") as refusal:
        trained(model, *too_long)
    same(trained(model, *pair), trained(plain, *pair))
    rg.budget(model, refusal.value.minimum_bytes, too_long)
    same(trained(model, *too_long), trained(plain, *too_long))


def test_the_least_that_is_named_for_another_kind_of_input_is_enough():
    """It is that of all rows, not of the first ones alone."""
    model, x = Levels((0,)), inputs()
    rg.budget(model, least_of(model, x), x)
    larger = inputs(length=24)
    with pytest.raises(rg.BudgetError) as refusal:
        trained(model, larger)
    assert least_of(model, larger) <= refusal.value.minimum_bytes


def test_a_pass_that_fails_between_two_rows_is_forgotten():
    class Failing(Forked):
        fails = False

        def forward(self, x):
            self.middle.register_forward_pre_hook(self.fail)
            return super().forward(x)

        def fail(self, *_):
            if self.fails:
                raise RuntimeError("stop")

    plain, model, x = Forked(), Failing(), inputs()
    rg.budget(model, "50%", x)
    for fails in (False, True, False, False):
        model.fails = fails
        if fails:
            with pytest.raises(RuntimeError, match="stop"):
                trained(model, x)
        else:
            same(trained(model, x), trained(plain, x))


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["40%", "70%"])
def test_blocks_of_two_loops_that_take_turns(memory):
    class Turns(Forked):
        def forward(self, x):
            h, g = self.embed(x), self.embed(x) * 0.5
            for first, last in zip(self.first, self.last, strict=True):
                h, g = first(h), last(g)
            return h + g

    plain, model, x = Turns(), Turns(), inputs()
    division = rg.budget(model, memory, x)
    assert len(division.shares) == 8
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    allowed = division.total_bytes + division.elsewhere_bytes + 4 * x.nbytes * WIDTH // 6
    assert working_bytes(model, x) <= allowed


def least_of(model, sample):
    with pytest.raises(rg.BudgetError) as caught:
        rg.budget(model, 1, sample)
    return caught.value.minimum_bytes


def called(model):
    return [
        name for name, m in model.named_modules() if isinstance(vars(m).get("forward"), RowForward)
    ]


@pytest.mark.quick(1, every=4)
@pytest.mark.parametrize("memory", ["30%", "70%", "50%", "20%", "least"])
@pytest.mark.parametrize("inplace", [False, True])
def test_blocks_in_a_loop_have_one_budget(memory, inplace):
    x = inputs()
    theirs = Loop(inplace=inplace)
    ours = copy.deepcopy(theirs)
    if inplace and memory == "20%":
        memory = "28%"
    if memory == "least":
        memory = least_of(ours, x)
        with pytest.raises(rg.BudgetError):
            rg.budget(ours, memory - 1, x)
        assert not called(ours)
    division = rg.budget(ours, memory, x)
    (name,) = division.shares
    assert name == "embed … norm"
    assert name in str(division)
    for _ in range(2):
        same(trained(ours, x), trained(theirs, x))
    ours.train(), theirs.train()
    beyond = 4 * 16 * 12 * WIDTH * 4  # the embedding, the output, and their gradients
    assert working_bytes(ours, x) <= division.total_bytes + beyond
    assert division.total_bytes + beyond < working_bytes(theirs, x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["60%", "45%", "least"])
def test_sequentials_one_after_the_other_are_one_chain(memory):
    x = images()
    theirs = Stages()
    ours = copy.deepcopy(theirs)
    memory = least_of(ours, x) if memory == "least" else memory
    division = rg.budget(ours, memory, x)
    assert [*division.shares] == ["conv … pool"]
    same(trained(ours, x), trained(theirs, x))
    same(trained(ours, x), trained(theirs, x))
    assert working_bytes(ours, x) <= division.total_bytes + 2**14
    assert working_bytes(ours, x) < working_bytes(theirs, x)


def test_a_state_that_the_model_uses_elsewhere_has_its_gradient():
    def loss(model, y):
        return y.square().mean() + model.seen[2].square().mean() + model.seen[6].exp().mean()

    x = inputs().double()
    ours, theirs = Loop().double(), Loop().double()
    ours.keeps = theirs.keeps = True
    rg.budget(ours, "30%", x)
    same(trained(ours, x, loss=loss), trained(theirs, x, loss=loss))


def test_a_loss_of_the_middle_goes_back_from_there():
    def loss(model, y):
        return model.seen[4].square().mean()

    x = inputs()
    ours, theirs = Loop(), Loop()
    ours.keeps = theirs.keeps = True
    rg.budget(ours, "20%", x)
    same(trained(ours, x, loss=loss), trained(theirs, x, loss=loss))
    ours.stop = theirs.stop = 5  # blocks that are never called
    same(trained(ours, x), trained(theirs, x))
    ours.stop = theirs.stop = None
    same(trained(ours, x), trained(theirs, x))


def test_going_back_twice():
    x = inputs()
    ours, theirs = Loop(), Loop()
    rg.budget(ours, "20%", x)
    same(trained(ours, x, passes=3), trained(theirs, x, passes=3))


def test_going_back_from_the_middle_and_then_from_the_end():
    x = inputs()
    ours, theirs = Loop(), Loop()
    ours.keeps = theirs.keeps = True
    rg.budget(ours, least_of(ours, x), x)

    def grads(model):
        model.zero_grad()
        torch.manual_seed(2)
        y = model(x)
        (model.seen[3].sum() * 2).backward(retain_graph=True)
        y.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    same(grads(ours), grads(theirs))


def test_two_passes_at_once():
    x = inputs()
    ours, theirs = Loop(dropout=0.0), Loop(dropout=0.0)
    rg.budget(ours, "20%", x)

    def both(model):
        model.zero_grad()
        (model(x).square().mean() + 2 * model(x + 1).sum()).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    same(both(ours), both(theirs))


def test_tensors_that_want_a_gradient_may_be_given_besides_the_state():
    x, memory = inputs(), torch.randn(16, 5, WIDTH, requires_grad=True)
    ours, theirs = Loop(), Loop()
    rg.budget(ours, "30%", (x, memory))
    same(trained(ours, x, memory), trained(theirs, x, memory))
    encoder = nn.Linear(WIDTH, WIDTH)  # and they may have been computed

    def grads(model):
        model.zero_grad()
        encoder.zero_grad()
        torch.manual_seed(2)
        model(x, encoder(memory)).square().mean().backward()
        return {"": encoder.weight.grad, **{n: p.grad for n, p in model.named_parameters()}}

    theirs_found = {k: t.clone() for k, t in grads(theirs).items()}
    same(grads(ours), theirs_found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(4, 12), (16, 5), (18, 13)])
def test_inputs_of_another_shape_are_planned_anew(shape):
    ours, theirs = Loop(), Loop()
    rg.budget(ours, "40%", inputs())
    other = inputs(*shape)
    same(trained(ours, other), trained(theirs, other))


@pytest.mark.parametrize("alone", [False, True])
def test_the_layers_of_a_sequential_of_ours_share_the_models_budget(alone):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(6)]
    net = rg.Sequential(*layers, memory="90%")
    model = net if alone else nn.Sequential(nn.Linear(32, 32), net, nn.Linear(32, 4))
    x, plain = torch.randn(256, 32), copy.deepcopy(model)
    with pytest.raises(rg.BudgetError):
        rg.budget(model, 1, x)
    assert net.memory == "90%"
    division = rg.budget(model, "60%", x)
    assert net.memory is None
    assert [*division.shares] == ["0.0 … 5.2" if alone else "0 … 2"]
    same(trained(model, x), trained(plain, x))
    rg.budget(model, None)
    same(trained(model, x), trained(plain, x))


def test_an_input_that_is_too_large_for_the_budget_is_refused():
    x = inputs()
    model = Loop(depth=3)
    rg.budget(model, "75%", x)
    with pytest.raises(rg.BudgetError):
        model(inputs(32, 30))


def test_without_gradients_and_in_evaluation():
    x = inputs()
    ours, theirs = Loop(), Loop()
    rg.budget(ours, "30%", x)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), theirs.eval()(x))
    same(trained(ours, x), trained(theirs, x))
    same(trained(ours.train(), x), trained(theirs.train(), x))


def test_a_dropout_between_blocks_that_does_nothing_in_evaluation():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.parts = nn.ModuleList(
                layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh())
            )

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    x = torch.randn(512, 16)
    ours, theirs = Model(), Model()
    rg.budget(ours, "60%", x)
    same(trained(ours, x), trained(theirs, x))
    same(trained(ours.eval(), x), trained(theirs.eval(), x))


def test_frozen_layers_come_first():
    x = inputs()
    ours, theirs = Loop(), Loop()
    for model in (ours, theirs):
        model.embed.requires_grad_(False)
        model.blocks[:3].requires_grad_(False)
    rg.budget(ours, "40%", x)
    same(trained(ours, x), trained(theirs, x))
    for model in (ours, theirs):
        model.requires_grad_(True)
    same(trained(ours, x), trained(theirs, x))


def test_frozen_layers_before_the_others_take_part_in_a_group():
    x = inputs()
    ours, theirs = Loop(dropout=0.0), Loop(dropout=0.0)
    for model in (ours, theirs):
        model.embed.requires_grad_(False)
        model.blocks[:3].requires_grad_(False)
    rg.budget(ours, 10**9, x)
    row, _ = vars(ours.embed)["forward"].places[0]
    (known,) = (found.result for found in row.plans.kinds._found.values())
    one = [Part(k, k + 1, 2) for k in range(len(known.sizes))]
    known.plans[row.joint_plan.memory] = (Part(0, len(one), 0, tuple(one)),)
    same(trained(ours, x), trained(theirs, x))


def test_what_stays_as_it_was():
    x = inputs()
    model, before = Loop(), Loop()
    division = rg.budget(model, "40%", x)
    assert division.model is model
    assert all(type(m) is Block for m in model.blocks)
    assert model.state_dict().keys() == before.state_dict().keys()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert called(again) == called(model)
        same(trained(again, x), trained(before, x))
        chain, _ = vars(again.blocks[0])["forward"].places[0]
        assert chain.calls[1][1] is again.blocks[0]
    rg.budget(model, "70%", x)  # another one takes the place of the first
    assert len(vars(model.blocks[0])["forward"].places) == 1
    same(trained(model, x), trained(before, x))
    turns = [vars(m)["forward"] for m in model.blocks]
    with pytest.raises(rg.BudgetError):
        rg.budget(model, 1, x)
    assert [vars(m)["forward"] for m in model.blocks] == turns


@pytest.mark.quick(1)
@pytest.mark.parametrize("memory", ["60%", "least"])
@pytest.mark.parametrize("in_sequence", [False, True])
def test_the_first_step_in_training_measures_nothing_again(in_sequence, memory, monkeypatch):
    x = torch.randn(16, 12, WIDTH)
    model = nn.Sequential(*(Block() for _ in range(6))) if in_sequence else Loop()
    x = x if in_sequence else inputs()
    division = rg.budget(model, least_of(model, x) if memory == "least" else memory, x)
    assert division.total_bytes < division.ordinary_bytes
    for name in ("layer_run.try_call", "call_sizes.Plans.measure"):
        monkeypatch.setattr(f"retrograde.models.rows.{name}", lambda *_: pytest.fail("again"))
    trained(model, x)


class Hungry(torch.autograd.Function):
    """Doubles; the gradient passes through a few tensors of its size, or many."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        several = [gradient * 2 for _ in range(ctx.count)]
        return sum(several) / len(several), None


class Fed(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.net, self.count = nn.Linear(WIDTH, WIDTH), count

    def forward(self, x):
        return Hungry.apply(torch.tanh(self.net(x)), self.count)


def test_layers_of_a_class_are_measured_once_if_they_do_the_same(monkeypatch):
    counts, measured = [1, 1, 1, 1, 40, 1, 1, 40, 1, 1], []
    original = call_sizes.sizes_of
    monkeypatch.setattr(
        call_sizes, "sizes_of", lambda one, *a: measured.append(one.unit.name) or original(one, *a)
    )
    x = torch.randn(300, WIDTH)
    theirs = Chained([Fed(count) for count in counts])
    ours = copy.deepcopy(theirs)
    least = least_of(ours, x)
    assert measured == ["layers.0", "layers.1", "layers.4"]
    assert least > 40 * x.nbytes
    rg.budget(ours, least, x)
    same(trained(ours, x), trained(theirs, x))
    assert working_bytes(ours, x) <= least + 16  # and the loss with its gradient


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [Loop, Stages])
def test_nothing_is_left_behind(kind):
    def alive():
        gc.collect()
        found = gc.get_objects()
        return sum(type(o) is torch.Tensor for o in found), sum(
            type(o) is RecomputedCall for o in found
        )

    others = alive()[1]  # that an earlier test still holds
    given = (images(),) if kind is Stages else (inputs(), torch.randn(16, 3, WIDTH))
    given[-1].requires_grad_()
    model = kind()
    rg.budget(model, least_of(model, given), given)
    trained(model, *given)
    before = alive()
    assert before[1] <= others
    for _ in range(3):
        trained(model, *given)
        model(*given)  # a graph that nobody goes through
    assert alive() == before


def test_hooks_of_a_layer_are_called_once():
    x = inputs()
    model = Loop()
    rg.budget(model, "20%", x)
    calls = []
    model.blocks[3].register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[3].register_full_backward_hook(lambda *_: calls.append("backward"))
    trained(model, x)
    assert calls == ["forward", "backward"]


def test_autocast_around_some_of_the_blocks():
    class Mixed(Loop):
        def forward(self, x):
            h = self.embed(x)
            for k, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=k % 3 == 1):
                    h = block(h)
            return self.norm(h)

    x = inputs()
    ours, theirs = Mixed(), Mixed()
    rg.budget(ours, "30%", x)
    same(trained(ours, x), trained(theirs, x))


def bfloat16_gradients(model, x):
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_the_casts_of_all_weights_are_not_held_at_once():
    """Autocast remembers the cast of every weight until it ends, or takes four times the budget."""
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12))
    theirs, x = Chained(blocks), torch.randn(16, 256)
    ours = copy.deepcopy(theirs)
    with torch.autocast("cpu", torch.bfloat16):
        division = rg.budget(ours, "25%", x)

    same(bfloat16_gradients(ours, x), bfloat16_gradients(theirs, x))
    ours.zero_grad(set_to_none=True)
    found = rg.measure(lambda: bfloat16_gradients(ours, x)).working_bytes
    assert found <= division.total_bytes + division.elsewhere_bytes + 2**14


def test_casts_of_an_earlier_pass_do_not_hide_those_of_a_pass_that_is_measured():
    """The last layer is in no row, so autocast remembers the cast of its weight."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
    model, x = (
        Chained([Chained(blocks), nn.Flatten(0), nn.Linear(64 * 64, 64)]),
        torch.randn(64, 64),
    )
    with torch.autocast("cpu", torch.bfloat16):
        division = rg.budget(model, "60%", x)

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).sum()
        y.backward()

    output = 2 * 64  # bytes; a pass on the sample hands it to the caller, and the loss lets it go
    assert abs(rg.measure(call).working_bytes - division.peak_bytes) <= LOSS + output


def test_casts_of_biases_are_not_held_beside_frozen_weights():
    """Nothing but autocast's cache would hold them; torch's own pass is not what runs at 100 %."""
    net = rg.Sequential(*(nn.Linear(512, 512) for _ in range(24)), memory="100%")
    for name, p in net.named_parameters():
        p.requires_grad_("bias" in name)
    theirs, x = nn.Sequential(*copy.deepcopy(net)), torch.randn(2, 512)
    with torch.autocast("cpu", torch.bfloat16):
        budget = net.fit(x).budget_bytes
    same(*(bfloat16_gradients(one, x) for one in (net, theirs)))

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.backward(gradient)
        return y.detach()

    gradient = torch.ones(2, 512, dtype=torch.bfloat16)
    net.zero_grad(set_to_none=True)
    assert rg.measure(call).working_bytes <= budget + 64


def test_gradients_of_a_weight_of_two_layers_are_added_in_its_type():
    theirs = Chained(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9))
    theirs.layers[6][0].weight = theirs.layers[2][0].weight
    ours, x = copy.deepcopy(theirs), torch.randn(512, 64)
    with torch.autocast("cpu", torch.bfloat16):
        rg.budget(ours, "60%", x)
    same(bfloat16_gradients(ours, x), bfloat16_gradients(theirs, x))


@pytest.mark.parametrize("shared", [True, False])
def test_a_weight_of_two_layers_may_be_exchanged(shared):
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)]
    layers[6] = layers[2] if shared else layers[6]
    layers[6][0].weight = layers[2][0].weight
    theirs, x = Chained(layers), torch.randn(512, 64)
    ours = copy.deepcopy(theirs)
    with torch.autocast("cpu", torch.bfloat16):
        rg.budget(ours, "60%", x)
    for one in (ours, theirs):
        state = {name: 0.9 * value for name, value in one.state_dict().items()}
        one.load_state_dict(state, assign=True)
        one.layers[6][0].weight = one.layers[2][0].weight
    same(bfloat16_gradients(ours, x), bfloat16_gradients(theirs, x))


def test_a_parameter_that_changes_in_between_is_noticed():
    x = inputs()
    model = Loop()
    rg.budget(model, "20%", x)
    y = model(x).sum()
    with torch.no_grad():
        model.blocks[0].mix.weight.add_(1)
    with pytest.raises(rg.RetrogradeError, match=r"layer blocks\.0 has been modified"):
        y.backward()


def test_a_parameter_that_was_exchanged_and_changes_in_between_is_noticed():
    x = inputs()
    model, theirs = Loop(), Loop()
    rg.budget(model, "20%", x)
    for one in (model, theirs):
        one.blocks[0].mix.weight = nn.Parameter(one.blocks[0].mix.weight.detach() * 2)
    same(trained(model, x), trained(theirs, x))
    y = model(x).sum()
    with torch.no_grad():
        model.blocks[0].mix.weight.add_(1)
    with pytest.raises(rg.RetrogradeError, match=r"layer blocks\.0 has been modified"):
        y.backward()


@pytest.mark.parametrize("k", range(10))
def test_a_state_that_is_written_to_is_never_used_in_silence(k):
    x = inputs()
    ours, theirs = Loop(dropout=0.0), Loop(dropout=0.0)
    rg.budget(ours, "20%", x)
    ours.keeps = True
    y = ours(x).square().mean()
    ours.seen[k].detach().mul_(2)
    said = None
    try:
        y.backward()
    except (rg.RetrogradeError, RuntimeError) as error:
        said = str(error)
    if said is not None:
        assert "in place" in said or "inplace" in said
        return
    found = {name: p.grad for name, p in ours.named_parameters()}
    other = trained(theirs, x)
    same(found, {name: other[name] for name in found})


def test_a_layer_out_of_turn_is_run_as_it_is_and_said_to():
    class Skips(Loop):
        skips = False

        def forward(self, x):
            h = self.embed(x)
            for k, block in enumerate(self.blocks):
                h = h + 1 if self.skips and k == 4 else block(h)
            return self.norm(h)

    x = inputs()
    ours, theirs = Skips(), Skips()
    rg.budget(ours, "30%", x)
    ours.skips = theirs.skips = True
    with pytest.warns(UserWarning, match=r"layer blocks\.5 was not called on the output"):
        found = trained(ours, x)
    same(found, trained(theirs, x))
    with pytest.warns(UserWarning, match="beyond the budget"):  # at every pass
        trained(ours, x)


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, pickled], ids=["", "deep", "saved"])
@pytest.mark.parametrize("k", [0, 3, 6, None])
def test_an_exchanged_or_added_layer_is_told(k, again, recwarn):
    """What runs in its place is beyond the budget, which nobody would notice otherwise."""
    model, x = Loop(), inputs()
    rg.budget(model, "40%", x)
    model = again(model)
    trained(model, x)
    assert not recwarn
    plain = Loop()
    if k is None:
        model.blocks = copy.deepcopy(model.blocks)
    elif k == len(model.blocks):
        for one in (model, plain):
            one.blocks.append(copy.deepcopy(one.blocks[0]))
    else:
        model.blocks[k] = copy.deepcopy(model.blocks[k])
    name = "blocks" if k is None else f"blocks.{k}"
    with pytest.warns(UserWarning, match=rf"layer {name} was not there when"):
        same(trained(model, x), trained(plain, x))
    rg.budget(model, "40%", x)
    recwarn.clear()
    same(trained(model, x), trained(plain, x))
    assert not recwarn


@pytest.mark.parametrize("k", [2, 6])
def test_an_exchanged_or_added_chain_of_a_list_is_told_once(k, recwarn):
    def chain():
        return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    class Chains(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(chain() for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, x = Chains(), torch.randn(500, 8)
    rg.budget(model, "60%", x)
    model.loss = nn.MSELoss()  # not in the place of a layer, nor beside layers in a list
    model(x).sum().backward()
    assert not recwarn
    model.blocks = nn.ModuleList(chain() if n == k else one for n, one in enumerate(model.blocks))
    if k == len(model.blocks):
        model.blocks.append(chain())
    model(x).sum().backward()
    told = [str(one.message) for one in recwarn]
    assert [f"layer blocks.{k} was not" in one for one in told if "was not there" in one] == [True]


class Reading(nn.Module):
    """A few recurrent modules one after the other."""

    def __init__(self):
        super().__init__()
        self.reads, self.head = nn.ModuleList([nn.GRU(8, 8), nn.LSTM(8, 8)]), nn.Linear(8, 2)

    def forward(self, x):
        for read in self.reads:
            x, _ = read(x)
        return self.head(x)


@pytest.mark.parametrize("again", [lambda m: m, copy.deepcopy, pickled], ids=["", "deep", "saved"])
def test_an_exchanged_recurrent_module_is_told(again, recwarn):
    model, x = Reading(), torch.randn(60, 2, 8)
    rg.budget(model, "30%", x)
    model = again(model)
    model(x).sum().backward()
    model.reads[0] = rg.GRU(8, 8, memory="20%")  # has a budget of its own
    model(x).sum().backward()
    assert not recwarn
    model.reads[1] = nn.LSTM(8, 8)
    with pytest.warns(UserWarning, match=r"layer reads.1 was not there when"):
        model(x).sum().backward()
    rg.budget(model, None)
    recwarn.clear()
    model.reads[0] = nn.GRU(8, 8)
    model(x).sum().backward()
    assert not recwarn


def test_what_cannot_be_run_again_is_named():
    class Cached(Loop):
        def forward(self, x):
            cache, h = {"seen": object()}, self.embed(x)
            for block in self.blocks:
                h = block(h, cache=cache)
            return self.norm(h)

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x, cache):
            return (x @ self.weight).tanh()

    model = Cached()
    model.blocks = nn.ModuleList(Opaque() for _ in range(6))
    model.embed = model.norm = nn.Identity()
    x = torch.randn(9, WIDTH)
    with pytest.raises(
        rg.CellError, match=r"nothing to budget \(blocks\.0 is given a object.*more"
    ):
        rg.budget(model, "90%", x)
    both = nn.Sequential(Cached(), nn.LSTM(WIDTH, 8))
    division = rg.budget(both, "60%", inputs())
    assert division.refused["0.blocks.0"].startswith("is given a object, which it may change")
    assert "left as it was: 0.blocks.0 is given a object" in str(division)
    assert "0.blocks.0.up … 0.blocks.0.dropout" in division.shares  # what is within one


def test_a_model_that_needs_gradients_to_run_is_told_why_it_has_no_rows():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return next(t for t in [x] if t.requires_grad)

    with pytest.raises(rg.CellError, match=r"\(Picks raises without gradients: StopIteration"):
        rg.budget(Picks(), "90%", torch.randn(9, WIDTH))


class Listed(nn.Module):
    """Layers that are given a list, which the model or they fill with something else."""

    def __init__(self, appends):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ListedLayer(appends) for _ in range(6))
        self.appends = appends

    def forward(self, x):
        before = [x.detach()]
        for layer in self.layers:
            x = layer(x, before)
        before[0] = torch.zeros(())
        return x


class ListedLayer(nn.Module):
    def __init__(self, appends):
        super().__init__()
        self.one, self.two, self.appends = nn.Linear(12, 48), nn.Linear(48, 12), appends

    def forward(self, x, before):
        y = self.two(self.one(x).tanh()) + sum(before)
        if self.appends:
            before.append(y.detach())
        return y


def test_a_list_that_the_model_changes_is_given_again_as_it_was():
    x = torch.randn(256, 12)
    ours, theirs = Listed(appends=False), Listed(appends=False)
    rg.budget(ours, "60%", x)
    assert called(ours)
    same(trained(ours, x), trained(theirs, x))


def test_a_layer_that_fills_a_list_is_left_as_it_is():
    model = nn.Sequential(Listed(appends=True), nn.LSTM(12, 8))
    division = rg.budget(model, "50%", torch.randn(32, 12))
    assert "changes a list or a dict" in division.refused["0.layers.0"]
    assert not any("layers" in name for name in division.shares)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shapes", [6, 1])
def test_threads_share_a_row(shapes):
    ours, theirs = Loop(dropout=0.0), Loop(dropout=0.0)
    rg.budget(ours, "40%", inputs())
    given = [inputs(4 + k % shapes, 6 + k % shapes % 3) for k in range(6)]

    def gradient(model, x):
        return torch.autograd.grad(model(x).square().mean(), [*model.parameters()])

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda x: gradient(ours, x), given)]
    for x, mine in zip(given, found, strict=True):
        assert all(map(torch.equal, mine, gradient(theirs, x)))


def test_second_derivatives_are_those_of_the_ordinary_model():
    x = inputs().double()
    ours, theirs = Loop(dropout=0.0).double(), Loop(dropout=0.0).double()
    rg.budget(ours, "30%", x)

    def second(model):
        z = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), z.grad, *(p.grad for p in model.parameters())]

    with pytest.warns(UserWarning, match="the budget does not cover it"):
        found = second(ours)
    for mine, other in zip(found, second(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)


class Drawn(nn.Module):
    """Layers drawn at random, with shortcuts around some."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(draw.randrange(1000))
        self.layers, self.shortcuts = nn.ModuleList(), []
        width = 12
        for _ in range(draw.randrange(3, 12)):
            after = draw.choice([8, 12, 20])
            kind = draw.choice(["linear", "relu", "norm", "sequential", "block", "dropout"])
            layer = {
                "linear": lambda a=width, b=after: nn.Linear(a, b),
                "relu": lambda: nn.ReLU(inplace=draw.random() < 0.5),
                "norm": lambda a=width: nn.LayerNorm(a),
                "sequential": lambda a=width, b=after: nn.Sequential(nn.Linear(a, b), nn.Tanh()),
                "block": lambda a=width: Block(a, 0.2, inplace=True),
                "dropout": lambda: nn.Dropout(draw.choice([0.0, 0.3])),
            }[kind]()
            self.layers.append(layer)
            self.shortcuts.append(kind in ("block", "norm") and draw.random() < 0.2)
            width = after if kind in ("linear", "sequential") else width

    def forward(self, x):
        for layer, shortcut in zip(self.layers, self.shortcuts, strict=True):
            x = x + layer(x) if shortcut else layer(x)
        return x


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.quick(1, every=20)
def test_models_drawn_at_random(seed):
    draw = random.Random(seed)
    theirs = Drawn(draw)
    x = torch.randn(draw.choice([3, 16]), draw.choice([2, 9]), 12)
    ours = copy.deepcopy(theirs)
    try:
        trained(copy.deepcopy(theirs), x)
        least = least_of(ours, x)
    except rg.CellError:
        pytest.skip("nothing to budget")
    except RuntimeError:
        pytest.skip("torch refuses two activations in place")
    memory = draw.choice([least, 2 * least, "100%"])
    division = rg.budget(ours, memory, x)
    for _ in range(2):
        same(trained(ours, x), trained(theirs, x))
    held = sum(share.ordinary_bytes for share in division.shares.values())
    rest = max(0, working_bytes(theirs, x) - held)
    states = 4 * x.shape[0] * x.shape[1] * 20 * 4
    assert working_bytes(ours, x) <= division.total_bytes + rest + states


class Biased(nn.Module):
    """A block that hands on more than one tensor, as those of T5: a bias, and what nobody reads."""

    def __init__(self, first=False):
        super().__init__()
        self.first, self.block = first, Block()
        self.table = nn.Parameter(torch.randn(WIDTH)) if first else None

    def forward(self, x, bias=None):
        if self.first:
            bias = self.table * torch.ones_like(x)
        y = self.block(x + bias)
        return y, bias, y.exp()


class Handing(nn.Module):
    """``by_result``: each block is given the bias that the one before returned."""

    def __init__(self, by_result):
        super().__init__()
        self.blocks = nn.ModuleList(Biased(first=k == 0) for k in range(8))
        self.by_result = by_result

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, found, _ = block(x, bias)
            bias = found if self.by_result or bias is None else bias
        return x


@pytest.mark.quick(2)
@pytest.mark.parametrize("by_result", [True, False])
@pytest.mark.parametrize("memory", ["70%", "50%", "least"])
def test_blocks_that_return_several_tensors(by_result, memory):
    torch.manual_seed(0)
    model, x = Handing(by_result), torch.randn(16, 12, WIDTH)
    plain = copy.deepcopy(model)
    memory = least_of(model, x) if memory == "least" else memory
    division = rg.budget(model, memory, x)
    assert [*division.shares] == ["blocks.0 … blocks.7"]
    assert not division.refused
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    y, seed = model(x), torch.ones_like(x)
    del y

    def call():
        y = model(x)
        return [*torch.autograd.grad(y, [*model.parameters()], seed), y.detach()]

    call()
    shared = x.nbytes if not by_result else 0  # a gradient that waits for all who read the bias
    assert (
        rg.measure(call).working_bytes <= division.total_bytes + division.elsewhere_bytes + shared
    )


class Noting(Block):
    """Notes the type of what it is given, and reads it, as routers of experts do."""

    def forward(self, x, mask=None, **more):
        self.given = x.dtype
        return super().forward(x, mask, **more).to(self.given)


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_layer_may_make_an_attribute_in_its_first_call(share):
    model, x = Loop(dropout=0.0), inputs()
    model.blocks = nn.ModuleList(Noting(WIDTH, 0.1) for _ in range(6))
    plain = copy.deepcopy(model)
    least = least_of(model, x)
    ordinary = rg.budget(model, "100%", x).ordinary_bytes
    rg.budget(model, round(least + share * (ordinary - least)), x)
    assert not hasattr(model.blocks[0], "given")
    for _ in range(2):
        same(trained(model, x), trained(plain, x))
    assert model.blocks[0].given is torch.float32


class Aside(nn.Module):
    """A block that also returns a number for each row, by way of a wide layer."""

    def __init__(self):
        super().__init__()
        self.on, self.up, self.out = nn.Linear(32, 32), nn.Linear(32, 128), nn.Linear(128, 1)

    def forward(self, x):
        h = torch.tanh(self.on(x))
        return h, self.out(torch.sigmoid(self.up(h).tanh()))


class WithAsides(nn.Module):
    """Blocks in a loop, and what they return besides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Aside() for _ in range(16))

    def forward(self, x):
        asides = []
        for block in self.blocks:
            x, aside = block(x)
            asides.append(aside)
        return x, asides


@pytest.mark.parametrize("reads", [False, True])
def test_what_a_loss_does_not_read_of_a_dropped_call_is_let_go(reads):
    model, x = WithAsides(), torch.randn(64, 32)

    def step():
        y, asides = model(x)
        (y.sum() + (sum(aside.sum() for aside in asides) if reads else 0)).backward()
        return sum(t.nbytes for t in (y, *asides))

    total = rg.budget(model, least_of(model, x), x).total_bytes
    step()
    model.zero_grad()
    found = rg.measure(step)
    assert found.working_bytes <= total + found.value + LOSS


class Mapping(Loop):
    """Makes a mask by a map over positions, as models of transformers do."""

    def forward(self, x):
        at = torch.arange(x.shape[1])
        later = torch.vmap(torch.vmap(lambda i, j: j > i, (None, 0)), (0, None))(at, at)
        scale = torch.vmap(lambda row: row.exp().mean())(x)
        return super().forward(x, scale[:, None, None] * later.any().float().expand(1, 1, WIDTH))


def test_a_model_may_map_a_function_beside_its_layers():
    model, x = Mapping(), inputs()
    plain = copy.deepcopy(model)
    assert [*rg.budget(model, "50%", x).shares] == ["embed … norm"]
    same(trained(model, x), trained(plain, x))


class Reusing(Loop):
    """Calls one dropout before its blocks and after them, as T5 does."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(super().forward(self.drop(x)))


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_module_that_is_called_twice_in_a_row_is_two_calls(share):
    model, x = Reusing(), inputs()
    plain, least = copy.deepcopy(model), least_of(model, x)
    division = rg.budget(model, "100%", x)
    total = round(least + share * (division.ordinary_bytes - least))
    assert [*rg.budget(model, total, x).shares] == ["drop … drop"]
    same(trained(model, x), trained(plain, x))
    assert working_bytes(model, x) <= total + division.elsewhere_bytes + 3 * LOSS


class Tied(nn.Module):
    """Blocks, and a head with the weights of the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))
        self.head = nn.Linear(64, 50)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x.to(torch.int64))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def looped(count):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return Chained([wide] * count)


@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("share", [0, 0.5, 1])
@pytest.mark.parametrize("make", [lambda: looped(2), lambda: looped(6), Tied], ids=["2", "6", "w"])
@pytest.mark.quick(1, every=6)
def test_gradients_that_several_calls_add_to_one_another_are_counted(make, share, rows):
    model = make()
    x = torch.randn(rows, 64) if isinstance(model, Chained) else torch.randint(50, (rows,))
    plain, least = copy.deepcopy(model), least_of(model, x)
    ordinary = rg.budget(model, "100%", x).ordinary_bytes
    division = rg.budget(model, round(least + share * (ordinary - least)), x)
    same(trained(model, x), trained(plain, x))
    assert working_bytes(model, x) <= division.total_bytes + division.elsewhere_bytes + LOSS


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_sequential_counts_the_gradients_of_a_layer_that_it_has_twice(share):
    model, x = rg.Sequential(*looped(6).layers, memory="100%"), torch.randn(16, 64)
    model.memory = 1
    with pytest.raises(rg.BudgetError) as refusal:
        model.fit(x)
    least = refusal.value.minimum_bytes
    model.memory = "100%"
    model.memory = round(least + share * (model.fit(x).ordinary_bytes - least))
    assert working_bytes(model, x) <= model.memory + LOSS


def test_a_number_that_is_annealed_is_not_measured_again(monkeypatch):
    model, x = Loop(dropout=0.1), inputs()
    plain = copy.deepcopy(model)
    rg.budget(model, "60%", x)
    monkeypatch.setattr(
        "retrograde.models.rows.call_sizes.Plans.measure", lambda *_, **__: pytest.fail("again")
    )
    for p in (0.1, 0.2, 0.3):
        for block in (*model.blocks, *plain.blocks):
            block.dropout.p = p
        same(trained(model, x), trained(plain, x))


class Twice(Loop):
    """Calls its row twice on inputs of one kind."""

    def forward(self, x):
        return super().forward(super().forward(x)[..., :6].detach().clone())


@pytest.mark.quick(0)
def test_a_row_that_is_called_twice_holds_nothing_in_the_run_on_the_sample():
    model, x = Twice(dropout=0.0), inputs()
    plain, once = copy.deepcopy(model), rg.budget(Loop(dropout=0.0), "100%", x)
    division = rg.budget(model, "100%", x)
    assert division.shares["embed … norm"].calls == 2
    added = sum(p.nbytes for p in model.parameters())  # gradients that both passes may add to
    assert once.ordinary_bytes < division.ordinary_bytes < 2 * (once.ordinary_bytes + added)
    assert division.elsewhere_bytes <= x.nbytes * WIDTH // 6
    rg.budget(model, least_of(model, x), x)
    same(trained(model, x), trained(plain, x))


@pytest.mark.quick(0)
def test_layers_that_are_called_otherwise_with_gradients_are_no_row():
    class Other(Loop):
        def forward(self, x):
            h = self.embed(x)
            for block in self.blocks:
                h = block(h * 1.0 if torch.is_grad_enabled() else h)
            return self.norm(h)

    model = nn.Sequential(Other(), nn.LSTM(WIDTH, 8))
    division = rg.budget(model, "50%", inputs())
    assert "not called in turn" in division.refused["0.blocks.0"]
    assert "1" in division.shares
    assert not [block for block in model[0].blocks if "forward" in vars(block)]


class Plain(nn.Module):
    """A block of two layers."""

    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Blocks in a loop, some of which ``leaves_out`` may tell to leave out."""

    def __init__(self, block=Plain, depth=6, leaves_out=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.leaves_out = leaves_out or (lambda k: False)

    def forward(self, x):
        for k, block in enumerate(self.blocks):
            if not self.leaves_out(k):
                x = block(x)
        return x


def rows_of(batch=64, width=16):
    torch.manual_seed(1)
    return torch.randn(batch, width)


COPIES = [
    copy.copy,
    copy.deepcopy,
    lambda layer: pickle.loads(pickle.dumps(layer)),
    lambda layer: layer._replicate_for_data_parallel(),
]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle", "replica"])
def test_a_copy_of_a_layer_is_a_layer_by_itself(copied):
    model, x = Blocks(), rows_of()
    before = len(pickle.dumps(model.blocks[0]))
    rg.budget(model, "60%", x)
    assert len(pickle.dumps(model.blocks[0])) == before
    twin = copied(model.blocks[0])
    assert "forward" not in vars(twin)
    twin._modules = {**twin._modules, "up": nn.Linear(16, 64)}
    expected = x + twin.down(torch.relu(twin.up(x)))
    assert torch.equal(twin(x), expected)
    assert torch.equal(twin.forward(x), expected)
    expected.sum().backward()
    assert twin.up.weight.grad is not None


def test_tensors_that_leave_a_model_carry_nothing():
    model, x = Blocks(), rows_of()
    rg.budget(model, "60%", x)
    states = []
    for block in model.blocks:
        block.register_forward_hook(lambda *given: states.append(given[-1]))
    y = model(x)
    assert [vars(t) for t in (*states, y)] == [{}] * 7
    assert pickle.loads(pickle.dumps(states[2].detach())).shape == x.shape


@pytest.mark.parametrize("kind", ["back", "before", "both", "changed"])
def test_hooks_on_layers_hide_no_row(kind):
    ours, theirs, x = Blocks(), Blocks(), rows_of()
    calls = {id(ours): [], id(theirs): []}
    for model, seen in zip((ours, theirs), calls.values(), strict=True):
        for block in model.blocks:
            if kind != "before":
                block.register_full_backward_hook(lambda *_, seen=seen: seen.append("back"))
            if kind in ("before", "both"):
                block.register_full_backward_pre_hook(lambda *_, seen=seen: seen.append("before"))
            if kind == "changed":
                block.register_forward_hook(lambda *given: given[-1] * 1.5)
    division = rg.budget(ours, "65%" if kind == "changed" else "55%", x)
    assert not division.refused
    assert ", ".join(division.shares).count("blocks") == (6 if kind == "changed" else 2)
    calls[id(ours)].clear()
    same(trained(ours, x), trained(theirs, x))
    assert calls[id(ours)] == calls[id(theirs)]
    assert len(calls[id(ours)]) == (12 if kind == "both" else 6)
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * x.nbytes + LOSS
    assert working_bytes(ours, x) <= allowed < working_bytes(theirs, x)


class OfPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, pair):
        z, y = pair
        return torch.tanh(self.linear(z) + y), y


class Pairs(nn.Module):
    """Layers that hand on a pair; the second one is the same throughout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(OfPairs() for _ in range(8))

    def forward(self, y):
        pair = torch.zeros_like(y), y
        for layer in self.layers:
            pair = layer(pair)
        return pair[0]


@pytest.mark.parametrize("memory", ["60%", "52%"])
def test_layers_that_hand_on_a_tuple_are_a_row(memory):
    ours, theirs, y = Pairs(), Pairs(), rows_of(256)
    division = rg.budget(ours, memory, y)
    assert [*division.shares] == ["layers.0 … layers.7"]
    same(trained(ours, y), trained(theirs, y))
    allowed = division.total_bytes + division.elsewhere_bytes + y.nbytes + LOSS
    assert working_bytes(ours, y) <= allowed < working_bytes(theirs, y)


CHANCES = {
    "torch": lambda k: torch.rand([]) < 0.3,
    "in place": lambda k: torch.empty(1).uniform_(0, 1) < 0.3,
    "python": lambda k: random.random() < 0.3,
    "kept if": lambda k: not torch.rand(()) < 0.7,
}


@pytest.mark.parametrize("chance", CHANCES)
def test_layers_may_be_left_out_by_chance(chance, recwarn):
    """A plan for all calls serves: one that is not made needs nothing."""
    ours, theirs = (Blocks(leaves_out=CHANCES[chance]) for _ in range(2))
    x = rows_of()
    division = rg.budget(ours, "55%", x)
    assert [*division.shares] == ["blocks.0 … blocks.5"]
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * x.nbytes + LOSS
    for seed in range(12):
        found = []
        for model in (ours, theirs):
            model.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            random.seed(seed)
            given = x.clone().requires_grad_()
            taken = rg.measure(lambda m=model, t=given: m(t).sum().backward()).working_bytes
            found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            assert model is theirs or taken <= allowed
        same(*found)
    assert not recwarn.list


def test_the_pass_that_is_measured_leaves_no_layer_out():
    """A pass that leaves layers out may take less than the plan for all calls."""
    model, x = Blocks(leaves_out=lambda k: random.random() < 0.9), rows_of()
    division = rg.budget(model, "55%", x)
    model.leaves_out = lambda k: False
    taken = rg.measure(lambda: model(x).sum().backward()).working_bytes
    assert abs(taken - division.peak_bytes) <= LOSS


def test_a_number_that_is_drawn_between_layers_hides_no_row():
    model = Blocks(leaves_out=lambda k: random.randrange(1))
    assert [*rg.budget(model, "55%", rows_of()).shares] == ["blocks.0 … blocks.5"]


class Picking(Plain):
    """Works on the samples whose first number is positive."""

    def forward(self, x):
        at = (x[:, 0] > 0).nonzero()[:, 0]
        return x + torch.zeros_like(x).index_add(0, at, self.down(torch.relu(self.up(x[at]))))


def test_data_that_need_more_are_noticed_in_their_pass(recwarn):
    ours, theirs = Blocks(Picking), Blocks(Picking)
    few, many = rows_of(256), rows_of(256)
    few[:, 0], many[:, 0] = -50, 50
    few[:160, 0] = 50
    division = rg.budget(ours, "100%", few)
    allowed = division.total_bytes + division.elsewhere_bytes + 2 * few.nbytes + LOSS
    same(trained(ours, few), trained(theirs, few))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=rf"needs \d+ bytes of the {division.total_bytes} allowed"):
        same(trained(ours, many), trained(theirs, many))
    recwarn.clear()
    same(trained(ours, many), trained(theirs, many))
    assert working_bytes(ours, many) <= allowed < working_bytes(theirs, many)
    assert not recwarn.list
    less, other = Blocks(Picking), Blocks(Picking)
    rg.budget(less, least_of(less, few), few)
    with pytest.warns(UserWarning, match="takes more for these data"):
        same(trained(less, many), trained(other, many))
    with pytest.raises(rg.BudgetError, match="too small for an input of this kind"):
        trained(less, many)


class Reordering(nn.Module):
    """Indexes, by which data could decide sizes, and has more buffers than values."""

    def __init__(self, width=16):
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("order", torch.randperm(width))

    def forward(self, x):
        return x + torch.relu(self.norm(self.mix(x[:, self.order])))


def test_buffers_that_a_dropped_call_notes_are_not_taken_for_larger_sizes(monkeypatch):
    model, x, grown = Blocks(Reordering), rows_of(4), []
    monkeypatch.setattr(JointPlan, "grows", lambda _, name, kind: grown.append(name))
    rg.budget(model, least_of(model, x), x)
    assert not grown


@pytest.mark.quick(2)
@pytest.mark.parametrize("share", ["60%", "100%"])
def test_data_that_need_more_are_noticed_in_a_sequential(share, recwarn):
    theirs, few, many = nn.Sequential(*Blocks(Picking).blocks), rows_of(256), rows_of(256)
    ours = rg.Sequential(*Blocks(Picking).blocks, memory=share)
    few[:, 0], many[:, 0] = -50, 50
    few[:160, 0] = 50
    allowed = ours.fit(few).budget_bytes
    same(trained(ours, few), trained(theirs, few))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=rf"needs \d+ bytes of the {allowed} allowed"):
        same(trained(ours, many), trained(theirs, many))
    recwarn.clear()
    same(trained(ours, many), trained(theirs, many))
    found = ours.fit(many)
    assert found.budget_bytes > allowed  # a share of what is held for these data
    assert working_bytes(ours, many) <= found.budget_bytes + many.nbytes + LOSS
    assert not recwarn.list


@pytest.mark.quick(1, every=4)
@pytest.mark.parametrize("memory", ["least", "40%", "80%"])
@pytest.mark.parametrize("change", ["new", "frozen", "assigned", "evaluated"])
def test_a_weight_of_one_of_two_rows_is_exchanged(change, memory):
    ours, theirs, x = Forked(), Forked(), inputs()
    division = rg.budget(ours, least_of(ours, x) if memory == "least" else memory, x)
    allowed = division.total_bytes + division.elsewhere_bytes + 3 * x.nbytes * WIDTH // 6
    same(trained(ours, x), trained(theirs, x))
    for model in (ours, theirs):
        if change == "new":
            model.last[1].mix.weight = nn.Parameter(model.last[1].mix.weight.detach() * 1.1)
        elif change == "frozen":
            model.last[1].mix.weight.requires_grad_(False)
        elif change == "assigned":
            own = {name: t.clone() for name, t in model.state_dict().items()}
            model.load_state_dict(own, assign=True)
        else:
            model.last.eval()
    for _ in range(2):
        same(trained(ours, x), trained(theirs, x))
        assert working_bytes(ours, x) <= allowed


def test_trainers_see_the_arguments_of_a_model_and_of_its_layers():
    model, x = Forked(), inputs()
    forwards = [inspect.signature(part.forward) for part in model.modules()]
    rg.budget(model, "60%", x)
    assert [inspect.signature(part.forward) for part in model.modules()] == forwards


@pytest.mark.parametrize("number", [361, 462])
@pytest.mark.quick(1, every=1)
def test_drawn_models_whose_rows_wait_for_none_end_in_no_raw_error(number):
    assert read_changed(number).outcome in ("exact", "told", "refused")


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [163, 527])
def test_a_late_row_that_takes_more_is_told(number):
    """It drops its calls, which here takes more than to keep them."""
    assert read_changed(number).outcome == "told"


@pytest.mark.parametrize("number", [151, 1110])
def test_the_least_works_where_little_is_gained_or_a_layer_has_no_runs_within(number):
    assert read_changed(number).outcome == "refused, and the least works"


class LeftOut(Plain):
    def __init__(self):
        super().__init__()
        self.up.weight.requires_grad_(False)

    def forward(self, x):
        return x if random.random() < 0.5 else super().forward(x)


def test_a_pass_that_leaves_its_first_layer_out_needs_no_more():
    def needed(seed):
        model, x = Blocks(LeftOut), rows_of().requires_grad_()
        rg.budget(model, least_of(model, x), x)
        random.seed(seed)
        with pytest.raises(rg.BudgetError) as refusal:
            model(rows_of(128).requires_grad_())
        return refusal.value.minimum_bytes

    assert needed(1) == needed(0)  # at 1 the first layer is left out


class Noisy(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x + 0.1 * torch.randn_like(x))
        return x


def test_a_first_input_without_a_gradient_counts_once():
    assert least_of(Noisy(), rows_of()) <= least_of(Noisy(), rows_of().requires_grad_())


class Widening(Plain):
    """A block whose own layers are two runs, with an activation between them."""

    def __init__(self, width=16):
        super().__init__(width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


@pytest.mark.parametrize("depth", [2, 3])
def test_few_blocks_are_not_opened_where_the_inputs_of_more_runs_would_be_held(depth):
    division = rg.budget(Blocks(Widening, depth), "100%", rows_of(256))
    assert [*division.shares] == [f"blocks.0 … blocks.{depth - 1}"]
    assert division.elsewhere_bytes == 0


class LastByNumber(nn.Module):
    """A layer that reads its last output, by its number, in a dict of all."""

    def __init__(self, last, number):
        super().__init__()
        self.last, self.number, self.linear = last, number, nn.Linear(16, 16)

    def forward(self, x):
        y = torch.tanh(self.linear(x + 0.1 * self.last.get(self.number, 0.0)))
        self.last[self.number] = y.detach()
        return y


def test_reruns_leave_the_keys_of_a_dict_in_their_order():
    last = {}
    model, x = nn.Sequential(*(LastByNumber(last, k) for k in range(5))), torch.randn(8, 16)
    rg.budget(model, "60%", x)
    model(x).sum().backward()
    assert [*last] == [*range(5)]
