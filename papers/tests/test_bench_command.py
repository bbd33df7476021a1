"""The command ``bench``: what it prints, what it writes, and what bad input gets."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from oracles.commands import refused
from retrograde_papers.__main__ import app
from wang2020 import program
from wang2020.results import Results

BITS = ["--length", 20, "--iterations", 3, "--lengths", "5,20", "--batches", "2,16", "--rounds", 1]
SOUNDS = ["--epochs", 1, "--batches", "4,16", "--rounds", 1]
WAYS = ["--ways", "torch,scan", "--threads", 1]


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def files(*names):
    return {f"{name}.{end}" for name in names for end in ("svg", "png", "csv")}


def test_help_comes_without_the_heavy_imports():
    for command in ([], ["bitstream"], ["instruments"]):
        assert run(*command, "--help").exit_code == 0
    code = (
        "import sys; from retrograde_papers.__main__ import app\n"
        "app(['bench', 'bitstream', '--help'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.splitlines()[-1] == "False"


@pytest.mark.quick(0)
def test_bitstreams_write_numbers_and_figures(tmp_path):
    result = run("bitstream", *BITS, *WAYS, "--report", tmp_path)
    assert result.exit_code == 0, result.output
    written = {path.name for path in tmp_path.iterdir()}
    assert written == files("figure_5_1", "figure_5_2") | {"bitstream.json"}
    output = " ".join(result.output.split())
    for expected in (
        "as there, but for length 20 (there 1000), learning rate 0.0003 (there 3e-05), "
        "epochs 0.0015 (there 50)",
        "greatest difference from torch's loss in any of 3 iterations: scan",
        "Speed-up: backward pass / whole iteration",
    ):
        assert expected in output
    results = Results.from_json((tmp_path / "bitstream.json").read_text(encoding="utf-8"))
    assert results.curves[0].ways == ("torch", "scan")
    assert results.timings is not None
    assert len(results.timings.points) == 3
    assert results.curves[0].machine["threads"] == 1


@pytest.mark.quick(0)
def test_instruments_write_numbers_and_figures(sounds, tmp_path):
    result = run(
        "instruments", "--data", sounds, "--set", "s,m", *SOUNDS, *WAYS, "--report", tmp_path
    )
    assert result.exit_code == 0, result.output
    written = {path.name for path in tmp_path.iterdir()}
    assert written == files("figure_5_3", "figure_5_4") | {"instruments.json"}
    document = json.loads((tmp_path / "instruments.json").read_text(encoding="utf-8"))
    assert [each["settings"]["data"] for each in document["curves"]] == ["S", "M"]
    assert [point["name"] for point in document["timings"]["points"]] == ["S", "S", "M", "M"]
    assert "learning rate 0.003 (there 3e-05), epochs 1 (there 400)" in " ".join(
        result.output.split()
    )


@pytest.mark.quick(0)
def test_a_part_may_be_measured_anew_and_the_other_is_kept(tmp_path):
    file = tmp_path / "deep" / "numbers.json"
    common = ["bitstream", *BITS, *WAYS, "--results", file, "--report", tmp_path]
    assert run(*common, "--only", "curves").exit_code == 0
    first = Results.from_json(file.read_text(encoding="utf-8"))
    assert first.timings is None
    assert run(*common, "--only", "seconds").exit_code == 0
    both = Results.from_json(file.read_text(encoding="utf-8"))
    assert both.curves == first.curves
    assert both.timings is not None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bitstream", "--iterations", 0], "--iterations is 0: expected a number above 0"),
        (["bitstream", "--epochs", 1, "--iterations", 1], "both given; name one of them"),
        (["bitstream", "--ways", "torch,magic"], "--ways names 'magic': expected some of torch"),
        (["bitstream", "--ways", "scan,sequential"], "expected torch, which is what the others"),
        (["bitstream", "--lengths", "10,many"], "--lengths is '10,many': expected whole numbers"),
        (["bitstream", "--batches", "0"], "--batches is '0': expected whole numbers above 0"),
        (["bitstream", "--batches", "40000"], "a batch of 40,000: there are 32,000 training"),
        (["bitstream", "--device", "abacus"], "--device is 'abacus': expected cpu or cuda"),
        (["bitstream", "--device", "cuda:99"], "use --device cpu"),
        (["bitstream", "--only", "thoughts"], "--only is 'thoughts': expected curves or seconds"),
        (["bitstream", "--learning-rate", "nan"], "--learning-rate is nan"),
        (["bitstream", "--length", 0], "--length is 0"),
        (["instruments"], "no data given: give --data FOLDER with instruments_s.npz"),
        (["instruments", "--data", "a", "--irmas", "b"], "--data and --irmas, both given"),
        (["instruments", "--data", "nowhere"], "there is no nowhere/instruments_s.npz"),
        (["instruments", "--set", "xl", "--data", "a"], "--set names 'xl': expected some of s, m"),
    ],
)
def test_bad_input_is_one_message_before_any_work(tmp_path, arguments, expected):
    assert expected in refused(run(*arguments, "--report", tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"answer": 42}')
    message = refused(run("bitstream", *BITS, "--report", tmp_path, "--results", other))
    assert "is in the way" in message
    assert "name another file with --results" in message
    assert other.read_text() == '{"answer": 42}'
    other.write_text(Results("instruments").to_json())
    message = refused(run("bitstream", *BITS, "--report", tmp_path, "--results", other))
    assert "has results of 'instruments', not of 'bitstream'" in message


def test_a_folder_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot write" in refused(run("bitstream", "--report", tmp_path / "file" / "report"))


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (KeyboardInterrupt(), 130, "stopped; nothing was written"),
        (MemoryError(), 2, "too little memory for this: name smaller --lengths"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "too little memory for this"),
    ],
)
def test_what_stops_a_run_is_said(monkeypatch, tmp_path, raised, code, expected):
    def stop(*_):
        raise raised

    monkeypatch.setattr(program, "race", stop)
    result = run("bitstream", *BITS, *WAYS, "--report", tmp_path)
    assert result.exit_code == code
    assert expected in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
