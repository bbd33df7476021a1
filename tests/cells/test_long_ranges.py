"""Ranges that are too long for one graph of autograd's are several graphs."""

import pytest
import torch

import retrograde as rg
from retrograde.run import settled


def cell_of(w):
    def cell(x, h):
        h = torch.tanh(w * h + x)
        return h, h

    return cell


def gradient_of(steps, memory):
    w, x = torch.nn.Parameter(torch.tensor(0.5)), torch.randn(steps, 3)
    measured = rg.measure(
        lambda: rg.bptt(
            cell_of(w), x, torch.zeros(3), loss=lambda t, y: y.square().sum(), memory=memory
        )
    )
    v, h, total = w.detach().clone().requires_grad_(), torch.zeros(3), 0.0
    for row in x:
        h = cell_of(v)(row, h)[1]
        total = total + h.square().sum()
    total.backward()
    return w.grad, v.grad, measured.working_bytes


@pytest.mark.parametrize("memory", [None, "100%", "40%", "12KiB"])
def test_long_ranges_have_several_graphs(memory, monkeypatch):
    monkeypatch.setattr(settled, "_MOST_NODES", 60)
    ours, plain, taken = gradient_of(301, memory)
    torch.testing.assert_close(ours, plain)
    assert memory != "12KiB" or taken <= 12 * 1024


@pytest.mark.slow
def test_a_graph_of_many_steps_does_not_overflow_the_stack():
    ours, plain, taken = gradient_of(40_000, "4MiB")
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=0)
    assert taken <= 4 * 2**20
