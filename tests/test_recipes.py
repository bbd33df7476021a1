"""Every recipe runs, saves memory and gives the gradient that it started from."""

import importlib
from pathlib import Path

import pytest
import torch

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
    "library_model": ({"layers": 6, "length": 64}, 0),
    "with_trainer": ({"layers": 2, "length": 64}, 0),
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
}


@pytest.fixture
def recipe(monkeypatch):
    """Loads a recipe by name, or skips and names the library that is absent."""
    monkeypatch.syspath_prepend(FOLDER)

    def load(name):
        if name in LIBRARY:
            reason = f"{name}.py needs {LIBRARY[name]}: pip install '.[recipes]'"
            pytest.importorskip(LIBRARY[name], reason=reason)
        return importlib.import_module(name)

    return load


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK)
def test_a_recipe_saves_memory_and_keeps_the_gradient(name, recipe, capsys):
    sizes, tolerance = QUICK[name]
    found = recipe(name).main(**sizes, rounds=1)
    assert found["after_bytes"] < found["before_bytes"]
    assert found["difference"] <= tolerance
    assert "of the memory is saved" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_packed_batches_save_memory_and_keep_the_gradient(recipe):
    found = recipe("padded").main(steps=120, packed=True, rounds=1)
    assert found["after_bytes"] < found["before_bytes"]
    assert found["difference"] <= ROUNDING


def test_under_autocast_the_gradient_is_nearer_to_float32_than_the_loops(recipe, monkeypatch):
    padded, runs = recipe("padded"), []
    monkeypatch.setattr(
        padded, "compare", lambda *ways: runs.append([way() for _, way in ways[:2]])
    )
    for dtype in (torch.bfloat16, torch.float32):
        padded.main(steps=120, dtype=dtype)
    (loop, ours), (exact, _) = runs
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


def test_every_recipe_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *QUICK, "truncated", "compare", "compare_jax", "side_by_side",
        "from_checkpoint_schedules", "to_checkpoint_schedules",
    }  # fmt: skip
