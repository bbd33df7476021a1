"""One run at a time in a folder, and no lock that outlives its process."""

import errno
import os
import platform
import subprocess
import sys

import pytest

from retrograde.training import TrainingError, folder, hold

HOLDER = """
import sys, time
from pathlib import Path
from retrograde.training import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_is_held_by_one_at_a_time_and_the_holder_is_named(tmp_path):
    with hold(tmp_path) as alone:
        assert alone
        with pytest.raises(TrainingError) as error, hold(tmp_path):
            pass
        assert str(error.value) == (
            f"another run uses the report folder {tmp_path}: process {os.getpid()} on "
            f"{platform.node()} holds {tmp_path / '.lock'}; wait for it to end or stop it, or name "
            "another folder with --report"
        )
    assert list(tmp_path.iterdir()) == []
    with hold(tmp_path) as alone:
        assert alone


def test_a_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(KeyError), hold(tmp_path):
        raise KeyError
    with hold(tmp_path) as alone:
        assert alone


def test_a_killed_process_leaves_no_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(TrainingError, match=f"process {process.pid} on "), hold(tmp_path):
        pass
    process.kill()
    process.communicate()
    assert (tmp_path / ".lock").exists()
    with hold(tmp_path) as alone:
        assert alone


def test_a_file_that_its_holder_removes_meanwhile_is_not_what_is_held(tmp_path, monkeypatch):
    locked = []

    def slow(handle):
        if not locked:
            (tmp_path / ".lock").unlink()
        locked.append(handle)

    monkeypatch.setattr(folder, "_lock", slow)
    with hold(tmp_path) as alone:
        assert alone
        assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")
    assert len(locked) == 2


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def none(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder, "_lock", none)
    with hold(tmp_path) as alone:
        assert not alone


def test_another_error_of_locking_is_not_hidden(tmp_path, monkeypatch):
    def broken(handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "_lock", broken)
    with pytest.raises(OSError, match="Input/output error"), hold(tmp_path):
        pass
