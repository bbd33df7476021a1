"""Ranks that end or hang are named, and nobody waits for ever; ranks that are done leave."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

import retrograde as rg
from oracles.processes import context
from retrograde.errors import RankError
from retrograde.ranks.group_transport import _A_MOMENT

TIMEOUT = 3  # seconds, once all are there
SIZE, LOST = 3, 1

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
]


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(4 * TIMEOUT)


def in_forward(sharded, how):
    sharded.rnn.register_forward_pre_hook(lambda *_: how())


def in_the_scan(sharded, how):
    send = sharded.links.send

    def later(element, to):
        if sharded.scanning:
            how()
        send(element, to)

    sharded.links.send = later


def in_the_sum(sharded, how):
    sharded.links.add_up = lambda _: how()


PLACES = {"forward": in_forward, "scan": in_the_scan, "sum": in_the_sum}
HOWS = {"end": end, "hang": hang}


def a_rank(rank, place, how, way, folder):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=SIZE,
    )
    group = distributed.new_group(timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    rnn = rg.GRU(3, 4)
    patient = rg.TimeSharded(rnn, way=way)  # with time to compile what a first pass compiles
    patient(torch.ones(5, 2, 3))[0].sum().backward()
    sharded = rg.TimeSharded(rnn, group, way=way)
    sharded.scanning = False
    sharded(torch.ones(5, 2, 3))[0].sum().backward()  # all is well
    if rank == LOST:
        PLACES[place](sharded, HOWS[how])
    start = time.monotonic()
    try:
        outputs, _ = sharded(torch.ones(5, 2, 3))
        sharded.scanning = True
        outputs.sum().backward()
        said = "nothing"
    except RankError as error:
        said = str(error)
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(f"{time.monotonic() - start}\n{said}")
    os._exit(0)


def survivors(tmp_path, place, how, way):
    found = context()
    ranks = [
        found.Process(target=a_rank, args=(rank, place, how, way, str(tmp_path)))
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if rank != LOST:
            process.join(60)
    ranks[LOST].kill()
    ranks[LOST].join()
    for rank in set(range(SIZE)) - {LOST}:
        seconds, said = (tmp_path / f"{rank}.txt").read_text().split("\n", 1)
        yield rank, float(seconds), said


CASES = [
    ("forward", "end", "linear"),
    ("scan", "end", "tree"),
    ("sum", "end", "linear"),
    ("sum", "hang", "linear"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("place", "how", "way"), CASES)
def test_the_others_name_the_rank_that_is_lost(tmp_path, place, how, way):
    for rank, seconds, said in survivors(tmp_path, place, how, way):
        assert said.startswith(f"rank {rank} cannot continue: rank {LOST} has ended"), (rank, said)
        assert seconds < 2 * TIMEOUT + 2 * _A_MOMENT


A_JOB = """
import torch
from torch import distributed, nn
import retrograde as rg

torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(0)
time = rg.TimeSharded(rg.LSTM(3, 4))
time(torch.ones(5, 2, 3))[0].sum().backward()
layers = rg.LayerSharded.cut(nn.Sequential(*(nn.Linear(6, 6) for _ in range(8))))
layers(*([torch.ones(2, 6)] * (distributed.get_rank() == 0))).sum().backward()
for sharded in (time, layers):
    sharded.links.add_up(torch.ones(1))  # gloo's threads may still hold this at the end
distributed.destroy_process_group()
try:
    time(torch.ones(5, 2, 3))
except rg.RankError as error:
    said = str(error)
assert said.startswith("the process group has been destroyed"), said
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("size", "runs"),
    [(3, 2), *(pytest.param(size, 10, marks=pytest.mark.slow) for size in (3, 4, 8))],
)
def test_a_job_whose_modules_live_to_the_end_exits_with_status_0(size, runs):
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {size} --no-python"
    job = [sys.executable, *torchrun.split(), sys.executable, "-c", A_JOB]
    found = [subprocess.run(job, capture_output=True, text=True) for _ in range(runs)]
    assert [run.returncode for run in found] == [0] * runs, [run.stderr for run in found]
