"""Processes that start quickly: forked from one that has loaded what all of them need."""

import multiprocessing
import os
import time
from datetime import timedelta

import torch
from torch import distributed

_LOADED = ["torch", "torch._dynamo", "retrograde.ranks.time_sharded"]


def context():
    """Where such processes come from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_LOADED)
    return found


def spawn(run, args, nprocs):
    """Run some processes, each called with its number and the arguments, to their ends."""
    context()
    torch.multiprocessing.start_processes(run, args, nprocs=nprocs, start_method="forkserver")


def on_ranks(size, folder, run, *given, timeout=60):
    """What ``run(rank, *given)`` returns on each rank of a gloo group; errors are raised."""
    spawn(_a_rank, (size, str(folder), timeout, run, given), nprocs=size)
    return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _a_rank(rank, size, folder, timeout, run, given):
    join(rank, size, folder, timeout)
    found = run(rank, *given)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.barrier()
    time.sleep(0.05)  # gloo may still be busy with the barrier
    distributed.destroy_process_group()


def join(rank, size, folder, timeout=60):
    """Join the group of so many ranks that meet in a folder."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )


def leave():
    """End this process without torch's destructors.

    That of DDP waits, holding the interpreter's lock, for a thread of gloo's that may itself wait
    for this lock, to let go of what its last task had captured.
    """
    os._exit(0)
