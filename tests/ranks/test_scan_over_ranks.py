"""The scan across ranks, between threads and between processes, against the plain loop."""

import math
from types import SimpleNamespace

import pytest
import torch

from oracles.processes import spawn
from retrograde.errors import RankError, ScanError
from retrograde.ranks.base import links_of
from retrograde.ranks.group_transport import GroupLinks
from retrograde.ranks.scan_over_ranks import RankReport, cheapest_way, messages, rounds, scan_ranks
from retrograde.ranks.transport import Parcel, _brought, simulate
from retrograde.scan import IDENTITY, UNREAD, Affine, Dense, Vector, combine, reference

WAYS = ["linear", "tree", "gather"]
SIZES = range(1, 17)


def join(a, b):
    return a + b


def scanned(elements, way, operator=join, backward=False, **network):
    """What every rank found, in the order of the scan, and what it reports."""
    size = len(elements)

    def run(links):
        report = RankReport()
        index = size - 1 - links.rank if backward else links.rank
        found = scan_ranks(
            elements[index], links, operator, way=way, backward=backward, report=report
        )
        return found, report

    found = simulate(size, run, **network)
    return zip(*(found[::-1] if backward else found), strict=True)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_what_comes_before_it(size, way, backward):
    elements = [chr(ord("a") + k) for k in range(size)]
    found, _ = scanned(elements, way, backward=backward)
    assert list(found) == reference(elements, join)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_auto_finds_the_same(size):
    elements = [chr(ord("a") + k) for k in range(size)]
    found, reports = scanned(elements, "auto")
    assert list(found) == reference(elements, join)
    assert len({report.way for report in reports}) == 1


@pytest.mark.quick(0)
@pytest.mark.parametrize(("numbers", "way"), [(4, "gather"), (2000, "tree"), (20_000, "linear")])
def test_auto_weighs_latency_against_payload(numbers, way):
    """Small matrices are told to all; larger ones go up a tree; the largest are not sent at all."""
    elements = [Vector(torch.ones(8)), *[Dense(torch.ones(numbers, 8, 8))] * 14, UNREAD]

    def run(links):
        return [cheapest_way(elements[links.rank], links) for _ in range(2)]

    found = simulate(16, run, latency=0.02, bandwidth=20e6)
    assert found == [[way, way]] * 16


def test_auto_knows_which_element_comes_first():
    """A line hands on what is as small as the first; so where that is a matrix it does not pay."""
    elements = [Vector(torch.ones(8)), *[Dense(torch.ones(20_000, 8, 8))] * 15]

    def run(links):
        mine = elements[links.rank]
        return [cheapest_way(mine, links, backward=backward) for backward in (False, True)]

    assert simulate(16, run, latency=0.02, bandwidth=20e6) == [["linear", "tree"]] * 16


@pytest.mark.parametrize("size", SIZES)
def test_rounds_messages_and_bytes_are_those_of_the_formula(size):
    torch.manual_seed(size)
    n, batch = 3, 2
    steps = [Affine(Dense(torch.randn(batch, n, n)), Vector(torch.randn(batch, n)))] * (size - 1)
    elements = [Vector(torch.randn(batch, n)), *steps][:size]
    elements[-1] = UNREAD
    _, reports = scanned(elements, "tree", combine)
    vector, matrix = batch * n * 4, batch * n * (n + 1) * 4
    for rank, report in enumerate(reports):
        assert report.up == report.down == math.ceil(math.log2(size))
        mine = [m for m in messages(size) if m.source == rank]
        assert report.messages == len(mine)
        # What has the gradient in it is a vector; only what is sent up and has not is a matrix.
        assert report.sent_bytes == sum(vector if m.first == 0 else matrix for m in mine)
        assert sum(m.first > 0 for m in mine) <= 1
    assert len({(m.phase, m.round) for m in messages(size) if m.phase == "up"}) == rounds(size)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_with_a_loss_at_every_step(way):
    torch.manual_seed(0)
    size, n = 6, 4
    elements = [Vector(torch.randn(2, n, dtype=torch.float64))]
    for _ in range(size - 2):
        jacobian = torch.randn(2, n, n, dtype=torch.float64)
        elements.append(Affine(Dense(jacobian), Vector(torch.randn(2, n, dtype=torch.float64))))
    elements.append(UNREAD)
    found, _ = scanned(elements, way, combine, backward=True)
    found, expected = list(found), reference(elements, combine)
    assert found[0] is IDENTITY
    for a, b in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(a.data, b.data, rtol=1e-12, atol=1e-12)


class Counted:
    """Links that count how many messages came one after the other, as Lamport's clock does."""

    def __init__(self, links):
        self.links, self.now = links, 0
        self.size, self.rank, self.traffic = links.size, links.rank, links.traffic

    def send(self, element, to):
        self.links.send((self.now + 1, element), to)

    def receive(self, source):
        then, element = self.links.receive(source)
        self.now = max(self.now, then)
        return element

    def flush(self):
        self.links.flush()


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_takes_the_time_of_its_rounds(size):
    """With links that are slow, and products that are not, rounds are what counts."""

    def run(links, way):
        counted = Counted(links)
        scan_ranks("x", counted, join, way=way)
        return counted.now

    most = {way: max(simulate(size, lambda links: run(links, way))) for way in ("linear", "tree")}  # noqa: B023
    assert most["linear"] == size - 1
    assert rounds(size) <= most["tree"] <= 2 * rounds(size)


def test_a_rank_that_does_not_answer_is_named():
    def run(links):
        if links.rank != 1:
            scan_ranks("x", links, join, way="linear")

    with pytest.raises(RankError, match="rank 2 lost its link to rank 1"):
        simulate(3, run, timeout=0.2)


def test_bad_questions_are_answered():
    with pytest.raises(ScanError, match="unknown way 'ring'"):
        messages(3, "ring")
    with pytest.raises(ScanError, match="got 0 ranks"):
        messages(0)
    with pytest.raises(RankError, match="no process group"):
        GroupLinks()


@pytest.mark.parametrize(("backend", "place"), [("nccl", "cuda:3"), ("gloo", "cpu")])
def test_messages_go_by_way_of_the_gpu_of_the_module(backend, place, monkeypatch):
    """Though ``torch.cuda.set_device`` was forgotten, so that all processes share a current one."""
    told = {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "get_backend": backend}
    for name, value in told.items():
        monkeypatch.setattr(torch.distributed, name, lambda *_, value=value: value)
    on_cpu = SimpleNamespace(is_cuda=False, device=torch.device("cpu"))
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 3))
    module = SimpleNamespace(parameters=lambda: iter([on_cpu, on_gpu]))
    links = links_of(torch.nn.Module(), module)  # any object stands for the group
    assert (str(links.device), str(links.gpu)) == (place, "cuda:3")


def test_what_comes_from_a_gpu_goes_to_the_one_that_is_named():
    """``meta`` stands for it. What lies on a device of the kind already is not moved."""
    x = torch.ones(3)
    assert _brought(x, "cuda", "meta").is_meta
    assert _brought(x, "cpu", "meta") is x
    assert _brought(_brought(x, "cuda", "meta"), "meta", "cpu").is_meta


def test_a_parcel_holds_anything_and_copies_no_single_tensor():
    x = torch.randn(4, 5)
    parcel = Parcel.of(Dense(x))
    assert parcel.nbytes == x.nbytes
    assert parcel.block().data_ptr() == x.data_ptr()
    mixed = {"byte": torch.ones(3, dtype=torch.uint8), "x": x.t(), "why": IDENTITY, "none": None}
    parcel = Parcel.of(mixed)
    found = Parcel.open(parcel.letter, parcel.block())
    assert found["why"] is IDENTITY
    assert found["none"] is None
    assert torch.equal(found["byte"], mixed["byte"])
    assert torch.equal(found["x"], mixed["x"])


def in_a_process(rank, size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size
    )
    links, found = GroupLinks(), {}
    torch.manual_seed(0)
    matrices = [torch.randn(2, 9, 9, dtype=torch.float64) for _ in range(size)]
    elements = [Vector(torch.ones(2, 9, dtype=torch.float64)), *map(Dense, matrices[1:])]
    expected = reference(elements, combine)[size - 1 - rank]
    for way in WAYS:
        report = RankReport()
        mine = elements[size - 1 - rank]
        prefix = scan_ranks(mine, links, way=way, backward=True, report=report)
        assert (prefix is IDENTITY) == (expected is IDENTITY)
        if prefix is not IDENTITY:
            torch.testing.assert_close(prefix.data, expected.data, rtol=1e-12, atol=1e-12)
        found[way] = report
    long = "x" * 5000 + str(rank)  # more than a letter holds
    assert scan_ranks(long, links, join, way="tree") in (
        IDENTITY,
        "".join("x" * 5000 + str(k) for k in range(rank)),
    )
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_processes_find_the_same(tmp_path):
    size = 3
    spawn(in_a_process, (size, str(tmp_path)), nprocs=size)
    for rank in range(size):
        report = torch.load(tmp_path / f"{rank}.pt", weights_only=False)["tree"]
        assert report.up == report.down == 2
        sent = [m for m in messages(size) if size - 1 - m.source == rank]
        assert report.messages == len(sent)
