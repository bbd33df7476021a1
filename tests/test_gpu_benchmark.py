"""What `make gpu` runs on a card runs on the CPU too, small; and its page shows what it finds."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import retrograde as rg

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def render(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render_gpu")


def rows_of(gpu, section, seconds=600):
    rows = gpu.SECTIONS[section]("cpu", True, gpu.Clock(seconds))
    return list({row["name"]: row for row in rows}.values())  # the last of a name


@pytest.mark.quick(0)
@pytest.mark.parametrize("section", ["budgets", "grid", "backward", "networks", "models"])
def test_a_section_runs_and_its_table_shows_it(gpu, render, section):
    rows = rows_of(gpu, section)
    for row in rows:
        assert "error" not in json.dumps(row) or "not installed" in row["error"], row
    counted = gpu.expected_of(section)
    if section == "networks":
        counted = [row for row in counted if row["name"] in {r["name"] for r in rows}]
    assert [row["name"] for row in rows] == [one["name"] for one in counted][: len(rows)]
    machine = {"device": "a card", "torch": "2.13"}
    document = {"machine": machine, "sections": {section: json.loads(json.dumps(rows))}}
    shown = render.rendered(section, [document], counted).splitlines()
    assert len(shown) == len(counted) + 4
    assert "Measured on a card, torch 2.13" in shown[-1]
    columns = render.TABLES[section][0]
    for line, row in zip(shown[2:], rows, strict=False):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == row["name"]
        blank = {name for name, cell in zip(columns[1:], cells[1:], strict=True) if not cell}
        may_be_blank = {"budgets": columns[3:5], "models": columns[1:]}.get(section, [])
        assert blank <= set(may_be_blank)


@pytest.mark.quick(0)
def test_budgets_are_kept_as_the_page_says(gpu):
    for row in rows_of(gpu, "budgets"):
        assert row["working_bytes"] <= row["budget_bytes"] < row["ordinary_bytes"]


def test_what_has_no_time_is_told(gpu):
    assert {row["error"] for row in rows_of(gpu, "grid", 0)} == {"not reached in time"}
    (first, *_) = rows_of(gpu, "backward", 0)
    assert first["error"] == "not reached in time"


def test_what_fails_is_told(gpu):
    def fails():
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.\nThis error may appear")

    assert gpu.told(fails) == {"error": "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."}


def test_an_error_takes_a_measurements_place(render):
    counted = json.loads((BENCHMARKS / "results" / "gpu_expected.json").read_text())["sections"]
    name = counted["backward"][20]["name"]
    ways = {"torch": {"error": "too long"}, "scan": {"backward_seconds": 0.5}}
    document = {
        "machine": {"device": "a card", "torch": "2.13"},
        "sections": {"backward": [
            {"name": name, "ways": ways}, {"name": "the section", "error": "stopped: no time"}
        ]},
    }  # fmt: skip
    shown = render.rendered("backward", [document], counted["backward"])
    line = next(line for line in shown.splitlines() if name in line)
    assert line.startswith(f"| {name} | cuDNN refuses |  |  | 500 ms |")
    assert shown.rstrip().endswith("stopped: no time")
    assert "**Not measured" in render.rendered("backward", [], counted["backward"])


def test_the_counts_are_those_of_the_code(gpu):
    """The file has what counting tells now."""
    written = json.loads((BENCHMARKS / "results" / "gpu_expected.json").read_text())["sections"]
    for section in written:
        assert json.loads(json.dumps(gpu.expected_of(section))) == written[section]


def test_the_grid_computes_one_gradient(gpu):
    work = gpu.recurrent.Work("LSTM", 4, 8, 2, 60)
    contest = gpu.recurrent.Contest(work, "cpu", ("50%",))
    assert set(contest.runs) == {"torch", "50%"}
    found = []
    for net in contest.nets:
        contest.forget()
        contest._call(net)
        found.append([contest.leaf.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert isinstance(contest.nets[1], rg.LSTM)


@pytest.mark.quick(0)
def test_what_was_measured_before_the_end_is_kept_and_resumed(gpu, tmp_path, monkeypatch):
    """Rows are written one by one; those of this commit are not measured again."""
    path, asked, stop = tmp_path / "found.json", [], 2
    names = list(gpu.expected_of("budgets"))

    def run_section(name, options, done, keep):
        asked.append(list(done))
        for row in [row for row in names if row["name"] not in done][:stop]:
            keep({"name": row["name"], "working_bytes": len(asked)})
            assert row["name"] in path.read_text()
        if stop < len(names):
            keep({"name": names[stop]["name"]} | gpu.LATE)
            raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_section", run_section)
    command = ["gpu.py", "--quick", "--sections", "budgets", "--resume", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    first = json.loads(path.read_text())["sections"]["budgets"]
    stop = len(names)
    gpu.main()
    second = json.loads(path.read_text())["sections"]["budgets"]
    assert asked == [[], [row["name"] for row in names[:2]]]
    assert second[:2] == first[:2]
    assert {row["working_bytes"] for row in second} == {1, 2}
    monkeypatch.setattr(gpu, "commit", lambda: "another")
    stop = 1
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    assert asked[2] == []
    third = {row["name"]: row for row in json.loads(path.read_text())["sections"]["budgets"]}
    assert third[names[0]["name"]]["working_bytes"] == 3
    assert third[names[1]["name"]]["working_bytes"] == 1  # not replaced by "not reached in time"


@pytest.mark.slow
def test_the_whole_script_writes_one_file(gpu, tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick", "--out", str(path)])
    assert gpu.main() == 0
    found = json.loads(path.read_text())
    assert list(found["sections"]) == list(gpu.SECTIONS)
    assert all(found["sections"].values())
    assert found["sections"]["tests"][0]["passed"]
