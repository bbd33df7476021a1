"""What is measured of a core, and what is told of lengths that are not measured."""

import torch

from retrograde.cells.cell import examine
from retrograde.plan.fit import in_one_range
from retrograde.plan.footprint import Curve, Footprint
from retrograde.replay.trees import flatten
from retrograde.run.layout import Straight
from retrograde.schedule import Advance, Record
from retrograde.sizes import footprint as module


def test_no_length_of_an_advance_is_told_less_than_the_longest_takes(monkeypatch):
    """Only the longest is measured, and the peak may come at any of its steps."""
    x, h = torch.randn(200, 2, 3), torch.zeros(2, 3)
    spec = flatten(x[0], "inputs")[1]
    core = examine(lambda a, h: (h, a + h), [x[0]], spec, [h], spec)
    measured = []
    monkeypatch.setattr(
        module, "_advance_bytes", lambda core, x, h, steps: measured.append(steps) or 9 * steps
    )
    flat = Curve(((1, 5), (2, 6), (4, 6)))
    sizes = Footprint(8, flat, flat, flat, flat, flat, 8, None)
    schedule = [Advance(0, 3), Advance(0, 50), Advance(0, 100), Record(0, 1)]
    found = module.measured_for(schedule, sizes, core, Straight(len(x), fused=False).read([x]), [h])
    assert measured == [100]
    assert [found.advance(steps) for steps in (3, 50, 100)] == [900] * 3
    assert [found.advance(steps) for steps in (1, 2, 4)] == [5, 6, 6]


def test_nodes_are_those_of_the_most_steps_that_are_recorded_at_a_time():
    assert module.node_bytes(in_one_range(7), 3) == 7 * 3 * 1024


def test_larger_steps_take_more_and_a_few_operations_more_do_not():
    flat = Curve(((1, 5), (2, 6), (4, 6)))
    sizes = Footprint(8, flat, flat, flat, flat, flat, 8, None)
    found = module.grown(sizes, 2.0)
    assert [getattr(found, name)(2) for name in ("held", "record", "backward")] == [12] * 3
    assert module.grown(sizes, 1.01) is sizes
