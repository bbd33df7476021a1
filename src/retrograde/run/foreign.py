"""Which leaves and older nodes a graph reaches: what a step uses besides its arguments (rule 5)."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from retrograde.replay.trees import Tensors
from retrograde.torch_private import number_of

#: A node of autograd's graph, and the index of one of its outputs.
Edge = tuple[Any, int]

# The sequence number of a node that accumulates the gradient of a leaf.
_LEAF = 2**64 - 1


def foreign_tensors(
    roots: Sequence[Tensor | Edge], mark: int, known: Collection[Edge] = ()
) -> tuple[Tensors, set[Edge]]:
    """Return the leaves of a graph, and its edges that are ``known`` or lead to nodes older than
    ``mark``. Each thread counts sequence numbers on its own, so a backward pass on another thread
    cannot tell by the number which nodes are older."""
    leaves: Tensors = []
    older: set[Edge] = set()
    pending: list[Edge] = [
        (get_gradient_edge(root) if isinstance(root, Tensor) else root)[:2]
        for root in roots
        if not isinstance(root, Tensor) or root.requires_grad
    ]
    visited: set[Any] = set()
    while pending:  # the order is the same at every call, since fits are looked up by leaves
        edge = pending.pop()
        node, number = edge[0], number_of(edge[0])
        if number < mark or edge in known:
            older.add(edge)
        elif node not in visited:
            visited.add(node)
            if number == _LEAF and node.name() == "torch::autograd::AccumulateGrad":
                leaves.append(node.variable)
            else:
                pending += [edge for edge in node.next_functions if edge[0] is not None]
    return leaves, older


class LeafWatch:
    """Finds, step by step, the tensors that a recorded range uses but is not known to use. A walk
    over a step's graph ends at the results of the step before it."""

    def __init__(self, known: Iterable[Tensor], targets: Iterable[Tensor], mark: int) -> None:
        self.leaves = {id(t) for t in known}
        self.edges = {(p.grad_fn, p.output_nr) for p in targets if p.grad_fn is not None}
        self.mark = mark
        self.before: set[Edge] = set()

    def foreign(self, results: Sequence[Tensor]) -> int:
        """Return how many unknown tensors the results of a step depend on."""
        known = self.edges | self.before
        leaves, older = foreign_tensors(results, self.mark, known)
        self.before = {(t.grad_fn, t.output_nr) for t in results if t.grad_fn is not None}
        return sum(id(t) not in self.leaves for t in leaves) + len(older - known)
