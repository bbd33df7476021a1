"""Ordinary BPTT beside the budgeted LSTM."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from retrograde.training import Comparison, Run, compare, comparison
from retrograde.training.program import conclude


@pytest.fixture
def run(options):
    return Run(replace(options, length=120))


def shown(run, found):
    console = Console(file=io.StringIO(), width=100)
    run.step()
    conclude(console, run, found)
    return console.file.getvalue()


def test_both_sides_are_measured_on_the_same_batch(run):
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    found = compare(run.model, *run.sequences(), repeats=1)
    assert found.gradient_difference < 1e-5
    assert found.budgeted.working_bytes <= found.budget_bytes < found.ordinary.working_bytes
    for side in (found.budgeted, found.ordinary):
        assert side.seconds > 0
        assert max(side.curve.held_bytes) == side.working_bytes
    assert all(torch.equal(before[k], v) for k, v in run.model.state_dict().items())
    assert all(p.grad is None for p in run.model.parameters())
    text = shown(run, found)
    assert "ordinary BPTT" in text
    assert "largest gradient difference" in text


def test_a_comparison_survives_a_checkpoint(run):
    found = compare(run.model, *run.sequences(), repeats=1)
    assert Comparison.from_dict(found.as_dict()) == found
    alone = replace(found, ordinary=None, gradient_difference=None, failure="out of memory")
    assert Comparison.from_dict(alone.as_dict()) == alone


def test_a_machine_too_small_for_ordinary_bptt_is_spared_it(run, monkeypatch):
    monkeypatch.setattr(comparison, "_free_bytes", lambda: 2**14)
    found = compare(run.model, *run.sequences(), repeats=1)
    assert found.ordinary is None
    assert found.failure.endswith("16 KiB are free")
    assert "16 KiB are free" in shown(run, found)


def test_ordinary_bptt_that_runs_out_of_memory_is_told_and_not_fatal(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: no memory")

    monkeypatch.setattr(torch.nn.LSTM, "forward", fail)
    call = comparison._call(torch.nn.LSTM(16, 16), torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    assert comparison._obstacle(call, 0) == "out of memory"


def test_other_failures_are_not_hidden(monkeypatch):
    def fail():
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        comparison._obstacle(fail, 0)
