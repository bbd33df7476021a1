"""Sequences of different lengths: padded with a mask, under autocast, or packed.

A loop over a padded batch keeps the state of a sequence that has ended by a mask. ``rg.Recurrent``
takes ``lengths`` instead, and runs any cell. In bfloat16 both round; its gradient is the nearer to
that of float32. A packed batch goes to ``rg.LSTM`` as it is: padding takes no memory and no time.

    python examples/recipes/padded.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import retrograde as rg


def ways(
    steps: int = 400, packed: bool = False, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Callable[[], list[Tensor]]]:
    """A loop with a mask and ``rg.Recurrent``, or two LSTMs on a packed batch."""
    torch.manual_seed(0)
    lengths = torch.linspace(steps // 6, steps, 12).long()  # of 12 sequences
    x, mask = torch.randn(steps, 12, 32), torch.arange(steps)[:, None] < lengths
    cell, usual = nn.GRUCell(32, 64), nn.LSTM(32, 64)
    recurrent, lstm = rg.Recurrent(cell, memory="10%"), rg.LSTM(32, 64, memory="10%")
    lstm.load_state_dict(usual.state_dict())

    def gradients(outputs: Tensor, module: nn.Module) -> list[Tensor]:
        loss = outputs.float().square().mean(-1)[mask].mean()  # padding has no loss
        return [*torch.autograd.grad(loss, [*module.parameters()])]

    def loop() -> list[Tensor]:
        h, outputs = torch.zeros(12, 64), []
        with torch.autocast("cpu", dtype, dtype != torch.float32):
            for x_t, there in zip(x, mask[..., None], strict=True):
                h = torch.where(there, cell(x_t, h), h)
                outputs.append(h)
        return gradients(torch.stack(outputs), cell)

    def ours() -> list[Tensor]:
        with torch.autocast("cpu", dtype, dtype != torch.float32):
            outputs, _ = recurrent(x, lengths=lengths)
        return gradients(outputs, cell)

    def by_lstm(module: nn.LSTM) -> list[Tensor]:
        sequences = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return gradients(pad_packed_sequence(module(sequences)[0])[0], module)

    if packed:
        return {"nn.LSTM": lambda: by_lstm(usual), "rg.LSTM, 10%": lambda: by_lstm(lstm)}
    return {"loop with a mask": loop, "rg.Recurrent, 10%": ours}


if __name__ == "__main__":
    for name, way in [*ways().items(), *ways(packed=True).items()]:
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
