"""A cell whose steps are compiled by ``torch.compile``: a block of them is one call.

What a small cell takes is mostly Python and the start of each operation. A compiled block of
:data:`BLOCK` steps pays for both once, and its elementwise operations are one loop. To a schedule
a block is what a step is elsewhere, so a rerun calls the same function on the same blocks. Steps
that are left at the end of a sequence are run as they are: compiled, each number of them would be a
function of its own.

Known limits: results differ from the plain loop's by rounding, for compiled operations are fused.
A cell must be one graph to ``torch.compile``, draw no random numbers, and change nothing.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.cores.cell import StepCore, as_pair, like_of
from retrograde.discover.surroundings import autocast_as_now
from retrograde.discover.trees import Structure, flatten, flatten_state
from retrograde.errors import CellError
from retrograde.run.core import Gate, as_leaf
from retrograde.run.layout import Blocks, Layout

__all__ = ["BLOCK", "CompiledSteps", "compiled_steps"]

#: Steps of a compiled block. Twice as many take twice as long to compile, and are little faster.
BLOCK = 8

Tensors = list[Tensor]


@dataclass(frozen=True)
class CompiledSteps(StepCore):
    """A cell, called for a block of steps, which ``block`` runs."""

    block: "_Block | None" = None

    per_call = BLOCK

    @property
    def joins(self) -> bool:
        return False

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        begins = self.first_spec is not None and tuple(map(like_of, state)) == self.first_like
        if begins or len(inputs[0]) < BLOCK:
            return self._plainly(inputs, state)
        assert self.block is not None
        with autocast_as_now(self.ambient.device):  # as in reruns, whose autocast is replayed
            states = _alike(state)
            return self.block(self.cell, self.input_spec, self.state_spec, inputs, states)

    def again(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        return self(inputs, state)

    def carry(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]

    def ordinary(
        self, layout: Layout, inputs: Tensors, state: Tensors, gate: Gate
    ) -> tuple[Tensors, Tensors, Tensors]:
        assert isinstance(layout, Blocks)
        read = layout.steps.read(inputs)  # what is compiled has no second derivatives
        return *self._plainly(read[slice(0, len(read))], state), self.parameters

    def _plainly(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        """Steps one after the other, as they are."""
        found = []
        for x in zip(*(t.unbind() for t in inputs), strict=True):
            y, state = super().again(list(x), state)
            found.append(y)
        return [torch.stack(ys) for ys in zip(*found, strict=True)], state


def compiled_steps(core: StepCore) -> CompiledSteps:
    """A cell's core, to be called by compiled blocks. Raises CellError if its steps do more than
    compute."""
    does = _does(core)
    if does is not None:
        raise CellError(
            f"the cell {does}: expected a function of its input and its state under compile=True; "
            "leave compile=True out"
        )
    cell: Any = core.cell
    key = cell if isinstance(cell, nn.Module) else getattr(cell, "__code__", type(cell))
    block = _BLOCKS.setdefault(key, _Block())
    known = {field.name: getattr(core, field.name) for field in fields(core)}
    known["aliases"] = (None,) * len(core.aliases)  # outputs are stacked
    return CompiledSteps(**known, block=block)


def _does(core: StepCore) -> str | None:
    """What a cell's steps do that a compiled block of them would not do exactly."""
    if core.ambient.draws:
        return "draws random numbers"
    if core.ambient.moves or core.ambient.left:
        return "changes its buffers or attributes"
    if any(core.copied):
        return "writes in place to its state"
    if core.targets is not core.parameters:
        return (
            "captures tensors that were computed from one another, or from a parameter that it "
            "uses too"
        )
    return "has numbers in its state" if core.numbers else None


def _run_block(
    cell: Any, input_spec: Structure, state_spec: Structure, inputs: Tensors, state: Tensors
) -> tuple[Tensors, Tensors]:
    """A block of steps: the outputs of all, stacked, and the state after them."""
    found, carried = [], state_spec.unflatten(state)
    for k in range(BLOCK):
        y, carried = as_pair(cell(input_spec.unflatten([x[k] for x in inputs]), carried))
        found.append(flatten(y, "output of the cell")[0])
    outputs = [torch.stack(ys) for ys in zip(*found, strict=True)]
    return outputs, flatten_state(carried)[0]


def _alike(state: Tensors) -> Tensors:
    """A state as that of any other block, so that one compiled function serves all: its parts are
    different tensors, and are followed by autograd where anything is."""
    if not torch.is_grad_enabled():
        return [t.detach() for t in state]
    seen: set[int] = set()
    found = []
    for t in state:
        found.append((t.view_as(t) if id(t) in seen else t) if t.requires_grad else as_leaf(t))
        seen.add(id(t))
    return found


class _Block:
    """A compiled :func:`_run_block` for one cell. It has a code object of its own, since
    ``torch.compile`` keeps a few variants of each, for instance one of another batch size."""

    def __init__(self) -> None:
        self.compiled: Callable[..., tuple[Tensors, Tensors]] | None = None

    def __call__(self, *arguments: Any) -> tuple[Tensors, Tensors]:
        if self.compiled is None:
            own = FunctionType(_run_block.__code__.replace(), globals(), _run_block.__name__)
            self.compiled = torch.compile(own, fullgraph=True)
        try:
            return self.compiled(*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # begin anew
            self.compiled = None
            return self(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise CellError(
                f"torch.compile cannot make one graph of the cell's steps ({reason}): expected a "
                "cell that it takes with fullgraph=True, and a C++ compiler; leave compile=True out"
            ) from error


# For each module, and for each code of a function, which may be a closure made anew at every call.
_BLOCKS: "weakref.WeakKeyDictionary[Any, _Block]" = weakref.WeakKeyDictionary()
