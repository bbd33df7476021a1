from functools import partial

import torch

from retrograde.scan.blelloch import blelloch, chunked, gradients, hybrid, linear
from retrograde.scan.elements import IDENTITY, UNREAD, Dense, Diagonal, Vector
from retrograde.scan.work_report import Level, Operand, Product, Report


def reported(algorithm, elements, **options):
    report = Report()
    algorithm(elements, report=report, **options)
    return report


def chain():
    sizes = [(2, 3), (5, 2), (1, 5), (4, 1), (4, 4)]
    return [Vector(torch.ones(6, 3)), *(Dense(torch.ones(6, *size)) for size in sizes)]


def test_each_product_is_listed_with_its_shapes_and_flops():
    levels = reported(linear, chain()[:3]).levels
    vector, dense = Operand("Vector", (6, 3)), Operand("Dense", (6, 2, 3))
    assert levels == [
        Level("linear", (), moves=1),
        Level("linear", (Product(vector, dense, 6 * 2 * 2 * 3),)),
    ]


def test_phases():
    words = "abcdefghij"

    def phases(scan, **options):
        report = Report()
        scan(words, lambda a, b: a + b, report=report, **options)
        return list(dict.fromkeys(level.phase for level in report.levels))

    assert phases(linear) == ["linear"]
    assert phases(blelloch) == ["up-sweep", "down-sweep"]
    assert phases(hybrid, levels=2) == ["up-sweep", "middle", "down-sweep"]
    assert phases(chunked, chunk=3) == ["chunks", "summaries, linear", "sweep"]
    assert phases(chunked, chunk=2, algorithm=blelloch) == [
        "chunks",
        "summaries, up-sweep",
        "summaries, down-sweep",
        "sweep",
    ]
    nested = partial(chunked, chunk=2, algorithm=blelloch)
    assert "summaries, summaries, up-sweep" in phases(chunked, chunk=2, algorithm=nested)


def test_the_scan_of_the_summaries_is_counted_alike():
    report = Report(cost=lambda a, b: len(a) * len(b))
    chunked("abcdef", lambda a, b: a + b, chunk=2, report=report)
    # ab, cd; then ab·cd for the summaries; then ab·c, abcd·e inside the chunks.
    assert [level.flops for level in report.levels] == [2, 0, 4, 6]
    assert [level.critical_flops for level in report.levels] == [1, 0, 4, 4]


def test_the_longest_product_of_a_level_is_on_the_critical_path():
    report = reported(blelloch, chain())
    first = report.levels[0]
    products = [6 * 2 * 2 * 3, 6 * 2 * 1 * 5 * 2, 6 * 2 * 4 * 4 * 1]
    assert [product.flops for product in first.products] == products
    assert (first.flops, first.critical_flops) == (sum(products), max(products))
    assert report.critical_flops == sum(level.critical_flops for level in report.levels)


def test_only_the_up_sweep_multiplies_matrices():
    """W20, section 3.2."""
    report = reported(blelloch, [Vector(torch.ones(3)), *[Dense(torch.eye(3))] * 62])
    kinds = {"up-sweep": set(), "down-sweep": set()}
    for level in report.levels:
        kinds[level.phase] |= {product.a.kind for product in level.products}
    assert kinds == {"up-sweep": {"Vector", "Dense"}, "down-sweep": {"Vector"}}


def test_a_report_gathers_several_runs_and_folds_equal_lines():
    report = Report()
    assert str(report).splitlines()[-1].split() == ["all", "0", "0", "0", "0", "0"]
    elements = [Vector(torch.ones(3)), *[Diagonal(torch.ones(3))] * 20]
    linear(elements, report=report)
    linear(elements, report=report)
    assert report.work == 38
    lines = [line.split(maxsplit=6) for line in str(report).splitlines()[1:]]
    move, run = ["linear", "1", "0", "1", "0", "0"], ["linear", "19", "19", "0", "57", "57"]
    name = "1 × Diagonal 3×3 · Vector 3"
    assert lines == [
        *(move, [*run, name]),
        *(move, [*run, name]),
        ["all", "40", "38", "2", "114", "114"],
    ]


def test_affine_steps_are_reported_as_such():
    report = Report()
    jacobian, one = Dense(torch.ones(2, 2)), torch.ones(2)
    gradients([jacobian] * 3, [one] * 4, algorithm=blelloch, report=report)
    vector, affine = Operand("Vector", (2,)), Operand("Affine", (2, 2))
    assert report.levels[0].products == (
        Product(vector, affine, 8 + 2),
        Product(affine, affine, 16 + 8 + 2),
    )


def test_what_meets_an_unread_element_is_neither_product_nor_move():
    elements = [*chain()[:4], UNREAD]
    report = reported(blelloch, elements)
    assert [len(level.products) for level in report.levels] == [2, 1, 0, 0, 1]
    assert [level.moves for level in report.levels] == [0, 0, 1, 1, 1]
    assert reported(linear, elements).work == 3
    assert reported(blelloch, [Vector(torch.ones(3)), UNREAD]).work == 0
    identity = reported(blelloch, [*chain()[:4], IDENTITY])
    assert identity.work == report.work
