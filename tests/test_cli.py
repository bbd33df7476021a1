"""The command: what it prints, what it writes, and what bad input gets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oracles.commands import refused, run
from retrograde import __version__


def test_help_and_version_come_without_the_heavy_imports():
    code = (
        "import sys, retrograde.cli\n"
        "print([m for m in ('torch', 'numba', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    assert run("--version").output == f"retrograde {__version__}\n"
    assert "plan" in run("--help").output
    assert run("plan", "--help").exit_code == 0


@pytest.mark.parametrize("name", ["train", "profile", "bench", "figures", "precompile"])
def test_a_command_that_is_gone_is_refused_by_name(name):
    assert f"No such command '{name}'" in refused(run(name, "--help"))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_named_with_its_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import retrograde.cli"
    process = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert process.returncode == 1
    assert "pip install '.[cli]'" in process.stderr
    assert "Traceback" not in process.stderr


def test_a_picture_without_matplotlib_is_refused(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("retrograde.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(run("plan", "--length", 4, "--memory", 2, "--picture", "x.svg"))
    assert "this needs matplotlib" in message
    assert "pip install '.[cli]'" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("option", ["--json", "--picture"])
def test_a_full_disk_is_told_with_the_path(tmp_path, option):
    path = tmp_path / "x.svg"
    path.symlink_to("/dev/full")
    message = refused(run("plan", "--length", 10, "--memory", 4, option, path))
    assert f"cannot write {path}: No space left on device; make room there" in message


def test_a_plan_tells_cost_peak_and_trade_off(tmp_path):
    result = run("plan", "--length", 1000, "--memory", 50)
    assert result.exit_code == 0, result.output
    assert "2,948 forward steps, 2.95 for each; 1.649× the time of ordinary BPTT" in result.output
    assert "50 of 50 slots" in result.output
    rows = [line for line in result.output.splitlines() if line.count("│") == 5]
    assert [int(row.split("│")[1].replace(",", "")) for row in rows] == [
        3, 6, 12, 25, 50, 100, 200, 400,
    ]  # fmt: skip


def test_the_headline_of_ism():
    output = run("plan", "--length", 1000, "--memory", 50, "--policy", "ism").output
    assert "1,950 forward steps, 1.95 for each; 1.317× the time of ordinary BPTT" in output


def test_a_short_plan_is_spelt_out():
    output = run("plan", "--length", 4, "--memory", 4).output
    assert "schedule  store 0, advance 0→1" in output
    assert "\nadvance 0→1\n" in run("plan", "--length", 4, "--memory", 4, "--actions").output


def test_a_mixed_plan_takes_its_sizes():
    output = run(
        "plan", "--length", 100, "--memory", 30, "--policy", "msm", "--alpha", 5, "--beta", 4
    ).output
    assert "forward steps" in output


def test_alpha_alone_means_the_best_policy():
    asked = ["plan", "--length", 100, "--memory", 30, "--alpha", 5]
    assert run(*asked).output == run(*asked, "--policy", "best").output


@pytest.mark.quick(0)
def test_a_plan_in_bytes_says_what_it_holds_and_what_is_proven():
    sizes = ["--state", 65_536, "--alpha", 430_080]
    output = run("plan", "--length", 1000, "--memory", "5%", *sizes).output
    assert "1,953 forward steps" in output
    assert "no schedule of this policy" not in output  # it is proven the cheapest
    assert "18,210,816 of 18,212,249 bytes" in output
    output = run("plan", "--length", 3000, "--memory", "5%", *sizes).output
    assert "no schedule of this policy takes fewer than 5,8" in output


@pytest.mark.quick(0)
def test_the_curve_is_printed_and_drawn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("plan", "--length", 1000, "--alpha", 5, "--curve")
    assert result.exit_code == 0, result.output
    rows = [
        [cell.strip().replace(",", "") for cell in line.split("│")[1:5]]
        for line in result.output.splitlines()
        if line.count("│") == 5
    ]
    assert rows[0][:2] == ["1", "500500"]
    assert rows[-1] == ["3997", "1000", "1", "1.000"]
    assert len(rows) == 21
    assert "1,085 memories at which the cost drops" in result.output
    assert (tmp_path / "trade_off.svg").stat().st_size > 1000


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_short_curve_is_shown_whole(length, tmp_path):
    picture = tmp_path / "curve.png"
    result = run("plan", "--length", length, "--curve", "--picture", picture)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_plan_is_drawn_and_written(tmp_path, ending):
    picture, text = tmp_path / f"picture.{ending}", tmp_path / "schedule.json"
    result = run("plan", "--length", 10, "--memory", 4, "--picture", picture, "--json", text)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000
    assert json.loads(text.read_text())["length"] == 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--length", 0, "--memory", 4], "0"),
        (["--length", 10, "--memory", 0], "0"),
        (["--length", 10, "--memory", "4.5"], "memory is '4.5': expected an integer, 1 or more"),
        (["--length", 10, "--memory", "1MB"], "--memory 1MB is bytes: --state and --alpha are"),
        (["--length", 10, "--memory", "x%", "--state", 9, "--alpha", 9], "cannot read the memory"),
        (["--length", 10], "the policy 'hsm' needs a memory"),
        (["--length", 10, "--memory", 4, "--alpha", 2, "--beta", 3], "beta is 3 and alpha is 2"),
        (["--length", 10, "--curve", "--memory", 4], "--curve shows every memory: leave out"),
        (["--length", 10, "--curve", "--policy", "store-all"], "'store-all' takes no memory"),
        (["--length", 10**8, "--curve"], "expected at most 1000000: ask for the cost at those"),
        (["--length", 10, "--memory", 4, "--policy", "guess"], "guess"),
        (["--length", 10, "--memory", 4, "--picture", "picture.xyz"], "cannot draw picture.xyz"),
        (["--length", 10, "--memory", 4, "--picture", "x"], "cannot draw x: it has no extension"),
        (
            ["--length", 10, "--memory", 4, "--json", "missing/x.json"],
            "cannot write missing/x.json",
        ),
    ],
)
def test_bad_input_to_plan_is_one_message(arguments, expected):
    assert expected in refused(run("plan", *arguments))


def test_the_command_can_be_run_as_a_module():
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-m", "retrograde.cli", "plan", "--length", "8", "--memory", "3"]
    output = subprocess.check_output(command, text=True, env=environment)
    assert "forward steps" in output


def test_fit_tells_what_a_layer_takes():
    sizes = ["--input", "8", "--hidden", "8", "--length", "60", "--batch", "2"]
    told = run("fit", "gru", *sizes, "--memory", "20%").output
    assert "allowed; ordinary backpropagation holds" in told
    assert "steps run forward for 60" in told
    assert "s an iteration" in told
    assert "times the ordinary one's" in told
    assert "expected lstm, gru or rnn" in refused(run("fit", "mlp", *sizes, "--memory", "20%"))
    assert "need at least" in refused(run("fit", "lstm", *sizes, "--memory", "10"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--memory", "5%"], "--state and --alpha are then needed"),
        (["--memory", "64KiB", "--alpha", "5", "--state", "1024"], "expected both in bytes"),
    ],
)
def test_a_plan_in_bytes_is_told_in_the_words_of_the_command(options, told):
    assert told in refused(run("plan", "--length", "100", *options))
