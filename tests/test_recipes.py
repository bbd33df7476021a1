"""Every recipe runs by itself, saves memory and gives the gradient that it started from."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import retrograde as rg
from oracles.side_by_side import compare, compare_programs

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
ROUNDING = 1e-4  # of a float32 gradient, or of weights after some steps of Adam

# Small sizes for each, and the largest difference of any gradient; 0 is bitwise.
QUICK = {
    "lstm": ({"steps": 200}, ROUNDING),
    "loop": ({"steps": 150}, 0),
    "gated_cell": ({"steps": 150}, ROUNDING),
    "checkpoint": ({}, 0),
    "episodes": ({"steps": 120}, ROUNDING),
    "padded": ({"steps": 120, "dtype": torch.float32}, ROUNDING),
    "with_lightning": ({"steps": 150, "batches": 2}, ROUNDING),
    "with_accelerate": ({"steps": 150, "batches": 2}, ROUNDING),
    "with_skorch": ({"steps": 150, "batches": 2}, ROUNDING),
    "spiking": ({"steps": 100}, 0),
    "rollout": ({"steps": 80}, ROUNDING),
    "simulator": ({"steps": 200, "size": 24}, ROUNDING),
    "state_space": ({"chunks": 32, "positions": 16}, ROUNDING),
    "adaptive_time": ({}, 0),
    "adaptive_ode": ({}, ROUNDING),
    "library_model": ({"layers": 6, "length": 64}, 0),
    "with_trainer": ({"layers": 4, "length": 32}, 0),
    "with_equinox": ({"steps": 600}, ROUNDING),
    "with_flax": ({"steps": 200}, ROUNDING),
}
LIBRARY = {
    "with_lightning": "lightning",
    "with_accelerate": "accelerate",
    "with_skorch": "skorch",
    "episodes": "torchrl",
    "spiking": "snntorch",
    "rollout": "torchdiffeq",
    "library_model": "transformers",
    "with_trainer": "transformers",
    "with_equinox": "equinox",
    "with_flax": "flax",
    "from_checkpoint_schedules": "checkpoint_schedules",
    "to_checkpoint_schedules": "checkpoint_schedules",
}


@pytest.fixture
def recipe(monkeypatch):
    """Loads a recipe by name, or skips and names the library that is absent."""
    monkeypatch.syspath_prepend(FOLDER)

    def load(name):
        skip_without_library(name)
        return importlib.import_module(name)

    return load


def skip_without_library(name):
    if name in LIBRARY:
        reason = f"{name}.py needs {LIBRARY[name]}: pip install '.[recipes]'"
        pytest.importorskip(LIBRARY[name], reason=reason)


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_saves_memory_and_keeps_the_gradient(name, recipe, capsys):
    sizes, tolerance = QUICK[name]
    ways = recipe(name).ways(**sizes)
    found = compare(ways, 1) if isinstance(ways, dict) else compare_programs(*ways, 1)
    assert found["after_bytes"] < found["before_bytes"]
    assert found["difference"] <= tolerance
    assert "of the memory is saved" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_packed_batches_save_memory_and_keep_the_gradient(recipe):
    found = compare(recipe("padded").ways(steps=120, packed=True), 1)
    assert found["after_bytes"] < found["before_bytes"]
    assert found["difference"] <= ROUNDING


def test_under_autocast_the_gradient_is_nearer_to_float32_than_the_loops(recipe):
    (loop, ours), (exact, _) = (
        [way() for way in recipe("padded").ways(steps=120, dtype=dtype).values()]
        for dtype in (torch.bfloat16, torch.float32)
    )
    for mine, theirs, right in zip(ours, loop, exact, strict=True):
        assert (mine - right).norm() < (theirs - right).norm()
        assert (mine - right).norm() < 0.02 * right.norm()


def test_the_whole_sequence_takes_less_memory_than_windows_of_it(recipe):
    found = recipe("truncated").main(seconds=0)
    assert found["after_bytes"] <= found["before_bytes"]


@pytest.mark.slow
def test_what_truncation_misses_is_learnt_in_full_in_as_many_seconds(recipe):
    found = recipe("truncated").main(seconds=25)
    assert found["before_right"] < 0.4
    assert found["after_right"] > 0.85


@pytest.mark.quick(99)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_a_recipe_is_short_and_hides_no_library(path):
    assert len(path.read_text().splitlines()) <= 60
    assert path.stem not in LIBRARY.values()  # the script's folder comes first on sys.path


def imported(path):
    """The packages that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.quick(99)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_a_recipe_imports_nothing_that_lies_beside_it(path):
    beside = {other.stem for other in (*FOLDER.glob("*.py"), *FOLDER.parent.glob("*.py"))}
    assert not beside & {*imported(path)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [p.stem for p in sorted(FOLDER.glob("*.py"))])
def test_a_recipe_runs_alone_in_an_empty_folder(name, tmp_path):
    skip_without_library(name)
    text = (FOLDER / f"{name}.py").read_text()
    if name == "truncated":
        text = text.replace("seconds: float = 20.0", "seconds: float = 0.5")
    (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(rg.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_every_recipe_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *QUICK, "truncated", "from_checkpoint_schedules", "to_checkpoint_schedules",
    }  # fmt: skip
