"""The measured peak is within the budget: of whatever model, shape, options and budget.

Cases are drawn by number, each by itself, so a number is all that it takes to draw one again:

    run = run_of(draw(17))   # of the thousand bigger ones: draw(17, cheap=False)
    run.call(memory)         # an iteration; memory=None is ordinary backpropagation
"""

import gc

import pytest

import retrograde as rg
from oracles.draws import draw, run_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:dropout option adds dropout"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def refusal(run, memory):
    """The least budget, as the refusal of one names it."""
    with pytest.raises(rg.BudgetError) as caught:
        run.call(memory)
    assert f"{caught.value.minimum_bytes} bytes" in str(caught.value)
    return caught.value.minimum_bytes


def peak(run, memory):
    """The bytes that a call takes beside what it hands over, once its shapes are known."""
    run.clear()
    run.call(memory)
    run.clear()
    gc.collect()
    measured = rg.measure(lambda: run.call(memory))
    run.clear()
    return measured.working_bytes


def check(drawn):
    print(repr(drawn))
    run = run_of(drawn)
    least = refusal(run, 1)
    assert refusal(run, least - 1) == least
    assert peak(run, least) <= least
    ordinary = peak(run, None)
    budget = drawn.budget(least, ordinary)
    found = peak(run, budget)
    assert found <= budget, f"{found} > {budget}, between {least} and 1.2 · {ordinary}: {drawn!r}"


def drawn_by(numbers, cheap):
    drawn = [draw(number, cheap) for number in numbers]
    return pytest.mark.parametrize("drawn", [pytest.param(one, id=str(one)) for one in drawn])


@pytest.mark.quick(1, every=4)
@drawn_by(range(12), cheap=True)
def test_the_peak_is_within_the_budget(drawn):
    check(drawn)


@pytest.mark.slow
@drawn_by(range(12, 200), cheap=True)
def test_the_peak_is_within_the_budget_of_more(drawn):
    check(drawn)


@pytest.mark.slow
@drawn_by(range(1000), cheap=False)
def test_the_peak_is_within_the_budget_of_bigger_ones(drawn):
    check(drawn)
