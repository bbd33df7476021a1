"""The command ``figures``: what it writes, and what bad input gets."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gruslys2016 import measured
from gruslys2016.timed import Seconds
from oracles.commands import refused
from retrograde_papers import console
from retrograde_papers.__main__ import app
from retrograde_papers.every import PLATES

SMALL = Seconds(
    machine={"device": "abacus"}, inputs=4, hidden=4, batch=2, rounds=1, lengths=(5, 50),
    ordinary=(0.01, 0.1), budgeted={10: (0.02, 0.25)},
)  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["figures", *map(str, arguments)])


def files(*names):
    return {f"{name}.{end}" for name in names for end in ("svg", "png", "csv")}


@pytest.mark.quick(0)
def test_the_figures_that_are_named_are_written(tmp_path):
    folder = tmp_path / "deep" / "figures"
    result = run("figure_2a", "figure_3", "--folder", folder)
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == files("figure_2a", "figure_3")
    lines = result.output.splitlines()
    assert lines[0].split(maxsplit=1) == ["figure_2a", "cost of HSM against the length"]
    assert lines[1].startswith("figure_3 ")
    assert lines[2] == f"written to {folder}: .svg, .png and .csv of each"


@pytest.mark.slow
def test_all_are_written_where_none_is_named(tmp_path):
    assert run("--folder", tmp_path).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == files(*PLATES)


def test_an_unknown_figure_is_refused_with_the_known_ones(tmp_path):
    message = refused(run("figure_2a", "figure_9", "--folder", tmp_path))
    assert "unknown figure 'figure_9': use one of figure_2a, figure_2b," in message
    assert not list(tmp_path.iterdir())


def test_measuring_draws_the_fresh_numbers_and_keeps_them(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "expected_seconds", lambda: 90.0)
    monkeypatch.setattr(measured, "measure_seconds", lambda: SMALL)
    result = run("figure_2b", "--measure", "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    assert "measuring figure_2b: about 2 min" in result.output
    assert {path.name for path in tmp_path.iterdir()} == files("figure_2b") | {"figure_2b.json"}
    assert Seconds.from_json((tmp_path / "figure_2b.json").read_text(encoding="utf-8")) == SMALL
    table = (tmp_path / "figure_2b.csv").read_text(encoding="utf-8").splitlines()
    assert table[1:] == ["5,0.01,0.02", "50,0.1,0.25"]


def test_measuring_is_for_one_figure(tmp_path):
    message = refused(run("figure_2a", "--measure", "--folder", tmp_path))
    assert "--measure is for figure_2b alone" in message


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(run("figure_3", "--folder", tmp_path / "file"))


@pytest.mark.parametrize(
    ("missing", "options", "install"),
    [("matplotlib", [], "'.[cli]'"), ("torch", ["--measure"], "torch")],
)
def test_a_missing_package_is_named_with_what_brings_it(monkeypatch, missing, options, install):
    found = console.find_spec
    monkeypatch.setattr(console, "find_spec", lambda name: None if name == missing else found(name))
    message = refused(run(*options))
    assert f"this needs {missing}: pip install {install}" in message


@pytest.mark.quick(0)
def test_drawing_needs_no_torch(tmp_path):
    code = (
        "import sys; from retrograde_papers.__main__ import app\n"
        f"app(['figures', 'figure_2a', '--folder', {str(tmp_path)!r}], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.splitlines()[-1] == "False"
