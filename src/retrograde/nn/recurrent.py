"""torch's recurrent modules with one argument more: ``memory``.

A subclass keeps torch's constructor, parameters and ``state_dict``; only the way in which the
gradient is computed changes. Ranges of steps run on torch's own fused kernels
(:mod:`retrograde.execute.fused`), as a schedule that fits the budget says.

Known limits, refused with a message: both directions at once, dropout between layers in training,
packed sequences.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError
from retrograde.execute.autograd import run_schedule
from retrograde.execute.fused import FusedLSTM, Kernel
from retrograde.execute.profile import fit_fused
from retrograde.execute.unroll import check_schedule, needs_gradient
from retrograde.plan.fit import Fit
from retrograde.schedule import Schedule
from retrograde.units import Memory, parse_memory

__all__ = ["LSTM"]

State = tuple[Tensor, Tensor]


class LSTM(nn.LSTM):
    """``torch.nn.LSTM`` whose backward pass fits a memory budget.

    Args:
        *args: as for ``torch.nn.LSTM``.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of what ordinary backpropagation
            of the same module and shapes would hold (``0.05``, ``"5%"``). None: ordinary
            backpropagation. It may be changed at any time, as the attribute ``memory``.
        schedule: a schedule to follow in place of a budget, for sequences of its length only.
        **kwargs: as for ``torch.nn.LSTM``.

    Raises:
        UnitError: the memory cannot be read.
        CellError: an option that is not supported yet, together with ``memory``.
        BudgetError: at a call, the budget is too small for these shapes; the message names the
            smallest that would do.

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
        schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if memory is not None:
            parse_memory(memory)
        self.memory = memory
        self.schedule = schedule
        self._fits: dict[Any, tuple[Kernel, Fit]] = {}

    def forward(  # type: ignore[override]
        self, input: Tensor | PackedSequence, hx: State | None = None
    ) -> tuple[Tensor | PackedSequence, State]:
        """Run the layer, as ``torch.nn.LSTM`` does.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``, or (T, I) without a batch.
            hx: the initial (h, c), each (layers, B, H), or (layers, H) without a batch; zeros if
                not given.

        Returns:
            The outputs (T, B, H), laid out as the input is, and the final (h, c).
        """
        budgeted = self.memory is not None or self.schedule is not None
        data = input.data if isinstance(input, PackedSequence) else input
        if not (budgeted and needs_gradient([data, *(hx or ()), *self.parameters()])):
            return cast(tuple[Tensor | PackedSequence, State], super().forward(input, hx))
        self._check_supported(input)
        x, state = self._time_major(cast(Tensor, input), hx)
        if self.schedule is not None:
            check_schedule(self.schedule, x.shape[0])
            core, schedule = self._core(), self.schedule
        else:
            core, found = self._fit(x, state)
            if found.ordinary:
                return cast(tuple[Tensor, State], super().forward(input, hx))
            schedule = found.schedule
        (y,), (h, c) = run_schedule(core, schedule, [x], state)
        return self._laid_out(cast(Tensor, input), y, h, c)

    def fit(self, input: Tensor, hx: State | None = None) -> Fit:
        """What the budget buys for an input: the schedule, its predicted peak, the minimum.

        Args:
            input: as for :meth:`forward`.
            hx: as for :meth:`forward`.

        Returns:
            The :class:`~retrograde.plan.fit.Fit` that a call with this input would use.

        Raises:
            BudgetError: the budget is too small for these shapes.
        """
        self._check_supported(input)
        x, state = self._time_major(input, hx)
        return self._fit(x, state)[1]

    def extra_repr(self) -> str:
        """torch's own, and the budget."""
        text = super().extra_repr()
        return text if self.memory is None else f"{text}, memory={self.memory!r}"

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),  # type: ignore[no-untyped-call]
            "_fits": {},
        }

    def _core(self, kernel: Kernel = "torch") -> FusedLSTM:
        weights = cast(list[Tensor], self._flat_weights)
        return FusedLSTM(weights, self.num_layers, self.bias, kernel)

    def _fit(self, x: Tensor, state: list[Tensor]) -> tuple[FusedLSTM, Fit]:
        kind = x.device.type
        key = (
            self.memory,
            *((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in (x, *state)),
            *(p.requires_grad for p in self.parameters()),
            (x.device, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )
        if key not in self._fits:
            core, found = fit_fused(self._core(), [x], state, self.memory)
            self._fits[key] = core.kernel, found
        kernel, found = self._fits[key]
        return self._core(kernel), found

    def _check_supported(self, input: Any) -> None:
        if isinstance(input, PackedSequence):
            raise CellError(
                "got a PackedSequence: an LSTM with memory= takes padded tensors; unpack it with "
                "torch.nn.utils.rnn.pad_packed_sequence and mask the loss"
            )
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

    def _time_major(self, input: Tensor, hx: State | None) -> tuple[Tensor, list[Tensor]]:
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
        if hx is None:
            out = self.proj_size or self.hidden_size
            sizes = [(self.num_layers, x.shape[1], size) for size in (out, self.hidden_size)]
            state = [torch.zeros(size, dtype=x.dtype, device=x.device) for size in sizes]
        else:
            state = [s.unsqueeze(1) if input.dim() == 2 else s for s in hx]
        self.check_forward_args(x, cast(Any, tuple(state)), None)
        return x, state

    def _laid_out(self, input: Tensor, y: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, State]:
        if input.dim() == 2:
            return y.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (y.transpose(0, 1) if self.batch_first else y), (h, c)
