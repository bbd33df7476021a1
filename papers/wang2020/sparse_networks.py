"""Claims: scans over sparse Jacobians give ordinary gradients, and make pruned networks faster.

First, LeNet-5, VGG-11, a small ResNet and a perceptron run in float64. Every gradient is computed
by the linear scan, by Blelloch's, and by a hybrid scan of one level, and compared with ordinary
backpropagation. The table shows seconds, the predicted bytes of Jacobians and products, and the
largest relative difference.

Then VGG-11 runs in float32, pruned to 3 %. The table shows the seconds of a backward pass by torch,
by ``algorithm="auto"``, and by each scan. All take turns in one process; times are medians.

    python -m wang2020.sparse_networks   # JSON into benchmarks/results/; 8 GiB
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.machine import machine_of
from retrograde_papers.networks import lenet5, vgg11
from wang2020.pruning import prune_weights

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SCANS: dict[str, dict[str, Any]] = {
    "linear": {"algorithm": "linear"},
    "blelloch": {"algorithm": "blelloch"},
    "hybrid, 1 level": {"algorithm": "hybrid", "levels": 1},
    "auto": {},
}


def resnet() -> list[nn.Module]:
    """Three residual blocks of 8 and 16 channels."""

    def block(channels: int, wide: int, stride: int) -> list[nn.Module]:
        path = (
            nn.Conv2d(channels, wide, 3, stride=stride, padding=1),
            nn.BatchNorm2d(wide).eval(),
            nn.ReLU(),
            nn.Conv2d(wide, wide, 3, padding=1),
            nn.BatchNorm2d(wide).eval(),
        )
        same = channels == wide and stride == 1
        shortcut = None if same else nn.Conv2d(channels, wide, 1, stride=stride)
        return [rg.Residual(*path, shortcut=shortcut), nn.ReLU()]

    first = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8).eval(), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return [*first, *block(8, 8, 1), *block(8, 16, 2), *block(16, 16, 1), *last]


def perceptron() -> list[nn.Module]:
    """Four linear layers with tanhs between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in ((3072, 256), (256, 128), (128, 64), (64, 10)):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return layers[:-1]


NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "MLP": (perceptron, (4, 3, 32, 32)),
    "LeNet-5": (lenet5, (4, 3, 32, 32)),
    "ResNet": (resnet, (2, 3, 16, 16)),
    "VGG-11": (vgg11, (1, 3, 32, 32)),
}


def backward(net: nn.Module, x: Tensor, seed: Tensor) -> tuple[float, list[Tensor]]:
    """Seconds of a backward pass, and the gradients of the input and of all parameters."""
    net.zero_grad()
    leaf = x.clone().requires_grad_()
    y = net(leaf)
    start = time.perf_counter()
    y.backward(seed)
    taken = time.perf_counter() - start
    assert leaf.grad is not None
    return taken, [leaf.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The greatest of any gradient, relative to that gradient's largest entry."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def gradients(name: str) -> dict[str, Any]:
    """One network, all scans against ordinary backpropagation, in float64."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    layers = make()
    plain = nn.Sequential(*layers).double()
    x = torch.randn(shape, dtype=torch.float64)
    seed = torch.randn_like(plain(x))
    _, expected = backward(plain, x, seed)
    rows = {}
    for scan, options in SCANS.items():
        net = rg.Sequential(*layers, backward="scan", **options)
        taken, found = backward(net, x, seed)
        outlook = net.explain(x.clone().requires_grad_())
        rows[scan] = {
            "levels": outlook.chosen.levels,
            "seconds": taken,
            "difference": difference(found, expected),
            "foreseen_bytes": outlook.chosen.bytes if outlook.jacobians else 0,
            "flops": outlook.chosen.report.flops,
            "critical_flops": outlook.chosen.report.critical_flops,
        }
        print(
            f"{name:<9}{scan:<17}{rows[scan]['difference']:.1e}  {taken:8.3f} s  "
            f"{rows[scan]['foreseen_bytes'] / 2**20:9.1f} MiB foreseen",
            flush=True,
        )
    return {"shape": list(shape), "scans": rows}


def pruned(samples: int, share: float, rounds: int) -> dict[str, Any]:
    """Backward passes of a pruned VGG-11, all ways in turn."""
    torch.manual_seed(0)
    layers = vgg11()
    plain = nn.Sequential(*layers)
    prune_weights(plain, share)
    x = torch.randn(samples, 3, 32, 32)
    seed = torch.randn_like(plain(x))
    nets: dict[str, nn.Module] = {"torch": plain}
    for scan, options in SCANS.items():
        if scan != "blelloch":  # whose products are dense in the end
            nets[scan] = rg.Sequential(*layers, backward="scan", **options)
    seconds: dict[str, list[float]] = {way: [] for way in nets}
    differences = {}
    _, expected = backward(plain, x, seed)
    for way, net in nets.items():
        differences[way] = difference(backward(net, x, seed)[1], expected)
    for _ in range(rounds):
        for way, net in nets.items():
            seconds[way].append(backward(net, x, seed)[0])
    rows = {
        way: {
            "seconds": statistics.median(taken),
            "ratio": statistics.median(taken) / statistics.median(seconds["torch"]),
            "difference": differences[way],
        }
        for way, taken in seconds.items()
    }
    for way, row in rows.items():
        print(
            f"B={samples:<4} {way:<17}{1e3 * row['seconds']:9.1f} ms  {row['ratio']:6.2f}x  "
            f"{row['difference']:.1e}",
            flush=True,
        )
    return {"samples": samples, "share": share, "rounds": rounds, "ways": rows}


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    document = {
        "machine": machine_of("cpu"),
        "gradients": {name: gradients(name) for name in arguments.networks},
        "pruned": [pruned(samples, 0.97, arguments.rounds) for samples in arguments.samples],
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "sparse_networks_cpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
