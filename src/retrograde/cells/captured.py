"""Tensors that a step uses besides its arguments: parameters, and captured tensors (rule 5).

A captured tensor may depend on another captured one, as keys on an encoder's outputs. Or it may
depend on a parameter that the step uses itself. The gradient of a recorded step would then
continue into the graph before the step. It would reach the other tensor a second time, and use up a
graph that is not ours. So such tensors are cut off: while a step is recorded, leaves that share
their memory replace them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor
from torch.overrides import TorchFunctionMode

from retrograde.errors import CellError
from retrograde.replay.referents import Referents
from retrograde.replay.trees import Tensors, distinct
from retrograde.run.foreign import foreign_tensors
from retrograde.torch_private import outputs_of


@dataclass(frozen=True)
class Outside:
    """The tensors that receive a gradient, and their counterparts in a recorded graph."""

    parameters: Tensors
    targets: Tensors

    def cut(self) -> AbstractContextManager[Any]:
        """Return a context in which the targets replace the parameters."""
        stand_ins = {
            id(p): t for p, t in zip(self.parameters, self.targets, strict=True) if p is not t
        }
        return _StandIns(stand_ins) if stand_ins else nullcontext()


def find_outside(referents: Referents, results: Tensors, mark: int, passed: Tensors) -> Outside:
    """Find every tensor, besides its arguments, that a step may use and that requires a gradient.
    Module parameters that step 0 did not use are included, since a later step may use them.
    ``results`` are those of step 0 and ``passed`` its arguments. ``mark`` is autograd's sequence
    number before it. Raises CellError if a captured tensor cannot be found from the cell."""
    every = (p for part in referents.parts() for p in part._parameters.values() if p is not None)
    owned: Tensors = [p for p in every if p.requires_grad]
    # torch.func.functional_call replaces parameters by tensors of any kind.
    among = [t for t in (*referents.tensors, *owned) if t.grad_fn is not None]
    by_edge = {(t.grad_fn, t.output_nr): t for t in among}
    leaves, older = foreign_tensors(results, mark, by_edge.keys())
    if older - by_edge.keys():
        names = ", ".join(sorted(node.name() for node, _ in older - by_edge.keys()))
        raise CellError(
            f"the cell uses a tensor that was computed outside of it (by {names}) and that cannot "
            "be found from the cell: expected it among the cell's closure variables, or as an "
            "attribute of its module; pass it as part of the inputs or of the state"
        )
    captured = [t for edge, t in by_edge.items() if edge in older]
    arguments = {id(t) for t in passed} - {id(t) for t in (*referents.tensors, *owned)}
    direct = [t for t in leaves if id(t) not in arguments]
    nodes: list[Any] = [t.grad_fn for t in captured]
    edges = [edge for node in nodes for edge in node.next_functions if edge[0] is not None]
    # Pieces of one tensor, as chunk makes them, are several outputs of one node.
    pieces = {(node, k) for node, _ in older for k in range(len(outputs_of(node)))}
    before, used_before = foreign_tensors(edges, 0, pieces)
    used, before_leaves = {id(t) for t in direct}, {id(t) for t in before}
    if not (used_before or before_leaves & used):
        owned = [p for p in owned if id(p) not in before_leaves]
        parameters = distinct([*owned, *captured, *direct])
        return Outside(parameters, parameters)
    parameters, cut = distinct([*owned, *captured, *direct]), {id(t) for t in captured}
    targets = [t.detach().requires_grad_() if id(t) in cut else t for t in parameters]
    return Outside(parameters, targets)


class _StandIns(TorchFunctionMode):
    """A mode that replaces tensors, named by their ids, in the arguments of torch's functions."""

    def __init__(self, stand_ins: dict[int, Tensor]) -> None:
        super().__init__()
        self.stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = self._replaced
        return func(*map(replaced, args), **{k: replaced(v) for k, v in (kwargs or {}).items()})

    def _replaced(self, value: Any) -> Any:
        """Return an argument, with a stand-in for each tensor that has one."""
        if isinstance(value, list):
            return [*map(self._replaced, value)]
        if isinstance(value, tuple) and not isinstance(value, Size):
            return (*map(self._replaced, value),)
        return self.stand_ins.get(id(value), value)
