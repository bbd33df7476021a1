"""What a thread draws from is told from what others drew meanwhile."""

import pytest
import torch
from torch import nn

from retrograde.replay.generators import OwnDraws, sources

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
