"""What a trial of a call finds."""

import random

import torch
from torch import nn

from retrograde.replay.surroundings import try_out


class Codebook(nn.Module):
    """A layer that notes a running mean of what it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


def test_buffers_of_modules_that_chance_left_out_count_with_those_of_their_class():
    """A frozen module's do not."""
    books = nn.ModuleList(Codebook() for _ in range(4))
    books[3].eval()

    def some():
        x = torch.ones(3, 2)
        for book in books[: random.Random(int(torch.randint(1000, ()))).randrange(1, 3)]:
            x = book(x)

    for seed in range(4):
        torch.manual_seed(seed)
        _, found, _ = try_out(some, [books], torch.device("cpu"))
        assert [*map(id, found.buffers)] == [id(book.mean) for book in books[:3]]
        assert not any(book.mean.any() for book in books)
