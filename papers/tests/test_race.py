"""Races and seconds: the same batches for all, losses that agree, numbers that add up."""

import numpy as np
import pytest
import torch

from retrograde_papers.options import ExperimentError, Options, parse_choices, parse_numbers
from wang2020.bitstream import Bitstreams
from wang2020.classifier import classifiers
from wang2020.instruments import load_instruments
from wang2020.race import Runner, curves_of, race, runners_for
from wang2020.seconds import grid_of, measure_seconds

OPTIONS = Options(
    "bitstream", batch=4, iterations=7, learning_rate=1e-2, length=20, batches=(2,), lengths=(5,),
    rounds=1, ways=("torch", "sequential", "scan"),
)  # fmt: skip
SOUNDS = Options(
    "instruments", batch=8, epochs=30, learning_rate=1e-2, ways=("torch", "sequential", "scan")
)

GOLDEN_BITSTREAM = (2.42578, 2.4266, 2.3958, 2.26981, 2.38205, 2.20514, 2.27661)
GOLDEN_INSTRUMENTS = (1.04794, 0.00221)  # first and last point


def run(task, options):
    runners = runners_for(task, options)
    race(runners, task, options, lambda _: None)
    return runners


def twins(task, options):
    """Two runners that are torch's both."""
    models = classifiers("rnn", ("torch", "torch"), task.features, 20, task.classes, options.seed)
    return [
        Runner(name, model, torch.optim.Adam(model.parameters(), lr=options.learning_rate))
        for name, model in zip(("torch", "twin"), models, strict=True)
    ]


def test_torch_against_torch_is_the_same_to_the_last_bit():
    task = Bitstreams(20)
    runners = twins(task, OPTIONS)
    race(runners, task, OPTIONS, lambda _: None)
    curves = curves_of(runners, task, OPTIONS)
    assert curves.difference == {"torch": 0.0, "twin": 0.0}
    assert curves.losses["torch"] == curves.losses["twin"]
    assert curves.accuracy["torch"] == curves.accuracy["twin"]


def test_the_curves_of_bitstreams_are_the_golden_ones_every_way():
    curves = curves_of(run(Bitstreams(20), OPTIONS), Bitstreams(20), OPTIONS)
    assert curves.every == 1
    for way in OPTIONS.ways:
        assert curves.losses[way] == pytest.approx(GOLDEN_BITSTREAM, abs=1e-4)
        assert curves.difference[way] < 1e-5
        assert list(curves.seconds[way]) == sorted(curves.seconds[way])
        parts = curves.forward[way] + curves.backward[way]
        assert 0 < parts < curves.seconds[way][-1]
    assert curves.settings["iterations"] == 7
    assert curves.machine["torch"] == torch.__version__


@pytest.mark.quick(0)
def test_sounds_are_told_apart_equally_well_every_way(sounds):
    task = load_instruments(sounds, "s")
    curves = curves_of(run(task, SOUNDS), task, SOUNDS, "S")
    assert curves.settings["iterations"] == 30 * 3
    assert curves.every == 2
    assert len(curves.losses["scan"]) == 45
    for way in SOUNDS.ways:
        ends = curves.losses[way][0], curves.losses[way][-1]
        assert ends == pytest.approx(GOLDEN_INSTRUMENTS, abs=1e-3)
        assert curves.accuracy[way] > 0.8


def test_all_read_the_same_batches_and_each_begins_in_its_turn():
    task, order = Bitstreams(20), []

    class Spy(Runner):
        def step(self, inputs, targets):
            order.append((self.way, float(inputs.sum())))
            return super().step(inputs, targets)

    runners = [Spy(each.way, each.model, each.optimizer) for each in twins(task, OPTIONS)]
    race(runners, task, OPTIONS, lambda _: None)
    names = [way for way, _ in order]
    assert names[:6] == ["torch", "twin", "twin", "torch", "torch", "twin"]
    assert [total for _, total in order[::2]] == [total for _, total in order[1::2]]


def test_warming_up_trains_nothing():
    task = Bitstreams(20)
    (runner, _) = twins(task, OPTIONS)
    before = {name: value.clone() for name, value in runner.model.state_dict().items()}
    runner.warm_up(*task.training_samples(np.arange(4)))
    assert runner.first > 0
    assert not runner.laps
    for name, value in runner.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in runner.model.parameters())


def test_a_loss_that_is_not_finite_ends_the_race():
    task = Bitstreams(20)
    runners = twins(task, OPTIONS)
    with torch.no_grad():
        runners[1].model.linear.weight.fill_(float("inf"))
    with pytest.raises(ExperimentError, match="name a smaller --learning-rate"):
        race(runners, task, OPTIONS, lambda _: None)


def test_seconds_are_measured_over_lengths_and_batches():
    seen = []
    timings = measure_seconds(
        grid_of(OPTIONS, []), lambda _, length: Bitstreams(length), OPTIONS, seen.append
    )
    assert [(point.length, point.batch) for point in timings.points] == [(5, 4), (20, 2)]
    assert seen == list(timings.points)
    assert timings.ways == OPTIONS.ways
    for point in timings.points:
        for way in timings.ways:
            assert point.forward[way] > 0
            assert point.backward[way] > 0
            assert point.whole(way) > point.forward[way] + point.backward[way]


def test_the_grid_of_instruments_has_every_set_with_every_batch():
    options = Options("instruments", epochs=1, batches=(2, 4))
    grid = grid_of(options, [("S", 9), ("M", 13)])
    assert grid == [("S", 9, 2), ("S", 9, 4), ("M", 13, 2), ("M", 13, 4)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"iterations": 0}, "--iterations is 0: expected a number above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"epochs": 2}, "--iterations and --epochs: both given"),
        ({"iterations": None}, "--iterations and --epochs: neither given"),
        ({"seed": -1}, "--seed is -1: expected 0 or more"),
        ({"ways": ("scan",)}, "--ways is scan: expected torch"),
        ({"ways": ("torch",)}, "one of the others at least"),
        ({"ways": ("torch", "magic")}, "unknown way 'magic'"),
    ],
)
def test_options_that_make_no_sense_are_refused(values, expected):
    with pytest.raises(ExperimentError) as refusal:
        Options(**{"experiment": "bitstream", "iterations": 5} | values)
    assert expected in str(refusal.value)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ExperimentError, match="there are 884 training samples"):
        Options("instruments", epochs=1, batches=(1000,)).iterations_of(884)
    assert Options("instruments", epochs=2).iterations_of(884) == 110


@pytest.mark.parametrize("text", ["", "1,x", "0", "-3", "1.5", "²"])
def test_lists_of_numbers_that_are_none_are_refused(text):
    with pytest.raises(ExperimentError, match=r"--lengths is .* expected whole numbers above 0"):
        parse_numbers("--lengths", text)


def test_names_are_read_in_their_own_order_and_unknown_ones_refused():
    assert parse_choices("--set", "L, s", ("s", "m", "l")) == ("s", "l")
    assert parse_choices("--set", "all", ("s", "m", "l")) == ("s", "m", "l")
    with pytest.raises(ExperimentError, match="--set names 'xl': expected some of s, m, l, or all"):
        parse_choices("--set", "s,xl", ("s", "m", "l"))
    with pytest.raises(ExperimentError, match="--set is empty"):
        parse_choices("--set", ",", ("s", "m", "l"))


@pytest.mark.slow
def test_real_instruments_are_told_apart_well_above_chance_every_way(recordings):
    task = load_instruments(recordings, "s")
    options = Options("instruments", epochs=5, learning_rate=3e-3)
    curves = curves_of(run(task, options), task, options, "S")
    for way in options.ways:
        assert curves.accuracy[way] > 0.3  # chance is 0.09
        assert curves.accuracy[way] == pytest.approx(curves.accuracy["torch"], abs=0.05)
