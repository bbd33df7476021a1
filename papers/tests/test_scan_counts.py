from math import ceil, log2

import pytest

from retrograde.errors import ScanError
from retrograde.scan.blelloch import blelloch, chunked, hybrid, linear, most_levels
from retrograde.scan.elements import IDENTITY
from retrograde.scan.work_report import Report
from wang2020.scan_counts import (
    blelloch_steps,
    blelloch_work,
    chunked_steps,
    chunked_work,
    hybrid_steps,
    hybrid_work,
    linear_steps,
    linear_work,
    rounds,
)

EVERY_N = range(301)
WORKERS = (None, 1, 2, 3, 7, 64, 301)
CHUNKS = (1, 2, 3, 4, 7, 16, 17, 64, 150, 300, 301, 1000)


def counted(algorithm, n, **options):
    """A run over n + 1 elements, with unit cost."""
    report = Report(cost=lambda a, b: 1)
    algorithm([1] * (n + 1), lambda a, b: a + b, report=report, **options)
    return report


def steps(report, workers):
    """On the critical path, if each worker does one product at a time."""
    return sum(rounds(len(level.products), workers) for level in report.levels)


def test_linear_counts():
    for n in EVERY_N:
        report = counted(linear, n)
        assert report.work == linear_work(n) == max(0, n - 1)
        assert {steps(report, p) for p in WORKERS} == {linear_steps(n)}


def test_blelloch_counts():
    for n in EVERY_N:
        report = counted(blelloch, n)
        assert len(report.levels) == (2 * most_levels(n) + 1 if n else 0)
        assert report.work == report.flops == blelloch_work(n)
        assert report.critical_flops == report.steps() == blelloch_steps(n)
        for p in WORKERS:
            assert steps(report, p) == blelloch_steps(n, p)
        if n >= 2:  # as the module's docstring has it
            m = n.bit_length()
            assert report.work == 2 * n - 1 - m
            assert report.steps() == 2 * m - 3 + (2 * n >= 3 * 2 ** (m - 1))


@pytest.mark.quick(0)
def test_hybrid_counts():
    for n in EVERY_N:
        for k in range(most_levels(n) + 2):
            report = counted(hybrid, n, levels=k)
            assert report.work == hybrid_work(n, k)
            for p in WORKERS:
                assert steps(report, p) == hybrid_steps(n, k, p)


@pytest.mark.quick(0)
def test_chunked_counts():
    for n in EVERY_N:
        for size in CHUNKS:
            report = counted(chunked, n, chunk=size)
            assert report.work == chunked_work(n, size)
            for p in WORKERS:
                assert steps(report, p) == chunked_steps(n, size, p)
            chunks = ceil((n + 1) / size)
            if chunks > 1:  # as the docstring has it
                assert report.steps() == size - 1 + chunks - 2 + min(size, n + 1 - size) - 1


def unread(n):
    """Products of the up-sweep into position n, which the down-sweep overwrites unread.

    Level d has one if binary digit d of n is set; the topmost digit's level is not swept upward.
    """
    return max(0, n.bit_count() - 1)


def test_products_that_nobody_reads():
    """A product is a pair of what it was made of: those that no result leads back to are unread."""

    def made_of(node, seen):
        if isinstance(node, tuple) and id(node) not in seen:
            seen.add(id(node))
            for part in node:
                made_of(part, seen)

    for n in EVERY_N:
        made, seen = [], set()
        for result in blelloch(
            [1] * (n + 1), lambda a, b, made=made: made.append((a, b)) or made[-1]
        ):
            made_of(result, seen)
        assert len(made) - len(seen) == unread(n)


@pytest.mark.quick(0)
def test_the_last_element_as_the_identity_saves_the_product_with_it():
    for n in EVERY_N:
        report = Report()
        blelloch([*[1] * n, IDENTITY], lambda a, b: a + b, report=report)
        assert blelloch_work(n) - report.work == min(1, unread(n))


def test_equation_3_3_with_unbounded_workers():
    """Θ(log n): between 2·log₂(n+1) − 3 and 2·⌈log₂(n+1)⌉."""
    for n in range(1, 301):
        report = counted(blelloch, n)
        assert 2 * log2(n + 1) - 3 <= report.steps() <= 2 * ceil(log2(n + 1))
        assert report.steps() == steps(report, n + 1)  # p > n is as good as unbounded


def test_equation_3_3_with_p_workers():
    """Θ(n/p + log p) for p ≤ n: bounded from above and below."""
    for n in range(1, 301):
        report = counted(blelloch, n)
        for p in range(1, n + 1):
            theta = n / p + log2(p)
            assert theta / 2 - 3 <= steps(report, p) <= 4 * n / p + 2 * log2(p) + 2


def test_equation_3_4():
    """Θ(n): at most 2n, and at least n − 1, as the linear scan."""
    for n in range(1, 301):
        assert counted(linear, n).work <= counted(blelloch, n).work <= 2 * n


def test_growth_far_beyond_what_is_run():
    """Doubling n adds two steps; with p = √n workers the steps stay within the same bounds."""
    for exponent in range(4, 60):
        n = 2**exponent
        assert blelloch_steps(2 * n) - blelloch_steps(n) == 2
        assert blelloch_work(n) == 2 * n - 2 - exponent
        p = 2 ** (exponent // 2)
        assert n / p <= blelloch_steps(n, p) <= 4 * n / p + 2 * log2(p) + 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: blelloch_steps(-1), "the last position is -1: expected 0 or more, for n"),
        (lambda: blelloch_work(-1), "the last position is -1"),
        (lambda: hybrid_work(5, -1), "-1 levels were given: expected 0"),
        (lambda: chunked_work(5, 0), "a chunk of 0 elements was given: expected at least 1"),
        (lambda: chunked_steps(5, 2, 0), "0 workers were given: expected at least 1, or None"),
        (lambda: hybrid_steps(5, 1, 0), "0 workers were given"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ScanError, match=message):
        call()
