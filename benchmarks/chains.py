"""Layers in a chain within a budget, beside checkpoints around them.

python benchmarks/chains.py networks --device cuda  # beside torch.compile's memory budget, too
"""

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint_sequential

import retrograde as rg
from harness import Row, Run, Script, seconds, turns
from oracles.chained import encoder, mixer, resnet18
from oracles.rollouts import AROUND, ROLLOUTS, Rollout, unrolled
from retrograde_papers import networks as papers

script = Script()

Network = tuple[Callable[[], list[nn.Module]], tuple[int, ...]]
NETWORKS: dict[str, Network] = {
    "ResNet-18": (resnet18, (32, 3, 32, 32)),
    "VGG-11": (papers.vgg11, (64, 3, 32, 32)),
    "mixer": (mixer, (16, 64, 96)),
    "transformer": (lambda: [*encoder(12, 128), nn.Linear(128, 10)], (8, 96, 128)),
}


@dataclass(frozen=True)
class Way:
    """A way to run one network forward and backward, and the gradient of its output."""

    net: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    x: Tensor
    seed: Tensor

    def step(self) -> Tensor:
        for p in self.parameters:
            p.grad = None
        torch.manual_seed(0)
        y = self.net(self.x)
        y.backward(self.seed)
        return y.detach()

    def seconds(self) -> float:
        return seconds(self.step, self.x.device)

    def peak(self) -> int:
        self.step()
        return rg.measure(self.step, device=self.x.device).working_bytes

    def gradients(self) -> list[Tensor | None]:
        self.step()
        return [p.grad for p in self.parameters]


def in_turn(ways: dict[Any, Way], rounds: int) -> dict[Any, list[float]]:
    """The seconds of each, turn by turn, after one call for nothing."""
    device = next(iter(ways.values())).x.device
    return turns({key: way.step for key, way in ways.items()}, rounds, device, warm=1)


def middle(taken: dict[Any, list[float]]) -> dict[Any, float]:
    return {key: statistics.median(each) for key, each in taken.items()}


def checkpointed(plain: nn.Sequential, segments: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        found: Tensor = checkpoint_sequential(plain, segments, x, use_reentrant=False)
        return found

    return run


def compiled(plain: nn.Sequential, share: float) -> Callable[[Tensor], Tensor]:
    """torch.compile, told how much of the activations to keep."""
    torch._dynamo.reset()
    fast: Callable[[Tensor], Tensor] = torch.compile(plain)

    def run(x: Tensor) -> Tensor:
        with functorch_config.patch(activation_memory_budget=share):
            return fast(x)

    return run


def same(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)


def compare(name: str, rounds: int, budgets: int, small: bool) -> Any:
    """One network, all budgets."""
    make, shape = NETWORKS[name]
    samples = 2 if small else shape[0]
    torch.manual_seed(0)
    plain = nn.Sequential(*make())
    ours = rg.Sequential(*plain, memory=1.0)
    parameters = list(plain.parameters())
    x = torch.randn(samples, *shape[1:])
    seed = torch.randn_like(plain(x).detach())
    buffers = copy.deepcopy(plain.state_dict())

    def way(net: Callable[[Tensor], Tensor]) -> Way:
        plain.load_state_dict(buffers)
        return Way(net, parameters, x, seed)

    ordinary = way(plain)
    expected = ordinary.gradients()
    whole = ours.fit(x)
    theirs = {k: way(checkpointed(plain, k)) for k in range(2, len(plain) + 1)}
    peaks = {k: one.peak() for k, one in theirs.items()}
    paces = {1: ordinary, **theirs}
    their_seconds = middle(in_turn(paces, max(1, rounds // 3)))
    rows = []
    for k in range(budgets):
        between = whole.ordinary_bytes - whole.minimum_bytes
        ours.memory = whole.minimum_bytes + between * k // (budgets - 1)
        mine = way(ours)
        rows.append(_row(ours, mine, peaks, their_seconds, paces, ordinary, rounds))
        rows[-1]["bitwise"] = same(expected, mine.gradients())
        shown = ("budget_bytes", "peak_bytes", "to_ordinary", "ratio", "bitwise")
        print(name, {key: rows[-1][key] for key in shown}, flush=True)
    return {
        "shape": [samples, *shape[1:]],
        "layers": len(whole.names),
        "ordinary_bytes": ordinary.peak(),
        "least_bytes": whole.minimum_bytes,
        "checkpoint_sequential": {
            "least_bytes": min(peaks.values()),
            "bytes": peaks,
            "seconds": their_seconds,
        },
        "budgets": rows,
    }


def _row(
    ours: rg.Sequential, mine: Way, peaks: dict[int, int], their_seconds: dict[int, float],
    paces: dict[int, Way], ordinary: Way, rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """One budget: ours beside the fastest of theirs that fits it, timed anew in turn."""
    found = ours.fit(mine.x)
    fitting = [k for k, peak in peaks.items() if peak <= found.budget_bytes]
    if found.ordinary:
        fitting = [1]
    best = min(fitting, key=lambda k: their_seconds[k], default=None)
    beside = {
        "ours": mine,
        "ordinary": ordinary,
        **({} if best is None else {"theirs": paces[best]}),
    }
    taken = in_turn(beside, rounds)
    seconds, peak = middle(taken), mine.peak()
    return {
        "budget_bytes": found.budget_bytes,
        "foreseen_bytes": found.peak_bytes,
        "peak_bytes": peak,
        "forward_layers": found.forward_layers,
        "seconds": seconds["ours"],
        "foreseen_seconds": found.seconds,
        "ordinary_seconds": seconds["ordinary"],
        "foreseen_ordinary_seconds": found.ordinary_seconds,
        "their_segments": best,
        "their_seconds": seconds.get("theirs"),
        "their_bytes": None if best is None else peaks.get(best),
        "ratio": None if best is None else _ratio(taken["theirs"], taken["ours"]),
        "to_ordinary": _ratio(taken["ours"], taken["ordinary"]),
    }


def _ratio(ones: list[float], others: list[float]) -> float:
    """The median of the ratios of one turn each: both of a pair ran at the machine's same pace."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


@script.table("chain_networks_cpu", rounds=7, quick=False)
def networks(run: Run) -> None:
    """Claim: a chain keeps to its budget, as predicted, and is faster than checkpoint_sequential.

    The layers of two networks are unequal (ResNet-18, VGG-11), those of two nearly equal. Each runs
    within ten budgets, from the least to ordinary backpropagation's memory. The peak of an
    iteration is beside the budget and the predicted peak, and its seconds beside the predicted
    ones. In turn runs ``checkpoint_sequential``, with the fastest number of segments whose measured
    peak fits the same budget. Gradients are compared bit for bit.
    """
    rounds, budgets = (1, 3) if run.quick else (run.rounds, 10)
    known = run.old().get("networks", {})
    found = {
        name: compare(name, rounds, budgets, run.quick) if run.only in name else known[name]
        for name in NETWORKS
        if run.only in name or name in known
    }
    run.write(rounds=rounds, networks=found)


def within(name: str) -> Row:
    """What a network takes by budgets."""
    torch.manual_seed(0)
    make = getattr(papers, name.lower().replace("-", ""))
    net, x = rg.Sequential(*make(), memory="100%"), torch.randn(16, 3, 32, 32)

    def iteration() -> None:
        net.zero_grad()
        net(x).square().mean().backward()

    found = net.fit(x)
    row = {"network": name, "ordinary": found.ordinary_bytes, "least": found.minimum_bytes}
    for share in ("50%", "25%"):
        net.memory = share
        try:
            iteration()
            row[share] = rg.measure(iteration).working_bytes
        except rg.BudgetError:
            row[share] = None
    return row


@script.table("chain_least_cpu")
def least(run: Run) -> None:
    """How far below ordinary backpropagation's memory chains of layers can train.

    Networks get batches of 16 images of 32 × 32. The table shows the memory of ordinary
    backpropagation, the measured peaks within half and a quarter of it, and the least budget that
    fits. Only bytes are measured. What a convolution takes for a moment depends on the processor.
    """
    run.write(rows=run.rows(("VGG-11", "ResNet-18", "ResNet-34"), within, "ordinary", "least"))


def rollout(name: str, rounds: int) -> Row:
    """One rollout in all ways."""
    torch.manual_seed(0)
    plain = ROLLOUTS[name]()
    x = plain.sample()

    def step(model: Rollout, run: Callable[[Rollout], Tensor] | None = None) -> list[Any]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        (model(x) if run is None else run(model)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def peak(call: Callable[[], Any]) -> int:
        call()
        return rg.measure(call).working_bytes

    expected, ways = step(plain), {"plain": partial(step, plain)}
    for around in AROUND:
        ways[around] = partial(step, copy.deepcopy(plain))
        ways[around].args[0].around = around
    peaks = {way: peak(call) for way, call in ways.items()}
    refused = {}

    def within(by: str, memory: Any) -> Callable[[], Any]:
        model, run = copy.deepcopy(plain), None
        if by == "unroll":
            run = partial(unrolled, memory=memory, x=x)
        else:
            rg.budget(model, memory, x)
        peaks[way] = peak(partial(step, model, run))
        return partial(step, model, run)

    for share in ("50%", "20%", "10%", "5%", "least", *AROUND):
        for by in ("budget", "unroll"):
            way = f"{by} {share}"
            try:
                ways[way] = within(by, 1 if share == "least" else peaks.get(share, share))
            except rg.BudgetError as error:
                refused[way] = error.minimum_bytes
                if share == "least":  # whose time is not read
                    within(by, error.minimum_bytes)
    taken = turns(ways, rounds)
    return {
        "rollout": name,
        "plain_ms": round(statistics.median(taken["plain"]) * 1e3, 1),
        "plain_bytes": peaks["plain"],
        "share": {way: round(size / peaks["plain"], 3) for way, size in peaks.items()},
        "ratio": {way: round(_ratio(each, taken["plain"]), 3) for way, each in taken.items()},
        "refused_least_bytes": refused,
        "other_bits": [w for w, call in ways.items() if not same(expected, call())],
    }


@script.table("rollouts_cpu", rounds=9)
def rollouts(run: Run) -> None:
    """Claim: rollouts of whole models take less time within a budget than in ``checkpoint``.

    Each runs as it is, with ``torch.utils.checkpoint`` around its steps, its layers, and both, by
    ``rg.budget`` and by ``rg.unroll``: within shares of what it takes as it is, and the very bytes
    of each checkpointing. All take turns in one process. The table has measured peaks, and medians
    of the ratio to the plain iteration of the same round. Gradients are compared bit for bit.
    """
    one = partial(rollout, rounds=run.rounds)
    run.write(rounds=run.rounds, rows=run.rows(ROLLOUTS.keys(), one, "plain_ms", "share", "ratio"))


if __name__ == "__main__":
    script.main()
