"""Vectors and tiles of the CPU's loops, against numpy in a wider type."""

import numpy as np
import pytest
import torch

from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    compiled,
    like,
    load,
    one_above,
    positive,
    quotient,
    sigmoid,
    store,
    tanh,
)
from retrograde.kernels.cpu.llvm.panels import PANEL, panels, whole_vectors
from retrograde.kernels.cpu.llvm.tiles import dots, product

DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@compiled
def squash(x, s, t):
    for j in range(0, len(x), LANES):
        left = len(x) - j
        store(s, j, sigmoid(load(x, j, left)), left)
        store(t, j, tanh(load(x, j, left)), left)


@compiled
def mix(a, b, out):
    for j in range(0, len(a), LANES):
        left = len(a) - j
        x, y = load(a, j, left), load(b, j, left)
        store(out, j, (like(x, 1) - x * x) * y + quotient(y, x), left)


@compiled
def rectify(a, out, slope):
    x = load(a, 0, LANES)
    store(out, 0, positive(x), LANES)
    store(slope, 0, one_above(x), LANES)


@DTYPES
def test_sigmoid_and_tanh_are_exact_to_two_units_in_the_last_place(dtype):
    wide = np.concatenate([np.linspace(-80, 80, 100_001), np.linspace(-1, 1, 10_001)])
    x = np.concatenate([wide, np.logspace(-30, 1, 999), -np.logspace(-30, 1, 999)]).astype(dtype)
    s, t = np.empty_like(x), np.empty_like(x)
    squash(x, s, t)
    exact = x.astype(np.longdouble)
    for found, expected in ((s, 1 / (1 + np.exp(-exact))), (t, np.tanh(exact))):
        away = np.abs(found - expected) / np.maximum(np.abs(expected), np.finfo(dtype).tiny)
        assert away.max() <= 2 * np.finfo(dtype).eps


@DTYPES
def test_sigmoid_and_tanh_at_the_ends(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0, 1e30, -1e30, -745, 3], dtype)
    s, t = np.empty_like(x), np.empty_like(x)
    squash(x, s, t)
    assert np.isnan([s[0], t[0]]).all()
    assert s[1:7].tolist() == pytest.approx([1, 0, 0.5, 1, 0, 0], abs=1e-37)
    assert t[1:7].tolist() == [1, -1, 0, 1, -1, -1]


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 8, 9, 20, 64])
def test_a_vectors_missing_lanes_are_neither_read_nor_written(dtype, size):
    torch.manual_seed(0)
    a, b = (torch.randn(size, dtype=torch.float64).numpy().astype(dtype) for _ in range(2))
    room = np.full(size + 2 * LANES, 7, dtype)
    mix(a, b, room)
    np.testing.assert_allclose(room[:size], (1 - a * a) * b + b / a, rtol=50 * np.finfo(dtype).eps)
    assert (room[size:] == 7).all()


def test_a_quotient_by_zero_is_zero():
    out = np.ones(3)
    mix(np.array([0.0, 2.0, 0.0]), np.array([3.0, 4.0, np.inf]), out)
    assert out[:2].tolist() == [3, -10]


def test_rectifying_keeps_what_is_no_number():
    out, slope = np.empty(LANES), np.empty(LANES)
    given = [-1.0, 0, 2, np.nan, np.inf, -np.inf, -0.0, 1e-300]
    rectify(np.resize(given, LANES), out, slope)
    np.testing.assert_array_equal(out[:8], [0, 0, 2, np.nan, np.inf, 0, 0, 1e-300])
    assert slope[:8].tolist() == [0, 0, 1, 1, 1, 0, 0, 1]


@DTYPES
@pytest.mark.parametrize("columns", [1, 8, 9, 17, 25, 33, 48, 49, 72, 97, 129, 145])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("terms", [1, 2, 33])
def test_a_product_is_numpys_and_a_row_does_not_depend_on_its_neighbours(
    dtype, rows, columns, terms
):
    rng = np.random.default_rng(rows * columns)
    stride, width = terms + 3, whole_vectors(columns)
    a = rng.standard_normal((rows, stride)).astype(dtype)
    u = rng.standard_normal((terms, columns)).astype(dtype)
    given = rng.standard_normal((rows, width)).astype(dtype)
    given[:, columns:] = 0
    packed, out = panels(torch.from_numpy(u))[0].numpy(), given.copy()
    product(a.reshape(-1), 0, stride, 1, rows, packed, width, out.reshape(-1), width)
    expected = given[:, :columns] + a[:, :terms].astype(np.float64) @ u.astype(np.float64)
    tolerance = 20 * terms * np.finfo(dtype).eps
    np.testing.assert_allclose(out[:, :columns], expected, rtol=tolerance, atol=tolerance)
    assert (out[:, columns:] == 0).all()
    alone = given.copy()
    for row in range(rows):
        product(a.reshape(-1), row * stride, 0, 1, 1, packed, columns, alone[row], 0)
    np.testing.assert_array_equal(alone, out)
    room = np.full((rows + 1) * columns, 7, dtype)  # nothing is written behind a row
    room[:-columns] = given[:, :columns].reshape(-1)
    turned = a.T.copy()
    product(turned.reshape(-1), 0, 1, rows, rows, packed, columns, room, columns)
    np.testing.assert_array_equal(room[:-columns].reshape(rows, columns), out[:, :columns])
    assert (room[-columns:] == 7).all()
    found = given.copy()  # read as it is, too, and nothing behind it
    plain = np.full(u.size + 9, np.nan, dtype)[: u.size].reshape(1, terms, columns)
    plain[:] = u
    product(a.reshape(-1), 0, stride, 1, rows, plain, columns, found.reshape(-1), width)
    np.testing.assert_array_equal(found, out)


@DTYPES
@pytest.mark.parametrize("columns", [1, 2, 3, 8, 17, 24])
@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("terms", [1, 2, 8, 15, 33, 64])
def test_sums_along_rows_are_numpys_and_do_not_depend_on_other_rows(dtype, rows, columns, terms):
    rng = np.random.default_rng(rows * columns)
    width = whole_vectors(columns)
    a, w, given = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((rows + 1, terms), (columns + 1, 1, terms), (rows, width))
    )
    a[-1] = w[-1] = np.nan  # neither is read
    out, alone = given.copy(), given.copy()
    dots(a.reshape(-1), 0, rows, w[:-1], width, out.reshape(-1))
    expected = given[:, :columns] + a[:rows].astype(np.float64) @ w[:-1, 0].T.astype(np.float64)
    tolerance = 20 * terms * np.finfo(dtype).eps
    np.testing.assert_allclose(out[:, :columns], expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(out[:, columns:], given[:, columns:])
    for row in range(rows):
        dots(a.reshape(-1), row * terms, 1, w[:-1], width, alone[row])
    np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(2, 60), (33, 1), (16, 48), (40, 97)])
def test_panels_are_a_few_vectors_wide(turned, shape):
    assert PANEL in (2 * LANES, 3 * LANES)
    u = torch.randn(*shape)
    given = u.t().contiguous().t() if turned else u
    for found, part in zip(panels(given, given[:, 1:]), (u, u[:, 1:]), strict=True):
        wide, columns = found.transpose(0, 1).reshape(len(u), -1), part.shape[1]
        assert wide.shape[1] % PANEL == 0
        assert torch.equal(wide[:, :columns], part)
        assert (wide[:, columns:] == 0).all()
