"""The whole of ``bench bitstream`` and ``instruments``, from options to files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from retrograde_papers.files import check_folder, write_text
from retrograde_papers.limits import check_device
from retrograde_papers.options import ExperimentError, Options
from retrograde_papers.plates import write_plate
from wang2020.bitstream import Bitstreams
from wang2020.display import breakdown_table, conclude, progress, speedup_table
from wang2020.figures import plates_of
from wang2020.instruments import FEATURES, Instruments, load_instruments
from wang2020.irmas import find_recordings, load_irmas, require_librosa
from wang2020.race import Runner, curves_of, race, runners_for
from wang2020.results import Curves, Results, ResultsError, Timing, Timings
from wang2020.seconds import Point, TaskOf, grid_of, measure_seconds
from wang2020.task import Task

__all__ = ["Output", "Source", "run_bitstream", "run_instruments"]

_PARTS = ("curves", "seconds")
_PAPER = {
    "bitstream": {"length": 1000, "batch": 16, "learning_rate": 3e-5, "epochs": 50},
    "instruments": {"batch": 16, "learning_rate": 3e-5, "epochs": 400},
}


@dataclass(frozen=True)
class Output:
    """Where an experiment writes, and which part of it is wanted.

    Attributes:
        report: folder for the figures.
        results: file for the numbers; by default in the report folder. What it has of the other
            part is kept.
        only: ``"curves"`` or ``"seconds"``; both if None.

    Raises:
        ExperimentError: there is no such part.
    """

    report: Path
    results: Path | None = None
    only: str | None = None

    def __post_init__(self) -> None:
        if self.only not in (None, *_PARTS):
            raise ExperimentError(f"--only is {self.only!r}: expected {' or '.join(_PARTS)}")

    def wants(self, part: str) -> bool:
        """Whether a part is to be measured."""
        return self.only in (None, part)

    def path(self, experiment: str) -> Path:
        """The file for the numbers of an experiment."""
        return self.report / f"{experiment}.json" if self.results is None else self.results

    def earlier(self, experiment: str) -> Results:
        """What the file has already, empty if there is none; looked at before any work.

        Raises:
            ExperimentError: the file is something else.
            RetrogradeError: a folder cannot be written.
        """
        path = self.path(experiment)
        for folder in (self.report, path.parent):
            check_folder(folder)
        if not path.exists():
            return Results(experiment)
        remedy = "name another file with --results"
        try:
            found = Results.from_json(path.read_text(encoding="utf-8"))
        except (ResultsError, UnicodeDecodeError, OSError) as error:
            raise ExperimentError(f"{path} is in the way: {error}; {remedy}") from error
        if found.experiment != experiment:
            raise ExperimentError(
                f"{path} has results of {found.experiment!r}, not of {experiment!r}: {remedy}"
            )
        return found

    def write(self, results: Results, console: Console) -> None:
        """Write the numbers over those of the file, and the figures drawn from them."""
        path = self.path(results.experiment)
        results = results.over(self.earlier(results.experiment))
        write_text(path, results.to_json())
        for plate in plates_of(results):
            write_plate(plate, self.report)
        console.print(f"numbers in {path}, figures in {self.report}", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Source:
    """Where the recordings of instruments are.

    Attributes:
        names: of the sets that are wanted.
        data: folder of ready-made sequences.
        irmas: folder of the original WAV files, in place of it.

    Raises:
        ExperimentError: no folder is given, or both.
    """

    names: tuple[str, ...]
    data: Path | None = None
    irmas: Path | None = None

    def __post_init__(self) -> None:
        if (self.data is None) == (self.irmas is None):
            files = ", ".join(f"instruments_{name}.npz" for name in FEATURES)
            given = "no data given" if self.data is None else "--data and --irmas, both given"
            raise ExperimentError(
                f"{given}: give --data FOLDER with {files}, or --irmas FOLDER with "
                "IRMAS-TrainingData"
            )

    def load(self, seed: int, console: Console) -> dict[str, Instruments]:
        """Read the sets, a task of each name; ExperimentError if the data are not there."""
        if self.irmas is None:
            assert self.data is not None
            return {name: load_instruments(self.data, name) for name in self.names}
        require_librosa()
        files = sum(map(len, chain(*find_recordings(self.irmas).values())))
        with progress(console, "reading", files) as update:
            return load_irmas(self.irmas, self.names, seed, lambda done: update(done, "files"))


def run_bitstream(options: Options, output: Output, console: Console) -> Results:
    """Sections 4.1 and 5.1: curves of figure 5.1, seconds of figure 5.2."""
    check_device(options.device)
    output.earlier(options.experiment)  # refuses before any work
    task = Bitstreams(options.length, options.seed)

    def task_of(_: str, length: int) -> Task:
        return Bitstreams(length, options.seed)

    found = _measure({"": task}, task_of, grid_of(options, []), options, output, console)
    output.write(found, console)
    return found


def run_instruments(source: Source, options: Options, output: Output, console: Console) -> Results:
    """Sections 4.2 and 5.2: curves of figure 5.3, seconds of figure 5.4."""
    check_device(options.device)
    output.earlier(options.experiment)  # refuses before any work
    loaded = source.load(options.seed, console)
    tasks: dict[str, Task] = {name.upper(): task for name, task in loaded.items()}
    grid = grid_of(options, [(name, task.length) for name, task in tasks.items()])
    found = _measure(tasks, lambda name, _: tasks[name], grid, options, output, console)
    output.write(found, console)
    return found


def _measure(
    tasks: Mapping[str, Task],
    task_of: TaskOf,
    grid: Sequence[Point],
    options: Options,
    output: Output,
    console: Console,
) -> Results:
    for task in tasks.values():
        options.iterations_of(task.training)  # refuses a batch that is too large
    _introduce(console, tasks, options)
    curves: list[Curves] = []
    timings: Timings | None = None
    if output.wants("curves"):
        for name, task in tasks.items():
            curves.append(_race(name, task, options, console))
            conclude(console, curves[-1])
    if output.wants("seconds"):
        with progress(console, "measuring", len(grid)) as update:
            timings = measure_seconds(grid, task_of, options, _counting(update))
        console.print(speedup_table(timings) if "" in tasks else breakdown_table(timings))
    return Results(options.experiment, tuple(curves), timings)


def _race(name: str, task: Task, options: Options, console: Console) -> Curves:
    runners = runners_for(task, options)
    total = options.iterations_of(task.training)
    with progress(console, f"training {name}".strip(), total) as update:
        race(runners, task, options, partial(_show_race, update))
    return curves_of(runners, task, options, name)


def _show_race(update: Callable[[int, str], object], runners: Sequence[Runner]) -> None:
    laps = runners[0].laps
    update(len(laps), f"loss {laps[-1].loss:.3f}")


def _counting(update: Callable[[int, str], object]) -> Callable[[Timing], object]:
    done = 0

    def show(timing: Timing) -> None:
        nonlocal done
        done += 1
        update(done, f"{timing.name} T = {timing.length:,}, B = {timing.batch}".strip())

    return show


def _introduce(console: Console, tasks: Mapping[str, Task], options: Options) -> None:
    """Say what is about to be trained, and where that differs from the paper."""
    for name, task in tasks.items():
        console.print(
            f"[bold]{'set ' + name if name else 'data':<10}[/]{task.training:,} sequences of "
            f"{task.length:,} × {task.features}, {task.testing:,} held out, {task.classes} classes",
            soft_wrap=True,
        )
    task = next(iter(tasks.values()))
    iterations = options.iterations_of(task.training)
    epochs = iterations * options.batch / task.training
    console.print(
        f"[bold]{'training':<10}[/]{iterations:,} iterations ({epochs:.3g} epochs) of "
        f"{options.batch}, Adam at {options.learning_rate:g}; "
        f"{escape(', '.join(options.ways))} in turn",
        soft_wrap=True,
    )
    console.print(f"[bold]{'paper':<10}[/]{_against_paper(task, options)}", soft_wrap=True)


def _against_paper(task: Task, options: Options) -> str:
    paper = _PAPER[options.experiment]
    epochs = options.iterations_of(task.training) / (task.training // options.batch)
    here = {
        "length": options.length,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "epochs": epochs,
    }
    other = [
        f"{name.replace('_', ' ')} {here[name]:g} (there {value:g})"
        for name, value in paper.items()
        if here[name] != value
    ]
    return f"as there, but for {', '.join(other)}" if other else "as there"
