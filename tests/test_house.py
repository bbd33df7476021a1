"""The shape of the house: imports run downward, nothing loads before it is needed, docs run."""

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "retrograde"

LEVELS = [
    {"errors", "torch_private"},
    {"units", "machine", "compiler"},
    {"schedule"},
    {"plan"},
    {"replay", "kernels"},
    {"run"},
    {"sizes", "jax"},
    {"scan"},
    {"recurrent"},
    {"cells"},
    {"models"},
    {"ranks", "figures"},
    {"precompile"},
    {"cli"},
]
LEVEL = {name: i for i, names in enumerate(LEVELS) for name in names}

# Lines of a room at most, and what it should come down to. A room that grows takes its lines from
# another, or deletes. ``top`` is the files beside the rooms.
ROOMS = {
    "top": (1060, 900),
    "schedule": (1134, 1150),
    "plan": (2764, 2500),
    "sizes": (1276, 1200),
    "replay": (1100, 1100),
    "run": (2483, 1950),
    "kernels": (4914, 4000),
    "recurrent": (3212, 2600),
    "cells": (2555, 2200),
    "models": (5982, 3700),
    "scan": (3336, 3700),
    "ranks": (982, 1100),
    "jax": (1010, 1000),
    "figures": (442, 450),
}
MOST_LINES = 400  # of a file
# Words that could name anything, and the most functions that may bind one of them.
VAGUE = {"found", "given", "held", "kind", "known", "one", "own", "parts", "first", "rows"}
MOST_FUNCTIONS = 60
MOST_SCRIPTS, MOST_SCRIPT_LINES = 18, 5000  # of the benchmarks


def imports(path):
    """The parts of this package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("retrograde.")
        ):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "retrograde":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("retrograde."):
                    yield alias.name.split(".")[1]


# What has the public names of a folder, and loads those of others when they are asked for.
FRONTS = {PACKAGE / "__init__.py", PACKAGE / "scan" / "__init__.py"}
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p not in FRONTS]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    mine = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for theirs in imports(path):
        if theirs in LEVEL and theirs != mine:
            assert LEVEL[theirs] < LEVEL[mine], f"{path} imports {theirs}"


def room_of(path):
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top"


def lines_of(path):
    return len(path.read_text().splitlines())


def test_no_room_grows():
    lines = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[room_of(path)] += lines_of(path)
    assert lines.keys() == ROOMS.keys()
    assert {room: n for room, n in lines.items() if n > ROOMS[room][0]} == {}


def test_a_file_is_read_in_a_sitting():
    assert [p.name for p in PACKAGE.rglob("*.py") if lines_of(p) > MOST_LINES] == []


def bound(node):
    """The names that a function binds, not those of functions within it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from bound(child)


def test_no_word_names_many_things():
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    functions = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    counts = Counter(name for function in functions for name in {*bound(function)} & VAGUE)
    assert {name: n for name, n in counts.items() if n > MOST_FUNCTIONS} == {}


def test_benchmarks_are_few_and_each_is_named_where_one_looks():
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    assert len(scripts) <= MOST_SCRIPTS
    assert sum(map(lines_of, scripts)) <= MOST_SCRIPT_LINES
    pages = [ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert [path.name for path in scripts if f"benchmarks/{path.name}" not in text] == []


# Whose names begin with "_", but which other libraries use too: pytrees, the base of modes, and the
# compiler, which is only asked for if it is loaded.
_SHARED = r"(?!utils\._pytree|utils\._python_dispatch|_dynamo)"
_OF_TORCH = re.compile(
    rf"\b(?:from |import )?torch\.{_SHARED}(?:[a-zA-Z]\w*\.)*_[a-zA-Z]\w*"
    r"|\._(?:raw_saved|input_metadata|sequence_nr|cdata|execution_engine|base|flat_weights)\b"
)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_names_of_torch_stand_in_one_file(path):
    found = set(_OF_TORCH.findall(path.read_text()))
    assert path.name == "torch_private.py" or not found


def modules(path):
    """The modules of this package that a file imports, but for its type checker."""
    tree = ast.parse(path.read_text())
    unread = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in unread or not isinstance(node, ast.ImportFrom):
            continue
        if (node.module or "").startswith("retrograde."):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


MODULES = {
    ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p
    for p in PACKAGE.rglob("*.py")
}


def test_no_module_imports_itself_through_others():
    graph = {name: set(modules(path)) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_every_part_of_the_house_has_a_level():
    parts = {p.relative_to(PACKAGE).with_suffix("").parts[0] for p in FILES}
    assert parts <= LEVEL.keys()


# Rooms whose early releases say what they are for. Others follow.
@pytest.mark.quick(3)
@pytest.mark.parametrize("room", ["replay", "run", "cells"])
def test_what_is_released_early_for_a_budget_says_so(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets):
                assert "  # BUDGET: " in lines[node.lineno - 1], f"{path}:{node.lineno}"


@pytest.mark.quick(0)
def test_the_wheel_holds_the_library_only(tmp_path):
    copy = tmp_path / "copy"  # where nothing was built before
    shutil.copytree(PACKAGE, copy / "src" / "retrograde", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", tmp_path, copy], check=True)
    (wheel,) = tmp_path.glob("retrograde-*.whl")
    with ZipFile(wheel) as file:
        names = file.namelist()
    inside = {name for name in names if name.startswith("retrograde/")}
    assert inside == {str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.py")} | {
        "retrograde/py.typed"
    }
    assert all(name in inside or ".dist-info/" in name for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_library_knows_nothing_of_the_papers(path):
    text = path.read_text()
    for package in ("gruslys2016", "wang2020", "retrograde_papers"):
        assert package not in text


def modules_after(statement):
    code = f"{statement}\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import retrograde", {"torch", "numba", "matplotlib"}),
        ("import retrograde as rg; rg.cost(1000, 50)", {"torch", "numba", "matplotlib"}),
        ("import retrograde as rg; rg.plan(10, 4)", {"torch", "numba", "matplotlib"}),
        ("import retrograde as rg; rg.plan(10, 9, 'msm', alpha=3)", {"torch", "matplotlib"}),
        ("import retrograde.cli", {"torch", "numba", "matplotlib"}),
    ],
)
def test_nothing_is_loaded_before_it_is_needed(statement, absent):
    assert not modules_after(statement) & absent


def test_what_is_compiled_runs_without_what_compiling_needs():
    """Neither numba's set-up nor torch's symbolic shapes are loaded, which take time and memory."""
    statement = "import torch, retrograde as rg; x = torch.randn(60, 2, 4, requires_grad=True); "
    statement += "rg.LSTM(4, 4, memory='20%')(x)[0].sum().backward()"
    modules_after(statement)  # compiles where no process has done so
    assert not modules_after(statement) & {"numba.np.linalg", "sympy"}


@pytest.mark.quick(0)
def test_plan_is_the_function_whichever_module_comes_first():
    code = "import retrograde as rg; rg.LSTM; rg.unroll; print(rg.plan(1000, 50).cost)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "2948"


def test_public_names_exist_and_are_documented():
    import retrograde as rg

    for name in rg.__all__:
        assert getattr(rg, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        rg.frobnicate  # noqa: B018
    assert set(rg.__all__) <= set(dir(rg))


def python_blocks(path):
    """The ```python blocks of a page, in order, with where they stand."""
    lines, block, start = path.read_text().splitlines(), None, 0
    for number, line in enumerate(lines, 1):
        if line.strip() == "```python":
            block, start = [], number
        elif line.strip() == "```" and block is not None:
            yield start, "\n".join(block)
            block = None
        elif block is not None:
            block.append(line)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.quick(99)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_code_of_every_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for line, block in python_blocks(page):
        if "import jax" in block:
            pytest.importorskip("jax")
        code = compile("\n" * line + block, str(page), "exec")
        exec(code, names)
