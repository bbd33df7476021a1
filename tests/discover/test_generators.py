"""What a thread draws is told from what another one draws meanwhile."""

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from retrograde.discover.generators import Watch, sources

CPU = torch.device("cpu")


class AnotherThreadDraws(TorchDispatchMode):
    """While any operation runs, another thread draws from torch's global generator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()
        return func(*args, **(kwargs or {}))


def drawn_by(operation, own):
    with AnotherThreadDraws(), Watch(sources(CPU, [own])) as watch:
        operation()
    return [source.generator for source in watch.drawn]


@pytest.mark.parametrize(
    "operation",
    [
        lambda own: torch.rand(2, generator=own),
        lambda own: torch.empty(2).uniform_(generator=own),
        lambda own: torch.bernoulli(torch.ones(2), generator=own),
        lambda own: torch.multinomial(torch.ones(3), 1, generator=own),
        lambda own: torch.rand(2, generator=own, out=torch.empty(2)),
    ],
)
def test_a_draw_from_a_generator_of_its_own_is_no_draw_from_the_global_one(operation):
    own = torch.Generator()
    assert drawn_by(lambda: operation(own), own) == [own]


@pytest.mark.parametrize(
    "operation",
    [
        lambda: nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3),
        lambda: nn.functional.rrelu(torch.ones(2), training=False),
        lambda: torch.native_dropout(torch.ones(2), 0.5, train=False),
    ],
)
def test_an_operation_without_dropout_draws_nothing(operation):
    assert drawn_by(operation, torch.Generator()) == []


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.rand(2),
        lambda: torch.rand(2, generator=torch.default_generator),
        lambda: nn.functional.dropout(torch.ones(2)),
        lambda: nn.functional.rrelu(-torch.ones(2), training=True),
        lambda: torch.native_dropout(torch.ones(2), 0.5, train=True),
    ],
)
def test_a_draw_from_the_global_generator_is_seen(operation):
    assert drawn_by(operation, torch.Generator()) == [torch.default_generator]
