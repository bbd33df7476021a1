"""``bench ranks``: processes of this machine, and the model beside them."""

import json

import pytest
import torch
from typer.testing import CliRunner

from retrograde_papers.__main__ import app
from retrograde_papers.options import ExperimentError
from wang2020.ranks import Options
from wang2020.ranks_results import Ranks

WITH_GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()


@pytest.mark.quick(0)
@pytest.mark.skipif(not WITH_GLOO, reason="needs gloo")
def test_the_command_writes_numbers_and_figures(tmp_path):
    arguments = [
        "bench", "ranks", "--ranks", 2, "--hidden", 4, "--steps", 5, "--batch", 3, "--rounds", 1,
        "--note", "which slept meanwhile", "--report", tmp_path,
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    names = {"ranks_seconds", "ranks_memory"}
    written = {f"{name}.{end}" for name in names for end in ("svg", "png", "csv")}
    assert {path.name for path in tmp_path.iterdir()} == written | {"ranks.json"}
    assert "computed: the tree is faster than the linear hand-over" in result.output
    text = (tmp_path / "ranks.json").read_text(encoding="utf-8")
    assert json.loads(text)["machine"]["threads"] == 1
    found = Ranks.from_json(text)
    model = found.model
    assert (model.vector_bytes, model.matrix_bytes) == (3 * 4 * 4, 3 * 4 * 5 * 4)
    assert model.jacobian_seconds > 0
    assert model.sweep_seconds > 0
    assert model.latency_seconds > 0
    assert [each.way for each in found.crossings] == ["linear", "tree"]
    for each in found.crossings:
        assert each.seconds > 0


def test_options_that_cannot_be_met_are_refused():
    with pytest.raises(ExperimentError, match="--ranks is 1: expected at least 2"):
        Options(ranks=1)
    with pytest.raises(ExperimentError, match="--steps is 0"):
        Options(steps=0)
