"""What dropout between layers drops: read out of a module, and put into torch's layers by hand.

A mask depends on the seed and on the shapes, not on the weights, so it is read with weights of our
own. The layer below gives the same number everywhere. The layer above takes each unit of it, by a
tiny weight that keeps it linear, into a state that is halved at every step:

    state = Σ_t 2^(t − T) m_t · const

so the final state holds the mask of all steps as a binary fraction.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from oracles.networks import call
from oracles.options import settle

# Of double precision's 52 bits, some are left for what is not quite linear.
LONGEST = 36
_TINY = 1e-7


def masks_of(setup, seed):
    """What a seeded call keeps between each two layers: a (T, B, units) of booleans for each.

    After a sample's last step nothing is kept.
    """
    return [_mask(setup, gap, seed) for gap in range(setup.num_layers - 1)]


def _mask(setup, gap, seed):
    assert setup.length <= LONGEST
    assert setup.bias
    theirs, ours = setup.networks()
    for net in (theirs, ours):
        _make_readable(net, gap)
    zeros = setup.initial(theirs)
    zeros = zeros and tuple(torch.zeros_like(s).requires_grad_() for s in zeros)
    x = setup.x()
    settle(ours, x, zeros)
    torch.manual_seed(seed)
    found = _last_state(ours, gap + 1, call(ours, x, zeros))
    theirs.eval()
    whole = _last_state(theirs, gap + 1, call(theirs, x, zeros))
    width = ours.proj_size or ours.hidden_size
    lengths = torch.tensor(setup.lengths)
    directions = []
    for way, (a, b) in enumerate(zip(found, whole, strict=True)):
        # The sum of 2^t m_t; it would be 2^T − 1 if all were kept, without the factor 1 / (1 − p).
        every = (2.0 ** lengths.double() - 1).unsqueeze(1)
        number = (a[:, :width] / b[:, :width]) * (1 - setup.dropout) * every
        assert (number - number.round()).abs().max() < 0.01, "no survivor is scaled by 1 / (1 − p)"
        steps = torch.arange(setup.length).unsqueeze(1)
        place = steps if way == 0 else lengths - 1 - steps  # the other way ends with the first
        bit = (number.round().long() >> place.clamp_min(0).unsqueeze(2)) & 1
        directions.append((bit == 1) & (steps < lengths).unsqueeze(2))
    return torch.cat(directions, 2)


@torch.no_grad()
def _make_readable(net, gap):
    """Weights of which one layer gives a constant, and the next adds up what it is given."""
    for parameter in net.parameters():
        parameter.zero_()
    size, width = net.hidden_size, net.proj_size or net.hidden_size
    for way, suffix in enumerate(["", "_reverse"][: 2 if net.bidirectional else 1]):
        below, above = (
            {name: getattr(net, f"{name}_l{layer}{suffix}") for name in ("weight_ih", "bias_ih")}
            | {"weight_hh": getattr(net, f"weight_hh_l{layer}{suffix}")}
            for layer in (gap, gap + 1)
        )
        # Gates: none; reset, update, new; input, forget, cell, output. Half open without a weight.
        gates = {"GRU": [0, -40, 1], "LSTM": [40, -40, 1, 40]}.get(net.mode, [1])
        below["bias_ih"].copy_(torch.tensor(gates).repeat_interleave(size))
        candidate = {"GRU": 2, "LSTM": 2}.get(net.mode, 0) * size
        for unit in range(width):
            above["weight_ih"][candidate + unit, way * width + unit] = _TINY
        if net.mode.startswith("RNN"):
            above["weight_hh"].copy_(torch.eye(size) / 2)
        if net.proj_size:
            getattr(net, f"weight_hr_l{gap}{suffix}").fill_(1.0)


def _last_state(net, layer, outputs):
    """The final state of one layer that holds the sum: (directions, B, H)."""
    ways = 2 if net.bidirectional else 1
    state = outputs[-1].detach()
    state = state if state.dim() == 3 else state.unsqueeze(1)
    return state[layer * ways : (layer + 1) * ways]


class Layered(nn.Module):
    """torch's own layers one by one, with given masks in between; ``named_parameters`` is whole's.

    Args:
        setup: what ``whole`` was made of.
        whole: torch's module of all layers.
        masks: what is kept after each layer but the last.
    """

    def __init__(self, setup, whole, masks):
        super().__init__()
        self.setup, self.whole, self.masks, self.mode = setup, whole, masks, whole.mode
        self.layers = [self._layer(n) for n in range(whole.num_layers)]

    def named_parameters(self, *args, **options):
        return self.whole.named_parameters(*args, **options)

    def _layer(self, number):
        """One layer, on the very parameters of the whole."""
        whole = self.whole
        inputs = whole.input_size
        if number:
            inputs = (whole.proj_size or whole.hidden_size) * (2 if whole.bidirectional else 1)
        names = ["bias", "batch_first", "bidirectional"]
        names += {"LSTM": ["proj_size"], "GRU": []}.get(whole.mode, ["nonlinearity"])
        options = {name: getattr(whole, name) for name in names}
        layer = type(whole)(inputs, whole.hidden_size, dtype=torch.float64, **options)
        for name, _ in list(layer.named_parameters()):
            setattr(layer, name, getattr(whole, name.replace("_l0", f"_l{number}")))
        return layer

    def forward(self, x, hx=None):
        ways = 2 if self.whole.bidirectional else 1
        states = [hx] if isinstance(hx, torch.Tensor) else list(hx or ())
        finals = []
        for number, layer in enumerate(self.layers):
            part = tuple(s[number * ways : (number + 1) * ways] for s in states)
            x, final = layer(x, (part if self.mode == "LSTM" else part[0]) if part else None)
            finals.append(final if self.mode == "LSTM" else (final,))
            if number < len(self.masks):
                x = self._masked(x, self.masks[number])
        last = tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
        return x, last if self.mode == "LSTM" else last[0]

    def _masked(self, y, kept):
        kept = self.setup.laid_out(kept.double() / (1 - self.setup.dropout))
        if isinstance(y, PackedSequence):
            return PackedSequence(y.data * kept.data, *y[1:])
        return y * kept
