"""Runs: that they learn, and that one taken up again is the one that never stopped."""

import math
from dataclasses import replace

import pytest
import torch

from retrograde.errors import BudgetError, UnitError
from retrograde.training import (
    Run,
    Text,
    TrainingError,
    TrainingOptions,
    load_checkpoint,
    save_checkpoint,
)
from retrograde.training import run as run_module


def weights(run):
    return dict(run.model.state_dict())


def assert_same(one, other):
    assert one.losses == other.losses
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name
    for mine, theirs in zip(one.state, other.state, strict=True):
        assert torch.equal(mine, theirs)


def steps(run, number):
    for _ in range(number):
        run.step()
    return run


def test_training_lowers_the_loss(options):
    text = Text("the quick brown fox jumps over the lazy dog. " * 20, "example")
    run = steps(Run(replace(options, learning_rate=0.03), text), 40)
    assert run.losses[0] == pytest.approx(math.log2(len(text.vocabulary)), abs=0.5)
    assert run.losses[-1] < 0.6 * text.entropy_bits
    assert run.done == 40
    assert run.position == 1600
    assert all(seconds > 0 for seconds in run.seconds)


def test_the_seed_decides_the_run(options):
    assert_same(steps(Run(options), 2), steps(Run(options), 2))
    other = steps(Run(replace(options, seed=2)), 2)
    assert other.losses != steps(Run(options), 2).losses


def test_a_resumed_run_is_the_one_that_never_stopped(options, tmp_path):
    straight = steps(Run(options), 6)
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, steps(Run(options), 3).snapshot())
    torch.manual_seed(999)
    resumed = steps(Run.resumed(load_checkpoint(path)), 3)
    assert_same(straight, resumed)
    assert resumed.position == straight.position


def test_random_numbers_go_on_where_they_stopped(options):
    run = steps(Run(options), 1)
    snapshot = run.snapshot()
    expected = torch.rand(3)
    torch.manual_seed(5)
    Run.resumed(snapshot)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_can_be_made_longer(options):
    snapshot = steps(Run(options), 1).snapshot()
    assert Run.resumed(snapshot, iterations=9).options == replace(options, iterations=9)


def test_another_text_is_refused(options, tmp_path):
    snapshot = steps(Run(options), 1).snapshot()
    path = tmp_path / "other.txt"
    path.write_text("other " * 100)
    with pytest.raises(TrainingError) as error:
        Run.resumed(snapshot, text=str(path))
    message = str(error.value)
    assert f"{path} is not the one that this run began with: it has 6 different" in message
    assert "as Python's own documentation had; give that one with --text, or start" in message


def test_another_documentation_of_python_is_told_as_such(options, monkeypatch):
    snapshot = steps(Run(options), 1).snapshot()
    monkeypatch.setattr(run_module, "embedded_text", lambda: Text("other " * 100, "Python's own"))
    with pytest.raises(TrainingError, match="use the version of Python that it began with"):
        Run.resumed(snapshot)


def test_a_text_may_have_moved(options, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("to and fro " * 30)
    run = steps(Run(replace(options, text=str(first))), 2)
    first.rename(second)
    resumed = Run.resumed(run.snapshot(), text=str(second))
    assert_same(steps(run, 1), steps(resumed, 1))


def test_options_of_another_version_are_refused():
    with pytest.raises(TrainingError, match="another version of retrograde wrote them"):
        TrainingOptions.from_dict({"length": 5})


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, -(10**30)])
def test_a_seed_that_torch_would_not_take_is_refused(seed):
    with pytest.raises(TrainingError) as error:
        TrainingOptions(seed=seed)
    assert str(error.value) == (
        f"--seed is {seed}: expected 0 or more, at most 9,223,372,036,854,775,807; name a seed in "
        "that range"
    )
    assert TrainingOptions(seed=2**63 - 1).seed == 2**63 - 1


def test_threads_that_torch_would_crash_on_are_refused():
    with pytest.raises(TrainingError, match="--threads is 100000: expected at most 4,096"):
        TrainingOptions(threads=100_000)
    with pytest.raises(TrainingError, match="--threads is 0: expected a number above 0"):
        TrainingOptions(threads=0)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hidden", "16", "the option hidden is '16': expected a whole number"),
        ("seed", True, "the option seed is True: expected a whole number"),
        ("learning_rate", None, "the option learning_rate is None: expected a number"),
        ("memory", 5, "the option memory is 5: expected a text"),
    ],
)
def test_options_of_another_kind_are_refused(name, value, expected):
    values = TrainingOptions().as_dict() | {name: value}
    with pytest.raises(TrainingError) as error:
        TrainingOptions.from_dict(values)
    assert str(error.value).startswith(expected)
    assert str(error.value).endswith("so use that one, or start a new run")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_learning_rate_is_refused(rate):
    with pytest.raises(TrainingError, match=r"--learning-rate is .*: expected a number above 0"):
        TrainingOptions(learning_rate=rate)


def test_a_senseless_memory_is_refused_at_once():
    with pytest.raises(UnitError, match="unknown unit"):
        TrainingOptions(memory="5 parsecs")


def test_too_small_a_memory_names_the_minimum(options):
    with pytest.raises(BudgetError) as error:
        Run(replace(options, memory="1kB")).step()
    assert error.value.minimum_bytes > 1000


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_weights(options):
    run = Run(options)
    with torch.no_grad():
        run.model.linear.bias[0] = math.inf
    before = {name: value.clone() for name, value in weights(run).items()}
    with pytest.raises(TrainingError, match=r"the loss is .* --learning-rate below 0\.01"):
        run.step()
    assert run.done == 0
    assert all(torch.equal(before[name], value) for name, value in weights(run).items())
