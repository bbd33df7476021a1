"""The numbers of products: compiled, in plain torch, by scipy, and as dense matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from oracles.sparse import dense, factor_of, matching
from retrograde.scan.sparse import arithmetic
from retrograde.scan.sparse import cpu_products as cpu_sparse
from retrograde.scan.sparse.arithmetic import apply, multiply, plain, spread_out
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.factor import full, identity
from retrograde.scan.sparse.pattern import Pattern

SHARING = [(None, None), (9, None), (None, 9), *((s, s) for s in (1, 2, 7, 8, 9, 17))]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def random(rows, columns, share, seed=0):
    """Some with some, with an empty row and an empty column."""
    matrix = np.random.default_rng(seed).random((rows, columns)) < share
    matrix[rows // 2] = matrix[:, columns // 3] = False
    return factor_of(matrix)


def band(size, wide=3):
    return factor_of(np.tri(size, dtype=bool) & ~np.tri(size, k=-wide, dtype=bool))


def make(left, right):
    return Pattern(*left), Pattern(*right)


#: By name: two patterns, the way of their product, and what it is.
CASES = {
    "diagonal · diagonal": ((identity(63),), (identity(63),), "diagonal", "diagonal"),
    "diagonal · sparse": ((identity(65),), (random(65, 31, 0.1),), "diagonal", "sparse"),
    "sparse · diagonal": ((random(65, 31, 0.1),), (identity(31),), "diagonal", "sparse"),
    "diagonal · full": ((identity(5),), (full(5, 13),), "diagonal", "full"),
    "full · diagonal": ((full(13, 5),), (identity(5),), "diagonal", "full"),
    "full · full": ((full(13, 7),), (full(7, 9),), "dense", "full"),
    "full · dense": ((full(13, 7),), (random(7, 9, 0.6),), "dense", "full"),
    "dense · full": ((random(13, 7, 0.6),), (full(7, 9),), "dense", "full"),
    "sparse · sparse": ((random(71, 53, 0.05),), (random(53, 67, 0.05, 1),), "sparse", "sparse"),
    "sparse · sparse, whole": ((random(71, 33, 0.4),), (random(33, 19, 0.4, 1),), "sparse", "full"),
    "sparse · full": ((random(41, 53, 0.06),), (full(53, 11),), "sparse", "full"),
    "sparse · column": ((random(41, 53, 0.06),), (full(53, 1),), "sparse", "full"),
    "full · sparse": ((full(13, 53),), (random(53, 37, 0.06),), "sparse", "full"),
    "row · sparse": ((full(1, 53),), (random(53, 37, 0.06),), "sparse", "full"),
    "channels": ((full(2, 3), band(7)), (full(3, 2), band(7)), "sparse", "full"),
    "bands": ((full(2, 3), band(17)), (full(3, 5), band(17)), "sparse", "sparse"),
    "two bands": (
        (full(2, 3), band(4, 2), band(5, 2)),
        (full(3, 2), band(4, 2), band(5, 2)),
        "sparse",
        "sparse",
    ),
    "places that have none": (
        (full(2, 3), random(23, 11, 0.2)),
        (full(3, 5), random(11, 13, 0.15)),
        "sparse",
        "sparse",
    ),
    "wholly": ((full(2, 3), band(4)), (full(3, 5), band(4)), "sparse", "full"),
    "no place": ((full(2, 3), band(5)), (full(3, 5), random(5, 4, 0.0)), "sparse", "sparse"),
    "each place": ((full(2, 3), identity(7)), (full(3, 5), identity(7)), "sparse", "sparse"),
    "each place, wholly": ((full(2, 3), identity(2)), (full(3, 5), identity(2)), "sparse", "full"),
    "one way": ((full(2, 3), identity(9)), (full(3, 5), band(9)), "sparse", "sparse"),
    "all places after": ((full(2, 3), random(8, 9, 0.1)), (full(3, 5), full(9, 1)), "sparse", None),
    "cut differently": (
        (full(2, 12), band(9)),
        (full(3, 4), identity(4), band(9)),
        "sparse",
        "sparse",
    ),
    "empty": ((random(6, 6, 0.0),), (random(6, 6, 0.3),), "sparse", "sparse"),
    "one": ((factor_of(np.eye(5, 1, dtype=bool)),), (full(1, 1),), "dense", "full"),
}


@pytest.fixture(params=CASES)
def case(request):
    """Two patterns."""
    left, right, way, kind = CASES[request.param]
    left, right = make(left, right)
    assert left.product(right).method == way
    assert left.product(right).result.kind == (kind or left.product(right).result.kind)
    return left, right


def values(pattern, samples, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (pattern.nnz,) if samples is None else (samples, pattern.nnz)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def scattered(pattern, data):
    """The matrix with its zeros, by numpy; float64."""
    data = data.double().numpy()
    found = np.zeros((*data.shape[:-1], *pattern.shape))
    found[..., dense(pattern)] = data
    return found


def assert_close(found, expected, dtype):
    found, expected = (torch.as_tensor(np.asarray(x)).double() for x in (found, expected))
    assert found.shape == expected.shape
    largest = expected.abs().max().item() if expected.numel() else 0
    error = (found - expected).abs().max().item() if expected.numel() else 0
    assert error <= TOLERANCE[dtype] * largest, error


@DTYPES
def test_every_way_gives_the_dense_product(case, dtype):
    left, right = case
    result = left.product(right).result
    for one, other in SHARING:
        a, b = values(left, one, dtype), values(right, other, dtype, 1)
        found = multiply(left, right, a, b)
        samples = one or other
        assert found.dtype == dtype
        assert found.shape == ((result.nnz,) if samples is None else (samples, result.nnz))
        expected = scattered(left, a) @ scattered(right, b)
        assert_close(scattered(result, found), expected, dtype)
        assert_close(spread_out(result, found), expected, dtype)


@DTYPES
def test_every_way_gives_what_plain_torch_does(case, dtype):
    left, right = case
    plan = left.product(right)
    for one, other in SHARING:
        a, b = values(left, one, dtype), values(right, other, dtype, 1)
        if left.kind == "diagonal":
            expected = plain.scale(right, b, a, False)
        elif right.kind == "diagonal":
            expected = plain.scale(left, a, b, True)
        else:
            expected = plain.multiply(left, right, a, b)
        assert_close(multiply(left, right, a, b), expected, dtype)
        if plan.method not in ("diagonal", "dense"):  # and so do the kernels, whatever the way
            assert_close(cpu_sparse.multiply(left, right, a, b), expected, dtype)


@DTYPES
def test_every_way_gives_what_scipy_does(case, dtype):
    pytest.importorskip("scipy")
    left, right = case
    for one, other in [(None, None), (7, 7), (None, 2)]:
        a = CSR(left, values(left, one, dtype))
        b = CSR(right, values(right, other, dtype, 1))
        found = a @ b
        for sample in range(one or other or 1):
            theirs = a.to_scipy(sample) @ b.to_scipy(sample)
            assert_close(found.to_scipy(sample).toarray(), theirs.toarray(), dtype)


@DTYPES
def test_gradients_by_every_kind_of_jacobian(case, dtype):
    for pattern in case:
        for one, other in [(None, None), *SHARING, (1, None), (None, 1)]:
            a = values(pattern, one, dtype)
            x = values(Pattern(identity(pattern.shape[1])), other, dtype, 1)
            found = apply(pattern, a, x)
            expected = np.einsum("...ij,...j->...i", scattered(pattern, a), x.double().numpy())
            assert found.dtype == dtype
            assert_close(found, expected, dtype)
            assert_close(plain.apply(pattern, a, x), expected, dtype)


WAYS = ("by entry", "every other", "expanded")


def strided(data, way):
    """The same numbers, in another order in memory."""
    if way == "by entry":
        return data.T.contiguous().T
    if way == "every other":
        wide = data.new_full((*data.shape[:-1], 2 * data.shape[-1]), torch.nan)
        wide[..., ::2] = data
        return wide[..., ::2]
    return data[:1].expand(len(data), -1) if data.ndim == 2 else data


def test_numbers_may_lie_anyhow(case):
    left, right = case
    for samples, way in [(None, "every other"), (1, "by entry"), *((9, way) for way in WAYS)]:
        a, b = values(left, samples, torch.float64), values(right, samples, torch.float64, 1)
        x = values(Pattern(identity(left.shape[1])), samples, torch.float64, 2)
        ours = [strided(t, way) for t in (a, b, x)]
        a, b, x = (t.contiguous().clone() for t in ours)
        assert_close(multiply(left, right, *ours[:2]), multiply(left, right, a, b), torch.float64)
        assert_close(apply(left, ours[0], ours[2]), apply(left, a, x), torch.float64)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(matching())
def test_products_of_any_patterns(pair):
    left, right = pair
    for one, other in ((None, None), (3, None), (9, 9)):
        a, b = values(left, one, torch.float64), values(right, other, torch.float64, 1)
        found = scattered(left.product(right).result, multiply(left, right, a, b))
        assert_close(found, scattered(left, a) @ scattered(right, b), torch.float64)


def test_what_is_not_compiled_is_done_by_plain_torch():
    left, right = make((random(9, 7, 0.3),), (random(7, 8, 0.3, 1),))
    assert arithmetic.sparse_kernels("cpu", torch.float16) is plain
    assert arithmetic.sparse_kernels("cpu", torch.float32).name == "numba"
    a, b = values(left, 3, torch.bfloat16), values(right, 3, torch.bfloat16, 1)
    found = scattered(left.product(right).result, multiply(left, right, a, b))
    expected = scattered(left, a) @ scattered(right, b)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


@pytest.fixture
def as_many_threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("as_many_threads_as_before")
def test_results_do_not_depend_on_the_number_of_threads(name, monkeypatch):
    monkeypatch.setattr(cpu_sparse, "_LEAST_WORK", 1)  # so that there are several pieces
    left, right = make(*CASES[name][:2])
    for samples in (None, 1, 9):
        a, b = values(left, samples, torch.float32), values(right, samples, torch.float32, 1)
        x = values(Pattern(identity(left.shape[1])), samples, torch.float32, 2)
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append((multiply(left, right, a, b), apply(left, a, x)))
        for one, other in zip(*found, strict=True):
            assert_close(one, other, torch.float32)
            if left.product(right).method != "dense" and left.kind != "full":  # BLAS decides there
                assert torch.equal(one, other)


def test_a_product_of_what_wants_gradients_is_cut_off_from_them():
    left, right = make((random(9, 7, 0.3),), (random(7, 8, 0.3, 1),))
    a, b = values(left, 3, torch.float64), values(right, 3, torch.float64, 1)
    found = multiply(left, right, a.requires_grad_(), b)
    assert not found.requires_grad
