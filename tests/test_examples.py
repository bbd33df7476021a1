"""The examples run, and do what they say."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import retrograde as rg
from oracles.loops import assert_bitwise, assert_near, gradients, leaves_of, loop

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DATA = Path(os.environ.get("RETROGRADE_DATA", ROOT.parent / "shared" / "data"))
SEQUENCES = ("sequential_mnist", "ecg", "spoken_digits")


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.quick(0)
def test_a_memory_cell_trains_within_5_percent(capsys):
    load("memory_cell").main(["--steps", "1"])
    *losses, ordinary, budget, peak = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in losses] == ["step   0"]
    assert ordinary.startswith("ordinary backpropagation takes")
    assert budget.startswith("the budget is")
    assert float(peak.split()[-1].rstrip("%")) <= 5.0


def test_a_memory_cells_gradient_is_that_of_the_loop():
    torch.manual_seed(0)
    example = load("memory_cell")
    cell = example.MemoryCell(4, 3, rows=5, width=4, hidden=7).double()
    x, _ = example.copy_task(12, 2, 3)
    x = x.double().requires_grad_()
    state = pytree.tree_map(lambda t: t.double().requires_grad_(), cell.initial_state(2))
    arguments = [x, *leaves_of(state)]
    wanted = [*arguments, *cell.parameters()]
    expected = gradients(*loop(cell, x, state), wanted)
    found = gradients(*rg.unroll(cell, x, state, memory="20%"), wanted)
    assert_bitwise(found[: len(arguments)], expected[: len(arguments)])
    assert_near(found, expected)


@pytest.fixture
def sequences(monkeypatch):
    """What the examples on real data share, where they can import it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("sequences")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Data of the form of the real ones, few and made up."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    images = random.integers(0, 256, (70, 28, 28), np.uint8)
    labels = np.arange(70, dtype=np.uint8) % 10
    np.savez(
        folder / "mnist.npz",
        train_x=images[:50], train_y=labels[:50], test_x=images[50:], test_y=labels[50:],
    )  # fmt: skip
    beats = np.arange(100, 43_200, 300)
    np.savez(
        folder / "ecg.npz",
        signal=random.integers(900, 1100, (2, 43_500), np.int16),
        beat_sample=np.concatenate([beats, beats + 7]).astype(np.int32),
        beat_symbol=np.resize(["N", "V", "L"], 2 * len(beats)),
        beat_offsets=np.array([0, len(beats), 2 * len(beats)], np.int32),
        window_is_test=np.array([False, False, False, True]),
    )
    lengths = random.integers(1100, 1500, 40)
    np.savez(
        folder / "fsdd.npz",
        samples=random.integers(-9000, 9000, lengths.sum(), np.int16),
        offsets=np.concatenate([[0], lengths.cumsum()]),
        speaker=np.arange(40, dtype=np.uint8) % 3,
        speaker_names=np.array(["anna", "bert", "cora"]),
        is_test=np.arange(40) % 10 == 0,
    )
    return folder


@pytest.mark.quick(0)
@pytest.mark.usefixtures("sequences")
@pytest.mark.parametrize("name", SEQUENCES)
def test_long_sequences_train_within_5_percent_as_they_do_ordinarily(
    name, folder, tmp_path, capsys
):
    load(name).run(["--data", str(folder), "--steps", "3", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / f"{name}.json").read_text())
    ways = {run["way"]: run for run in found["runs"]}
    usual, ours = ways["ordinary"]["working_bytes"], ways["budgeted"]["working_bytes"]
    assert ours <= found["budget_bytes"] == found["ordinary_bytes_extrapolated"] // 20
    assert abs(found["ordinary_bytes_extrapolated"] - usual) < 0.01 * usual
    losses = {way: run["first_losses"] for way, run in ways.items()}
    assert [len(losses[way]) for way in ("ordinary", "budgeted")] == [3, 3]
    assert losses["budgeted"] == pytest.approx(losses["ordinary"], abs=1e-5)
    assert abs(losses["truncated"][2] - losses["ordinary"][2]) > 1e-5
    assert ways["truncated"]["seconds"] >= ways["budgeted"]["seconds"]
    assert f"budgeted : measured peak {rg.units.format_bytes(ours)}" in printed
    assert (tmp_path / f"{name}.svg").exists()


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", SEQUENCES)
def test_some_of_the_ways_and_a_budget_in_bytes(name, sequences, folder, capsys):
    given = ["--data", str(folder), "--steps", "1", "--way", "truncated", "budgeted"]
    given += ["--memory", "20MiB", "--seed", "3"]
    load(name).run(given)
    printed = capsys.readouterr().out
    assert "the budget is 20 MiB" in printed
    assert "losses of truncated and budgeted differ" in printed
    assert "ordinary :" not in printed


@pytest.mark.quick(0)
@pytest.mark.parametrize("name", ["sequential_mnist", "ecg"])
def test_training_goes_on_exactly_where_it_was_interrupted(
    name, sequences, folder, tmp_path, monkeypatch
):
    clock = itertools.count()
    monkeypatch.setattr(sequences.time, "process_time", lambda: next(clock))
    given = ["--data", str(folder), "--steps", "4", "--every", "2", "--way", "budgeted"]
    given += ["truncated", "--save"]
    example = load(name)
    example.run([*given, str(tmp_path / "whole.pt")])
    task = next(value for value in vars(example).values() if hasattr(value, "held_out"))
    batch = task.batch
    for last in (3, 5):  # the third iteration of one way, then of the other
        batches = itertools.count()

        def until_then(self, iteration, batches=batches, last=last):
            if next(batches) == last:
                raise KeyboardInterrupt
            return batch(self, iteration)

        monkeypatch.setattr(task, "batch", until_then)
        with pytest.raises(KeyboardInterrupt):
            example.run([*given, str(tmp_path / "parts.pt")])
    monkeypatch.setattr(task, "batch", batch)
    example.run([*given, str(tmp_path / "parts.pt")])
    whole, parts = (
        pytree.tree_leaves(torch.load(tmp_path / f"{part}.pt")) for part in ("whole", "parts")
    )
    tensors = [leaf for leaf in parts if isinstance(leaf, torch.Tensor)]
    assert_bitwise(tensors, [leaf for leaf in whole if isinstance(leaf, torch.Tensor)])
    rest = [leaf for leaf in parts if not isinstance(leaf, torch.Tensor)]
    assert rest == [leaf for leaf in whole if not isinstance(leaf, torch.Tensor)]


def test_another_training_is_not_gone_on_with(sequences, folder, tmp_path, capsys):
    given = ["--data", str(folder), "--way", "truncated", "--out", str(tmp_path)]
    given += ["--save", str(tmp_path / "one.pt"), "--steps"]
    load("sequential_mnist").run([*given, "1"])
    for elsewhere in ([], ["--save", str(tmp_path / "other.pt")]):
        with pytest.raises(SystemExit):
            load("sequential_mnist").run([*given, "2", *elsewhere])
        assert "this training" in capsys.readouterr().err


@pytest.mark.usefixtures("sequences")
@pytest.mark.parametrize("name", SEQUENCES)
def test_data_that_are_not_there_are_named(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        load(name).run(["--data", str(tmp_path)])
    assert exit.value.code == 2
    assert f"{tmp_path}/" in capsys.readouterr().err


def grads_of(model):
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["sequences", "ecg"])
def test_the_ways_agree_where_nothing_is_cut_off(name, sequences):
    torch.manual_seed(0)
    last = name == "sequences"
    make = sequences.Model if last else load("ecg").BeatModel
    model = make(2, 9, 4 if last else 1, steps=20).double()
    x = torch.randn(65, 3, 2, dtype=torch.float64)
    targets = torch.randint(4, (3,)) if last else torch.randint(-1, 2, (65, 3))
    model.aim(sequences.Batch(x, targets))
    loss = sequences.ordinary(model, x)
    expected = grads_of(model)
    assert sequences.truncated(model, x, 65) == loss
    assert_bitwise(grads_of(model), expected)
    assert sequences.budgeted(model, x, "30%") == pytest.approx(loss, rel=1e-12)
    assert_near(grads_of(model), expected)
    assert sequences.truncated(model, x, 8) == pytest.approx(loss, rel=1e-12)
    cut = model.lstm.weight_hh_l0.grad
    assert (cut - expected[1]).norm() > 0.01 * expected[1].norm()


def test_units_begin_with_memories_of_all_lengths(sequences):
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(1, 200)
    sequences.remember(lstm, 1000)
    let_in, keep = lstm.bias_ih_l0[:200], lstm.bias_ih_l0[200:400]
    assert torch.equal(let_in, -keep)
    assert 400 < keep.exp().mean() < 600


@pytest.mark.usefixtures("sequences")
def test_beats_are_told_after_their_delay_and_never_in_another_window(folder):
    example = load("ecg")
    with np.load(folder / "ecg.npz") as data:
        told = example.targets(data)
        at, symbols = data["beat_sample"][: data["beat_offsets"][1]], data["beat_symbol"]
    (due,) = np.flatnonzero(told[0] != example.NO_BEAT)[None]
    inside = at // example.LENGTH == (at + example.DELAY) // example.LENGTH
    assert (due == at[inside] + example.DELAY).all()
    assert (told[0][due] == (symbols[: len(at)][inside] == "V")).all()


@pytest.mark.usefixtures("sequences")
def test_recordings_of_a_batch_end_together(folder):
    example = load("spoken_digits")
    with np.load(folder / "fsdd.npz") as data:
        samples = np.split(data["samples"], data["offsets"][1:-1])[:3]
    batch = example.together([(one, 0) for one in samples])
    assert batch.inputs.shape == (1536, 3, 2)
    for column, one in enumerate(samples):
        sound = batch.inputs[:, column, 0].numpy()
        assert not sound[: 1536 - len(one)].any()
        assert (np.sign(sound[1536 - len(one) :]) == np.sign(one)).all()


@pytest.mark.usefixtures("sequences")
@pytest.mark.parametrize(
    ("name", "kind", "file", "length"),
    [
        ("sequential_mnist", "Digits", "mnist", 784),
        ("ecg", "Beats", "ecg", 10_800),
        ("spoken_digits", "Speech", "fsdd", 18_432),
    ],
)
def test_real_data_are_read_whole(name, kind, file, length):
    if not (DATA / f"{file}.npz").exists():
        pytest.skip(f"no {file}.npz in {DATA}")
    task = getattr(load(name), kind)(DATA)
    x = task.longest().inputs
    assert len(x) == length
    assert 0.2 < x[..., 0].std() < 3
    assert torch.equal(task.batch(3).inputs, task.batch(3).inputs)


@pytest.mark.parametrize("name", SEQUENCES)
def test_what_is_told_of_the_examples_is_so(name):
    found = json.loads((EXAMPLES / "results" / f"{name}.json").read_text())
    ours = [run for run in found["runs"] if run["way"] == "budgeted"]
    assert len(ours) > 1
    for run in ours:
        assert run["working_bytes"] <= 0.05 * found["ordinary_bytes_extrapolated"]
        assert np.mean(run["losses"][-5:]) < 0.6 * np.mean(run["losses"][:5])
    for run in found["runs"]:
        if run["way"] == "ordinary":
            first = next(each for each in ours if each["seed"] == run["seed"])["first_losses"]
            assert first == pytest.approx(run["first_losses"], abs=1e-4)


@pytest.mark.quick(0)
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.usefixtures("sequences")
def test_ecg_across_ranks_trains_as_one_process_and_goes_on_from_another_number(folder, tmp_path):
    told, saved = tmp_path / "losses.json", ["--save", str(tmp_path / "saved"), "--every", "2"]

    def options(iterations, *more):
        return ["--data", str(folder), "--iterations", str(iterations), *more]

    alone = load("train_time_sharded").run(options(4))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "train_time_sharded.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, *options(2, "--losses", str(told), *saved)],
        check=True,
        capture_output=True,
        env=environment,
    )
    resumed = load("train_time_sharded").run(options(4, *saved))
    assert [*json.loads(told.read_text()), *resumed] == pytest.approx(alone, rel=1e-4)
