"""Drawn cells that are changed between calls, raised within them, run again, and copied.

A cell (:mod:`oracles.strangers`) gets a budget; some of :data:`CHANGES` are drawn, and after each
of them two calls are compared with the plain loop.

    reading = read_cell(17)   # cell 17, its budget and its changes
"""

import contextlib
import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from oracles.judged import place_of
from oracles.loops import leaves_of, loop
from oracles.strangers import DrawnCell, distinct, draw_cell, seeds_for, watched

__all__ = ["CHANGES", "CellReading", "read_cell"]

LONGEST, PER_CELL, SHARES = 60, 3, (0.0, 0.2, 0.5, 1.0)

Results = tuple[list[bool], list[Tensor], list[Tensor | None]]  # requires_grad, values, gradients


class RaisedError(Exception):
    """Raised by a hook on purpose."""


@dataclass
class Side:
    """A drawn cell with its present inputs; ``memory`` is None for the plain loop."""

    drawn: DrawnCell
    memory: int | None = None

    def __post_init__(self) -> None:
        self.x, self.state = self.drawn.x, self.drawn.state
        self.net: nn.Module = self.drawn.net
        self.seed = 11
        self.gradients: dict[Any, list[Tensor]] = {}  # made once, so that no peak has them

    @property
    def arguments(self) -> list[Tensor]:
        return distinct(leaves_of((self.x, self.state)))

    @property
    def wanted(self) -> list[Tensor]:
        return distinct([*self.arguments, *self.net.parameters(), *self.drawn.parameters])

    def forward(self, ours: bool) -> Any:
        torch.manual_seed(self.seed)
        cell = self.drawn.cell
        if ours:
            return rg.unroll(cell, self.x, self.state, memory=self.memory)
        return loop(cell, self.x, self.state)

    def call(self, change: str, ours: bool, plain: list[bool] | None = None) -> Results:
        """Outputs, states and gradients of one call, as a change has it."""
        leaves = leaves_of(self.forward(ours))
        flags = [t.requires_grad for t in leaves]
        roots = [t for t, wanted in zip(leaves, plain or flags, strict=True) if wanted]
        if not roots:
            return flags, leaves, []
        kind = tuple((t.shape, t.dtype) for t in roots)
        if kind not in self.gradients:
            self.gradients[kind] = seeds_for(roots, 3)
        gradients = self.gradients[kind]
        pull = partial(torch.autograd.grad, roots, self.wanted, gradients, allow_unused=True)
        if change == "a backward pass that raises, then again":
            handle = self.wanted[-1].register_hook(raising)
            with contextlib.suppress(RaisedError):
                torch.autograd.backward(roots, gradients, retain_graph=True)
            handle.remove()
            for t in self.wanted:
                t.grad = None
        elif change == "the graph twice":
            pull(retain_graph=True)
        found = [*pull()]
        return flags, [t.detach() for t in leaves], found


def raising(gradient: Tensor) -> None:
    raise RaisedError


def other(side: Side, **features: Any) -> None:
    """Inputs and a state of another length or batch, for the same cell."""
    f = SimpleNamespace(**{**vars(side.drawn.f), **features})
    found = DrawnCell(side.drawn.seed, f)
    side.x, side.state = found.x, found.state


def evaluated(side: Side, dice: random.Random) -> None:
    side.net.eval()
    with torch.no_grad():
        loop(side.drawn.cell, side.x, side.state)
    side.net.train()


def frozen(side: Side, dice: random.Random) -> None:
    for p in dice.sample([*side.net.parameters()], 3):
        p.requires_grad_(not p.requires_grad)


def replaced(side: Side, dice: random.Random) -> None:
    layer = dice.choice([m for m in side.net.modules() if isinstance(m, nn.Linear)])
    wanted = layer.weight.requires_grad
    layer.weight = nn.Parameter(layer.weight.detach() * 1.1).requires_grad_(wanted)


def loaded(side: Side, dice: random.Random, assign: bool = False) -> None:
    state = side.net.state_dict()
    found = {k: v * 0.9 if v.is_floating_point() else v.clone() for k, v in state.items()}
    side.net.load_state_dict(found, assign=assign)


def moved(side: Side, dice: random.Random) -> None:
    with torch.no_grad():
        for p in (*side.net.parameters(), *side.net.buffers()):
            if p.is_floating_point():
                p.mul_(0.95)


def copied(side: Side, dice: random.Random) -> None:
    side.drawn = copy.deepcopy(side.drawn)
    side.__post_init__()


CHANGES: dict[str, Callable[[Side, random.Random], Any] | None] = {
    "an evaluation": evaluated,
    "the mode": lambda side, dice: side.net.train(not side.net.training),
    "some frozen or thawed": frozen,
    "a weight replaced": replaced,
    "a state loaded": loaded,
    "a state assigned": partial(loaded, assign=True),
    "weights and buffers moved": moved,
    "other numbers": lambda side, dice: setattr(side, "seed", dice.randrange(1000)),
    "a shorter sequence": lambda side, dice: other(side, length=max(1, side.drawn.f.length // 2)),
    "a longer sequence": lambda side, dice: other(side, length=side.drawn.f.length + 9),
    "another batch": lambda side, dice: other(side, batch=dice.randrange(2, 12)),
    "inputs without a gradient": lambda side, dice: other(side, wanted=()),
    "a deep copy": copied,
    "a hook that looks": lambda side, dice: side.net.register_forward_hook(lambda *given: None),
    "a backward pass that raises, then again": None,
    "the graph twice": None,
}  # fmt: skip


@dataclass(frozen=True)
class CellReading:
    """What came of one cell: its outcome, after which of its changes, and what was said."""

    cell: int
    share: float
    changes: tuple[str, ...]
    outcome: str = "exact"
    after: str = ""
    said: str = ""


def differs(mine: Results, theirs: Results, arguments: int, tolerance: float) -> str:
    if [len(one) for one in mine] != [len(one) for one in theirs]:
        return "another number of results"
    for kind, ours, plain in zip(("result", "gradient"), mine[1:], theirs[1:], strict=True):
        for k, (a, b) in enumerate(zip(ours, plain, strict=True)):
            if (a is None) != (b is None):
                return f"{kind} {k} is {'absent' if a is None else 'there'}"
            if a is None or torch.equal(a, b):
                continue
            far = float((a.double() - b.double()).norm() / b.double().norm())
            if kind == "result" or k < arguments or not far <= tolerance:
                return f"{kind} {k} differs by {far:.1e}"
    return ""


def read_cell(number: int) -> CellReading:
    """One cell within one budget, with its changes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dice = random.Random(f"cell {number}")
    names = tuple(dice.sample([*CHANGES], PER_CELL))
    reading, after = CellReading(number, dice.choice(SHARES), names), "the budget"
    ours, plain = (Side(draw_cell(number, LONGEST)) for _ in range(2))
    tolerance = 1e-9 if ours.drawn.f.dtype == torch.float64 else 1e-3
    try:
        call = Side(draw_cell(number, LONGEST)).call
        call("", ours=False)
        ordinary = watched(lambda: call("", ours=False))[1].working_bytes()
        ours.memory = max(1, int(reading.share * ordinary))
        for after in ("no change", *names):
            change, state = CHANGES.get(after) or (lambda side, dice: None), dice.getstate()
            try:
                change(plain, dice)
                theirs = plain.call(after, ours=False)
            except Exception as error:
                return replace(reading, outcome="plain raises", after=after, said=str(error)[:200])
            dice.setstate(state)
            change(ours, dice)
            mine = compared(ours, after, theirs[0])
            if found := differs(mine, theirs, len(ours.arguments), tolerance):
                return replace(reading, outcome="wrong", after=after, said=found)
            if mine[0] != theirs[0]:
                said = f"{mine[0]}, where the plain loop has {theirs[0]}"
                reading = replace(reading, outcome="requires_grad", after=after, said=said)
            plain.call(after, ours=False)
            _, held = watched(lambda after=after, theirs=theirs: ours.call(after, True, theirs[0]))
            taken = held.working_bytes(measuring=False)
            if CHANGES.get(after, list) and taken > ours.memory:
                said = f"{taken} bytes, {ours.memory} allowed"
                return replace(reading, outcome="over", after=after, said=said)
    except rg.BudgetError as refusal:
        return replace(reading, outcome="least refused", after=after, said=str(refusal))
    except rg.RetrogradeError as refusal:
        outcome = "refused" if after in ("the budget", "no change") else "error in a later call"
        return replace(reading, outcome=outcome, after=after, said=str(refusal))
    except Exception as error:
        return replace(reading, outcome="raw error", after=after, said=place_of(error))
    return reading


def compared(side: Side, after: str, flags: list[bool]) -> Results:
    """Our call; a budget that is too small is raised to the least that the error names."""
    try:
        return side.call(after, ours=True, plain=flags)
    except rg.BudgetError as refusal:
        side.memory = refusal.minimum_bytes
        return side.call(after, ours=True, plain=flags)
