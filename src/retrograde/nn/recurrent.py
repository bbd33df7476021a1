"""torch's recurrent modules with two arguments more: ``memory`` and ``backward``.

A subclass keeps torch's constructor, parameters and ``state_dict``; only the way in which the
gradient is computed changes.

- ``backward`` recomputes what it needs from the hidden states, which are the outputs, and goes
  through the steps one by one in a compiled loop, or by a parallel scan over their Jacobians
  (:mod:`retrograde.scan`; Wang, BPPSA, 2020).
- ``memory`` alone runs ranges of an LSTM on torch's fused kernels as a schedule says that fits the
  budget (:mod:`retrograde.execute.fused`; Gruslys et al., 2016).
- Both together, and ``memory`` on an RNN or a GRU: the states are kept at the first steps of
  segments only, and several segments at a time are recomputed and backpropagated
  (:mod:`retrograde.nn.segments`).

Known limits, refused with a message: under ``memory``, several directions, dropout between layers,
packed sequences, and, but for the LSTM's own way, several layers; under ``backward``, projections.
"""

from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError
from retrograde.execute.autograd import run_schedule
from retrograde.execute.fused import FusedLSTM, Kernel
from retrograde.execute.inputs import Held
from retrograde.execute.profile import fit_fused
from retrograde.execute.transforms import uncompiled
from retrograde.nn import choice, segments
from retrograde.nn.recent import Recent
from retrograde.nn.stack import Batch, run_stack
from retrograde.nn.unroll import check_schedule, needs_gradient
from retrograde.plan.fit import Fit
from retrograde.schedule import Schedule
from retrograde.units import Memory, parse_memory

__all__ = ["GRU", "LSTM", "RNN", "Backward", "Recurrent"]

#: One step after another; by a parallel scan over steps; whichever is expected to be fastest,
#: torch's own backward pass included.
Backward = Literal["sequential", "scan", "auto"]

State = tuple[Tensor, ...]


class Recurrent(nn.RNNBase):
    """What :class:`RNN`, :class:`GRU` and :class:`LSTM` share; not for use on its own."""

    memory: Memory | None
    backward: Backward | None

    def __init__(
        self,
        *args: Any,
        memory: Memory | None = None,
        backward: Backward | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if memory is not None:
            parse_memory(memory)
        _check_backward(backward)
        self.memory = memory
        self.backward = backward
        self._fits: Recent[Any] = Recent()

    @uncompiled
    def forward(self, input: Any, hx: Any = None) -> Any:  # type: ignore[override]
        """Run the layers, as torch's module does, their gradient being computed as asked.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``, (T, I) without a batch, or a
                ``PackedSequence``.
            hx: the initial state, (layers · directions, B, H), or without B; an LSTM's is the pair
                (h, c); zeros if not given.

        Returns:
            The outputs, laid out as the input is, and the final state.

        Raises:
            CellError: what is asked together is not supported, or the shapes do not fit.
            BudgetError: the memory is too little for these shapes; the message names the least.
        """
        _check_backward(self.backward)
        # As torch's forward does: functional_call and parametrizations replace weights in between.
        self._update_flat_weights()  # type: ignore[no-untyped-call]
        hidden = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        data = input.data if isinstance(input, PackedSequence) else input
        if not (self._asked() and needs_gradient([data, *hidden, *self.parameters()])):
            return super().forward(input, hx)
        if isinstance(input, PackedSequence):
            return self._run_packed(input, hidden)
        x, state = self._time_major(input, hidden)
        found = self._run(x, state)
        if found is None:
            return super().forward(input, hx)
        return self._laid_out(input, *found)

    def fit(self, input: Tensor, hx: Any = None) -> Any:
        """What the budget buys for an input: the segments, the bytes they take, the least budget.

        Args:
            input: as for :meth:`forward`, not packed.
            hx: as for :meth:`forward`.

        Returns:
            The :class:`retrograde.nn.segments.SegmentFit` that a call with this input would use.

        Raises:
            BudgetError: the memory is too little for these shapes.
            CellError: as :meth:`forward`; also where no ``memory`` is given.
        """
        if self.memory is None:
            raise CellError("there is no budget to fit: give memory=, such as memory=0.05")
        hidden = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
        x, state = self._time_major(input, hidden)
        return self._segments(x, state)

    def extra_repr(self) -> str:
        """torch's own, and what was asked beyond it."""
        asked = {"memory": self.memory, "backward": self.backward}
        more = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
        return ", ".join([super().extra_repr(), *more])

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),  # type: ignore[no-untyped-call]
            "_fits": Recent(),
        }

    def _segments(self, x: Tensor, state: State) -> segments.SegmentFit:
        self._check_segments()
        found = self._fits.get(self._signature(x, state), lambda: segments.fit(self, x, state))
        self._update_flat_weights()  # type: ignore[no-untyped-call]  # a fit uses up their graph
        return cast(segments.SegmentFit, found)

    def _signature(self, x: Tensor, state: Any) -> Any:
        """All that bytes depend on."""
        kind = x.device.type
        return (
            (self.memory, self.backward),
            *((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in (x, *state)),
            *(p.requires_grad for p in self.parameters()),
            (x.device, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )

    def _check_segments(self) -> None:
        """Refuse what cannot be kept to a budget by segments."""
        remedy = "stack modules of one layer in one direction, each with its share of the memory"
        given = {
            "bidirectional=True": self.bidirectional,
            f"num_layers={self.num_layers}": self.num_layers > 1,
            f"proj_size={self.proj_size}": self.proj_size > 0,
        }
        for option, is_given in given.items():
            if is_given:
                with_ = "memory=" if self.backward is None else "memory= and backward="
                raise CellError(f"{option} is not supported together with {with_}: {remedy}")

    def _asked(self) -> bool:
        return self.memory is not None or self.backward is not None

    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State] | None:
        """Outputs and final state, time first; or None to run torch's own module."""
        if self.memory is not None:
            found = self._segments(x, state).way
            way = None if found is None else lambda _: found
        else:
            way = choice.ways(self, x.shape[0], x.shape[1], x)
        if way is None:
            return None
        batch, final = run_stack(self, way, Batch(x), state)
        return batch.x, final

    def _run_packed(self, input: PackedSequence, hidden: State) -> tuple[PackedSequence, Any]:
        if self.memory is not None:
            raise CellError(
                f"got a PackedSequence: a {type(self).__name__} with memory= takes padded tensors; "
                "unpack it with torch.nn.utils.rnn.pad_packed_sequence and mask the loss"
            )
        steps, samples = len(input.batch_sizes), int(input.batch_sizes[0])
        way = choice.ways(self, steps, samples, input.data)
        if way is None:
            hx = None if not hidden else hidden if self.mode == "LSTM" else hidden[0]
            return cast(tuple[PackedSequence, Any], super().forward(input, hx))
        order, sizes = input.sorted_indices, input.batch_sizes
        if hidden:
            self._check_arguments(input.data, hidden, sizes)
            state = tuple(s if order is None else s.index_select(1, order) for s in hidden)
        else:
            state = self._zeros(int(sizes[0]), input.data)
            self._check_arguments(input.data, state, sizes)
        batch, final = run_stack(self, way, Batch.padded(input.data, sizes), state)
        back = input.unsorted_indices
        final = tuple(s if back is None else s.index_select(1, back) for s in final)
        outputs = PackedSequence(batch.packed(), sizes, order, back)
        return outputs, final if self.mode == "LSTM" else final[0]

    def _zeros(self, samples: int, like: Tensor) -> State:
        layers = self.num_layers * (2 if self.bidirectional else 1)
        sizes = [self.proj_size or self.hidden_size]
        sizes += [self.hidden_size] if self.mode == "LSTM" else []
        return tuple(like.new_zeros(layers, samples, size) for size in sizes)

    def _time_major(self, input: Tensor, hidden: State) -> tuple[Tensor, State]:
        if input.dim() not in (2, 3):
            raise CellError(
                f"the input has {input.dim()} dimensions {tuple(input.shape)}: expected "
                "(T, B, I), (B, T, I) with batch_first, or (T, I)"
            )
        x = input
        if input.dim() == 2:
            x = input.unsqueeze(1)
        elif self.batch_first:
            x = input.transpose(0, 1)
        if x.shape[0] < 1:
            raise CellError(f"the input {tuple(input.shape)} has 0 steps: expected at least one")
        state = hidden or self._zeros(x.shape[1], x)
        if hidden and input.dim() == 2:
            state = tuple(s.unsqueeze(1) for s in hidden)
        self._check_arguments(x, state, None)
        return x, state

    def _check_arguments(self, x: Tensor, state: State, sizes: Tensor | None) -> None:
        """As torch checks shapes; and that all is in one place and of one type."""
        device, dtype = self._flat_weights[0].device, self._flat_weights[0].dtype  # type: ignore[union-attr]
        for name, t in (("the input", x), *(("the initial state", s) for s in state)):
            if t.device != device:
                raise CellError(
                    f"{name} is on {t.device}, the parameters are on {device}: move one of them, "
                    "with .to(device)"
                )
            if t.dtype != dtype and not torch.is_autocast_enabled(device.type):
                raise CellError(
                    f"{name} is {t.dtype}, the parameters are {dtype}: expected one type; convert "
                    "one of them, with .to(dtype)"
                )
        hx: Any = state if self.mode == "LSTM" else state[0]
        as_given = x.transpose(0, 1) if self.batch_first and sizes is None else x
        self.check_forward_args(as_given, hx, sizes)

    def _laid_out(self, input: Tensor, y: Tensor, final: State) -> tuple[Tensor, Any]:
        if input.dim() == 2:
            y, final = y.squeeze(1), tuple(s.squeeze(1) for s in final)
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, final if self.mode == "LSTM" else final[0]


class RNN(Recurrent, nn.RNN):
    """``torch.nn.RNN`` whose gradient is computed as asked: in parallel, or within a budget.

    Args:
        *args: as for ``torch.nn.RNN``.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of what ordinary backpropagation
            of the same module and shapes would hold (``0.05``, ``"5%"``). None: no limit.
        backward: ``"sequential"``, ``"scan"``, ``"auto"``, or None for torch's own backward pass.
            See :data:`Backward`, and :func:`retrograde.explain` for what ``"auto"`` chooses.
        **kwargs: as for ``torch.nn.RNN``.

    Both may be changed at any time, as attributes.

    Raises:
        UnitError: the memory cannot be read.
        CellError: ``backward`` is unknown; at a call, something asked together is not supported.
        BudgetError: at a call, the memory is too little for these shapes.

    Example:
        >>> rnn = RNN(4, 8, backward="scan")
        >>> outputs, last = rnn(torch.randn(200, 2, 4))
        >>> last.sum().backward()
        >>> rnn.weight_hh_l0.grad.shape
        torch.Size([8, 8])
    """


class GRU(Recurrent, nn.GRU):
    """``torch.nn.GRU`` whose gradient is computed as asked: in parallel, or within a budget.

    Args:
        *args: as for ``torch.nn.GRU``.
        memory: as for :class:`RNN`.
        backward: as for :class:`RNN`.
        **kwargs: as for ``torch.nn.GRU``.

    Raises:
        UnitError: as :class:`RNN`.
        CellError: as :class:`RNN`.
        BudgetError: as :class:`RNN`.

    Example:
        >>> gru = GRU(4, 8, backward="sequential", memory="50%")
        >>> outputs, last = gru(torch.randn(200, 2, 4))
        >>> outputs.sum().backward()
        >>> gru.fit(torch.randn(200, 2, 4)).way.segment < 200
        True
    """


class LSTM(Recurrent, nn.LSTM):
    """``torch.nn.LSTM`` whose gradient is computed as asked: in parallel, or within a budget.

    Args:
        *args: as for ``torch.nn.LSTM``.
        memory: as for :class:`RNN`. Without ``backward`` it is kept by a schedule of recomputation,
            which goes down to far smaller budgets and takes any number of layers, and projections.
        backward: as for :class:`RNN`.
        schedule: a schedule to follow in place of a budget, for sequences of its length only.
        **kwargs: as for ``torch.nn.LSTM``.

    Raises:
        UnitError: as :class:`RNN`.
        CellError: as :class:`RNN`; also ``schedule`` together with ``backward``.
        BudgetError: as :class:`RNN`.

    Example:
        >>> lstm = LSTM(32, 32, memory="10%")
        >>> outputs, (h, c) = lstm(torch.randn(200, 8, 32))
        >>> outputs.sum().backward()
        >>> lstm.fit(torch.randn(200, 8, 32)).schedule.length
        200
    """

    def __init__(
        self,
        *args: Any,
        memory: Memory | None = None,
        backward: Backward | None = None,
        schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, memory=memory, backward=backward, **kwargs)
        if schedule is not None and backward is not None:
            raise CellError(
                f"got a schedule and backward={backward!r}: a schedule says itself how to go "
                "backward; leave one out"
            )
        self.schedule = schedule

    def fit(self, input: Tensor, hx: Any = None) -> Any:
        """As for the other modules; without ``backward``, a :class:`retrograde.plan.fit.Fit`."""
        if self.backward is not None:
            return super().fit(input, hx)
        x, state = self._time_major(input, hx or ())
        self._check_scheduled()
        return self._fit(x, list(state))[1]

    def _asked(self) -> bool:
        return super()._asked() or self.schedule is not None

    def _run(self, x: Tensor, state: State) -> tuple[Tensor, State] | None:
        if self.backward is not None:
            return super()._run(x, state)
        self._check_scheduled()
        if self.schedule is not None:
            check_schedule(self.schedule, x.shape[0])
            core, schedule = self._core(), self.schedule
        else:
            core, found = self._fit(x, list(state))
            if found.ordinary:
                return None
            schedule = found.schedule
        (y,), after = run_schedule(core, schedule, [x], list(state))
        return y, tuple(after)

    def _core(self, kernel: Kernel = "torch") -> FusedLSTM:
        weights = cast(list[Tensor], self._flat_weights)
        return FusedLSTM(weights, self.num_layers, self.bias, kernel)

    def _fit(self, x: Tensor, state: list[Tensor]) -> tuple[FusedLSTM, Fit]:
        def find() -> tuple[Kernel, Fit]:
            core, found = fit_fused(self._core(), Held([x]), state, self.memory)
            return core.kernel, found

        kernel, found = self._fits.get(self._signature(x, state), find)
        return self._core(kernel), found

    def _check_scheduled(self) -> None:
        if self.bidirectional:
            raise CellError(
                "bidirectional=True is not supported together with memory=: use two LSTMs, one "
                "on the flipped sequence, and concatenate their outputs"
            )
        if self.dropout and self.training and self.num_layers > 1:
            raise CellError(
                f"dropout={self.dropout} between layers is not supported together with memory=: "
                "stack single-layer LSTMs with torch.nn.Dropout between them"
            )


def _check_backward(backward: Any) -> None:
    if backward is not None and backward not in get_args(Backward):
        names = ", ".join(map(repr, get_args(Backward)))
        raise CellError(
            f"unknown backward={backward!r}: expected one of {names}, or None for torch's own"
        )
