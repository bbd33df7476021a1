"""What the scripts of this folder share: their arguments, rows, JSON, turns and processes.

A script has tables. Each writes one JSON file, whose numbers ``render_numbers.py`` puts into pages:

    python benchmarks/SCRIPT.py --help                  # its tables, with what each claims
    python benchmarks/SCRIPT.py TABLE                   # JSON into benchmarks/results/
    python benchmarks/SCRIPT.py TABLE --only LSTM       # such rows anew, the others as they were
    python benchmarks/SCRIPT.py TABLE --rounds 1        # less than usual: nothing is written
    python benchmarks/SCRIPT.py TABLE --results FOLDER  # JSON of what was asked into that folder
"""

import argparse
import contextlib
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import retrograde as rg
from retrograde.machine import machine_of, now

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
MIB = 2**20
CPU = torch.device("cpu")
K = TypeVar("K")
Row = dict[str, Any]

sys.path.insert(0, str(ROOT / "tests"))  # where ``oracles`` are, which several scripts run


class Run(argparse.Namespace):
    """One run of a table; its attributes are the options that were asked."""

    loses = False  # whether rows are left out, or the file has some that would not come again

    def is_short(self) -> bool:
        """Whether less was asked than usual, which does not replace what was measured in full."""
        numbers = {k: v for k, v in self.usual.items() if type(v) is int and k != "workers"}
        return getattr(self, "quick", False) or any(getattr(self, k) < numbers[k] for k in numbers)

    @property
    def path(self) -> Path:
        return Path(self.results) / f"{self.file.format(**vars(self))}.json"

    def stored(self) -> Row:
        """What the file has."""
        found = json.loads(self.path.read_text()) if self.path.is_file() else {}
        return found if isinstance(found, dict) else {}

    def old(self) -> Row:
        """What the file has, if only some rows are wanted anew."""
        return self.stored() if self.only else {}

    def rows(
        self, cases: Mapping[str, Any] | Iterable[Any], measure: Callable[[Any], Any], *shown: str,
        part: str = "rows", workers: int = 0, start: str = "spawn", each: int = 50,
    ) -> list[Row]:  # fmt: skip
        """What ``measure`` makes of each case: a row, some, or None where a library is absent.

        A row's first entry is the name of its case. With workers, as many processes measure, on one
        thread, and each ends after so many cases.
        """
        named = cases if isinstance(cases, Mapping) else {str(case): case for case in cases}
        chosen = {name: case for name, case in named.items() if self.only in name}
        new: dict[str, list[Row]] = {}
        with contextlib.ExitStack() as stack:
            apply: Any = map
            if workers:
                pool = get_context(start).Pool(workers, torch.set_num_threads, (1,), each)
                apply = stack.enter_context(pool).imap
            for name, found in zip(chosen, apply(measure, chosen.values()), strict=True):
                new[name] = found if isinstance(found, list) else [found] if found else []
                for row in new[name]:
                    print(name, *(f"{k} {told(row[k])}" for k in shown if k in row), flush=True)
                if not new[name]:
                    print(f"{name}: left out", flush=True)
        known = self.old().get(part, [])
        kept = {n: [row for row in known if next(iter(row.values())) == n] for n in named}
        self.loses |= not all(new.values())
        self.loses |= bool(self.only) and (not known or len(known) > sum(map(len, kept.values())))
        return [row for name in named for row in new.get(name) or kept[name]]

    def also(self, part: str, measure: Callable[[], Any]) -> Any:
        """Another part of the file, which is measured if all of the rows are."""
        return self.old().get(part) if self.only else measure()

    def write(self, machine: Row | list[Row] | None = None, **parts: Any) -> None:
        """Write the JSON, unless it would replace more than was measured.

        Where nothing depends on the machine, rows alone are written.
        """
        if (self.is_short() or self.loses) and self.path.parent == RESULTS:
            print("nothing is written: this is less than what the file has")
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        machine = machine or machine_of(getattr(self, "device", "cpu"))
        document = machine if isinstance(machine, list) else {"machine": machine, **parts}
        text = json.dumps(document, indent=1, ensure_ascii=False)
        self.path.write_text(text + "\n", encoding="utf-8")
        print(f"written to {self.path}")


class Script:
    """The tables of a script: functions of a :class:`Run`, by name."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[str, Callable[[Run], None], Row]] = {}

    def table(self, file: str, **usual: Any) -> Callable[[Callable[[Run], None]], Any]:
        """Enter a function: the name of its JSON file, and its options with their usual values."""

        def enter(run: Callable[[Run], None]) -> Callable[[Run], None]:
            self.tables[run.__name__] = file, run, usual
            return run

        return enter

    def main(self) -> None:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers(required=True, metavar="TABLE")
        for name, (file, run, usual) in self.tables.items():
            text = (inspect.getdoc(run) or "").replace("%", "%%")
            command = commands.add_parser(name, help=text.splitlines()[0], description=text)
            command.set_defaults(file=file, run=run, usual=usual)
            command.add_argument("--only", default="", help="part of a name")
            command.add_argument("--results", type=Path, default=RESULTS, help="folder")
            command.add_argument("--threads", type=int, default=2)
            for option, value in usual.items():
                kind: Any = {"action": "store_true"} if value is False else {"type": type(value)}
                command.add_argument(f"--{option}", default=value, **kind)
        asked = parser.parse_args(namespace=Run())
        torch.set_num_threads(asked.threads)
        warnings.simplefilter("ignore")
        asked.run(asked)


def told(value: Any) -> str:
    """A value in a line."""
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key}: {told(one)}" for key, one in value.items()) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(told, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def seconds(call: Callable[[], object], device: torch.device = CPU) -> float:
    """What one call takes, with all that it began on the device."""
    start = now(device)
    call()
    return now(device) - start


def turns(
    calls: Mapping[K, Callable[[], object]], rounds: int, device: torch.device = CPU,
    *, warm: int = 0, after: Callable[[], object] = int,
) -> dict[K, list[float]]:  # fmt: skip
    """The seconds of each call over rounds, in every one of which each is called once, in an order
    of its own. Rounds to warm up do not count; ``after`` follows each call, untimed."""
    times, items = {key: list[float]() for key in calls}, [*calls.items()]
    for turn in range(warm + rounds):
        for key, call in random.Random(turn).sample(items, len(items)):
            taken = seconds(call, device)
            times[key] += [taken] * (turn >= warm)
            after()
    return times


def medians(
    calls: Mapping[K, Callable[[], object]], rounds: int, device: torch.device = CPU, **options: Any
) -> dict[K, float]:
    """The median seconds of each call, in turns."""
    taken = turns(calls, rounds, device, **options)
    return {key: statistics.median(each) for key, each in taken.items()}


def beside(calls: Mapping[str, Callable[[], object]], rounds: int) -> Row:
    """Times of calls by the plain one's, and their working bytes."""
    taken = medians(calls, rounds)
    return {
        "plain_ms": round(1e3 * taken["plain"], 2),
        "ratios": {key: round(one / taken["plain"], 3) for key, one in taken.items()},
        "bytes": {key: rg.measure(call).working_bytes for key, call in calls.items()},
    }


def summary(rows: list[Row], keys: Iterable[str] = ()) -> Row:
    """Of some or all keys of the rows' ratios: how many have it, the worst, whose, and the mean."""
    found = {}
    for key in keys or dict.fromkeys(key for row in rows for key in row["ratios"]):
        ratios = [(r["ratios"][key], next(iter(r.values()))) for r in rows if key in r["ratios"]]
        if ratios:
            worst, whose = max(ratios, key=lambda pair: pair[0])
            mean = round(statistics.geometric_mean(ratio for ratio, _ in ratios), 3)
            found[key] = {"rows": len(ratios), "worst": worst, "whose": whose, "mean": mean}
            print(key, told(found[key]), flush=True)
    return found


def difference(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest difference of tensors, relative to the largest number of each."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().amax() / b.abs().amax().clamp_min(1e-30)) for a, b in pairs)


def fresh(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """What a function of a script returns in a process of its own; both ways pass JSON."""
    file = Path(inspect.getfile(function))
    code = (
        f"import json, sys, warnings; sys.path.insert(0, {str(file.parent)!r}); "
        f"warnings.simplefilter('ignore'); from {file.stem} import {function.__name__} as call; "
        "print(json.dumps(call(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    found = subprocess.check_output(command, env=os.environ | environment, text=True)
    return json.loads(found.splitlines()[-1])
