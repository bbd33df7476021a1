"""Deep networks trained within a budget, beside ordinary training of the same weights.

All ways take turns on the same batches, each with the same random numbers, so that their losses can
be compared bit by bit. What a pass holds is measured of the network alone, as a budget counts it.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from gruslys2016.deep_results import Deep, Held, Side
from gruslys2016.planned import planned_memory
from retrograde.errors import BudgetError
from retrograde.figures.memory import Curve
from retrograde.machine import machine_of
from retrograde.models.profile import profile
from retrograde.models.sequential import ChainFit, Sequential
from retrograde.plan import chain_minimum, plan
from retrograde.plan.chains import plan_chain
from retrograde.schedule import Chain
from retrograde.sizes.allocations import Measurement, measure
from retrograde.units import format_bytes, parse_memory
from retrograde_papers.images import Images, train_in_turns
from retrograde_papers.networks import resnet18, resnet34, vgg11
from retrograde_papers.options import (
    ExperimentError,
    check_batch,
    check_duration,
    check_positive,
    check_seed,
)

__all__ = ["NETWORKS", "Options", "run_ways"]

NETWORKS = {"vgg11": "VGG-11", "resnet18": "ResNet-18", "resnet34": "ResNet-34"}

_MAKERS: dict[str, Callable[..., list[nn.Module]]] = {
    "vgg11": vgg11, "resnet18": resnet18, "resnet34": resnet34
}  # fmt: skip
_POLICIES = ("msm", "hsm", "ism")
_CURVE = 60  # memories of a trade-off curve
_OUTLINE = 300  # points of memory over time
_ORDINARY = "ordinary"

Show = Callable[[int, str], object]
Call = Callable[[], tuple[Tensor, ...]]
Ways = dict[str, nn.Sequential]


@dataclass(frozen=True)
class Options:
    """What is trained, and how.

    Attributes:
        network: one of :data:`NETWORKS`.
        memories: the budgets.
        iterations: that each way trains; none where ``epochs`` says it.
        epochs: the same in passes over the images.
        batch: images side by side.
        learning_rate: of SGD.
        momentum: likewise.
        width: channels of the first convolution.
        points: budgets between the least and ordinary backpropagation's, measured for the
            trade-off.
        segments: of ``torch.utils.checkpoint.checkpoint_sequential``, likewise.
        rounds: that each is timed.
        seed: of weights and order.
        images: what they are, for captions.
        note: for captions too.

    Raises:
        ExperimentError: a number is out of its range, or the network is unknown.
        UnitError: a budget cannot be read.

    Example:
        >>> Options("vgg11", ("50%",)).batch
        16
    """

    network: str
    memories: tuple[str, ...]
    iterations: int | None = 30
    epochs: int | None = None
    batch: int = 16
    learning_rate: float = 0.01
    momentum: float = 0.9
    width: int = 64
    points: int = 3
    segments: tuple[int, ...] = ()
    rounds: int = 3
    seed: int = 0
    images: str = "noise"
    note: str = ""

    def __post_init__(self) -> None:
        check_positive(
            self, "batch", "learning_rate", "iterations", "epochs", "width", "rounds", "points"
        )
        check_seed(self.seed)
        if self.network not in NETWORKS:
            known = ", ".join(NETWORKS)
            raise ExperimentError(f"--network is {self.network!r}: expected one of {known}")
        check_duration(self.iterations, self.epochs)
        if not self.memories:
            raise ExperimentError("there is no --memory: expected one at least, such as 50%")
        for memory in self.memories:
            parse_memory(memory)

    def iterations_of(self, samples: int) -> int:
        """``iterations``, or so many epochs of whole batches."""
        return self.iterations or (self.epochs or 0) * (samples // self.batch)


def run_ways(images: Images, how: Options, show: Show) -> Deep:
    """Measure and train one network, ordinarily and within each budget.

    ``show`` is told, after each iteration, how many are done, and a word on them.

    Raises:
        BudgetError: every budget is too small; the message names the least.
        ExperimentError: a batch is larger than the training data.
    """
    check_batch(how.batch, len(images.training))
    torch.manual_seed(how.seed)
    layers = _MAKERS[how.network](width=how.width)
    x, _ = next(images.batches(how.batch, np.random.default_rng(how.seed)))
    show(0, "measuring layers")
    ways, fits, refused = _ways(layers, how, x)
    probe = copy.deepcopy(layers)
    chain = profile(nn.Sequential(*copy.deepcopy(layers)), x, repeats=how.rounds)
    least, ordinary = chain_minimum(chain), plan(chain, policy="store-all")
    sides, held = _measured(probe, chain, fits, how, x, show)
    total = how.iterations_of(len(images.training))
    losses, seconds = train_in_turns(
        ways,
        partial(torch.optim.SGD, lr=how.learning_rate, momentum=how.momentum),
        images.batches_of(how.batch, total, how.seed),
        how.seed,
        lambda done, losses: show(done, f"loss {losses[_ORDINARY][-1]:.3f}"),
    )
    return Deep(
        machine=machine_of("cpu"),
        settings={
            "network": how.network, "title": NETWORKS[how.network], "images": how.images,
            "batch": how.batch, "width": how.width, "learning_rate": how.learning_rate,
            "momentum": how.momentum, "seed": how.seed, "iterations": total,
            "training": len(images.training), "rounds": how.rounds, "note": how.note,
        },
        chain=chain.to_json(),
        ordinary_bytes=ordinary.peak,
        least_bytes=least,
        ordinary_seconds=chain.ordinary_seconds,
        losses=losses,
        difference={way: _distance(losses[way], losses[_ORDINARY]) for way in fits},
        weights_difference={way: _apart(ways[way], ways[_ORDINARY]) for way in fits},
        seconds={way: median(each) for way, each in seconds.items()},
        sides=tuple(sides),
        refused=refused,
        curves=_curves(chain),
        held=held,
    )  # fmt: skip


def _ways(
    layers: list[nn.Module], how: Options, x: Tensor
) -> tuple[Ways, dict[str, ChainFit], dict[str, str]]:
    """The ordinary network and those within budgets, what these buy, and the budgets refused."""
    ways: Ways = {_ORDINARY: nn.Sequential(*copy.deepcopy(layers))}
    fits: dict[str, ChainFit] = {}
    refused: dict[str, str] = {}
    for memory in how.memories:
        net = Sequential(*copy.deepcopy(layers), memory=memory)
        try:
            fits[memory] = net.fit(x)
        except BudgetError as error:
            refused[memory] = str(error)
            last = error
        else:
            ways[memory] = net
    if not fits:
        raise last
    return ways, fits, refused


def _measured(
    layers: list[nn.Module], chain: Chain, fits: dict[str, ChainFit], how: Options, x: Tensor,
    show: Show,
) -> tuple[list[Side], dict[str, Held]]:  # fmt: skip
    """One iteration of each way, of budgets in between, and of checkpointed segments."""
    plain, net = nn.Sequential(*layers), Sequential(*layers, memory=1)
    budgets = {name: fit.budget_bytes for name, fit in fits.items()}
    budgets |= _between(chain, how.points)
    calls = {(_ORDINARY, "ordinary", 0): _pass(partial(plain, x), plain, x)}
    for name, budget in budgets.items():
        calls[name, "budget", budget] = _pass(partial(_within, net, budget, x), plain, x)
    for count in how.segments:
        run = partial(checkpoint_sequential, plain, count, x, use_reentrant=False)
        calls[f"{count} segments", "segments", 0] = _pass(run, plain, x)
    taken = _take_turns(list(calls.values()), how.rounds, show)
    sides: list[Side] = []
    found: dict[str, Measurement[tuple[Tensor, ...]]] = {}
    for (name, kind, budget), call, seconds in zip(calls, calls.values(), taken, strict=True):
        show(0, f"measuring {name}")
        found[name] = measure(call)
        sides.append(Side(name, kind, budget, found[name].working_bytes, seconds))
    planned, real = planned_memory(plan(chain, policy="store-all")), _outline(found[_ORDINARY])
    least = chain_minimum(chain)
    schedules = {n: plan_chain(chain, max(least, fit.budget_bytes)) for n, fit in fits.items()}
    held = {
        name: Held(planned_memory(schedule), _outline(found[name]), planned, real)
        for name, schedule in schedules.items()
    }
    return sides, held


def _between(chain: Chain, points: int) -> dict[str, int]:
    """The least budget, and more of them, evenly up to ordinary backpropagation's."""
    least, most = chain_minimum(chain), plan(chain, policy="store-all").peak
    sizes = np.linspace(least, most, points, endpoint=False).astype(int).tolist()
    return {format_bytes(size): size for size in sizes}


def _within(net: Sequential, budget: int, x: Tensor) -> Tensor:
    net.memory = budget
    found: Tensor = net(x)
    return found


def _pass(run: Callable[[], Tensor], net: nn.Module, x: Tensor) -> Call:
    """Forward and backward; what a caller is handed is returned: gradients, then the output."""
    with torch.no_grad():
        gradient = torch.ones_like(net(x))
    parameters = tuple(net.parameters())

    def call() -> tuple[Tensor, ...]:
        output = run()
        return (*torch.autograd.grad(output, parameters, gradient), output.detach())

    return call


def _outline(found: Measurement[tuple[Tensor, ...]]) -> Curve:
    curve = Curve(found.times.tolist(), found.working.tolist()).thinned(_OUTLINE)
    return Curve(tuple(round(t, 6) for t in curve.seconds), tuple(curve.held_bytes))


def _take_turns(calls: list[Call], rounds: int, show: Show) -> list[float]:
    """Seconds of each call, the least of some rounds, after one that does not count."""
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + 1):
        show(0, f"timing, round {number} of {rounds}")
        for call, seconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [min(seconds[1:]) for seconds in taken]  # what else the machine does only adds


def _curves(chain: Chain) -> dict[str, list[tuple[int, float]]]:
    """Of each policy, predicted seconds of an iteration for memories from the least to plenty."""
    curves = {}
    most = plan(chain, policy="store-all").peak
    for policy in _POLICIES:
        least = chain_minimum(chain, policy)
        rooms = np.linspace(least, most, _CURVE, dtype=int).tolist()
        seconds = (float(plan_chain(chain, room, policy).seconds or 0.0) for room in rooms)
        # Bytes are rounded; and what fits less memory fits more.
        curves[policy] = list(zip(rooms, accumulate(seconds, min), strict=True))
    return curves


def _distance(losses: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def _apart(net: nn.Module, other: nn.Module) -> float:
    pairs = zip(net.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
