"""Products of many rows, against torch's in a wider type."""

import pytest
import torch

from retrograde.kernels.cpu.llvm import threads as team
from retrograde.kernels.cpu.products import add_outer, linear, times

ROWS = pytest.mark.parametrize("rows", [1, 5, 127, 128, 515, 1030])
SHAPES = pytest.mark.parametrize(("terms", "columns"), [(1, 1), (37, 111), (300, 48), (513, 50)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    monkeypatch.setattr(team, "THREAD_WORK", 1)


def compare(found, exact, terms):
    """Compare sums of random products, of which each may round a sum of all before it."""
    tolerance = 4 * torch.finfo(found.dtype).eps * (terms + 4)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=max(tolerance, 1e-12))


@DTYPES
@ROWS
@SHAPES
@pytest.mark.quick(12)
def test_products_are_torchs(dtype, rows, terms, columns):
    torch.manual_seed(rows * terms)
    x, w = torch.randn(rows, terms, dtype=dtype), torch.randn(columns, terms, dtype=dtype)
    g, bias = torch.randn(rows, columns, dtype=dtype), torch.randn(columns, dtype=dtype)
    out, dx = torch.full_like(g, torch.nan), torch.full_like(x, torch.nan)
    total = torch.ones_like(w)
    wide = [t.double() for t in (x, w, g, bias)]
    linear(x, w, bias, out)
    compare(out, wide[3] + wide[0] @ wide[1].t(), terms)
    linear(x, w, None, out, add=True)
    compare(out, wide[3] + 2 * wide[0] @ wide[1].t(), terms)
    linear(x, w, None, out)
    compare(out, wide[0] @ wide[1].t(), terms)
    times(g, w, dx)
    compare(dx, wide[2] @ wide[1], columns)
    add_outer(g, x, total)
    compare(total, 1 + wide[2].t() @ wide[0], rows)


@ROWS
@pytest.mark.quick(3)
def test_bits_do_not_depend_on_threads(rows, monkeypatch):
    x, w, g = torch.randn(rows, 70), torch.randn(200, 70), torch.randn(rows, 200)
    found = []
    for work in (1, 10**12):  # two threads, and one
        monkeypatch.setattr(team, "THREAD_WORK", work)
        out, dx, total = torch.empty(rows, 200), torch.empty(rows, 70), torch.zeros(200, 70)
        linear(x, w, None, out)
        times(g, w, dx)
        add_outer(g, x, total)
        found.append((out, dx, total))
    assert all(map(torch.equal, *found))


def test_other_layouts_and_dtypes_are_torchs_own():
    x, g = torch.randn(9, 5).t().contiguous().t(), torch.randn(9, 7)
    w = torch.randn(5, 7).t()
    out, dx, total = torch.empty(9, 7), torch.empty(5, 9).t(), torch.zeros(5, 7).t()
    linear(x, w, None, out)
    times(g, w, dx)
    add_outer(g, x, total)
    for found, exact in ((out, x @ w.t()), (dx, g @ w), (total, g.t() @ x)):
        torch.testing.assert_close(found, exact)
    half = torch.empty(9, 7, dtype=torch.bfloat16)
    linear(x.bfloat16(), w.bfloat16(), torch.ones(7).bfloat16(), half)
    torch.testing.assert_close(half, (x @ w.t() + 1).bfloat16(), rtol=0.05, atol=0.1)
