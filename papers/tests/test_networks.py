"""The convolutional experiments of Wang (2020): LeNet-5 by the scan, VGG-11 pruned and counted."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from retrograde_papers.__main__ import app
from retrograde_papers.images import Images, load_images, noise_images
from retrograde_papers.networks import vgg11
from retrograde_papers.options import ExperimentError
from wang2020.convergence import Comparison, compare
from wang2020.counting import count_scans, counted, ordinary_points, run_layers
from wang2020.flops import Pruning
from wang2020.pruning import Training, prune_weights, train_and_prune
from wang2020.training_figures import Convergence

run = CliRunner()


def ignore(*_):
    pass


@pytest.mark.quick(0)
@pytest.mark.parametrize("source", ["noise", "cifar"])
def test_lenet_learns_the_same_by_the_scan(source, request):
    folder = request.getfixturevalue("cifar") if source == "cifar" else None
    images = noise_images(256, 64) if folder is None else load_images(folder)
    few = Images(
        images.training[:256], images.training_classes[:256],
        images.testing[:64], images.testing_classes[:64],
    )  # fmt: skip
    found = compare(few, Comparison(epochs=3, batch=64, learning_rate=0.05), ignore)
    assert found.settings["iterations"] == 12 == len(found.training["scan"])
    assert found.difference < 2e-5
    assert found.test_difference < 2e-5
    assert found.training["scan"] != found.training["torch"][:1] * 12
    assert Convergence.from_json(found.to_json()) == found


@pytest.mark.quick(0)
def test_a_wrong_gradient_would_be_seen(monkeypatch):
    from retrograde.scan.sparse import feedforward as chain

    right = chain.scan_gradients
    monkeypatch.setattr(
        "retrograde.scan.chain_scan.scan_gradients",
        lambda *args, **options: [1.01 * g for g in right(*args, **options)],
    )
    found = compare(
        noise_images(256, 64), Comparison(epochs=2, batch=64, learning_rate=0.05), ignore
    )
    assert found.difference > 2e-5


def test_pixels_are_restored_from_differences(tmp_path):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    filtered = pixels.copy()
    filtered[:, 0] -= pixels[:, 1]
    filtered[:, 2] -= pixels[:, 1]
    for axis in (-1, -2):
        filtered = np.diff(filtered, axis=axis, prepend=np.uint8(0)).astype(np.uint8)
    classes = np.arange(5, dtype=np.uint8)
    np.savez(
        tmp_path / "cifar10.npz",
        train_d=filtered, train_y=classes, test_d=filtered[:2], test_y=classes[:2],
    )  # fmt: skip
    images = load_images(tmp_path)
    spread, mean = torch.std_mean(torch.from_numpy(pixels).float(), (0, 2, 3), keepdim=True)
    expected = (torch.from_numpy(pixels).float() - mean) / spread
    torch.testing.assert_close(images.training, expected)
    torch.testing.assert_close(images.testing, expected[:2])
    assert images.training_classes.tolist() == [0, 1, 2, 3, 4]


def test_augmented_images_are_mirrored_and_moved_ones():
    images = noise_images(40, 1)
    ((plain, classes),) = images.batches(40, np.random.default_rng(3))
    ((moved, same),) = images.batches(40, np.random.default_rng(3), augment=True)
    assert torch.equal(classes, same)
    assert moved.shape == plain.shape
    for one, other in zip(plain, moved, strict=True):
        padded = nn.functional.pad(torch.stack([one, one.flip(-1)]), (4, 4, 4, 4))
        windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)  # (2, 3, 9, 9, 32, 32)
        hits = (windows == other[None, :, None, None]).all(-1).all(-1).all(1)
        assert hits.any()


def test_images_that_are_none_are_refused(tmp_path):
    with pytest.raises(ExperimentError, match=r"there is no .*give --data FOLDER"):
        load_images(tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(b"no archive")
    with pytest.raises(ExperimentError, match=r"cannot read .*expected an npz file with train_d"):
        load_images(tmp_path)
    np.savez(
        tmp_path / "cifar10.npz",
        train_d=np.zeros((2, 32, 32)), train_y=np.zeros(2), test_d=np.zeros((2, 32, 32)),
        test_y=np.zeros(2),
    )  # fmt: skip
    with pytest.raises(ExperimentError, match=r"cannot use .*expected \(samples, 3, height"):
        load_images(tmp_path)


def test_the_share_that_is_asked_for_is_pruned_and_stays_so():
    found = train_and_prune(noise_images(96, 20), Training(1, batch=32, width=8), ignore)
    for layer in found.model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            kept = int(layer.weight.count_nonzero())
            assert kept == layer.weight.numel() - round(0.97 * layer.weight.numel())
    assert len(found.losses) == 2
    assert 0 <= found.retrained <= 1


def test_pruning_takes_the_smallest_weights_and_may_be_repeated():
    layer = nn.Linear(20, 5)
    sizes = layer.weight.detach().abs().flatten().sort().values
    for share in (0.5, 0.9):
        prune_weights(nn.Sequential(layer), share)
        left = layer.weight[layer.weight != 0].abs()
        assert len(left) == round(100 * (1 - share))
        assert left.min() == sizes[round(100 * share)]


def test_flops_of_scans_are_counted_from_masks():
    torch.manual_seed(0)
    layers = vgg11(width=8)[:-2]
    whole = run_layers(layers, torch.randn(1, 3, 32, 32))
    ordinary = ordinary_points(whole)
    linear, *others = map(counted, count_scans(whole))
    assert linear.flops == linear.critical_flops == sum(point.flops for point in ordinary)
    prune_weights(nn.Sequential(*layers), 0.97)
    pruned = list(map(counted, count_scans(run_layers(layers, torch.randn(1, 3, 32, 32)))))
    assert pruned[0].flops < linear.flops / 10
    assert all(a.critical_flops < b.critical_flops for a, b in zip(pruned[1:], others, strict=True))
    assert [each.levels for each in pruned] == [0, 1, 2, 3, 4]


@pytest.mark.quick(0)
def test_lenet_by_the_command(tmp_path):
    report = tmp_path / "report"
    result = run.invoke(
        app, ["bench", "lenet", "--batch", "1024", "--algorithm", "linear", "--report", str(report)]
    )
    assert result.exit_code == 0, result.output
    assert "greatest distance" in " ".join(result.output.split())
    found = Convergence.from_json((report / "lenet.json").read_text())
    assert found.settings["iterations"] == 2
    assert (report / "figure_3_4.svg").exists()


@pytest.mark.quick(0)
def test_vgg11_by_the_command(tmp_path):
    report = tmp_path / "report"
    options = ["--width", "4", "--batch", "512", "--report", str(report)]
    result = run.invoke(app, ["bench", "vgg11", *options])
    assert result.exit_code == 0, result.output
    assert "critical path" in result.output
    document = json.loads((report / "vgg11.json").read_text())
    found = Pruning.from_json(json.dumps(document))
    assert found.levels == 3
    assert {point.kind for point in found.points} == {"vector", "matrix", "ordinary"}
    assert torch.load(report / "vgg11.pt")
    assert (report / "figure_5_5.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenet", "--batch", "100000"], "name a smaller --batch"),
        (["lenet", "--epochs", "0"], "--epochs is 0"),
        (["lenet", "--algorithm", "quick"], "--algorithm is 'quick'"),
        (["lenet", "--data", "nowhere"], "there is no nowhere"),
        (["vgg11", "--batch", "100000"], "name a smaller --batch"),
        (["vgg11", "--share", "1"], "--share is 1.0"),
        (["vgg11", "--learning-rate", "-1"], "--learning-rate is -1.0"),
    ],
)
def test_wrong_options_are_refused(arguments, message, tmp_path):
    result = run.invoke(app, ["bench", *arguments, "--report", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output
