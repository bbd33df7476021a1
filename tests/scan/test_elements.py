from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from retrograde.errors import ScanError
from retrograde.scan.elements import (
    IDENTITY,
    UNREAD,
    Affine,
    Dense,
    Diagonal,
    Vector,
    check_product,
    combine,
    flops,
)

BATCHES = [((), ()), ((4,), ()), ((), (4,)), ((4,), (4,)), ((4, 1), (1, 3)), ((2, 1, 3), (5, 1))]


def draw(*shape):
    return torch.randn(shape, dtype=torch.float64)


def matrix(element):
    """The element as a plain matrix."""
    if isinstance(element, Diagonal):
        return torch.diag_embed(element.data)
    return element.data


def homogeneous(element):
    """The element as a matrix that acts on (g, 1), the oracle of affine steps."""
    if isinstance(element, Vector):
        ones = torch.ones(*element.shape[:-1], 1, dtype=torch.float64)
        return torch.cat([element.data, ones], -1)[..., None]
    offset = element.offset.data if isinstance(element, Affine) else None
    linear = matrix(element.jacobian if isinstance(element, Affine) else element)
    if offset is None:
        offset = torch.zeros(linear.shape[:-1], dtype=torch.float64)
    batch = torch.broadcast_shapes(linear.shape[:-2], offset.shape[:-1])
    rows, columns = linear.shape[-2:]
    whole = torch.zeros(*batch, rows + 1, columns + 1, dtype=torch.float64)
    whole[..., :rows, :columns] = linear
    whole[..., :rows, columns] = offset
    whole[..., rows, columns] = 1
    return whole


def kinds(batch, rows, columns):
    """An element of each kind, of this shape."""
    yield Dense(draw(*batch, rows, columns))
    yield Affine(Dense(draw(*batch, rows, columns)), Vector(draw(*batch, rows)))
    if rows == columns:
        yield Diagonal(draw(*batch, rows))
        yield Affine(Diagonal(draw(*batch, rows)), Vector(draw(rows)))


@pytest.mark.parametrize(("one", "other"), BATCHES)
@pytest.mark.parametrize(("n", "k", "m"), [(3, 5, 2), (5, 5, 2), (2, 5, 5), (5, 5, 5), (1, 1, 1)])
def test_every_product_of_two_kinds(one, other, n, k, m):
    for a, b in product([Vector(draw(*one, k)), *kinds(one, k, n)], kinds(other, m, k)):
        result = combine(a, b)
        expected = homogeneous(b) @ homogeneous(a)
        assert_close(homogeneous(result), expected.expand_as(homogeneous(result)))
        assert result.shape[: -1 if isinstance(a, Vector) else -2] == expected.shape[:-2]


def test_a_product_is_as_structured_as_its_factors_allow():
    dense, diagonal, vector = Dense(draw(4, 4)), Diagonal(draw(4)), Vector(draw(4))
    affine = Affine(diagonal, vector)
    kinds = (
        (diagonal, diagonal, Diagonal),
        (diagonal, dense, Dense),
        (dense, diagonal, Dense),
        (dense, dense, Dense),
        (vector, diagonal, Vector),
        (vector, dense, Vector),
        (vector, affine, Vector),
        (affine, dense, Affine),
        (dense, affine, Affine),
    )
    for a, b, kind in kinds:
        assert type(combine(a, b)) is kind
    assert type(combine(affine, affine).jacobian) is Diagonal
    assert type(combine(affine, dense).jacobian) is Dense


@pytest.mark.parametrize("element", ["word", Vector(torch.ones(3)), Dense(torch.ones(2, 3)), 7])
def test_the_identity_gives_back_the_other_operand_itself(element):
    assert combine(IDENTITY, element) is element
    assert combine(element, IDENTITY) is element
    assert flops(IDENTITY, element) == flops(element, IDENTITY) == 0
    assert combine(IDENTITY, IDENTITY) is IDENTITY


@pytest.mark.parametrize("element", ["word", Vector(torch.ones(3)), Dense(torch.ones(2, 3))])
def test_what_meets_an_unread_element_is_unread(element):
    assert combine(element, UNREAD) is UNREAD
    assert combine(IDENTITY, UNREAD) is UNREAD


def test_an_affine_step_with_an_identity_jacobian():
    offset, vector = Vector(draw(4)), Vector(draw(4))
    residual = Affine(IDENTITY, offset)
    assert residual.shape == (4, 4)
    assert torch.equal(combine(vector, residual).data, vector.data + offset.data)
    twice = combine(residual, residual)
    assert twice.jacobian is IDENTITY
    assert torch.equal(twice.offset.data, 2 * offset.data)
    assert flops(vector, residual) == 4
    dense = Dense(draw(4, 4))
    assert combine(dense, residual).jacobian is dense
    assert combine(residual, dense).jacobian is dense


def test_shapes():
    assert Vector(draw(7, 3)).shape == (7, 3)
    assert Dense(draw(7, 3, 5)).shape == (7, 3, 5)
    assert Diagonal(draw(7, 3)).shape == (7, 3, 3)
    assert Affine(Dense(draw(7, 3, 5)), Vector(draw(3))).shape == (7, 3, 5)


def pattern(element):
    """Where an element may not be zero, a vector as a column."""
    if isinstance(element, Diagonal):
        return np.eye(element.shape[-1], dtype=int)
    shape = (element.shape[-1], 1) if isinstance(element, Vector) else element.shape[-2:]
    return np.ones(shape, dtype=int)


def counted(a, b):
    """The FLOPs of b·a, counted term by term."""
    terms = int((pattern(b) @ pattern(a)).sum())
    is_scaling = isinstance(a, Diagonal) or isinstance(b, Diagonal)
    return terms if is_scaling else 2 * terms  # a scaled entry is no sum


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from(BATCHES))
def test_flops_are_those_counted_term_by_term(m, k, n, batches):
    one, other = batches
    count = int(np.prod(np.broadcast_shapes(one, other)))
    left = [Dense(torch.ones(*other, m, k)), Diagonal(torch.ones(*other, k))]
    right = [
        Vector(torch.ones(*one, k)),
        Dense(torch.ones(*one, k, n)),
        Diagonal(torch.ones(*one, k)),
    ]
    for b, a in product(left, right):
        assert flops(a, b) == count * counted(a, b)


def test_flops_of_affine_steps():
    affine = Affine(Dense(draw(16, 3, 5)), Vector(draw(16, 3)))
    before = Affine(Dense(draw(16, 5, 2)), Vector(draw(16, 5)))
    dense, diagonal = Dense(draw(5, 2)), Diagonal(draw(3))
    assert flops(before.offset, affine) == 16 * (2 * 3 * 5 + 3)
    assert flops(before, affine) == 16 * (2 * 3 * 5 * 2 + 2 * 3 * 5 + 3)
    assert flops(dense, affine) == 16 * 2 * 3 * 5 * 2
    assert flops(affine, diagonal) == 16 * (3 * 5 + 3)
    assert flops(affine, Dense(draw(4, 3))) == 16 * (2 * 4 * 3 * 5 + 2 * 4 * 3)


class Reversal:
    """A kind of element from elsewhere: the matrix that turns a vector round."""

    def __init__(self, size):
        self.shape = (size, size)

    def __matmul__(self, other):
        check_product(self, other)
        if isinstance(other, Reversal):
            return IDENTITY
        if isinstance(other, Diagonal):
            return Dense(torch.diag_embed(other.data).flip(-2))
        along = -1 if isinstance(other, Vector) else -2
        return type(other)(other.data.flip(along)) if hasattr(other, "data") else NotImplemented

    def __rmatmul__(self, other):
        check_product(other, self)
        return Dense(matrix(other).flip(-1))

    def flops(self, other):
        return 0 if isinstance(other, Vector | Dense | Diagonal | Reversal) else None

    def rflops(self, other):
        return 1


def test_a_further_kind_of_element_says_itself_how_it_meets_the_others():
    vector, dense, diagonal = Vector(draw(4)), Dense(draw(4, 4)), Diagonal(draw(4))
    turn, plain = Reversal(4), torch.eye(4, dtype=torch.float64).flip(0)
    assert torch.equal(combine(vector, turn).data, plain @ vector.data)
    assert combine(turn, turn) is IDENTITY
    for element in (dense, diagonal):
        assert torch.equal(combine(element, turn).data, plain @ matrix(element))
        assert torch.equal(combine(turn, element).data, matrix(element) @ plain)
        assert (flops(element, turn), flops(turn, element)) == (0, 1)
    affine = Affine(dense, vector)
    after, before = combine(affine, turn), combine(turn, affine)
    assert torch.equal(after.jacobian.data, plain @ dense.data)
    assert torch.equal(after.offset.data, plain @ vector.data)
    assert torch.equal(before.jacobian.data, dense.data @ plain)
    assert before.offset is vector
    with pytest.raises(ScanError, match=r"Dense 4×5 cannot be applied to Reversal 4×4: expected 5"):
        combine(turn, Dense(draw(4, 5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: combine(Vector(draw(4)), Dense(draw(3, 5))),
            r"Dense 3×5 cannot be applied to Vector 4: expected 5 rows, not 4; give transposed",
        ),
        (
            lambda: combine(Vector(draw(1)), Diagonal(draw(5))),
            r"Diagonal 5×5 cannot be applied to Vector 1: expected 5 rows, not 1",
        ),
        (
            lambda: combine(Diagonal(draw(1)), Dense(draw(3, 5))),
            r"Dense 3×5 cannot be applied to Diagonal 1×1: expected 5 rows, not 1",
        ),
        (
            lambda: combine(Vector(draw(2, 5)), Dense(draw(7, 3, 5))),
            r"Dense 7×3×5 and Vector 2×5 have the batches \(7,\) and \(2,\): expected leading",
        ),
        (
            lambda: combine(Dense(draw(3, 5)), Vector(draw(5))),
            r"Vector 5 cannot be applied to Dense 3×5: expected the only Vector at the first",
        ),
        (
            lambda: Vector(draw(4)) + Vector(draw(1)),
            r"Vector 4 cannot be added to Vector 1: expected a loss term of the size",
        ),
        (
            lambda: Dense(draw(4)),
            r"Dense was given a tensor of shape \(4,\): expected \(…, m, k\); add the missing",
        ),
        (lambda: Vector(torch.tensor(1.0)), r"Vector was given a tensor of shape \(\): expected"),
        (lambda: Diagonal(torch.tensor(1.0)), r"Diagonal was given a tensor of shape \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ScanError, match=message):
        call()


def test_flops_refuse_what_does_not_fit_too():
    for element in (Dense(draw(3, 5)), Diagonal(draw(5))):
        with pytest.raises(ScanError, match="cannot be applied to Vector 4"):
            flops(Vector(draw(4)), element)
