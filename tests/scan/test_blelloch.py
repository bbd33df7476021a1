import copy
import pickle
from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrograde.errors import ScanError
from retrograde.scan.blelloch import (
    blelloch,
    chunked,
    gradients,
    hybrid,
    linear,
    pairs,
    reference,
)
from retrograde.scan.elements import IDENTITY, UNREAD, Affine, Dense, Diagonal, Vector
from retrograde.scan.work_report import Report

ALPHABET = [chr(ord("A") + i) for i in range(71)]
CHUNKS = (1, 2, 3, 5, 8, 21, 63, 64, 65, 100)
ALGORITHMS = [
    linear,
    blelloch,
    *(partial(hybrid, levels=k) for k in range(8)),
    *(partial(chunked, chunk=size) for size in CHUNKS),
    partial(chunked, chunk=4, algorithm=blelloch),
    partial(chunked, chunk=3, algorithm=partial(hybrid, levels=2)),
    partial(chunked, chunk=2, algorithm=partial(chunked, chunk=3)),
]


def name(algorithm):
    if not isinstance(algorithm, partial):
        return algorithm.__name__
    words = {key: name(x) if callable(x) else x for key, x in algorithm.keywords.items()}
    return f"{algorithm.func.__name__}-{'-'.join(map(str, words.values()))}"


every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name)


def join(a, b):
    """Concatenation, which is associative and does not commute; refuses anything but words."""
    assert isinstance(a, str), a
    assert isinstance(b, str), b
    return a + b


def multiply(a, b):
    """B·A of 2×2 integer matrices, exact."""
    return tuple(tuple(sum(b[i][k] * a[k][j] for k in (0, 1)) for j in (0, 1)) for i in (0, 1))


def test_the_reference_is_the_definition():
    for length in range(1, 71):
        words = ALPHABET[:length]
        assert reference(words, join) == [IDENTITY, *accumulate(words[:-1])]


@every_algorithm
def test_every_length_gives_the_reference_in_the_right_order(algorithm):
    """Also: the identity is never multiplied, since ``join`` refuses it."""
    for length in range(1, 71):
        words = ALPHABET[:length]
        assert algorithm(words, join) == reference(words, join)
        assert words == ALPHABET[:length]  # the input stays as it was


@every_algorithm
def test_integer_matrices(algorithm):
    matrices = [((i % 3 - 1, 2), (1, i % 5)) for i in range(37)]
    assert algorithm(matrices, multiply) == reference(matrices, multiply)


@pytest.mark.quick(0)
@given(
    st.lists(st.text(max_size=3) | st.just(IDENTITY), min_size=1, max_size=200),
    st.integers(0, 9),
    st.integers(1, 210),
)
def test_identities_may_stand_anywhere(words, levels, chunk):
    expected = [IDENTITY]
    for word in words[:-1]:
        before = expected[-1]
        moved = word if before is IDENTITY else before
        is_product = IDENTITY not in (before, word)
        expected.append(before + word if is_product else moved)
    assert linear(words, join) == expected
    assert blelloch(words, join) == expected
    assert hybrid(words, join, levels=levels) == expected
    assert chunked(words, join, chunk=chunk) == expected
    assert chunked(words, join, chunk=chunk, algorithm=blelloch) == expected


def test_algorithm_1_by_hand():
    """n = 6, each product of each level, as W20's algorithm 1 prescribes it."""
    done = []

    def noting(a, b):
        done.append((a, b))
        return a + b

    blelloch("abcdefg", noting)
    assert done == [
        *(("a", "b"), ("c", "d"), ("e", "f")),  # up, d = 0: (0, 1), (2, 3), (4, 5)
        *(("ab", "cd"), ("ef", "g")),  # up, d = 1: (1, 3), and (5, 7) clamped to (5, 6)
        ("abcd", "ef"),  # down, d = 1; d = 2 only moves
        *(("ab", "c"), ("abcd", "e")),  # down, d = 0: what precedes comes first
    ]


@given(st.integers(0, 300), st.integers(0, 9))
def test_pairs_are_those_of_algorithm_1(n, d):
    expected = [
        (i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n))
        for i in range(n + 1)
        if i % 2 ** (d + 1) == 0 and i <= n - 2**d
    ]
    assert list(pairs(n, d)) == expected
    positions = [position for pair in expected for position in pair]
    assert len(set(positions)) == len(positions)


def test_all_levels_are_blelloch_and_none_is_linear():
    for length in (1, 2, 3, 8, 63, 64, 65):
        reports = [Report() for _ in range(4)]
        blelloch(ALPHABET[:length], join, report=reports[0])
        hybrid(ALPHABET[:length], join, levels=99, report=reports[1])
        linear(ALPHABET[:length], join, report=reports[2])
        hybrid(ALPHABET[:length], join, levels=0, report=reports[3])
        counted = [(report.work, report.steps()) for report in reports]
        assert counted[0] == counted[1]
        assert counted[2] == counted[3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear([]), "no elements were given: expected at least one, the gradient"),
        (lambda: blelloch([]), "no elements were given: expected at least one, the gradient"),
        (lambda: hybrid([], levels=1), "no elements were given: expected at least one"),
        (lambda: chunked([], chunk=1), "no elements were given: expected at least one"),
        (lambda: hybrid("ab", join, levels=-1), r"-1 levels were given: expected 0 \(linear\)"),
        (lambda: chunked("ab", join, chunk=0), "a chunk of 0 elements was given: expected at"),
        (lambda: gradients([], []), "0 Jacobians and 0 loss terms were given: expected one term"),
        (lambda: gradients([], [None]), "the last state has no loss term: expected the tensor"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ScanError, match=message):
        call()


def chain(sizes, batch, seed=0):
    """[∇x_n, J_nᵀ, …, J_1ᵀ] with sizes x_0 … x_n; every third square Jacobian is diagonal."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    elements = [Vector(draw(*batch, sizes[-1]))]
    for i in reversed(range(len(sizes) - 1)):
        shared = i % 4 == 1  # a Jacobian that all of the batch share, as a linear layer's
        leading = () if shared else batch
        if sizes[i] == sizes[i + 1] and i % 3:
            elements.append(Diagonal(draw(*leading, sizes[i])))
        else:
            elements.append(Dense(draw(*leading, sizes[i], sizes[i + 1])))
    return elements


def assert_same(ours, theirs):
    assert ours[0] is theirs[0] is IDENTITY
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert isinstance(one, Vector)
        torch.testing.assert_close(one.data, other.data, rtol=1e-12, atol=1e-12)


@every_algorithm
@pytest.mark.parametrize("batch", [(), (1,), (2, 3)])
def test_chains_of_odd_shapes(algorithm, batch):
    sizes = [3, 5, 5, 2, 7, 1, 1, 1, 4, 4, 4, 4, 6, 3, 3, 2, 9, 9, 5]
    for length in (2, 3, 6, 9, len(sizes)):
        elements = chain(sizes[-length:], batch)
        assert_same(algorithm(elements), reference(elements, lambda a, b: b @ a))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(0, 6), st.integers(1, 45))
def test_chains_of_any_shapes(sizes, levels, chunk):
    elements = chain(sizes, (2,))
    expected = reference(elements, lambda a, b: b @ a)
    assert_same(blelloch(elements), expected)
    assert_same(hybrid(elements, levels=levels), expected)
    assert_same(chunked(elements, chunk=chunk), expected)
    for one, other in zip(linear(elements)[1:], expected[1:], strict=True):
        assert torch.equal(one.data, other.data)  # the same products in the same order


def network(sizes):
    """Layers of a small chain, their states, and the gradient of a loss of the last."""
    torch.manual_seed(0)
    weights = [torch.randn(rows, columns, dtype=torch.float64) for columns, rows in pairwise(sizes)]
    states = [torch.randn(sizes[0], dtype=torch.float64, requires_grad=True)]
    for weight in weights:
        states.append(torch.tanh(weight @ states[-1]))
        states[-1].retain_grad()
    return weights, states


def transposed_jacobians(weights, states):
    return [
        Dense(torch.autograd.functional.jacobian(lambda x, w=weight: torch.tanh(w @ x), state).T)
        for weight, state in reversed(list(zip(weights, states, strict=False)))
    ]


@every_algorithm
def test_gradients_are_those_of_autograd(algorithm):
    """The loss looks at the last state only, and the scan gives ∇x_n, …, ∇x_1."""
    weights, states = network([3, 5, 2, 4, 4, 1, 6, 3])
    jacobians = transposed_jacobians(weights, states)
    (states[-1] ** 2).sum().backward()
    first = Vector(2 * states[-1].detach())
    scanned = algorithm([first, *jacobians])
    assert len(scanned) == len(states)
    for ours, state in zip(scanned[1:], states[:0:-1], strict=True):
        torch.testing.assert_close(ours.data, state.grad, rtol=1e-12, atol=1e-14)


@every_algorithm
def test_gradients_with_a_loss_at_every_step_are_those_of_autograd(algorithm):
    weights, states = network([3, 5, 2, 4, 4, 1, 6, 3])
    jacobians = transposed_jacobians(weights, states)
    terms = [None if i in (0, 4) else 2 * state.detach() for i, state in enumerate(states)]
    sum((x**2).sum() for x, d in zip(states, terms, strict=True) if d is not None).backward()
    ours = gradients(jacobians, terms[::-1], algorithm=algorithm)
    for gradient, state in zip(ours, reversed(states), strict=True):
        torch.testing.assert_close(gradient, state.grad, rtol=1e-12, atol=1e-14)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from("daLI")), min_size=1, max_size=30),
    st.integers(0, 6),
    st.integers(1, 35),
)
def test_affine_steps_against_a_plain_loop(steps, levels, chunk):
    """Dense, diagonal and identity Jacobians, with and without a loss term of the step."""
    random = torch.Generator().manual_seed(len(steps))
    size = steps[0][0]
    gradient = torch.randn(2, size, generator=random, dtype=torch.float64)
    jacobians, terms, expected = [], [gradient], [gradient]
    for number, (new, kind) in enumerate(steps):
        if kind == "I":
            jacobian, dense = IDENTITY, torch.eye(size, dtype=torch.float64)
        elif kind == "d":
            diagonal = torch.randn(2, size, generator=random, dtype=torch.float64)
            jacobian, dense = Diagonal(diagonal), torch.diag_embed(diagonal)
        else:
            dense = torch.randn(2, new, size, generator=random, dtype=torch.float64)
            jacobian, size = Dense(dense), new
        term = torch.randn(2, size, generator=random, dtype=torch.float64)
        gradient = torch.einsum("...ij,...j->...i", dense, gradient)
        gradient = gradient if number % 3 == 1 else gradient + term
        jacobians.append(jacobian)
        terms.append(None if number % 3 == 1 else term)
        expected.append(gradient)
    for algorithm in (
        linear,
        blelloch,
        partial(hybrid, levels=levels),
        partial(chunked, chunk=chunk),
    ):
        for ours, theirs in zip(
            gradients(jacobians, terms, algorithm=algorithm), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


class Shift:
    """An element of a user's own: x ↦ x + by, on integers, with ``@`` and nothing else."""

    def __init__(self, by):
        self.by = by

    def __matmul__(self, other):
        return Shift(self.by + other.by)


@every_algorithm
def test_elements_of_a_users_own(algorithm):
    report = Report()
    scanned = algorithm([Shift(i) for i in range(20)], report=report)
    assert scanned[0] is IDENTITY
    assert [shift.by for shift in scanned[1:]] == list(accumulate(range(19)))
    assert report.work
    assert report.flops == 0


def test_the_last_element_is_in_no_result_and_may_be_the_identity():
    elements = chain([9, 2, 3, 2, 3, 2, 3, 2], ())
    whole, spared = Report(), Report()
    expected = blelloch(elements, report=whole)
    assert_same(blelloch([*elements[:-1], IDENTITY], report=spared), expected)
    assert (whole.work, spared.work) == (10, 9)
    assert spared.critical_flops < whole.critical_flops


@every_algorithm
def test_an_unread_last_element_is_never_multiplied(algorithm):
    """``join`` refuses it; the results are those of any other last element."""
    for length in range(1, 71):
        words = ALPHABET[:length]
        assert algorithm([*words[:-1], UNREAD], join) == reference(words, join)


@every_algorithm
def test_unread_in_place_of_the_identity_at_a_chains_end(algorithm):
    elements = chain([9, 2, 3, 3, 3, 2, 3, 2, 5, 1, 4], (2,))
    for last in range(1, len(elements)):
        unread, spared = Report(), Report()
        found = algorithm([*elements[:last], UNREAD], report=unread)
        assert_same(found, algorithm([*elements[:last], IDENTITY], report=spared))
        assert unread.work <= spared.work
        assert unread.critical_flops <= spared.critical_flops
        assert unread.flops <= spared.flops


def test_unread_spares_what_the_last_block_would_take():
    """n = 7: with the identity, g comes to stand last, and ef is multiplied by it in vain."""
    done = []

    def noting(a, b):
        done.append(a + b)
        return a + b

    blelloch([*"abcdefg", UNREAD], noting)
    down = ["abcdef", "abc", "abcde", "abcdefg"]
    assert done == ["ab", "cd", "ef", "abcd", *down]
    done.clear()
    blelloch([*"abcdefg", IDENTITY], noting)
    assert done == ["ab", "cd", "ef", "abcd", "efg", *down]


def test_an_unread_element_stays_one_object():
    assert pickle.loads(pickle.dumps(UNREAD)) is UNREAD
    assert copy.deepcopy(UNREAD) is UNREAD
    assert repr([UNREAD]) == "[UNREAD]"


def test_the_identity_stays_one_object():
    assert pickle.loads(pickle.dumps(IDENTITY)) is IDENTITY
    assert copy.deepcopy(IDENTITY) is IDENTITY
    assert repr([IDENTITY]) == "[IDENTITY]"


def test_mismatched_elements_are_refused_where_they_meet():
    elements = [Vector(torch.ones(3)), Dense(torch.ones(2, 3)), Dense(torch.ones(5, 4)), IDENTITY]
    for algorithm in (linear, blelloch, partial(chunked, chunk=2)):
        with pytest.raises(ScanError, match=r"Dense 5×4 cannot be applied to \w+ 2"):
            algorithm(elements)
    with pytest.raises(ScanError, match=r"Dense 2×3 and the loss term Vector 4 were given"):
        Affine(Dense(torch.ones(2, 3)), Vector(torch.ones(4)))
