"""The cases of ``simulated_device_cases.py``, in processes that end with them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("ours_however_short")

CASES = Path(__file__).with_name("simulated_device_cases.py")
PARTS = (
    "hardly_waits or launches or weights_that",
    "fit_and or overflow or steps or main_memory or under_way",
    "eval or no_call",
    "no_less",
)


@pytest.mark.quick(0)
@pytest.mark.parametrize("every", [[], pytest.param(["--every"], marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("part", PARTS)
def test_cases(part, every, request):
    command = [sys.executable, "-m", "pytest", str(CASES), "-k", part, "-p", "no:xdist", *every]
    run = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
    told = run.stdout[-4000:] + run.stderr[-1000:]
    assert run.returncode == 0, told
    assert " passed" in run.stdout, told


def test_every_case_is_in_a_part():
    names = [
        line[4:].split("(")[0]
        for line in CASES.read_text().splitlines()
        if line.startswith("def test_")
    ]
    words = [word for part in PARTS for word in part.split(" or ")]
    assert all(sum(word in name for word in words) == 1 for name in names), names
