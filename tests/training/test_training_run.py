"""Runs: that they learn, and that one taken up again is the one that never stopped."""

import math
import signal
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
    write_whole,
)


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
    with pytest.raises(TrainingError, match=r"other\.txt is not the one that this run began with"):
        Run.resumed(snapshot, text=str(path))


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


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_whole(path, lambda file: file.write(b"old"))

    def half(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_waits_until_the_file_is_whole(tmp_path):
    path = tmp_path / "file"

    def interrupted(file):
        file.write(b"wh")
        signal.raise_signal(signal.SIGINT)
        file.write(b"ole")

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert path.read_bytes() == b"whole"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_damaged_checkpoint_is_said_to_be_so(options, tmp_path, size):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, Run(options).snapshot())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TrainingError, match=r"checkpoint\.pt is damaged: start anew"):
        load_checkpoint(path)


def test_foreign_files_are_no_checkpoints(tmp_path):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(TrainingError, match="there is no checkpoint"):
        load_checkpoint(path)
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(TrainingError, match="is not a checkpoint of `retrograde train`"):
        load_checkpoint(path)
    torch.save({"kind": "retrograde training checkpoint", "version": 0}, path)
    with pytest.raises(TrainingError, match="is of version 0, expected 1"):
        load_checkpoint(path)
    with pytest.raises(TrainingError, match="cannot read the checkpoint"):
        load_checkpoint(tmp_path)
