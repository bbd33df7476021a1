"""Masks of dropout that are drawn here have torch's bits, and leave its generator as it would."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import retrograde as rg
from retrograde.kernels import cpu_masks
from retrograde.kernels.cpu_masks import fill_as_torch, packed, unpack_into
from retrograde.models import draws
from retrograde.models.draws import Draws

pytestmark = pytest.mark.skipif(
    not draws._draws_as_torch(), reason="torch draws masks otherwise on this processor"
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skipped", [0, 1, 2, 311, 623, 624, 625, 5000])
@pytest.mark.parametrize("p", [0.0, 1e-9, 1 / 3, 0.5, 0.9, 1.0])
def test_masks_are_those_of_torch(p, skipped, dtype):
    for count in (1, 2, 311, 312, 313, 8191, 8193, 20_001):
        generator = torch.Generator().manual_seed(count)
        if skipped:
            torch.randint(9, (skipped,), generator=generator)
        before = generator.get_state()
        expected = torch.empty(count, dtype=dtype).bernoulli_(p, generator=generator)
        after, found = generator.get_state(), torch.full_like(expected, 7)
        generator.set_state(before)
        assert fill_as_torch(found, p, generator)
        assert torch.equal(found, expected)
        assert torch.equal(generator.get_state(), after)


def drawn(draw, ours, width):
    """What is drawn, its gradient, and the next random number."""
    torch.manual_seed(1)
    x = torch.linspace(-2, 2, width).requires_grad_()
    torch.randn(1)  # which keeps another number in the generator's state
    with Draws() if ours else torch.enable_grad():
        y = draw(x)
    y.float().sin().sum().backward()
    return y.detach(), x.grad, torch.randn(2)


ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5)
DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "module": lambda x: nn.Dropout(0.25)(x),
    "in place": lambda x: functional.dropout(x * 1, 0.3, inplace=True),
    "torch's": lambda x: torch.dropout(x, 0.3, True),
    "half": lambda x: functional.dropout(x.bfloat16(), 0.3),
    "columns": lambda x: functional.dropout(torch.stack([x, -x]).t(), 0.7),
    "expanded": lambda x: functional.dropout(x.view(1, -1).expand(3, -1), 0.7),
    "turned": lambda x: functional.dropout(
        torch.stack([x, -x, x * x]).view(3, 1, -1).permute(2, 1, 0), 0.4
    ),
    "gaps": lambda x: x[::2] * torch.empty(len(x), 2)[:, 0].bernoulli_(0.5)[::2],
    "channels": lambda x: functional.dropout1d(x.view(1, -1, 1).expand(2, -1, 3), 0.5),
    "alpha": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *[x[:97].view(1, -1, 1)] * 3, dropout_p=0.5
    ),
    "heads": lambda x: ATTENTION(*[x[:97].view(-1, 1, 1).expand(-1, 1, 8)] * 3)[0],
    "weights": lambda x: ATTENTION(*[x[:97].view(-1, 1, 1).expand(-1, 1, 8)] * 3)[1],
    "mask": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "own": lambda x: x * torch.empty_like(x).bernoulli_(0.4, generator=torch.Generator()),
    "off": lambda x: functional.dropout(functional.dropout(x, 0.5, training=False), 0.0),
    "all": lambda x: functional.dropout(x, 1.0),
    "each": lambda x: torch.vmap(lambda row: functional.dropout(row, 0.3), randomness="different")(
        torch.stack([x, -x])
    ),
    "parameter": lambda x: functional.dropout(nn.Parameter(x.detach()), 0.5) * x,
    "several": lambda x: functional.dropout(functional.dropout(x, 0.1) + torch.rand(()), 0.2),
}


@pytest.mark.parametrize("width", [97, 4096, 70_001])
@pytest.mark.parametrize("name", DRAWS)
def test_dropouts_have_the_same_bits(name, width):
    for ours, theirs in zip(*(drawn(DRAWS[name], o, width) for o in (True, False)), strict=True):
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)


def test_where_draws_are_watched_torch_draws():
    with FlopCounterMode(display=False), Draws() as block:
        functional.dropout(torch.ones(5000), 0.5)
    assert block.drawn == 0


def test_only_large_masks_are_drawn_here():
    with Draws() as block:
        functional.dropout(torch.ones(4095), 0.5)
        functional.dropout(torch.ones(5000), 0.5, training=False)
        assert block.drawn == 0
        functional.dropout(torch.ones(5000), 0.5)
    assert block.drawn == 5000


def test_draws_of_another_thread_are_not_lost(monkeypatch):
    """Where it draws meanwhile, torch draws the mask, from behind those numbers."""
    draw = cpu_masks._draw

    def interrupted(*args):
        monkeypatch.setattr(cpu_masks, "_draw", draw)
        other = threading.Thread(target=lambda: torch.rand(3))
        other.start()
        other.join()
        return draw(*args)

    monkeypatch.setattr(cpu_masks, "_draw", interrupted)
    torch.manual_seed(0)
    with Draws():
        found = functional.dropout(torch.ones(5000), 0.5)
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(found, functional.dropout(torch.ones(5000), 0.5))


def test_where_torch_draws_otherwise_its_own_dropout_runs(monkeypatch):
    monkeypatch.setattr(draws, "_SAME", {torch.float32: False})
    monkeypatch.setattr(draws.Draws, "_dropout", None)
    with Draws() as block:
        functional.dropout(torch.ones(5000), 0.25)
    assert block.drawn == 0
    monkeypatch.setattr(draws, "_SAME", {})
    monkeypatch.setattr(draws, "_draws_as_torch", lambda: False)
    with Draws() as block:
        functional.dropout(torch.ones(5000), 0.25)
    assert block.drawn == 0


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("memory", ["100%", "60%", "30%"])
def test_a_model_within_a_budget_has_the_bits_of_its_dropouts(memory, alone, monkeypatch):
    done = threading.Event()
    if not alone:  # a trial then watches each operation that draws
        threading.Thread(target=done.wait, daemon=True).start()
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.2, batch_first=True) for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(4, 48, 64)

    def step(net):
        net.zero_grad()
        torch.manual_seed(2)
        net(x).square().mean().backward()
        return [*(p.grad for p in net.parameters()), torch.rand(2)]

    expected = step(plain)
    ours = rg.Sequential(*plain, memory=memory)
    assert all(map(torch.equal, step(ours), expected))
    filled, fill = [], cpu_masks.fill_as_torch

    def counted(*args):
        filled.append(args[0].numel())
        return fill(*args)

    monkeypatch.setattr(cpu_masks, "fill_as_torch", counted)
    assert all(map(torch.equal, step(ours), expected))
    assert sum(filled) >= 4 * 4 * 48 * (64 + 256 + 64 + 4 * 48)  # of all layers
    done.set()


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.int64, *DTYPES])
def test_bits(kind):
    for rows in (1, 8, 9, 21_847):
        mask = torch.randint(2, (rows, 3)).to(kind)
        assert packed(mask).nbytes == -(-3 * rows // 8)
        for known in (mask, mask.t()):
            found = torch.full(known.shape, 1, dtype=kind)
            assert unpack_into(packed(known), found) is found
            assert torch.equal(found, known)
