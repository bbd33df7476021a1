"""Models of other libraries within a budget: their bits, memory and time; torch.compile beside it.

pip install transformers timm torchvision
python benchmarks/models.py library_models   # JSON into benchmarks/results/; so do the others
python benchmarks/models.py compile_budget   # needs a C++ compiler
python benchmarks/models.py lean --only GPT-2   # such rows anew, the others as they were
"""

import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import retrograde as rg
from harness import Row, Run, Script, beside, difference, fresh, medians, seconds

script = Script()
SHARES = "65%", "50%", "30%", "20%", "10%"
Step = Callable[[], list[Tensor]]


def step(model: nn.Module, loss_of: Callable[[Any], Tensor], way: Any = contextlib.nullcontext,
         bf16: bool = False) -> list[Tensor]:  # fmt: skip
    """One training step but for the optimizer's: the loss, and all gradients."""
    torch.manual_seed(1)
    with way(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = loss_of(model)
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), *found]


def checkpointed(model: nn.Module, names: Iterable[str], **options: Any) -> nn.Module:
    """A copy of a model with a checkpoint around each of the named modules."""
    model = copy.deepcopy(model)
    for name in names:
        module: Any = model.get_submodule(name)
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **options)
    return model


def outside(case: Any, uncounted: int, elsewhere: int) -> int:
    """Bytes that a step holds beside what is budgeted: by the rest of the model, or for its loss,
    which holds the output and its gradient."""
    with torch.no_grad():
        y = case.outputs(case.model)
    output = sum(t.nbytes for t in pytree.tree_leaves(y) if isinstance(t, Tensor))
    return max(uncounted, elsewhere) + 2 * output


def of_library(name: str, rounds: int) -> Row | None:
    """One model in all ways, if its library is there."""
    from oracles.library_models import build

    case = build(name, large=True)
    if case is None:
        return None
    plain = partial(step, case.model, case.loss)
    expected, calls = plain(), {"plain": plain}
    if case.blocks:
        names = [n for n, m in case.model.named_modules() if m in case.blocks]
        calls["checkpoint"] = partial(step, checkpointed(case.model, names), case.loss)
    row: Row = {"model": name, "refused": [], "budget_ms": {}}
    try:
        rg.budget(copy.deepcopy(case.model), 1, case.sample)
    except rg.BudgetError as refusal:
        least = refusal.minimum_bytes
    held = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    allowed, rest = {}, 0
    for share in (
        "65%",
        "50%",
        "30%",
        "20%",
        "10%",
        "least",
        *["as checkpoint"] * bool(case.blocks),
    ):
        as_theirs = max(least, held.get("checkpoint", 0) - rest)
        model, memory = copy.deepcopy(case.model), {"least": least, "as checkpoint": as_theirs}
        try:
            start = time.perf_counter()
            division = rg.budget(model, memory.get(share, share), case.sample)
            row["budget_ms"][share] = round(1e3 * (time.perf_counter() - start))
        except rg.BudgetError:
            row["refused"].append(share)
            continue
        row["ordinary"], row["least"] = division.ordinary_bytes, least
        row["elsewhere"] = division.elsewhere_bytes
        rest = outside(case, held["plain"] - row["ordinary"], row["elsewhere"])
        calls[share], allowed[share] = partial(step, model, case.loss), division.total_bytes
    row |= beside(calls, rounds)
    row["allowed"] = {key: size + rest for key, size in allowed.items()}
    row["bitwise"] = [
        key
        for key, call in calls.items()
        if all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True))
    ]
    return row


@script.table("library_models_cpu", rounds=7)
def library_models(run: Run) -> None:
    """Claim: models of other libraries train in a budget, unchanged and exactly, at a known cost.

    Each model (``tests/oracles/library_models.py``) makes training steps in turn: unchanged, with a
    ``torch.utils.checkpoint`` around each block, and by ``rg.budget`` within fractions of its
    memory, its least, and the bytes of that checkpointing. Times are relative to the unchanged
    model, and bytes are those of a step besides the parameters' gradients.
    """
    from oracles.library_models import MODELS

    shown = ("plain_ms", "ratios", "bytes", "bitwise", "refused")
    run.write(rows=run.rows(MODELS.keys(), partial(of_library, rounds=run.rounds), *shown))


LAYERS, WIDTH, SAMPLES, TOKENS = 6, 192, 4, 128


def model_and_input(dropout: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout, "gelu", batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return model, torch.randn(SAMPLES, TOKENS, WIDTH)


def compiled(share: float, dropout: float, rounds: int, folder: str) -> Row:
    """One row; the compiled model's gradients at 1 are in ``folder``."""
    model, x = model_and_input(dropout)
    plain, ours = partial(outputs, model, model, x), copy.deepcopy(model)
    reference, saved = Path(folder) / f"at_1_{dropout}.pt", list[int]()

    def keep(t: Tensor) -> Tensor:
        saved.append(t.nbytes)
        return t

    with config.patch(activation_memory_budget=share):
        call = partial(outputs, torch.compile(model, fullgraph=True), model, x)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            found = call()
    if share == 1:
        torch.save(found, reference)
    expected = torch.load(reference)
    row: Row = {"share": share, "dropout": dropout, "saved_bytes": sum(saved)}
    row["outputs_differ"] = difference(found[:1], expected[:1])
    row["gradients_differ"] = difference(found[1:], expected[1:])
    calls = {"plain": plain, "compiled": call}
    try:
        rg.budget(ours, share, x)
        calls["budget"] = partial(outputs, ours, ours, x)
        row["ours_differ"] = difference(calls["budget"](), plain())
    except rg.BudgetError as refusal:
        row["least_share"] = refusal.minimum_bytes / rg.measure(plain).working_bytes
    return row | beside(calls, rounds)


def outputs(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """A training step: the outputs, and the gradients of all parameters."""
    torch.manual_seed(1)
    y = run(x)
    y.square().mean().backward()
    found = [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@script.table("compile_budget_cpu", rounds=9)
def compile_budget(run: Run) -> None:
    """Claim: torch.compile's activation budget is a wish; with dropout it changes the gradient.

    A compiled nn.TransformerEncoder trains under ``activation_memory_budget``, without and with
    dropout; ``rg.budget`` gets the same share, not compiled. Each row is a process of its own, with
    no compile cache. It has bytes and times beside the model as it is, and the largest relative
    difference of a gradient, and of the outputs, from those of the same compiled model at a budget
    of 1 (ours: from the model as it is). What the graph saves shows whether the setting was taken.
    """
    with tempfile.TemporaryDirectory() as folder:

        def row(case: tuple[float, float]) -> Row:
            asked = *case[::-1], run.rounds, folder
            return fresh(compiled, *asked, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")

        shares, dropouts = (1.0, 0.7, 0.5, 0.3, 0.1), (0.0, 0.1)
        cases = {f"{share}, dropout {d}": (d, share) for d in dropouts for share in shares}
        run.write(rows=run.rows(cases, row, "gradients_differ", "ours_differ", "bytes", "ratios"))


# Times are taken with a heap that is kept, which is settled when a process starts.
HEAP = {
    "MALLOC_TOP_PAD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_MMAP_MAX_": "0",
}  # fmt: skip


def same_bits(model: nn.Module, loss_of: Any, train: bool, bf16: bool) -> bool:
    """Whether a step and its traces are equal with and without the tape."""
    found = []
    torch.use_deterministic_algorithms(True)  # else ordinary gradients of embeddings differ too
    for way in (contextlib.nullcontext, rg.lean):
        net = copy.deepcopy(model).train(train)
        found.append([*step(net, loss_of, way, bf16), *net.buffers()])
    torch.use_deterministic_algorithms(False)
    return all(map(torch.equal, *found))


def times(model: nn.Module, loss_of: Any, rounds: int) -> dict[str, float]:
    """Median milliseconds of both ways, in turn; who goes first has a warmer heap."""
    ways = {"ordinary": contextlib.nullcontext, "lean": rg.lean}
    calls = {key: partial(step, model, loss_of, way) for key, way in ways.items()}
    taken: dict[str, list[float]] = {key: [] for key in ways}
    for number in range(rounds):
        for key in list(calls)[:: 1 - 2 * (number % 2)]:
            taken[key].append(seconds(calls[key]))
    return {key: 1e3 * statistics.median(each) for key, each in taken.items()}


def times_of(name: str, rounds: int) -> dict[str, float]:
    from oracles.lean_models import build

    return times(*build(name, large=True), rounds)


def on_a_lean_tape(name: str, rounds: int) -> Row | None:
    """A row of the table; its times are of the process whose ratio is the median of three."""
    from oracles.lean_models import build

    built = build(name, large=True)
    if built is None:
        return None
    model, loss_of = built
    row: Row = {"model": name}
    row["bits"] = {
        f"{mode}{', bf16' if bf16 else ''}": same_bits(model, loss_of, mode == "train", bf16)
        for mode in ("train", "eval")
        for bf16 in (False, True)
    }
    for end, bf16 in (("", False), ("_bf16", True)):
        for key, way in (("ordinary", contextlib.nullcontext), ("lean", rg.lean)):
            size = rg.measure(partial(step, model, loss_of, way, bf16)).working_bytes
            row[f"{key}{end}_bytes"] = size
        row[f"memory{end}"] = round(size / row[f"ordinary{end}_bytes"], 3)
    found = [fresh(times_of, name, rounds, **HEAP) for _ in range(3)]
    taken = sorted(found, key=lambda one: one["lean"] / one["ordinary"])[1]
    row |= {f"{key}_ms": round(taken[key], 2) for key in taken}
    return row | {"time": round(taken["lean"] / taken["ordinary"], 3)}


def is_small(module: nn.Module) -> bool:
    """Whether a module is a normalisation or an activation."""
    name = type(module).__name__
    return any(part in name for part in ("Norm", "GELU", "SiLU", "ReLU", "Activation"))


def is_block(module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether a module is one of several alike, of some size, in a list."""
    listed = isinstance(parent, (nn.ModuleList, nn.Sequential)) and not is_small(module)
    return listed and len(list(module.children())) > 1


def keep_products(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy of selective checkpointing: products, convolutions and attention are kept."""
    name = func.__name__.partition(".")[0]
    dear = ("mm", "addmm", "bmm", "baddbmm", "convolution")
    kept = name in dear or "attention" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def others(name: str) -> Row:
    """Memory and time of other ways to less memory, all in turn; ordinary autograd is 1."""
    from oracles.lean_models import build

    model, loss_of = build(name, large=True)
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    named = {n: m for n, m in model.named_modules() if n}
    blocks = [n for n, m in named.items() if is_block(m, parents.get(m))]
    selective = partial(create_selective_checkpoint_contexts, keep_products)
    fast = copy.deepcopy(model)
    fast.compile()
    ways = {
        "ordinary": model,
        "lean": model,
        "selective checkpoint": checkpointed(model, blocks, context_fn=selective),
        "checkpoint of blocks": checkpointed(model, blocks),
        "checkpoint by hand": checkpointed(model, [n for n, m in named.items() if is_small(m)]),
        "torch.compile": fast,
    }
    calls = {}
    for key, net in ways.items():
        call = partial(step, net, loss_of, rg.lean if key == "lean" else contextlib.nullcontext)
        with contextlib.suppress(RuntimeError):  # a ReLU in place may not be checkpointed
            call()
            calls[key] = call
    sizes = {key: rg.measure(call).working_bytes for key, call in calls.items()}
    taken = medians(calls, 9)
    row: Row = {"model": name}
    for key in calls:
        memory, slower = sizes[key] / sizes["ordinary"], taken[key] / taken["ordinary"]
        row[key] = {"memory": round(memory, 3), "time": round(slower, 3)}
    return row


def overhead() -> dict[str, float]:
    """Microseconds that the tape itself takes, on tensors that take none, and for tiny layers."""
    x = torch.randn(4, 64, requires_grad=True)
    found = {}
    for key, one in {"call": lambda: x.shape, "saved tensor": lambda: torch.sin(x)}.items():

        def many(way: Any, one: Callable[[], object] = one) -> None:
            with way():
                for _ in range(2000):
                    one()

        ways = {"plain": partial(many, contextlib.nullcontext), "lean": partial(many, rg.lean)}
        taken = medians(ways, 15)
        found[f"{key}_us"] = round(1e6 * (taken["lean"] - taken["plain"]) / 2000, 2)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(20)))
    batch, wide = torch.randn(32, 64), torch.randn(1024, 64)
    taken = times(net, lambda net: net(batch).square().mean(), 201)
    found["tiny_layers_time"] = round(taken["lean"] / taken["ordinary"], 3)
    taken = times(net, lambda net: net(wide).square().mean(), 101)
    gone = taken["lean"] - taken["ordinary"]
    found["let_go_us"] = round(1e3 * gone / 19, 1)  # the recomputation of 256 KiB too
    return found


@script.table("lean_cpu", rounds=11)
def lean(run: Run) -> None:
    """Claim: the lean tape takes a third less memory for some percent of time, with the same bits.

    Models of many kinds (``tests/oracles/lean_models.py``) make training steps with and without it,
    in turn: their peak of working memory, the median of their time, and every bit of outputs,
    gradients and buffers, in training, in evaluation and with autocast. The C library gives freed
    memory back to the system, and takes it page by page at the next step, so that the same step
    varies by a tenth. So times are taken with a heap that is kept, as jemalloc does. Each ratio is
    the median of three processes.
    """
    from oracles.lean_models import OTHERS, OWN

    one, shown = (
        partial(on_a_lean_tape, rounds=run.rounds),
        ("memory", "memory_bf16", "time", "bits"),
    )
    rows = run.rows([*OWN, *OTHERS], one, *shown)
    cost = run.also("overhead", partial(fresh, overhead, **HEAP))
    names = ("Encoder", "GPT-2", "Llama", "ResNet-18")
    ways = run.rows(names, partial(fresh, others, **HEAP), "lean", part="beside")
    run.write(rows=rows, overhead=cost, beside=ways)


if __name__ == "__main__":
    script.main()
