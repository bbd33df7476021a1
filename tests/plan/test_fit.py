"""``fit`` plans the promising block lengths only, and chooses as if it had planned all of them."""

import importlib
import random
import time

import pytest
import torch

import retrograde as rg
from retrograde.plan.fit import fit, predict_peak_bytes
from retrograde.plan.footprint import Curve, Footprint
from retrograde.plan.steps.unfold import Segments
from retrograde.schedule import Schedule, Verb
from retrograde.units import format_bytes

module = importlib.import_module("retrograde.plan.fit")


def random_footprint(rng, **more):
    state = rng.choice([64, 100, 512, 2048])
    step, fixed = state * rng.choice([1, 2, 3, 7, 15]), state * rng.choice([0, 1, 20])
    return Footprint(
        state_bytes=state,
        advance=Curve.affine(fixed + state, rng.choice([0, step // 2])),
        held=Curve.affine(fixed // 2, step),
        record=Curve.affine(fixed + state, step),
        backward=Curve.affine(state, rng.choice([0, step])),
        ordinary=Curve.affine(fixed, step),
        gradient_bytes=state,
        heap_bytes=rng.choice([None, 50 * step]),
        call_steps=rng.choice([0.0, 0.3, 2.0, 40.0]),
        **more,
    )


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_undercuts_its_bound_and_none_is_better_than_the_one_chosen(seed):
    rng = random.Random(seed)
    sizes, length = random_footprint(rng), rng.choice([2, 5, 63, 200, 500])
    least, most = sizes.minimum_bytes(), sizes.ordinary(length)
    budget = int(least + max(0, most - least) * rng.choice([0.05, 0.3, 0.9]))
    cached, times = module._Sizes(sizes), {}
    for steps in module._grid(length, budget, cached):
        blocks = module._divided(length, steps, budget, cached)
        parts = Segments()
        root, *spent = blocks.plan(parts)
        schedule = blocks.schedule(parts, root, module._units(sizes))
        advances, records = schedule.kind == Verb.ADVANCE, schedule.kind == Verb.RECORD
        assert schedule.cost == spent[0]
        assert (advances.sum(), records.sum()) == (spent[1], blocks.count)
        times[steps] = sizes.time(length, *spent, blocks.count)
        assert module._least_time(blocks, sizes) <= times[steps]
        assert predict_peak_bytes(schedule, sizes) <= budget
    chosen = module._fastest(length, list(times), budget, cached)
    assert (chosen.time, chosen.block) == min((time, steps) for steps, time in times.items())


def test_a_short_range_may_take_more_than_a_long_one():
    """As where a kernel cuts ranges into blocks: a range of 16 steps takes less than one of 8."""
    back = Curve(((1, 13232), (2, 15056), (4, 18704), (8, 19920), (16, 19312), (40, 20528)))
    sizes = Footprint(
        state_bytes=304,
        advance=Curve(((1, 11712), (2, 12320), (4, 13536), (8, 14144), (40, 14144))),
        held=Curve(((1, 608), (40, 608))),
        record=Curve(((1, 12016), (2, 12624), (4, 13840), (8, 14448), (40, 14448))),
        backward=back,
        ordinary=Curve.affine(0, 3000),
        gradient_bytes=608,
        heap_bytes=None,
        scheduled=True,
        call_steps=15.0,
        record_steps=40.0,
    )
    for budget in range(sizes.minimum_bytes(), 24000, 16):
        found = fit(40, budget, sizes)
        assert predict_peak_bytes(found.schedule, sizes) == found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(24))
def test_the_most_steps_within_a_limit_are_found_without_a_search(seed):
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(1, 40), rng.randrange(1, 5)))
    curve = Curve(tuple((n, rng.randrange(60)) for n in steps))
    for limit in range(90):
        for length in (1, 2, 63):
            above = (n for n in range(1, length + 1) if curve(n) > limit)
            assert curve.most(limit, length) == max(1, next(above, length + 1) - 1)


def test_only_the_chosen_plan_is_written_out(monkeypatch):
    made, check = [], Schedule.__post_init__
    monkeypatch.setattr(Schedule, "__post_init__", lambda self: made.append(check(self)))
    found = fit(500, "20%", random_footprint(random.Random(3)))
    assert found.forward_steps > 500
    assert len(made) == 1


def test_a_million_steps_are_planned_at_once_and_in_few_actions():
    curve = Curve.affine
    sizes = Footprint(
        2048, curve(8192, 8192), curve(8192, 16384), curve(65536, 20000), curve(65536, 6000),
        curve(65536, 16384), 2048, None, 40.0,
    )  # fmt: skip
    fit(1000, "1MiB", sizes)  # what is loaded and compiled once
    start = time.perf_counter()
    found = fit(10**6, "4MiB", sizes)
    assert time.perf_counter() - start < 10
    assert found.peak_bytes <= 4 * 2**20
    assert found.forward_steps <= 3 * 10**6
    assert len(found.schedule) < 10**5


def test_what_a_schedule_runs_as_a_whole_is_held_to_what_the_schedule_takes():
    curve = Curve.affine
    sizes = Footprint(
        100, curve(900, 0), curve(0, 400), curve(0, 400), curve(900, 0), curve(0, 400), 100, None,
        0.0, scheduled=True,
    )  # fmt: skip
    whole = sizes.whole_bytes(20)
    assert whole == sizes.overhead_bytes(20) > sizes.ordinary(20)
    at_once = fit(20, whole, sizes)
    assert (at_once.forward_steps, at_once.block, at_once.ordinary) == (20, 20, False)
    assert at_once.peak_bytes <= whole
    found = fit(20, "100%", sizes)
    assert found.peak_bytes <= found.budget_bytes == sizes.ordinary(20)


def test_a_plan_that_recomputes_does_not_say_that_it_stores_all():
    found = rg.LSTM(64, 64, memory="5%").fit(torch.randn(1000, 16, 64))
    assert found.forward_steps > 1000
    assert "store-all" not in f"{found} {found!r}"
    assert str(found) == (
        f"{format_bytes(found.peak_bytes)} of {format_bytes(found.budget_bytes)} allowed; ordinary "
        f"backpropagation holds {format_bytes(found.ordinary_bytes)}, and "
        f"{format_bytes(found.minimum_bytes)} would do\n"
        "7.94 MiB of outputs and gradients come on top\n"
        f"{found.forward_steps:,} steps run forward for 1,000"
    )


def test_the_most_steps_within_a_limit_are_found_at_every_length():
    """Also where the size beyond the length, which the search may ask for, is within the limit."""
    for length in range(1, 70):
        for limit in range(0, 150, 7):
            expected = max([1, *(n for n in range(1, length + 1) if 2 * n + 1 <= limit)])
            assert module._most(length, limit, lambda n: 2 * n + 1) == expected
