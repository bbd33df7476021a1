"""What a program holds besides some of its calls."""

import torch

from retrograde.models.rows.rest_of_model import RestOfModel
from retrograde.plan.calls import OutputLifetime


def test_a_gradient_in_anothers_memory_counts_as_itself_where_a_row_counts_that():
    """Those of ``h`` and ``r`` lie in that of what they are joined to, four times as large."""
    x, elsewhere = torch.zeros(4, requires_grad=True), RestOfModel()
    with elsewhere:
        elsewhere.begin(x, counts=True)
        elsewhere.end(h := x * 1)
        r = x.exp()
        elsewhere.begin(h, counts=True)
        elsewhere.end(y := h * 2)
        out = torch.cat([h + r, y, y, y])
    elsewhere.finish([x], [out])
    first, _ = elsewhere.waits([[0], [1]])
    assert first == OutputLifetime(2, 2, 4.0)
    own, joined = r.nbytes, out.nbytes
    assert elsewhere.held_bytes([]) - elsewhere.held_bytes([[0], [1]]) == joined - own


def test_results_whose_gradients_lie_in_one_memory_count_once():
    """That of a stack lives until the first of them goes back."""
    x, elsewhere = torch.zeros(4, requires_grad=True), RestOfModel()
    with elsewhere:
        ys = []
        for _ in range(3):
            elsewhere.begin(x, counts=True)
            elsewhere.end(y := x * 2)
            ys.append(y)
        out = torch.stack(ys)
    elsewhere.finish([x], [out])
    waits = [*elsewhere.waits([[0], [1], [2]])]
    assert [wait.slack for wait in waits] == [3.0, 0.0, 0.0]
    assert [wait.gradient_ready_before for wait in waits] == [3, 3, 3]
