"""Claims: a chain keeps to its budget, as predicted, and is faster than ``checkpoint_sequential``.

There are four networks. The layers of two are unequal (ResNet-18, VGG-11), those of two are nearly
equal (a mixer of 48 blocks, a transformer encoder of 12 layers). Each runs within ten budgets, from
the least one to ordinary backpropagation's memory. For each budget, three things are compared:

- the measured peak of an iteration, with the budget and with the predicted peak;
- the seconds of an iteration, with the predicted seconds;
- the seconds, in turn in one process, with those of ``checkpoint_sequential``. It gets its fastest
  number of segments among those whose measured peak fits the same budget.

Gradients are compared bit for bit.

    python benchmarks/chain_networks.py                  # JSON into benchmarks/results/
    python benchmarks/chain_networks.py --device cuda    # beside torch.compile's memory budget, too
    python benchmarks/chain_networks.py --quick          # small and once; nothing is written
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint_sequential

import retrograde as rg
from retrograde.machine import machine_of, now
from retrograde_papers.networks import vgg11

RESULTS = Path(__file__).parent / "results"
BUDGETS = 10


def resnet18() -> list[nn.Module]:
    """ResNet-18's layers for images of 32×32: a stem, eight residual blocks, a linear layer.

    Every ReLU stands behind what it writes to: ``checkpoint_sequential`` takes no segment that
    begins with one in place.
    """

    def block(channels: int, wide: int, stride: int) -> nn.Module:
        path = (
            nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        same = channels == wide and stride == 1
        shortcut = None if same else nn.Conv2d(channels, wide, 1, stride=stride, bias=False)
        return nn.Sequential(rg.Residual(*path, shortcut=shortcut), nn.ReLU(inplace=True))

    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    sizes = (
        (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
        (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
    )  # fmt: skip
    blocks = [block(*size) for size in sizes]
    return [stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]


class Mixer(nn.Module):
    """A block of an MLP-mixer: one perceptron across tokens, one across channels."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.across = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.along = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norms[1](x))  # type: ignore[no-any-return]


def mixer() -> list[nn.Module]:
    """48 equal blocks."""
    return [*(Mixer(64, 96) for _ in range(48)), nn.Linear(96, 10)]


def transformer() -> list[nn.Module]:
    """An encoder of 12 equal layers, with dropout."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return [*(copy.deepcopy(layer) for _ in range(12)), nn.Linear(128, 10)]


NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "ResNet-18": (resnet18, (32, 3, 32, 32)),
    "VGG-11": (vgg11, (64, 3, 32, 32)),
    "mixer": (mixer, (16, 64, 96)),
    "transformer": (transformer, (8, 96, 128)),
}
CUDA_SCALE = 8  # times as many samples


@dataclass(frozen=True)
class Way:
    """A way to run one network forward and backward.

    Args:
        net: called with the sample.
        parameters: that collect gradients.
        x: the sample.
        seed: the gradient of the output.
    """

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
        start = now(self.x.device)
        self.step()
        return now(self.x.device) - start

    def peak(self) -> int:
        self.step()
        return rg.measure(self.step, device=self.x.device).working_bytes

    def gradients(self) -> list[Tensor | None]:
        self.step()
        return [p.grad for p in self.parameters]


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


def in_turn(ways: dict[Any, Way], rounds: int) -> dict[Any, list[float]]:
    """The seconds of each, turn by turn, after one call for nothing."""
    taken: dict[Any, list[float]] = {key: [] for key in ways}
    for turn in range(rounds + 1):
        for key, way in ways.items():
            seconds = way.seconds()
            if turn:
                taken[key].append(seconds)
    return taken


def medians(taken: dict[Any, list[float]]) -> dict[Any, float]:
    return {key: statistics.median(each) for key, each in taken.items()}


def same(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)


def compare(name: str, device: torch.device, rounds: int, budgets: int, small: bool) -> Any:
    """One network, all budgets."""
    make, shape = NETWORKS[name]
    on_gpu = device.type == "cuda"
    samples = 2 if small else shape[0] * (CUDA_SCALE if on_gpu else 1)
    torch.manual_seed(0)
    plain = nn.Sequential(*make()).to(device)
    ours = rg.Sequential(*plain, memory=1.0)
    parameters = list(plain.parameters())
    x = torch.randn(samples, *shape[1:], device=device)
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
    print(
        f"{name}: {len(whole.names)} layers, ordinary {ordinary.peak() / 2**20:.1f} MiB", flush=True
    )
    paces = {1: ordinary, **theirs}
    their_seconds = medians(in_turn(paces, max(1, rounds // 3)))
    rows = []
    for k in range(budgets):
        between = whole.ordinary_bytes - whole.minimum_bytes
        ours.memory = whole.minimum_bytes + between * k // (budgets - 1)
        mine = way(ours)
        rows.append(_row(ours, mine, peaks, their_seconds, paces, ordinary, rounds))
        rows[-1]["bitwise"] = same(expected, mine.gradients())
        _print(rows[-1])
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
        **({"torch_compile": _of_torch_compile(way, plain, rounds)} if on_gpu else {}),
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
    seconds = medians(taken)
    foreseen = found.peak_bytes
    peak = mine.peak()
    return {
        "budget_bytes": found.budget_bytes,
        "foreseen_bytes": foreseen,
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


def _of_torch_compile(way: Callable[..., Way], plain: nn.Sequential, rounds: int) -> Any:
    """Peak and seconds of a few shares; what torch means by a share is its own."""
    rows = {}
    for share in (1.0, 0.75, 0.5, 0.25, 0.1):
        one = way(compiled(plain, share))
        rows[str(share)] = {
            "peak_bytes": one.peak(),
            "seconds": medians(in_turn({0: one}, rounds))[0],
        }
        print(f"  torch.compile, activation_memory_budget={share}: {rows[str(share)]}", flush=True)
    return rows


def _print(row: dict[str, Any]) -> None:
    mib = row["budget_bytes"] / 2**20
    kept = row["peak_bytes"] / row["budget_bytes"]
    right = row["foreseen_bytes"] / row["peak_bytes"]
    dearer = row["to_ordinary"]
    pace = row["seconds"] / row["foreseen_seconds"]
    beside = dearer / (row["foreseen_seconds"] / row["foreseen_ordinary_seconds"])
    ratio = "cannot" if row["ratio"] is None else f"{row['ratio']:.2f}"
    print(
        f"  {mib:8.2f} MiB: peak {kept:.3f} of it, foreseen {right:.3f} of that; "
        f"{row['seconds'] * 1e3:7.1f} ms, {dearer:.2f} of ordinary, {pace:.2f} of foreseen "
        f"(ordinary's pace out: {beside:.2f}); theirs/ours {ratio} "
        f"({row['their_segments']} segments); bitwise {row['bitwise']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    rounds, budgets = (1, 3) if options.quick else (options.rounds, BUDGETS)
    start = time.perf_counter()
    found = {
        name: compare(name, device, rounds, budgets, options.quick) for name in options.networks
    }
    if not options.quick and len(found) == len(NETWORKS):
        document = {"machine": machine_of(device), "rounds": rounds, "networks": found}
        path = RESULTS / f"chain_networks_{device.type}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written to {path} after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
