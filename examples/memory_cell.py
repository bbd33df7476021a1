"""A cell with a memory of its own, on the copy task, within 5 % of the memory of its gradient.

The cell is a small Neural Turing Machine (Graves, Wayne, Danihelka, 2014): a controller reads from
and writes to a matrix of rows, finding them by what they hold (content addressing) or by moving on
from where it was. Its state is a nested dict: the controller's, the matrix, what was read last, and
where both heads are. Nothing about it has to be told to ``rg.unroll``: any state that is a pytree
of tensors will do, and the matrix, kept at every step by ordinary backpropagation, is what makes
such cells take so much memory.

    python examples/memory_cell.py

prints the loss as it falls, and the peak that was measured beside the budget.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import retrograde as rg
from retrograde.units import as_bytes, format_bytes

State = dict[str, Any]


class MemoryCell(nn.Module):
    """One step of a Neural Turing Machine with one head to read and one to write.

    Args:
        inputs: width of an input.
        outputs: width of an output.
        rows: of the memory.
        width: of a row.
        hidden: units of the controller.
    """

    def __init__(
        self, inputs: int, outputs: int, rows: int = 32, width: int = 12, hidden: int = 64
    ) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.controller = nn.LSTMCell(inputs + width, hidden)
        self.heads = nn.Linear(hidden + inputs, 2 * (width + 6) + 2 * width)
        self.output = nn.Linear(hidden + width, outputs)
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Give the heads habits to start from, or it would take thousands of steps to find them:
        the one writes row after row; the other waits, and once the mark is there, reads on."""
        reading, writing, mark = self.width + 2, 2 * self.width + 8, -1
        self.heads.bias[[reading + 1, writing + 2]] += 5.0
        self.heads.weight[reading + 2, mark] += 10.0
        self.heads.bias[[reading - 1, writing - 1]] -= 3.0

    def initial_state(self, batch: int) -> State:
        """An empty memory, both heads at its first row."""
        first = functional.one_hot(torch.zeros(batch, dtype=torch.long), self.rows).float()
        hidden = torch.zeros(batch, self.controller.hidden_size)
        return {
            "controller": (hidden, hidden),
            "memory": torch.full((batch, self.rows, self.width), 1e-3),
            "read": torch.zeros(batch, self.width),
            "at": {"reading": first, "writing": first},
        }

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Write to the memory, read from it, answer."""
        h, c = self.controller(torch.cat([x, state["read"]], -1), state["controller"])
        size = self.width + 6
        reading, writing, erase, add = self.heads(torch.cat([h, x], -1)).split(
            [size, size, self.width, self.width], -1
        )
        memory, at = state["memory"], state["at"]
        where = self.address(writing, memory, at["writing"])
        spread = where.unsqueeze(-1)
        memory = memory * (1 - spread * torch.sigmoid(erase).unsqueeze(1))
        memory = memory + spread * torch.tanh(add).unsqueeze(1)
        place = self.address(reading, memory, at["reading"])
        read = torch.einsum("bn,bnw->bw", place, memory)
        after = {
            "controller": (h, c),
            "memory": memory,
            "read": read,
            "at": {"reading": place, "writing": where},
        }
        return self.output(torch.cat([h, read], -1)), after

    def address(self, head: Tensor, memory: Tensor, before: Tensor) -> Tensor:
        """Where a head looks: by content, or on from where it was; sharpened."""
        key, rest = head[:, : self.width], head[:, self.width :]
        strength, gate = functional.softplus(rest[:, :1]), torch.sigmoid(rest[:, 1:2])
        like = functional.cosine_similarity(key.unsqueeze(1), memory, dim=-1, eps=1e-6)
        found = torch.softmax(strength * like, -1)
        found = gate * found + (1 - gate) * before
        back, stay, on = torch.softmax(rest[:, 2:5], -1).split(1, -1)
        moved = back * found.roll(-1, 1) + stay * found + on * found.roll(1, 1)
        sharp = (moved + 1e-8) ** (1 + functional.softplus(rest[:, 5:6]))
        return sharp / sharp.sum(-1, keepdim=True)


def copy_task(length: int, batch: int, bits: int) -> tuple[Tensor, Tensor]:
    """Random bits to look at, a mark, and silence in which they are to be repeated.

    Returns:
        Inputs (2 length + 1, batch, bits + 1), and the bits (length, batch, bits).
    """
    wanted = torch.randint(2, (length, batch, bits)).float()
    x = torch.zeros(2 * length, batch, bits + 1)
    x[:length, :, :bits] = wanted
    x[length:, :, bits] = 1
    return x, wanted


def recurrence(
    cell: MemoryCell, x: Tensor, seed: Tensor, memory: str | None
) -> tuple[Tensor, State, tuple[Tensor, ...]]:
    """Forward and backward for a given gradient of the outputs, to be measured."""
    outputs, after = rg.unroll(cell, x, cell.initial_state(x.shape[1]), memory=memory)
    return outputs, after, torch.autograd.grad(outputs, list(cell.parameters()), seed)


def report(cell: MemoryCell, x: Tensor, outputs: int, memory: str) -> None:
    """Print what the recurrence takes, beside what it would take and what it may."""
    seed = torch.full((*x.shape[:2], outputs), 1e-3)
    usual, ours = (
        rg.measure(lambda memory=memory: recurrence(cell, x, seed, memory)).working_bytes
        for memory in (None, memory)
    )
    print(f"ordinary backpropagation takes {format_bytes(usual)}")
    print(f"the budget is {format_bytes(as_bytes(memory, usual))}")
    print(f"the measured peak is {format_bytes(ours)}, that is {ours / usual:.1%}")


def main(arguments: list[str] | None = None) -> None:
    """Train, and print the loss, and the measured peak beside the budget."""
    parser = argparse.ArgumentParser(description="Train a memory cell within a budget.")
    parser.add_argument("--steps", type=int, default=40, help="steps of training")
    parser.add_argument("--length", type=int, default=32, help="vectors to be copied")
    parser.add_argument("--memory", default="5%", help="the budget, such as 5%% or 2MiB")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    bits, batch = 6, 16
    cell = MemoryCell(bits + 1, bits, rows=options.length + 8)
    optimizer = torch.optim.Adam(cell.parameters(), lr=2e-2)
    for step in range(options.steps):
        x, wanted = copy_task(options.length, batch, bits)
        outputs, _ = rg.unroll(cell, x, cell.initial_state(batch), memory=options.memory)
        answers = outputs[options.length :]
        loss = functional.binary_cross_entropy_with_logits(answers, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(cell.parameters(), 10.0)
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3d}: loss {loss.item():.4f}", flush=True)
    report(cell, x, bits, options.memory)


if __name__ == "__main__":
    main()
