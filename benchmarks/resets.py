"""Claim: samples that begin anew inside a sequence cost a layer nothing, and TorchRL's way a lot.

Layers of three kinds make training steps on batches of episodes, a tenth of the steps long on
average. Each is timed with ``reset=`` and without, in turn, at two budgets and without one (where
the layer without resets is torch's). TorchRL's ``LSTMModule``, which splits and pads, makes the
same step where it is installed. Its gradient is compared with ours.

    pip install torchrl
    python benchmarks/resets.py   # JSON into benchmarks/results/; a minute
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from alternating import medians
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
ROUNDS = 9
#: Inputs, units, samples, steps.
SIZES = ((8, 32, 8, 400), (24, 64, 16, 500), (64, 128, 32, 200), (64, 256, 16, 200))
BUDGETS = (None, "100%", "20%")


def step(net: nn.Module, run: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
    parameters = [*net.parameters()]
    return lambda: [*torch.autograd.grad(run().square().mean(), parameters)]


def torchrl(ours: nn.LSTM, x: Tensor, starts: Tensor) -> Callable[[], list[Tensor]]:
    """The same training step by TorchRL's module, batch first."""
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule

    theirs = LSTMModule(
        input_size=ours.input_size, hidden_size=ours.hidden_size, in_key="x", out_key="y",
        default_recurrent_mode=True,
    )  # fmt: skip
    theirs.lstm.load_state_dict(ours.state_dict())
    begun = starts.t().clone()
    begun[:, 0] = True
    batch = TensorDict(
        {"x": x.transpose(0, 1).contiguous(), "is_init": begun.unsqueeze(-1)},
        batch_size=[x.shape[1], len(x)],
    )
    return step(theirs.lstm, lambda: theirs(batch.clone())["y"])


def measured(kind: str, sizes: tuple[int, int, int, int], memory: Any) -> dict[str, Any]:
    inputs, units, samples, steps = sizes
    torch.manual_seed(0)
    net = getattr(rg, kind)(inputs, units, memory=memory)
    x, starts = torch.randn(steps, samples, inputs), torch.rand(steps, samples) < 10 / steps
    calls = {
        "without": step(net, lambda: net(x)[0]),
        "reset": step(net, lambda: net(x, reset=starts)[0]),
    }
    if kind == "LSTM" and find_spec("torchrl"):
        calls["torchrl"] = torchrl(net, x, starts)
    found = {name: call() for name, call in calls.items()}
    taken = medians(calls, ROUNDS)
    row: dict[str, Any] = {"kind": kind, "sizes": sizes, "memory": memory}
    row["ms"] = {name: round(1e3 * seconds, 2) for name, seconds in taken.items()}
    if "torchrl" in found:
        pairs = zip(found["reset"], found["torchrl"], strict=True)
        row["differs"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return row


def main() -> None:
    rows = []
    for kind in ("RNN", "GRU", "LSTM"):
        for sizes in SIZES:
            for memory in BUDGETS:
                row = measured(kind, sizes, memory)
                rows.append(row)
                ms = row["ms"]
                text = f"{kind} {sizes}, {memory}: reset= {ms['reset'] / ms['without']:.2f}×"
                if "torchrl" in ms:
                    text += (
                        f"; {ms['reset'] / ms['torchrl']:.2f}× TorchRL's, "
                        f"gradients differ by {row['differs']:.0e}"
                    )
                print(text, flush=True)
    path = RESULTS / "resets_cpu.json"
    path.write_text(json.dumps({"machine": machine_of("cpu"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
