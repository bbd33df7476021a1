"""What torch's recurrent modules do with ``memory``, ``schedule`` and ``backward``.

Only the computation of the gradient changes. Torch's own forward pass runs if no option is set, no
gradient is wanted, or a tensor is not real (:func:`retrograde.run.transforms.is_unreal`).

- ``memory`` runs ranges of steps on the fastest kernels, by a schedule that fits the budget
  (``find_plan.py``; Gruslys et al., 2016). ``schedule`` gives that schedule itself.
- ``backward="scan"`` recomputes what it needs from the hidden states, which are the outputs. It
  goes back by a parallel scan over the Jacobians of the steps (:mod:`retrograde.scan`; Wang, BPPSA,
  2020). With a budget, it does so in every range.

Known limit: ``backward="scan"`` refuses projections with an error.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from retrograde.errors import CellError, InputError
from retrograde.plan.fit import Fit
from retrograde.recurrent.call import Call
from retrograde.recurrent.dropout import Place
from retrograde.recurrent.find_plan import find_plan
from retrograde.recurrent.fused import has_slopes
from retrograde.recurrent.resets import SequenceResets, read_starts
from retrograde.recurrent.vendor import is_too_long
from retrograde.recurrent.weights import over_weights
from retrograde.run.states import bytes_of_gradients, shaped
from retrograde.run.transforms import (
    is_exporting,
    is_unreal,
    refuse_sharded,
    refuse_transforms,
    uncompiled,
)
from retrograde.schedule import Schedule
from retrograde.schedule.schedule import check_limit, check_schedule
from retrograde.sizes.cache import LRUCache
from retrograde.torch_private import flat_weights
from retrograde.units import Memory, MemoryAttribute, format_bytes

#: The backward pass: by a parallel scan over the steps.
Backward = Literal["scan"]

State = tuple[Tensor, ...]

# The types in which samples may begin anew.
_EXACT = (torch.float32, torch.float64)


class BudgetedRNN(nn.RNNBase):
    """The base class of :class:`RNN`, :class:`GRU` and :class:`LSTM`; not for use on its own."""

    memory = MemoryAttribute()
    backward: Backward | None
    schedule: Schedule | None
    #: Where a call is, if it runs a part of a sequence or of a batch, with dropout between layers.
    place: Place | None = None

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        proj_size: int = 0, device: Any = None, dtype: Any = None, *, memory: Memory | None = None,
        backward: Backward | None = None, schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        sizes, options = (input_size, hidden_size, num_layers), {"device": device, "dtype": dtype}
        if proj_size:  # torch's RNN and GRU refuse the name
            options["proj_size"] = proj_size
        super().__init__(*sizes, bias, batch_first, dropout, bidirectional, **options)  # type: ignore[arg-type]
        self._ask(memory, backward, schedule)

    def _ask(
        self, memory: Memory | None, backward: Backward | None, schedule: Schedule | None
    ) -> None:
        """Set the options, after torch's constructor."""
        self.memory, self.backward, self.schedule = memory, backward, schedule
        self._fits: LRUCache[Any] = LRUCache()
        self._check_asked()

    def forward(  # type: ignore[override]
        self, input: Any, hx: Any = None, *, reset: Any = None, reset_state: Any = None
    ) -> Any:
        """Run the layers as torch's module does; the options decide how the gradient is computed.

        Args:
            input: (T, B, I), or (B, T, I) with ``batch_first``, (T, I) without a batch, or a
                ``PackedSequence``. The outputs have the same layout.
            hx: the initial state, (layers · directions, B, H), or without B; for an LSTM, the pair
                (h, c). None means zeros.
            reset: a bool tensor (T, B), or (B, T) with ``batch_first``, true before each step at
                which a sample begins anew; packed as the input if that is. Nothing crosses such a
                boundary, in either direction.
            reset_state: the state with which it does, in the form of ``hx``. None means zeros.

        Raises:
            CellError: the options exclude each other.
            InputError: the number of dimensions, the device or the dtype is wrong.
            RuntimeError: a size is wrong; the error is torch's own.
            ScheduleError: the schedule does not fit, or a budget is given too.
            BudgetError: the budget is too small for these shapes; the message names the least one.
            RetrogradeError: the call is transformed or traced, as by ``torch.func``.
        """
        if reset is not None:
            return self._forward_anew(input, hx, reset, reset_state)
        if reset_state is not None:
            raise InputError("got reset_state without reset: expected both, or neither")
        if is_exporting() or not (self._options() or self._is_long(input)):
            return super().forward(input, hx)
        return self._forward_as_asked(input, hx)

    def _is_long(self, input: Any) -> bool:
        """Return whether torch's own pass would not do: on a GPU, cuDNN takes only so many steps.
        Torch's masks do not follow from a step's place."""
        if self.place is not None:
            return True
        if isinstance(input, PackedSequence):
            return is_too_long(input.data, len(input.batch_sizes))
        at = 1 if self.batch_first and input.dim() == 3 else 0
        return is_too_long(input, input.shape[at])

    @uncompiled
    def _forward_as_asked(self, input: Any, hx: Any) -> Any:
        self._check_asked()
        if not (torch.is_grad_enabled() or self._is_long(input)):
            return super().forward(input, hx)
        # As in torch's forward; only once, since a parametrization may count how often it is read.
        weights: Any = flat_weights(self, anew=True)
        data = input.data if isinstance(input, PackedSequence) else input
        hidden, outcome = self._state_of(hx), None
        asked = self._options() and torch.is_grad_enabled()
        if hidden is not None and asked and self._wants([data, *hidden, *weights]):
            outcome = self._run(self._read(input, hidden, weights))
        if hidden is not None and outcome is None and self._is_long(input):
            outcome = self._read(input, hidden, weights).run_chained()
        if outcome is None:
            return super(BudgetedRNN, over_weights(self, weights, type(self))).forward(input, hx)
        return self._laid_out(input, *outcome)

    @uncompiled
    def _forward_anew(self, input: Any, hx: Any, reset: Any, reset_state: Any) -> Any:
        self._check_asked()
        weights: Any = flat_weights(self, anew=True)
        call = self._call_of(input, hx, weights, reset, reset_state)
        assert call.resets is not None
        tensors = [call.x, *call.state, *call.resets.state, *weights]
        refuse_transforms(tensors, ["reset"])
        refuse_sharded([self], tensors)
        options = [name for name in self._options() if name != "memory"]
        refused = options or is_unreal(tensors) or call.x.dtype not in _EXACT
        refused = refused or not has_slopes(call.nets(weights)[0])
        if refused or (self.memory is not None and not call.runs_held):
            raise CellError(
                f"got reset= with {' and '.join(f'{name}=' for name in options) or 'these layers'}"
                ": expected float32 or float64 layers of real numbers, without projections and "
                "outside autocast, with memory= or no option; leave reset= out, or the rest"
            )
        if not call.batch:
            return super().forward(input, hx)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if wanted and self.memory is not None:
            return self._laid_out(input, *call.run(find_plan(call, self.memory)))
        return self._laid_out(input, *call.run_held(scans=False))

    def _options(self) -> list[str]:
        """Return the names of the options that are set."""
        asked = {"memory": self.memory, "schedule": self.schedule, "backward": self.backward}
        return [name for name, value in asked.items() if value is not None]

    def _wants(self, tensors: list[Any]) -> bool:
        """Return whether this library runs or refuses a call on these; if not, torch runs it."""
        if not all(isinstance(t, Tensor) for t in tensors):
            return False
        if is_unreal(tensors) and len({t.device for t in tensors}) == 1:
            return False
        wanted = any(t.requires_grad for t in tensors)
        if wanted:
            refuse_transforms(tensors, self._options())
            refuse_sharded([self], tensors)
        return wanted

    def fit(self, input: Tensor | PackedSequence, hx: Any = None) -> Fit:
        """Return the fit that a call with this input, or one of this shape, would use.
        Raises the errors of the call, and CellError if no ``memory`` is set."""
        if self.memory is None:
            raise CellError("there is no budget to fit: give memory=, such as memory=0.05")
        return self._fit_within(self.memory, shaped(input, self), hx)

    def _fit_within(self, memory: Memory, input: Any, hx: Any = None) -> Fit:
        """Return the result of :meth:`fit` for another budget; nothing is changed."""
        self._check_asked(memory)
        call = self._call_of(input, hx)
        call.check_measurable()
        fit = find_plan(call, memory).fit
        assert fit is not None
        units = (self.proj_size or self.hidden_size) * (1 + self.bidirectional)
        outputs = call.x.shape[:-1].numel() * units * call.x.element_size()
        gradients = bytes_of_gradients((call.x, *call.state, *self.parameters()))
        return replace(fit, beside_bytes=2 * outputs + gradients)

    def extra_repr(self) -> str:
        """Return torch's own text, and the options that are set."""
        options = ((name, getattr(self, name)) for name in self._options() if name != "schedule")
        more = [f"{k}={format_bytes(v) if isinstance(v, int) else repr(v)}" for k, v in options]
        return ", ".join([super().extra_repr(), *more])

    def __prepare_scriptable__(self) -> nn.Module:
        raise CellError(
            f"TorchScript cannot run this {type(self).__name__}: expected torch's own, "
            "whose state_dict is the same; script that one, or use torch.jit.trace under no_grad()"
        )

    def _check_asked(self, memory: Memory | None = None) -> None:
        """Raise if an option is unknown, or two options exclude each other. ``memory`` may be
        another budget than that of the module."""
        memory = self.memory if memory is None else memory
        asked: Any = self.backward
        if asked not in (None, "scan"):
            raise CellError(
                f"unknown backward={asked!r}: expected 'scan', or None; the fastest sequential "
                "backward pass is memory='100%'"
            )
        if asked and self.proj_size:
            raise CellError(
                f"proj_size={self.proj_size} has no Jacobian here: expected an LSTM without "
                "projections; use backward=None, or a Linear layer after the LSTM"
            )
        if asked and self.schedule is not None:
            raise CellError(
                f"got a schedule and backward={asked!r}: a schedule says itself how to go "
                "backward; leave one out"
            )
        if self.bidirectional and (self.schedule is not None or (asked and memory is not None)):
            refused = f"memory={memory!r} and backward='scan'" if asked else "a schedule"
            raise CellError(
                f"got {refused} for two directions, which do not run in ranges of steps: expected "
                "memory= or backward='scan' alone, or one direction; leave one out"
            )
        if self.schedule is not None:
            check_limit(self.memory, self.schedule)

    def _run(self, call: Call) -> tuple[Tensor, State] | None:
        """Return outputs and final state in the layout of the call, or None to run torch's own."""
        if not call.batch:
            return None  # an empty batch needs no memory and no time
        if self.memory is None and self.schedule is None:
            # Torch's kernels know which part of a cell autocast runs in which type.
            autocast = torch.is_autocast_enabled(call.x.device.type)
            return None if autocast else call.run_held(scans=True)
        if self.schedule is not None:
            check_schedule(self.schedule, call.length)
            return call.follow(self.schedule)
        assert self.memory is not None
        plan = find_plan(call, self.memory)
        return call.run(plan) if plan.parts else None

    def _zeros(self, samples: int, like: Tensor) -> State:
        layers = self.num_layers * (2 if self.bidirectional else 1)
        sizes = [self.proj_size or self.hidden_size]
        sizes += [self.hidden_size] if self.mode == "LSTM" else []
        return tuple(like.new_zeros(layers, samples, size) for size in sizes)

    def _state_of(self, hx: Any) -> State | None:
        """Return the tensors of an initial state: () for zeros, None if it is not a valid one."""
        if hx is None:
            return ()
        if self.mode != "LSTM":
            return (hx,) if isinstance(hx, Tensor) else None
        return tuple(hx) if isinstance(hx, tuple | list) and len(hx) == 2 else None

    def _call_of(
        self, input: Any, hx: Any, weights: list[Tensor] | None = None, reset: Any = None,
        reset_state: Any = None,
    ) -> Call:  # fmt: skip
        """Return the call with these arguments, with the weights as they were last computed."""
        hidden, entry = self._state_of(hx), self._state_of(reset_state)
        if hidden is None or entry is None:
            wrong = hx if hidden is None else reset_state
            raise InputError(
                f"the {'initial' if hidden is None else 'reset'} state is a "
                f"{type(wrong).__name__}: expected "
                + ("the pair (h, c)" if self.mode == "LSTM" else "a tensor")
            )
        call = self._read(input, hidden, weights)
        if reset is not None:
            begun = call if not entry else self._read(input, entry, weights)
            state = begun.state if entry else self._zeros(call.batch, call.x)
            starts = read_starts(reset, input, self.batch_first, bool(self.bidirectional))
            call.resets = SequenceResets(starts, [*state])
        return call

    def _read(self, input: Any, hidden: State, weights: list[Tensor] | None = None) -> Call:
        """Return the call with these arguments, its inputs time first or packed."""
        given, sizes, order = bool(hidden), None, None
        if isinstance(input, PackedSequence):
            x, sizes, order = input.data, input.batch_sizes, input.sorted_indices
        else:
            x = self._time_major(input, hidden)
            hidden = tuple(s.unsqueeze(1) for s in hidden) if input.dim() == 2 else hidden
        state = hidden or self._zeros(x.shape[1] if sizes is None else int(sizes[0]), x)
        self._check_arguments(x, state, sizes)
        if given:
            state = _ordered(state, order)
        sorts = order is not None
        return Call(self, x, state, sizes, weights=weights, given=given, sorts=sorts)

    def _time_major(self, input: Tensor, hidden: State) -> Tensor:
        if input.dim() not in (2, 3):
            raise InputError(
                f"the input has {input.dim()} dimensions {tuple(input.shape)}: expected "
                "(T, B, I), (B, T, I) with batch_first, or (T, I)"
            )
        if any(s.dim() != input.dim() for s in hidden):
            raise InputError(
                f"the initial state is {', '.join(str(tuple(s.shape)) for s in hidden)}: expected "
                f"{input.dim()} dimensions, as the input {tuple(input.shape)} has"
            )
        x = input.unsqueeze(1) if input.dim() == 2 else input
        if self.batch_first and input.dim() == 3:
            x = input.transpose(0, 1)
        if x.shape[0] < 1:
            raise InputError(f"the input {tuple(input.shape)} has 0 steps: expected at least one")
        return x

    def _check_arguments(self, x: Tensor, state: State, sizes: Tensor | None) -> None:
        """Check shapes as torch does, and that all tensors have one device and one dtype."""
        weight = flat_weights(self)[0]
        device, dtype = weight.device, weight.dtype
        for name, t in (("the input", x), *(("the initial state", s) for s in state)):
            if t.device != device:
                raise InputError(
                    f"{name} is on {t.device}, the parameters are on {device}: move one of them, "
                    "with .to(device)"
                )
            if t.dtype != dtype and not torch.is_autocast_enabled(device.type):
                raise InputError(
                    f"{name} is {t.dtype}, the parameters are {dtype}: expected one type; convert "
                    "one of them, with .to(dtype)"
                )
        hx: Any = state if self.mode == "LSTM" else state[0]
        as_given = x.transpose(0, 1) if self.batch_first and sizes is None else x
        self.check_forward_args(as_given, hx, sizes)

    def _laid_out(self, input: Any, y: Tensor, final: State) -> tuple[Any, Any]:
        outputs: Any = y
        if isinstance(input, PackedSequence):
            outputs = input._replace(data=y)
            final = _ordered(final, input.unsorted_indices)
        elif input.dim() == 2:
            outputs, final = y.squeeze(1), tuple(s.squeeze(1) for s in final)
        elif self.batch_first:
            outputs = y.transpose(0, 1)
        return outputs, final if self.mode == "LSTM" else final[0]


def _ordered(state: State, order: Tensor | None) -> State:
    return tuple(s if order is None else s.index_select(1, order) for s in state)
