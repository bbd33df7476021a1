"""The command: what it prints, what it writes, and what bad input gets."""

import errno
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from oracles.commands import full_after, refused, run
from retrograde import __version__, cli, console
from retrograde.errors import RetrogradeError
from retrograde.files import write_file
from retrograde.machine import check_parallel
from retrograde.training import TrainingOptions, load_checkpoint

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
SMALL = ["--memory", "60%", "--length", "40", "--batch", "4", "--hidden", "16", "--threads", "1"]


@pytest.fixture(autouse=True)
def _torch_left_as_it_was():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def start(*arguments):
    """The command as a process of its own."""
    command = [sys.executable, "-m", "retrograde.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path, process):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def same_run(one, other):
    """Whether two report folders hold the same run: weights, optimizer, losses, random numbers."""
    mine, theirs = (load_checkpoint(folder / "checkpoint.pt")["run"] for folder in (one, other))
    assert mine["losses"] == theirs["losses"]
    assert mine["position"] == theirs["position"]
    assert torch.equal(mine["random"], theirs["random"])
    for name, value in mine["model"].items():
        assert torch.equal(value, theirs["model"][name]), name
    for key, moments in mine["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, theirs["optimizer"]["state"][key][name])
    return True


def test_help_and_version_come_without_the_heavy_imports():
    code = (
        "import sys, retrograde.cli\n"
        "print([m for m in ('torch', 'numba', 'matplotlib') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    assert run("--version").output == f"retrograde {__version__}\n"
    for command in ("train", "plan", "profile", "figures", "bench"):
        assert command in run("--help").output
        assert run(command, "--help").exit_code == 0


def test_the_defaults_of_the_command_are_those_of_the_run():
    parameters = inspect.signature(cli.train).parameters
    for name, value in TrainingOptions().as_dict().items():
        if name != "threads":  # torch's choice, where nobody chooses
            assert parameters[name].default == value, name


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_package_is_named_with_its_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import retrograde.cli"
    process = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert process.returncode == 1
    assert "pip install 'retrograde[cli]'" in process.stderr
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(
    ("missing", "install"), [("torch", "torch"), ("matplotlib", "'retrograde[cli]'")]
)
def test_training_without_a_package_is_refused(monkeypatch, tmp_path, missing, install):
    found = console.find_spec
    monkeypatch.setattr(console, "find_spec", lambda name: None if name == missing else found(name))
    message = refused(run("train", "--report", tmp_path))
    assert f"this needs {missing}: pip install {install}" in message


def test_training_writes_its_report(tmp_path):
    result = run("train", *SMALL, "--iterations", 3, "--report", tmp_path / "deep" / "report")
    assert result.exit_code == 0, result.output
    written = {path.name for path in (tmp_path / "deep" / "report").iterdir()}
    pictures = {
        f"{name}.{end}" for name in ("loss", "memory", "schedule") for end in ("svg", "png")
    }
    assert written == pictures | {"metrics.json", "weights.pt", "checkpoint.pt"}
    for expected in ("Python's own documentation", "1/3", "3/3", "bits/char", "ordinary BPTT"):
        assert expected in result.output
    metrics = json.loads((tmp_path / "deep" / "report" / "metrics.json").read_text())
    assert len(metrics["loss_bits_per_character"]) == len(metrics["seconds_per_iteration"]) == 3
    assert metrics["options"]["hidden"] == 16
    comparison = metrics["comparison"]
    assert comparison["largest_gradient_difference"] < 1e-5
    assert comparison["budgeted"]["working_bytes"] <= comparison["budget_bytes"]
    assert metrics["machine"]["torch"] == torch.__version__
    weights = torch.load(tmp_path / "deep" / "report" / "weights.pt", weights_only=True)
    assert weights["model"]["lstm.weight_hh_l0"].shape == (64, 16)
    assert len(weights["vocabulary"]) == metrics["text"]["vocabulary"]


def test_resuming_is_bit_for_bit(tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    assert run("train", *SMALL, "--iterations", 6, "--report", straight).exit_code == 0
    assert run("train", *SMALL, "--iterations", 3, "--report", parts).exit_code == 0
    result = run("train", "--resume", "--iterations", 6, "--report", parts)
    assert result.exit_code == 0, result.output
    assert "resumed after iteration 3 of 6" in result.output
    assert same_run(straight, parts)


@pytest.mark.quick(0)
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    process = start("train", *SMALL, "--iterations", 100_000, "--report", killed)
    wait_for(killed / "checkpoint.pt", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    total = len(load_checkpoint(killed / "checkpoint.pt")["run"]["losses"]) + 2
    assert total < 100_000
    assert run("train", "--resume", "--iterations", total, "--report", killed).exit_code == 0
    assert run("train", *SMALL, "--iterations", total, "--report", straight).exit_code == 0
    assert same_run(killed, straight)


@pytest.mark.quick(0)
def test_ctrl_c_says_how_to_go_on(tmp_path):
    process = start("train", *SMALL, "--iterations", 100_000, "--report", tmp_path)
    wait_for(tmp_path / "checkpoint.pt", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped; continue with: retrograde train --resume --report {tmp_path}" in output
    assert "Traceback" not in output
    assert load_checkpoint(tmp_path / "checkpoint.pt")["run"]["losses"]


@pytest.mark.quick(0)
def test_starting_anew_keeps_the_old_checkpoint(tmp_path):
    run("train", *SMALL, "--iterations", 1, "--report", tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    result = run("train", *SMALL, "--iterations", 1, "--seed", 2, "--report", tmp_path)
    assert "the checkpoint of an earlier run is kept as" in result.output
    assert (tmp_path / "checkpoint.previous.pt").read_bytes() == before


@pytest.mark.quick(0)
def test_a_finished_run_has_nothing_to_resume_but_says_so(tmp_path):
    run("train", *SMALL, "--iterations", 2, "--report", tmp_path)
    result = run("train", "--resume", "--report", tmp_path)
    assert result.exit_code == 0
    assert "all 2 iterations are done; raise --iterations to continue" in result.output


@pytest.mark.quick(0)
def test_resuming_with_other_options_is_refused(tmp_path):
    run("train", *SMALL, "--iterations", 1, "--report", tmp_path)
    message = refused(run("train", "--resume", "--hidden", 32, "--report", tmp_path))
    assert "--hidden is 32" in message
    assert "began with 16: leave --hidden out" in message
    assert run("train", "--resume", *SMALL, "--report", tmp_path).exit_code == 0


def test_resuming_without_a_whole_checkpoint_is_refused(tmp_path):
    assert "there is no checkpoint" in refused(run("train", "--resume", "--report", tmp_path))
    (tmp_path / "checkpoint.pt").write_bytes(b"half a check")
    message = refused(run("train", "--resume", "--report", tmp_path))
    assert f"{tmp_path / 'checkpoint.pt'} is damaged: it holds 12 bytes, expected those" in message
    assert "start a new run without --resume, or replace it by a complete copy" in message


def test_resuming_from_a_checkpoint_of_other_shapes_is_refused(tmp_path):
    run("train", *SMALL, "--iterations", 1, "--report", tmp_path)
    state = load_checkpoint(tmp_path / "checkpoint.pt")
    state["run"]["options"]["hidden"] = 32
    torch.save(state, tmp_path / "checkpoint.pt")
    message = refused(run("train", "--resume", "--report", tmp_path))
    assert f"cannot resume from {tmp_path / 'checkpoint.pt'}: model.embedding.weight has" in message
    assert re.search(r"shape \(\d+, 16\): expected float32 of shape \(\d+, 32\), for", message)
    assert "or start a new run without --resume" in message


@pytest.mark.quick(0)
def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    process = start("train", *SMALL, "--iterations", 100_000, "--report", tmp_path)
    wait_for(tmp_path / "checkpoint.pt", process)
    for more in ([*SMALL, "--iterations", 1], ["--resume"]):
        message = refused(run("train", *more, "--report", tmp_path))
        expected = f"another run uses the report folder {tmp_path}: process {process.pid}"
        assert expected in message
        assert "wait for it to end or stop it, or name another folder with --report" in message
    assert not (tmp_path / "checkpoint.previous.pt").exists()
    process.kill()
    process.communicate()
    assert (tmp_path / ".lock").exists()  # which is no obstacle
    assert run("train", *SMALL, "--iterations", 1, "--report", tmp_path).exit_code == 0


def test_a_folder_that_cannot_be_locked_is_told(tmp_path, monkeypatch):
    def none(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("retrograde.training.folder._lock", none)
    result = run("train", *SMALL, "--iterations", 1, "--report", tmp_path)
    assert result.exit_code == 0
    assert f"{tmp_path} is on a file system without locks" in " ".join(result.output.split())


@pytest.mark.quick(0)
@needs_full
def test_training_onto_a_full_disk_names_the_file(tmp_path):
    run("train", *SMALL, "--iterations", 1, "--report", tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt.partial").symlink_to(FULL)
    message = refused(run("train", "--resume", "--iterations", 2, "--report", tmp_path))
    assert f"cannot write {tmp_path / 'checkpoint.pt'}: No space left on device" in message
    assert "the last checkpoint stands: make room there" in message
    assert "go on with --resume" in message
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    result = run("train", "--resume", "--iterations", 2, "--report", tmp_path)
    assert "resumed after iteration 1 of 2" in result.output


def test_a_report_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("in the way")
    started = time.monotonic()
    message = refused(run("train", "--report", tmp_path / "file" / "report"))
    assert "cannot write the report folder" in message
    assert "name one that can be written with --report" in message
    assert time.monotonic() - started < 5  # nothing of the full size was run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text", "missing.txt"], "cannot read the text missing.txt: No such file or directory"),
        (["--length", 10**9], "needs at least 1,000,000,001; use --length"),
        (["--memory", "5 parsecs"], "unknown unit 'parsecs'"),
        (["--memory", "500%"], "expected a fraction above 0 and at most 1"),
        (["--memory", "100B"], "at least"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0: expected a number above 0"),
        (["--seed", -1], "--seed is -1: expected 0 or more, at most 9,223,372,036,854,775,807;"),
        (["--seed", 2**64], f"--seed is {2**64}: expected 0 or more, at most"),
        (["--length", 0], "greater than or equal to 1"),
        (["--batch", "many"], "--batch"),
    ],
)
def test_bad_input_to_train_is_one_message(tmp_path, arguments, expected):
    result = run("train", *SMALL, "--iterations", 1, "--report", tmp_path, *arguments)
    assert expected in refused(result)
    assert not (tmp_path / "checkpoint.pt").exists()


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


def test_a_plan_in_bytes_says_what_it_holds_and_what_is_proven():
    sizes = ["--state", 65_536, "--alpha", 430_080]
    output = run("plan", "--length", 1000, "--memory", "5%", *sizes).output
    assert "1,953 forward steps" in output
    assert "no schedule of this policy" not in output  # it is proven the cheapest
    assert "18,210,816 of 18,212,249 bytes" in output
    output = run("plan", "--length", 3000, "--memory", "5%", *sizes).output
    assert "no schedule of this policy takes fewer than 5,8" in output


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
        (["--length", 10, "--memory", "1MB"], "memory is '1MB': expected an integer, 1 or more"),
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


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_a_profile_shows_a_step_and_what_budgets_buy(cell):
    sizes = ["--cell", cell, "--inputs", 8, "--hidden", 12, "--layers", 2, "--batch", 4]
    result = run("profile", *sizes, "--length", 300, "--points", 5, "--threads", 1)
    assert result.exit_code == 0, result.output
    state = 2 * 4 * 12 * 4 * (2 if cell == "lstm" else 1)
    assert f"hidden state {state} B" in " ".join(result.output.split())
    for expected in ("backward step", "kernel call", "What a budget buys, 300 steps", "torch"):
        assert expected in result.output
    rows = [line.split() for line in result.output.splitlines() if "%" in line]
    assert len(rows) == 5
    assert rows[-1][2:4] == ["100.00%", "1×"]


def test_a_budget_that_was_asked_for_is_among_the_others():
    small = ["--inputs", 8, "--hidden", 12, "--batch", 4, "--length", 300, "--points", 3]
    result = run("profile", *small, "--memory", "31%", "--threads", 1)
    assert result.exit_code == 0, result.output
    shares = [float(found) for found in re.findall(r"([0-9.]+)%", result.output)]
    assert len(shares) == 4
    assert shares == sorted(shares)
    assert 31.0 in shares
    assert run("profile", *small, "--memory", "1GiB", "--threads", 1).output.count("%") == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cell", "lstn"], "--cell is 'lstn': expected lstm, gru or rnn"),
        (["--device", "abacus"], "--device is 'abacus': expected cpu or cuda"),
        (["--memory", "3 apples"], "unknown unit 'apples'"),
        (["--length", 60, "--batch", 2, "--memory", 1], "need at least"),
        (["--length", 0], "equal to 1"),
    ],
)
def test_bad_input_to_profile_is_one_message(arguments, expected):
    assert expected in refused(run("profile", "--hidden", 8, "--inputs", 8, *arguments))


EVERY_COMMAND = [
    ["train"],
    ["profile"],
]


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


def test_a_plan_onto_a_full_disk_names_the_file_and_keeps_the_old_one(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "--length", 10, "--memory", 4]
    assert run(*asked, "--json", "x.json", "--picture", "x.svg").exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Path, "write_text", full_after(Path.write_text, "x.json"))
    monkeypatch.setattr(Figure, "savefig", full_after(Figure.savefig, "x.svg"))
    kept = "No space left on device; the old content is kept: make room there, or name"
    assert f"cannot write x.json: {kept}" in refused(run(*asked, "--json", "x.json"))
    assert f"cannot write x.svg: {kept}" in refused(run(*asked, "--picture", "x.svg"))
    assert f"cannot write x.svg: {kept}" in refused(
        run("plan", "--length", 10, "--curve", "--picture", "x.svg")
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("part", ["cli.py", "training"])
def test_nothing_is_written_but_by_what_keeps_the_old_file(part):
    place = Path(cli.__file__).with_name(part)
    for path in [place] if place.is_file() else place.glob("*.py"):
        if path.name != "folder.py":
            found = re.findall(r"save_plate\(|\.write_text\(|figures\.save\(", path.read_text())
            assert not found, path


@needs_full
def test_weights_onto_a_full_disk_are_told_with_the_path(tmp_path):
    def save(place):
        place.symlink_to(FULL)
        with place.open("wb") as file:
            torch.save(torch.zeros(100_000), file)

    with pytest.raises(RetrogradeError, match=r"cannot write .*vgg11\.pt: No space left on device"):
        write_file(tmp_path / "vgg11.pt", save)
    assert list(tmp_path.iterdir()) == []


@needs_full
def test_a_device_is_written_to_and_not_replaced(tmp_path):
    asked = ["plan", "--length", 10, "--memory", 4, "--json"]
    assert "cannot write /dev/full: No space left on device" in refused(run(*asked, FULL))
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert run(*asked, pipe).exit_code == 0
    reader.join(10)
    assert json.loads(read[0])["length"] == 10
    assert pipe.is_fifo()


def test_what_a_link_leads_to_is_replaced(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "other" / "x.json")
    assert (
        run("plan", "--length", 10, "--memory", 4, "--json", tmp_path / "link.json").exit_code == 0
    )
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "other" / "x.json").read_text())["length"] == 10


def test_the_command_can_be_run_as_a_module():
    environment = {**os.environ, "COLUMNS": "100"}
    command = [sys.executable, "-m", "retrograde.cli", "plan", "--length", "8", "--memory", "3"]
    output = subprocess.check_output(command, text=True, env=environment)
    assert "forward steps" in output
