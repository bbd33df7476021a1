"""A model that runs its layers several times in a pass: one plan for all steps."""

import copy
import warnings

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.rollouts import AROUND, ROLLOUTS, unrolled

WIDTH, STEPS = 24, 5


class Rollout(nn.Module):
    """x ← x + f(x), with a loss at each step; ``steps`` may change after the sample."""

    def __init__(self, steps=STEPS):
        super().__init__()
        self.steps = steps
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        total = x.new_zeros(())
        for _ in range(self.steps):
            y = x
            for block in self.blocks:
                y = block(y)
            x = x + 0.1 * y
            total = total + self.head(x).square().mean()
        return total


class Stem(Rollout):
    """What is before and behind the loop is called in turn with its first and last step."""

    def __init__(self):
        super().__init__()
        del self.head
        self.stem, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        for step in range(self.steps):
            x = x + 1.0 if step else x
            for block in self.blocks:
                x = block(x)
        return self.end(x).square().mean()


class Reversed(Rollout):
    """Its two halves change places at every second step."""

    def forward(self, x):
        for step in range(self.steps):
            halves = self.blocks[:2], self.blocks[2:]
            for half in halves[:: 1 if step % 2 else -1]:
                for block in half:
                    x = block(x)
            x = torch.tanh(x)
        return self.head(x).square().mean()


def gradients(model, x, passes=1):
    model.zero_grad(set_to_none=True)
    total = sum(model(x + k) for k in range(passes))
    total.backward()
    return [p.grad for p in model.parameters()]


def drawn(kind=Rollout):
    torch.manual_seed(0)
    return kind(), torch.randn(256, WIDTH)


def taken(model, x, passes=1):
    def run():
        return gradients(model, x, passes)

    run()
    return rg.measure(run).working_bytes


def assert_equal(model, plain, x, passes=1):
    for mine, theirs in zip(gradients(model, x, passes), gradients(plain, x, passes), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("share", ["100%", "50%", "25%", "least"])
def test_all_steps_have_one_plan(share):
    model, x = drawn()
    plain = copy.deepcopy(model)
    whole = taken(plain, x)
    with pytest.raises(rg.BudgetError) as refusal:
        rg.budget(model, 1, x)
    least = refusal.value.minimum_bytes
    assert least < 0.2 * whole
    division = rg.budget(model, least if share == "least" else share, x)
    assert division.ordinary_bytes == pytest.approx(whole, rel=0.05)
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes
    assert_equal(model, plain, x)


@pytest.mark.parametrize(("rows", "steps"), [(64, 5), (16, 3), (64, 3), (16, 5)])
def test_gradients_that_steps_add_to_one_another_are_counted_where_they_wait(rows, steps):
    """Weights are most of the memory: the first sum takes new memory, further ones do not."""
    torch.manual_seed(0)
    model, x = Rollout(steps), torch.randn(rows, WIDTH)
    with pytest.raises(rg.BudgetError) as refusal:
        rg.budget(model, 1, x)
    division = rg.budget(model, refusal.value.minimum_bytes, x)
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes


@pytest.mark.parametrize("kind", [Stem, Reversed])
@pytest.mark.parametrize("share", ["50%", "25%"])
def test_steps_that_are_called_in_turn_with_other_layers(kind, share):
    model, x = drawn(kind)
    plain = copy.deepcopy(model)
    division = rg.budget(model, share, x)
    assert division.ordinary_bytes > 0.8 * taken(plain, x)
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes
    assert_equal(model, plain, x)


def test_a_step_of_many_is_a_small_part_of_the_model():
    model, x = drawn()
    model.steps = 100
    plain = copy.deepcopy(model)
    division = rg.budget(model, "20%", x[:16])
    assert [*division.shares] == ["blocks.0.0 … blocks.3.2"]
    assert_equal(model, plain, x[:16])


@pytest.mark.parametrize("steps", [1, 3, STEPS - 1])
def test_a_pass_of_fewer_steps_is_not_the_beginning_of_the_next_one(steps):
    model, x = drawn()
    plain = copy.deepcopy(model)
    division = rg.budget(model, "30%", x)
    for one in (model, plain):
        one.steps = steps
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert_equal(model, plain, x)
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes
    model.steps = plain.steps = STEPS
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes
    assert_equal(model, plain, x)


def test_more_steps_are_told_once_and_planned_from_then_on():
    model, x = drawn()
    plain = copy.deepcopy(model)
    division = rg.budget(model, "30%", x)
    model.steps = plain.steps = 3 * STEPS
    with pytest.warns(UserWarning, match="another kind of input") as told:
        assert_equal(model, plain, x)  # one group each: what is held grows by a state a step
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(model, plain, x)
        taken_bytes = taken(model, x)
    states = 2 * 3 * STEPS * x.nbytes  # which the rest of the model holds
    assert taken_bytes <= division.total_bytes + division.elsewhere_bytes + states


def test_two_passes_before_one_backward_pass():
    model, x = drawn()
    plain = copy.deepcopy(model)
    rg.budget(model, "30%", x)
    for _ in range(2):
        assert_equal(model, plain, x, passes=2)
    assert_equal(model, plain, x)


def test_passes_without_a_backward_pass_are_no_steps():
    model, x = drawn()
    plain = copy.deepcopy(model)
    division = rg.budget(model, "30%", x)
    for _ in range(3):
        model(x)
    assert taken(model, x) <= division.total_bytes + division.elsewhere_bytes
    assert_equal(model, plain, x)


SMALL = {
    "forecast": {"steps": 4, "count": 3, "width": 32},
    "sampler": {"steps": 3, "width": 8, "side": 8},
    "automaton": {"steps": 6, "side": 8},
}


@pytest.mark.quick(3, every=3)
@pytest.mark.parametrize("share", ["50%", "30%", "least"])
@pytest.mark.parametrize("name", ROLLOUTS)
def test_forecasts_samplers_and_automata(name, share):
    """By both functions, and by torch's checkpoints."""
    torch.manual_seed(0)
    model = ROLLOUTS[name](**SMALL[name.partition(":")[0]])
    x = model.sample()

    def step(model, run=None):
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(x) if run is None else run(model)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = step(model)
    for around in AROUND:
        model.around = around
        assert all(map(torch.equal, step(model), expected))
    model.around = ""
    with pytest.raises(rg.BudgetError) as refusal:
        rg.budget(model, 1, x)
    least = refusal.value.minimum_bytes
    found = [step(model, lambda model: unrolled(model, "50%", x))]
    try:
        rg.budget(model, least if share == "least" else share, x)
    except rg.BudgetError:
        pytest.skip("its least is more")
    found.append(step(model))
    for one in found:
        assert all(map(torch.equal, one, expected))
