"""A sequence across a few processes of this machine, and what more ranks would take.

Processes meet over gloo, with one thread each. Links are measured between two of them, a rank's
own work on one while the others rest; then all go back through a GRU of
:class:`retrograde.nn.TimeSharded` in each way.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, multiprocessing

from retrograde.machine import machine_of
from retrograde.nn.recurrent import GRU
from retrograde.ranks.cost_model import LinkSpeed, RankModel, measure_links
from retrograde.ranks.group_transport import GroupLinks
from retrograde.ranks.scan_over_ranks import RankWay
from retrograde.ranks.time.piece import Piece
from retrograde.ranks.time.sharded import TimeSharded
from retrograde.ranks.transport import Links, Parcel, Simulated
from retrograde.scan.elements import combine
from retrograde.units import format_bytes
from retrograde_papers.console import new_table
from retrograde_papers.files import check_folder, write_text
from retrograde_papers.limits import check_parallel
from retrograde_papers.options import ExperimentError, check_positive, check_seed
from retrograde_papers.plates import write_plate
from wang2020.ranks_figures import format_seconds, ranks_memory, ranks_seconds
from wang2020.ranks_results import Crossing, Ranks

__all__ = ["Options", "measure_ranks", "run_ranks"]

_RESULT = "ranks.json"


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
        found = _measure(GroupLinks(), how)
        if rank == 0:
            write_text(Path(folder) / _RESULT, found.to_json())
        GroupLinks().gather(None)  # none leaves while another waits for it
    finally:
        distributed.destroy_process_group()


def _measure(links: Links, how: Options) -> Ranks:
    speed = measure_links(links)
    model = _local(how, speed) if links.rank == 0 else None
    model = links.gather(model)[0]
    crossings = tuple(_cross(links, how, way) for way in get_args(RankWay))
    parameters = sum(p.numel() for p in _rnn(how).parameters())
    flat = torch.zeros(parameters)
    summed = _together(links, how.rounds, lambda _: links.add_up(flat))
    settings = asdict(how) | {"module": "rg.GRU", "backend": "gloo"}
    return Ranks(machine_of("cpu"), settings, model, summed, crossings)


def _local(how: Options, speed: LinkSpeed) -> RankModel:
    """What one rank does by itself, as it does it in a backward pass across ranks."""
    net = TimeSharded(_rnn(how), Simulated(0, [[Queue()]]))
    x, seed = _input(how, 0), torch.ones(how.steps, how.batch, how.hidden)
    own: list[Tensor] = list(net.parameters())
    call = net._agreed(x, None)
    pieces = call.run(x, ())
    element = call.affine(pieces, seed)
    vector = element.offset

    def sweep(piece: Piece) -> None:
        piece.back(seed, (torch.zeros_like(piece.after[0]),), own)

    return RankModel(
        latency_seconds=speed.latency_seconds,
        bytes_per_second=speed.bytes_per_second,
        sweep_seconds=_seconds(how.rounds, sweep, lambda: call.run(x, ())[0]),
        jacobian_seconds=_seconds(how.rounds, lambda _: call.affine(pieces, seed)),
        matrix_bytes=Parcel.of(element).nbytes,
        vector_bytes=Parcel.of(vector).nbytes,
        product_seconds=_seconds(how.rounds, lambda _: combine(element, element)),
        apply_seconds=_seconds(how.rounds, lambda _: combine(vector, element)),
    )


def _cross(links: Links, how: Options, way: RankWay) -> Crossing:
    """A backward pass across all ranks."""
    net = TimeSharded(_rnn(how), links, way=way, pieces=1)
    x = _input(how, links.rank)

    def forward() -> Tensor:
        outputs: Tensor = net(x)[0].sum()
        return outputs

    seconds = _together(links, how.rounds, lambda loss: loss.backward(), forward)
    reports = links.gather((net.report.messages, net.report.sent_bytes))
    return Crossing(way, seconds, *map(max, zip(*reports, strict=True)))


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
    links: Links,
    rounds: int,
    call: Callable[[Any], object],
    prepare: Callable[[], Any] = lambda: None,
) -> float:
    """The same where all ranks begin at once, and the last of them counts."""
    taken = []
    for _ in range(1 + rounds):
        given = prepare()
        links.gather(None)
        start = time.perf_counter()
        call(given)
        taken.append(max(links.gather(time.perf_counter() - start)))
    return float(median(taken[1:]))


def _rnn(how: Options) -> GRU:
    torch.manual_seed(how.seed)
    return GRU(how.hidden, how.hidden)


def _input(how: Options, rank: int) -> Tensor:
    torch.manual_seed(how.seed + 1 + rank)
    return torch.randn(how.steps, how.batch, how.hidden)


def _table(found: Ranks) -> Table:
    """What was measured, beside what the model says."""
    settings, model = found.settings, found.model
    ranks = int(settings["ranks"])
    columns = ("way", "seconds", "computed", "messages", "bytes", "computed")
    table = new_table(
        f"A backward pass across {ranks} ranks: GRU of {settings['hidden']} units, batch "
        f"{settings['batch']}, {settings['steps']:,} steps a rank",
        columns,
        left=("way",),
        unbroken=columns,
        caption="bytes of the busiest rank; links count what is told to all once" * (ranks > 2),
        caption_justify="left",
    )
    for each in found.crossings:
        table.add_row(
            each.way,
            f"{each.seconds:.3g}",
            f"{found.expected_seconds(each.way):.3g}",
            f"{each.messages:,}",
            format_bytes(each.sent_bytes),
            format_bytes(int(model.sent_bytes(each.way, ranks))),
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
