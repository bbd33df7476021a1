"""The papers' commands: what is absurd is refused, old files are kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from oracles.commands import full_after, refused
from oracles.commands import run as run_command
from retrograde.errors import RetrogradeError
from retrograde_papers.__main__ import app
from retrograde_papers.files import write_file
from retrograde_papers.limits import check_parallel
from wang2020 import program, seconds

FULL = Path("/dev/full")
EVERY_COMMAND = [
    ["bench", "bitstream"],
    ["bench", "instruments", "--data", "."],
    ["bench", "lenet"],
    ["bench", "vgg11"],
    ["bench", "deep"],
]


def run(*arguments):
    return run_command(*arguments, app=app)


@pytest.mark.quick(0)
def test_the_library_does_not_load_the_papers():
    code = (
        "import sys, retrograde.cli, retrograde.models, retrograde.figures\n"
        "print({'gruslys2016', 'wang2020', 'retrograde_papers'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.parametrize("threads", [0, -1, 100_000])
@pytest.mark.parametrize("command", EVERY_COMMAND, ids=" ".join)
def test_threads_beyond_reason_are_refused_before_any_starts(
    monkeypatch, tmp_path, command, threads
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail("threads were set"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert refused(run(*command, "--threads", threads)) == (
        f"error --threads is {threads}: expected 1 to 12, up to 4 for each of the 3 processors "
        "that this process may use; name a number in that range, or leave --threads out"
    )
    assert list(tmp_path.iterdir()) == []
    check_parallel("--threads", 12)


def test_processes_beyond_reason_are_refused_before_any_starts(tmp_path):
    message = refused(run("bench", "ranks", "--ranks", 100_000, "--report", tmp_path / "report"))
    assert "--ranks is 100000: expected 1 to " in message
    assert "leave --ranks out" in message
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, -(10**20)])
@pytest.mark.parametrize("command", [*EVERY_COMMAND, ["bench", "ranks"]], ids=" ".join)
def test_absurd_seeds_are_refused_before_any_work(monkeypatch, tmp_path, command, seed):
    monkeypatch.chdir(tmp_path)
    assert refused(run(*command, "--seed", seed)) == (
        f"error --seed is {seed}: expected 0 or more, at most 9,223,372,036,854,775,807; name a "
        "seed in that range"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_figures_onto_a_full_disk_name_the_file_and_keep_the_old_ones(
    monkeypatch, tmp_path, ending
):
    assert run("figures", "figure_2a", "--folder", tmp_path).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 3
    monkeypatch.setattr(Figure, "savefig", full_after(Figure.savefig, f"figure_2a.{ending}"))
    message = refused(run("figures", "figure_2a", "--folder", tmp_path))
    assert f"cannot write {tmp_path / 'figure_2a'}.{ending}: No space left on device" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_benchmark_onto_a_full_disk_names_the_file_and_keeps_the_old_one(monkeypatch, tmp_path):
    asked = ["bench", "bitstream", "--length", 8, "--batch", 2, "--iterations", 1, "--threads", 1]
    asked += ["--only", "curves", "--batches", 2, "--report", tmp_path]
    assert run(*asked).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "write_text", full_after(Path.write_text, "bitstream.json"))
    message = refused(run(*asked, "--seed", 3))
    assert f"cannot write {tmp_path / 'bitstream.json'}: No space left on device" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.quick(0)
def test_what_another_benchmark_wrote_meanwhile_is_kept(monkeypatch, tmp_path):
    asked = ["bench", "bitstream", "--length", 8, "--batch", 2, "--iterations", 1, "--threads", 1]
    asked += ["--batches", 2, "--lengths", 8, "--rounds", 1, "--report", tmp_path]
    assert run(*asked, "--only", "curves").exit_code == 0
    file, aside = tmp_path / "bitstream.json", tmp_path / "aside.json"
    file.rename(aside)

    def measure_seconds(*arguments):
        aside.rename(file)
        return seconds.measure_seconds(*arguments)

    monkeypatch.setattr(program, "measure_seconds", measure_seconds)
    assert run(*asked, "--only", "seconds").exit_code == 0
    written = json.loads(file.read_text())
    assert written["curves"]
    assert written["timings"]


def test_a_folder_that_cannot_be_written_is_said_before_the_figures(tmp_path):
    (tmp_path / "file").write_text("in the way")
    message = refused(run("figures", "figure_2a", "--folder", tmp_path / "file" / "figures"))
    assert "cannot write into the folder" in message
    assert "make room there, or name a folder that can be written" in message


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
def test_weights_onto_a_full_disk_are_told_with_the_path(tmp_path):
    def save(place):
        place.symlink_to(FULL)
        with place.open("wb") as file:
            torch.save(torch.zeros(100_000), file)

    with pytest.raises(RetrogradeError, match=r"cannot write .*vgg11\.pt: No space left on device"):
        write_file(tmp_path / "vgg11.pt", save)
    assert list(tmp_path.iterdir()) == []
