"""The command ``retrograde``: the library without writing a program.

Each command imports its needs when it runs. So help appears at once, ``plan`` works without torch,
and the message about a missing package names the extra that installs it.
"""

import shlex
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from retrograde import __version__
from retrograde.errors import RetrogradeError

try:
    import typer
    from rich.console import Console
    from rich.table import Table

    from retrograde.console import INTERRUPTED, Threads, clean_errors, new_table, require
    from retrograde.files import write_file, write_text
    from retrograde.machine import check_parallel
    from retrograde.profile_command import profile
except ModuleNotFoundError as missing:
    sys.exit(f"the command needs {missing.name}: pip install 'retrograde[cli]'")

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from retrograde.schedule import Schedule

__all__ = ["app", "main"]

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
app.command("profile")(profile)


def main() -> None:
    """Run the command; exit with code 0, or 2 for an error that the user can correct."""
    app()


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
def train(
    context: typer.Context,
    memory: Annotated[
        str,
        typer.Option(
            help="Working memory of the LSTM: a share of ordinary BPTT's (5%), or bytes (64MiB). "
            "Its outputs, the embedding and the linear layer are not counted."
        ),
    ] = "5%",
    length: Annotated[int, typer.Option(min=1, help="Characters in a sequence.")] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 64,
    hidden: Annotated[int, typer.Option(min=1, help="Width of embedding and LSTM.")] = 256,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations in all.")] = 60,
    learning_rate: Annotated[float, typer.Option(help="Adam learning rate.")] = 0.01,
    text: Annotated[
        Path | None,
        typer.Option(help="UTF-8 file to learn from; Python's documentation by default."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 1,
    threads: Threads = None,
    report: Annotated[Path, typer.Option(help="Folder for everything written.")] = Path("report"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run in the report folder, bit for bit as if it had not stopped. "
            "Its own options apply; --iterations may be raised.",
        ),
    ] = False,
) -> None:
    """Train a character model on long sequences; the LSTM's backpropagation has a memory budget.

    Needs no data and no GPU. Writes a checkpoint after every iteration, and at the end pictures,
    metrics and weights to the report folder.
    """
    given = {
        name: value
        for name, value in context.params.items()
        if name not in ("report", "resume") and _is_named(context, name)
    }
    with clean_errors():
        require("torch")
        require("matplotlib", "'retrograde[cli]'")
        if threads is not None and not resume:  # a resumed run keeps its number of threads
            check_parallel("--threads", threads)
        _train(report, given, resume)


def _is_named(context: typer.Context, option: str) -> bool:
    """Return whether the user named the option, rather than leave it at its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _train(folder: Path, given: dict[str, Any], resume: bool) -> None:
    console = Console(highlight=False)
    try:
        from retrograde.training import run_program

        run_program(folder, given, resume, console)
    except KeyboardInterrupt:
        saved = (folder / "checkpoint.pt").exists()
        again = f"continue with: retrograde train --resume --report {shlex.quote(str(folder))}"
        remedy = again if saved else "no iteration was finished, so start a new run"
        console.print(f"\nstopped; {remedy}", markup=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def plan(
    length: Annotated[int, typer.Option(help="Steps of the sequence.")],
    memory: Annotated[
        str | None,
        typer.Option(
            help="Slots, in the policy's unit; none for store-all. With --state, bytes (64MiB) or "
            "a share of ordinary BPTT's memory (5%)."
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="hsm, ism, msm, best or store-all. By default best where --alpha is given, else "
            "hsm."
        ),
    ] = None,
    alpha: Annotated[
        int | None,
        typer.Option(
            help="msm, best: size of an internal state, in hidden states; with --state, bytes."
        ),
    ] = None,
    beta: Annotated[
        int | None,
        typer.Option(
            help="msm, best: the same where its input hidden state is kept; by default α less a "
            "hidden state."
        ),
    ] = None,
    state: Annotated[
        int | None, typer.Option(help="msm, best: bytes of a hidden state, to plan in bytes.")
    ] = None,
    curve: Annotated[
        bool,
        typer.Option(
            "--curve", help="Every memory at which the cost drops: a table, and a picture of all."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw the schedule to this file (.svg, .png, .pdf); with --curve, the curve, by "
            "default to trade_off.svg."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the schedule to this file.")] = None,
    actions: Annotated[bool, typer.Option("--actions", help="List every action.")] = False,
) -> None:
    """Cost, memory and picture of a policy's schedule, or its trade-off curve.

    hsm and msm count hidden states, the initial one included, and not the working core; ism counts
    internal states, the working core included. Needs no torch.
    """
    kind: dict[str, Any] = {"policy": policy or ("hsm" if alpha is None else "best")}
    kind |= {"alpha": alpha, "beta": beta}
    with clean_errors():
        if picture is not None or curve:
            require("matplotlib", "'retrograde[cli]'")
        if curve:
            if not (memory is None and state is None and json is None and not actions):
                raise RetrogradeError(
                    "--curve shows every memory: leave out --memory, --state, --json and --actions"
                )
            _show_curve(length, kind, picture or Path("trade_off.svg"))
            return
        schedule = _describe(length, memory, kind | {"state": state})
        if actions:
            typer.echo("\n".join(map(str, schedule)))
        if json is not None:
            write_text(json, schedule.to_json())
            typer.echo(f"schedule written to {json}")
        if picture is not None:
            from retrograde.figures import draw_schedule

            _save(draw_schedule(schedule), picture)


def _describe(length: int, memory: str | None, kind: dict[str, Any]) -> "Schedule":
    """Print the cost and the memory of a schedule, and return it."""
    from retrograde.plan import plan

    in_bytes = kind["state"] is not None
    slots = memory if memory is None or in_bytes else _whole(memory)
    schedule = plan(length, slots, **kind)
    console = Console(highlight=False)
    cost, peak = schedule.cost, f"{schedule.peak:,}"
    if in_bytes:
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
        console.print(_trade_off(length, sorted(asked), kind, bold=slots))
    return schedule


def _whole(memory: str) -> int | str:
    """Return a whole number, or the text unchanged, which the planner refuses."""
    try:
        return int(memory)
    except ValueError:
        return memory


def _show_curve(length: int, kind: dict[str, Any], picture: Path) -> None:
    """Print some points of the trade-off curve, and draw all of them."""
    from retrograde.figures import draw_trade_off
    from retrograde.plan import trade_off

    curve = trade_off(length, **kind)
    points = len(curve)
    shown = sorted({round((points - 1) * (i / _ROWS) ** 2) for i in range(_ROWS + 1)})
    Console(highlight=False).print(
        _trade_off(length, curve.memory[shown].tolist(), kind),
        f"{points:,} memories at which the cost drops, from the least feasible, "
        f"{curve.memory[0]:,}, to plenty, {curve.memory[-1]:,}",
    )
    _save(draw_trade_off(curve), picture)


def _trade_off(length: int, memories: list[int], kind: dict[str, Any], bold: int = 0) -> Table:
    import numpy as np

    from retrograde.plan import cost

    columns = ("memory", "forward steps", "for each step", "× ordinary BPTT")
    table = new_table(f"What memory buys: {kind['policy']}, {length:,} steps", columns)
    sizes = {name: kind[name] for name in ("policy", "alpha", "beta")}
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
        write_file(picture, lambda place: figure.savefig(place, dpi=160))
    except ValueError as error:  # an extension that matplotlib does not know
        raise RetrogradeError(f"cannot draw {picture}: {error}; try .svg or .png") from error
    typer.echo(f"picture written to {picture}")


def _hand_over(context: typer.Context) -> None:
    """Run a command of the papers' package."""
    name = context.info_name
    found = [*entry_points(group="retrograde.commands", name=str(name))]
    with clean_errors():
        if not found:
            raise RetrogradeError(
                f"retrograde {name} comes with the papers' experiments: pip install "
                "retrograde-papers, or, in a checkout, pip install ./papers"
            )
    command = found[0].load()
    code = command(args=context.args, prog_name=context.command_path, standalone_mode=False)
    raise typer.Exit(code or 0)


_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": list[str](),
}


@app.command("figures", context_settings=_PASSED_ON)
def draw_figures(context: typer.Context) -> None:
    """Every figure of Gruslys et al. (2016) and of Wang (2020), with its numbers."""
    _hand_over(context)


@app.command("bench", context_settings=_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Claims of speed: the same training in several ways, side by side in one run."""
    _hand_over(context)


if __name__ == "__main__":
    main()
