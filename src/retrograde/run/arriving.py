"""A forward pass whose end nobody knows: its inputs as they come, and what it keeps of the steps.

An iterator is read once, and its items are held, since steps run again. They must stay as they are.
An item that another one was written over has another fingerprint when all have come.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.plan.open_end import OpenPlan
from retrograde.plan.steps.online import Thinned
from retrograde.replay.fingerprints import Fingerprint, fingerprint, verify
from retrograde.replay.trees import Structure, Tensors, flatten
from retrograde.run.core import Emit
from retrograde.run.executor import Run
from retrograde.run.layout import NOTHING, Inputs
from retrograde.schedule import Action, Advance, Free, Record, Store, Verb

_NOTHING = [NOTHING]


@dataclass
class Arrivals:
    """The items of an iterator that have come, at least one and at most ``most``. ``needed`` says
    that the loop has to end before."""

    iterator: Iterator[Any]
    most: int | None = None
    needed: bool = False
    steps: list[Tensors] = field(default_factory=list)
    structure: Structure = field(init=False)
    prints: list[Sequence[Fingerprint]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.take(0):
            raise CellError("the iterator of inputs gave no item: expected at least one step")

    def __getitem__(self, step: int) -> Any:
        """Return the item of a step, or the last one for steps that have not come."""
        return self.structure.unflatten(self.steps[min(step, len(self.steps) - 1)])

    def take(self, step: int) -> bool:
        """Return whether there is an item for a step, which is the next one or has come."""
        if step < len(self.steps):
            return True
        if step == self.most and self.needed:
            raise CellError(
                f"until= did not hold within length={step} steps: expected it to hold at one of "
                "them; nothing was changed; give a larger length, or correct the predicate"
            )
        if step == self.most:
            return False
        try:
            item = next(self.iterator)
        except StopIteration:
            return False
        except Exception as error:
            error.add_note(f"raised by the iterator of inputs at step {step}; no gradient changed")
            raise
        leaves, structure = flatten(item, f"input of step {step}")
        if step == 0:
            self.structure = structure
        if structure != self.structure:
            raise CellError(
                f"the input of step {step} is {structure}: expected {self.structure}, as at step "
                "0; every item must have the same structure"
            )
        self.steps.append(leaves or _NOTHING)
        self.prints.append([fingerprint(t) for t in leaves] if leaves else ())
        return True

    def forget(self) -> None:
        """Release the last item."""
        self.steps[-1] = []

    def check(self) -> None:
        """Refuse items that have changed since they came, by a CellError."""
        for step, (leaves, prints) in enumerate(zip(self.steps, self.prints, strict=True)):
            for t, then in zip(leaves, prints, strict=False):  # NOTHING has none
                verify(then, t, partial(_reused, step))


def _reused(step: int) -> CellError:
    return CellError(
        f"the iterator of inputs wrote to the item of step {step} after it had given it, as one "
        "that reuses a buffer does: expected items that stay as they are, since steps run again; "
        "yield x.clone()"
    )


@dataclass
class OpenEnd:
    """A loop whose end is unknown: its ``plan``, whether there are inputs for ``more`` steps, and
    the predicate ``until(y, state)`` that ends it."""

    plan: OpenPlan
    more: Callable[[int], bool]
    until: Callable[[Any, Any], object] | None = None
    check: Callable[[], object] = lambda: None  # is called when all steps have run
    seen: tuple[Any, Any] | None = None

    def note(self, y: Any, state: Any) -> None:
        """Note what a step returned, for the predicate."""
        if self.until is not None:
            self.seen = pytree.tree_map_only(Tensor, Tensor.detach, (y, state))

    def ends(self) -> bool:
        """Return whether the loop ends with the step that was noted."""
        if self.until is None or self.seen is None:
            return False
        (y, state), self.seen = self.seen, None
        with torch.no_grad():
            return bool(self.until(y, state))

    def sweep(self, run: Run, inputs: Inputs, state: Tensors, emit: Emit) -> Tensors:
        """Run all steps, and give the run the rest of its schedule; return the state after them."""
        thinned, run.cuts, run.length = Thinned(self.plan.slots), (), 0
        after = run.follow(self._actions(run, thinned), inputs, state, emit)
        self.until = None
        self.check()
        schedule, run.done = self.plan.schedule(run.length, thinned.held, len(run.tapes))
        run.actions, run.cuts = schedule, None
        kept = schedule.start[: run.done][schedule.kind[: run.done] == Verb.STORE].tolist()
        run.stored = {at: run.stored[at] for at in kept}
        return after

    def _actions(self, run: Run, thinned: Thinned) -> Iterator[Action]:
        """Iterate over the actions of all steps. The oldest tapes make room for the next one."""
        sources, ended = run.core.surroundings.sources, False
        drawn = [source.position() for source in sources]
        while not ended and self.more(run.length):
            now = run.length
            if drawn != [source.position() for source in sources]:
                raise CellError(
                    f"the inputs, or until=, draw from the generator of the cell before step {now}"
                    ": expected only the cell to draw from it, since steps run again; give them a "
                    "generator of their own"
                )
            room = self.plan.tapes(len(thinned.held), now)
            while run.tapes and len(run.tapes) >= room:
                oldest = run.tapes.pop(0).start
                yield from map(Free, thinned.add(oldest) if oldest else ())
                room = self.plan.tapes(len(thinned.held), now)
            gone = thinned.add(now) if now and not room else []
            yield from map(Free, (at for at in gone if at < now))
            if now not in gone:
                yield Store(now)
            run.length = now + 1
            yield Record(now, now + 1) if room else Advance(now, now + 1)
            drawn, ended = [source.position() for source in sources], self.ends()
