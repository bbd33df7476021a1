"""Any cell as a core, called once a step; what the executor must know of it is learnt by one trial.

Everything that the user wrote as pytrees, closures or modules is settled here, before any work
starts: a core is a pure function of its inputs and its state, on flat lists of tensors.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from retrograde.discover.captured import Outside, find_outside
from retrograde.discover.dry_run import try_out
from retrograde.discover.referents import Reach, reach
from retrograde.discover.surroundings import Ambient, version
from retrograde.discover.trees import Structure, flatten
from retrograde.errors import CellError
from retrograde.run.autograd_core import AutogradCore
from retrograde.run.core import as_leaf

__all__ = [
    "Cell",
    "StepCore",
    "as_pair",
    "begin",
    "examine",
]

Cell = Callable[[Any, Any], tuple[Any, Any]]
Tensors = list[Tensor]


@dataclass(frozen=True)
class StepCore(AutogradCore):
    """Any cell ``cell(x_t, state) -> (y_t, state)``, one call a step; made by :func:`examine`.

    ``quiet`` is the cell without what only its outputs need, where leaving that out is not seen;
    ``copied`` tells which parts of the state it is given a copy of, for it writes to them.
    """

    cell: Cell
    input_spec: Structure
    state_spec: Structure
    output_spec: Structure
    state_like: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    output_like: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    outside: Outside
    ambient: Ambient
    aliases: tuple[int | None, ...]
    fused: bool = False
    sums: bool = False
    quiet: Cell | None = None
    found: Reach = field(default_factory=Reach)
    copied: tuple[bool, ...] = ()

    @property
    def parameters(self) -> Tensors:
        return self.outside.parameters

    @property
    def targets(self) -> Tensors:
        return self.outside.targets

    def recording(self) -> AbstractContextManager[Any]:
        return self.outside.cut()

    def totals(self) -> list[Tensor | None]:
        return [None] * len(self.parameters)

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        outputs, states, output_spec = self._run(self.cell, inputs, state)
        _check_like("output", outputs, output_spec, self.output_like, self.output_spec)
        if torch.is_grad_enabled():
            _check_aliases(outputs, states, self.aliases)
        return outputs, states

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self._run(self.quiet or self.cell, inputs, state)[1]

    def _run(
        self, cell: Cell, inputs: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Structure]:
        state = _copied(state, self.copied)
        x, s = self.input_spec.unflatten(inputs), self.state_spec.unflatten(state)
        outputs, states, output_spec, state_spec = _call(cell, x, s)
        _check_like("state", states, state_spec, self.state_like, self.state_spec)
        return outputs, states, output_spec


def examine(
    cell: Cell,
    inputs: Tensors,
    input_spec: Structure,
    state: Tensors,
    state_spec: Structure,
    made_of: Sequence[Any] | None = None,
) -> StepCore:
    """Run one step of a cell, leave no trace of it, and learn what the executor must know.

    That is: the structure of its output; that its state keeps structure, shapes and dtypes; every
    tensor that it uses besides its arguments and that requires a gradient (rule 5); whether it
    draws random numbers or changes buffers (rules 2 and 3); that it writes to none of its
    arguments (rule 6).

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``.
        inputs: the flat input of one step.
        input_spec: its structure.
        state: the flat initial state.
        state_spec: its structure.
        made_of: where to look for modules and captured tensors; in the cell itself by default.

    Returns:
        A core that runs the cell.

    Raises:
        CellError: the cell cannot be run exactly; the message says why and what to do.
    """
    device = next((t.device for t in (*state, *inputs)), torch.device("cpu"))
    _check_trackable([*inputs, *state])
    x = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    s = [as_leaf(t) for t in state]
    found = reach([cell] if made_of is None else made_of)
    step = _Trying(cell, x, input_spec, s, state_spec, (False,) * len(s))
    trial = try_out(step, found, device, lambda result: [*result[0], *result[1]])
    outputs, states, output_spec, after_spec = trial.value
    like = _settled(states, state, device)
    _check_like("state", states, after_spec, like, state_spec)
    return StepCore(
        cell=cell,
        input_spec=input_spec,
        state_spec=state_spec,
        output_spec=output_spec,
        state_like=like,
        output_like=tuple(_like(t) for t in outputs),
        outside=find_outside(trial.found, [*outputs, *states], trial.mark, [*x, *s]),
        ambient=trial.ambient,
        aliases=tuple(next((j for j, t in enumerate(states) if t is y), None) for y in outputs),
        found=trial.found,
        copied=step.copied,
    )


def begin(
    cell: Cell, inputs: Tensors, input_spec: Structure, state: Tensors, state_spec: Structure
) -> tuple[StepCore, Tensors, Tensors]:
    """Run step 0 where nothing will be differentiated, and learn what the other steps must be like.

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``.
        inputs: the flat input of step 0.
        input_spec: its structure.
        state: the flat initial state.
        state_spec: its structure.

    Returns:
        A core that runs the cell, the outputs of step 0, and the state after it.

    Raises:
        CellError: the step changed the structure, a shape or a dtype of its state.
    """
    device = next((t.device for t in (*state, *inputs)), torch.device("cpu"))
    outputs, states, output_spec, after_spec = _call(
        cell, input_spec.unflatten(inputs), state_spec.unflatten(state)
    )
    like = _settled(states, state, device)
    _check_like("state", states, after_spec, like, state_spec)
    core = StepCore(
        cell=cell,
        input_spec=input_spec,
        state_spec=state_spec,
        output_spec=output_spec,
        state_like=like,
        output_like=tuple(_like(t) for t in outputs),
        outside=Outside([], []),
        ambient=Ambient(device),
        aliases=(None,) * len(outputs),
    )
    return core, outputs, states


def _settled(
    states: Tensors, given: Tensors, device: torch.device
) -> tuple[tuple[torch.Size, torch.dtype, torch.device], ...]:
    """What a state looks like after a step: as before it, but for its precision under autocast.

    There a state that is given in float32 is often computed in half precision from step 0 on.
    """
    like = [_like(t) for t in given]
    if torch.is_autocast_enabled(device.type) and len(states) == len(given):
        for i, (t, (shape, dtype, place)) in enumerate(zip(states, like, strict=True)):
            if t.is_floating_point() and dtype.is_floating_point:
                like[i] = shape, t.dtype, place
    return tuple(like)


@dataclass
class _Trying:
    """A cell on the leaves of step 0, to see what it writes to in place.

    A part of the state that it writes to is given as a copy from then on; an input is refused.
    """

    cell: Cell
    inputs: Tensors
    input_spec: Structure
    state: Tensors
    state_spec: Structure
    copied: tuple[bool, ...]

    def __call__(self) -> tuple[Tensors, Tensors, Structure, Structure]:
        x, s = self.inputs, _copied(self.state, self.copied)
        versions = [version(t) for t in x], [version(t) for t in s]
        try:
            result = _call(self.cell, self.input_spec.unflatten(x), self.state_spec.unflatten(s))
        except RuntimeError as error:
            if _ON_A_LEAF not in str(error):
                raise
            if all(self.copied):
                raise CellError(_WRITES) from error
            self.copied = (True,) * len(s)
            return self()
        if versions[0] != [version(t) for t in x]:
            raise CellError(_WRITES)
        written = tuple(version(t) != then for t, then in zip(s, versions[1], strict=True))
        if self.copied == (True,) * len(s) or not any(written):
            self.copied = written
            _check_apart(result, written)
            return result
        self.copied = (True,) * len(s)
        return self()


# What autograd says of a write to a leaf, or to a view of one.
_ON_A_LEAF = "leaf Variable that requires grad"
_WRITES = (
    "the cell writes in place to its input, or to a parameter: expected it to leave them as they "
    "are, for they are used again; return new tensors instead (x = x + 1, not x += 1)"
)


def _copied(state: Tensors, copied: Sequence[bool]) -> Tensors:
    if not any(copied):
        return state
    return [t.clone() if copy else t for t, copy in zip(state, copied, strict=True)]


def _check_apart(
    result: tuple[Tensors, Tensors, Structure, Structure], written: Sequence[bool]
) -> None:
    """Refuse a state that the next step would write to where it is an output too, or twice one."""
    outputs, states, *_ = result
    for i, (state, writes) in enumerate(zip(states, written, strict=False)):
        others = [*outputs, *states[:i], *states[i + 1 :]]
        if writes and any(shares_memory(state, t) for t in others):
            raise CellError(
                f"the cell writes in place to tensor {i} of its state, which shares its memory "
                "with an output or with another part of the state: expected it to leave its state "
                "as it is; return new tensors instead (h = h + 1, not h += 1), or clones"
            )


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one allocation."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() != 0


def _check_trackable(tensors: Tensors) -> None:
    if any(t.is_inference() for t in tensors):
        raise CellError(
            "the inputs or the state were made in inference mode: expected tensors that autograd "
            "can follow, for a gradient is wanted; clone() them, or make them under torch.no_grad"
        )


def as_pair(result: Any) -> tuple[Any, Any]:
    """What a cell returned, if it is an output and a state.

    Raises:
        CellError: it is not.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        given = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise CellError(
            f"the cell returned {given}: expected the pair (output, state); "
            "wrap it, for instance: lambda x, s: (lambda h: (h, h))(cell(x, s))"
        )
    return result


def _call(cell: Cell, x: Any, state: Any) -> tuple[Tensors, Tensors, Structure, Structure]:
    y, after = as_pair(cell(x, state))
    outputs, output_structure = flatten(y, "output of the cell")
    states, state_structure = flatten(after, "state that the cell returned")
    return outputs, states, output_structure, state_structure


def _check_like(name: str, leaves: Tensors, spec: Any, like: Sequence[Any], like_spec: Any) -> None:
    if spec != like_spec:
        raise CellError(
            f"the cell changed the structure of its {name}: expected {like_spec}, "
            f"got {spec}; return the same structure at every step"
        )
    for i, (leaf, (shape, dtype, device)) in enumerate(zip(leaves, like, strict=True)):
        if (leaf.shape, leaf.dtype, leaf.device) != (shape, dtype, device):
            raise CellError(
                f"the cell changed tensor {i} of its {name}: expected shape {tuple(shape)}, "
                f"{dtype} on {device}, got {tuple(leaf.shape)}, {leaf.dtype} on {leaf.device}; "
                "every step must return what it was given"
            )


def _check_aliases(outputs: Tensors, states: Tensors, aliases: Sequence[int | None]) -> None:
    """An output that is the state has its gradient added where the state is used next."""
    for i, (y, alias) in enumerate(zip(outputs, aliases, strict=True)):
        if alias is not None and y is not states[alias]:
            raise CellError(
                f"tensor {i} of the cell's output is its new state at step 0, but another tensor "
                "at a later step: expected the same at every step; return state.clone() as output"
            )


def _like(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return t.shape, t.dtype, t.device
