"""The walks of "How to add …": each is followed as written, in a copy of the source."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "retrograde"
PAGE = (ROOT / "docs" / "how_to_add.md").read_text()
WALKS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
CUDA = SOURCE / "kernels" / "cuda"


def blocks(walk, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", walk, re.MULTILINE | re.DOTALL)


def edits(block):
    """The file of a block, and its changes: lines that stand there, and what replaces them.

    A change ends where an unchanged line, or one that goes, follows a new one.
    """
    head, *lines = block.splitlines()
    assert head.startswith("--- "), head
    changes, new = [([], [])], False
    for line in lines:
        mark, text = line[:1] or " ", line[1:]
        if mark != "+" and new:
            changes.append(([], []))
        new = mark == "+"
        if mark != "+":
            changes[-1][0].append(text)
        if mark != "-":
            changes[-1][1].append(text)
    return head[4:], changes


def follow(walk, folder, only=""):
    """Make the edits of a walk in a folder: of files whose path begins so."""
    for block in blocks(walk, "diff"):
        name, changes = edits(block)
        path = folder / name
        if not name.startswith(only):
            continue
        for old, new in changes:
            if not any(old):
                assert not path.exists(), name
                path.write_text("\n".join(new) + "\n")
                continue
            text = path.read_text()
            assert text.count("\n".join(old)) == 1, f"{name}: {old}"
            path.write_text(text.replace("\n".join(old), "\n".join(new)))


def run(walk, folder):
    """The output of each command of a walk, and whether it went well."""
    for line in "".join(blocks(walk, "sh")).splitlines():
        _, *words = shlex.split(line)
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, capture_output=True, text=True,
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": "src:papers:tests"},
        )  # fmt: skip
        yield done.returncode, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.fixture
def copy(tmp_path):
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_works_as_written(name, copy):
    follow(WALKS[name], copy)
    for code, told in run(WALKS[name], copy):
        assert code == 0, told


@pytest.mark.quick(0, every=1)
@pytest.mark.parametrize("name", WALKS)
def test_its_tests_fail_while_the_library_is_unchanged(name, copy):
    follow(WALKS[name], copy, "tests/")
    assert any(code for code, _ in run(WALKS[name], copy))


def test_every_file_that_the_page_names_exists():
    new = {edits(block)[0] for block in blocks(PAGE, "diff")}
    for path in set(re.findall(r"`((?:src|tests|docs)/[\w/.]+)`", PAGE)) | new:
        made = any(not any(old) for b in blocks(PAGE, "diff") if edits(b)[0] == path
                   for old, _ in edits(b)[1])  # fmt: skip
        assert (ROOT / path).exists() != made, path


def test_what_depends_on_the_device_is_in_the_table():
    rows = re.findall(r"^\| (`.*?`) \|", WALKS["A device"], re.MULTILINE)
    shown = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    asks = re.compile(r"\bcuda\b|is_cuda")
    found = {
        str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")
        if CUDA not in path.parents and asks.search(_code(path))
    }  # fmt: skip
    assert shown == found


def _code(path):
    """A file without docstrings and comments, and without imports from ``kernels/cuda``."""
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"#.*|^\s*from retrograde.*", "", text, flags=re.MULTILINE)
