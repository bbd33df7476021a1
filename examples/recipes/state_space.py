"""A state-space model in chunks, as Mamba-2 computes one: each chunk is a step.

Within a chunk all positions are computed at once, and a small state goes from chunk to chunk. The
loop holds the matrices of every chunk; ``rg.unroll`` holds some states and runs chunks again.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import retrograde as rg


class Chunk(nn.Module):
    """A layer of H heads, from x (B, C, H·P) and a state (B, H, N, P) to outputs and a state."""

    def __init__(self, heads: int = 16, size: int = 4, state: int = 8) -> None:
        super().__init__()
        self.sizes = heads * size, state, state, heads
        self.into = nn.Linear(heads * size, sum(self.sizes))

    def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        u, b, c, decay = self.into(x).split(self.sizes, -1)
        u = u.unflatten(-1, (self.sizes[3], -1))  # (B, C, H, P)
        total = -nn.functional.softplus(decay).cumsum(1)  # (B, C, H): log of what is left of s
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()[..., None]
        within = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
        y = torch.einsum("bin,bhnp,bih->bihp", c, s, total.exp())
        y, last = y + torch.einsum("bin,bjn,bijh,bjhp->bihp", c, b, within, u), total[:, -1:]
        added = torch.einsum("bjn,bjhp,bjh->bhnp", b, u, (last - total).exp())
        return y.flatten(2), last[:, 0, :, None, None].exp() * s + added


def ways(chunks: int = 64, positions: int = 32) -> dict[str, Callable[[], list[Tensor]]]:
    """A loop over chunks, and ``rg.unroll`` within 10 percent of what the loop holds."""
    torch.manual_seed(0)
    layer, start = Chunk(), torch.zeros(4, 16, 8, 4)
    pieces = torch.randn(chunks, 4, positions, 64)  # (chunk, batch, time, features)

    def gradients(y: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(y.square().mean(), [*layer.parameters()])]

    def before() -> list[Tensor]:
        s, outputs = start, []
        for piece in pieces:
            y, s = layer(piece, s)
            outputs.append(y)
        return gradients(torch.stack(outputs))

    return {
        "loop over chunks": before,
        "within 10%": lambda: gradients(rg.unroll(layer, pieces, start, memory="10%")[0]),
    }


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
