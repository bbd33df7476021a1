"""What a thread draws from is told from what others drew meanwhile."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from retrograde.replay import generators
from retrograde.replay.generators import KeptDraws, OwnDraws, packed, sources, unpack_into

CPU = torch.device("cpu")


@pytest.mark.parametrize("own", [True, False])
def test_only_the_generator_that_an_operation_moves_counts(own):
    ours, others = torch.Generator(), torch.Generator()
    drawn = ours if own else torch.default_generator
    with OwnDraws(sources(CPU, [ours, others])) as watch:
        torch.rand(3, generator=ours if own else None)
        others.manual_seed(1)  # between operations, as another thread may
        torch.ones(3) + 1
    assert [source.generator for source in watch.drawn] == [drawn]


@pytest.mark.parametrize(
    ("operation", "draws"),
    [
        (lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3), False),
        (lambda: nn.functional.rrelu(-torch.ones(2), training=False), False),
        (lambda: nn.functional.rrelu(-torch.ones(2), training=True), True),
        (lambda: torch.native_dropout(torch.ones(2), 0.5, train=False), False),
        (lambda: torch.native_dropout(torch.ones(2), 0.5, train=True), True),
    ],
)
def test_an_operation_whose_dropout_is_off_draws_nothing(operation, draws):
    with OwnDraws(sources(CPU)) as watch:
        operation()
    assert [s.generator for s in watch.drawn] == [torch.default_generator] * draws


def drawn(draw, width, seed=0):
    torch.manual_seed(seed)
    return draw(torch.linspace(-2, 2, width, dtype=torch.float32))


ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5)
DRAWS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "in place": lambda x: functional.dropout(x * 1, 0.3, inplace=True),
    "half": lambda x: functional.dropout(x.bfloat16(), 0.3),
    "columns": lambda x: functional.dropout(torch.stack([x, -x]).t(), 0.7),
    "channels": lambda x: functional.dropout1d(x.view(1, 1, -1).expand(2, 5, -1), 0.5),
    "alpha": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(
        *[x.view(1, -1, 1)] * 3, dropout_p=0.5
    ),
    "heads": lambda x: ATTENTION(*[x.view(-1, 1, 1).expand(-1, 1, 8)] * 3)[0],
    "path": lambda x: x * x.new_empty(3, 1).bernoulli_(0.5),
    "noise": lambda x: functional.dropout(x + torch.rand(()) + torch.empty(3, 1).uniform_(), 0.5),
    "nothing": lambda x: functional.dropout(functional.dropout(x, 0.5, training=False), 0.0),
}


@pytest.mark.parametrize("width", [1, 7, 8, 65, 70_000])
@pytest.mark.parametrize("name", DRAWS)
def test_kept_draws_are_the_same_numbers_again(name, width):
    draw = DRAWS[name]
    if name in ("attention", "heads"):
        width = min(width, 65)
    expected, draws = drawn(draw, width), None
    after = torch.rand(())
    torch.manual_seed(0)
    draws = KeptDraws()
    with draws:
        first = drawn(draw, width, 0)
    draws.end()
    assert torch.equal(first, expected)
    assert torch.equal(torch.rand(()), after)
    assert draws.complete
    assert bool(draws.kept) == (name != "nothing")
    for seed in (1, 2):
        with draws.again():
            assert torch.equal(drawn(draw, width, seed), expected)
        position = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(position, torch.get_rng_state())


def test_a_mask_is_kept_in_bits():
    draws = KeptDraws()
    with draws:
        functional.dropout(torch.ones(70_001), 0.5)
    draws.end()
    assert [t.nbytes for t in draws.kept] == [70_001 // 8 + 1]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: functional.dropout(x, 0.5) + torch.randn(()),
        lambda x: functional.dropout(x, 0.5) + torch.rand(5000).sum(),
        lambda x: functional.dropout(x, 0.5) * x.new_empty(()).bernoulli_(generator=seeded(3)),
        lambda x: functional.rrelu(functional.dropout(x, 0.5), training=True),
    ],
)
def test_a_call_with_other_draws_keeps_none(draw):
    draws = KeptDraws()
    with draws:
        first = drawn(draw, 9000)
    draws.end()
    assert not draws.complete
    assert not draws.kept
    assert torch.equal(first, drawn(draw, 9000))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_a_dropout_that_torch_computes_otherwise_is_torchs_own(monkeypatch):
    monkeypatch.setattr(generators, "_COMPOSED", {(0.25, torch.float32): False})
    draws = KeptDraws()
    monkeypatch.setattr(KeptDraws, "_dropout", None)
    with draws:
        functional.dropout(torch.ones(9), 0.25)
    draws.end()
    assert draws.complete
    assert len(draws.kept) == 1


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.int64, torch.float64, torch.half])
@pytest.mark.parametrize("turned", [False, True])
def test_bits(kind, turned):
    for rows in (1, 8, 9, 21_847):
        mask = torch.randint(2, (rows, 3)).to(kind)
        mask = mask.t() if turned else mask
        found = torch.full_like(mask, 1)
        assert unpack_into(packed(mask), found) is found
        assert torch.equal(found, mask)
