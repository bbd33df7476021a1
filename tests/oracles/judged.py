"""How programs of other people are judged within a budget, beside the same without one.

judged(name, model, x)               # two steps of a model, in every bit, and its peaks
as_trained("timm levit_128s")        # three steps of AdamW, evaluations, two types of numbers
differs(mine, theirs)                # which of the named results are not the same
"""

import contextlib
import copy
import random
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import retrograde as rg
from oracles.trained_models import CASES, Case

__all__ = ["as_trained", "judged", "place_of", "seeded", "step"]

SHARES, STEPS, SLACK_BYTES = ("50%", "30%"), 3, 64
NEAR = 1e-5  # of the largest number, where only the order of additions differs
SEEDS = (0, 0, 1, 2)  # of the budget's sample, and of the steps' batches


def place_of(error: Exception) -> str:
    """What a raw error says, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def step(model: nn.Module, x: Tensor, way: Any = contextlib.nullcontext) -> list[Tensor]:
    """All that a training step leaves behind."""
    torch.manual_seed(5)
    with way():
        loss = model(x).square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers())]


def at_least(nbytes: int, net: nn.Module, x: Tensor) -> Any:
    """The division of the least bytes that are not refused: what the rest holds may be more."""
    try:
        return rg.budget(net, nbytes, x)
    except rg.BudgetError as refusal:
        return rg.budget(net, refusal.minimum_bytes, x)


def judged(name: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """A row: whether bits are equal, and the peak of each budget as a part of what is allowed."""
    expected = step(copy.deepcopy(model), x)
    again = step(copy.deepcopy(model), x)
    row: dict[str, Any] = {"model": name, "own_bits": all(map(torch.equal, expected, again))}
    lean = step(copy.deepcopy(model), x, rg.lean)
    row |= {"lean_bits": all(map(torch.equal, expected, lean)), "bits": {}, "peaks": {}}
    row["told"] = {}
    for share in ("60%", "30%", "least"):
        net = copy.deepcopy(model)
        try:
            division = rg.budget(net, "1%" if share == "least" else share, x)
        except rg.BudgetError as refusal:
            if share != "least":
                continue
            division = at_least(refusal.minimum_bytes, net, x)
        row["least_share"] = round(division.minimum_bytes / division.ordinary_bytes, 3)
        row["bits"][share] = all(map(torch.equal, expected, step(net, x)))
        for p in net.parameters():
            p.grad = None
        peak = rg.measure(lambda net=net: step(net, x)).working_bytes
        row["peaks"][share] = round(peak / (division.total_bytes + division.elsewhere_bytes), 3)
        row["told"][share] = round(peak / division.peak_bytes, 3)
    return row


def seeded(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def drawn_batch(case: Case, seed: int) -> Any:
    seeded(100 + seed)
    return case.batch()


def backward(case: Case, model: nn.Module, batch: Any, casts: Callable[[], Any]) -> Tensor:
    with casts():
        loss = case.of(model, batch)
    loss.backward()
    return loss.detach()


def trained(case: Case, model: nn.Module, casts: Callable[[], Any]) -> tuple[list[Any], int]:
    """What three steps and the evaluations between leave, and the third step's working bytes."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, left, taken = torch.optim.AdamW(trainable, 1e-3), [], 0
    for step in range(STEPS):
        batch = drawn_batch(case, SEEDS[step + 1])
        optimizer.zero_grad(set_to_none=True)
        seeded(step)
        call = partial(backward, case, model, batch, casts)
        if step == STEPS - 1:
            measured = rg.measure(call)
            loss, taken = measured.value, measured.working_bytes
        else:
            loss = call()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        states = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
        optimizer.step()
        model.eval()
        with torch.no_grad(), casts():
            seen = case.of(model, drawn_batch(case, 7)).detach()
        model.train()
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        left.append({"loss": loss, "evaluation": seen} | grads | buffers)
        left[-1] |= {f"generator {k}": one for k, one in enumerate(states)}
    return left, taken


def differs(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        keys = [k for k in {**a, **b} if not (k in a and k in b and same(a[k], b[k]))]
        if keys:
            return f"step {step}: {len(keys)} differ, {', '.join(keys[:3])}"
    return ""


def is_near(model: nn.Module, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether gradients of one step differ by rounding: fused loops of recurrent modules add
    in another order. Later steps of AdamW may make more of that."""

    def near(name: str) -> bool:
        a, b = mine[name], theirs[name]
        if same(a, b) or not (isinstance(a, Tensor) and a.is_floating_point()):
            return same(a, b)
        return a.shape == b.shape and bool((a - b).abs().max() <= NEAR * b.abs().max())

    fused = any(isinstance(part, nn.RNNBase) for part in model.modules())
    is_whole = fused and mine.keys() == theirs.keys()
    return is_whole and all(near(name) for name in mine if name != "evaluation")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.eq(a, b).all())
    return bool(a == b)


def outside(case: Case, batch: Any, casts: Callable[[], Any]) -> int:
    """Bytes beyond a budget: the output of a model that computes its loss itself. Of a loss that is
    not the model's: what it keeps of the output, and its gradient."""
    if case.loss is None:
        model, made = copy.deepcopy(case.model), list[int]()
        model.register_forward_hook(lambda _, given, y: made.append(bytes_of(y)))
        with torch.no_grad(), casts():
            case.of(model, batch)
        return made[-1]
    with torch.no_grad():
        sizes: list[int] = []
        watched = Case(case.model, case.batch, lambda y, t: sizes.append(bytes_of(y)))
        watched.of(copy.deepcopy(case.model), batch)
    return 4 * sizes[0]


def bytes_of(found: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves(found)
    values = [
        v for leaf in leaves for v in (vars(leaf).values() if hasattr(leaf, "__dict__") else [leaf])
    ]
    return sum(t.nbytes for t in (*leaves, *values) if isinstance(t, Tensor))


def within(
    case: Case, share: Any, casts: Any, expected: Any, named: bool = False
) -> dict[str, Any]:
    """The outcome of one budget."""
    model, batch = copy.deepcopy(case.model), drawn_batch(case, SEEDS[0])
    sample = batch[0] if case.loss else batch
    try:
        seeded(9)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with casts():
                division = rg.budget(model, share, sample)
            left, taken = trained(case, model, casts)
    except rg.BudgetError as refusal:
        if named:
            return {"outcome": "least refused", "said": str(refusal)}
        found = within(case, refusal.minimum_bytes, casts, expected, named=True)
        return found | {"least": refusal.minimum_bytes, "refusal": str(refusal)}
    except rg.RetrogradeError as refusal:
        return {"outcome": "refused", "said": str(refusal)}
    except Exception as error:
        return {"outcome": "raw error", "said": place_of(error)}
    found, ordinary = differs(left, expected[0]), expected[1]
    allowed = division.total_bytes + division.elsewhere_bytes + outside(case, batch, casts)
    ours = [str(one.message) for one in told if "retrograde" in one.filename]
    over = taken > allowed + SLACK_BYTES
    right = "near" if found else "exact"
    if found and not is_near(case.model, left[0], expected[0][0]):
        right, over = "wrong", False
    outcome = right if not over else "told over" if ours else "over"
    return {
        "outcome": outcome, "said": found or "; ".join(ours), "bytes": taken, "plain": ordinary,
        "allowed": allowed, "total": division.total_bytes, "elsewhere": division.elsewhere_bytes,
        "ordinary": division.ordinary_bytes, "measured": division.peak_bytes,
    }  # fmt: skip


def as_trained(name: str) -> dict[str, Any]:
    """One model by all shares and types."""
    seeded(0)
    try:
        library = version(name.split()[0])
    except PackageNotFoundError:
        return {"model": name, "skipped": "its library is not installed"}
    try:
        case = CASES[name]()
        case.model.train()
    except Exception as error:
        return {"model": name, "skipped": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"model": name, "version": library, "ways": {}}
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    for kind, casts in (("float32", contextlib.nullcontext), ("bfloat16", autocast)):
        try:
            expected = trained(case, copy.deepcopy(case.model), casts)
        except Exception as error:
            found["ways"][kind] = {"outcome": "left out", "said": f"plain: {error}"[:300]}
            continue
        for share in SHARES:
            one = within(case, share, casts, expected)
            if one["outcome"] == "wrong":
                again = trained(case, copy.deepcopy(case.model), casts)
                if own := differs(expected[0], again[0]):
                    one |= {"outcome": "left out", "said": f"not repeatable itself: {own}"}
            found["ways"][f"{kind} {share}"] = one
    return found
