"""The example that ``make demo`` runs: it learns, resumes bit for bit, and refuses bad input."""

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

PATH = Path(__file__).parent.parent / "examples" / "characters.py"
SMALL = ["--length", "70", "--window", "10", "--batch", "3", "--hidden", "8", "--memory", "30%"]


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("characters", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EVERY", 2)
    return module


def run(example, folder, *arguments, code=0):
    assert example.main(["--report", str(folder), *map(str, arguments)]) == code
    return torch.load(folder / "checkpoint.pt")


def leaves(saved):
    """All that training decides: weights, optimizers, losses and answers, but no seconds."""
    rows = [row[way][:2] for row in saved["rows"] for way in row]
    return [leaf for leaf in pytree.tree_leaves((saved["states"], rows)) if leaf is not None]


def assert_same(one, other):
    pairs = zip(leaves(one), leaves(other), strict=True)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def refused(example, folder, *arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        example.main(["--report", str(folder), *map(str, arguments)])
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_it_trains_and_writes_a_report(example, tmp_path, capsys):
    saved = run(example, tmp_path / "deep" / "report", *SMALL, "--iterations", 3)
    assert len(saved["rows"]) == 3
    assert f"open {tmp_path / 'deep' / 'report'}/index.html" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "deep" / "report").iterdir()}
    pictures = {f"{name}.{end}" for name in ("learning", "memory") for end in ("png", "svg")}
    assert written == pictures | {"checkpoint.pt", "report.md", "index.html"}
    page = (tmp_path / "deep" / "report" / "index.html").read_text()
    linked = {*re.findall('(?:href|src)="(.*?)"', page)}
    assert linked == written - {"index.html"}
    report = (tmp_path / "deep" / "report" / "report.md").read_text()
    assert "| windows |" in report
    assert "![Bits of each iteration](learning.png)" in report


def test_both_ways_start_equal_and_see_equal_batches_but_not_equal_gradients(example, tmp_path):
    rows = run(example, tmp_path, *SMALL, "--iterations", 2)["rows"]
    assert rows[0]["full"][0] == pytest.approx(rows[0]["windows"][0], abs=1e-5)
    assert abs(rows[1]["full"][0] - rows[1]["windows"][0]) > 1e-5


def test_the_lstm_keeps_to_its_budget(example, tmp_path):
    training = example.parse(["--report", str(tmp_path), *SMALL])
    found = example.compare(training)
    assert found["full"].working_bytes <= training.fit.budget_bytes
    assert found["ordinary"].working_bytes > 3 * training.fit.budget_bytes
    for ours, theirs in zip(found["full"].value, found["ordinary"].value, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_is_bit_for_bit_the_whole_one(example, tmp_path):
    whole = run(example, tmp_path / "whole", *SMALL, "--iterations", 5)
    run(example, tmp_path / "parts", *SMALL, "--iterations", 3)
    (tmp_path / "parts").rename(tmp_path / "moved")
    parts = run(example, tmp_path / "moved", "--resume", "--iterations", 5)
    assert_same(whole, parts)


def test_ctrl_c_ends_the_iteration_and_keeps_it(example, tmp_path, monkeypatch, capsys):
    step, usual = example.Training.step, signal.getsignal(signal.SIGINT)

    def pressed(self, way, *batch):
        if (way, len(self.rows)) == ("full", 2):  # with the other way of this iteration to come
            signal.raise_signal(signal.SIGINT)
        return step(self, way, *batch)

    monkeypatch.setattr(example.Training, "step", pressed)
    saved = run(example, tmp_path / "parts", *SMALL, "--iterations", 5, code=130)
    assert len(saved["rows"]) == 3
    expected = f"stopped after 3 of 5; continue with --resume --report {tmp_path / 'parts'}"
    assert expected in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is usual
    parts = run(example, tmp_path / "parts", "--resume")
    monkeypatch.undo()
    assert_same(run(example, tmp_path / "whole", *SMALL, "--iterations", 5), parts)


def test_a_second_ctrl_c_ends_the_program_and_the_last_checkpoint_stands(
    example, tmp_path, monkeypatch
):
    batch = example.Training.batch

    def pressed(self, iteration):
        if iteration == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return batch(self, iteration)

    monkeypatch.setattr(example.Training, "batch", pressed)
    with pytest.raises(KeyboardInterrupt):
        run(example, tmp_path, *SMALL, "--iterations", 5)
    assert len(torch.load(tmp_path / "checkpoint.pt")["rows"]) == 2


@pytest.mark.quick(0)
def test_a_new_run_keeps_the_old_checkpoint(example, tmp_path):
    run(example, tmp_path, *SMALL, "--iterations", 1)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    run(example, tmp_path, *SMALL, "--iterations", 1, "--seed", 2)
    assert (tmp_path / "checkpoint.previous.pt").read_bytes() == before


@pytest.mark.quick(0)
def test_a_text_of_ones_own_is_learnt_and_known_again(example, tmp_path, capsys):
    text = tmp_path / "book.txt"
    text.write_text("so long, and thanks for all the fish. " * 9, encoding="utf-8")
    run(example, tmp_path / "report", *SMALL, "--text", text, "--iterations", 1)
    moved = text.rename(tmp_path / "moved.txt")
    run(example, tmp_path / "report", "--resume", "--text", moved, "--iterations", 2)
    moved.write_text("so short. " * 50)
    asked = ["--resume", "--text", moved]
    assert "is not the text that this run began with" in refused(
        example, tmp_path / "report", *asked, capsys=capsys
    )


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text", "missing.txt"], "No such file or directory: 'missing.txt'; give --text a file"),
        (["--text", str(PATH), "--length", "1000000"], "characters: give a smaller --length"),
        (["--memory", "100B"], "at least"),
        (["--memory", "5 parsecs"], "unknown unit 'parsecs'"),
        (["--batch", "0"], "--batch is 0: expected 1 or more"),
        (["--resume"], "is no whole checkpoint of this program: name a run's --report"),
    ],
)
def test_bad_input_is_one_message_before_any_work(example, tmp_path, arguments, expected, capsys):
    message = refused(example, tmp_path / "report", *SMALL, *arguments, capsys=capsys)
    assert message.startswith("error: ")
    assert expected in message
    assert not (tmp_path / "report").exists()


def test_what_is_no_whole_checkpoint_is_refused_and_left_alone(example, tmp_path, capsys):
    run(example, tmp_path, *SMALL, "--iterations", 1)
    place = tmp_path / "checkpoint.pt"
    whole = place.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    for content in (
        b"half a check",
        whole[:middle],
        flipped,
        (tmp_path / "foreign.pt").read_bytes(),
    ):
        place.write_bytes(content)
        message = refused(example, tmp_path, "--resume", capsys=capsys)
        assert f"{place} is no whole checkpoint of this program" in message
        assert place.read_bytes() == content


@pytest.mark.quick(0)
def test_a_run_is_resumed_with_its_own_options(example, tmp_path, capsys):
    run(example, tmp_path, *SMALL, "--iterations", 1)
    message = refused(example, tmp_path, "--resume", "--hidden", 9, capsys=capsys)
    assert "--hidden was 8: leave it out" in message
    run(example, tmp_path, "--resume", *SMALL, "--iterations", 2)


@pytest.mark.slow
def test_in_full_it_learns_what_windows_miss(tmp_path):
    command = [sys.executable, str(PATH), "--report", str(tmp_path), "--iterations", "150"]
    subprocess.run(command, check=True, capture_output=True)
    rows = torch.load(tmp_path / "checkpoint.pt")["rows"][-20:]
    right = {way: sum(row[way][1] for row in rows) / len(rows) for way in ("full", "windows")}
    assert right["full"] > 0.95
    assert right["windows"] < 0.4


def test_it_can_be_read_in_a_sitting():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 300
