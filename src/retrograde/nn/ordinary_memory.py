"""torch's own module over given weights, and what ordinary backpropagation through it takes.

The weights of a module may be computed: by a parametrization, by a hook, by a module around it.
What is measured must neither use up their graph nor compute them anew, which may change buffers.
So it runs on stand-ins, in a shell of the module that looks for its weights nowhere else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from retrograde.cores.ordinary import measure_pass, ordinary_curve
from retrograde.plan.fit import Highest
from retrograde.units import Memory

__all__ = [
    "TORCHS_OWN",
    "Ordinary",
    "last_weights",
    "measure_ordinary",
    "over_weights",
    "stand_ins",
]

State = tuple[Tensor, ...]

#: torch's classes, whatever ``torch.nn.GRU`` and the others are made to mean later.
TORCHS_OWN: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.GRU, nn.LSTM)


def over_weights(
    module: nn.RNNBase, weights: Sequence[Tensor], kind: type[nn.RNNBase] | None = None
) -> Any:
    """A shell of a module over given weights, which computes none; only to be run forward.

    Args:
        module: whose options and mode it has.
        weights: as torch orders them; they are not looked for anywhere else.
        kind: the shell's class; torch's own by default.

    Returns:
        The shell. Its ``forward`` is to be called, since a call would run the module's hooks.

    Example:
        >>> lstm = nn.LSTM(3, 5)
        >>> shell, x = over_weights(lstm, lstm._flat_weights), torch.randn(4, 2, 3)
        >>> torch.equal(shell.forward(x)[0], lstm(x)[0])
        True
    """
    kind = kind or next(c for c in type(module).__mro__ if c in TORCHS_OWN)
    shell: Any = kind.__new__(kind)
    vars(shell).update(vars(module))
    vars(shell).update(_flat_weights=[*weights], _flat_weights_names=[], _flat_weight_refs=[])
    vars(shell).pop("forward", None)
    return shell


def stand_ins(weights: Sequence[Tensor]) -> list[Tensor]:
    """Leaves that share the memory of weights, and have neither a past nor hooks.

    Args:
        weights: parameters, or computed.

    Returns:
        A leaf for each, that requires a gradient where the weight does.
    """
    return [w.detach().requires_grad_(w.requires_grad) for w in weights]


def last_weights(module: nn.RNNBase) -> list[Tensor]:
    """A module's weights as they were last computed: nothing is computed to look at their shapes.

    Args:
        module: an RNN, a GRU or an LSTM.

    Returns:
        The weights, as torch orders them. One that a parametrization or a hook of torch's computes
        requires a gradient where what it is computed from does.
    """
    found: list[Tensor] = []
    names: list[str] = module._flat_weights_names
    for name, last in zip(names, module._flat_weights, strict=True):
        own: Any = module._parameters.get(name, vars(module).get(name, last))
        origin = module._parameters.get(f"{name}_orig")  # spectral_norm's, and that of pruning
        origins: list[Tensor] = [] if origin is None else [origin]
        if is_parametrized(module, name):
            origins = [*module.parametrizations[name].parameters()]  # type: ignore[index,union-attr]
        if origins:
            own = own.detach().requires_grad_(any(p.requires_grad for p in origins))
        found.append(own)
    return found


@dataclass(frozen=True)
class Ordinary:
    """The working bytes of ordinary backpropagation, for any length.

    Attributes:
        batch: how many sequences there are.
        full: bytes by steps, if all sequences have all of them.
        single: of a packed batch, bytes by steps if but one sequence has them.
        gradient_copy: bytes a step on top, where a kernel must copy the outputs' gradient.
    """

    batch: int
    full: Highest
    single: Highest | None = None
    gradient_copy: int = 0

    def __call__(self, steps: int, rows: int) -> int:
        """The bytes for so many steps, and so many steps of sequences in all if packed."""
        if self.single is None or self.batch == 1:
            return self.full(steps)
        least, most = self.single(steps), self.full(steps)
        return least + -(-(most - least) * (rows - steps) // (steps * (self.batch - 1)))


def measure_ordinary(
    module: nn.RNNBase,
    weights: Sequence[Tensor],
    x: Tensor,
    state: State | None,
    length: int,
    packed: bool,
    sorts: bool,
    memory: Memory | None = None,
) -> Ordinary:
    """Measure torch's own module on short sequences.

    Args:
        module: what is run, by torch's own forward.
        weights: leaves to run it over.
        x: inputs (T, B, I).
        state: the initial state: (h,), or (h, c), each (layers · directions, B, H); None for zeros.
        length: T.
        packed: whether the inputs are to be packed.
        sorts: whether a packed batch has to be sorted.
        memory: the budget, which holds beyond a few steps; None for none.

    Returns:
        What it takes.
    """
    shell, devices = over_weights(module, weights), [x.device] if x.is_cuda else []

    def taker(batch: int, expanded: bool = False) -> Callable[[int], tuple[int, int]]:
        kept = None if state is None else tuple(s[:, :batch] for s in state)

        def measured(steps: int) -> tuple[int, int]:
            given = x[:steps, :batch].detach()
            if packed:
                given = given.flatten(0, 1)
            given.requires_grad_(x.requires_grad)
            sizes = torch.full((steps,), batch) if packed else None
            passing = _Pass(shell, given, kept, sizes, sorts, expanded)
            return measure_pass(passing.forward, passing.backward, passing.drop, x.device)

        return measured

    batch = x.shape[1]
    with torch.enable_grad(), torch.random.fork_rng(devices):
        full = ordinary_curve(taker(batch), length, memory)
        single = ordinary_curve(taker(1), length, memory) if packed else None
        steps = full.curves[0].points[-1][0]
        more = max(0, max(taker(batch, expanded=True)(steps)) - full(steps))
    return Ordinary(batch, full, single, -(-more // steps))


@dataclass
class _Pass:
    """Ordinary backpropagation; what the caller would be handed is kept until it is dropped."""

    shell: Any
    x: Tensor
    state: State | None
    sizes: Tensor | None
    sorts: bool
    expanded: bool
    handed: list[Any] = field(default_factory=list)

    def forward(self) -> None:
        state, shell = self.state, self.shell
        kept = () if state is None else state
        kept = tuple(s.detach().clone().requires_grad_(s.requires_grad) for s in kept)
        hx: Any = None if state is None else kept if shell.mode == "LSTM" else kept[0]
        outputs, final = shell.forward(_given(shell, self.x, self.sizes, self.sorts), hx)
        self.handed += outputs, final, kept

    def backward(self) -> None:
        outputs, final, kept = self.handed
        y = outputs.data if isinstance(outputs, PackedSequence) else outputs
        ends = (y, *(final if isinstance(final, tuple) else (final,)))
        roots = [t for t in ends if t.requires_grad]
        seeds = [torch.ones_like(t) for t in roots]
        if self.expanded:
            seeds = [torch.ones((), dtype=t.dtype, device=t.device).expand_as(t) for t in roots]
        wanted = [t for t in (self.x, *kept, *self.shell._flat_weights) if t.requires_grad]
        found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
        self.handed += seeds, found

    def drop(self) -> None:
        self.handed.clear()


def _given(module: nn.RNNBase, x: Tensor, sizes: Tensor | None, sorts: bool) -> Any:
    """The inputs as a caller gives them."""
    if sizes is None:
        return x.transpose(0, 1) if module.batch_first else x
    order = torch.arange(int(sizes[0]), device=x.device) if sorts else None
    return PackedSequence(x, sizes, order, order)
