"""The tables of docs/gpu.md: the measurements of cards, beside counted values for every row.

There is a table for each JSON that ``gpu.py`` wrote on a card. Without any, one table has empty
cells.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tables import MIB, size, table, time

__all__ = ["GPU_BLOCKS", "rendered"]

RESULTS = Path(__file__).parent / "results"
COUNTED = "gpu_expected"
Row = dict[str, Any]


def rendered(section: str, documents: list[Row], counted: list[Row]) -> str:
    """A section's tables. ``counted`` has its rows in order; a document's may be fewer."""
    (head, cells), told = TABLES[section], []
    for document in [one for one in documents if section in one["sections"]] or [{}]:
        found = {row["name"]: row for row in document.get("sections", {}).get(section, [])}
        rows = [[one["name"], *cells(found.get(one["name"], {}), one)] for one in counted]
        rows = [[name, first or "not measured", *rest] for name, first, *rest in rows]
        machine = document.get("machine")
        where = (
            f"Measured on {machine['device']}, torch {machine['torch']}; *counted* is not measured."
            if machine
            else "**Not measured: no card was at hand.** *Counted* is what counting tells."
        )
        stopped = [row["error"] for row in found.values() if row["name"] == "the section"]
        told.append(table(head, rows) + f"\n{' '.join([where, *stopped])}\n")
    return "\n".join(told)


def ratio(one: Any, other: Any) -> str:
    return f"{one / other:.3f}" if one is not None and other else ""


def budgets(found: Row, counted: Row) -> list[str]:
    if "error" in found:
        return [found["error"], "", "", "", size(counted["output_bytes"])]
    asked, blocks = found.get("requested_growth"), found.get("allocated_growth")
    reserved = found.get("reserved_growth")
    return [
        size(found["budget_bytes"]) if found else "",
        ratio(found.get("working_bytes"), found.get("budget_bytes")),
        ratio(blocks, asked),
        ratio(None if reserved is None else max(0, reserved - 22 * MIB), asked),
        size(counted["output_bytes"]),
    ]


def grid(found: Row, counted: Row) -> list[str]:
    ratios = found.get("ratios", {})
    first = found.get("error") or (time(found["torch_ms"]) if found else "")
    shares = [f"{ratios[s]:.2f}" if s in ratios else "refused" if ratios else ""
              for s in ("50%", "10%", "5%")]  # fmt: skip
    return [first, *shares]


def backward(found: Row, counted: Row) -> list[str]:
    ways = found.get("ways", {})
    theirs = ways.get("torch", {})
    taken = theirs.get("backward_seconds")
    first = "cuDNN refuses" if "error" in theirs else "" if taken is None else time(1e3 * taken)
    first = found.get("error", first)
    cells = []
    for way in ("100%", "scan"):
        one = ways.get(way, {})
        own = one.get("backward_seconds")
        alone = "" if own is None else time(1e3 * own)
        cells.append(one.get("error") or (f"{taken / own:.2f}×" if taken and own else alone))
    pairs = [
        (str(counted["sequential_launches"]), f"{counted.get('scan_launches')}"),
        (counted["name"].split("T=")[1], f"{counted.get('scan_depth', 0):,}"),
        (f"{counted['sequential_gflop']:.3g}", f"{counted.get('scan_gflop', 0):.3g}"),
    ]
    if "scan_gflop" in counted:
        told = [f"{swept}; {scanned}" for swept, scanned in pairs]
    else:
        cells[1], told = "no kernels", [swept for swept, _ in pairs]
    return [first, theirs.get("kernel", ""), *cells, *told, f"{counted['mib']:,.0f} MiB"]


def networks(found: Row, counted: Row) -> list[str]:
    taken, held = dict(found.get("seconds", {})), dict(found.get("bytes", {}))
    compiled = found.get("compiled", {})
    if "seconds" in compiled:
        taken["compiled"], held["compiled"] = compiled["seconds"], compiled["bytes"]
    usual = taken.get("ordinary")
    first = f"{time(1e3 * usual)}, {size(held['ordinary'])}" if usual else found.get("error", "")
    theirs = next((key for key in taken if key.startswith("checkpoint")), "")

    def beside(key: str) -> str:
        if usual and key in taken:
            return f"{taken[key] / usual:.2f}× in {held[key] / held['ordinary']:.0%}"
        return "refused" if key in found.get("refused", []) else ""

    return [
        first, beside("50%"), beside("25%"), beside(theirs),
        beside("compiled") or compiled.get("error", ""),
    ]  # fmt: skip


def models(found: Row, counted: Row) -> list[str]:
    taken, held, same = (found.get(key, {}) for key in ("seconds", "bytes", "same_bits"))
    usual = taken.get("ordinary")
    first = f"{time(1e3 * usual)}, {size(held['ordinary'])}" if usual else found.get("error", "")

    def beside(way: str) -> str:
        if usual and way in taken:
            told = ("" if same[way] else ", other bits") + ", over" * (way in found["over"])
            return f"{taken[way] / usual:.2f}× in {held[way] / held['ordinary']:.0%}{told}"
        least = found.get("refused", {}).get(way)
        return f"refused: least {least / held['ordinary']:.0%}" if least else ""

    return [first, *map(beside, ("lean", "50%", "20%", "checkpoint"))]


TABLES: dict[str, tuple[list[str], Callable[[Row, Row], list[str]]]] = {
    "budgets": (
        ["layer", "budget", "requested ÷ budget (promised: ≤ 1)", "blocks ÷ requested",
         "(reserved − 22 MiB) ÷ requested (expected: ≤ 1.25)", "counted: outputs, besides"],
        budgets,
    ),
    "grid": (
        ["network", "cuDNN", "50%", "10%", "5%"],
        grid,
    ),
    "backward": (
        ["network", "cuDNN's backward pass", "its kernel", "a sweep, times as fast",
         "`\"scan\"`, times as fast", "counted: launches of the recurrence; of the scan",
         "counted: steps in turn; of the scan", "counted: GFLOP; of the scan",
         "counted: bytes moved by a sweep"],
        backward,
    ),
    "networks": (
        ["chain", "ordinary", "50%", "25%", "`checkpoint_sequential`, √n segments",
         "`torch.compile`, activation budget 0.5"],
        networks,
    ),
    "models": (
        ["model", "ordinary", "`rg.lean`", "`rg.budget`, 50%", "20%", "`checkpoint` of blocks"],
        models,
    ),
}  # fmt: skip


def block(section: str) -> str:
    paths = sorted(path for path in RESULTS.glob("gpu_*.json") if path.stem != COUNTED)
    counted = json.loads((RESULTS / f"{COUNTED}.json").read_text())["sections"][section]
    return rendered(section, [json.loads(path.read_text()) for path in paths], counted)


def wang() -> str:
    """The scan's claims, on each card that compared it with cuDNN's backward pass."""
    told = []
    for path in sorted(RESULTS.glob("gpu_*.json")):
        document = json.loads(path.read_text())
        found = document["sections"].get("backward", []) if path.stem != COUNTED else []
        rows = []
        for row in found:
            ways = row["ways"]
            if "24→20, B=16," not in row["name"] or row["name"].startswith("LSTM"):
                continue
            theirs, ours = ways["torch"], ways["scan"]
            forward, back = (f"{part}_seconds" for part in ("forward", "backward"))
            both = [one[forward] + one[back] for one in (theirs, ours)]
            rows.append([
                row["name"], time(1e3 * theirs[back]), f"**{theirs[back] / ours[back]:.2f}×**",
                f"{theirs[back] / ways['100%'][back]:.2f}×", f"{both[0] / both[1]:.2f}×",
                f"{ours[forward] / theirs[forward]:.2f}",
            ])  # fmt: skip
        head = ["network", "cuDNN's backward pass", "the scan's, times as fast",
                "a sweep's, times as fast", "both passes with the scan, times as fast",
                "forward pass with the scan ÷ cuDNN's"]  # fmt: skip
        machine = document.get("machine", {})
        if rows:
            told.append(
                f"{table(head, rows)}\nMeasured on {machine['device']}, torch "
                f"{machine['torch']} ([all rows](gpu.md#the-backward-pass-from-the-states-beside-"
                "cudnn)).\n"
            )
    return "\n".join(told)


def tests() -> str:
    """What the tests on each card said."""
    lines = []
    for path in sorted(RESULTS.glob("gpu_*.json")):
        document = json.loads(path.read_text())
        sections = document["sections"]
        for row in (*sections.get("tests", []), *sections.get("drawn", [])):
            told = (row.get("result") or row["error"]).translate(dict.fromkeys(map(ord, "{}'")))
            lines.append(f"- {document['machine']['device']}: {told}\n")
    return "".join(lines) or "No card was at hand: the tests marked `gpu` were not run.\n"


def front() -> str:
    """What the README says of cards."""
    lines = []
    for path in sorted(RESULTS.glob("gpu_*.json")):
        if path.stem == COUNTED:
            continue
        document = json.loads(path.read_text())
        sections = document["sections"]
        if "backward" not in sections:
            continue
        held = [row["working_bytes"] / row["budget_bytes"] for row in sections["budgets"]]
        ratios = [row["ratios"] for row in sections["grid"]]
        layers = [row["5%"] for row in ratios if "5%" in row]
        small = [row["10%"] for row in ratios if "5%" not in row and "10%" in row]
        models = [row["seconds"]["20%"] / row["seconds"]["ordinary"]
                  for row in sections["models"] if "20%" in row.get("seconds", {})]  # fmt: skip
        refused = len(sections["models"]) - len(models)
        lags = [row["ways"]["scan"]["backward_seconds"] / row["ways"]["torch"]["backward_seconds"]
                for row in sections["backward"] if "B=16, T=1,000" in row["name"]]  # fmt: skip
        longest = [row["ways"] for row in sections["backward"] if row["name"].endswith("300,000")]
        times = [ways["100%"]["backward_seconds"] / ways["scan"]["backward_seconds"]
                 for ways in longest]  # fmt: skip
        lines.append(
            "**On a GPU it was slower than what it replaces**, by [older kernels](docs/gpu.md). "
            f"On an {document['machine']['device']}, models in 20 % of the memory take "
            f"{min(models):.2f} to {max(models):.2f}× the time, and {refused} of "
            f"{len(sections['models'])} are refused. "
            f"Recurrent layers that fill the card take {min(layers):.1f} to {max(layers):.1f}× "
            "cuDNN's time in 5 %. Small layers are refused there, the first example among them, "
            f"and take {min(small):.0f} to {max(small):.0f}× in 10 %. Every call stayed within its "
            f"budget, and used {min(held):.0%} to {max(held):.0%} of it. For sequences of 300,000 "
            f'steps, `backward="scan"` is {min(times):.0f} to {max(times):.0f} times as fast as '
            f"going back step by step. For 1,000 steps it takes {min(lags):.1f} to "
            f"{max(lags):.1f}× the time of cuDNN's backward pass.\n"
        )
    return "".join(lines) or "On GPUs nothing is measured yet ([state](docs/gpu.md)).\n"


GPU_BLOCKS: dict[str, Callable[[], str]] = {
    "gpu_front": front,
    "gpu_tests": tests,
    "gpu_wang": wang,
    **{f"gpu_{section}": partial(block, section) for section in TABLES},
}
