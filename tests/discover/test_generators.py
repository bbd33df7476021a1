"""What a thread draws from is told from what others draw meanwhile."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrograde.discover.generators import Watch, sources

CPU = torch.device("cpu")


class Meddling(TorchDispatchMode):
    """Moves a generator in the middle of every operation, as another thread may."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.generator.set_state(torch.Generator().manual_seed(torch.seed()).get_state())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("own", [True, False])
def test_only_the_generator_that_an_operation_is_given_counts(own):
    ours, others = torch.Generator(), torch.Generator()
    drawn = ours if own else torch.default_generator
    moved = torch.default_generator if own else others
    known = sources(CPU, [ours, others])
    with Meddling(moved), Watch(known) as watch:
        torch.rand(3, generator=ours if own else None)
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
    with Meddling(torch.default_generator), Watch(sources(CPU)) as watch:
        operation()
    assert [s.generator for s in watch.drawn] == [torch.default_generator] * draws
