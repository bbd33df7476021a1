"""Launches are recorded where that is possible; else they are made, and a warning says so."""

import warnings

import pytest
import torch

from retrograde.kernels.cuda import graph
from retrograde.kernels.cuda.graph import recorded

CARD = torch.device("cuda", 0)


class Graph:
    """In place of ``torch.cuda.CUDAGraph``: launches made while it records are replayed."""

    def __init__(self, log):
        self.log, self.launches = log, []

    def capture_begin(self, capture_error_mode):
        self.log.append(f"begin {capture_error_mode}")

    def capture_end(self):
        self.log.append("end")

    def replay(self):
        self.log.append("replay")


@pytest.fixture
def log(monkeypatch):
    """What a card was asked to do."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "capturing" in found)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(found))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "another stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda _: warnings.catch_warnings())
    graph._warn.cache_clear()
    return found


def test_launches_are_recorded_once_and_replayed(log):
    replay = recorded(lambda: log.append("launch"), CARD)
    assert log == ["begin thread_local", "launch", "end"]
    replay()
    assert log[3:] == ["replay"]


def test_within_a_callers_graph_and_on_a_cpu_they_are_made(log):
    launch = lambda: None  # noqa: E731
    assert recorded(launch, torch.device("cpu")) is launch
    log.append("capturing")
    assert recorded(launch, CARD) is launch


def test_where_nothing_can_be_recorded_a_warning_says_so_once(log):
    def launch():
        if log[-1].startswith("begin"):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        log.append("launch")

    with pytest.warns(RuntimeWarning, match=r"\(operation not permitted .* capturing\): they are"):
        again = recorded(launch, CARD)
    assert log == ["begin thread_local", "end"]
    again()
    assert log[-1] == "launch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded(launch, CARD)
