"""The command ``retrograde``: plans of schedules.

Each command imports its needs when it runs. So help appears at once, and ``plan`` works without
torch. An error is one message and exit code 2, never a traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from retrograde import __version__
from retrograde.errors import RetrogradeError, UnitError
from retrograde.units import parse_memory

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.exit(f"the command needs {missing.name}: pip install '.[cli]'")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retrograde.schedule import Schedule

_SHORT = 60  # actions that fit on a few lines
_ROWS = 20  # rows of the trade-off table

app = typer.Typer(
    name="retrograde",
    help="Exact backpropagation on a budget of memory and time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command; exit with code 0, or 2 for an error that the user can correct."""
    app()


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Turn an error that the user can correct into a message and exit code 2."""
    try:
        yield
        return
    except RetrogradeError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = f"this needs {error.name}: pip install '.[cli]'"
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]error[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(2)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retrograde {__version__}")
        raise typer.Exit


@app.callback()
def _retrograde(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@_clean_errors()
def plan(
    length: Annotated[int, typer.Option(help="Steps of the sequence.")],
    memory: Annotated[
        str | None,
        typer.Option(help="Slots, none for store-all; with --state bytes (64MiB) or a share (5%)."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="hsm, ism, msm, best or store-all; hsm by default, best with --alpha."),
    ] = None,
    alpha: Annotated[
        int | None,
        typer.Option(help="msm, best: an internal state, in hidden states, or bytes with --state."),
    ] = None,
    beta: Annotated[
        int | None,
        typer.Option(help="The same where its input is kept; by default α less a hidden state."),
    ] = None,
    state: Annotated[
        int | None, typer.Option(help="msm, best: bytes of a hidden state, to plan in bytes.")
    ] = None,
    curve: Annotated[
        bool,
        typer.Option("--curve", help="Table and picture of all memories where the cost drops."),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw to this file (.svg, .png, .pdf), or trade_off.svg for --curve."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the schedule to this file.")] = None,
    actions: Annotated[bool, typer.Option("--actions", help="List every action.")] = False,
) -> None:
    """Cost, memory and picture of a policy's schedule, or its trade-off curve.

    hsm and msm count hidden states, the initial one included, and not the working core; ism counts
    internal states, the working core included. Needs no torch.
    """
    options: dict[str, Any] = {"policy": policy or ("hsm" if alpha is None else "best")}
    options |= {"alpha": alpha, "beta": beta}
    if curve:
        if not (memory is None and state is None and json is None and not actions):
            raise RetrogradeError(
                "--curve shows every memory: leave out --memory, --state, --json and --actions"
            )
        _show_curve(length, options, picture or Path("trade_off.svg"))
        return
    schedule = _describe(length, memory, options | {"state": state})
    if actions:
        typer.echo("\n".join(map(str, schedule)))
    if json is not None:
        with _writing("schedule", json):
            json.write_text(schedule.to_json(), encoding="utf-8")
    if picture is not None:
        from retrograde.figures import draw_schedule

        _save(draw_schedule(schedule), picture)


@app.command()
@_clean_errors()
def fit(
    layer: Annotated[str, typer.Argument(help="lstm, gru or rnn.")],
    length: Annotated[int, typer.Option(help="Steps of the sequence.")],
    input: Annotated[int, typer.Option(help="Numbers in the input of a step.")],
    hidden: Annotated[int, typer.Option(help="Units.")],
    memory: Annotated[str, typer.Option(help="Bytes (64MiB), or a share of torch's (5%).")],
    batch: Annotated[int, typer.Option(help="Samples.")] = 1,
    layers: Annotated[int, typer.Option(help="Layers.")] = 1,
) -> None:
    """What a recurrent layer takes within a budget on this machine: memory, steps and seconds."""
    import retrograde as rg

    if layer not in ("lstm", "gru", "rnn"):
        raise RetrogradeError(f"cannot fit {layer!r}: expected lstm, gru or rnn")
    ours = getattr(rg, layer.upper())(input, hidden, layers)
    typer.echo(rg.fit(ours, (length, batch, input), memory=memory))


def _describe(length: int, memory: str | None, options: dict[str, Any]) -> "Schedule":
    """Print the cost and the memory of a schedule, and return it."""
    from retrograde.plan import plan

    alpha, state = options["alpha"], options["state"]
    if state is not None and (alpha or state) < state:
        raise RetrogradeError(
            f"--alpha {alpha} is less than --state {state}: expected both in bytes"
        )
    slots = memory if memory is None or state is not None else _whole(memory)
    schedule = plan(length, slots, **options)
    console = Console(highlight=False)
    cost, peak = schedule.cost, f"{schedule.peak:,}"
    if state is not None:
        peak += f" of {schedule.memory:,} bytes"
    elif slots is not None:
        peak += f" of {slots:,} slots"
    for name, value in {
        "cost": f"{cost:,} forward steps, {cost / length:.3g} for each; "
        f"{_against_ordinary(cost, length):.3f}× the time of ordinary BPTT "
        "where backward takes as long as two forwards",
        "bound": f"no schedule of this policy takes fewer than {schedule.bound:,}"
        if schedule.bound is not None and schedule.bound < cost
        else "",
        "peak": peak,
        "actions": f"{len(schedule):,}",
        "schedule": str(schedule) if len(schedule) <= _SHORT else "",
    }.items():
        if value:
            console.print(f"[bold]{name:<10}[/]{value}", soft_wrap=True)
    if isinstance(slots, int):
        asked = {max(1, slots * 2**power // 16) for power in range(8)}
        console.print(_trade_off(length, sorted(asked), options, bold=slots))
    return schedule


def _whole(memory: str) -> int | str:
    """Return a whole number, or the text unchanged, which the planner refuses."""
    try:
        return int(memory)
    except ValueError:
        try:
            parse_memory(memory)
        except UnitError:
            return memory
        raise RetrogradeError(
            f"--memory {memory} is bytes: --state and --alpha are then needed, the bytes of a "
            "hidden and of an internal state; for a layer ask retrograde fit lstm --help"
        ) from None


def _show_curve(length: int, options: dict[str, Any], picture: Path) -> None:
    """Print some points of the trade-off curve, and draw all of them."""
    from retrograde.figures import draw_trade_off
    from retrograde.plan import trade_off

    curve = trade_off(length, **options)
    points = len(curve)
    shown = sorted({round((points - 1) * (i / _ROWS) ** 2) for i in range(_ROWS + 1)})
    Console(highlight=False).print(
        _trade_off(length, curve.memory[shown].tolist(), options),
        f"{points:,} memories at which the cost drops, from the least feasible, "
        f"{curve.memory[0]:,}, to plenty, {curve.memory[-1]:,}",
    )
    _save(draw_trade_off(curve), picture)


def _trade_off(length: int, memories: list[int], options: dict[str, Any], bold: int = 0) -> Table:
    import numpy as np

    from retrograde.plan import cost

    title = f"What memory buys: {options['policy']}, {length:,} steps"
    table = Table(title=title, title_justify="left")
    for column in ("memory", "forward steps", "for each step", "× ordinary BPTT"):
        table.add_column(column, justify="right")
    sizes = {name: options[name] for name in ("policy", "alpha", "beta")}
    costs: list[int] = np.asarray(cost(length, memories, **sizes)).tolist()
    for slots, steps in zip(memories, costs, strict=True):
        table.add_row(
            f"{slots:,}",
            f"{steps:,}",
            f"{steps / length:.3g}",
            f"{_against_ordinary(steps, length):.3f}",
            style="bold" if slots == bold else "",
        )
    return table


def _against_ordinary(cost: int, length: int) -> float:
    """Return the time of an iteration relative to ordinary BPTT; backward takes two forwards."""
    return (cost / length + 2) / 3


def _save(figure: "Figure", picture: Path) -> None:
    if not picture.suffix:  # matplotlib would choose one, and so write another file
        raise RetrogradeError(f"cannot draw {picture}: it has no extension; try .svg or .png")
    try:
        with _writing("picture", picture):
            figure.savefig(picture, dpi=160)
    except ValueError as error:  # an extension that matplotlib does not know
        raise RetrogradeError(f"cannot draw {picture}: {error}; try .svg or .png") from error


@contextmanager
def _writing(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RetrogradeError(
            f"cannot write {path}: {error.strerror or error}; make room there, or name a file that "
            "can be written"
        ) from error
    typer.echo(f"{what} written to {path}")


if __name__ == "__main__":
    main()
