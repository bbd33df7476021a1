"""A recurrent module whose sequence is cut along time, across ranks.

*Forward*, the state of each piece of the batch passes from rank to rank, so that ranks overlap.
*Backward* by a line, the gradient of the state passes back in the same way. By a tree no rank waits
for its neighbour's sweep. A scan over the ranks' Jacobians gives each rank the gradient that
reaches it (:mod:`retrograde.ranks.tree`; W20, algorithm 1). Then the parameters' gradients are
summed over the ranks.

Ranks exchange one state a sample each way, and in a tree the matrices, of its size squared.
No rank holds anything of another's steps.
"""

from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError, RankError
from retrograde.ranks.crossing import Crossing, Way, cross
from retrograde.ranks.peers import Peers
from retrograde.ranks.range_map import has_closed_form
from retrograde.recurrent.base import BudgetedRNN
from retrograde.recurrent.dropout import Place
from retrograde.run.transforms import besides_forward, uncompiled


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others before a call."""

    trouble: str = ""  # why it cannot run, or ""
    steps: int = 0  # how many steps it has
    # A number that it drew for dropout between layers, of which the first rank's is used.
    key: int | None = None
    # Values that must be the same on every rank, by their names in a message.
    alike: dict[str, Any] = field(default_factory=dict)


class TimeSharded(nn.Module):
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
        way: how gradients cross the ranks. ``"linear"``, the default, passes them from rank to
            rank, for any module. ``"tree"`` is W20's scan, for many ranks and small states. It
            knows no dropout between layers, no ``proj_size=`` and no autocast.
        pieces: the number of pieces of the batch, which overlap; as many as there are ranks, by
            default.

    Raises:
        CellError: it is another module, or an option is unknown.
        RankError: there is no process group. At a call or in the backward pass: the ranks do not
            agree, or another rank has ended, failed or did not answer.

    Example:
        >>> import retrograde as rg
        >>> alone = {"rank": 0, "world_size": 1, "store": distributed.HashStore()}
        >>> distributed.init_process_group("gloo", **alone)  # torchrun starts more ranks
        >>> net = rg.TimeSharded(rg.GRU(3, 4))
        >>> outputs, last = net(torch.ones(5, 2, 3))
        >>> outputs.sum().backward()
        >>> outputs.shape, last.shape, net.rnn.weight_hh_l0.grad.shape
        (torch.Size([5, 2, 4]), torch.Size([1, 2, 4]), torch.Size([12, 4]))
        >>> distributed.destroy_process_group()
    """

    def __init__(
        self,
        rnn: BudgetedRNN,
        group: distributed.ProcessGroup | None = None,
        *,
        way: Way = "linear",
        pieces: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(rnn, BudgetedRNN) or rnn.bidirectional:
            what = "two directions" if isinstance(rnn, BudgetedRNN) else type(rnn).__name__
            raise CellError(
                f"got {what}: expected an rg.RNN, rg.GRU or rg.LSTM in one direction, to be run "
                "along time"
            )
        if way not in get_args(Way):
            raise CellError(
                f"unknown way={way!r} to cross ranks: expected 'linear', the default, for any "
                "module, or 'tree', for many ranks and small states"
            )
        if pieces is not None and (type(pieces) is not int or pieces < 1):
            raise CellError(f"got pieces={pieces!r}: expected at least 1, or None")
        self.rnn = rnn
        self.way: Way = way
        self.pieces = pieces
        self._peers = Peers(group, rnn)
        self._compared = False

    @uncompiled
    def forward(self, input: Tensor, hx: object = None) -> tuple[Tensor, Any]:
        """Run this rank's steps.

        Args:
            input: this rank's T steps: (T, B, I), or (B, T, I) with ``batch_first``, or (T, I).
            hx: the initial state, on the first rank only; zeros if not given.

        Returns:
            The outputs of these steps, and on the last rank the final state, on others None.

        Raises:
            RankError: a rank's input cannot be run, the ranks do not agree, or another rank has
                ended, failed or did not answer.
        """
        outputs, state = cross(self._agreed(input, hx))
        if input.dim() == 2:
            outputs = outputs.squeeze(0 if self.rnn.batch_first else 1)
            state = None if state is None else tuple(s.squeeze(1) for s in state)
        if state is None:
            return outputs, None
        return outputs, state if self.rnn.mode == "LSTM" else state[0]

    def _agreed(self, input: Any, hx: Any) -> Crossing:
        """Tell the other ranks the arguments of this call, and check theirs."""
        call, cause = None, None
        try:
            call = self._read(input, hx)
            steps, key = call.x.shape[1 - call.dim], None
            if self.rnn.dropout and self.rnn.training and self.rnn.num_layers > 1:
                key = int(torch.randint(2**62, (), device=call.x.device))
            told = _Told("", steps, key, self._described(call, input.dim()))
        except Exception as error:
            cause, told = error, _Told(str(error) or type(error).__name__)
        heard: list[_Told] = self._peers.tell(told)
        for rank, other in enumerate(heard):
            if other.trouble:
                raise RankError(f"rank {rank} cannot run: {other.trouble}") from cause
        for rank, other in enumerate(heard[1:], 1):
            for name, expected in heard[0].alike.items():
                theirs = other.alike.get(name)
                if expected != theirs:
                    raise RankError(
                        f"the ranks do not agree: {name} is {theirs} on rank {rank} and {expected} "
                        "on rank 0; expected the same on every rank"
                    )
        self._compared = True
        assert call is not None
        if heard[0].key is not None:
            before = sum(other.steps for other in heard[: self._peers.rank])
            call.place = Place(torch.tensor(heard[0].key, device=call.x.device), before)
        return call

    def _read(self, input: Any, hx: Any) -> Crossing:
        """Check the arguments, and make this rank's pass."""
        rnn, rank = self.rnn, self._peers.rank
        if "backward" in (besides := besides_forward(rnn) or ""):
            raise CellError(
                f"the {type(rnn).__name__} has {besides}, which would get the gradients of parts: "
                "expected none; register it on the TimeSharded, or on parameters"
            )
        if isinstance(input, PackedSequence):
            raise CellError("the input is packed: expected a tensor; give padded sequences")
        if input.dim() not in (2, 3):
            raise CellError(f"the input has {input.dim()} dimensions: expected 2 or 3")
        if input.shape[-1] != rnn.input_size:
            raise CellError(f"the input has {input.shape[-1]} features: expected {rnn.input_size}")
        if hx is not None and rank:
            raise CellError(
                f"rank {rank} was given an initial state: expected it on rank 0 only, where "
                "the sequence begins"
            )
        state: tuple[Tensor, ...] = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        x = input
        if input.dim() == 2:
            x = input.unsqueeze(0 if rnn.batch_first else 1)
            state = tuple(s.unsqueeze(1) for s in state)
        samples = x.shape[0 if rnn.batch_first else 1]
        zeros = rnn._zeros(samples, x)
        if state and [s.shape for s in state] != [zero.shape for zero in zeros]:
            shapes = [[tuple(s.shape) for s in each] for each in (state, zeros)]
            raise CellError(f"the initial state is {shapes[0]}: expected {shapes[1]}")
        wants = [x, *state, *rnn.parameters()]
        gradient = torch.is_grad_enabled() and any(t.requires_grad for t in rnn.parameters())
        if torch.is_grad_enabled() and not gradient and any(t.requires_grad for t in wants):
            raise CellError("an input requires a gradient, but no parameter does: expected both")
        if gradient and self.way == "tree" and not has_closed_form(rnn, x):
            raise CellError(
                "way='tree' knows no dropout between layers, no proj_size=, no autocast and no "
                f"{x.dtype} but float32 and float64: expected none of these; give way='linear'"
            )
        batches = _shared_out(samples, self.pieces or self._peers.size)
        call = Crossing(self._peers, rnn, self.way, x, state, batches, gradient)
        call.check_budget()
        return call

    def _described(self, call: Crossing, dim: int) -> dict[str, Any]:
        """Return what must be the same on every rank; at the first call, the parameters too."""
        rnn = self.rnn
        with torch.no_grad():
            parameters = () if self._compared else rnn.parameters()
            checksums = tuple(float(p.double().sum()) for p in parameters)
        return {
            "the module": f"{type(rnn).__name__}({nn.RNNBase.extra_repr(rnn)})",
            "way=": self.way,
            "pieces=": self.pieces,
            "the batch": sum(call.batches) if dim == 3 else None,
            "the type": str(call.x.dtype),
            "whether the module is training": rnn.training,
            "whether a gradient is wanted": call.gradient,
            "the parameters' sum (seed them alike, or load one state_dict)": checksums,
        }

    def add_up(self, module: nn.Module) -> None:
        """Sum the gradients of another module, such as one after this, over the ranks.

        Args:
            module: the same module on every rank, with the gradients of that rank's own steps.

        Raises:
            RankError: another rank has ended, failed or did not answer.
        """
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        with self._peers.a_pass():
            sums = self._peers.add_up(gradients)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total

    def extra_repr(self) -> str:
        return f"rank={self._peers.rank}, ranks={self._peers.size}, way={self.way!r}"


def _shared_out(samples: int, pieces: int) -> list[int]:
    """Return the number of samples in each piece of a batch, as equal as can be."""
    pieces = min(pieces, max(samples, 1))
    share, more = divmod(samples, pieces)
    return [share + (k < more) for k in range(pieces)]
