"""Claim: a model with unusual habits is right within its budget, or refused before it is trained.

Models are drawn by number (:mod:`oracles.drawn_models`): auxiliary losses in attributes, lists and
hooks; layers that are skipped at random, by torch or by Python; draws between layers; levels within
one another; gradients of the output that are expanded or strided. Each is trained for four steps
within each of five budgets, from the least to all of ordinary backpropagation's memory, beside the
same model without a budget.
Outputs, gradients and random states must be equal in every bit. From the third step on, the peak
must be within the budget, and what is told to be held elsewhere.

With ``--changes`` each model gets one budget, and is changed three times between its steps
(:mod:`oracles.drawn_changes`): its mode, weights, what is frozen, statistics, the batch; a backward
pass raises and is made again; the model is copied. After each change, all of the above must hold,
or an error must say what to do.

    python benchmarks/drawn_models.py               # JSON into benchmarks/results/
    python benchmarks/drawn_models.py --changes     # the same; 1,500 models
    python benchmarks/drawn_models.py --models 20   # a quick look; nothing is written
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from oracles.drawn_changes import ChangedReading, read_changed
from oracles.drawn_models import BUDGETS, SLACK_BYTES, Reading, read
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
MODELS, CHANGED = 300, 1500
#: Outcomes of changed models that break the promise.
BAD = ("wrong", "over", "raw error", "least refused")


def readings(number: int, device: str) -> list[Reading]:
    """One model within all budgets."""
    torch.set_num_threads(1)
    return [read(number, share, device=device) for share in BUDGETS]


def changed_reading(number: int) -> ChangedReading:
    """One model that is changed between its steps."""
    torch.set_num_threads(1)
    return read_changed(number)


def main_changes(numbers: range, processes: int) -> None:
    """Read models that are changed, print what came of them, and write the JSON."""
    start, found = time.perf_counter(), list[ChangedReading]()
    with get_context("spawn").Pool(processes, maxtasksperchild=100) as pool:
        for one in pool.imap(changed_reading, numbers):
            found.append(one)
            if one.outcome in BAD:
                print(one, flush=True)
    counts = Counter(one.outcome for one in found)
    errors = Counter((one.outcome, one.after) for one in found if one.outcome != "exact")
    print(f"{len(found)} models: {dict(counts)}")
    for (kind, after), count in errors.most_common():
        said = next(one.said for one in found if (one.outcome, one.after) == (kind, after))
        print(f"  {kind} after {after}, {count} times: {said[:200]}")
    if len(numbers) >= CHANGED:
        document = {
            "machine": machine_of("cpu"),
            "models": len(found),
            "outcomes": dict(counts),
            "after": [[*pair, count] for pair, count in errors.most_common()],
            "bad": [asdict(one) for one in found if one.outcome in BAD],
            "seconds": round(time.perf_counter() - start, 1),
        }
        write("changed", document)


def write(part: str, document: dict[str, Any], device: str = "cpu") -> None:
    """Put one part into the JSON; the other stays as it is."""
    path = RESULTS / f"drawn_models_{device}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    changed = {"changed": known["changed"]} if "changed" in known else {}
    found = {**known, part: document} if part else {**document, **changed}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


def outcome(reading: Reading) -> str:
    if reading.refused:
        return "refused"
    if not reading.good:
        return "wrong" if reading.wrong else "over" if reading.over else "warned"
    return "kept by what it covers" if reading.elsewhere_bytes else "kept"


def reason(reading: Reading) -> str:
    """A refusal without the names and sizes of its model."""
    known = {
        "leaves a tensor": "a layer leaves a tensor with a gradient",
        "draws random numbers of Python": "a layer draws numbers that may decide what it computes",
        "run or are skipped": "layers run or are skipped by random numbers",
        "hardly holds more": "a budget would gain nothing",
    }
    found = [text for part, text in known.items() if part in reading.refused]
    return found[0] if found else re.sub(r"\d[\d.]*( \w?iB)?", "…", reading.refused)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int)
    parser.add_argument("--changes", action="store_true", help="models that are changed")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start = time.perf_counter()
    options.models = options.models or (CHANGED if options.changes else MODELS)
    numbers = range(options.first, options.first + options.models)
    if options.changes:
        main_changes(numbers, options.processes)
        return
    ours = partial(readings, device=options.device)
    with get_context("spawn").Pool(options.processes, maxtasksperchild=50) as pool:
        found = [one for each in pool.imap(ours, numbers) for one in each]
    counts = Counter(map(outcome, found))
    bad = [one for one in found if not (one.good or one.refused)]
    reasons = Counter(reason(one) for one in found if one.refused)
    kept = [one for one in found if outcome(one) == "kept"]
    worst = max((one.peak_bytes / one.budget_bytes for one in kept), default=0.0)
    print(f"{len(numbers)} models, {len(found)} readings: {dict(counts)}")
    print(f"highest peak over its budget: {worst:.4f}")
    for text, count in reasons.most_common():
        print(f"  refused {count} times: {text}")
    for one in bad:
        print(f"  {outcome(one)}: {one}")
    if options.models >= MODELS:
        document = {
            "machine": machine_of(options.device),
            "models": len(numbers),
            "budgets": BUDGETS,
            "slack_bytes": SLACK_BYTES,
            "readings": len(found),
            "outcomes": dict(counts),
            "reasons": dict(reasons),
            "worst": round(worst, 4),
            "bad": [asdict(one) for one in bad],
            "seconds": round(time.perf_counter() - start, 1),
        }
        write("", document, options.device)


if __name__ == "__main__":
    main()
