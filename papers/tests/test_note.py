"""The note on the theorems: it compiles to two pages, and its numbers are the planner's."""

from bisect import bisect_left
from pathlib import Path

import pytest

import retrograde as rg

NOTE = Path(__file__).parents[1] / "note" / "note.typ"


def test_it_compiles_to_two_pages(tmp_path):
    typst = pytest.importorskip("typst", reason="typst is not installed: pip install typst")
    pages = typst.compile(str(NOTE), format="png", output=None)
    assert isinstance(pages, list)
    assert len(pages) == 2
    typst.compile(str(NOTE), output=str(tmp_path / "note.pdf"))
    assert (tmp_path / "note.pdf").read_bytes().startswith(b"%PDF")


def test_its_numbers_are_the_planners():
    text = NOTE.read_text()
    t, sizes = 10**9, {"alpha": 5}

    def least(n, policy, **sizes):
        memories = range(1, 2 * 10**6)
        return 1 + bisect_left(
            memories, True, key=lambda m: rg.cost(t, m, policy, **sizes) <= n * t
        )

    assert f" {rg.cost(t, 1000, 'msm', **sizes)} forward" in text
    for n in (2, 3, 4):
        hidden = least(n, "hsm") if n > 2 else ""
        row = f"[{n}], [{least(n, 'msm', **sizes)}], ", f" [{hidden}], [{5 * least(n, 'ism')}],"
        assert any(row[0] in line and row[1] in line for line in text.splitlines()), row
    assert (rg.cost(60, 5, "best", alpha=1), rg.cost(60, 5, "msm", alpha=1)) == (157, 160)
    reach = lambda m: sum((m - i) // 5 for i in range(m + 1))  # noqa: E731
    assert 1 + bisect_left(range(1, 10**4), 10**4, key=reach) == 318
