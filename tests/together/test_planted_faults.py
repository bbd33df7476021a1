"""Each of twenty faults, planted in a copy of the source, is seen by a test of its place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oracles.planted_faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path):
    file, old, new, tests, words = FAULTS[name]
    shutil.copytree(ROOT / "src", tmp_path / "src")
    path = tmp_path / "src" / "retrograde" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    places = [str(tmp_path / "src"), *(str(ROOT / one) for one in ("papers", "tests"))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"tests/{tests}", "-k", words]
    command += ["-p", "no:cacheprovider", "--every"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout[-2000:]


def test_every_fault_has_its_place_and_no_two_are_alike():
    assert len(FAULTS) == 20
    assert len({(file, old) for file, old, *_ in FAULTS.values()}) == 20
    for file, old, _, tests, _ in FAULTS.values():
        assert (ROOT / "src" / "retrograde" / file).read_text().count(old) == 1, file
        assert (ROOT / "tests" / tests).exists(), tests
