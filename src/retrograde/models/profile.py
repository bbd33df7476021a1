"""``profile``: the cost of a step in bytes and seconds, which is what a planner needs.

The functions that will run a schedule are measured: their bytes
(:mod:`retrograde.sizes.footprint`) and their seconds (:mod:`retrograde.sizes.timing`).
"""

from dataclasses import dataclass
from typing import overload

from torch import nn

from retrograde.cells.as_cell import as_cell
from retrograde.cells.cell import Cell, examine, later_state
from retrograde.errors import NotExactError
from retrograde.models.chain_units import measure_network
from retrograde.models.sequential import named_layers
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import flatten, flatten_state
from retrograde.run.layout import Straight, check_length
from retrograde.schedule import Chain
from retrograde.sizes.footprint import footprint
from retrograde.sizes.timing import time_steps
from retrograde.units import aligned, format_bytes

# A cell's one input is repeated over as many steps as ordinary backpropagation is measured on.
_LENGTH = 256


@dataclass(frozen=True)
class Profile:
    """The cost of one step of a cell; ``print`` shows it as a table.

    Attributes:
        state_bytes: a hidden state, with the random state and the buffers that a rerun needs.
        internal_bytes: the internal state of a step, its input hidden state not counted.
        core_bytes: the working core: the peak of running and backpropagating the step.
        forward_seconds: one step that keeps nothing.
        record_seconds: one step that keeps its internal state.
        backward_seconds: backpropagating it.
        parameters: the number of tensors besides inputs and state that receive a gradient.
        draws: whether the step draws random numbers.
    """

    state_bytes: int
    internal_bytes: int
    core_bytes: int
    forward_seconds: float
    record_seconds: float
    backward_seconds: float
    parameters: int
    draws: bool

    @property
    def beta(self) -> int:
        """The size of an internal state in hidden states, its input not counted, rounded up (β)."""
        return max(1, -(-self.internal_bytes // max(1, self.state_bytes)))

    @property
    def alpha(self) -> int:
        """The same with its input hidden state (α)."""
        return self.beta + 1

    def __str__(self) -> str:
        table = [
            ("hidden state", format_bytes(self.state_bytes)),
            ("internal state", format_bytes(self.internal_bytes)),
            ("working core", format_bytes(self.core_bytes)),
            ("α, β", f"{self.alpha}, {self.beta}"),
            ("forward step", _microseconds(self.forward_seconds)),
            ("recording step", _microseconds(self.record_seconds)),
            ("backward step", _microseconds(self.backward_seconds)),
        ]
        return aligned(table)


def _microseconds(seconds: float) -> str:
    digits = 0 if seconds >= 10e-6 else 1
    return f"{seconds * 1e6:.{digits}f} µs"


@overload
def profile(cell: nn.Sequential, x: object, *, repeats: int = 9) -> Chain: ...


@overload
def profile(cell: Cell, x: object, state: object = None, *, repeats: int = 9) -> Profile: ...


def profile(
    cell: Cell | nn.Sequential, x: object, state: object = None, *, repeats: int = 9
) -> Profile | Chain:
    """Measure a step of a cell: what :func:`retrograde.plan` needs.

    For a ``Sequential`` every layer is measured, and the result is a chain that
    :func:`retrograde.plan` plans.

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``, or a ``Sequential``.
        x: the input. For a ``Sequential``, that of a call; for a cell, that of one step, a pytree
            of tensors.
        state: the hidden state, a pytree of tensors; none for a ``Sequential``.
        repeats: how often each part is timed; results are medians.

    Returns:
        A :class:`Profile`; ``print`` shows it as a table. For a ``Sequential``, a
        :class:`~retrograde.schedule.chain.Chain`.

    Raises:
        NotExactError: the cell cannot be run exactly, or is a recurrent module, which has a
        ``fit``.

    Example:
        >>> import torch
        >>> from retrograde import plan
        >>> cell = torch.nn.GRUCell(8, 16)
        >>> def step(x, h):
        ...     h = cell(x, h)
        ...     return h, h
        >>> p = profile(step, torch.zeros(4, 8), torch.zeros(4, 16))
        >>> p.state_bytes, p.alpha > 2
        (256, True)
        >>> plan(1000, 50, "msm", alpha=p.alpha, beta=p.beta).peak <= 50
        True
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> profile(net, torch.zeros(4, 8)).output_bytes
        (256, 256, 32)
    """
    if isinstance(cell, nn.Sequential):
        if state is not None:
            raise NotExactError("a Sequential has no state: expected profile(net, sample)")
        return measure_network(named_layers(cell), x, repeats)
    if isinstance(cell, nn.RNNBase):
        raise NotExactError(
            f"profile measures one step of a cell, and a {type(cell).__name__} has none: expected "
            "a cell or a Sequential; ask rg.fit(module, input, memory=)"
        )
    leaves, input_spec = flatten(x, "inputs")
    states, state_spec = flatten_state(state)
    check_length([t.unsqueeze(0) for t in leaves])
    with autocast_as_now(leaves[0].device):
        core = examine(as_cell(cell), leaves, input_spec, states, state_spec)
    repeated = [t.unsqueeze(0).expand(_LENGTH, *t.shape) for t in leaves]
    inputs = Straight(_LENGTH, fused=False).read(repeated)
    later = later_state(core, inputs, states)
    sizes = footprint(core, inputs, later, first=states)
    times = time_steps(core, inputs, later, repeats)
    return Profile(
        state_bytes=sizes.state_bytes,
        internal_bytes=sizes.held(1),
        core_bytes=sizes.core_bytes(1),
        forward_seconds=times.forward.step_seconds,
        record_seconds=times.record.step_seconds,
        backward_seconds=times.backward.step_seconds,
        parameters=len(core.parameters),
        draws=bool(core.surroundings.sources),
    )
