"""Compile every CPU kernel and solver now, so that no later call waits for it.

``python -m retrograde.precompile`` runs each once, at a tiny size, through the public interface.
numba keeps the machine code beside the source. An image or a cluster's shared installation does
this once, after ``pip install``.
"""

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_sequence

import retrograde as rg

_KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (rg.RNN, {}),
    (rg.RNN, {"nonlinearity": "relu"}),
    (rg.GRU, {}),
    (rg.LSTM, {}),
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"memory": "100%"},
    {"memory": "40%"},
    {"memory": "70%", "bidirectional": True, "num_layers": 2, "dropout": 0.1},
    {"backward": "scan"},
)


def precompile() -> None:
    """Run each kernel and each solver once, at a tiny size."""
    _plan()
    for dtype in (torch.float32, torch.float64):
        for (layer, way), options in itertools.product(_KINDS, _OPTIONS):
            _run_layers(layer(3, 5, dtype=dtype, **way, **options), dtype)
        for algorithm in ("linear", "blelloch"):
            _scan_chain(algorithm, dtype)


def _plan() -> None:
    rg.plan(30_000, 300)
    rg.cost(9, 4, policy="best", alpha=1)
    sizes = [1_000_003 + 70_001 * (7 * i % 5) for i in range(12)]
    chain = rg.Chain([1.0, 2.0, 1.5] * 4, [2.0] * 12, sizes, [3 * size for size in sizes])
    rg.plan(chain, 12_345_678)
    layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4), nn.Tanh())]
    rg.Sequential(*layers, memory="80%")(torch.randn(8, 4, device="cpu")).sum().backward()


def _run_layers(module: Any, dtype: torch.dtype) -> None:
    x = torch.randn(64, 3, 3, dtype=dtype, device="cpu")
    packed = pack_sequence([x[:steps, 0] for steps in (64, 50, 40)])
    for inputs in (x.requires_grad_(), packed):
        outputs, _ = module(inputs)
        (outputs if inputs is x else outputs.data).sum().backward()
    if module.memory is not None:  # the kernels for the smallest budget
        module.memory = module.fit(x).minimum_bytes
        module(x)[0].sum().backward()


def _scan_chain(algorithm: Any, dtype: torch.dtype) -> None:
    first, second, third = (nn.Conv2d(n, 2, 3, padding=1) for n in (1, 2, 2))
    prune.random_unstructured(third, "weight", 0.8)
    layers = first, nn.ReLU(), second, nn.Tanh(), nn.MaxPool2d(2), third, nn.ReLU(), nn.Flatten()
    net = rg.Sequential(*layers, nn.Linear(32, 4), backward="scan", algorithm=algorithm)
    for samples in (1, 9):
        net.to(dtype)(torch.randn(samples, 1, 8, 8, dtype=dtype, device="cpu")).sum().backward()


def main() -> None:
    """Compile, and print the seconds that it took."""
    started = time.perf_counter()
    precompile()
    print(f"compiled in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
