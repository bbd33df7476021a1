"""Checkpoints that are damaged, of another kind, or do not fit together: one message each."""

import copy
import random

import pytest
import torch
from rich.console import Console

from retrograde.figures.memory import Curve
from retrograde.training import (
    Comparison,
    Report,
    Run,
    Side,
    Text,
    TrainingError,
    load_checkpoint,
    resume,
    save_checkpoint,
)

COMPARISON = Comparison(10**6, Side(10**5, 0.1, Curve((0.0, 0.1), (0, 10**5))), None, None, "none")
REMEDY = "use a complete checkpoint of this version, or start a new run without --resume"


@pytest.fixture
def state(options):
    """What a checkpoint holds after an iteration."""
    run = Run(options, Text("the quick brown fox " * 20, "fox.txt"))
    run.step()
    return {"run": run.snapshot(), "comparison": COMPARISON.as_dict()}


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_damaged_checkpoint_is_said_to_be_so(options, tmp_path, size):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, Run(options).snapshot())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(
        TrainingError, match=r"checkpoint\.pt is damaged: it holds [\d,]+ bytes, expected those"
    ):
        load_checkpoint(path)


def test_foreign_files_are_no_checkpoints(tmp_path):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(TrainingError, match="there is no checkpoint"):
        load_checkpoint(path)
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(
        TrainingError, match="is not a checkpoint of `retrograde train`: it holds w"
    ):
        load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(
        TrainingError, match=r"it holds a list; expected the checkpoint\.pt of a run"
    ):
        load_checkpoint(path)
    torch.save(dict.fromkeys(range(9), 0), path)
    with pytest.raises(TrainingError, match="it holds 0, 1, 2, 3, 4, 5 and more; expected"):
        load_checkpoint(path)
    torch.save({"kind": "retrograde training checkpoint", "version": 0}, path)
    with pytest.raises(TrainingError, match="is of version 0, expected 1"):
        load_checkpoint(path)
    with pytest.raises(TrainingError, match="cannot read the checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"a text", bytes(1000), b"PK\x03\x04" + bytes(500), "module"])
def test_a_file_that_torch_cannot_read_is_refused(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    if content == "module":
        torch.save(torch.nn.Linear(1, 1), path)
    else:
        path.write_bytes(content)
    with pytest.raises(TrainingError, match=r"checkpoint\.pt is damaged: it holds"):
        load_checkpoint(path)


def test_every_changed_bit_is_found(state, tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, state)
    whole, chance = path.read_bytes(), random.Random(0)
    refused = []
    for _ in range(300):
        content, place = bytearray(whole), chance.randrange(len(whole))
        content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        try:
            same = load_checkpoint(path)
        except TrainingError as error:
            refused.append(str(error))
        else:  # a bit that nothing is read from
            assert str(same["run"]) == str(state["run"])
    expected = f"the checkpoint {path} is damaged: it holds {len(whole):,} bytes"
    assert all(message.startswith(expected) for message in refused)
    assert len(refused) > 150


def other_hidden(run):
    run["options"]["hidden"] = 32


def other_vocabulary(run):
    run["vocabulary"] += "Z"


def other_batch(run):
    run["options"]["batch"] = 3


def without_a_weight(run):
    del run["model"]["linear.bias"]


def with_a_weight_more(run):
    run["model"]["bias"] = torch.zeros(1)


def doubled(run):
    run["model"]["linear.bias"] = run["model"]["linear.bias"].double()


def without_moments(run):
    del run["optimizer"]["state"][3]


def other_moments(run):
    run["optimizer"]["state"][0]["exp_avg"] = torch.zeros(2, 2)


def without_state(run):
    run["state"] = None


def without_seconds(run):
    run["seconds"] = []


def losses_in_words(run):
    run["losses"] = ["good"]


def other_random(run):
    run["random"] = torch.zeros(3)


def without_groups(run):
    run["optimizer"]["param_groups"] = []


def without_model(run):
    del run["model"]


def options_of_another_kind(run):
    run["options"]["hidden"] = "wide"


def other_memory(run):
    run["options"]["memory"] = "5 parsecs"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            other_hidden,
            "model.embedding.weight has float32 of shape (16, 16): expected float32 of shape "
            f"(16, 32), for --hidden 32, --batch 4 and 16 characters; {REMEDY}",
        ),
        (
            other_vocabulary,
            "model.embedding.weight has float32 of shape (16, 16): expected float32 of shape "
            f"(17, 16), for --hidden 16, --batch 4 and 17 characters; {REMEDY}",
        ),
        (other_batch, "state[0] has float32 of shape (1, 4, 16): expected float32 of shape (1, 3"),
        (without_a_weight, "linear.weight: expected embedding.weight, lstm.weight_ih_l0"),
        (with_a_weight_more, "linear.bias, bias: expected embedding.weight"),
        (doubled, "model.linear.bias has float64 of shape (16,): expected float32 of shape (16,)"),
        (without_moments, "optimizer.state has 0, 1, 2, 4, 5, 6: expected 0, 1, 2, 3, 4, 5, 6"),
        (other_moments, "optimizer.state.0.exp_avg has float32 of shape (2, 2): expected float32"),
        (without_state, "state has None: expected 2 entries"),
        (without_seconds, "seconds has no entries: expected 1 entry"),
        (losses_in_words, "losses[0] has 'good': expected a number"),
        (other_random, "random has float32 of shape (3,): expected uint8 of shape"),
        (without_groups, "optimizer.param_groups has no entries: expected 1 entry"),
        (without_model, "the snapshot has options, text, vocabulary, optimizer, random, position"),
        (options_of_another_kind, "the option hidden is 'wide': expected a whole number"),
        (other_memory, "unknown unit 'parsecs'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_together_is_refused(tmp_path, state, change, expected):
    change(state["run"])
    report = Report(tmp_path)
    save_checkpoint(report.checkpoint, state)
    with pytest.raises(TrainingError) as error:
        resume(report, {}, Console(quiet=True))
    message = str(error.value)
    assert message.startswith(f"cannot resume from {report.checkpoint}: ")
    assert expected in message
    assert "start a new run" in message or change is other_memory


@pytest.mark.parametrize("run", [None, [], {"losses": []}])
def test_what_is_no_snapshot_is_refused(tmp_path, state, run):
    report = Report(tmp_path)
    save_checkpoint(report.checkpoint, state | {"run": run})
    with pytest.raises(
        TrainingError, match=r"cannot resume from .*: the snapshot has .*expected opt"
    ):
        report.load()
    with pytest.raises(TrainingError, match="the snapshot has"):
        Run.resumed(run)


@pytest.mark.parametrize("comparison", [None, 5, {}, {"ordinary": None}, {"ordinary": 1}])
def test_a_comparison_that_is_not_whole_is_refused(tmp_path, state, comparison):
    report = Report(tmp_path)
    save_checkpoint(report.checkpoint, state | {"comparison": comparison})
    with pytest.raises(
        TrainingError, match=r"cannot resume from .*the comparison .* is incomplete"
    ):
        report.load()


def test_a_refused_snapshot_changes_nothing(state):
    torch.manual_seed(4)
    expected = torch.rand(2)
    changed = copy.deepcopy(state["run"])
    other_hidden(changed)
    torch.manual_seed(4)
    with pytest.raises(TrainingError):
        Run.resumed(changed)
    assert torch.equal(torch.rand(2), expected)


def test_a_text_that_has_gone_is_told_with_the_checkpoint(tmp_path, state):
    report = Report(tmp_path)
    state["run"]["options"]["text"] = str(tmp_path / "gone.txt")
    save_checkpoint(report.checkpoint, state)
    with pytest.raises(TrainingError, match=r"cannot resume from .*: cannot read the text .*gone"):
        resume(report, {}, Console(quiet=True))
