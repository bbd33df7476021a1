"""What the executor runs: a core, that is, a recurrence that can be cut into ranges of steps.

A core is a pure function of its inputs and its state, on flat lists of tensors; everything that
the user wrote as pytrees, closures or modules is settled here, before any work starts. Two kinds
exist: a cell, called once a step (:class:`StepCore`), and a fused kernel, called once a range
(:mod:`retrograde.execute.fused`).
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from retrograde.errors import CellError
from retrograde.execute.replay import Ambient, OwnRandom, random_position
from retrograde.execute.trees import Structure, flatten

__all__ = [
    "Cell",
    "Core",
    "StepCore",
    "as_leaf",
    "as_pair",
    "check_length",
    "examine",
    "foreign_tensors",
]

Cell = Callable[[Any, Any], tuple[Any, Any]]
Tensors = list[Tensor]


class Core(Protocol):
    """A recurrence on flat lists of tensors."""

    @property
    def fused(self) -> bool:
        """Whether a range of steps is one call (leaves then keep their time dimension)."""
        ...

    @property
    def sums(self) -> bool:
        """Whether an output is one tensor a call, to be summed over calls, not one part a step."""
        ...

    @property
    def parameters(self) -> Tensors:
        """Every tensor, besides inputs and state, that is to receive a gradient."""
        ...

    @property
    def ambient(self) -> Ambient:
        """The surroundings that a step depends on."""
        ...

    @property
    def aliases(self) -> Sequence[int | None]:
        """For each output leaf, the state leaf that is the very same tensor, or None."""
        ...

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Run one step, or a fused range: outputs, and the state after it."""
        ...

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        """As a call, but the state only; what only the outputs need may be left out."""
        ...


@dataclass(frozen=True)
class StepCore:
    """Any cell ``cell(x_t, state) -> (y_t, state)``, one call a step; made by :func:`examine`.

    ``quiet`` is the cell without what only its outputs need, where leaving that out is not seen.
    """

    cell: Cell
    input_spec: Structure
    state_spec: Structure
    output_spec: Structure
    state_like: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    output_like: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    parameters: Tensors
    ambient: Ambient
    aliases: tuple[int | None, ...]
    fused: bool = False
    sums: bool = False
    quiet: Cell | None = None

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        outputs, states, output_spec = self._run(self.cell, inputs, state)
        _check_like("output", outputs, output_spec, self.output_like, self.output_spec)
        return outputs, states

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self._run(self.quiet or self.cell, inputs, state)[1]

    def _run(
        self, cell: Cell, inputs: Tensors, state: Tensors
    ) -> tuple[Tensors, Tensors, Structure]:
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
    x, s = [t.detach() for t in inputs], [as_leaf(t) for t in state]
    for leaf, given in zip(x, inputs, strict=True):
        leaf.requires_grad_(given.requires_grad)
    modules, captured = _reachable([cell] if made_of is None else made_of)
    buffers = [b for m in modules for b in m.buffers()]
    before = [b.detach().clone() for b in buffers]
    position = random_position(device)
    arguments = [t._version for t in (*x, *s)]
    mark = torch._C._autograd._get_sequence_nr()
    with torch.enable_grad(), OwnRandom(device).drawn():
        outputs, states, output_spec, after_spec = _call(
            cell, input_spec.unflatten(x), state_spec.unflatten(s)
        )
        draws = position != random_position(device)
    if arguments != [t._version for t in (*x, *s)]:
        raise CellError(
            "the cell writes in place to its input or its state: expected it to leave them as "
            "they are, for they are used again; return new tensors instead (h = h + 1, not h += 1)"
        )
    if [id(b) for b in buffers] != [id(b) for m in modules for b in m.buffers()]:
        raise CellError(
            "the cell replaced a buffer of its module: expected it to change buffers in place "
            "(self.count.copy_(...), not self.count = ...), so that a rerun can put them back"
        )
    changed = {
        b: value for b, value in zip(buffers, before, strict=True) if not torch.equal(b, value)
    }
    Ambient(device, buffers=tuple(changed)).restore(tuple(changed.values()))
    like = tuple(_like(t) for t in state)
    _check_like("state", states, after_spec, like, state_spec)
    leaves, edges = foreign_tensors([*outputs, *states], mark)
    ours = {id(t) for t in (*x, *s)}
    found: Tensors = [p for m in modules for p in m.parameters() if p.requires_grad]
    found += [t for t in captured if t.grad_fn in edges]
    found += [t for t in leaves if id(t) not in ours]
    _check_captured(edges, captured)
    return StepCore(
        cell=cell,
        input_spec=input_spec,
        state_spec=state_spec,
        output_spec=output_spec,
        state_like=like,
        output_like=tuple(_like(t) for t in outputs),
        parameters=list({id(t): t for t in found}.values()),
        ambient=Ambient(device, draws, tuple(changed)),
        aliases=tuple(next((j for j, t in enumerate(states) if t is y), None) for y in outputs),
    )


def check_length(leaves: Tensors) -> int:
    """The number of steps of flat inputs, each with time first.

    Raises:
        CellError: there are no inputs, or the numbers of steps differ or are none.
    """
    if not leaves:
        raise CellError("the inputs hold no tensor: expected at least one, with time first (T, …)")
    lengths = {x.shape[0] if len(x.shape) else None for x in leaves}
    if len(lengths) > 1 or None in lengths:
        shapes = ", ".join(str(tuple(x.shape)) for x in leaves)
        raise CellError(
            f"the inputs have the shapes {shapes}: expected the same number of steps as the first "
            "dimension of each"
        )
    length = int(lengths.pop() or 0)
    if length < 1:
        raise CellError("the inputs have 0 steps: expected at least one")
    return length


def foreign_tensors(outputs: Sequence[Tensor], mark: int) -> tuple[Tensors, set[Any]]:
    """The leaves that a graph ends in, and the nodes in it that were there before ``mark``.

    Args:
        outputs: where the graph begins.
        mark: autograd's sequence number when the recording of the graph began.

    Returns:
        The leaf tensors, and the older nodes (captured tensors that are not leaves end there).
    """
    leaves: Tensors = []
    older: set[Any] = set()
    pending = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(cast(Any, node).variable)
        elif node._sequence_nr() < mark:
            older.add(node)
        else:
            following = dict.fromkeys(n for n, _ in node.next_functions if n is not None)
            pending.extend(n for n in following if n not in seen)  # in an order that is the same
            seen.update(following)
    return leaves, older


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


def _like(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return t.shape, t.dtype, t.device


def as_leaf(t: Tensor) -> Tensor:
    """A state tensor cut off from its past, gradients being followed from here on."""
    return t.detach().requires_grad_(t.is_floating_point() or t.is_complex())


def _reachable(parts: Sequence[Any]) -> tuple[list[nn.Module], Tensors]:
    """The modules and tensors that the parts of a cell refer to: themselves, what they are bound
    to, what they close over, and the globals that they name."""
    modules: list[nn.Module] = []
    tensors: Tensors = []
    for value in (value for part in parts for value in _referents(part, depth=3)):
        if isinstance(value, nn.Module):
            modules.append(value)
        elif isinstance(value, Tensor):
            tensors.append(value)
    return list(dict.fromkeys(modules)), tensors


def _referents(value: Any, depth: int) -> Iterator[Any]:
    yield value
    if depth == 0 or isinstance(value, nn.Module | Tensor):
        return
    inner: list[Any] = []
    if isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif inspect.ismethod(value):
        inner = [value.__self__, value.__func__]
    elif inspect.isfunction(value):
        names = inspect.getclosurevars(value)
        inner = [*names.nonlocals.values(), *names.globals.values(), *(value.__defaults__ or ())]
    elif isinstance(value, list | tuple | dict):
        inner = list(value.values()) if isinstance(value, dict) else list(value)
    elif hasattr(value, "__dict__") and not inspect.ismodule(value) and not inspect.isclass(value):
        inner = list(vars(value).values())
    for item in inner:
        yield from _referents(item, depth - 1)


def _check_captured(edges: set[Any], captured: Tensors) -> None:
    unknown = edges - {t.grad_fn for t in captured}
    if unknown:
        names = ", ".join(sorted(node.name() for node in unknown))
        raise CellError(
            f"the cell uses a tensor that was computed outside of it (by {names}) and that cannot "
            "be found from the cell: expected it among the cell's closure variables; pass it as "
            "part of the inputs or of the state"
        )
