"""Two tiers of tests: a few cases of each, or with ``--every`` all of them."""

from itertools import groupby

FEW = 4  # cases of a test that is run with many


def pytest_addoption(parser):
    parser.addoption("--every", action="store_true", help="every case of every test, not a few")


def pytest_collection_modifyitems(config, items):
    """Of a test with many cases keep the first, the last, and some evenly between."""
    if config.getoption("every"):
        return
    kept, left = [], []
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [*group]
        last = len(cases) - 1
        chosen = {round(i * last / (FEW - 1)) for i in range(FEW)}
        for number, case in enumerate(cases):
            (kept if number in chosen else left).append(case)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
