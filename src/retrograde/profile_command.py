"""The command ``retrograde profile``: the cost of a step, and the effect of each budget."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from retrograde.console import Device, Threads, clean_errors, require
from retrograde.errors import RetrogradeError

if TYPE_CHECKING:
    from retrograde.models.profile import Offer, Offers

__all__ = ["profile"]

_CELLS = {"lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}


def profile(
    cell: Annotated[str, typer.Option(help="lstm, gru or rnn: torch's module.")] = "lstm",
    inputs: Annotated[int, typer.Option(min=1, help="Input features per step.")] = 64,
    hidden: Annotated[int, typer.Option(min=1, help="Units of a layer.")] = 64,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Steps of the sequence.")] = 1000,
    memory: Annotated[
        str | None,
        typer.Option(
            help="One more budget for the table: a share of ordinary BPTT's memory (5%), or bytes "
            "(64MiB)."
        ),
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="Budgets in the table.")] = 12,
    device: Device = "cpu",
    threads: Threads = None,
) -> None:
    """The cost of one step of a recurrent network on this machine, and the effect of each budget.

    Bytes are counted and seconds of short ranges are measured. The memory and the time of a whole
    iteration are predicted from these, by the planner of `memory=`.
    """
    with clean_errors():
        require("torch")
        import torch

        from retrograde.machine import check_device, machine_of, use_threads
        from retrograde.models.profile import profile
        from retrograde.units import parse_memory

        if cell not in _CELLS:
            raise RetrogradeError(f"--cell is {cell!r}: expected lstm, gru or rnn")
        check_device(device)
        if memory is not None:
            parse_memory(memory)
        use_threads(threads)
        module = getattr(torch.nn, _CELLS[cell])(inputs, hidden, layers, device=device)
        # At most 256 steps are measured; beyond, bytes grow linearly.
        x = torch.randn(min(length, 256), batch, inputs, device=device)
        console = Console(highlight=False, soft_wrap=True)
        with console.status("measuring"):
            found = profile(module, x)
            offers = found.trade_off(length, points)
            asked = None if memory is None else found.buys(memory, length)
        console.print(f"{replace(found, length=None)}\n", markup=False)
        _show(offers, asked, console)
        console.print(", ".join(f"{name} {value}" for name, value in machine_of(device).items()))


def _show(offers: "Offers", asked: "Offer | None", console: Console) -> None:
    """Print the table; the budget that was asked for is in bold."""
    if asked is not None and asked.budget_bytes < asked.ordinary_bytes:
        others = [offer for offer in offers if offer.budget_bytes != asked.budget_bytes]
        rows = sorted([*others, asked], key=lambda offer: offer.budget_bytes)
        offers = replace(offers, offers=tuple(rows))
    title, *lines = str(offers).splitlines()
    console.print(title, markup=False, style="bold")
    for number, line in enumerate(lines, -1):  # the first line has the columns' names
        is_asked = 0 <= number < len(offers) and offers.offers[number] is asked
        console.print(line, markup=False, style="bold" if is_asked else "")
