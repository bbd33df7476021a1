"""The report's picture of a plan shows every step that the plan runs again."""

import pytest
from matplotlib.figure import Figure

from retrograde import figures
from retrograde.figures.memory import Curve
from retrograde.plan.fit import whole_fit
from retrograde.training import Comparison, Report, Side

BYTES = dict.fromkeys(("budget_bytes", "peak_bytes", "ordinary_bytes", "minimum_bytes"), 100)
COMPARISON = Comparison(100, Side(100, 1.0, Curve([0.0, 1.0], [0, 100])), None, None, "no memory")


@pytest.mark.parametrize(
    ("length", "block", "again", "policy"),
    [
        (7, 3, 5, "recompute-gates"),
        (7, 3, 0, "one-range"),
        (7, 3, 7, "recompute-gates"),
        (65, 63, 64, "recompute-gates"),
        (1, 1, 1, "recompute-gates"),
    ],
)
def test_the_picture_of_a_plan_shows_what_is_recomputed(
    tmp_path, monkeypatch, length, block, again, policy
):
    drawn = []
    monkeypatch.setattr(figures, "draw_schedule", lambda plan: drawn.append(plan) or Figure())
    fit = whole_fit(length, block, forward_steps=length + again, calls=2, time=1.0, **BYTES)
    Report(tmp_path).draw_plan(fit, COMPARISON)
    assert [(plan.cost, plan.policy) for plan in drawn] == [(length + again, policy)]
