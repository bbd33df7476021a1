"""From truncated to full backpropagation through time: less memory, the same seconds.

A marked symbol is followed by up to 299 others; the network names it at the end. Cut into windows
of 50 steps, the gradient never reaches the mark. ``rg.LSTM`` goes all the way back, in less memory.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import retrograde as rg

STEPS, WINDOW, BATCH, SYMBOLS, HIDDEN = 300, 50, 32, 4, 32


def data() -> tuple[Tensor, Tensor]:
    """Symbols (STEPS, BATCH, SYMBOLS + 1), the mark as the last number, and the answers."""
    symbols, at = torch.randint(SYMBOLS, (STEPS, BATCH)), torch.randint(WINDOW, (1, BATCH))
    mark = torch.zeros(STEPS, BATCH, 1).scatter_(0, at[..., None], 1.0)
    return torch.cat([one_hot(symbols, SYMBOLS), mark], -1), symbols.gather(0, at)[0]


def train(memory: str | None, window: int, seconds: float) -> tuple[int, float]:
    """Train for some seconds on windows of so many steps; return peak bytes and accuracy."""
    torch.manual_seed(0)
    lstm, head = rg.LSTM(SYMBOLS + 1, HIDDEN, memory=memory), nn.Linear(HIDDEN, SYMBOLS)
    keep = torch.empty(HIDDEN).uniform_(2, STEPS).log()  # units that remember up to STEPS
    lstm.bias_ih_l0.data[: 2 * HIDDEN] = torch.cat([-keep, keep])
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-2)

    def iteration(state: tuple[Tensor, ...] | None = None) -> None:
        x, answers = data()
        optimizer.zero_grad()
        for part in x.split(window):
            y, state = lstm(part, state)
            state = tuple(s.detach() for s in state)  # here the gradient is cut
        cross_entropy(head(y[-1]), answers).backward()
        optimizer.step()

    iteration()  # a first call measures
    peak, end = rg.measure(iteration).peak_bytes, time.time() + seconds
    while time.time() < end:
        iteration()
    right = [head(lstm(x)[0][-1]).argmax(-1) == y for x, y in (data() for _ in range(16))]
    accuracy = float(torch.cat(right).float().mean())
    print(f"{window:3d} steps: {peak:,} bytes, {accuracy:.0%} right (by chance 25%)")
    return peak, accuracy


def main(seconds: float = 20.0) -> dict[str, float]:
    """Train on windows, then on the whole, each for as many seconds."""
    cut, full = train(None, WINDOW, seconds), train("10%", STEPS, seconds)
    names = "before_bytes", "before_right", "after_bytes", "after_right"
    return dict(zip(names, (*cut, *full), strict=True))


if __name__ == "__main__":
    main()
