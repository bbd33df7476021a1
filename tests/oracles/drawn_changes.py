"""Drawn models that are changed between passes, raised within them, run again, and copied.

A model (:mod:`oracles.drawn_models`) gets a budget; then some of :data:`CHANGES` are drawn, and
after each of them it makes passes beside the same model without a budget.

    reading = read_changed(17)   # model 17, its budget and its changes
"""

import contextlib
import copy
import gc
import io
import pickle
import random
import traceback
import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import retrograde as rg
from oracles.drawn_models import (
    BUDGETS,
    SLACK_BYTES,
    Drawn,
    budgeted,
    draw,
    equal,
    left_behind,
)

__all__ = ["CHANGES", "ChangedReading", "read_changed"]

PER_MODEL = 3  # changes


class RaisedError(Exception):
    """Raised by a hook on purpose."""


def clear(model, x):
    for t in (*model.parameters(), x):
        t.grad = None


@dataclass
class Side:
    """A model, with or without a budget, and its input."""

    drawn: Drawn
    model: nn.Module
    x: torch.Tensor

    def __post_init__(self):
        self.before = list  # called between the passes

    def weights(self):
        return [p for p in self.model.parameters() if p.dim() > 1]

    def forward(self, x, seed=5):
        torch.manual_seed(seed)
        random.seed(seed)
        with self.drawn.casts(x.device.type):
            y = self.model(x)
        self.model.registry.losses.clear()
        return y


def other_data(side):
    return torch.randn(side.x.shape, generator=torch.Generator().manual_seed(8)).to(side.x)


def evaluated(side, dice):
    side.model.eval()
    with torch.no_grad():
        side.forward(other_data(side))
    side.model.train()


def mode(side, dice):
    side.model.train(not side.model.training)


def part_in_evaluation(side, dice):
    norms = [m for m in side.model.modules() if isinstance(m, nn.LayerNorm | nn.BatchNorm1d)]
    for norm in norms or [dice.choice([*side.model.modules()])]:
        norm.eval()


def trained_on_other_data(side, dice):
    side.forward(other_data(side)).sum().backward()


def without_gradients(side, dice):
    with torch.no_grad():
        side.forward(side.x.detach())


def between_the_passes(side, dice):
    """Statistics move by other data between the forward and the backward pass."""

    def move():
        with torch.no_grad():
            side.forward(other_data(side))

    side.before = move


def weight_replaced(side, dice):
    layer = dice.choice([m for m in side.model.modules() if isinstance(m, nn.Linear)])
    wanted = layer.weight.requires_grad
    layer.weight = nn.Parameter(layer.weight.detach() * 1.1).requires_grad_(wanted)


def frozen(side, dice):
    for p in dice.sample([*side.model.parameters()], 3):
        p.requires_grad_(not p.requires_grad)


def loaded(side, dice, assign=False):
    state = {k: v * 0.9 if v.is_floating_point() else v for k, v in side.model.state_dict().items()}
    side.model.load_state_dict(state, assign=assign)


def moved(side, dice):
    with torch.no_grad():
        for p in side.weights():
            p.mul_(0.95)


def batch(side, dice):
    count = dice.choice([1, 2, len(side.x) // 2 + 1, len(side.x) + 7, 2 * len(side.x)])
    x = torch.randn(count, side.x.shape[1], generator=torch.Generator().manual_seed(9))
    side.x = x.to(side.x).requires_grad_(side.x.requires_grad)


def sequences(side, dice):
    """The same samples with one dimension more."""
    x = side.x.detach()
    if not any(isinstance(m, nn.BatchNorm1d) for m in side.model.modules()):
        side.x = x.reshape(-1, 1, x.shape[-1]).clone().requires_grad_(side.x.requires_grad)


def wider_type(side, dice):
    side.model.double()
    side.x = side.x.detach().double().requires_grad_(side.x.requires_grad)


def input_gradient(side, dice):
    side.x = side.x.detach().requires_grad_(not side.x.requires_grad)


def deep_copy(side, dice):
    side.model = copy.deepcopy(side.model)


def pickled(side, dice):
    file = io.BytesIO()
    pickle.dump(side.model, file)
    side.model = pickle.loads(file.getvalue())


def saved(side, dice):
    file = io.BytesIO()
    torch.save(side.model, file)
    file.seek(0)
    side.model = torch.load(file, weights_only=False)


def copy_of_a_layer(side, dice):
    """One layer is exchanged for its copy."""
    holder = side.model if isinstance(side.model, nn.Sequential) else side.model.layers
    k = dice.randrange(len(holder))
    holder[k] = copy.deepcopy(holder[k])


def hooked(side, dice):
    """A hook that looks at a layer's output."""
    dice.choice([*side.model.modules()]).register_forward_hook(lambda *given: None)


#: Changes that the next pass begins with; the raised and the retried ones are of the pass itself.
CHANGES = {
    "an evaluation": evaluated,
    "the mode": mode,
    "some layers in evaluation": part_in_evaluation,
    "a pass on other data": trained_on_other_data,
    "a pass without gradients": without_gradients,
    "a pass between the passes": between_the_passes,
    "a weight replaced": weight_replaced,
    "some frozen or thawed": frozen,
    "a state loaded": loaded,
    "a state assigned": partial(loaded, assign=True),
    "weights moved": moved,
    "another batch": batch,
    "one dimension more": sequences,
    "a wider type": wider_type,
    "whether the input requires a gradient": input_gradient,
    "a deep copy": deep_copy,
    "a pickled copy": pickled,
    "a saved copy": saved,
    "a layer's copy": copy_of_a_layer,
    "a hook that looks": hooked,
    "a backward pass that raises, then again": None,
    "the graph twice": None,
    "accumulated": None,
}


def step(change, side, seed):
    """A training step, as a change has it. Returns the output, as the caller holds it."""
    drawn, model = side.drawn, side.model
    y = side.forward(side.x, seed)
    side.before()
    side.before = list
    if change == "a backward pass that raises, then again":
        wanted = [p for p in model.parameters() if p.requires_grad]

        def stop(gradient):
            raise RaisedError

        handle = wanted[seed % len(wanted)].register_hook(stop)
        with contextlib.suppress(RaisedError):
            y.sum().backward(retain_graph=True)
        handle.remove()
        clear(model, side.x)
    elif change in ("the graph twice", "accumulated"):
        y.sum().backward(retain_graph=change == "the graph twice")
    if change == "accumulated":
        with drawn.casts("cpu"):
            y = model(side.x)
        model.registry.losses.clear()
    y.sum().backward()
    return y


@dataclass(frozen=True)
class ChangedReading:
    """What came of one model: its outcome, after which of its changes, and what was said."""

    number: int
    share: float
    changes: tuple[str, ...]
    outcome: str = "exact"
    after: str = ""
    said: str = ""


def made(number, dice):
    """The drawn model twice; some of its norms are of batches."""
    drawn = draw(number)
    models = drawn.model("cpu"), drawn.model("cpu")
    if dice.random() < 0.4:
        for model in models:
            torch.manual_seed(number)
            for block in [
                m for m in model.modules() if isinstance(getattr(m, "norm", 0), nn.LayerNorm)
            ]:
                block.norm = nn.BatchNorm1d(drawn.width)
    x = drawn.input("cpu")
    other = x.detach().clone().requires_grad_(x.requires_grad)
    return drawn, Side(drawn, models[0], x), Side(drawn, models[1], other)


def compared(reading, after, ours, plain, seed):
    """One step of both; what is to be told, or None where it is exact."""
    kept = []
    for side in (plain, ours):
        clear(side.model, side.x)
        try:
            y = step(after, side, seed)
        except Exception as error:
            if side is ours:
                raise
            return replace(reading, outcome="plain raises", after=after, said=str(error)[:200])
        left = [y.detach(), *left_behind(side.model, side.x), *side.model.buffers()]
        kept.append([t.clone() if isinstance(t, torch.Tensor) else t for t in left])
    which = [k for k, pair in enumerate(zip(*kept, strict=True)) if not equal(*pair)]
    said = f"seed {seed}: {len(which)} differ: {which[:4]}"
    return replace(reading, outcome="wrong", after=after, said=said) if which else None


def read_changed(number):
    """Train a drawn model with changes between its steps, beside the same without a budget."""
    dice = random.Random(f"changes {number}")
    share, names = dice.choice(BUDGETS), dice.sample([*CHANGES], PER_MODEL)
    drawn, ours, plain = made(number, dice)
    reading, after = ChangedReading(number, share, tuple(names)), "the budget"
    torch.manual_seed(number + 3)
    random.seed(number + 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            ours.model, total, elsewhere = budgeted(drawn, ours.model, ours.x, share)
            sample = ours.x.nbytes
            for turn, after in enumerate(["no change", *names]):
                found = changed(reading, after, ours, plain, number + turn, dice)
                for again in range(2):
                    found = found or compared(reading, after, ours, plain, 10 * turn + again)
                if found:
                    return found
                part = max(1.0, ours.x.nbytes / sample)
                allowed = total + elsewhere * part + SLACK_BYTES
                for _ in range(2):  # by chance, it may be the first pass through a layer
                    clear(plain.model, plain.x)
                    try:
                        step(after, plain, 10 * turn + 2)
                    except Exception as error:  # all layers may be left out by chance
                        return replace(
                            reading, outcome="plain raises", after=after, said=str(error)
                        )
                    clear(ours.model, ours.x)
                    gc.collect()
                    call = partial(step, after, ours, 10 * turn + 2)
                    taken = rg.measure(call).working_bytes
                    if taken <= allowed:
                        break
                if CHANGES.get(after, list) and taken > allowed and not told:
                    said = f"{taken} bytes, {allowed:.0f} allowed, of which the budget {total}"
                    return replace(reading, outcome="over", after=after, said=said)
        except rg.BudgetError as refusal:
            return least_works(reading, after, ours, refusal)
        except rg.RetrogradeError as refusal:
            outcome = "refused" if after == "the budget" else "error in the pass"
            return replace(reading, outcome=outcome, after=after, said=str(refusal))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            return replace(reading, outcome="raw error", after=after, said=said)
    said = "; ".join(str(one.message) for one in told)
    return replace(reading, outcome="told" if told else "exact", said=said)


def changed(reading, after, ours, plain, seed, dice):
    """Make a change on both sides; raises what ours raises."""
    change, state = CHANGES.get(after), dice.getstate()
    if change is None:
        return None
    torch.manual_seed(seed)
    try:
        change(plain, dice)
    except Exception as error:
        return replace(reading, outcome="plain raises", after=after, said=str(error)[:200])
    finally:
        dice.setstate(state)
    torch.manual_seed(seed)
    change(ours, dice)
    return None


def least_works(reading, after, side, refusal):
    """Whether the least that an error names is enough for a pass."""
    least = refusal.minimum_bytes
    if after == "the budget":  # which was the least that was named
        return replace(reading, outcome="least refused", after=after, said=str(refusal))
    try:
        if side.drawn.how == "loop":
            with side.drawn.casts("cpu"):
                rg.budget(side.model, least, (side.x.detach(),))
        else:
            side.model.memory = least
        step("", side, 1)
    except Exception as error:
        said = f"{least}: {type(error).__name__}: {error}"
        return replace(reading, outcome="least refused", after=after, said=said)
    return replace(reading, outcome="refused, and the least works", after=after, said=str(refusal))
