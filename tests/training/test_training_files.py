"""Files that are whole or as they were, whatever happens while they are written."""

import errno
import signal
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from retrograde import files
from retrograde.figures.memory import Curve
from retrograde.training import (
    Comparison,
    Report,
    Run,
    Side,
    TrainingError,
    load_checkpoint,
    write_whole,
)
from retrograde.training.folder import write_figure

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
COMPARISON = Comparison(10**6, Side(10**5, 0.1, Curve((0.0, 0.1), (0, 10**5))), None, None, "none")


def fill(path):
    """Let the disk be full for the next write of a file."""
    path.with_name(path.name + ".partial").symlink_to(FULL)


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


@needs_full
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_is_told_with_the_path(tmp_path, size):
    path = tmp_path / "weights.pt"
    path.write_bytes(b"old")
    for write in (
        lambda file: file.write(bytes(size)),
        lambda file: torch.save(torch.zeros(size), file),
    ):
        fill(path)
        with pytest.raises(OSError, match="No space left on device") as error:
            write_whole(path, write)
        assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
        assert path.read_bytes() == b"old"
        assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_is_not_of_the_disk_stays_what_it_is(tmp_path):
    def fails(file):
        raise RuntimeError("no tensor")

    with pytest.raises(RuntimeError, match="no tensor"):
        write_whole(tmp_path / "file", fails)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_picture_on_a_full_disk_is_named_and_the_old_one_kept(tmp_path, monkeypatch, ending):
    write_figure(Figure(), tmp_path, "loss")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {"loss.svg", "loss.png"}
    savefig = Figure.savefig

    def full(figure, path, **options):
        savefig(figure, path, **options)
        if path.suffix == f".{ending}":
            path.write_bytes(b"ha")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        write_figure(Figure(), tmp_path, "loss")
    assert error.value.filename == str(tmp_path / f"loss.{ending}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@needs_full
def test_a_checkpoint_on_a_full_disk_leaves_the_one_before(options, tmp_path):
    report, run = Report(tmp_path), Run(options)
    run.step()
    fill(report.checkpoint)
    with pytest.raises(TrainingError) as error:
        report.save(run, COMPARISON)
    assert str(error.value) == (
        f"cannot write {report.checkpoint}: No space left on device; nothing of this run is saved "
        "yet: make room there, or make it a folder that can be written, and start the run again"
    )
    report.save(run, COMPARISON)
    run.step()
    fill(report.checkpoint)
    with pytest.raises(TrainingError, match=r"the last checkpoint stands.* go on with --resume$"):
        report.save(run, COMPARISON)
    assert len(load_checkpoint(report.checkpoint)["run"]["losses"]) == 1
    assert report.set_aside() == report.previous
    fill(report.checkpoint)
    with pytest.raises(
        TrainingError, match=r"an earlier run is kept as .*checkpoint\.previous\.pt"
    ):
        report.save(run, COMPARISON)


@needs_full
@pytest.mark.parametrize("name", ["metrics.json", "weights.pt"])
def test_a_report_on_a_full_disk_is_told_with_the_path(options, tmp_path, name):
    report, run = Report(tmp_path), Run(options)
    run.step()
    report.save(run, COMPARISON)
    fill(tmp_path / name)
    with pytest.raises(TrainingError) as error:
        report.finish(run, COMPARISON)
    assert str(error.value).startswith(f"cannot write {tmp_path / name}: No space left on device")
    assert load_checkpoint(report.checkpoint)["run"]["losses"] == run.losses


def test_a_picture_of_the_report_on_a_full_disk_is_told_with_the_path(
    options, tmp_path, monkeypatch
):
    def full(figure, path, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    report, run = Report(tmp_path), Run(options)
    run.step()
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(TrainingError) as error:
        report.finish(run, COMPARISON)
    assert str(error.value).startswith(f"cannot write {tmp_path / 'loss.svg'}: No space left on")


@needs_full
def test_a_full_disk_is_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "NamedTemporaryFile", lambda **_: FULL.open("wb"))
    with pytest.raises(TrainingError) as error:
        Report(tmp_path)
    assert str(error.value) == (
        f"cannot write the report folder {tmp_path}: No space left on device; make room there, or "
        "name one that can be written with --report"
    )
