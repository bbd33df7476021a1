"""What `make` says where an installation cannot work: an old Python, pins that contradict."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKEFILE = ROOT / "Makefile"


def project(folder):
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def make(folder, *arguments):
    for name in ("pyproject.toml", "papers/pyproject.toml", "constraints.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    command = ["make", "-C", folder, "-f", MAKEFILE, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_extra_is_resolved():
    asked = re.findall(r"'-e (\S+)\[(.+?)\]'", MAKEFILE.read_text())
    assert {place: extras.split(",") for place, extras in asked} == {
        place: sorted(project(place)["optional-dependencies"]) for place in (".", "papers")
    }


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("resolver", "status", "said"),
    [
        ("echo 'error: Failed to fetch: somewhere' >&2; exit 2", 0, "skipped: no package index"),
        ('case "$*" in *--no-deps*) ;; *) echo "No solution" >&2; exit 1;; esac', 2, "No solution"),
        ("exit 0", 0, "Python 3.11: all extras resolve\nPython 3.13: all extras resolve\n"),
    ],
    ids=["no network", "a conflict", "no conflict"],
)
def test_only_a_network_that_is_not_there_is_skipped(tmp_path, resolver, status, said):
    program = tmp_path / "uv"
    program.write_text(f"#!/bin/sh\n{resolver}\n")
    program.chmod(0o755)
    run = make(tmp_path, "check-install", f"BIN={tmp_path}", "-o", ".venv/.installed")
    assert (run.returncode, said in run.stdout + run.stderr) == (status, True)


@pytest.mark.parametrize("target", [".venv/.installed", "wheel"])
def test_an_old_python_is_named_at_once(tmp_path, target):
    old = tmp_path / "old.py"
    pretended = "sys.version_info, sys.version = (3, 10, 2), '3.10.2 (main)'"
    old.write_text(f"import sys; {pretended}; exec(sys.argv[2])")
    run = make(tmp_path, target, f"PYTHON={sys.executable} {old}")
    least = project(".")["requires-python"].removeprefix(">=")
    told = f"found Python 3.10.2: expected {least} or newer; name one: make PYTHON=python3.12\n"
    assert run.stderr.startswith(told)
    assert run.returncode == 2
