"""Any cell by a scan, through ``rg.unroll(..., backward="scan")``."""

import pytest
import torch
from torch import nn

import retrograde as rg
from oracles.hooks import CHANGES, Changed
from retrograde.scan import any_cell as cells

REAL = {"dtype": torch.float64}


def lstm_with_heads():
    """A cell with two outputs, one of which looks at the state before the step, and a closure."""
    torch.manual_seed(0)
    cell, head = nn.LSTMCell(3, 5, **REAL), nn.Linear(5, 2, **REAL)
    scale = torch.tensor(1.3, **REAL, requires_grad=True)

    def step(x, state):
        h, c = cell(x * scale, state)
        return {"early": head(state[0]), "late": h}, (h, c)

    return step, [*cell.parameters(), *head.parameters(), scale]


def gradients(step, parameters, length, **options):
    torch.manual_seed(1)
    x = torch.randn(length, 4, 3, **REAL, requires_grad=True)
    state = tuple(torch.randn(4, 5, **REAL, requires_grad=True) for _ in range(2))
    for p in parameters:
        p.grad = None
    y, (h, c) = rg.unroll(step, x, state, **options)
    loss = y["early"].square().sum() + y["late"].sin().sum() + c.cos().sum() + h.sum()
    loss.backward()
    outputs = [t.detach() for t in (y["early"], y["late"], h, c)]
    return outputs, [x.grad, *(s.grad for s in state), *(p.grad for p in parameters)]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64])
@pytest.mark.parametrize("block_bytes", [1, 64 * 2**20])
def test_the_gradients_are_ordinary_autograds(length, block_bytes, monkeypatch):
    monkeypatch.setattr(cells, "_BLOCK_BYTES", block_bytes)  # blocks of one chunk, or one block
    step, parameters = lstm_with_heads()
    outputs, expected = gradients(step, parameters, length)
    same, found = gradients(step, parameters, length, backward="scan")
    for a, b in zip(same, outputs, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()


def test_it_is_the_recurrent_modules_gradient_too():
    torch.manual_seed(0)
    gru, x = nn.GRU(3, 5, **REAL), torch.randn(40, 2, 3, **REAL)
    cell = nn.GRUCell(3, 5, **REAL)
    cell.load_state_dict({k.removesuffix("_l0"): v for k, v in gru.state_dict().items()})

    def step(x, h):
        h = cell(x, h)
        return h, h

    gru(x)[0].square().sum().backward()
    rg.unroll(step, x, torch.zeros(2, 5, **REAL), backward="scan")[0].square().sum().backward()
    for a, b in zip(cell.parameters(), gru.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 1e-12 * b.grad.norm()


@pytest.mark.quick(0)
def test_gradcheck_passes():
    step, parameters = lstm_with_heads()
    x = torch.randn(6, 2, 3, **REAL, requires_grad=True)
    h, c = (torch.randn(2, 5, **REAL, requires_grad=True) for _ in range(2))

    def run(x, h, c, *_):
        y, after = rg.unroll(step, x, (h, c), backward="scan")
        return y["early"], y["late"], *after

    assert torch.autograd.gradcheck(run, (x, h, c, *parameters))


def test_states_of_any_shape():
    weight = torch.randn(2, 3, **REAL, requires_grad=True)

    def step(x, state):
        total, image = state
        image = torch.tanh(image * weight + x[:, None, None])
        return image.sum(-1), (torch.sin(total + image.mean((1, 2))), image)

    def gradient(**options):
        torch.manual_seed(0)
        x = torch.randn(9, 4, **REAL, requires_grad=True)
        y, (total, _) = rg.unroll(step, x, (x[0], torch.zeros(4, 2, 3, **REAL)), **options)
        return torch.autograd.grad(y.square().sum() + total.sum(), (x, weight))

    torch.testing.assert_close(gradient(backward="scan"), gradient(), rtol=1e-12, atol=1e-12)


def test_some_gradients_only_and_no_gradient_at_all():
    step, parameters = lstm_with_heads()
    parameters[0].requires_grad_(False)
    x, state = torch.randn(9, 4, 3, **REAL), tuple(torch.randn(4, 5, **REAL) for _ in range(2))
    y, _ = rg.unroll(step, x, state, backward="scan")
    y["early"].sum().backward()
    assert parameters[0].grad is None
    assert all(p.grad is not None for p in parameters[1:])
    with torch.no_grad():
        assert not rg.unroll(step, x, state, backward="scan")[0]["late"].requires_grad


class Coupled(nn.Module):
    """A cell whose samples see one another."""

    def __init__(self, how):
        super().__init__()
        self.cell, self.how = nn.GRUCell(3, 5), how

    def forward(self, x, h):
        h = self.how(self.cell(x, h))
        return h, h


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda h: h - h.mean(0), "samples.*do not depend on one another"),
        (nn.BatchNorm1d(5, track_running_stats=False), "samples.*do not depend on one another"),
        (nn.BatchNorm1d(5), "changes its buffers"),
        (nn.Dropout(0.5), "draws random numbers"),
    ],
)
def test_cells_without_a_jacobian_a_sample_are_refused_before_any_work(how, message):
    x, h = torch.randn(7, 2, 3), torch.zeros(2, 5)
    with pytest.raises(rg.CellError, match=message):
        rg.unroll(Coupled(how), x, h, backward="scan")


def test_bad_input():
    step, _ = lstm_with_heads()
    x, state = torch.randn(9, 4, 3, **REAL), tuple(torch.randn(4, 5, **REAL) for _ in range(2))
    with pytest.raises(rg.CellError, match="unknown backward='auto': expected 'scan'"):
        rg.unroll(step, x, state, backward="auto")
    with pytest.raises(rg.CellError, match="together with memory= or schedule="):
        rg.unroll(step, x, state, backward="scan", memory="5%")
    with pytest.raises(rg.CellError, match=r"no Jacobian for each sample.*\(9, 3\)"):
        rg.unroll(
            lambda x, h: (h, h + x.sum()), x[:, 0].requires_grad_(), state[0], backward="scan"
        )
    y, _ = rg.unroll(step, x.requires_grad_(), state, backward="scan")
    with pytest.raises(rg.RetrogradeError, match="cannot itself be differentiated"):
        torch.autograd.grad(y["late"].sum(), x, create_graph=True)


def test_products_that_overflow_leave_the_exact_gradient():
    """A state half of which grows fiftyfold a step; the gradient meets only zeros there."""
    turn = torch.block_diag(torch.tensor([[0.6, -0.8], [0.8, 0.6]]), 50 * torch.eye(2))
    turn.requires_grad_()
    x = torch.randn(2000, 1, 4) * torch.tensor([1.0, 1.0, 0.0, 0.0])

    def step(x, h):
        h = x + h @ turn
        return h[:, :2], h

    def gradient(**options):
        y, _ = rg.unroll(step, x, torch.zeros(1, 4), **options)
        return torch.autograd.grad(y.sum(), turn)[0]

    expected = gradient()
    assert expected.isfinite().all()
    with pytest.warns(RuntimeWarning, match="not finite"):
        found = gradient(backward="scan")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", [name for name in CHANGES if "backward" in name])
def test_backward_hooks_of_a_cell_are_refused(change):
    """A scan would call them on units, not on gradients."""
    net = nn.Sequential(nn.Linear(5, 5))
    with Changed(change, net[0]), pytest.raises(rg.CellError, match=f"the cell has a {change}"):
        rg.unroll(lambda x, h: (net(x + h),) * 2, torch.ones(4, 2, 5), torch.zeros(2, 5),
                  backward="scan")  # fmt: skip
