"""Cells as people write them: by hand, of torch's modules, and as formulas of ``rg.GatedCell``.

cell, steps, batch, state = cases()["GRUCell 32, B=16, T=400"]
"""

from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.cells.as_cell import as_cell

__all__ = [
    "FIRST", "FORMULAS", "INPUTS", "LIF", "MGU", "Attending", "MinimalGated", "Own", "PeepholeLSTM",
    "cases", "plain",
]  # fmt: skip

INPUTS = 16


class Spiking(nn.Module):
    """A leaky neuron with a smooth threshold: a matrix product and six operations."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.net = nn.Linear(inputs, size)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        v, i = state
        i = 0.9 * i + self.net(x)
        v = 0.95 * v + i
        z = torch.sigmoid(4 * (v - 1))
        return z, (v - z, i)


class Own(nn.Module):
    """torch's cell, or a gated cell as one writes it by hand."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Any) -> Any:
        h = self.cell(x, h)
        return (h[0] if isinstance(h, tuple) else h), h


class MinimalGated(nn.Module):
    """A gated unit by hand: two products and four operations."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.z, self.c = nn.Linear(inputs + size, size), nn.Linear(inputs + size, size)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xh = torch.cat([x, h], -1)
        z = torch.sigmoid(self.z(xh))
        return (1 - z) * h + z * torch.tanh(self.c(xh))


class Attending(nn.Module):
    """A decoder's cell: it attends to an encoder's outputs by keys that were computed from them,
    and captures both."""

    def __init__(self, inputs: int, size: int, batch: int, places: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs + size, size)
        self.encoder, self.key = nn.Linear(inputs, size), nn.Linear(size, size)
        self.text = torch.randn(batch, places, inputs)
        self.encode()

    def encode(self) -> None:
        """Run the encoder, once an iteration."""
        self.encoded = self.encoder(self.text)
        self.keys = self.key(self.encoded)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax((self.keys @ h.unsqueeze(2)).squeeze(2), -1)
        context = (weights.unsqueeze(1) @ self.encoded).squeeze(1)
        h = self.cell(torch.cat([x, context], -1), h)
        return h, h


def cases() -> dict[str, tuple[nn.Module, int, int, Any]]:
    """Cells by name: the cell, steps, samples, and the initial state."""

    def zeros(batch: int, size: int) -> Tensor:
        return torch.zeros(batch, size)

    return {
        "GRUCell 32, B=16, T=400": (Own(nn.GRUCell(INPUTS, 32)), 400, 16, zeros(16, 32)),
        "spiking 64, B=16, T=400": (Spiking(INPUTS, 64), 400, 16, (zeros(16, 64), zeros(16, 64))),
        "RNNCell 16, B=4, T=1000": (Own(nn.RNNCell(INPUTS, 16)), 1000, 4, zeros(4, 16)),
        "LSTMCell 64, B=32, T=403": (
            Own(nn.LSTMCell(INPUTS, 64)), 403, 32, (zeros(32, 64), zeros(32, 64)),
        ),
        "gated by hand 128, B=64, T=201": (Own(MinimalGated(INPUTS, 128)), 201, 64, zeros(64, 128)),
        "GRUCell 32, B=8, T=1600": (Own(nn.GRUCell(INPUTS, 32)), 1600, 8, zeros(8, 32)),
        "attending to 50 captured places, B=16, T=200": (
            Attending(INPUTS, 64, 16, 50), 200, 16, zeros(16, 64),
        ),
        # Torch's own, without a module around them: the loops of a layer run them.
        "nn.LSTMCell 64, B=32, T=403": (
            nn.LSTMCell(INPUTS, 64), 403, 32, (zeros(32, 64), zeros(32, 64)),
        ),
        "nn.LSTMCell 256, B=16, T=400": (
            nn.LSTMCell(INPUTS, 256), 400, 16, (zeros(16, 256), zeros(16, 256)),
        ),
        "nn.GRUCell 32, B=8, T=1600": (nn.GRUCell(INPUTS, 32), 1600, 8, zeros(8, 32)),
        "nn.RNNCell 16, B=4, T=1000": (nn.RNNCell(INPUTS, 16), 1000, 4, zeros(4, 16)),
    }  # fmt: skip


def plain(cell: nn.Module, x: Tensor, state: Any) -> Tensor:
    run, outputs = as_cell(cell), []
    for row in x:
        y, state = run(row, state)
        outputs.append(y)
    return torch.stack(outputs)


class PeepholeLSTM(rg.GatedCell):
    """Gers and Schmidhuber 2000."""

    gates, states, units = 4, 2, 3

    @staticmethod
    def step(i, f, g, o, h, c, p_i, p_f, p_o):  # type: ignore[no-untyped-def]
        """Return h and c after the step."""
        i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
        c = f * c + i * torch.tanh(g)
        return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


class MGU(rg.GatedCell):
    """Zhou et al. 2016, with the gate applied after the product."""

    gates, split = 2, 1

    @staticmethod
    def step(f, x, u, h):  # type: ignore[no-untyped-def]
        """Return h after the step."""
        f = torch.sigmoid(f)
        return (1 - f) * h + f * torch.tanh(x + f * u)


class LIF(rg.GatedCell):
    """Spiking neurons with a surrogate slope, and a time constant for each unit."""

    gates, states, units = 1, 2, 1

    @staticmethod
    def step(i, s, v, beta):  # type: ignore[no-untyped-def]
        """Return the spikes and the potential after the step."""
        v = torch.sigmoid(beta) * v * (1 - s) + i
        soft = torch.sigmoid(4 * (v - 1))
        return torch.heaviside((v - 1).detach(), (0 * v).detach()) + (soft - soft.detach()), v


class GRU(rg.GatedCell):
    """torch's GRU."""

    gates, split = 3, 1

    @staticmethod
    def step(r, z, x, u, h):  # type: ignore[no-untyped-def]
        """Return h after the step."""
        n = torch.tanh(x + torch.sigmoid(r) * u)
        return n + torch.sigmoid(z) * (h - n)


class MemoryUnit(rg.GatedCell):
    """An RNN with two more states: a slow average of h, and a fast one."""

    gates, states, units = 2, 3, 2

    @staticmethod
    def step(a, b, h, slow, fast, p, q):  # type: ignore[no-untyped-def]
        """Return h and its averages after the step."""
        new = torch.tanh(a + p * slow) * torch.sigmoid(b - q * fast)
        return new, 0.99 * slow + 0.01 * new, 0.5 * fast + 0.5 * new


def gru() -> tuple[nn.Module, Tensor, Any]:
    return Own(nn.GRUCell(16, 32)), torch.randn(1600, 8, 16), torch.zeros(8, 32)


def spiking() -> tuple[nn.Module, Tensor, Any]:
    return Spiking(16, 64), torch.randn(400, 16, 16), (torch.zeros(16, 64), torch.zeros(16, 64))


def liquid() -> tuple[nn.Module, Tensor, Any]:
    from ncps.torch.ltc_cell import LTCCell
    from ncps.wirings import AutoNCP

    wiring = AutoNCP(32, 8)
    wiring.build(4)

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = LTCCell(wiring)

        def forward(self, x: Tensor, h: Tensor) -> Any:
            return self.cell(x, h, 1.0)

    return Cell(), torch.randn(300, 16, 4), torch.zeros(16, 32)


FORMULAS = {kind.__name__: kind for kind in (PeepholeLSTM, MGU, LIF, GRU, MemoryUnit)}
#: Cells whose first calls are timed: each anew, with inputs and a state.
FIRST = {
    "GRUCell 32, B=8, T=1600": gru,
    "spiking 64, B=16, T=400": spiking,
    "LTC of ncps 32, B=16, T=300": liquid,
}
