"""The whole of ``bench lenet``, ``vgg11`` and ``deep``, from options to files."""

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gruslys2016.deep import Options, run_ways
from gruslys2016.deep_figures import deep_losses, deep_memory, deep_schedule, deep_trade_off
from gruslys2016.deep_results import Deep
from retrograde.machine import machine_of
from retrograde.units import format_bytes
from retrograde_papers.console import new_table
from retrograde_papers.files import check_folder, write_file, write_text
from retrograde_papers.images import Images
from retrograde_papers.networks import vgg11
from retrograde_papers.plates import write_plate
from wang2020.convergence import Comparison, compare
from wang2020.counting import count_scans, counted, ordinary_points, points_of, run_layers
from wang2020.display import progress
from wang2020.flops import Pruning, figure_5_5
from wang2020.pruning import Pruned, Training, train_and_prune
from wang2020.training_figures import Convergence, figure_3_4

__all__ = ["describe_pruned", "run_deep", "run_lenet", "run_vgg11"]

_LEVELS = 3  # of figure 5.5: up-sweep from L0 to L2
_UNPRUNED_LEVELS = 2  # beyond, the unpruned products are dense all over


def run_lenet(images: Images, how: Comparison, report: Path, console: Console) -> Convergence:
    """Section 3.5: LeNet-5 trained by torch and by the scan; figure 3.4."""
    check_folder(report)
    total = len(images.training) // how.batch * how.epochs
    with progress(console, "training", total) as update:
        found = compare(images, how, lambda done, loss: update(done, f"loss {loss:.3f}"))
    console.print(
        f"after {total:,} iterations: training loss {found.training['torch'][-1]:.4f}, held-out "
        f"loss {found.testing['torch'][-1]:.4f}; greatest distance of the scan's from torch's: "
        f"{found.difference:.1e} in training, {found.test_difference:.1e} held out"
    )
    write_text(report / "lenet.json", found.to_json())
    write_plate(figure_3_4(found), report)
    console.print(f"numbers and figure 3.4 in {report}", markup=False, soft_wrap=True)
    return found


def run_vgg11(images: Images, training: Training, report: Path, console: Console) -> Pruning:
    """Sections 4.3 and 5.3: VGG-11 trained, pruned, trained again, and counted; figure 5.5."""
    check_folder(report)
    total = 2 * (len(images.training) // training.batch) * training.epochs
    with progress(console, "training", total) as update:
        before = {"training": 0, "retraining": total // 2}
        pruned = train_and_prune(
            images,
            training,
            lambda what, done, loss: update(before[what] + done, f"{what}, loss {loss:.3f}"),
        )
    write_file(report / "vgg11.pt", lambda place: _save_weights(pruned.model, place))
    found = describe_pruned(pruned, training, images)
    console.print(_table(found))
    write_text(report / "vgg11.json", found.to_json())
    write_plate(figure_5_5(found), report)
    console.print(f"numbers, weights and figure 5.5 in {report}", markup=False, soft_wrap=True)
    return found


def run_deep(images: Images, how: Options, report: Path, console: Console) -> Deep:
    """Train a deep network ordinarily and within budgets; write its figures and numbers.

    Raises:
        BudgetError: every budget is too small; the message names the least.
    """
    check_folder(report)
    total = how.iterations_of(len(images.training))
    with progress(console, "training", total) as update:
        found = run_ways(images, how, update)
    console.print(_sides(found))
    for memory, text in found.refused.items():
        console.print(f"refused: {memory}: {text}", markup=False, soft_wrap=True)
    write_text(report / f"{found.name}.json", found.to_json())
    for draw in (deep_losses, deep_memory, deep_schedule, deep_trade_off):
        write_plate(draw(found), report)
    console.print(f"numbers and figures in {report}", markup=False, soft_wrap=True)
    return found


def _save_weights(model: nn.Module, path: Path) -> None:
    with path.open("wb") as file:  # where torch opens it, a full disk is not told as such
        torch.save(model.state_dict(), file)


def _sides(found: Deep) -> Table:
    """What each way held and took, and how far its losses are from the ordinary ones."""
    columns = ("way", "budget", "held", "share", "seconds", "loss", "distance")
    table = new_table(
        f"{found.settings['title']}, batch {found.settings['batch']}: one iteration; losses of "
        f"{found.settings['iterations']:,}",
        columns,
        left=("way",),
        unbroken=columns,
    )
    whole = found.side("ordinary").peak_bytes
    for side in found.sides:
        losses = found.losses.get(side.name)
        apart = found.difference.get(side.name)
        table.add_row(
            side.name,
            format_bytes(side.budget_bytes) if side.budget_bytes else "",
            format_bytes(side.peak_bytes),
            f"{side.peak_bytes / whole:.1%}",
            f"{side.seconds:.3g}",
            "" if losses is None else f"{losses[-1]:.4f}",
            "" if apart is None else f"{apart:g}",
        )
    return table


def describe_pruned(pruned: Pruned, training: Training, images: Images) -> Pruning:
    """Count what scans over the convolutional part take."""
    image = images.training[:1]
    whole = run_layers(vgg11(width=training.width)[:-2], image)
    steps = run_layers(list(pruned.model)[:-2], image)
    splits = count_scans(steps)
    shown = splits[min(_LEVELS, len(splits) - 1)]
    ordinary = ordinary_points(whole)
    return Pruning(
        machine=machine_of("cpu"),
        settings={
            "network": "VGG-11", "width": training.width, "share": training.share,
            "epochs": training.epochs, "batch": training.batch,
            "learning_rate": training.learning_rate, "seed": training.seed,
            "training": len(images.training), "testing": len(images.testing),
        },
        accuracy={
            "trained": pruned.trained, "pruned": pruned.pruned, "retrained": pruned.retrained
        },
        losses=tuple(pruned.losses),
        kept=_kept(pruned.model),
        levels=shown.levels,
        points=(*points_of(shown), *ordinary),
        scans=tuple(map(counted, splits)),
        unpruned=tuple(map(counted, count_scans(whole, _UNPRUNED_LEVELS))),
        ordinary_flops=sum(point.flops for point in ordinary),
    )  # fmt: skip


def _kept(model: nn.Sequential) -> dict[str, float]:
    """By layer, the share of weights that are left."""
    found = {}
    for name, layer in model.named_children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight = layer.weight
            found[f"{name} {type(layer).__name__}"] = float(weight.count_nonzero() / weight.numel())
    return found


def _table(found: Pruning) -> Table:
    accuracy = ", ".join(f"{name} {share:.1%}" for name, share in found.accuracy.items())
    table = new_table(
        f"accuracy: {accuracy}\nFLOPs of one sample's backward pass; ordinary "
        f"{found.ordinary_flops:,}",
        ("levels", "steps", "critical path", "all", "largest step", "unpruned critical"),
    )
    for each in found.scans:
        whole = [other for other in found.unpruned if other.levels == each.levels]
        table.add_row(
            str(each.levels),
            str(each.steps),
            f"{each.critical_flops:.4g}",
            f"{each.flops:.4g}",
            f"{each.largest_flops:.4g}",
            f"{whole[0].critical_flops:.4g}" if whole else "",
        )
    return table
