"""Plans of held layers on a GPU, for a vendor's forward pass that takes a workspace."""

import pytest
import torch

from retrograde.plan.footprint import Curve
from retrograde.recurrent.bytes import Layer, sums_at_once
from retrograde.recurrent.plan import Planner
from retrograde.recurrent.spans import Sequences, sequential_block

MIB = 2**20


def planned(kind, batch, length, size, ordinary, share):
    """The plan in a share of the ordinary bytes, the spans that it has, and the least budget."""
    vendor = Curve(tuple((n, 8 * MIB + n * MIB // 4) for n in (1, 2, 4, 16, 64)))
    small = size <= 128
    layer = Layer(
        kind, batch, size, size,
        views=True,
        at_once=sums_at_once(length, batch),
        forward_by="launches" if small else "torch",
        backward_by="torch",
        vendor=None if small else vendor,
    )  # fmt: skip
    most = sequential_block(kind, batch, size, size, torch.float32, "cuda") * batch
    planner, lengths = Planner((layer,), most), Sequences(length, batch)
    budget = int(ordinary * share)
    plan, fit = planner.fit(lengths, budget, ordinary)
    assert fit.peak_bytes <= budget
    return plan, len(plan.steps) or lengths.spans(plan.block), planner.least_bytes(lengths)


@pytest.mark.parametrize(("share", "most"), [(0.1, 7), (0.05, 14)])
@pytest.mark.parametrize(("kind", "ordinary"), [("LSTM", 119_161_472), ("GRU", 115_016_320)])
def test_a_small_layer_has_few_spans_and_needs_no_workspace(kind, ordinary, share, most):
    _, spans, least = planned(kind, 16, 1000, 64, ordinary, share)
    assert spans <= most
    assert least <= MIB


def test_a_wide_layer_has_few_spans_whatever_the_vendor_takes():
    _, spans, _ = planned("LSTM", 64, 1000, 256, 732_365_824, 0.05)
    assert spans <= 30


def test_calls_of_the_vendor_may_be_shorter_than_spans():
    """Where its workspace would take what longer spans need."""
    plan, spans, _ = planned("LSTM", 8, 1000, 256, 100 * MIB, 0.12)
    steps = plan.block // 8
    assert 0 < plan.calls < steps
    assert spans <= 40
