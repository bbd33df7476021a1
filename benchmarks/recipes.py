"""Runs every recipe of ``examples/recipes`` and writes the memory that each saves.

The figures are those that the recipes print: peak bytes of an iteration, and medians of times that
are taken in turns. One recipe compares accuracies instead.

    pip install '.[recipes]'
    python benchmarks/recipes.py                       # JSON into results/; three minutes
    python benchmarks/recipes.py --only with_trainer   # that row alone; the others stay
"""

import argparse
import importlib
import json
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrograde.machine import machine_of

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

#: File, arguments of its ``main``, what it starts from, what it goes to, packages beside torch.
RECIPES: list[tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = [
    ("lstm", {}, "`nn.LSTM`", '`rg.LSTM(memory="5%")`', ()),
    ("truncated", {}, "windows of 50 of 300 steps", '`rg.LSTM(memory="10%")`', ()),
    ("gated_cell", {}, "an LSTM with peepholes", '`rg.GatedCell`, 5%', ()),
    ("loop", {}, "a loop over steps", '`rg.unroll(memory="5%")`', ()),
    ("checkpoint", {}, "16 checkpoints", '`rg.Sequential(memory="25%")`', ()),
    ("padded", {}, "a loop with a mask, bfloat16", '`rg.Recurrent(memory="10%")`', ()),
    ("padded", {"packed": True}, "`nn.LSTM`, packed", '`rg.LSTM(memory="10%")`, packed', ()),
    ("episodes", {}, "TorchRL's `LSTMModule`", '`rg.LSTM(memory="20%")`, `reset=`', ("torchrl",)),
    ("with_lightning", {}, "`lightning.Trainer`", '`rg.LSTM(memory="5%")`', ("lightning",)),
    ("with_accelerate", {}, "`Accelerator`", '`rg.budget(model, "10%")`', ("accelerate",)),
    ("with_skorch", {}, "`NeuralNetClassifier`", '`module__memory="5%"`', ("skorch",)),
    ("spiking", {}, "a loop over snnTorch's neurons", "`rg.unroll(stateful=[net])`, 10%",
     ("snntorch",)),
    ("rollout", {}, "`torchdiffeq.odeint`", '`rg.unroll(memory="5%")`', ("torchdiffeq",)),
    ("library_model", {}, "GPT-2 of transformers", '`rg.budget(model, "30%")`',
     ("transformers",)),
    ("with_trainer", {}, "`transformers.Trainer`", '`rg.budget(model, "50%")`', ("transformers",)),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({name for name, *_ in RECIPES}))
    only = parser.parse_args().only
    asked = [recipe for recipe in RECIPES if only in (None, recipe[0])]
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    absent = [p for *_, packages in asked for p in packages if find_spec(p) is None]
    if absent:
        sys.exit(f"not installed: {', '.join(absent)}; run pip install '.[recipes]'")
    path = RESULTS / "recipes_cpu.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["recipe"] != only]
    rows = rows if only else []
    for name, given, before, after, packages in asked:
        print(f"\n{name}: from {before} to {after}".replace("`", ""), flush=True)
        rows.append({
            "recipe": name, "before": before, "after": after,
            "packages": {package: version(package) for package in packages},
            **importlib.import_module(name).main(**given),
        })  # fmt: skip
    found = {"machine": machine_of("cpu"), "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
