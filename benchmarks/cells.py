"""Cells of one's own and of other libraries within a budget, beside the plain loop over steps.

All ways take turns in one process. The tables show medians relative to the plain loop, what first
calls took, working bytes, and how far gradients differ.

    python benchmarks/cells.py small   # JSON into benchmarks/results/; so do the other tables
    pip install snntorch spikingjelly norse ncps torchdiffeq mambapy minGRU-pytorch dnc
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from harness import Row, Run, Script, beside, seconds, summary
from oracles.chained import layers_of_74
from oracles.own_cells import FIRST, FORMULAS, INPUTS, Attending, cases, plain

script = Script()
Call = Callable[[], tuple[Tensor, ...]]


def iteration(run: Callable[[], Tensor], wanted: list[Tensor]) -> Call:
    """A forward and a backward pass."""
    return lambda: torch.autograd.grad(run().square().sum(), wanted)


def compared(calls: dict[str, Call], rounds: int) -> Row:
    """Times, bytes and gradients of calls, beside those of the plain loop."""
    expected = calls["plain"]()
    differs = {
        key: max(float((a - b).norm() / b.norm()) for a, b in zip(call(), expected, strict=True))
        for key, call in calls.items()
    }
    return {**beside(calls, rounds), "worst_difference": differs}


def contenders(cell: nn.Module, steps: int, batch: int, state: Any) -> tuple[Row, dict[str, Call]]:
    """What the first calls took, and all calls by name."""
    torch.manual_seed(0)
    x = torch.randn(steps, batch, INPUTS, requires_grad=True)
    wanted = [x, *cell.parameters()]

    def encoded(run: Callable[[], Tensor]) -> Tensor:
        if isinstance(cell, Attending):
            cell.encode()
        return run()

    calls = {"plain": iteration(partial(encoded, lambda: plain(cell, x, state)), wanted)}
    calls["plain"]()
    loop = statistics.median(seconds(calls["plain"]) for _ in range(3))
    row: dict[str, Any] = {"first_loops": {}, "refused": {}}
    for compile in (False, True):
        for share in (None, "50%", "10%", "5%")[not compile :]:
            key = f"{'compiled' if compile else 'as it is'} {share or 'no budget'}"
            asked = {"memory": share, "compile": compile}
            ours = lambda asked=asked: rg.unroll(cell, x, state, **asked)[0]  # noqa: E731
            run = iteration(partial(encoded, ours), wanted)
            try:
                row["first_loops"][key] = round(seconds(run) / loop, 2)
            except rg.BudgetError as refusal:
                row["refused"][key] = refusal.minimum_bytes
                continue
            except rg.CellError:  # a cell that captures computed tensors is not compiled
                row["refused"][key] = None
                continue
            calls[key] = run
    return row, calls


@script.table("small_cells_cpu", rounds=9)
def small(run: Run) -> None:
    """Claim: a small cell within a budget takes little longer than the plain loop; compiled, less.

    Most of the time of a small cell's step is Python. Cells of a few operations run forward and
    backward by the plain loop, and by ``rg.unroll`` within fractions of their memory. The latter
    runs with and without ``compile=True``.
    """
    made = cases()

    def row(name: str) -> Row:
        first, calls = contenders(*made[name])
        return {"cell": name, **first, **compared(calls, run.rounds)}

    rows = run.rows(made.keys(), row, "plain_ms", "ratios", "first_loops", "worst_difference")
    summary(rows)
    run.write(rows=rows)


SHAPES = (
    (1, 8, 1, 1000),
    (16, 32, 8, 400),
    (40, 96, 4, 600),
    (32, 128, 32, 200),
    (64, 256, 64, 200),
)


def as_formula(kind: type[rg.GatedCell], shape: tuple[int, int, int, int], rounds: int) -> Row:
    """A formula over one shape, in all ways."""
    inputs, size, batch, steps = shape
    torch.manual_seed(0)
    cell, x = kind(inputs, size), torch.randn(steps, batch, inputs, requires_grad=True)
    wanted, row = [x, *cell.parameters()], {"refused": {}, "first_seconds": {}}
    calls = {"plain": iteration(lambda: plain(cell, x, cell.zeros(x[0])), wanted)}
    for share in ("100%", "50%", "20%", "10%", "5%", "compiled"):
        asked = {"memory": "100%", "compile": True} if share == "compiled" else {"memory": share}
        calls[share] = iteration(lambda a=asked: rg.unroll(cell, x, **a)[0], wanted)  # type: ignore[misc]
    for key in [*calls]:
        try:
            row["first_seconds"][key] = round(seconds(calls[key]), 2)
        except rg.BudgetError as refusal:
            row["refused"][key] = refusal.minimum_bytes
            del calls[key]
    return {"cell": kind.__name__, "shape": shape, **row, **compared(calls, rounds)}


@script.table("gated_cells_cpu", rounds=7)
def gated(run: Run) -> None:
    """Claim: a cell of one's own as a formula runs at the speed of compiled loops, at any budget.

    Five cells of ``rg.GatedCell`` run forward and backward over five shapes: by the plain loop, by
    ``torch.compile``, and by compiled loops within shares of the plain loop's memory.
    """

    def rows_of(kind: type[rg.GatedCell]) -> list[Row]:
        return [as_formula(kind, shape, run.rounds) for shape in SHAPES]

    rows = run.rows(FORMULAS, rows_of, "shape", "plain_ms", "ratios", "refused", "worst_difference")
    summary(rows)
    run.write(rows=rows)


def of_library(name: str, rounds: int) -> Row | None:
    """A cell of another library in all ways, if the library is there."""
    from oracles.third_party import INPUTS, build

    case = build(name, 16)
    if case is None:
        return None
    x = torch.randn(200, 16, INPUTS, requires_grad=True)
    wanted = [x, *(p for p in case.module.parameters() if p.requires_grad)]

    def call(run: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        y = run()
        found = torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)
        return [y.detach(), *(g for g in found if g is not None)]

    calls = {"plain": partial(call, lambda: case.plain(x))}
    expected = calls["plain"]()
    row: Row = {"cell": name, "refused": {}, "first_ms": {}}
    for share in ("50%", "10%", "5%"):
        ours = partial(call, lambda share=share: case.ours(x, memory=share))
        try:
            row["first_ms"][share] = round(1e3 * seconds(ours), 1)
        except rg.BudgetError as refusal:
            row["refused"][share] = refusal.minimum_bytes
            continue
        calls[share] = ours
    pairs = [pair for one in calls.values() for pair in zip(one()[:2], expected[:2], strict=True)]
    same = all(torch.equal(a, b) for a, b in pairs)
    return {**row, **beside(calls, rounds), "bitwise": same}


@script.table("other_people_cpu", rounds=5)
def other_people(run: Run) -> None:
    """Claim: cells of other libraries run within a budget, unchanged and exactly, at a known cost.

    Each cell (``tests/oracles/third_party.py``) runs forward and backward by the plain loop, and by
    ``rg.unroll`` within fractions of its memory. The table shows whether outputs and the inputs'
    gradients have the bits of the plain loop.
    """
    from oracles.third_party import CASES

    one = partial(of_library, rounds=run.rounds)
    rows = run.rows(CASES.keys(), one, "plain_ms", "ratios", "first_ms", "bitwise")
    summary(rows)
    run.write(rows=rows)


#: How many plain iterations a call may take, and the batch sizes; the last one is timed.
CHAIN: dict[str, tuple[float, tuple[int, ...]]] = {
    "chain of 74 layers, first batch size, 16": (3.0, (16,)),
    "chain of 74 layers, second batch size, 12": (1.5, (16, 12)),
}


def first_of_cell(name: str, rounds: int) -> list[Row] | None:
    """Seconds of the plain loop, and of the first and a later call, for each share."""
    if "ncps" in name and not find_spec("ncps"):
        return None
    rows = []
    for share in ("50%", "10%", "5%"):
        found: dict[str, list[float]] = {"plain": [], "first": [], "later": []}
        for _ in range(rounds):
            cell, x, state = FIRST[name]()
            loop = partial(passed, lambda: plain(cell, x, state))  # noqa: B023
            ours = partial(passed, lambda: rg.unroll(cell, x, state, memory=share)[0])  # noqa: B023
            loop()
            for key, call in (("plain", loop), ("first", ours), ("later", ours)):
                found[key].append(seconds(call))
        medians = {key: statistics.median(taken) for key, taken in found.items()}
        allowed = 3 * medians["plain"] + 0.3
        rows.append({"what": name, "budget": share, "allowed": allowed, **medians})
    return rows


def passed(run: Callable[[], Tensor]) -> None:
    run().square().sum().backward()


def first_of_chain(name: str, rounds: int) -> Row:
    """Seconds of a plain iteration, and of a first and a later call with the last batch size."""
    found: dict[str, list[float]] = {"plain": [], "first": [], "later": []}
    loops, batches = CHAIN[name]
    for _ in range(rounds):
        layers = layers_of_74()
        plain, ours = nn.Sequential(*layers), rg.Sequential(*layers, memory=200 << 20)
        for batch in batches:
            x, taken = torch.randn(batch, 3, 96, 96), {}
            passed(partial(plain, x))
            for key, net in (("plain", plain), ("first", ours), ("later", ours)):
                net.zero_grad(set_to_none=True)
                taken[key] = seconds(partial(passed, partial(net, x)))
        for key, one in taken.items():
            found[key].append(one)
    medians = {key: statistics.median(taken) for key, taken in found.items()}
    return {"what": name, "budget": "200 MiB", "allowed": loops * medians["plain"], **medians}


@script.table("first_call_cpu", rounds=5)
def first_call(run: Run) -> None:
    """Claim: a cell's first call takes at most 3 plain loops and 0.3 s; a chain's, 3 iterations.

    The first call of a chain with another batch size takes 1.5. A first call tries, measures and
    plans. Each is timed with a new module, in turn with the plain loop, and beside a later call.
    """

    def rows_of(name: str) -> Row | list[Row] | None:
        return (first_of_cell if name in FIRST else first_of_chain)(name, run.rounds)

    shown = ("budget", "plain", "first", "allowed", "later")
    run.write(rows=run.rows([*FIRST, *CHAIN], rows_of, *shown))


if __name__ == "__main__":
    script.main()
