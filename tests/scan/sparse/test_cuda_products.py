"""The Triton kernels do with sparse values what the plain forms do, interpreted or compiled."""

import numpy as np
import pytest
import torch

from oracles.cuda_kernels import COMPILED, DEVICE, load
from retrograde.scan.sparse import cpu_products as cpu_sparse
from retrograde.scan.sparse.arithmetic import apply_sparse, multiply_sparse, sparse_kernels
from retrograde.scan.sparse.factor import from_pairs, full
from retrograde.scan.sparse.pattern import Pattern

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}

cuda_sparse = load("scan.sparse.cuda_products")
pytestmark = [pytest.mark.usefixtures("interpreter"), *([pytest.mark.gpu] if COMPILED else [])]
on_a_gpu = pytest.mark.skipif(not COMPILED, reason="needs a CUDA device")
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
# Rows, columns, and what is between them in a product; and the samples of each operand, None where
# it is (entries,).
cases = pytest.mark.parametrize(
    ("rows", "inner", "columns", "ours", "theirs"),
    [
        (1, 1, 1, None, None),
        (1, 7, 2, 2, None),
        (2, 33, 7, None, 33),
        (7, 2, 33, 9, 1),
        (33, 33, 7, 33, 33),
        *((7, 33, 2, *pair) for pair in [(None, None), (1, None), (None, 1), (1, 1), (2, 2)]),
        *((33, 7, 7, *pair) for pair in [(None, None), (9, None), (1, 9), (33, 1), (9, 9)]),
    ],
)


def drawn(rows, columns, seed, density=0.3):
    """A pattern with rows that are empty, and one that is not so."""
    generator = np.random.default_rng(seed)
    present = generator.random((rows, columns)) < density
    present[::3] = False
    present[rows // 2] = generator.random(columns) < 0.9
    return Pattern(from_pairs(*present.nonzero(), (rows, columns)))


def numbers(entries, samples, seed=0):
    """Values in float64, as float32 has them."""
    generator = torch.Generator().manual_seed(entries + seed)
    shape = (entries,) if samples is None else (samples, entries)
    return torch.randn(shape, generator=generator).double()


def laid_out(fences, values, dtype):
    """Fenced, in the order in which the kernel reads it, so that it reads this very memory."""
    return fences.around(values.movedim(-1, 0), dtype).movedim(0, -1)


def assert_close(found, expected):
    assert found.shape == expected.shape
    error = (found.cpu().double() - expected).norm()
    assert error <= TOLERANCE[found.dtype] * expected.norm()


@dtypes
@cases
def test_multiply(fences, rows, inner, columns, ours, theirs, dtype):
    left, right = drawn(rows, inner, seed=1), drawn(inner, columns, seed=2)
    a, b = numbers(left.nnz, ours), numbers(right.nnz, theirs, seed=1)
    given = [laid_out(fences, t, dtype) for t in (a, b)]
    found = cuda_sparse.multiply(left, right, *given)
    assert_close(found, multiply_sparse(left, right, a, b))
    assert torch.equal(cuda_sparse.multiply(left, right, *given), found)


@dtypes
@cases
def test_apply(fences, rows, inner, columns, ours, theirs, dtype):
    pattern = drawn(rows, columns, seed=inner)
    values, x = numbers(pattern.nnz, ours), numbers(columns, theirs, seed=1)
    given = [laid_out(fences, t, dtype) for t in (values, x)]
    found = cuda_sparse.apply(pattern, *given)
    assert_close(found, apply_sparse(pattern, values, x))
    assert torch.equal(cuda_sparse.apply(pattern, *given), found)


@pytest.mark.parametrize("fences", [7.0], indirect=True)  # a NaN over a NaN does not show
def test_what_is_written_over_is_the_result_alone(fences):
    left, right = drawn(33, 7, seed=1), drawn(7, 7, seed=2)
    a, b = (torch.full((9, p.nnz), torch.nan, device=DEVICE) for p in (left, right))
    assert cuda_sparse.multiply(left, right, a, b).isnan().any()
    assert cuda_sparse.apply(left, a, a[:, :7]).isnan().any()


@pytest.mark.parametrize("whole", ["left", "right"])
def test_a_factor_may_be_full(whole):
    left = Pattern(full(7, 9)) if whole == "left" else drawn(7, 9, seed=1)
    right = Pattern(full(9, 7)) if whole == "right" else drawn(9, 7, seed=2)
    a, b = numbers(left.nnz, 2), numbers(right.nnz, 2, seed=1)
    found = cuda_sparse.multiply(left, right, a.to(DEVICE), b.to(DEVICE))
    assert_close(found, multiply_sparse(left, right, a, b))


@pytest.mark.parametrize("samples", [None, 2])
def test_no_entries_and_no_samples(samples):
    nothing = np.zeros(0, np.int32)
    empty, some = Pattern(from_pairs(nothing, nothing, (7, 7))), drawn(7, 7, seed=1)
    for values, pattern in (numbers(0, samples), empty), (numbers(some.nnz, 0), some):
        given, x = values.to(DEVICE), torch.ones(7, dtype=torch.float64)
        found = cuda_sparse.multiply(pattern, pattern, given, given)
        assert_close(found, multiply_sparse(pattern, pattern, values, values))
        assert_close(
            cuda_sparse.apply(pattern, given, x.to(DEVICE)), apply_sparse(pattern, values, x)
        )


def strided(values):
    """The same numbers in three other layouts."""
    yield values.repeat_interleave(2, 1)[:, ::2]
    yield values.repeat(2, 1)[: len(values)]
    yield values[:1].expand(len(values), -1)


def test_what_is_read_need_not_be_contiguous():
    left, right = drawn(7, 9, seed=1), drawn(9, 7, seed=2)
    a, b = (numbers(p.nnz, 3).to(DEVICE) for p in (left, right))
    x = numbers(9, 3).to(DEVICE)
    for a_strided, b_strided, x_strided in zip(strided(a), strided(b), strided(x), strict=True):
        found = cuda_sparse.multiply(left, right, a_strided, b_strided)
        assert_close(found, multiply_sparse(left, right, a_strided.cpu(), b_strided.cpu()))
        found = cuda_sparse.apply(left, a_strided, x_strided)
        assert_close(found, apply_sparse(left, a_strided.cpu(), x_strided.cpu()))


@pytest.mark.parametrize("name", ["indptr", "indices", "row_of"])
def test_indices_are_put_on_a_device_once(name):
    device, pattern = torch.empty(0, device=DEVICE).device, drawn(7, 9, seed=1)
    with torch.inference_mode():
        found = pattern.tensor(name, device)
    assert found.device == device
    assert found.tolist() == getattr(pattern, name).tolist()
    assert not found.is_inference()
    assert pattern.tensor(name, device) is found
    on_the_cpu = pattern.tensor(name, torch.device("cpu"))
    assert np.shares_memory(on_the_cpu.numpy(), getattr(pattern, name))


@on_a_gpu
@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("samples", [1, 16, 100])
def test_wide_on_a_gpu(samples, dtype):
    kernels = sparse_kernels("cuda", dtype)
    assert kernels.name == "triton"
    left, right = drawn(3000, 2000, seed=1, density=0.01), drawn(2000, 3000, seed=2, density=0.01)
    a, b, x = (numbers(n, samples) for n in (left.nnz, right.nnz, 2000))
    on_the_gpu = [t.to(DEVICE, dtype) for t in (a, b, x)]
    found = kernels.multiply(left, right, *on_the_gpu[:2])
    assert_close(found, cpu_sparse.multiply(left, right, a, b))
    assert torch.equal(kernels.multiply(left, right, *on_the_gpu[:2]), found)
    assert_close(kernels.apply(left, on_the_gpu[0], on_the_gpu[2]), cpu_sparse.apply(left, a, x))


@on_a_gpu
@pytest.mark.gpu
def test_more_numbers_than_32_bits_count_on_a_gpu():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB")
    pattern, samples = drawn(2**11, 2**11, seed=1, density=0.5), 2048
    values = torch.rand(pattern.nnz, samples, device=DEVICE).T
    assert values.numel() > 2**31
    x = torch.rand(samples, 2**11, device=DEVICE)
    some = torch.tensor([0, samples // 2, samples - 1], device=DEVICE)
    expected = apply_sparse(pattern, values[some].cpu().double(), x[some].cpu().double())
    assert_close(cuda_sparse.apply(pattern, values, x)[some], expected)
    diagonal = Pattern(from_pairs(*np.eye(2**11, k=1).nonzero(), (2**11, 2**11)))
    ones = torch.ones(diagonal.nnz, device=DEVICE)
    found = cuda_sparse.multiply(diagonal, pattern, ones, values)[some]
    expected = multiply_sparse(diagonal, pattern, ones.cpu().double(), values[some].cpu().double())
    assert_close(found, expected)
