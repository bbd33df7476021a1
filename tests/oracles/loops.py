"""The plain loop over a cell, as one would write it, and networks that run in every way."""

import torch
from torch import nn
from torch.utils import _pytree as pytree

import retrograde as rg


def leaves_of(tree):
    """The tensors of a pytree."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def loop(cell, x, state):
    """Ordinary backpropagation through time: outputs, stacked, and the final state."""
    outputs = []
    for k in range(len(leaves_of(x)[0])):
        x_k = pytree.tree_map(lambda t, k=k: None if t is None else t[k], x)
        y, state = cell(x_k, state)
        outputs.append(y)
    stacked = pytree.tree_map(lambda *ys: None if ys[0] is None else torch.stack(ys), *outputs)
    return stacked, state


def gradients(outputs, state, wanted, seed=7):
    """The gradient of a loss in which every output and every final state has a part of its own."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [t for t in leaves_of((outputs, state)) if t.requires_grad]
    seeds = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in leaves]
    return torch.autograd.grad(leaves, wanted, seeds, allow_unused=True, retain_graph=True)


def assert_bitwise(ours, theirs):
    """The same tensors absent, the others equal bit for bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def assert_near(ours, theirs, tolerance=1e-12):
    """The same tensors absent, the others within a relative error."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
            a, b = (t.detach().to_dense() for t in (a, b))
            assert float((a - b).norm()) <= tolerance * float(b.norm())


def least(call):
    """The least budget of a call ``call(memory)``, from the error that refuses a byte."""
    try:
        call(1)
    except rg.BudgetError as error:
        return error.minimum_bytes
    return 1


class Looped(nn.Module):
    """A GRU cell over a sequence: by the plain loop, or, with a budget, by ``rg.unroll``."""

    def __init__(self, inputs, size, memory=None, schedule=None, dtype=torch.float64):
        super().__init__()
        self.cell = nn.GRUCell(inputs, size, dtype=dtype)
        self.asked = {"memory": memory, "schedule": schedule}

    def step(self, x, h):
        h = self.cell(x, h)
        return h, h

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[1], self.cell.hidden_size) if h is None else h
        if self.asked == {"memory": None, "schedule": None}:
            return loop(self.step, x, h)
        return rg.unroll(self.step, x, h, **self.asked)


#: Every way of running a recurrence in less memory, beside the ordinary one with the same weights.
WAYS = {
    "unroll": (Looped, Looped, {"memory": "40%"}),
    "LSTM": (nn.LSTM, rg.LSTM, {"memory": "60%"}),
    "RNN": (nn.RNN, rg.RNN, {"memory": "40%"}),
    "GRU, scanned within a budget": (nn.GRU, rg.GRU, {"memory": "40%", "backward": "scan"}),
    "LSTM, swept in ranges": (nn.LSTM, rg.LSTM, {"memory": "40%"}),
    "GRU, scanned": (nn.GRU, rg.GRU, {"backward": "scan"}),
    "LSTM, swept": (nn.LSTM, rg.LSTM, {"memory": "256KiB"}),
}


# What was fitted for one network serves the next of the same kind, or tests would fit for minutes.
_FITS = {}


def both(way, inputs=5, size=7, dtype=torch.float64, seed=0):
    """The ordinary network and ours, with the same weights."""
    theirs_type, ours_type, asked = WAYS[way]
    torch.manual_seed(seed)
    theirs, ours = (
        theirs_type(inputs, size, dtype=dtype),
        ours_type(inputs, size, dtype=dtype, **asked),
    )
    ours.load_state_dict(theirs.state_dict())
    if hasattr(ours, "_fits"):
        ours._fits = _FITS.setdefault(way, ours._fits)
    return theirs, ours


def results(net, x, state=None):
    """Outputs, final state, and every gradient of a loss in which each has a part."""
    y, final = net(x, state)
    wanted = [t for t in (x, *leaves_of(state), *net.parameters()) if t.requires_grad]
    found = gradients(y, final, wanted)
    return [t.detach() for t in (*leaves_of((y, final)), *found)]
