"""The command ``bench``: claims of speed, both sides in one run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from retrograde_papers.console import INTERRUPTED, Device, Threads, clean_errors, require
from retrograde_papers.options import (
    SETS,
    WAYS,
    ExperimentError,
    Options,
    parse_choices,
    parse_numbers,
)

if TYPE_CHECKING:
    from retrograde_papers.images import Images

__all__ = ["bench"]

_WAYS = ",".join(WAYS)
_ITERATIONS = 1000  # of bitstreams, where neither iterations nor epochs are named
_DEEP_ITERATIONS = 30  # of deep networks, likewise
_MEMORIES = "50%", "25%"
_EPOCHS = 20  # of instruments, likewise
_NOISE = 2048, 512  # images to learn from and held out, where there are no others

bench = typer.Typer(
    help="Claims of speed: the same training in several ways, side by side in one run.",
    no_args_is_help=True,
)

Iterations = Annotated[int | None, typer.Option(help="Iterations of training, for each way.")]
Epochs = Annotated[int | None, typer.Option(help="The same, in passes over the training data.")]
Batch = Annotated[int, typer.Option(help="Training batch size.")]
Rate = Annotated[float, typer.Option(help="Adam learning rate.")]
Seed = Annotated[int, typer.Option(help="Seed of weights, order and synthesised data.")]
Ways = Annotated[
    str,
    typer.Option(
        help="What takes turns: torch (torch's own module, which the others are compared with), "
        "sequential, scan."
    ),
]
Batches = Annotated[str, typer.Option(help="Batch sizes at which seconds are measured.")]
Rounds = Annotated[int, typer.Option(help="Times that seconds are measured, at least.")]
Only = Annotated[
    str | None, typer.Option(help="Measure only the curves, or only the seconds; by default both.")
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(help="File for the numbers, as JSON; by default in the report folder."),
]
ImageFolder = Annotated[Path | None, typer.Option(help="Folder of cifar10.npz.")]
ImageBatch = Annotated[int, typer.Option(help="Images in a batch.")]
OfSGD = Annotated[float, typer.Option(help="SGD learning rate.")]
Momentum = Annotated[float, typer.Option(help="SGD momentum.")]
Width = Annotated[int, typer.Option(help="Channels of the first convolution.")]
Note = Annotated[str, typer.Option(help="Name of the machine, for the captions.")]
ReportFolder = Annotated[Path, typer.Option(help="Folder for the figures.")]


@bench.command("bitstream")
def bitstream(
    length: Annotated[int, typer.Option(help="Bits in a stream, in training.")] = 1000,
    batch: Batch = 16,
    iterations: Iterations = None,
    epochs: Epochs = None,
    learning_rate: Rate = 3e-4,
    seed: Seed = 0,
    ways: Ways = _WAYS,
    lengths: Annotated[
        str, typer.Option(help="Lengths at which seconds are measured.")
    ] = "10,30,100,300,1000,3000,10000,30000",
    batches: Batches = "2,4,8,16,32,64,128,256",
    rounds: Rounds = 5,
    device: Device = "cpu",
    threads: Threads = None,
    only: Only = None,
    results: ResultsFile = None,
    report: ReportFolder = Path("report"),
) -> None:
    """Tell ten kinds of random bitstreams apart by an RNN of 20 units (figures 5.1 and 5.2).

    The task of Wang, *BPPSA* (2020), 4.1. Adam at 3e-4 for 1,000 iterations, where the paper has
    3e-5 for 50 epochs of 2,000: --learning-rate 3e-5 --epochs 50. Needs no data.
    """
    with _at_work() as console:
        from wang2020.program import Output, run_bitstream

        if iterations is None and epochs is None:
            iterations = _ITERATIONS
        options = Options(
            "bitstream",
            batch=batch,
            learning_rate=learning_rate,
            iterations=iterations,
            epochs=epochs,
            seed=seed,
            ways=parse_choices("--ways", ways, WAYS),
            batches=parse_numbers("--batches", batches),
            lengths=parse_numbers("--lengths", lengths),
            length=length,
            rounds=rounds,
            device=device,
        )
        output = Output(report, results, only)
        _run(partial(run_bitstream, options, output, console), threads)


@bench.command("instruments")
def instruments(
    data: Annotated[
        Path | None, typer.Option(help="Folder of instruments_s.npz, _m.npz and _l.npz.")
    ] = None,
    irmas: Annotated[
        Path | None,
        typer.Option(help="Folder IRMAS-TrainingData, in place of --data; needs librosa."),
    ] = None,
    sets: Annotated[
        str, typer.Option("--set", help="s, m, l (259, 517, 1,034 steps of 3 s), or all.")
    ] = "s",
    batch: Batch = 16,
    iterations: Iterations = None,
    epochs: Epochs = None,
    learning_rate: Rate = 3e-3,
    seed: Seed = 0,
    ways: Ways = _WAYS,
    batches: Batches = "16,64,256",
    rounds: Rounds = 5,
    device: Device = "cpu",
    threads: Threads = None,
    only: Only = None,
    results: ResultsFile = None,
    report: ReportFolder = Path("report"),
) -> None:
    """Tell eleven instruments apart by a GRU of 20 units (figures 5.3 and 5.4).

    The task of Wang, *BPPSA* (2020), 4.2: MFCCs of recordings of 3 s. Adam at 3e-3 for 20 epochs,
    where the paper has 3e-5 for 400: --learning-rate 3e-5 --epochs 400.
    """
    with _at_work() as console:
        from wang2020.program import Output, Source, run_instruments

        if iterations is None and epochs is None:
            epochs = _EPOCHS
        options = Options(
            "instruments",
            batch=batch,
            learning_rate=learning_rate,
            iterations=iterations,
            epochs=epochs,
            seed=seed,
            ways=parse_choices("--ways", ways, WAYS),
            batches=parse_numbers("--batches", batches),
            rounds=rounds,
            device=device,
        )
        names = parse_choices("--set", sets, SETS)
        output = Output(report, results, only)
        source = Source(names, data, irmas)
        _run(partial(run_instruments, source, options, output, console), threads)


@bench.command("lenet")
def lenet(
    data: ImageFolder = None,
    epochs: Annotated[int, typer.Option(help="Passes over the images.")] = 1,
    batch: ImageBatch = 256,
    learning_rate: OfSGD = 0.001,
    momentum: Momentum = 0.9,
    algorithm: Annotated[
        str, typer.Option(help="Algorithm of the scan: linear, blelloch or auto.")
    ] = "blelloch",
    seed: Seed = 0,
    threads: Threads = None,
    report: ReportFolder = Path("report"),
) -> None:
    """Train LeNet-5 on CIFAR-10 by torch and by the scan, side by side (figure 3.4).

    The task of Wang, *BPPSA* (2020), 3.5, with its hyperparameters. Without --data the images are
    noise, brighter in one colour by class.
    """
    with _at_work() as console:
        from wang2020 import networks
        from wang2020.convergence import Comparison

        how = Comparison(epochs, batch, learning_rate, momentum, algorithm, seed)
        images = _images(data, seed, threads)
        networks.run_lenet(images, how, report, console)


@bench.command("vgg11")
def vgg11(
    data: ImageFolder = None,
    epochs: Annotated[int, typer.Option(help="Passes of training, and as many of retraining.")] = 1,
    batch: ImageBatch = 128,
    learning_rate: Annotated[float, typer.Option(help="Highest SGD learning rate.")] = 0.05,
    share: Annotated[
        float, typer.Option(help="Share of every layer's weights that is pruned.")
    ] = 0.97,
    width: Width = 64,
    seed: Seed = 0,
    threads: Threads = None,
    report: ReportFolder = Path("report"),
) -> None:
    """Train VGG-11, prune it, train it again, and count the scan's FLOPs (figure 5.5).

    The task of Wang, *BPPSA* (2020), 4.3 and 5.3. Without --data the images are noise, brighter in
    one colour by class.
    """
    with _at_work() as console:
        from wang2020 import networks
        from wang2020.pruning import Training

        how = Training(epochs, batch, learning_rate, share, width, seed)
        images = _images(data, seed, threads)
        networks.run_vgg11(images, how, report, console)


@bench.command("deep")
def deep(
    data: ImageFolder = None,
    network: Annotated[str, typer.Option(help="vgg11, resnet18 or resnet34.")] = "vgg11",
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="A budget: a share of what ordinary backpropagation holds (50%), or bytes "
            "(64MiB). May be given several times; by default 50% and 25%."
        ),
    ] = None,
    iterations: Iterations = None,
    epochs: Epochs = None,
    batch: ImageBatch = 16,
    learning_rate: OfSGD = 0.01,
    momentum: Momentum = 0.9,
    width: Width = 64,
    points: Annotated[
        int, typer.Option(help="Budgets from the least on that are measured besides.")
    ] = 3,
    segments: Annotated[
        str,
        typer.Option(
            help="Numbers of segments of checkpoint_sequential, to compare with; or none."
        ),
    ] = "2,3,4,6",
    rounds: Rounds = 3,
    seed: Seed = 0,
    threads: Threads = None,
    note: Note = "",
    report: ReportFolder = Path("report"),
) -> None:
    """Train a deep network ordinarily and within budgets, on the same batches, side by side.

    Losses, what one iteration holds, planned and measured, and what other budgets would buy. A
    budget that is too small is refused, and the least is named. Without --data the images are
    noise, brighter in one colour by class.
    """
    with _at_work() as console:
        from gruslys2016.deep import Options as DeepOptions
        from wang2020 import networks

        if iterations is None and epochs is None:
            iterations = _DEEP_ITERATIONS
        how = DeepOptions(
            network=network,
            memories=tuple(dict.fromkeys(memory or _MEMORIES)),
            iterations=iterations,
            epochs=epochs,
            batch=batch,
            learning_rate=learning_rate,
            momentum=momentum,
            width=width,
            points=points,
            segments=() if segments == "none" else parse_numbers("--segments", segments),
            rounds=rounds,
            seed=seed,
            images="noise" if data is None else "CIFAR-10",
            note=note,
        )
        images = _images(data, seed, threads)
        networks.run_deep(images, how, report, console)


@bench.command("ranks")
def ranks(
    ranks: Annotated[int, typer.Option(help="Processes of this machine, of a thread each.")] = 2,
    hidden: Annotated[int, typer.Option(help="Units of the GRU, and its inputs.")] = 32,
    steps: Annotated[int, typer.Option(help="Steps of each rank.")] = 200,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 16,
    rounds: Rounds = 5,
    seed: Seed = 0,
    note: Note = "",
    report: ReportFolder = Path("report"),
) -> None:
    """Run one sequence across processes, and compute what 2 to 10⁶ ranks would take.

    Latency, bandwidth and a rank's own work are measured; a GRU goes back across the ranks in a
    line and in a tree, beside what the model says; the figures are of the model.
    """
    with _at_work() as console:
        from wang2020.ranks import Options as RankOptions
        from wang2020.ranks import run_ranks

        how = RankOptions(ranks, hidden, steps, batch, rounds, seed, note)
        run_ranks(how, report, console)


@contextmanager
def _at_work() -> Iterator[Console]:
    """Errors that the user can put right, and Ctrl-C, end the command with a message."""
    console = Console(highlight=False)
    with clean_errors():
        require("torch")
        require("matplotlib", "'.[cli]'")
        try:
            yield console
        except KeyboardInterrupt:
            console.print("\nstopped; nothing was written")
            raise typer.Exit(INTERRUPTED) from None


def _images(data: Path | None, seed: int, threads: int | None) -> "Images":
    from retrograde_papers.images import load_images, noise_images
    from retrograde_papers.limits import use_threads

    use_threads(threads)
    return noise_images(*_NOISE, seed) if data is None else load_images(data)


def _run(experiment: Callable[[], object], threads: int | None) -> None:
    """Run an experiment on sequences; a lack of memory is an error that says what to do."""
    from retrograde_papers.limits import is_out_of_memory, use_threads

    use_threads(threads)
    try:
        experiment()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ExperimentError(
            "the machine has too little memory for this: name smaller --lengths, --batches or "
            "--batch"
        ) from error
