"""``backward="auto"``, ``rg.explain`` and the measurements that they go by."""

import json
import os
import stat

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import retrograde as rg
from oracles.networks import CELLS, assert_close, gradients, pair
from retrograde.nn import backward_choice as choice
from retrograde.nn import calibration
from retrograde.nn.calibration import BACKWARDS, Timing, cache_file, timings
from retrograde.nn.call import Call

EVERY_CELL = pytest.mark.parametrize("cell", CELLS)


def timing(call, step):
    """Of a way that takes some seconds a call and some a step."""
    return Timing(tuple((steps, call + steps * step) for steps in (32, 64, 128)))


FIXED = {
    "torch": timing(0.0, 5e-6),  # fastest below 500 steps
    "sequential": timing(1e-3, 3e-6),  # then this one, up to 1000
    "scan": timing(3e-3, 1e-6),
}


@pytest.fixture
def fixed(monkeypatch):
    monkeypatch.setattr(choice, "timings", lambda *_: FIXED)


def module(**options):
    torch.manual_seed(0)
    return rg.GRU(3, 5, **{"backward": "auto", **options})


def test_an_unknown_way_is_refused_at_once_and_when_set_later():
    for type_ in (rg.RNN, rg.GRU, rg.LSTM):
        with pytest.raises(rg.CellError, match="unknown backward='fast': expected one of"):
            type_(3, 5, backward="fast")
        ours = type_(3, 5)
        ours.backward = "parallel"
        with pytest.raises(rg.CellError, match=r"unknown backward='parallel'.* or None"):
            ours(torch.randn(9, 2, 3))


@pytest.mark.parametrize("way", ["sequential", "scan", "auto"])
def test_projections_have_no_jacobian_here(way):
    ours = rg.LSTM(3, 5, proj_size=2, backward=way)
    for call in (ours, lambda x: rg.explain(ours, x)):
        with pytest.raises(rg.CellError, match=r"proj_size=2 has no Jacobian.* backward=None"):
            call(torch.randn(9, 2, 3))
    ours.backward = None
    assert ours(torch.randn(9, 2, 3))[0].requires_grad


def test_a_schedule_goes_its_own_way():
    with pytest.raises(rg.CellError, match=r"got a schedule and backward='scan'.*leave one out"):
        rg.LSTM(3, 5, backward="scan", schedule=rg.plan(9, 3))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(10, "torch"), (499, "torch"), (501, "sequential"), (999, "sequential"), (1001, "scan")],
)
def test_auto_takes_the_way_of_least_time(fixed, steps, expected, monkeypatch):
    ours = module()
    x = torch.randn(steps, 2, 3)
    assert choice.fastest(ours, steps, 2, False) == expected
    assert rg.explain(ours, x).choice == expected
    taken, run_back = [], Call.run_back

    def spy(call, way):
        taken.append(way)
        return run_back(call, way)

    monkeypatch.setattr(Call, "run_back", spy)
    ours(x)
    assert taken == ([] if expected == "torch" else [expected])


@EVERY_CELL
@pytest.mark.parametrize("best", BACKWARDS)
def test_autos_gradient_is_exact_whatever_it_takes(cell, best, monkeypatch):
    found = {way: timing(0, 1e-6 if way == best else 1e-5) for way in BACKWARDS}
    monkeypatch.setattr(choice, "timings", lambda *_: found)
    theirs, ours = pair(cell, 3, 5, backward="auto", dtype=torch.float64, num_layers=2)
    x = torch.randn(40, 2, 3, dtype=torch.float64, requires_grad=True)
    assert rg.explain(ours, x).choice == best
    assert_close(gradients(ours, x), gradients(theirs, x), 1e-10)


@EVERY_CELL
def test_auto_measures_where_it_knows_nothing(cell, cache):
    theirs, ours = pair(cell, 3, 5, backward="auto")
    x = torch.randn(40, 2, 3, requires_grad=True)
    assert_close(gradients(ours, x), gradients(theirs, x), 2e-6)
    assert cache_file() == cache / "retrograde" / "ways.json"
    assert cache_file().exists()
    packed = pack_sequence([torch.randn(n, 3) for n in (40, 12)])
    ours(packed)[0].data.sum().backward()


@pytest.mark.parametrize("way", ["sequential", "scan", None])
def test_only_auto_and_explain_measure(way, cache):
    module(backward=way)(torch.randn(40, 2, 3))
    assert not cache.exists()


def test_an_explanation_says_and_prints_what_it_knows(fixed):
    found = rg.explain(module(), torch.randn(700, 2, 3))
    assert found.choice == "sequential"
    assert found.why == "it is expected to be the fastest"
    assert found.kernels == "numba"
    assert found.chunk == 19  # about √(700 / 2)
    assert (
        set(found.seconds) == set(found.step_seconds) == set(found.call_seconds) == set(BACKWARDS)
    )
    assert found.seconds["sequential"] == pytest.approx(1e-3 + 700 * 3e-6)
    assert found.step_seconds["scan"] == pytest.approx(1e-6)
    assert found.call_seconds["scan"] == pytest.approx(3e-3)
    lines = str(found).splitlines()
    assert lines[0] == "sequential: it is expected to be the fastest"
    assert lines[1].split() == ["algorithm", "expected", "a", "step", "a", "call"]
    assert [line.split()[0] for line in lines[2:5]] == list(BACKWARDS)
    assert lines[3].split() == ["sequential", "3.10", "ms", "3.00", "µs", "1.00", "ms"]
    assert lines[5] == "kernels: numba; the scan's chunks: 19 steps"


@pytest.mark.parametrize(
    ("way", "expected", "why"),
    [
        ("scan", "scan", "backward='scan' asks for it"),
        ("sequential", "sequential", "backward='sequential' asks for it"),
        (None, "torch", "backward=None is torch's own pass"),
    ],
)
def test_an_explanation_of_what_was_asked_for(fixed, way, expected, why):
    found = rg.explain(module(backward=way), torch.randn(700, 2, 3))
    assert (found.choice, found.why) == (expected, why)


def test_an_explanation_takes_every_kind_of_input(fixed):
    for input, options in [
        (torch.randn(700, 3), {}),
        (torch.randn(2, 700, 3), {"batch_first": True}),
        (pack_sequence([torch.randn(n, 3) for n in (700, 20)]), {}),
        (torch.randn(700, 2, 3), {"num_layers": 2, "bidirectional": True}),
    ]:
        assert rg.explain(module(**options), input).choice == "sequential"


def test_an_explanation_names_what_keeps_kernels_from_being_used(fixed, monkeypatch):
    fake = type("K", (), {"name": "torch", "refusal": None, "wide": None})
    monkeypatch.setattr(choice, "kernels", lambda *_: fake)
    ours = module(backward="scan")
    assert (
        "no compiled kernels for torch.float32 on cpu" in rg.explain(ours, torch.randn(9, 2, 3)).why
    )
    ours = rg.GRU(3, 200, backward="scan")
    fake.name, fake.wide = "triton", object()
    why = rg.explain(ours, torch.randn(9, 2, 3)).why
    assert "H = 200 > 128 is too large for the scan's kernels" in why
    ours.backward = "sequential"
    assert rg.explain(ours, torch.randn(9, 2, 3)).why == "backward='sequential' asks for it"


def test_a_module_that_is_none_of_ours_cannot_be_explained():
    for net in (torch.nn.GRU(3, 5), torch.nn.Linear(3, 5)):
        name = type(net).__name__
        with pytest.raises(rg.CellError, match=f"got a {name}: expected an rg.RNN"):
            rg.explain(net, torch.randn(9, 2, 3))


def test_seconds_between_measurements_and_beyond():
    found = Timing(((32, 1.0), (64, 2.0), (128, 5.0)))
    assert [found.seconds(n) for n in (32, 48, 64, 96, 128)] == [1.0, 1.5, 2.0, 3.5, 5.0]
    assert found.seconds(192) == pytest.approx(8.0)  # on at the last latency
    assert found.seconds(1) == 1.0  # below the shortest nothing is known to be faster
    assert found.step_seconds == pytest.approx(3 / 64)
    assert found.call_seconds == 0  # 5 − 128 · 3/64 is less than nothing
    only = Timing(((32, 1.0),))
    assert only.seconds(64) == pytest.approx(2.0)
    noisy = Timing(((32, 1.0), (64, 0.9)))
    assert noisy.step_seconds == 0
    assert noisy.seconds(10**6) == pytest.approx(0.9)


def test_what_was_measured_is_kept_and_read_by_the_next_process(cache, monkeypatch):
    found = timings(module(), 2, 40, False)
    assert set(found) == set(BACKWARDS)
    assert all(seconds > 0 for t in found.values() for _, seconds in t.points)
    again = timings(module(), 2, 40, False)
    assert again is found
    calibration._KNOWN.clear()  # a new process
    monkeypatch.setattr(calibration, "_measure", None)
    assert timings(module(), 2, 40, False) == found
    assert list(cache.rglob("*.part")) == []


def test_what_a_timing_depends_on_is_told_apart(monkeypatch):
    calls = []

    def measured(*args):
        calls.append(args)
        return FIXED

    monkeypatch.setattr(calibration, "_measure", measured)
    asks = [
        (module(), 2, 40, False),
        (module(), 3, 40, False),
        (module(), 2, 40, True),
        (module(num_layers=2), 2, 40, False),
        (module(bidirectional=True), 2, 40, False),
        (module(bias=False), 2, 40, False),
        (module(dtype=torch.float64), 2, 40, False),
        (module().eval(), 2, 40, False),
        (rg.GRU(3, 6), 2, 40, False),
        (rg.GRU(4, 5), 2, 40, False),
        (rg.LSTM(3, 5), 2, 40, False),
        (rg.RNN(3, 5), 2, 40, False),
        (rg.RNN(3, 5, nonlinearity="relu"), 2, 40, False),
    ]
    for ask in asks * 2:
        timings(*ask)
    assert len(calls) == len(asks)
    timings(module(), 2, 100, False)  # within what was measured
    assert len(calls) == len(asks)
    timings(module(), 2, 1000, False)  # beyond it, and not yet long enough to go on from
    assert len(calls) == len(asks) + 1


@pytest.mark.parametrize(
    "content",
    ["", "no JSON", "[]", "3", "null", '{"key": 3}', '{"key": {"torch": [[1, "x"]]}}', "\0\xff"],
)
def test_a_file_that_makes_no_sense_costs_a_measurement(content, cache, monkeypatch):
    cache_file().parent.mkdir(parents=True)
    cache_file().write_bytes(content.encode("latin-1"))
    found = timings(module(), 2, 40, False)
    calibration._KNOWN.clear()
    monkeypatch.setattr(calibration, "_measure", None)
    assert timings(module(), 2, 40, False) == found
    json.loads(cache_file().read_text(encoding="utf-8"))


def test_an_entry_that_makes_no_sense_costs_a_measurement():
    timings(module(), 2, 40, False)
    content = json.loads(cache_file().read_text())
    for bad in ({}, {way: [] for way in BACKWARDS}, {way: [[32]] for way in BACKWARDS}):
        cache_file().write_text(json.dumps(dict.fromkeys(content, bad)))
        calibration._KNOWN.clear()
        found = timings(module(), 2, 40, False)
        assert all(t.points and t.points[0][1] > 0 for t in found.values()), bad


def test_a_folder_that_cannot_be_written_costs_a_measurement(cache, monkeypatch):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file where the folder should be")
    assert set(timings(module(), 2, 40, False)) == set(BACKWARDS)
    assert module()(torch.randn(40, 2, 3))[0].requires_grad


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs permissions that hold")
def test_a_folder_without_permissions_costs_a_measurement(cache):
    cache.mkdir()
    cache.chmod(stat.S_IRUSR)
    try:
        assert set(timings(module(), 2, 40, False)) == set(BACKWARDS)
    finally:
        cache.chmod(stat.S_IRWXU)


def test_the_cache_folder_follows_the_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "retrograde" / "ways.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "retrograde" / "ways.json"


@pytest.mark.parametrize("training", [True, False])
def test_measuring_leaves_no_trace(training):
    ours = module(num_layers=2, dropout=0.5, batch_first=True).train(training)
    ours.weight_ih_l0.grad = torch.ones_like(ours.weight_ih_l0)
    weights = {name: p.clone() for name, p in ours.state_dict().items()}
    attributes, before = dict(vars(ours)), torch.get_rng_state()
    x = torch.randn(2, 40, 3, requires_grad=True)
    state = torch.get_rng_state()
    rg.explain(ours, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(before, state)  # the input's own
    assert vars(ours) == attributes
    assert ours.training is training
    assert all(torch.equal(p, weights[name]) for name, p in ours.state_dict().items())
    assert torch.equal(ours.weight_ih_l0.grad, torch.ones_like(ours.weight_ih_l0))
    assert ours.weight_hh_l0.grad is None
    assert x.grad is None


def test_dropout_is_torchs_though_auto_measured_in_between():
    theirs, ours = pair("GRU", 3, 5, backward="auto", num_layers=2, dropout=0.5)
    x = torch.randn(40, 2, 3)
    outcomes = []
    for net in (ours, theirs):
        torch.manual_seed(5)
        outcomes.append(net(x)[0])
    torch.testing.assert_close(*outcomes)


def test_measuring_goes_on_until_the_length_is_reached_or_the_time_is_long_enough(monkeypatch):
    lengths = []

    def run(trial, way, steps, samples, needs_x):
        lengths.append((way, steps))
        return steps * {"torch": 5e-6, "sequential": 1e-5, "scan": 1e-4}[way]

    monkeypatch.setattr(calibration, "_run", run)
    found = calibration._measure(module(), 2, 200, False)
    assert [steps for steps, _ in found["torch"].points] == [32, 64, 128, 200]
    assert [steps for steps, _ in found["scan"].points] == [32, 64]  # 20 times as slow: given up
    found = calibration._measure(module(), 2, 10**6, False)
    last, seconds = found["torch"].points[-1]
    assert last == 2048  # the first that takes 10 ms
    assert seconds >= 0.01
    found = calibration._measure(module(), 2, 5, False)
    assert [steps for steps, _ in found["torch"].points] == [5]


def test_a_way_that_was_given_up_is_not_chosen_by_its_extrapolation():
    slow = calibration.Timing(((32, 0.01), (64, 0.01)))  # flat by chance: "free" steps
    quick = calibration.Timing(((32, 0.001), (64, 0.002), (128, 0.004), (512, 0.016)))
    found = {"torch": slow, "sequential": quick, "scan": slow}
    assert slow.seconds(10_000) < quick.seconds(10_000)
    assert calibration.contenders(found) == ["sequential"]
    assert calibration._reaches(found, 10_000)  # so the next call does not measure again
