"""torch's recurrent modules with three more arguments: ``memory``, ``schedule`` and ``backward``.

A subclass keeps torch's constructor, parameters and ``state_dict``; ``base.py`` has all they do.
"""

from typing import Any, Literal

from torch import nn

from retrograde.recurrent.base import Backward, BudgetedRNN
from retrograde.schedule import Schedule
from retrograde.units import Memory


class RNN(BudgetedRNN, nn.RNN):
    """``torch.nn.RNN`` whose backward pass stays within a memory budget, or is a parallel scan.

    Args:
        input_size, …, dtype: those of ``torch.nn.RNN``, in the same order.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of ordinary backpropagation's memory
            for the same module and shapes (``0.05``, ``"5%"``). None: no limit.
        backward: ``"scan"``: by a parallel scan over the steps. None: torch's own backward pass,
            or with a budget the fastest one that fits.
        schedule: a schedule to follow instead of a budget, for sequences of its length only.

    The three are attributes, and may be changed at any time. A call also takes ``reset=``: where
    samples begin anew inside a sequence (:meth:`forward`).

    Raises:
        UnitError: the memory cannot be read.
        CellError: ``backward`` is unknown, or given together with a schedule or projections.
        ScheduleError: both memory and schedule are given; at a call, the schedule does not fit.
        BudgetError: at a call, the memory is too small for these shapes.

    Example:
        >>> import torch
        >>> rnn = RNN(4, 8, backward="scan")
        >>> outputs, last = rnn(torch.randn(200, 2, 4))
        >>> last.sum().backward()
        >>> rnn.weight_hh_l0.grad.shape
        torch.Size([8, 8])
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1,
        nonlinearity: Literal["tanh", "relu"] = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        proj_size: int = 0, device: Any = None, dtype: Any = None, *, memory: Memory | None = None,
        backward: Backward | None = None, schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        sizes, options = (input_size, hidden_size, num_layers), {"device": device, "dtype": dtype}
        if proj_size:  # which torch refuses
            options["proj_size"] = proj_size
        more = nonlinearity, bias, batch_first, dropout, bidirectional
        # Not nn.RNN by name, which a program may replace by this class.
        super(BudgetedRNN, self).__init__(*sizes, *more, **options)  # type: ignore[arg-type]
        self._ask(memory, backward, schedule)


class GRU(BudgetedRNN, nn.GRU):
    """``torch.nn.GRU`` whose backward pass stays within a memory budget, or is a parallel scan.

    Args:
        input_size, …, dtype: those of ``torch.nn.GRU``, in the same order.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of ordinary backpropagation's memory
            for the same module and shapes (``0.05``, ``"5%"``). None: no limit.
        backward: ``"scan"``: by a parallel scan over the steps. None: torch's own backward pass,
            or with a budget the fastest one that fits.
        schedule: a schedule to follow instead of a budget, for sequences of its length only.

    The three are attributes, and may be changed at any time. A call also takes ``reset=``: where
    samples begin anew inside a sequence (:meth:`forward`).

    Raises: as for :class:`RNN`.

    Example:
        >>> import torch
        >>> gru = GRU(4, 8, num_layers=2, bidirectional=True, memory="50%")
        >>> outputs, last = gru(torch.randn(200, 2, 4))
        >>> outputs.sum().backward()
        >>> gru.fit(torch.randn(200, 2, 4)).forward_steps
        400
    """


class LSTM(BudgetedRNN, nn.LSTM):
    """``torch.nn.LSTM`` whose backward pass stays within a memory budget, or is a parallel scan.

    Args:
        input_size, …, dtype: those of ``torch.nn.LSTM``, in the same order.
        memory: the budget for the backward pass, beyond inputs, outputs and gradients: bytes
            (``67108864``), a size (``"64MiB"``), or a fraction of ordinary backpropagation's memory
            for the same module and shapes (``0.05``, ``"5%"``). None: no limit.
        backward: ``"scan"``: by a parallel scan over the steps. None: torch's own backward pass,
            or with a budget the fastest one that fits.
        schedule: a schedule to follow instead of a budget, for sequences of its length only.

    The three are attributes, and may be changed at any time. A call also takes ``reset=``: where
    samples begin anew inside a sequence (:meth:`forward`).

    Raises: as for :class:`RNN`.

    Example:
        >>> import torch
        >>> lstm = LSTM(32, 32, memory="10%")
        >>> outputs, (h, c) = lstm(torch.randn(200, 8, 32))
        >>> outputs.sum().backward()
        >>> lstm.fit(torch.randn(200, 8, 32)).schedule.length
        200
    """
