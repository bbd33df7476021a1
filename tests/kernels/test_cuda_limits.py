"""Every card gets launches that fit it: by counting, and by compiling for it with no GPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from retrograde.kernels.cuda.limits import launch

LIMITS = {"sm_75": 65_536, "sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448}
SIZES = [1, 7, 16, 20, 33, 64, 65, 100, 128]
CARDS = {"80": 166_912, "86": 101_376, "90": 232_448, "120": 101_376}
GATES = {1: "RNN", 3: "GRU", 4: "LSTM"}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("kernel", ["products", "carry", "sweep"])
def test_a_launch_fits_the_card(kernel, limit):
    for size in SIZES:
        for gates in GATES:
            form = launch(kernel, gates, size, limit, tf32=True)
            if form is None:
                assert (kernel, limit) == ("products", 65_536)
                assert size > 64
                continue
            assert form.shared_bytes <= limit
            assert size <= form.padded <= max(16, 2 * size - 1)


def test_less_shared_memory_has_fewer_stages():
    assert [launch("carry", 4, 64, limit).stages for limit in (232_448, 101_376, 65_536)] == [
        2,
        2,
        1,
    ]
    assert [launch("products", 1, 128, limit).stages for limit in (101_376, 82_500)] == [3, 1]
    assert launch("products", 1, 128, 81_919) is None


def test_tensor_cores_are_used_where_they_are_allowed_and_do_not_spill():
    assert launch("products", 4, 64, 101_376, tf32=True).tf32
    assert not launch("products", 4, 64, 101_376).tf32
    assert not launch("products", 4, 65, 101_376, tf32=True).tf32
    assert not launch("products", 4, 64, 65_536, tf32=True).tf32


def compiled(architecture, size, *options):
    """What the kernels' host code launches, compiled for a card."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("compiled_launches.py")
    command = [sys.executable, program, architecture, size, *options]
    compiling = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(command, capture_output=True, text=True, env=compiling)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_fits(reports, limit):
    """Shared memory, spills, tensor cores; and what is promised of shared memory beforehand."""
    for report in reports:
        constants = report["constants"]
        assert report["shared_bytes"] <= limit, report
        assert report["spilt_bytes"] <= (328 if constants.get("H", 1) > 64 else 8), report
        assert report["tensor_cores"] == constants.get("TF32", False), report
        gates = 4 if constants.get("LSTM") else constants.get("K", 1)
        if report["kernel"] in ("products", "carry", "sweep"):
            tf32 = constants.get("TF32", False)
            form = launch(report["kernel"], gates, constants["H"], limit, tf32)
            assert report["shared_bytes"] <= form.shared_bytes, report


def assert_safe_to_write_over(reports):
    """The hazard: a sweep's load of a number may be made by several threads, since the compiler
    lays a load out twice or copies it to all warps. The thread that writes the number over needs
    only its own copy. Another thread that loads late would then read a gradient for a slope. The
    interpreter runs one thread, and cannot see it.

    What proves it safe: between the reading and the writing of a step's numbers stands a barrier of
    all threads. With loads ahead it is the ``bar.sync`` after ``cp.async.wait_group N``, where N
    allows only copies of later steps to be under way; these are of other numbers. With one stage it
    is the kernel's own (``gpu.barrier`` in the GPU dialect). So it is in the two kernels that make
    slopes. See :mod:`oracles.compiled_code`.

    A step of a wide layer reads a row of the gates, and writes the one before it.
    """
    sweeps = {"sweep": ["gates"]}
    expected = {"gru_slopes": ["hidden"], "lstm_slopes": ["gates"], **sweeps}
    expected["forward"] = ["h_state"]
    for report in reports:
        if report["kernel"] == "step":
            names = ["gates", *["inner"] * (report["constants"]["K"] == 3), "state"]
            assert sorted({name.split("_")[0] for name in report["overwritten"]}) == names
            unsafe = [told for told in report["unsafe"] if "is read in two ways" not in told]
            assert unsafe == [], report
            continue
        names = expected.get(report["kernel"], [])
        if report["kernel"] in sweeps and report["constants"]["K"] == 3:
            names = ["gates", "inner"]
        if report["kernel"] == "forward" and report["constants"]["K"] == 4:
            names = ["c_state", "h_state"]
        assert report["overwritten"] == names, report
        assert report["unsafe"] == [], report


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("architecture", CARDS)
@pytest.mark.parametrize("size", ["20", "128"])
def test_kernels_compile_within_a_card(architecture, size):
    """RNNs with tanh and with ReLU share their kernels: slopes of one gate."""
    reports = compiled(architecture, size)
    products = 3 * (2 if size == "20" else 1)  # with TF32 and without
    # Forward passes, carries, sweeps checked or not, slopes.
    assert len(reports) == products + 3 + 2 + 2 * 3 + 2
    assert_fits(reports, CARDS[architecture])
    assert_safe_to_write_over(reports)


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("architecture", CARDS)
def test_kernels_of_wide_layers_compile_within_a_card(architecture):
    reports = compiled(architecture, "256")
    assert len(reports) == 1 + 3 * 2 * 2 + 2  # begin, step in four forms, slopes
    assert_fits(reports, CARDS[architecture])
    assert_safe_to_write_over(reports)


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("size", ["64", "20", "128"])
def test_a_step_of_a_small_layer_waits_for_other_threads_seldom(size):
    """Latency is all that matters there: barriers, and numbers that threads exchange."""
    for report in compiled("90", size):
        counts = Counter(report["loop"])
        if report["kernel"] == "sweep":
            assert counts["BAR"] <= 5, report
            assert counts["SHFL"] <= 2, report
            assert sum(counts.values()) <= (320 if size == "128" else 190), report
        if report["kernel"] == "forward":
            assert counts["BAR"] <= 6, report
            assert counts["SHFL"] <= 1, report
            assert sum(counts.values()) <= (400 if size == "128" else 250), report
        if report["kernel"] in ("sweep", "forward"):
            assert report["registers"] <= 128, report
            assert report["spilt_bytes"] == 0 or size == "128", report


@pytest.mark.quick(0)
def test_a_step_of_a_wide_layer_is_a_plain_product():
    for report in compiled("90", "256"):
        if report["kernel"] == "step":
            counts, constants = Counter(report["loop"]), report["constants"]
            large, total = constants["TILE"] == 32, sum(counts.values())
            assert report["registers"] <= 128, report
            assert report["spilt_bytes"] == 0, report
            assert total <= (200 if constants["TF32"] else 480), report
            if constants["TF32"]:
                assert counts["HMMA"] >= (0.08 if large else 0.05) * total, report


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["75", *CARDS])
@pytest.mark.parametrize("size", ["1", "20", "33", "64", "100", "128", "129", "1000", "sparse"])
def test_every_launch_compiles_within_a_card(architecture, size):
    limit = {"75": 65_536, **CARDS}[architecture]
    reports = compiled(architecture, size, "--all")
    least = 8 if architecture == "75" else 22  # sm_75 only sweeps more than 64 units
    assert len(reports) >= (16 if size == "sparse" else least)
    assert_fits(reports, limit)
    assert_safe_to_write_over(reports)
