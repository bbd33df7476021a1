"""``bench deep``: the same training within a budget, and what it held."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import retrograde as rg
from gruslys2016 import deep
from gruslys2016.deep import Options, run_ways
from gruslys2016.deep_results import Deep
from retrograde.errors import BudgetError
from retrograde_papers.__main__ import app
from retrograde_papers.images import load_images, noise_images
from retrograde_papers.networks import resnet18, resnet34
from retrograde_papers.options import ExperimentError

SMALL = {"width": 4, "batch": 4, "rounds": 1, "points": 1}


def ignore(*_):
    pass


def dropping(classes=10, width=4):
    """Layers that draw random numbers."""
    blocks = [
        nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Dropout(0.4), nn.Tanh())
        for _ in range(8)
    ]
    return [nn.Conv2d(3, width, 3), *blocks, nn.Flatten(), nn.Linear(900 * width, classes)]


@pytest.mark.quick(0)
@pytest.mark.parametrize("source", ["noise", "cifar"])
def test_losses_and_weights_are_the_ordinary_ones_to_the_bit(source, request):
    folder = request.getfixturevalue("cifar") if source == "cifar" else None
    images = noise_images(16, 4) if folder is None else load_images(folder)
    how = Options("resnet18", ("80%", "3MiB", "10%"), iterations=3, segments=(3,), **SMALL)
    found = run_ways(images, how, ignore)
    assert found.difference == found.weights_difference == {"80%": 0.0, "3MiB": 0.0}
    assert len(set(found.losses["ordinary"])) == 3 == found.settings["iterations"]
    assert "expected at least" in found.refused["10%"]
    for side in found.sides:
        if side.kind == "budget":
            assert side.peak_bytes <= side.budget_bytes
    assert found.side("80%").peak_bytes < found.side("ordinary").peak_bytes
    assert [side.name for side in found.sides if side.kind == "segments"] == ["3 segments"]
    for points in found.curves.values():
        seconds = [each for _, each in points]
        assert seconds[0] >= seconds[-1] >= found.ordinary_seconds * (1 - 1e-9)
    assert Deep.from_json(found.to_json()) == found


@pytest.mark.quick(0)
def test_random_layers_draw_the_same_in_every_way(monkeypatch):
    monkeypatch.setitem(deep._MAKERS, "vgg11", dropping)
    how = Options("vgg11", ("60%",), iterations=3, **SMALL)
    assert run_ways(noise_images(12, 4), how, ignore).difference == {"60%": 0.0}


@pytest.mark.quick(0)
def test_a_wrong_gradient_would_be_seen(monkeypatch):
    class Bent(rg.Sequential):
        def forward(self, input):
            return super().forward(input) * (1 + 1e-6)

    monkeypatch.setattr(deep, "Sequential", Bent)
    how = Options("resnet18", ("80%",), iterations=3, **SMALL)
    assert run_ways(noise_images(12, 4), how, ignore).difference["80%"] > 0


def test_a_budget_for_none_is_refused_with_the_least():
    with pytest.raises(BudgetError, match="expected at least"):
        run_ways(noise_images(8, 4), Options("vgg11", ("1%", "2%"), **SMALL), ignore)


def test_options_that_cannot_be_met_are_refused():
    with pytest.raises(ExperimentError, match="expected one of vgg11, resnet18, resnet34"):
        Options("alexnet", ("50%",))
    with pytest.raises(ExperimentError, match="--iterations and --epochs: both given"):
        Options("vgg11", ("50%",), epochs=1)
    with pytest.raises(ExperimentError, match="there is no --memory"):
        Options("vgg11", ())
    with pytest.raises(ExperimentError, match="name a smaller --batch"):
        run_ways(noise_images(8, 4), Options("vgg11", ("50%",), batch=9), ignore)


def test_residual_networks_have_the_layers_of_the_paper():
    for layers, blocks, parameters in ((resnet18(), 8, 11_173_962), (resnet34(), 16, 21_282_122)):
        assert sum(isinstance(layer, rg.Residual) for layer in layers) == blocks
        assert sum(p.numel() for layer in layers for p in layer.parameters()) == parameters
    small = nn.Sequential(*resnet18(classes=7, width=4))
    assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.quick(0)
def test_the_command_writes_numbers_and_figures(tmp_path):
    arguments = [
        "bench", "deep", "--network", "resnet18", "--width", 4, "--batch", 4, "--iterations", 2,
        "--memory", "80%", "--memory", "10%", "--points", 1, "--segments", "2", "--rounds", 1,
        "--threads", 1, "--report", tmp_path,
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    names = {f"deep_resnet18_{what}" for what in ("losses", "memory", "schedule", "trade_off")}
    written = {f"{name}.{end}" for name in names for end in ("svg", "png", "csv")}
    assert {path.name for path in tmp_path.iterdir()} == written | {"deep_resnet18.json"}
    assert "refused: 10%: the memory of" in result.output
    numbers = json.loads((tmp_path / "deep_resnet18.json").read_text(encoding="utf-8"))
    assert numbers["machine"]["threads"] == 1
    assert numbers["settings"]["images"] == "noise"


def test_the_command_names_the_least_budget(tmp_path):
    arguments = ["bench", "deep", "--width", 4, "--memory", "1%", "--report", tmp_path]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 2
    assert "expected at least" in " ".join(result.output.split())
