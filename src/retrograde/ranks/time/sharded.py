"""A recurrent module whose sequence is cut along time, across ranks.

*Forward*, the state of each piece of the batch passes from rank to rank, so that ranks overlap.
*Backward* in a linear scan, the gradient of the state passes back in the same way. In a tree or a
gather no rank waits for its neighbour. Each computes the affine map g ↦ b + J·g of its own losses
and steps. The scan across ranks (:mod:`retrograde.ranks.scan_over_ranks`; W20, algorithm 1) gives
each rank the gradient that reaches it, and all go through their steps at once. Then the parameters'
gradients are summed over the ranks.

Ranks exchange one state a sample each way, and in a tree the matrices J, of its size squared.
No rank holds anything of another's steps.
"""

from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError
from retrograde.ranks.agreement import Guard, Told
from retrograde.ranks.base import Sharded
from retrograde.ranks.scan_over_ranks import RankReport, RankWay
from retrograde.ranks.time.choice import choose
from retrograde.ranks.time.crossing import Crossing, added_up, cross
from retrograde.ranks.transport import Links
from retrograde.recurrent.modules import BudgetedRNN
from retrograde.run.transforms import uncompiled

__all__ = ["TimeSharded"]


class TimeSharded(Sharded):
    """A recurrent module run over a sequence of which each rank has its own steps.

    Rank 0 has the first steps. Every rank calls the module with its own steps and gets their
    outputs; a rank may have any number of steps, or none. Every rank then calls ``backward`` on a
    loss of its own. Each parameter's gradient is that of the sum of all these losses. It is the
    same on every rank, so any optimizer keeps the ranks' parameters equal. The numbers are those of
    one process, up to rounding.

    Args:
        rnn: an ``rg.RNN``, ``rg.GRU`` or ``rg.LSTM`` in one direction, with the same parameters on
            every rank. With ``memory=`` each rank keeps its own steps within that budget.
        group: the process group; all ranks by default.
        way: how gradients cross the ranks: ``"linear"``, ``"tree"`` or ``"gather"``. ``"auto"``
            measures, at the first backward pass for a batch and a number of steps, and chooses.
        pieces: the number of pieces of the batch, which overlap; as many as there are ranks, by
            default.

    Attributes:
        report: the counts of the last backward pass across the ranks.

    Raises:
        CellError: it is another module.
        RankError: at a call, the ranks do not agree, or one ended; the message says which and how.

    Example:
        >>> import copy
        >>> import retrograde as rg
        >>> from retrograde.ranks.transport import simulate  # threads instead of processes
        >>> rnn = rg.GRU(3, 4)
        >>> def rank(links):
        ...     net = TimeSharded(copy.deepcopy(rnn), links)
        ...     outputs, last = net(torch.ones(5 + links.rank, 2, 3))
        ...     outputs.sum().backward()
        ...     return outputs.shape[0], last is None, net.rnn.weight_hh_l0.grad.sum().item()
        >>> (a, *first), (b, *last) = simulate(2, rank)
        >>> a, b, first[0], last[0], first[1] == last[1]
        (5, 6, True, False, True)
    """

    def __init__(
        self,
        rnn: BudgetedRNN,
        group: distributed.ProcessGroup | Links | None = None,
        *,
        way: RankWay | Literal["auto"] = "auto",
        pieces: int | None = None,
    ) -> None:
        if not isinstance(rnn, BudgetedRNN) or rnn.bidirectional:
            what = "two directions" if isinstance(rnn, BudgetedRNN) else type(rnn).__name__
            raise CellError(
                f"got {what}: expected an rg.RNN, rg.GRU or rg.LSTM in one direction, to be run "
                "along time"
            )
        super().__init__(group, way, pieces, rnn)
        self.rnn = rnn
        self.report = RankReport()
        self._compared = False
        self._chosen: dict[Hashable, RankWay] = {}

    @uncompiled
    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """Run this rank's steps.

        Args:
            input: this rank's T steps: (T, B, I), or (B, T, I) with ``batch_first``, or (T, I).
            hx: the initial state, on the first rank only; zeros if not given.

        Returns:
            The outputs of these steps, and on the last rank the final state, on others None.

        Raises:
            CellError: the input cannot be run.
            RankError: the ranks do not agree, or one does not answer.
        """
        outputs, state = cross(self._agreed(input, hx))
        if state is None:
            return outputs, None
        return outputs, state if self.rnn.mode == "LSTM" else state[0]

    def _agreed(self, input: Any, hx: Any) -> Crossing:
        """Tell the other ranks the arguments of this call, and check theirs."""
        guard = Guard()
        call: Crossing = guard(self._read, input, hx)
        told = guard(lambda: Told(alike=self._described(call), own=call.steps(call.x)))
        heard = guard.settle(self.links, told)
        call.longest = max(each.own for each in heard)
        self._compared = True
        return call

    def _read(self, input: Any, hx: Any) -> Crossing:
        """Check the arguments, and make this rank's pass."""
        rnn, rank = self.rnn, self.links.rank
        if isinstance(input, PackedSequence):
            raise CellError("the input is packed: expected a tensor; give padded sequences")
        if input.dim() not in (2, 3):
            raise CellError(f"the input has {input.dim()} dimensions: expected 2 or 3")
        if hx is not None and rank:
            raise CellError(
                f"rank {rank} was given an initial state: expected it on rank 0 only, where "
                "the sequence begins"
            )
        batched = input.dim() == 3
        samples = input.shape[0 if rnn.batch_first else 1] if batched else 1
        if input.shape[-1] != rnn.input_size:
            raise CellError(f"the input has {input.shape[-1]} features: expected {rnn.input_size}")
        state: tuple[Tensor, ...] = ()
        if hx is not None:
            state = hx if isinstance(hx, tuple) else (hx,)
        if hx is not None and batched:
            for given, zero in zip(state, rnn._zeros(samples, input), strict=True):
                if given.shape != zero.shape:
                    raise CellError(
                        f"the initial state is {tuple(given.shape)}: expected {tuple(zero.shape)}"
                    )
        wants = [input, *state, *rnn.parameters()]
        gradient = torch.is_grad_enabled() and any(t.requires_grad for t in rnn.parameters())
        if torch.is_grad_enabled() and not gradient and any(t.requires_grad for t in wants):
            raise CellError("an input requires a gradient, but no parameter does: expected both")
        self.report = RankReport(self.way)
        call = Crossing(
            links=self.links,
            gradient=gradient,
            batches=self.batches(samples),
            rnn=rnn,
            way=self.way,
            report=self.report,
            x=input,
            state=state,
            batched=batched,
            choose=choose,
            chosen=self._chosen,
        )
        call.check_budget()
        return call

    def _described(self, call: Crossing) -> dict[str, Any]:
        """Return what must be the same on every rank; at the first call, the parameters too."""
        rnn = self.rnn
        with torch.no_grad():
            parameters = () if self._compared else rnn.parameters()
            checksums = tuple(float(p.double().sum()) for p in parameters)
        return {
            "the module": f"{type(rnn).__name__}({nn.RNNBase.extra_repr(rnn)})",
            "way=": self.way,
            "pieces=": self.pieces or 0,
            "the batch": sum(call.batches) if call.batched else None,
            "the type": str(call.x.dtype),
            "whether the module is training": rnn.training,
            "whether a gradient is wanted": call.gradient,
            "the parameters' sum (seed them alike, or load one state_dict)": checksums,
        }

    def add_up(self, module: nn.Module) -> None:
        """Sum the gradients of another module, such as one after this, over the ranks.

        Args:
            module: the same module on every rank, with the gradients of that rank's own steps.
        """
        own = [p for p in module.parameters() if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        for p, total in zip(own, added_up(self.links, parts), strict=True):
            p.grad = total
