"""Claim: figure 2(b) of Gruslys et al. (2016), measured: HSM's time per step levels off.

The table shows the seconds of one gradient step, forward and backward, of an LSTM 256→256 at batch
64, beside ``torch.nn.LSTM``. The memory has room for 10, 50, 100, 500 and 1000 hidden states. All
take turns in one process; times are medians.

The place of a process's memory makes its kernels fast or slow for good, by a factor of two on some
virtual machines. So several processes measure, and the least time counts.

    python -m gruslys2016.processes                 # JSON into benchmarks/results/
    python -m gruslys2016.processes --ship          # and into papers/, for the figures
    python -m gruslys2016.processes --device cuda
"""

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gruslys2016.measured import LENGTHS, expected_seconds, measure_seconds
from gruslys2016.timed import Seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHIPPED = Path(__file__).parent / "data" / "figure_2b.json"


def main() -> None:
    """Measure, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="in steps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--ship", action="store_true", help="replace what is drawn")
    arguments = parser.parse_args()
    options = {"rounds": arguments.rounds, "device": arguments.device}
    if arguments.processes > 1:
        seconds = Seconds.least([in_a_process(arguments) for _ in range(arguments.processes)])
    else:
        minutes = expected_seconds(arguments.lengths, **options) / 60
        print(f"about {max(1, round(minutes))} min", flush=True)
        seconds = measure_seconds(arguments.lengths, **options)
    show(seconds)
    arguments.results.mkdir(parents=True, exist_ok=True)
    paths = [arguments.results / f"figure_2b_{arguments.device}.json"]
    for path in paths + [SHIPPED] * arguments.ship:
        path.write_text(seconds.to_json(), encoding="utf-8")
        print(f"written to {path}")


def in_a_process(arguments: argparse.Namespace) -> Seconds:
    """What a process of its own measures."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--processes", 1, "--rounds", arguments.rounds]
        command += ["--device", arguments.device, "--results", folder, "--lengths"]
        subprocess.check_call([*map(str, command), *map(str, arguments.lengths)])
        text = (Path(folder) / f"figure_2b_{arguments.device}.json").read_text(encoding="utf-8")
    return Seconds.from_json(text)


def show(seconds: Seconds) -> None:
    """Milliseconds per step, one line a length."""
    columns = {"torch.nn.LSTM": seconds.ordinary}
    columns |= {f"m = {memory}": column for memory, column in seconds.budgeted.items()}
    print("ms per step", *(f"{name:>14}" for name in columns))
    for row, length in enumerate(seconds.lengths):
        times = (1e3 * column[row] / length for column in columns.values())
        print(f"{length:>11}", *(f"{time:>14.3f}" for time in times))


if __name__ == "__main__":
    main()
