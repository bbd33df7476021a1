"""The recipes of ``examples/recipes``, and the memory that each saves.

pip install '.[recipes]'
python benchmarks/recipes.py every                     # JSON into results/; three minutes
python benchmarks/recipes.py every --only with_trainer   # that row alone; the others stay
"""

import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from harness import ROOT, Row, Run, Script
from oracles.side_by_side import compare

script = Script()
#: File, arguments of its ``ways``, what it starts from, what it goes to, packages beside torch.
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
    ("simulator", {}, "a loop without inputs", '`rg.unroll(memory="5%")`', ()),
    ("state_space", {}, "a loop over chunks", '`rg.unroll(memory="10%")`', ()),
    ("library_model", {}, "GPT-2 of transformers", '`rg.budget(model, "30%")`',
     ("transformers",)),
    ("with_trainer", {}, "`transformers.Trainer`", '`rg.budget(model, "30%")`', ("transformers",)),
]  # fmt: skip


@script.table("recipes_cpu")
def every(run: Run) -> None:
    """Peak bytes of an iteration and median seconds, before and after; of one recipe accuracies."""
    sys.path.insert(0, str(ROOT / "examples" / "recipes"))
    asked = [recipe for recipe in RECIPES if run.only in recipe[0]]
    absent = [p for *_, packages in asked for p in packages if find_spec(p) is None]
    if absent:
        sys.exit(f"not installed: {', '.join(absent)}; run pip install '.[recipes]'")

    def rows_of(recipes: list[Any]) -> list[Row]:
        return [
            {
                "recipe": name, "before": before, "after": after,
                "packages": {package: version(package) for package in packages},
                **(found.main() if name == "truncated" else compare(found.ways(**given), 5)),
            }
            for name, given, before, after, packages in recipes
            for found in [importlib.import_module(name)]
        ]  # fmt: skip

    named = {name: [recipe for recipe in RECIPES if recipe[0] == name] for name, *_ in RECIPES}
    run.write(rows=run.rows(named, rows_of, "before", "after"))


if __name__ == "__main__":
    script.main()
