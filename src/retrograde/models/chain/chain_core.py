"""A chain as a core: each step is a link, a function of its own whose only input is the state.

A link that is recomputed gets the random numbers and buffers of its first run, and leaves no trace
(rules 2 and 3). These few bytes are kept with the link, not with a state. A tape holds a graph and
no other tensor, so a state that no layer refers to is released.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from retrograde.errors import RetrogradeError
from retrograde.models.chain.links import Link, check_leaves, enter
from retrograde.replay.generators import Source
from retrograde.replay.surroundings import Ambient, Marks, Snapshot, Trail, muted_hooks, version
from retrograde.run.core import Emit, Gradients, RangeCore, Tape, unrecorded
from retrograde.run.inputs import Held, Inputs
from retrograde.run.layout import Straight

__all__ = ["NO_INPUTS", "ChainCore", "Leave", "LinkTape"]

#: A link's only input is the state.
NO_INPUTS = Held([])

Tensors = list[Tensor]
Gradient = Tensor | None


@dataclass
class LinkTape(Tape):
    """Recorded links.

    ``input_edges`` are the edges of the state before them, None for a tensor that needs no
    gradient. The backward pass starts at ``root``, which is None if no output passes a gradient on.
    It takes the gradient of the state after them from ``seeds``.
    """

    input_edges: list[GradientEdge | None]
    root: GradientEdge | None
    seeds: list[Gradient]


class Leave(torch.autograd.Function):
    """The end of a recorded link, whose backward pass takes the gradients out of ``seeds``.

    ``torch.autograd.grad`` would hold gradients passed to it until it returns.
    """

    @staticmethod
    def forward(ctx: Any, seeds: list[Gradient], *state: Tensor) -> Tensor:
        ctx.seeds = seeds
        return torch.empty(0, device=state[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Gradient, ...]:
        found = (None, *ctx.seeds)
        ctx.seeds.clear()
        return found


class ChainCore(RangeCore):
    """The links of one call, at least one.

    ``needed`` says, by a tape's first link, which of the tape's parameters need a gradient. By
    default all do.
    """

    fused = False

    def __init__(self, links: Sequence[Link], device: torch.device) -> None:
        self.links = [*links]
        self.ambient = Ambient(device)
        self.parameters = []
        self.needed: dict[int, Sequence[bool]] = {}
        self._before: list[tuple[Snapshot, Marks, Trail] | None] = [None] * len(links)
        #: Generators that no link draws from, but that moved while links ran the first time.
        self.watched: set[Source] = set()
        self._versions = [[version(t) for t in link.reads] for link in links]

    def totals(self) -> list[Gradient]:
        return []

    def gradients(
        self,
        states: Sequence[Gradient] = (),
        outside: AbstractContextManager[Any] | None = None,
    ) -> Gradients:
        """Return the gradients that a backward pass starts from.

        They are those of a state; nothing is collected yet.
        """
        length = len(self.links)
        layout = Straight(length, False)
        return Gradients([], [*states], [], [], length, layout, outside or nullcontext())

    def own(self, start: int, stop: int) -> Tensors:
        """Return the parameters of some links that need a gradient."""
        return [p for link in self.links[start:stop] for p in link.own]

    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        found = []
        with unrecorded():
            for k in range(start, stops[-1]):
                with self.surroundings(k):
                    state = self.links[k].run(state)
                if k + 1 in stops:
                    found.append([t.detach() for t in state])
        return found

    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> LinkTape:
        links, own = self.links[start:stop], self.own(start, stop)
        mark = torch._C._autograd._get_sequence_nr()
        with torch.enable_grad():
            x, anchor = enter(state, links[0].wanted)
            state.clear()
            input_edges = [_edge(t) for t in x]
            for k in range(start, stop):
                with self.surroundings(k):
                    x = self.links[k].run(x)
            seeds: list[Gradient] = []
            leaving = [t for t in x if t.requires_grad]
            root = _edge(Leave.apply(seeds, *leaving)) if leaving else None  # type: ignore[no-untyped-call]
        del leaving
        name = links[0].name if stop == start + 1 else f"{links[0].name} … {links[-1].name}"
        check_leaves(name, x, mark, [anchor, *own], [n for link in links for n in link.leaves])
        return LinkTape(
            start=start,
            stop=stop,
            inputs=[],
            wanted=links[0].wanted,
            passes=links[-1].passes,
            state_after=[t.detach() for t in x],
            ambient_after=(),
            input_edges=input_edges,
            root=root,
            seeds=seeds,
        )

    def backpropagate(self, tape: LinkTape, gradients: Gradients) -> None:
        """Backpropagate the links of a tape; ``gradients.parameters`` become those of its links."""
        own = self.own(tape.start, tape.stop)
        needed = self.needed.get(tape.start, [True] * len(own))
        tape.seeds += (g for g, p in zip(gradients.states, tape.passes, strict=True) if p)
        gradients.states = []
        edges = [edge for edge in tape.input_edges if edge is not None]
        wanted: Any = [*edges, *(p for p, need in zip(own, needed, strict=True) if need)]
        found: Sequence[Gradient] = [None] * len(wanted)
        if tape.root is not None and wanted and any(g is not None for g in tape.seeds):
            with gradients.outside, muted_hooks(own):
                begin = torch.empty(0, device=self.ambient.device)
                found = torch.autograd.grad([tape.root], wanted, [begin], allow_unused=True)
        shares = iter(found)
        gradients.states = [None if e is None else next(shares) for e in tape.input_edges]
        gradients.parameters = [next(shares) if need else None for need in needed]

    @contextmanager
    def surroundings(self, k: int) -> Iterator[None]:
        """Return a context in which link k runs as it ran the first time."""
        before, link = self._before[k], self.links[k]
        ambient = link.ambient
        if before is None:
            marks = ambient.steady.marks()
            trail = Trail(ambient)
            self._before[k] = ambient.capture(), marks, trail
            yield
            trail.arrive(k)
            self.watched.update(ambient.steady.changes(marks, f"layer {link.name}"))
            if not torch.is_grad_enabled():
                ambient.cut()
            return
        if self._versions[k] != [version(t) for t in link.reads]:
            raise RetrogradeError(
                f"a parameter or buffer of layer {link.name} has been modified by an "
                "inplace operation between the forward pass and the backward pass, which "
                "recomputes with it: expected it to stay as it was; call backward() before "
                "optimizer.step()"
            )
        snapshot, marks, trail = before
        trail.begin()
        watched = self.watched.difference(ambient.sources)
        with ambient.rerun(marks, tuple(watched), f"layer {link.name}"):
            ambient.restore(snapshot)
            yield
            trail.arrive(k)


def _edge(t: Tensor) -> GradientEdge | None:
    return get_gradient_edge(t) if t.requires_grad else None
