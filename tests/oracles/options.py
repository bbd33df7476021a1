"""Every option of torch's recurrent modules: which there are, and a call with some of them."""

import copy
from dataclasses import dataclass, fields
from itertools import combinations, product

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import retrograde as rg
from oracles.networks import call, gradients_of, pair, relative_error, seeds_for, state_of


@dataclass(frozen=True, repr=False)
class Setup:
    """A recurrent module, what it is run on, and which gradients arrive and are wanted.

    Its ``repr`` makes it again, and names nothing but what differs from the defaults.

    Attributes:
        cell: a key of ``oracles.networks.CELLS``.
        layout: "batched", "unbatched", "packed" (the longest first), or "packed unsorted".
        state: whether an initial state is "given", a "constant" without gradient, or "absent".
        loss: what gradients arrive for: "both", "outputs", "final state", or its "c" alone.
        wanted: what requires a gradient: "all", all but "no x" or "no weight_hh", or "x alone".
        seeds: whether the gradients that arrive are "dense", or scalars that are "expanded".
        memory: the budget; the least one where that is more; None for torch's own way.
    """

    cell: str = "LSTM"
    length: int = 63
    batch: int = 3
    inputs: int = 5
    size: int = 4
    num_layers: int = 1
    bias: bool = True
    batch_first: bool = False
    bidirectional: bool = False
    proj_size: int = 0
    dropout: float = 0.0
    training: bool = False
    layout: str = "batched"
    state: str = "given"
    dtype: str = "float64"
    loss: str = "both"
    wanted: str = "all"
    seeds: str = "dense"
    memory: int | str | None = 1

    def __repr__(self):
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        told = [f"{f.name}={given[f.name]!r}" for f in fields(self) if given[f.name] != f.default]
        return f"Setup({', '.join(told)})"

    @property
    def id(self):
        """A name for a test."""
        named = f"{self.cell} T={self.length} memory={self.memory}"
        plain = Setup(self.cell, self.length, memory=self.memory)
        told = [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]
        return " ".join([named, *(f"{name}={getattr(self, name)}" for name in told)])

    @property
    def number_type(self):
        return getattr(torch, self.dtype)

    def networks(self):
        """torch's module and ours, with the same weights."""
        names = ["num_layers", "bias", "batch_first", "bidirectional", "dropout"]
        names += ["proj_size"] if self.cell == "LSTM" else []
        options = {name: getattr(self, name) for name in names}
        both = pair(self.cell, self.inputs, self.size, dtype=self.number_type, **options)
        for net in both:
            net.train(self.training)
            self.freeze(net)
        both[1].memory = self.memory
        return both

    def freeze(self, net):
        """Let those parameters alone require a gradient that are wanted to."""
        for name, parameter in net.named_parameters():
            frozen = {"x alone": True, "no weight_hh": name.startswith("weight_hh")}
            parameter.requires_grad_(not frozen.get(self.wanted, False))

    @property
    def lengths(self):
        """The steps of each sample."""
        if not self.layout.startswith("packed"):
            return [self.length] * self.samples
        falling = [max(1, self.length * (self.batch - b) // self.batch) for b in range(self.batch)]
        # Turned round by one, so that the order and its inverse differ.
        return falling[1:] + falling[:1] if self.layout == "packed unsorted" else falling

    @property
    def samples(self):
        return 1 if self.layout == "unbatched" else self.batch

    def laid_out(self, x):
        """A (T, B, …) tensor in the layout that is asked for."""
        if self.layout.startswith("packed"):
            return pack_padded_sequence(x, self.lengths, enforce_sorted=self.layout == "packed")
        if self.layout == "unbatched":
            return x.squeeze(1)
        return x.transpose(0, 1) if self.batch_first else x

    def x(self, seed=3):
        generator = torch.Generator().manual_seed(seed)
        shape = (self.length, self.samples, self.inputs)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.number_type)
        return leaf(self.laid_out(x), self.wanted != "no x")

    def initial(self, net):
        """The initial state, or None."""
        if self.state == "absent":
            return None
        batch = () if self.layout == "unbatched" else (self.batch,)
        states = state_of(net, *batch)
        return tuple(leaf(s.to(self.number_type), self.state == "given") for s in states)

    def seeds_for(self, outputs):
        """The gradients that arrive, for [outputs, h, c]; None for none."""
        seeds = seeds_for(outputs)
        if self.seeds == "expanded":
            seeds = [s.flatten()[0].clone().expand(s.shape) for s in seeds]
        last = len(outputs) - 1
        arrives = {"outputs": [0], "final state": range(1, last + 1), "c": [last]}
        chosen = arrives.get(self.loss, range(last + 1))
        return [s if n in chosen else None for n, s in enumerate(seeds)]

    def results(self, net, x, state):
        """Outputs, final state and all gradients, by name; zeros for a gradient that is absent."""
        outputs = call(net, x, state)
        found = gradients_of(outputs, net, x, state, self.seeds_for(outputs))
        leaves = {"x": data_of(x), **dict(net.named_parameters())}
        leaves |= {f"state {n}": s for n, s in enumerate(state or ())}
        full = {k: torch.zeros_like(leaves[k]) if g is None else g for k, g in found.items()}
        return {**dict(zip(["y", "h", "c"], outputs, strict=False)), **full}


def data_of(x):
    return x.data if isinstance(x, PackedSequence) else x


def leaf(x, wanted=True):
    """A tensor or a packed sequence, whose numbers are a leaf."""
    if isinstance(x, PackedSequence):
        return PackedSequence(x.data.detach().requires_grad_(wanted), *x[1:])
    return x.detach().requires_grad_(wanted)


def settle(net, x, state):
    """Raise the budget of a network to the least, if it is less; tell whether it was."""
    hx = state if state is None or net.mode == "LSTM" else state[0]
    try:
        net(x, hx)
    except rg.BudgetError as refusal:
        net.memory = refusal.minimum_bytes
        return True
    return False


def in_double(net, x, state):
    """The same network, input and state in double precision."""
    data = data_of(x).detach().double().requires_grad_(data_of(x).requires_grad)
    x = PackedSequence(data, *x[1:]) if isinstance(x, PackedSequence) else data
    return (
        copy.deepcopy(net).double(),
        x,
        state and tuple(leaf(s.double(), s.requires_grad) for s in state),
    )


def assert_results(setup, ours, theirs, exact=None):
    """Ours equal theirs; in a precision below double, they are as near to the exact ones."""
    assert ours.keys() == theirs.keys()
    for name, b in theirs.items():
        a = ours[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if exact is None:
            error, allowed = relative_error(a, b), 1e-12
        else:
            error = relative_error(a, exact[name])
            allowed = 4 * relative_error(b, exact[name]) + 16 * torch.finfo(b.dtype).eps
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.1e} in {setup}"


#: The budgets: one that is refused, so that the least is taken; 5 %; more than enough.
MEMORIES = (1, "5%", "1GiB")
LENGTHS = (63, 1, 2, 200)

#: The options and their values, the defaults first.
_OPTIONS = {
    "num_layers": (1, 2, 3),
    "bias": (True, False),
    "batch_first": (False, True),
    "bidirectional": (False, True),
    "dropout": (0.0, 0.4),
    "layout": ("batched", "unbatched", "packed", "packed unsorted"),
    "state": ("given", "absent", "constant"),
    "dtype": ("float64", "float32", "bfloat16"),
    "loss": ("both", "outputs", "final state"),
    "wanted": ("all", "no x", "no weight_hh", "x alone"),
    "seeds": ("dense", "expanded"),
}
_OF_AN_LSTM = {"proj_size": (0, 3), "loss": ("both", "outputs", "final state", "c")}


def options_of(cell):
    """The options of a cell, and for each its values, the default first."""
    return _OPTIONS | (_OF_AN_LSTM if cell == "LSTM" else {})


def covering(axes):
    """Few combinations of values, in which every two values of different axes meet.

    Greedy: a combination begins with a pair that has not met, and takes for each further axis the
    value that meets most of what it has not met.
    """

    def ordered(a, b):
        return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)

    names = list(axes)
    settings = [[(name, value) for value in axes[name]] for name in names]
    open_ = {pair: None for a, b in combinations(settings, 2) for pair in product(a, b)}
    while open_:
        row = dict(next(iter(open_)))
        for name in names:
            if name not in row:

                def meetings(value, name=name, row=row):
                    return sum(ordered((name, value), one) in open_ for one in row.items())

                row[name] = max(axes[name], key=meetings)
        for met in combinations([(name, row[name]) for name in names], 2):
            open_.pop(met, None)
        yield row


def alone(axes):
    """The defaults, and each other value of each axis with all else at its default."""
    yield {}
    for name, values in axes.items():
        yield from ({name: value} for value in values[1:])


def in_pairs(axes):
    """Every two values of different axes that are no defaults, with all else at its default."""
    for a, b in combinations(axes, 2):
        yield from ({a: u, b: v} for u, v in product(axes[a][1:], axes[b][1:]))


def quick_setups(cell):
    """Each option alone, in turn with each length and budget; and setups in which all pairs meet.

    Lengths and budgets are among what meets, so that every option is run with each of them.
    """
    ways = list(product(LENGTHS, MEMORIES))
    # 5 and 12 have no common divisor: all ways have their turn.
    turns = ((options, *ways[5 * n % 12]) for n, options in enumerate(alone(options_of(cell))))
    found = [Setup(cell, length, memory=memory, **options) for options, length, memory in turns]
    axes = {"length": LENGTHS, "memory": MEMORIES, **options_of(cell)}
    return list(dict.fromkeys([*found, *(Setup(cell, **row) for row in covering(axes))]))


def all_setups(cell):
    """Each option and each pair of options, by itself, at every length and budget."""
    for options in [*alone(options_of(cell)), *in_pairs(options_of(cell))]:
        for length, memory in product(LENGTHS, MEMORIES):
            yield Setup(cell, length, memory=memory, **options)
