"""Processes that start quickly: forked from one that has loaded what all of them need."""

import multiprocessing

import torch

_LOADED = ["torch", "torch._dynamo", "retrograde.ranks.time.sharded"]


def context():
    """Where such processes come from."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_LOADED)
    return found


def spawn(run, args, nprocs):
    """Run some processes, each called with its number and the arguments, to their ends."""
    context()
    torch.multiprocessing.start_processes(run, args, nprocs=nprocs, start_method="forkserver")
