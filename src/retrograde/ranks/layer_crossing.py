"""One pass of one rank through its layers: forward in pieces.

What is differentiated by torch is a rank's own layers, from a leaf to what is handed on; the ranks'
graphs are joined in :mod:`retrograde.ranks.layer_back`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.discover.captured import foreign_tensors
from retrograde.errors import CellError, ScanError
from retrograde.jacobians.pattern import Pattern
from retrograde.machine import now
from retrograde.ranks.agreement import Guard, Told
from retrograde.ranks.layer_choice import Trials
from retrograde.ranks.layer_jacobian import run, run_with_jacobian
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.transport import Links

__all__ = ["Crossing", "Memo"]

Gradient = Tensor | None


@dataclass
class Memo:
    """What a rank keeps from one pass to the next.

    Attributes:
        report: what the last backward pass did to cross the ranks.
        made: patterns of this rank's layers; kept, so that plans for them are found again.
        met: patterns that the scan multiplied.
    """

    report: RankReport = field(default_factory=RankReport)
    made: list[Pattern] = field(default_factory=list)
    met: list[Pattern] = field(default_factory=list)


@dataclass
class Piece:
    """A piece of the batch, as a rank has run it.

    Attributes:
        x: what its layers were given; a leaf.
        y: what they gave.
        element: their Jacobian, if the scan wants it.
    """

    x: Tensor
    y: Tensor
    element: Any = None


@dataclass
class Crossing:
    """One forward pass of one rank, and the backward pass through it.

    Attributes:
        layers: the rank's own.
        links: to the other ranks.
        way: how gradients cross.
        gradient: whether any rank wants one.
        batches: samples of each piece.
        memo: what is kept.
        trials: told of the pass, where ways are tried.
        unable: whether a rank's Jacobian could not be formed, and all go by a line.
        seconds: what this rank's part of the pass has taken.
    """

    layers: nn.Sequential
    links: Links
    way: RankWay
    gradient: bool
    batches: list[int]
    memo: Memo
    trials: Trials | None = None
    unable: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.patience = None if self.trials is None else self.trials.patience

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add what is done meanwhile to the seconds."""
        device = next((p.device for p in self.layers.parameters()), torch.device("cpu"))
        start = now(device)
        yield
        self.seconds += now(device) - start

    def tell(self) -> None:
        """Tell the trials of the pass, if they want to know: the slowest rank's seconds."""
        if self.trials is not None and not self.trials.over:
            slowest = max(self.links.gather(self.seconds))
            self.trials.done(self.way, slowest, by=self.memo.report.way)

    @property
    def last(self) -> bool:
        """Whether this is the last rank."""
        return self.links.rank == self.links.size - 1

    @property
    def crossed(self) -> bool:
        """Whether this rank's Jacobian is wanted."""
        between = self.links.rank > 0 and not self.last
        return between and self.gradient and self.way != "linear" and not self.unable

    def run(self, input: Tensor | None) -> list[Piece]:
        """Go forward, piece by piece, and hand each on.

        Args:
            input: on rank 0.

        Returns:
            The pieces.

        Raises:
            RankError: a rank cannot run its layers; the same on every rank.
        """
        links, found, made = self.links, list[Piece](), list[Pattern]()
        wanted = links.rank > 0 or (input is not None and input.requires_grad)
        guard = Guard()
        for part in self._parts(input):
            piece = guard(self._run_piece, part, made, wanted)
            found.append(piece)
            if not self.last:
                links.send(guard(lambda piece: piece.y.detach(), piece), links.rank + 1)
        links.flush()
        heard = guard.settle(links, Told(own=self.unable))
        self.unable = any(told.own for told in heard)
        if self.crossed:
            self.memo.made = made
        return found

    def _parts(self, input: Tensor | None) -> Iterable[Any]:
        if input is not None:
            return tuple(input.detach().split(self.batches))
        return (self.links.receive(self.links.rank - 1) for _ in self.batches)

    def _run_piece(self, part: Tensor, made: list[Pattern], wanted: bool) -> Piece:
        with torch.set_grad_enabled(self.gradient):
            x = part.detach().requires_grad_(wanted and self.gradient and part.is_floating_point())
            element = None
            if self.crossed:
                y, element, patterns = self._run_with_jacobian(x)
                made += patterns
            else:
                y = run(self.layers, x)
        if not isinstance(y, Tensor):
            raise CellError(f"the layers returned a {type(y).__name__}: expected one tensor")
        samples_first = y.ndim > 1 and len(y) == len(x)
        if self.patience is not None and not samples_first:
            self.unable = True
        apart = len(self.batches) > 1 or (self.way != "linear" and not self.unable)
        if apart and not samples_first:
            raise CellError(
                f"the layers took {tuple(x.shape)} to {tuple(y.shape)}: expected samples first, as "
                "many as they were given; or use way='linear' and pieces=1"
            )
        self._check_captured(x, y)
        return Piece(x, y, element)

    def _run_with_jacobian(self, x: Tensor) -> tuple[Tensor, Any, list[Pattern]]:
        try:
            return run_with_jacobian(self.layers, x, sum(self.batches), self.patience)
        except ScanError:
            if self.patience is None:
                raise
            self.unable = True
            return run(self.layers, x), None, []

    def _check_captured(self, x: Tensor, y: Tensor) -> None:
        """Refuse layers that use tensors of which we could not give the gradient (rule 5)."""
        known = {id(t) for t in (x, *self.layers.parameters())}
        leaves, _ = foreign_tensors([y], 0)
        if any(id(t) not in known for t in leaves):
            raise CellError(
                "the layers use a tensor that wants a gradient and is none of their parameters: "
                "expected parameters only; register it as one"
            )
