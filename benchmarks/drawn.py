"""Whether programs that are drawn, hide something or are other people's are exact in their budget.

The programs and their judges are in ``tests/oracles``; here all of them run. What is wrong, over
its budget or a raw error is told by name.

    python benchmarks/drawn.py models              # JSON into benchmarks/results/
    python benchmarks/drawn.py models --models 20  # a quick look; nothing is written
    pip install transformers timm torchvision torchaudio diffusers x-transformers peft
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any

import torch

import retrograde as rg
from harness import Row, Run, Script

script = Script()
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
#: Outcomes that break the promise.
BAD = ("wrong", "requires_grad", "over", "warned", "raw error", "least refused")


class LateError(BaseException):
    """A program takes too long. No handler of exceptions may end it."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise where a block takes longer."""

    def late(*_: Any) -> None:
        raise LateError(f"more than {seconds} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    except LateError as error:
        raise TimeoutError(str(error)) from None
    finally:
        signal.alarm(0)


def judge(module: str, function: str, seconds: int, case: Any) -> Row:
    """What a judge of ``oracles`` makes of a case."""
    with at_most(seconds):
        found = getattr(import_module(f"oracles.{module}"), function)(case)
    return found if isinstance(found, dict) else {"name": case, **asdict(found)}


def of_model(number: int, device: str) -> list[Row]:
    """One model within all budgets."""
    from oracles.drawn_models import BUDGETS, read

    rows = []
    for share in BUDGETS:
        reading = read(number, share, device=device)
        bad = "wrong" if reading.wrong else "over" if reading.over else "warned"
        kept = "kept by what it covers" if reading.elsewhere_bytes else "kept"
        right = "refused" if reading.refused else kept
        is_right = reading.good or reading.refused
        rows.append({"name": number, "outcome": right if is_right else bad, **asdict(reading)})
    return rows


def reason(refusal: str) -> str:
    """A refusal without the names and sizes of its model."""
    known = {
        "leaves a tensor": "a layer leaves a tensor with a gradient",
        "draws random numbers of Python": "a layer draws numbers that may decide what it computes",
        "run or are skipped": "layers run or are skipped by random numbers",
        "hardly holds more": "a budget would gain nothing",
    }
    found = [text for part, text in known.items() if part in refusal]
    return found[0] if found else re.sub(r"\d[\d.]*( \w?iB)?", "…", refusal)


@script.table("drawn_models_{device}", models=300, first=0, workers=2, device="cpu")
def models(run: Run) -> None:
    """Claim: a model with unusual habits is right within its budget, or refused before training.

    Models are drawn by number (``oracles/drawn_models.py``), with losses in attributes and hooks,
    layers that are skipped at random, levels within one another. Each makes four steps within each
    of five budgets, beside the same model without one. All must be equal in every bit. From the
    third step on, the peak must be within the budget, and what is told to be held elsewhere.
    """
    from oracles.drawn_models import BUDGETS, SLACK_BYTES

    start, numbers = time.perf_counter(), range(run.first, run.first + run.models)
    one = partial(of_model, device=run.device)
    found = run.rows(numbers, one, "outcome", workers=run.workers)
    outcomes = dict(Counter(row["outcome"] for row in found))
    kept = [row for row in found if row["outcome"] == "kept"]
    worst = max((row["peak_bytes"] / row["budget_bytes"] for row in kept), default=0.0)
    print(f"{run.models} models, {len(found)} readings: {outcomes}")
    changed = {key: part for key, part in run.stored().items() if key == "changed"}
    run.write(
        models=run.models, budgets=BUDGETS, slack_bytes=SLACK_BYTES, readings=len(found),
        outcomes=outcomes, reasons=Counter(reason(r["refused"]) for r in found if r["refused"]),
        worst=round(worst, 4), bad=[row for row in found if row["outcome"] in BAD],
        seconds=round(time.perf_counter() - start, 1), **changed,
    )  # fmt: skip


def changed(run: Run, number_of: str, module: str, function: str) -> Row:
    """Programs that are changed between their calls: how many came to what, and after what."""
    start, count = time.perf_counter(), getattr(run, number_of)
    numbers = range(run.first, run.first + count)
    read = partial(judge, module, function, 900)
    found = run.rows(numbers, read, "outcome", "after", "said", workers=run.workers)
    errors = Counter((row["outcome"], row["after"]) for row in found if row["outcome"] != "exact")
    return {
        number_of: len(found),
        "outcomes": Counter(row["outcome"] for row in found),
        "after": [[*pair, times] for pair, times in errors.most_common()],
        "bad": [row for row in found if row["outcome"] in BAD],
        "seconds": round(time.perf_counter() - start, 1),
    }


@script.table("drawn_models_cpu", models=1500, first=0, workers=2)
def changes(run: Run) -> None:
    """Claim: a model that is changed between its steps is right, or an error says what to do.

    Each model gets one budget, and is changed three times between its steps
    (``oracles/drawn_changes.py``). After each change, the promises of the table of models hold.
    """
    found = changed(run, "models", "drawn_changes", "read_changed")
    run.write(**{**run.stored(), "changed": found})


@script.table("drawn_cells_cpu", cells=300, first=0, workers=2)
def cells(run: Run) -> None:
    """Claim: a drawn cell that is changed between its calls is right in its budget, or refused.

    Cells (``oracles/strangers.py``) run through ``rg.unroll`` within a drawn budget, beside the
    plain loop. Three drawn changes come between the calls (``oracles/changed_cells.py``). After
    each, all are equal in every bit, but gradients of parameters up to the order of additions. The
    second call's peak must be within the budget, and the least that an error names must work.
    """
    run.write(**changed(run, "cells", "changed_cells", "read_cell"))


@script.table("hidden_programs_cpu", workers=1)
def hidden(run: Run) -> None:
    """Claim: what a layer hides cannot make its gradient wrong in silence.

    Each program (``oracles/hidden_programs.py``) depends on something that is not among its
    arguments. It is trained for three steps as layers of a chain and as a cell, by each function
    for these, beside the same without this library. All that it leaves is compared: in every bit
    for chains, up to the order of additions for cells. Each run is exact, refused at its first use,
    an error of this library's in the pass where it happens, or wrong in silence.
    """
    from oracles.hidden_programs import PROGRAMS

    one = partial(judge, "hidden_trials", "program", 600)
    rows = run.rows(PROGRAMS.keys(), one, "ways", workers=run.workers, start="fork", each=10)
    outcomes = Counter(one["verdict"] for row in rows for one in row["ways"].values())
    print(f"{len(rows)} programs: {dict(outcomes)}")
    run.write(programs=len(rows), rows=rows, outcomes=outcomes)


@script.table("libraries_as_trained_cpu", workers=1)
def trained(run: Run) -> None:
    """Claim: models of other libraries, trained as people do, are right within their budget.

    Each model (``oracles/trained_models.py``) has its library's default dropout, its task's head
    and labels. It makes three steps of AdamW with an evaluation between them, in float32 and under
    autocast to bfloat16, within 50 and 30 %. All that it leaves must be equal in every bit to the
    same without a budget, or near where recurrent modules run by fused loops. A least must work.
    """
    from oracles.trained_models import CASES

    one = partial(judge, "judged", "as_trained", 900)
    rows = run.rows(CASES.keys(), one, "ways", workers=run.workers, start="fork", each=1)
    outcomes = Counter(one["outcome"] for row in rows for one in row.get("ways", {}).values())
    print(f"{len(rows)} models: {dict(outcomes)}")
    run.write(outcomes=outcomes, rows=rows)


def architecture(name: str, library: str) -> Row:
    """One architecture: what became of it, or why it is left out or refused."""
    from oracles import architectures
    from oracles.judged import judged

    torch.manual_seed(0)
    try:
        with at_most(120 if library == "transformers" else 900):
            try:
                made = getattr(architectures, f"of_{library}")(name)
            except Exception as error:
                return {"model": name, "left out": f"{type(error).__name__}: {error}"[:100]}
            return judged(name, *made)
    except (rg.BudgetError, rg.CellError) as refusal:
        return {"model": name, "refused": str(refusal)}
    except TimeoutError as error:
        return {"model": name, "left out": str(error)}
    except Exception as error:
        return {"model": name, "raised": f"{type(error).__name__}: {error}"}


@script.table("told_seconds_cpu", settings=21, rounds=9)
def told(run: Run) -> None:
    """Claim: the seconds that ``fit`` tells, of both sides, are those of an iteration, within 20 %.

    Recurrent layers, cells and chains are drawn by number (``oracles/told.py``).
    """
    one = partial(import_module("oracles.told").read, rounds=run.rounds)
    run.write(rows=run.rows(range(run.settings), one, "name", "told", "ordinary_told"))


@script.table("timm_models_cpu", workers=0)
def timm(run: Run) -> None:
    """Claim: whatever an image model does, it is right within its budget, and keeps it.

    Architectures of timm, with random weights and small images. Each makes two steps within 60 and
    30 % and within its least budget. Losses, gradients and buffers must be equal in every bit; so
    must those of a lean pass. The peak is beside what all take together, and what was told.
    """
    from oracles.architectures import TIMM

    of_architectures(run, "timm", TIMM.split())


@script.table("transformers_models_cpu", workers=2)
def transformers(run: Run) -> None:
    """Claim: whatever a model of transformers does, it is right within its budget, or refused.

    Every architecture that can be made small and runs on token numbers, pixels or sound alone, with
    random weights. Each is checked as those of timm are. A model that needs other inputs, or more
    than 30 million parameters or two minutes, is left out, and the JSON says why.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    of_architectures(run, "transformers", CONFIG_MAPPING_NAMES.keys())


def of_architectures(run: Run, library: str, names: Iterable[str]) -> None:
    one, shown = partial(architecture, library=library), ("bits", "peaks", "refused", "left out")
    run.write(rows=run.rows(names, one, *shown, workers=run.workers, start="fork", each=40))


if __name__ == "__main__":
    script.main()
