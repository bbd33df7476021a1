"""torch's recurrent modules beside ours with the same weights, and all the gradients of a loss."""

import torch

import retrograde as rg

#: By torch's names for them: torch's module, ours, and the options that make the cell.
CELLS = {
    "RNN_TANH": (torch.nn.RNN, rg.RNN, {"nonlinearity": "tanh"}),
    "RNN_RELU": (torch.nn.RNN, rg.RNN, {"nonlinearity": "relu"}),
    "GRU": (torch.nn.GRU, rg.GRU, {}),
    "LSTM": (torch.nn.LSTM, rg.LSTM, {}),
}


def pair(cell, inputs, size, *, memory=None, backward=None, gain=None, seed=0, **options):
    """torch's module and ours, with the same weights.

    With a gain the hidden weights of every gate are gain · N(0, 1) / √H: about that is then their
    spectral radius.
    """
    torch.manual_seed(seed)
    theirs_type, ours_type, more = CELLS[cell]
    theirs = theirs_type(inputs, size, **more, **options)
    if gain is not None:
        with torch.no_grad():
            for name, weight in theirs.named_parameters():
                if name.startswith("weight_hh"):
                    weight.normal_(0, gain / size**0.5)
    ours = ours_type(inputs, size, memory=memory, backward=backward, **more, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def state_of(net, *batch, dtype=torch.float64, seed=1):
    """A random initial state that wants its gradient: a tuple, (h,) or (h, c)."""
    generator = torch.Generator().manual_seed(seed)
    layers = net.num_layers * (2 if net.bidirectional else 1)
    sizes = [net.proj_size or net.hidden_size]
    sizes += [net.hidden_size] if net.mode == "LSTM" else []
    return tuple(
        torch.randn(layers, *batch, size, generator=generator, dtype=dtype).requires_grad_()
        for size in sizes
    )


def call(net, x, state=None):
    """The outputs and the parts of the final state, in one list."""
    hx = state if state is None or net.mode == "LSTM" else state[0]
    y, final = net(x, hx)
    data = y.data if isinstance(y, torch.nn.utils.rnn.PackedSequence) else y
    return [data, *(final if isinstance(final, tuple) else (final,))]


def seeds_for(outputs, seed=2):
    """A random gradient for every output."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in outputs]


def gradients(net, x, state=None, seeds=None):
    """Every gradient of a loss with a random part in every output and in the final state, by name.

    ``seeds`` are the gradients of [outputs, h, c], None for none.
    """
    return gradients_of(call(net, x, state), net, x, state, seeds)


def gradients_of(outputs, net, x, state=None, seeds=None):
    """As :func:`gradients`, of what a call gave."""
    seeds = seeds_for(outputs) if seeds is None else seeds
    data = x.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else x
    wanted = {"x": data, **{f"state {i}": s for i, s in enumerate(state or ())}}
    wanted = {
        k: t for k, t in {**wanted, **dict(net.named_parameters())}.items() if t.requires_grad
    }
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if s is not None]
    found = torch.autograd.grad(
        [o for o, _ in pairs], list(wanted.values()), [s for _, s in pairs], allow_unused=True
    )
    return dict(zip(wanted, found, strict=True))


def relative_error(a, b):
    """‖a − b‖ / ‖b‖, or ‖a‖ where b is zero; infinite where a is not finite.

    Both are scaled first, so that a gradient that explodes has a norm.
    """
    a, b = a.detach().double(), b.detach().double()
    scale = b.abs().amax() if b.any() else 1.0
    error = float(((a - b) / scale).norm() / ((b / scale).norm() if b.any() else 1.0))
    return error if error == error else float("inf")


def assert_close(ours, theirs, tolerance):
    """Every gradient of ours within a relative error of theirs; the same ones absent.

    The tolerance is a number, or one for each name.
    """
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert (ours[name] is None) == (theirs[name] is None), name
        if theirs[name] is not None:
            allowed = tolerance[name] if isinstance(tolerance, dict) else tolerance
            error = relative_error(ours[name], theirs[name])
            assert error <= allowed, f"{name}: {error:.2e} > {allowed:.1e}"
