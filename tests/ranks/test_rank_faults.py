"""A rank that raises, ends or hangs: every other rank gets one clear error in time. Ranks whose
modules live to the end exit cleanly."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

import retrograde as rg
from oracles.processes import context, join
from retrograde.errors import RankError

TIMEOUT = 3  # seconds
SIZE, LOST = 3, 1

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
]


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(20 * TIMEOUT)


def fail():
    raise ValueError("the disk is full")


def in_forward(sharded, how):
    sharded.rnn.register_forward_pre_hook(lambda *_: how())


def in_the_backward_pass(sharded, how):
    sharded.rnn.register_forward_hook(lambda _, __, found: (_Then.apply(found[0], how), found[1]))


def in_the_sum(sharded, how):
    sharded._peers.add_up = lambda _: how()


class _Then(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, how):
        ctx.how = how
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.how()
        return g, None


PLACES = {"forward": in_forward, "backward": in_the_backward_pass, "sum": in_the_sum}
HOWS = {"end": end, "hang": hang, "fail": fail}


def a_rank(rank, place, how, way, folder):
    """The rank that is lost ends as a program does that fails; the others write what they hear."""
    join(rank, SIZE, folder)
    group = distributed.new_group(timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    rnn = rg.GRU(3, 4)
    patient = rg.TimeSharded(rnn, way=way)  # with time to compile what a first pass compiles
    patient(torch.ones(5, 2, 3))[0].sum().backward()
    sharded = rg.TimeSharded(rnn, group, way=way)
    sharded(torch.ones(5, 2, 3))[0].sum().backward()  # all is well
    if rank == LOST:
        PLACES[place](sharded, HOWS[how])
    said, again = [], time.monotonic()
    for _ in range(2):  # once more, as a program that goes on after an error would
        try:
            sharded(torch.ones(5, 2, 3))[0].sum().backward()
            said.append("nothing")
        except (RankError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if len(said) == 1:
            taken, again = time.monotonic() - again, time.monotonic()
    if rank == LOST:
        assert said[0] == "ValueError: the disk is full", said
    if time.monotonic() - again > 1:
        said.append("the second call took long")
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write("\n".join([str(taken), *said]))
    os._exit(0)


SAYS = (
    r"(another rank|rank \d) has ended, failed, or did not answer within the group's timeout; "
    r"expected .*start all of them again from the last checkpoint"
)
CASES = [
    ("forward", "fail", "linear"),
    ("forward", "end", "tree"),
    ("backward", "hang", "linear"),
    ("backward", "end", "tree"),
    ("backward", "fail", "tree"),
    ("sum", "hang", "tree"),
    ("sum", "fail", "linear"),
]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("place", "how", "way"), CASES)
def test_the_others_get_one_error_in_time(tmp_path, place, how, way):
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
    for rank in {*range(SIZE)} - {LOST}:
        seconds, first, *then = (tmp_path / f"{rank}.txt").read_text().split("\n")
        assert re.match(rf"RankError: rank {rank} cannot continue: {SAYS}", first), first
        assert len(then) == 1
        assert then[0].startswith("RankError: an earlier pass failed on this rank"), then
        assert float(seconds) < 3 * TIMEOUT


def a_lonely_backward_pass(rank, folder):
    join(rank, 2, folder, 1)
    torch.manual_seed(0)
    y, _ = rg.TimeSharded(rg.GRU(3, 4))(torch.ones(5, 2, 3))
    said = "nothing"
    if rank == 0:
        try:
            y.sum().backward()
        except RankError as error:
            said = str(error)
    else:
        time.sleep(4)
    with open(f"{folder}/{rank}.txt", "w") as file:
        file.write(said)
    os._exit(0)


@pytest.mark.quick(0)
def test_a_rank_without_a_backward_pass_is_not_waited_for(tmp_path):
    ranks = [
        context().Process(target=a_lonely_backward_pass, args=(rank, str(tmp_path)))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    said = (tmp_path / "0.txt").read_text()
    assert "expected every rank to make the same calls, forward and backward" in said


# Ranks are forked from a process that has loaded torch. Each ends as a script does, with gloo's
# threads busy until the group is destroyed.
JOBS = """
import os, sys, tempfile, weakref
import torch
from torch import distributed
import retrograde as rg
import retrograde.ranks.time_sharded

torch.set_num_threads(1)
size, codes = 4, []
for _ in range(int(sys.argv[1])):
    folder, pids = tempfile.mkdtemp(), []
    for rank in range(size):
        pids.append(os.fork())
        if not pids[-1]:
            break
    if not pids[-1]:
        break
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

if pids[-1]:
    print(codes)
else:
    url = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
    torch.manual_seed(0)
    net = rg.TimeSharded(rg.LSTM(3, 4))
    outputs, last = net(torch.ones(5, 2, 3))
    loss = outputs.sum()
    loss.backward()
    for _ in range(100):
        distributed.all_reduce(torch.ones(1), async_op=True)
    group = weakref.ref(distributed.group.WORLD)
    distributed.destroy_process_group()
    assert group() is None, "the module holds the group"
    try:
        net(torch.ones(5, 2, 3))
        raise AssertionError("a call without a group")
    except rg.RankError as error:
        assert str(error).startswith("the process group has been destroyed"), error
"""


@pytest.mark.quick(0)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_job_whose_modules_live_to_the_end_exits_with_status_0():
    runs = 6
    found = subprocess.run(
        [sys.executable, "-c", JOBS, str(runs)], capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip() == str([0] * 4 * runs), found.stderr
    assert "terminate" not in found.stderr
