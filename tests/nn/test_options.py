"""``memory=`` changes nothing but the memory, whatever options of torch's modules it meets.

To run one case alone, give its name in quotes; what makes it again is printed where it fails.
"""

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from oracles.networks import CELLS
from oracles.options import (
    Setup,
    all_setups,
    alone,
    assert_results,
    covering,
    in_double,
    in_pairs,
    options_of,
    quick_setups,
    settle,
)

# torch says so of dropout without a second layer, and of projections without oneDNN.
pytestmark = [
    pytest.mark.filterwarnings("ignore:dropout option adds dropout"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def check(setup):
    """Ours equals torch's, in outputs, final state and all gradients."""
    print(setup)
    theirs, ours = setup.networks()
    x, state = setup.x(), setup.initial(theirs)
    refused = settle(ours, x, state)
    assert refused or setup.memory != 1, f"a byte was enough for {setup}"
    expected = setup.results(theirs, x, state)
    exact = None
    if setup.dtype != "float64":
        exact = setup.results(*in_double(theirs, x, state))
    assert_results(setup, setup.results(ours, x, state), expected, exact)


def named(setups):
    return pytest.mark.parametrize("setup", [pytest.param(s, id=s.id) for s in setups])


@named([setup for cell in CELLS for setup in quick_setups(cell)])
def test_outputs_and_gradients_are_torchs(setup):
    check(setup)


@pytest.mark.slow
@named([setup for cell in CELLS for setup in all_setups(cell)])
def test_every_pair_of_options_at_every_length_and_budget(setup):
    check(setup)


@pytest.mark.parametrize("cell", CELLS)
def test_the_quick_selection_has_every_pair_with_every_length_and_budget(cell):
    chosen = quick_setups(cell)
    for options in [*alone(options_of(cell)), *in_pairs(options_of(cell))]:
        matching = [s for s in chosen if all(getattr(s, k) == v for k, v in options.items())]
        assert matching, options
        if len(options) == 1:
            assert {s.length for s in matching} == {1, 2, 63, 200}
            assert {s.memory for s in matching} == {1, "5%", "1GiB"}


def test_combinations_in_which_all_pairs_meet_are_few():
    axes = {name: range(3) for name in "abcd"}
    rows = list(covering(axes))
    assert 9 <= len(rows) <= 12
    for a, b in ("ab", "ad", "cd"):
        assert {(row[a], row[b]) for row in rows} == {(u, v) for u in range(3) for v in range(3)}


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("layout", ["packed", "packed unsorted"])
@pytest.mark.parametrize("memory", [1, "1GiB"])
def test_packed_outputs_are_packed_as_the_inputs_are(cell, layout, memory):
    setup = Setup(cell, 9, layout=layout, memory=memory)
    print(setup)
    theirs, ours = setup.networks()
    x = setup.x()
    settle(ours, x, None)
    (found, _), (expected, _) = ours(x), theirs(x)
    assert type(found) is PackedSequence
    assert torch.equal(found.batch_sizes, expected.batch_sizes)
    for name in ("sorted_indices", "unsorted_indices"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a is None and b is None) or torch.equal(a, b)
