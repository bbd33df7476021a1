"""A sequence across a few processes of this machine, and what more ranks would take.

Processes meet over gloo, with one thread each. Links are measured between two of them, a rank's
own work on one while the others rest; then all go back through a GRU of
:class:`retrograde.TimeSharded` in each way.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, multiprocessing

from retrograde.machine import machine_of
from retrograde.ranks.crossing import Way
from retrograde.ranks.range_map import rows_of
from retrograde.ranks.time_sharded import TimeSharded
from retrograde.ranks.tree import joined
from retrograde.recurrent.modules import GRU
from retrograde.units import format_bytes
from retrograde_papers.console import new_table
from retrograde_papers.files import check_folder, write_text
from retrograde_papers.limits import check_parallel
from retrograde_papers.options import ExperimentError, check_positive, check_seed
from retrograde_papers.plates import write_plate
from wang2020.ranks_figures import format_seconds, ranks_memory, ranks_seconds
from wang2020.ranks_model import RankModel
from wang2020.ranks_results import Crossing, Ranks

__all__ = ["Options", "measure_ranks", "run_ranks"]

_RESULT = "ranks.json"
_TRIPS, _LARGE = 30, 1 << 24  # round trips of a small message, and bytes of a large one


@dataclass(frozen=True)
class Options:
    """What is run across ranks.

    Attributes:
        ranks: processes.
        hidden: units of the GRU, and its inputs.
        steps: of each rank.
        batch: sequences side by side.
        rounds: that are measured, after one that is not.
        seed: of weights and inputs.
        note: on the machine, for captions.

    Raises:
        ExperimentError: a number is not positive, or there is one rank.

    Example:
        >>> Options().ranks
        2
    """

    ranks: int = 2
    hidden: int = 32
    steps: int = 200
    batch: int = 16
    rounds: int = 5
    seed: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        check_positive(self, "ranks", "hidden", "steps", "batch", "rounds")
        if self.ranks < 2:
            raise ExperimentError("--ranks is 1: expected at least 2, to have links to measure")
        check_parallel("--ranks", self.ranks)
        check_seed(self.seed)


def run_ranks(how: Options, report: Path, console: Console) -> Ranks:
    """Measure, and write numbers and figures.

    Raises:
        ExperimentError: torch cannot run processes here.
        RetrogradeError: the folder cannot be written.
    """
    check_folder(report)
    with console.status(f"measuring {how.ranks} ranks"):
        found = measure_ranks(how)
    console.print(_table(found), _told(found), soft_wrap=True)
    write_text(report / _RESULT, found.to_json())
    for draw in (ranks_seconds, ranks_memory):
        write_plate(draw(found), report)
    console.print(f"numbers and figures in {report}", markup=False, soft_wrap=True)
    return found


def measure_ranks(how: Options) -> Ranks:
    """Start the processes, and gather what they measure."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise ExperimentError("this torch has no gloo: install one with torch.distributed")
    with TemporaryDirectory() as folder:
        spawn: Callable[..., None] = vars(multiprocessing)["spawn"]
        spawn(_process, (how, folder), nprocs=how.ranks)
        return Ranks.from_json((Path(folder) / _RESULT).read_text(encoding="utf-8"))


def _process(rank: int, how: Options, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=how.ranks)
    try:
        found = _measure(how)
        if rank == 0:
            write_text(Path(folder) / _RESULT, found.to_json())
        _slowest(0.0)  # none leaves while another waits for it
    finally:
        distributed.destroy_process_group()


def _measure(how: Options) -> Ranks:
    rank = distributed.get_rank()
    small, large = (_trip(size, rank) for size in (1, 1 + _LARGE))
    bandwidth = _LARGE / (large - small) if large > small else math.inf
    model = _local(how, small, bandwidth) if rank == 0 else None
    distributed.barrier()
    crossings = tuple(Crossing(way, _cross(how, way)) for way in get_args(Way))
    flat = torch.zeros(sum(p.numel() for p in _rnn(how).parameters()))
    summed = _together(how.rounds, lambda _: distributed.all_reduce(flat))
    settings = asdict(how) | {"module": "rg.GRU", "backend": "gloo"}
    told: list[Any] = [model]
    distributed.broadcast_object_list(told)
    return Ranks(machine_of("cpu"), settings, told[0], summed, crossings)


def _trip(size: int, rank: int) -> float:
    """Half the median of round trips of some bytes between ranks 0 and 1; 0 on other ranks."""
    message = torch.zeros(size, dtype=torch.uint8)
    if rank > 1:
        return 0.0

    def there_and_back(_: Any) -> None:
        calls = [distributed.send, distributed.recv]
        for call in calls if rank == 0 else calls[::-1]:
            call(message, 1 - rank)

    return _seconds(_TRIPS if size == 1 else _TRIPS // 3, there_and_back) / 2


def _local(how: Options, latency: float, bandwidth: float) -> RankModel:
    """What one rank does by itself, as it does it in a backward pass across ranks."""
    rnn, x = _rnn(how), _input(how, 0)
    before = tuple(s.requires_grad_() for s in rnn._zeros(how.batch, x))
    dy = torch.ones(how.steps, how.batch, how.hidden)
    leaves: list[Tensor] = [*before, *rnn.parameters()]
    rows = rows_of(rnn, x, before, dy)
    vector = rows[:, -1:].contiguous()

    def forward() -> list[Tensor]:
        return list(rnn(x, before[0]))

    def sweep(found: list[Tensor]) -> None:
        torch.autograd.grad(found, leaves, [dy, torch.zeros_like(before[0])])

    return RankModel(
        latency_seconds=latency,
        bytes_per_second=bandwidth,
        sweep_seconds=_seconds(how.rounds, sweep, forward),
        jacobian_seconds=_seconds(how.rounds, lambda _: rows_of(rnn, x, before, dy)),
        matrix_bytes=rows.nbytes,
        vector_bytes=vector.nbytes,
        product_seconds=_seconds(how.rounds, lambda _: joined(rows, rows)),
        apply_seconds=_seconds(how.rounds, lambda _: joined(vector, rows)),
    )


def _cross(how: Options, way: Way) -> float:
    """Seconds of a backward pass across all ranks."""
    net = TimeSharded(_rnn(how), way=way, pieces=1)
    x = _input(how, distributed.get_rank())

    def forward() -> Tensor:
        outputs: Tensor = net(x)[0].sum()
        return outputs

    return _together(how.rounds, lambda loss: loss.backward(), forward)


def _seconds(
    rounds: int, call: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None
) -> float:
    """The median of some calls, after one that does not count."""
    taken = []
    for _ in range(1 + rounds):
        given = prepare()
        start = time.perf_counter()
        call(given)
        taken.append(time.perf_counter() - start)
    return float(median(taken[1:]))


def _together(
    rounds: int, call: Callable[[Any], object], prepare: Callable[[], Any] = lambda: None
) -> float:
    """The same where all ranks begin at once, and the last of them counts."""
    taken = []
    for _ in range(1 + rounds):
        given = prepare()
        distributed.barrier()
        start = time.perf_counter()
        call(given)
        taken.append(_slowest(time.perf_counter() - start))
    return float(median(taken[1:]))


def _slowest(seconds: float) -> float:
    """The seconds of the slowest rank."""
    told = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(told, distributed.ReduceOp.MAX)
    return float(told)


def _rnn(how: Options) -> GRU:
    torch.manual_seed(how.seed)
    return GRU(how.hidden, how.hidden)


def _input(how: Options, rank: int) -> Tensor:
    torch.manual_seed(how.seed + 1 + rank)
    return torch.randn(how.steps, how.batch, how.hidden)


def _table(found: Ranks) -> Table:
    """What was measured, beside what the model says."""
    settings = found.settings
    ranks, hidden = settings["ranks"], settings["hidden"]
    columns = ("way", "seconds", "computed")
    table = new_table(
        f"A backward pass across {ranks} ranks: GRU of {hidden} units, batch "
        f"{settings['batch']}, {settings['steps']:,} steps a rank",
        columns,
        left=("way",),
        unbroken=columns,
    )
    for each in found.crossings:
        table.add_row(
            each.way,
            f"{each.seconds:.3g}",
            f"{found.expected_seconds(each.way):.3g}",
        )
    return table


def _told(found: Ranks) -> str:
    model = found.model
    first = model.first_ranks_where("tree", beats="linear")
    ahead = "on no number of ranks up to 10⁶" if first is None else f"first on {first:,} ranks"
    return (
        f"measured: latency {format_seconds(model.latency_seconds)}, "
        f"{format_bytes(int(min(model.bytes_per_second, 1e15)))} a second; a sweep "
        f"{format_seconds(model.sweep_seconds)}, a Jacobian "
        f"{format_seconds(model.jacobian_seconds)}, a product "
        f"{format_seconds(model.product_seconds)}, with a vector "
        f"{format_seconds(model.apply_seconds)}, the sum of gradients "
        f"{format_seconds(found.sum_seconds)}\n"
        f"computed: the tree is faster than the linear hand-over {ahead}"
    )
