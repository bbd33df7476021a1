"""No measured number is written by hand: pages show what the benchmarks' JSON says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location(
    "numbers_of", ROOT / "benchmarks" / "render_numbers.py"
)
numbers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(numbers)


@pytest.mark.quick(99)
@pytest.mark.parametrize("page", numbers.PAGES, ids=lambda p: p.name)
def test_a_page_shows_the_measured_numbers(page):
    assert numbers.rendered(page) == page.read_text(), "run `make numbers`"


def test_every_block_is_shown_somewhere_and_every_result_has_its_script():
    shown = {
        name for page in numbers.PAGES for _, name, *_ in numbers.BLOCK.findall(page.read_text())
    }
    assert shown == set(numbers.BLOCKS)
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert (ROOT / numbers.script_of(path.stem)).is_file(), path.name


def test_the_verdicts_on_wangs_speed_are_those_of_the_card():
    """docs/papers.md says where the scan is slower than cuDNN, and where faster."""
    rows = numbers.results("gpu_nvidia_h100_80gb_hbm3")["sections"]["backward"]
    ways = {row["name"]: row["ways"] for row in rows}
    for cell in ("RNN", "GRU"):
        for length, faster in (("1,000", False), ("10,000", True)):
            found = ways[f"{cell} 24→20, B=16, T={length}"]
            scan, torch = (found[way]["backward_seconds"] for way in ("scan", "torch"))
            assert (scan < torch) == faster
        short = ways[f"{cell} 24→20, B=16, T=1,000"]
        assert short["scan"]["forward_seconds"] > 2 * short["torch"]["forward_seconds"]


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_readme_says_where_checkpointing_takes_less_memory():
    rows = [row for row in numbers.results("front_page_cpu")["rows"] if row["checkpoint"]]
    lighter = {
        r["network"] for r in rows if r["checkpoint"]["total_bytes"] < r["ours"]["total_bytes"]
    }
    faster = {r["network"] for r in rows if r["checkpoint"]["ms"] < r["ours"]["ms"]}
    assert not lighter & faster
    last = numbers.front_page().split("\n\n")[0].splitlines()[-1]
    assert last.split(" | ")[0].removeprefix("| ") in lighter
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "takes less memory and more time than this library ([last row](docs/measured.md" in text
