"""Programs that depend on something hidden are exact, or refused by an error of ours (rule 11).

The programs are in ``oracles/hidden_programs.py``. ``benchmarks/drawn.py`` runs all of them in all
ways; here are those that were once wrong in silence, raw errors, or left effects.
"""

import warnings

import pytest
import torch

import retrograde as rg
from oracles.hidden_trials import run

CASES = [
    ("a Function whose context holds a count", "unroll", "exact"),
    ("a Function whose context holds a count", "bptt", "exact"),
    ("a Function whose backward pass reads a global count", "Recurrent", "exact"),
    ("a Function whose backward pass draws, beside dropout", "unroll", "exact"),
    ("gradient noise that a hook draws, beside dropout", "bptt", "exact"),
    ("statistics of gradients in a buffer, beside those of activations", "unroll", "exact"),
    ("a forward hook of all modules", "budget", "exact"),
    ("a forward hook of all modules", "Sequential", "exact"),
    ("a forward hook of all modules", "unroll", "exact"),
    ("a subclass that counts the functions that it meets", "lean", "exact"),
    ("torch.func.grad within a layer", "budget", "refused"),
    ("torch.func.grad within a layer", "lean", "refused"),
    ("no hooks for saved tensors within a layer", "Sequential", "refused"),
    ("mutation of saved tensors allowed", "budget", "refused"),
    ("keys and values of this pass, which later layers read", "Sequential", "refused"),
    ("stochastic depth by random.Random of its own", "unroll", "exact"),
]


@pytest.mark.quick(16)
@pytest.mark.parametrize(("name", "way", "verdict"), CASES)
def test_nothing_is_wrong_in_silence(name, way, verdict):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, said = run(name, way, {"lean": None, "budget": "45%"}.get(way, "40%"))
    torch.set_num_threads(threads)
    assert found == verdict, said


class Tires(torch.nn.Module):
    """A layer whose second run in a pass raises an error of torch's."""

    def __init__(self, tired):
        super().__init__()
        self.a, self.tired = torch.nn.Linear(8, 32), tired

    def forward(self, x):
        if self.tired():
            x = x.view(3, 5)
        return x + torch.tanh(self.a(x))[..., :8]


def test_a_layer_that_only_fails_again_is_named():
    late = []
    layers = [Tires(lambda: late) for _ in range(4)]
    net, x = rg.Sequential(*layers, memory="60%"), torch.randn(64, 8)
    net(x).sum().backward()
    y = net(x)
    late.append(True)
    with pytest.raises(rg.RetrogradeError, match=r"layer \d raises RuntimeError.*again") as caught:
        y.sum().backward()
    assert type(caught.value.__cause__) is RuntimeError


def test_a_step_that_only_fails_again_is_named():
    late, cell = [], torch.nn.GRUCell(5, 8)

    def step(x, h):
        h = cell(x[..., :3] if late else x, h)
        return h, h

    y, _ = rg.unroll(step, torch.randn(30, 4, 5), torch.zeros(4, 8), memory="40%")
    late.append(True)
    with pytest.raises(rg.RetrogradeError, match=r"step \d+ raises RuntimeError.*again") as caught:
        y.sum().backward()
    assert type(caught.value.__cause__) is RuntimeError
