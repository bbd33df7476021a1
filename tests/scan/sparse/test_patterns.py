import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles.sparse import dense, drawn_factors, factor_of, factors, kron, matching
from retrograde.errors import ScanError
from retrograde.scan.sparse.factor import (
    TooManyEntriesError,
    combined,
    from_arrays,
    full,
    identity,
    merged,
    multiplied,
)
from retrograde.scan.sparse.pattern import Pattern, Product, aligned

SIZE = st.integers(1, 7)
some = settings(deadline=None, derandomize=True, max_examples=80)


def random(rows, columns, share=0.3, seed=0):
    return np.random.default_rng(seed).random((rows, columns)) < share


def exact(left, right):
    """The product of patterns, and how many terms each of its entries has."""
    return dense(left).astype(int) @ dense(right).astype(int)


def draw_pair(shape):
    m, k, n = shape
    return st.tuples(factors(m, k), factors(k, n))


@some
@given(drawn_factors())
def test_a_pattern_is_the_kronecker_product_of_its_factors(parts):
    pattern, matrix = Pattern(*parts), kron(*map(dense, parts))
    assert np.array_equal(dense(pattern), matrix)
    assert pattern.shape == matrix.shape
    assert pattern.nnz == matrix.sum()
    assert pattern.density == pytest.approx(matrix.mean())
    assert pattern.sparsity == pytest.approx(1 - matrix.mean())
    assert np.array_equal(pattern.row_of, np.nonzero(matrix)[0])
    whole = merged(parts)
    assert np.array_equal(whole.row_counts, matrix.sum(1))
    assert np.array_equal(whole.column_counts, matrix.sum(0))
    if pattern.kind == "diagonal":
        assert np.array_equal(matrix, np.eye(len(matrix)))
    else:
        assert pattern.kind == ("full" if matrix.all() else "sparse")


@some
@given(drawn_factors(2), drawn_factors(2))
def test_numbers_of_entries_are_combined_in_the_order_of_the_rows(left, right):
    """A Kronecker product of matrices of numbers, entry by entry."""
    a, b = merged(left), merged(right)
    of_a, of_b = (np.arange(1, x.nnz + 1, dtype=np.int32) for x in (a, b))
    numbers = np.zeros((2, a.rows * b.rows, a.columns * b.columns), int)
    for which, (x, y) in enumerate([(of_a, np.ones_like(of_b)), (np.ones_like(of_a), of_b)]):
        one, other = np.zeros((a.rows, a.columns), int), np.zeros((b.rows, b.columns), int)
        one[dense(a)], other[dense(b)] = x, y
        numbers[which] = np.kron(one, other)
    present = kron(dense(a), dense(b))
    ends, found = combined((a.indptr, of_a), (b.indptr, of_b), 1000)
    assert np.array_equal(np.diff(ends), present.sum(1))
    assert np.array_equal(found, numbers[0][present] * 1000 + numbers[1][present])


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (4, 4), (3, 7)])
def test_a_factor_says_what_it_is(shape):
    rows, columns = shape
    assert factor_of(np.ones(shape, bool)).kind == "full"
    assert factor_of(np.zeros(shape, bool)).kind == "sparse"
    assert factor_of(np.zeros(shape, bool)).nnz == 0
    eye = np.eye(rows, columns, dtype=bool)
    expected = {(1, 1): "full", (4, 4): "identity"}.get(shape, "full" if eye.all() else "sparse")
    assert factor_of(eye).kind == expected
    if rows == columns > 1:
        assert factor_of(eye[::-1]).kind == "sparse"
        moved = np.array([0, 2, *range(2, rows + 1)])  # as many entries, in other rows
        assert from_arrays(moved, np.arange(rows), shape).kind == "sparse"


@pytest.mark.parametrize("at", ["rows", "columns"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12])
def test_splitting(size, at):
    for whole in (identity(12), full(12, 12), factor_of(random(12, 12))):
        parts = whole.split(size, at=at)
        if whole.kind == "sparse" or 12 % size:
            assert parts is None
            continue
        first, second = parts
        assert getattr(first, at) == size
        assert np.array_equal(kron(dense(first), dense(second)), dense(whole))


@some
@given(st.tuples(SIZE, SIZE, SIZE).flatmap(draw_pair))
def test_products_of_factors(pair):
    left, right = pair
    found = multiplied(left, right)
    assert np.array_equal(dense(found), exact(left, right) > 0)


def test_a_row_of_many_columns_and_one_of_few_are_both_ascending():
    """Columns are sorted where there are few, and looked through where there are many."""
    left = np.zeros((3, 40), bool)
    left[0, :] = left[1, [7, 3]] = True
    right = random(40, 200, 0.01, 5)
    assert (exact(factor_of(left), factor_of(right)) > 0).sum(1)[0] > 25  # of 200, an eighth
    found = multiplied(factor_of(left), factor_of(right))
    assert np.array_equal(dense(found), left.astype(int) @ right.astype(int) > 0)


@some
@given(matching())
def test_products_of_patterns_whose_factors_are_cut_differently(pair):
    left, right = pair
    pairs = aligned(left.factors, right.factors)
    assert all(a.columns == b.rows for a, b in pairs)
    assert np.array_equal(kron(*(dense(a) for a, _ in pairs)), dense(left))
    assert np.array_equal(kron(*(dense(b) for _, b in pairs)), dense(right))
    plan, counts = left.product(right), exact(left, right)
    assert plan.terms == counts.sum()
    whole = {left.kind, right.kind} & {"full"} or (counts > 0).mean() >= 0.5
    if "diagonal" in (left.kind, right.kind):
        assert plan.method == "diagonal"
        assert plan.flops == plan.terms
        whole = False
    if whole:
        assert plan.result.kind == "full"
        assert plan.result.shape == counts.shape
    else:
        assert np.array_equal(dense(plan.result), counts > 0)
    if plan.method == "dense":
        assert plan.flops == 2 * left.shape[0] * left.shape[1] * right.shape[1]
    elif plan.method != "diagonal":
        assert plan.flops == 2 * plan.terms


@some
@given(matching())
def test_every_term_lands_in_its_entry(pair):
    left, right = pair
    plan = Product(left, right)
    landing = plan.landing
    a, b, c = ((p.row_of, p.indices) for p in (left, right, plan.result))
    assert landing.ends[0] == 0
    assert landing.ends[-1] == len(landing.lefts) == len(landing.rights) == plan.terms
    assert len(landing.ends) == plan.result.nnz + 1
    entry = np.repeat(np.arange(plan.result.nnz), np.diff(landing.ends))
    assert np.array_equal(a[1][landing.lefts], b[0][landing.rights])  # the column meets the row
    assert np.array_equal(a[0][landing.lefts], c[0][entry])
    assert np.array_equal(b[1][landing.rights], c[1][entry])
    terms = set(zip(landing.lefts.tolist(), landing.rights.tolist(), strict=True))
    assert len(terms) == plan.terms  # none twice


def test_what_cannot_be_split_makes_the_other_side_one():
    cross = factor_of(random(6, 6))
    ((a, b),) = aligned((cross,), (identity(2), full(3, 4)))
    assert a is cross
    assert (b.rows, b.columns) == (6, 8)
    ((a, b),) = aligned((identity(2), full(4, 3)), (cross,))
    assert (a.rows, a.columns) == (8, 6)
    assert b is cross
    pairs = aligned((full(5, 2), full(3, 3)), (full(3, 3), full(2, 7)))  # 2 does not divide 3
    assert [(a.columns, b.rows) for a, b in pairs] == [(3, 3), (2, 2)]
    pairs = aligned((identity(2), cross), (identity(3), factor_of(random(4, 4))))
    assert [(a.columns, b.rows) for a, b in pairs] == [(12, 12)]
    column = aligned((full(4, 1), identity(3)), (identity(3), full(1, 5)))
    assert [(a.columns, b.rows) for a, b in column] == [(1, 1), (3, 3), (1, 1)]


@some
@given(st.tuples(SIZE, SIZE).flatmap(lambda s: st.tuples(factors(*s), factors(*s))))
def test_the_union_has_the_entries_of_both(pair):
    left, right = map(Pattern, pair)
    both, ours, theirs = left.union(right)
    assert np.array_equal(dense(both), dense(left) | dense(right))
    for pattern, places in ((left, ours), (right, theirs)):
        assert np.array_equal(both.row_of[places], pattern.row_of)
        assert np.array_equal(both.indices[places], pattern.indices)


def test_the_union_of_two_identities_is_one():
    assert Pattern(identity(5)).union(Pattern(identity(5)))[0].kind == "diagonal"


def test_a_product_of_which_half_is_no_guaranteed_zero_is_kept_whole():
    """Eight entries of sixteen are, seven are not; a full factor makes any product whole."""
    first = np.zeros((4, 4), bool)
    first[:, 0] = True
    row = np.zeros((4, 4), bool)
    row[0, :2] = True
    half = Pattern(factor_of(first)).product(Pattern(factor_of(row)))
    assert half.terms == 8
    assert half.result.kind == "full"
    first[3] = False
    less = Pattern(factor_of(first)).product(Pattern(factor_of(row)))
    assert (less.terms, less.result.nnz, less.result.kind) == (6, 6, "sparse")
    empty = factor_of(np.zeros((4, 4), bool))
    plan = Pattern(full(4, 4)).product(Pattern(empty))
    assert (plan.terms, plan.result.kind) == (0, "full")


def test_which_way_the_numbers_are_found():
    def way(left, right):
        return Product(Pattern(*left), Pattern(*right)).method

    band, thin = factor_of(np.tri(9, dtype=bool)), factor_of(random(8, 8, 0.1, 1))
    assert 0 < thin.nnz < 8
    assert way((identity(8),), (thin,)) == way((thin,), (identity(2), identity(4))) == "diagonal"
    assert way((full(8, 8),), (full(8, 8),)) == "dense"
    assert way((full(8, 8),), (factor_of(np.tri(8, dtype=bool)),)) == "dense"
    assert way((full(8, 8),), (thin,)) == way((thin,), (full(8, 8),)) == "sparse"
    assert way((full(2, 3), band), (full(3, 4), band)) == "sparse"
    assert way((identity(3), band), (full(3, 8), band)) == "sparse"


def test_the_diagonal_on_either_side_of_the_same_matrix():
    """They keep the same pattern, not the same terms."""
    scale, matrix = Pattern(identity(5)), Pattern(factor_of(random(5, 5, 0.4, 3)))
    left, right = scale.product(matrix), matrix.product(scale)
    assert left.result is matrix
    assert right.result is matrix
    entries = np.arange(matrix.nnz)
    assert np.array_equal(left.landing.lefts, matrix.row_of)
    assert np.array_equal(left.landing.rights, entries)
    assert np.array_equal(right.landing.lefts, entries)
    assert np.array_equal(right.landing.rights, matrix.indices)


def patterns(count=3, size=6):
    return [Pattern(factor_of(random(size, size, 0.3, seed))) for seed in range(count)]


def test_a_product_is_found_once():
    left, right, _ = patterns()
    assert left.product(right) is left.product(right)
    assert left.union(right)[0] is left.union(right)[0]
    assert left.product(right) is not right.product(left)
    other = Pattern(*right.factors)
    assert left.product(right) is not left.product(other)


@pytest.mark.quick(0)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("diagonal", [None, 0, 1])
def test_what_is_remembered_goes_with_either_pattern(which, diagonal):
    pair = patterns(2)
    if diagonal is not None:
        pair[diagonal] = Pattern(identity(6))
    plan = weakref.ref(pair[0].product(pair[1]))
    both = weakref.ref(pair[0].union(pair[1])[0])
    gone = weakref.ref(pair[which])
    gc.collect()
    assert plan() is not None
    assert both() is not None
    pair[which] = None
    gc.collect()
    assert gone() is None
    assert plan() is None
    assert both() is None


@pytest.mark.quick(0)
def test_products_of_products_go_with_their_patterns():
    chain = patterns(3)
    first = chain[0].product(chain[1]).result
    gone = [weakref.ref(first), weakref.ref(first.product(chain[2]))]
    del first
    gc.collect()
    assert all(ref() is not None for ref in gone)
    chain.pop(0)
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_too_many_entries_are_refused_before_they_are_made():
    large = Pattern(identity(50_000), full(300, 300))
    assert large.nnz == 4_500_000_000
    assert large.density == pytest.approx(1 / 50_000)
    text = (
        r"a pattern of 15,000,000×15,000,000 has 4,500,000,000 entries: expected at most "
        r"2,147,483,647; use the linear scan, which needs no products, or give more memory"
    )
    with pytest.raises(TooManyEntriesError, match=text):
        _ = large.indptr
    with pytest.raises(TooManyEntriesError, match="4,900,000,000 entries: expected at most"):
        _ = full(70_000, 70_000).indices
    assert issubclass(TooManyEntriesError, ScanError)


def test_a_product_may_be_given_less_room():
    left, right, _ = patterns()
    count = int((exact(left, right) > 0).sum())
    with pytest.raises(TooManyEntriesError, match=rf"6×6 has {count} entries: .* {count - 1};"):
        left.product(right, count - 1)
    assert left.product(right, count).terms  # what was refused is not remembered
    assert Pattern(full(6, 6)).product(left, 1).result.kind == "full"  # nothing is written out


def test_products_of_large_patterns_are_counted_without_writing_them_out():
    band = factor_of(np.tri(64, dtype=bool) & ~np.tri(64, k=-3, dtype=bool))
    large = Pattern(full(512, 512), band, band)
    plan = large.product(large)
    terms = int((dense(band).astype(int) @ dense(band).astype(int)).sum())
    assert plan.terms == 512**3 * terms**2
    assert plan.result.nnz == 512**2 * int((exact(band, band) > 0).sum()) ** 2
    assert plan.result.index_bytes == 4 * (plan.result.nnz + 512 * 64**2 + 1)
    assert Pattern(identity(9)).index_bytes == Pattern(full(9, 9)).index_bytes == 0
    text = rf"a product of 2,097,152×2,097,152 has {plan.terms:,} terms: expected at most 2,147,"
    with pytest.raises(TooManyEntriesError, match=text):
        _ = plan.landing


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a, b: a.product(b),
            "patterns 2×3 and 2×5 cannot be multiplied: expected 3 rows of the second; give "
            "transposed Jacobians",
        ),
        (lambda a, b: a.union(b), "patterns 2×3 and 2×5 cannot be added: expected paths from"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ScanError, match=message):
        call(Pattern(full(2, 3)), Pattern(full(2, 5)))
    assert repr(Pattern(full(2000, 3))) == "Pattern(2,000×3, nnz=6,000)"
