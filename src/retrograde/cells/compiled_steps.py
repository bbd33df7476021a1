"""A cell whose steps are compiled by ``torch.compile``: one call runs a block of steps.

A small cell spends most of its time in Python and in launching operations. A compiled block of
:data:`BLOCK` steps pays for both once, and fuses its elementwise operations into one loop. A
schedule counts blocks instead of steps, so recomputation calls the same function on the same
blocks. The last steps of a sequence, fewer than a block, run uncompiled. Compiling them would take
one more function for each possible number of steps.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

import torch
from torch import nn

from retrograde.cells.cell import StepCore, as_pair
from retrograde.errors import CellError
from retrograde.replay.switches import autocast_as_now
from retrograde.replay.trees import Structure, Tensors, flatten, flatten_state
from retrograde.run.autograd_core import run_ordinary
from retrograde.run.core import as_leaf
from retrograde.run.states import like_of
from retrograde.run.transforms import besides_forward

#: The number of steps in a compiled block. Twice as many take twice as long to compile, and run
#: hardly faster.
BLOCK = 8


@dataclass(frozen=True)
class CompiledSteps(StepCore):
    """A cell that is called for a block of steps at a time, by a compiled function. Fewer steps run
    as a ``single`` step does."""

    block: "_Block | None" = None
    single: StepCore | None = None

    per_call = BLOCK
    records_ranges = False  # type: ignore[assignment]

    def __call__(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        assert self.block is not None
        assert self.single is not None
        begins = self.first_spec is not None and tuple(map(like_of, state)) == self.first_like
        if begins or len(inputs[0]) < BLOCK:
            return run_ordinary(self.single, inputs, state)
        with autocast_as_now(self.surroundings.device):  # recomputation replays the same autocast
            return self.block(self.cell, self.input_spec, self.state_spec, inputs, _alike(state))

    def rerun(self, inputs: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
        return self(inputs, state)

    def next_state(self, inputs: Tensors, state: Tensors) -> Tensors:
        return self(inputs, state)[1]


def compiled_steps(core: StepCore) -> CompiledSteps:
    """Return a core that calls a cell by compiled blocks. Raises CellError if the cell's steps do
    more than compute outputs and a state."""
    around = core.surroundings
    hooks = [hook for hook in map(besides_forward, around.found.parts()) if hook and "hook" in hook]
    refused = {
        "draws random numbers": around.sources,
        "changes its buffers or attributes": around.moves or around.changing,
        "writes in place to its state": any(core.copied),
        "captures tensors that were computed from one another, or from a parameter that it uses "
        "too": core.targets is not core.parameters,
        f"has {', '.join(hooks[:1])}": hooks,  # a block would miss one that is registered later
        "has numbers in its state": core.numbers,
    }
    for does, applies in refused.items():
        if applies:
            raise CellError(
                f"the cell {does}: expected a function of its input and its state under "
                "compile=True; leave compile=True out"
            )
    cell: Any = core.cell
    key = cell if isinstance(cell, nn.Module) else getattr(cell, "__code__", type(cell))
    block = _BLOCKS.setdefault(key, _Block())
    attributes = {field.name: getattr(core, field.name) for field in fields(core)}
    attributes["aliases"] = (None,) * len(core.aliases)  # outputs are stacked
    return CompiledSteps(**attributes, block=block, single=core)


def _run_block(
    cell: Any, input_spec: Structure, state_spec: Structure, inputs: Tensors, state: Tensors
) -> tuple[Tensors, Tensors]:
    """Run a block of steps. Return the stacked outputs, and the state after the last step."""
    steps, carried = [], state_spec.unflatten(state)
    for k in range(BLOCK):
        y, carried = as_pair(cell(input_spec.unflatten([x[k] for x in inputs]), carried))
        steps.append(flatten(y, "output of the cell")[0])
    outputs = [torch.stack(ys) for ys in zip(*steps, strict=True)]
    return outputs, flatten_state(carried)[0]


def _alike(state: Tensors) -> Tensors:
    """Return a state of the same form for every block, so that one compiled function serves all.
    Its tensors are distinct, and autograd follows them while gradients are enabled."""
    if not torch.is_grad_enabled():
        return [t.detach() for t in state]
    return [t.view_as(t) if t.requires_grad else as_leaf(t) for t in state]


class _Block:
    """A compiled :func:`_run_block` for one cell. Each has a code object of its own, because
    ``torch.compile`` limits the variants that it keeps for one, such as batch sizes."""

    def __init__(self) -> None:
        self.compiled: Callable[..., tuple[Tensors, Tensors]] | None = None

    def __call__(self, *arguments: Any) -> tuple[Tensors, Tensors]:
        if self.compiled is None:
            run_block = FunctionType(_run_block.__code__.replace(), globals(), _run_block.__name__)
            self.compiled = torch.compile(run_block, fullgraph=True)
        try:
            return self.compiled(*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # discard all variants and compile again
            self.compiled = None
            return self(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            raise CellError(
                f"torch.compile cannot make one graph of the cell's steps ({reason}): expected a "
                "cell that it takes with fullgraph=True, and a C++ compiler; leave compile=True out"
            ) from error


# The keys are modules and code objects of functions. A function itself would not do, because a
# closure may be created anew at every call.
_BLOCKS: "weakref.WeakKeyDictionary[Any, _Block]" = weakref.WeakKeyDictionary()
