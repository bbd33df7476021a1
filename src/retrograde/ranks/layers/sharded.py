"""A feed-forward chain whose layers are spread across ranks.

*Forward*, each piece of the batch passes from rank to rank, so that ranks overlap. *Backward* in a
linear scan, which is plain model parallelism, the gradient passes back in the same way. In a tree
or a gather each rank has already computed the transposed Jacobian of its layers in the forward
pass. The scan across ranks (:mod:`retrograde.ranks.scan_over_ranks`; W20, algorithm 1) gives each
rank the gradient that reaches it, and all go back through their layers at once.

The first rank's Jacobian is never needed, and the last rank's element is its gradient, a vector.

Reference: Wang, *BPPSA: Scaling Back-propagation by Parallel Scan Algorithm*, 2020.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from torch import Tensor, distributed, nn

from retrograde.errors import CellError, RankError
from retrograde.ranks.agreement import Guard, Told
from retrograde.ranks.base import Sharded, links_of
from retrograde.ranks.layers.crossing import Crossing, Memo, cross
from retrograde.ranks.layers.cuts import balanced, layer_seconds, where_to_cut
from retrograde.ranks.layers.way_timer import WayTimer
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.transport import Links
from retrograde.run.transforms import uncompiled
from retrograde.scan.sparse.composition import couples_samples

__all__ = ["LayerSharded"]


class LayerSharded(Sharded):
    """A chain of layers of which each rank has its own.

    Rank 0 has the first layers. Every rank calls the module: rank 0 with the batch, the others
    without an argument. The last rank gets the chain's output, and computes a loss; the others
    get a zero. Every rank then calls ``backward``: the last one on its loss, the others on their
    zero. Each rank gets the gradients of its own parameters. Rank 0 also gets that of the input, if
    it requires one. The numbers are those of one process, up to rounding. Each rank has an
    optimizer for its own parameters.

    In a tree or a gather the ranks between the first and the last compute transposed Jacobians.
    Their layers must not couple samples, and their inputs and outputs have one type, float32 or
    float64. Layers without a rule (:func:`retrograde.scan.register_layer`) take a backward pass for
    each of their outputs. In ``"linear"`` any layers work, if one tensor passes from rank to rank.
    Dropout draws from each rank's own generator, once for each piece of the batch.

    Args:
        layers: this rank's own sequence of layers; ``torch.nn.Sequential()`` is allowed. No
            parameter may be in layers of two ranks. :meth:`cut` takes a rank's share of a chain.
        group: the process group; all ranks by default.
        way: how gradients cross the ranks: ``"linear"``, ``"tree"`` or ``"gather"``. ``"auto"``
            tries each in the first passes for a batch, and continues with the fastest.
        pieces: the number of pieces of the batch, which overlap; as many as there are ranks, by
            default. Layers that couple samples in training need 1.

    Raises:
        CellError: an option is unknown, or the layers are not a ``torch.nn.Sequential``.
        RankError: at a call, the ranks do not agree, or one cannot run or ended; the message says
            which and why.

    Example:
        >>> from retrograde.ranks.transport import simulate  # threads instead of processes
        >>> def rank(links):
        ...     whole = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        ...     net = LayerSharded.cut(whole, links, way="tree")
        ...     found = net(torch.ones(5, 3)) if links.rank == 0 else net()
        ...     found.sum().backward()
        ...     return tuple(found.shape), [tuple(p.grad.shape) for p in net.parameters()]
        >>> simulate(3, rank)
        [((), [(4, 3), (4,)]), ((), []), ((5, 2), [(2, 4), (2,)])]
    """

    def __init__(
        self,
        layers: nn.Sequential,
        group: distributed.ProcessGroup | Links | None = None,
        *,
        way: RankWay | Literal["auto"] = "linear",
        pieces: int | None = None,
    ) -> None:
        _check_chain(layers)
        super().__init__(group, way, pieces, layers)
        self.layers = layers
        self._memo = Memo()
        self._timers: dict[Hashable, WayTimer] = {}

    @property
    def report(self) -> RankReport:
        """The counts of the last backward pass across the ranks."""
        return self._memo.report

    @classmethod
    def cut(
        cls,
        whole: nn.Sequential,
        group: distributed.ProcessGroup | Links | None = None,
        *,
        way: RankWay | Literal["auto"] = "linear",
        pieces: int | None = None,
        cuts: Sequence[int] | None = None,
        sample: Any = None,
    ) -> Self:
        """Keep this rank's share of a chain that every rank has made.

        Layers keep their names, so a share's ``state_dict`` is a part of the whole chain's.

        Args:
            whole: the same chain on every rank.
            group: the process group; all ranks by default.
            way: how gradients cross the ranks.
            pieces: the number of pieces of the batch.
            cuts: the index of the first layer of each rank except rank 0, ascending. By default,
                the numbers of layers differ by at most one.
            sample: an input, on every rank: rank 0 measures the layers with it. The cuts then make
                the slowest rank as fast as possible.

        Returns:
            The module, with this rank's layers.

        Raises:
            CellError: the cuts are not valid, or a parameter would be on two ranks.
            RankError: with a sample, the ranks do not agree, or rank 0 cannot run it.

        Example:
            >>> from retrograde.ranks.transport import simulate
            >>> chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
            >>> shares = simulate(2, lambda links: LayerSharded.cut(chain, links, cuts=[1]))
            >>> [list(share.state_dict()) for share in shares]
            [['layers.0.weight', 'layers.0.bias'], ['layers.2.weight', 'layers.2.bias']]
        """
        _check_chain(whole)
        links = links_of(group, whole)
        if sample is not None:
            if cuts is not None:
                raise CellError("cuts= and sample= are given: expected one of them")
            cuts = _measured_cuts(whole, links, sample)
        shares = [whole[a:b] for a, b in pairwise(_edges(len(whole), links.size, cuts))]
        _check_apart(shares)
        mine: Any = shares[links.rank]
        return cls(mine, links, way=way, pieces=pieces)

    @uncompiled
    def forward(self, input: Tensor | None = None) -> Tensor:
        """Run this rank's layers.

        Args:
            input: (samples, …), on rank 0; None on every other.

        Returns:
            On the last rank the chain's output. On others a zero, whose ``backward`` goes back
            through this rank's layers.

        Raises:
            RankError: the ranks do not agree, one cannot run, or one does not answer.
        """
        return cross(self._agreed(input), input)

    def _agreed(self, input: Any) -> Crossing:
        """Tell the other ranks the arguments of this call, and check theirs."""
        guard = Guard()
        told = guard(self._told, input)
        heard = [each.own for each in guard.settle(self.links, told)]
        _check_types([each.dtype for each in heard])
        batches = self.batches(heard[0].samples)
        for rank, each in enumerate(heard):
            if each.couples and len(batches) > 1:
                raise RankError(
                    f"rank {rank} cannot run: {each.couples} takes its mean and variance from the "
                    f"batch, which is run in {len(batches)} pieces: expected pieces=1"
                )
        gradient = torch.is_grad_enabled() and any(each.wants for each in heard)
        way, timer = self.way, None
        if way == "auto" and (not gradient or any(each.hooked for each in heard)):
            way = "linear"
        elif way == "auto":
            key = tuple(batches), heard[0].dtype, self.training
            timer = self._timers.setdefault(key, WayTimer(self.links.size))
            way = timer.way
        return Crossing(self.links, gradient, batches, self.layers, way, self._memo, timer)

    def _told(self, input: Any) -> Told:
        links, modules = self.links, list(self.layers.modules())
        _check_input(input, links.rank)
        hooked = _hooked(modules) if 0 < links.rank < links.size - 1 else ""
        if hooked and self.way in ("tree", "gather"):
            raise CellError(
                f"{hooked} has a backward hook, which a Jacobian would not pass through: expected "
                "none; hook its parameters, or use way='linear'"
            )
        parameters = list(self.layers.parameters())
        types = {p.dtype for p in parameters if p.is_floating_point()}
        dtype = str(types.pop()) if len(types) == 1 else ""
        if input is not None and input.is_floating_point():
            dtype = str(input.dtype)
        coupling = (type(m).__name__ for m in modules if couples_samples(m))
        own = _Own(
            samples=0 if input is None else len(input),
            dtype="" if torch.is_autocast_enabled("cpu") else dtype,
            wants=any(t.requires_grad for t in (input, *parameters) if t is not None),
            couples=next(coupling, ""),
            hooked=bool(hooked),
        )
        alike = {
            "way=": self.way,
            "pieces=": self.pieces or 0,
            "whether the module is training": self.training,
            "whether gradients are recorded": torch.is_grad_enabled(),
        }
        return Told(alike=alike, own=own)


@dataclass(frozen=True)
class _Own:
    """Properties of the call that may differ between ranks."""

    samples: int
    dtype: str
    wants: bool
    couples: str
    hooked: bool


def _check_chain(layers: Any) -> None:
    if not isinstance(layers, nn.Sequential):
        raise CellError(
            f"got {type(layers).__name__}: expected a torch.nn.Sequential of layers, to be cut "
            "between them"
        )


def _measured_cuts(whole: nn.Sequential, links: Links, sample: Any) -> list[int]:
    """Return the cuts that rank 0 measures; every rank has to call it."""
    guard = Guard()

    def find() -> list[int]:
        seconds, alone = layer_seconds(whole, sample)
        return balanced(seconds, links.size, where_to_cut(whole, alone))

    cuts = None if links.rank else guard(find)
    alike = {"the number of layers to be cut": len(whole)}
    heard = guard.settle(links, Told(alike=alike, own=cuts))
    found: list[int] = heard[0].own
    return found


def _edges(count: int, size: int, cuts: Sequence[int] | None) -> list[int]:
    """Return the index of each rank's first layer, and the end of the last rank's layers."""
    if cuts is None:
        return [k * count // size for k in range(size + 1)]
    edges = [0, *cuts, count]
    if len(edges) != size + 1 or edges != sorted(edges):
        raise CellError(
            f"got cuts={list(cuts)!r} of {count} layers for {size} ranks: expected {size - 1} "
            f"ascending numbers from 0 to {count}"
        )
    return edges


def _check_apart(shares: Iterable[nn.Module]) -> None:
    homes: dict[int, int] = {}
    for rank, share in enumerate(shares):
        for name, parameter in share.named_parameters():
            if homes.setdefault(id(parameter), rank) != rank:
                raise CellError(
                    f"the parameter {name} is in layers of rank {homes[id(parameter)]} and of rank "
                    f"{rank}, which would drift apart: expected each on one rank; choose cuts "
                    "that leave its layers together"
                )


def _check_input(input: Any, rank: int) -> None:
    if rank and input is not None:
        raise CellError("it was given an input: expected one on rank 0 only, and None here")
    if rank:
        return
    if not isinstance(input, Tensor):
        given = "no input" if input is None else f"a {type(input).__name__}"
        raise CellError(f"it was given {given}: expected a tensor, (samples, …)")
    if input.ndim < 2:
        raise CellError(
            f"the input has {input.ndim} dimensions: expected samples first, and at least one more"
        )


def _hooked(modules: Iterable[nn.Module]) -> str:
    """Return the type of the first module with a backward hook, or ""."""
    for module in modules:
        if module._backward_hooks or module._backward_pre_hooks:
            return type(module).__name__
    return ""


def _check_types(types: Sequence[str]) -> None:
    known = [(rank, each) for rank, each in enumerate(types) if each]
    for rank, each in known:
        if each != known[0][1]:
            raise RankError(
                f"the ranks do not agree: the type is {each} on rank {rank} and {known[0][1]} on "
                f"rank {known[0][0]}; expected the same on every rank"
            )
