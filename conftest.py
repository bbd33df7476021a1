"""Three tiers of tests: ``make test`` runs a few cases of each, ``--every`` all but the slow ones.

A test says by ``@pytest.mark.quick(n)`` how many of its cases ``make test`` runs; 0 leaves it to
``--every``, where a smaller test proves the same promise. Of a test with ``quick(n, every=m)``,
``--every`` runs m cases, and the others are slow.
"""

import signal
from importlib.util import find_spec
from itertools import groupby

import pytest

QUICK = 1  # cases of a test that says nothing
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell begins what runs behind it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Programs of their own, and a device that torch would keep for the whole process.
collect_ignore_glob = ["tests/kernels/compiled_launches.py", "tests/*/simulated_device*"]
if not find_spec("jax"):
    collect_ignore_glob.append("src/retrograde/jax/*")


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="every case of every test, not a few")


def chosen(count, most):
    """Indices of so many cases: the first, the last, and some evenly between."""
    if most == 1:
        return {0}
    return {round(i * (count - 1) / (most - 1)) for i in range(most)} if most else set()


@pytest.hookimpl(tryfirst=True)  # before ``-m`` deselects the slow ones
def pytest_collection_modifyitems(config, items):
    kept, left = [], []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [*group]
        mark = cases[0].get_closest_marker("quick")
        every = chosen(len(cases), mark.kwargs.get("every", len(cases)) if mark else len(cases))
        for case in (case for index, case in enumerate(cases) if index not in every):
            case.add_marker("slow")
        quick = chosen(len(cases), mark.args[0] if mark else QUICK)
        for index, case in enumerate(cases):
            (kept if index in quick or config.getoption("every") else left).append(case)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
