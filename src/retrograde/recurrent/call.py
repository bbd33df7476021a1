"""One call of a recurrent module: its recurrences, and how a plan runs them.

Layers of one direction are one recurrence. A layer with two directions needs all outputs of the
layer below it. So with two directions every layer is a recurrence of its own, and the sequences
between the layers are held.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from retrograde.errors import CellError
from retrograde.kernels import kernels
from retrograde.plan.fit import Fit, in_one_range
from retrograde.recurrent.bytes import sums_at_once
from retrograde.recurrent.core import HeldLayers
from retrograde.recurrent.dropout import Dropout, Place
from retrograde.recurrent.fused import Fused, has_slopes, held_plan
from retrograde.recurrent.plan import HeldPlan
from retrograde.recurrent.resets import SequenceResets
from retrograde.recurrent.vendor import Kernel, Layers, Mode, laid_out, run_torch
from retrograde.recurrent.weights import last_weights
from retrograde.replay.trees import Tensors
from retrograde.run.autograd import run_schedule, run_without_gradient
from retrograde.run.core import Core
from retrograde.run.layout import Rows
from retrograde.run.transforms import is_unreal
from retrograde.schedule import Schedule
from retrograde.sizes.ordinary import FEW_STEPS, LONGEST_MEASURED

if TYPE_CHECKING:
    from retrograde.recurrent.base import BudgetedRNN

State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Plan:
    """How a module runs: for each recurrence, its kernel or held plan, and its schedule. A
    recurrence with None runs in the caller's graph, by torch's kernels. ``parts`` is empty if
    torch's own module runs. ``fit`` is None if the caller gave the schedule."""

    parts: tuple[tuple[Kernel | HeldPlan | None, Schedule], ...]
    fit: Fit | None = None


class Call:
    """One call of a recurrent module of this library.

    ``x`` are the inputs (T, B, I), or packed (rows, I). ``state`` is (h,), or (h, c), each (layers
    · directions, B, H); it is zeros if the caller has not ``given`` it. ``sizes`` are the numbers
    of sequences at the steps of a packed batch, which may have had to be sorted (``sorts``).
    ``weights`` are in torch's order; None for those that were last computed.
    """

    def __init__(
        self, module: "BudgetedRNN", x: Tensor, state: State, sizes: Tensor | None = None, *,
        weights: Tensors | None = None, given: bool = True, sorts: bool = False,
    ) -> None:  # fmt: skip
        self.module, self.x, self.state, self.sizes = module, x, state, sizes
        self.weights = last_weights(module) if weights is None else weights
        self.given, self.sorts = given, sorts
        #: Where samples begin anew.
        self.resets: SequenceResets | None = None
        self.length = len(x) if sizes is None else len(sizes)
        # Lengths are rounded down to a power of two, 256 at most, so that few of them are measured.
        most = min(self.length, LONGEST_MEASURED)
        self.measured_length = most if most <= FEW_STEPS else 1 << most.bit_length() - 1
        self.batch = state[0].shape[1]
        #: Whether the sequences of a packed batch have several lengths.
        self.is_ragged = sizes is not None and len(x) < self.length * self.batch
        self.bidirectional = bool(module.bidirectional)
        # Each of several layers of two directions is a recurrence of its own.
        self.is_stack = self.bidirectional and module.num_layers > 1
        self.has_dropout = bool(module.dropout and module.training and module.num_layers > 1)

    @property
    def runs_held(self) -> bool:
        """Whether held layers run this call; their bytes are counted, not measured."""
        return self.module.backward != "scan" and self.may_run_held

    @property
    def may_run_held(self) -> bool:
        """Whether held layers can run this call, and may scan it."""
        weight, module = self.weights[1], self.module
        if not has_slopes(self.nets(self.weights)[0]):
            return False
        device = weight.device.type
        if device == "cpu":
            return weight.dtype in (torch.float32, torch.float64)
        compiled = kernels(device, weight.dtype, module.hidden_size).name == "triton"
        return compiled and self.sizes is None

    @property
    def may_scan_held(self) -> bool:
        """Whether held layers scan this call, within bytes that can be counted."""
        weight, size = self.weights[1], self.module.hidden_size
        is_wide = kernels(weight.device.type, weight.dtype, size).wide is not None
        return self.module.backward == "scan" and self.may_run_held and not is_wide

    def nets(self, weights: Tensors) -> list[Layers]:
        """Return the layers of every recurrence, with the given weights."""
        module = self.module
        mode, count = cast(Mode, module.mode), module.num_layers
        stack = Layers(mode, weights, count, module.bias, self.bidirectional)
        return [stack[k] for k in range(count)] if self.bidirectional else [stack]

    def states(self) -> list[Tensors]:
        """Return the initial state of every recurrence."""
        if not self.is_stack:
            return [list(self.state)]
        return [list(tensors) for tensors in zip(*(s.split(2) for s in self.state), strict=True)]

    def anew(self, number: int) -> SequenceResets | None:
        """Return where samples begin anew in the recurrence with this number."""
        if self.resets is None or not self.is_stack:
            return self.resets
        return self.resets.divided()[number]

    def masks(self, number: int, place: Place | None) -> Dropout | None:
        """Return the dropout before layers of the recurrence with this number."""
        if place is None or (self.bidirectional and number == 0):
            return None
        return Dropout(float(self.module.dropout), place, number, first=self.bidirectional)

    def follow(self, schedule: Schedule) -> tuple[Tensor, State]:
        """Run on torch's kernels by a given schedule."""
        return self.run(Plan(((run_torch, schedule),)))

    def run_held(self, *, scans: bool) -> tuple[Tensor, State]:
        """Run held layers without a budget: gates are kept."""
        nets, whole = self.nets(self.weights), in_one_range(self.length)
        plans = [held_plan(net, self.length, self.batch, scans=scans) for net in nets]
        return self.run(Plan(tuple((plan, whole) for plan in plans)))

    def run_chained(self) -> tuple[Tensor, State] | None:
        """Run as torch's own module does, in as many calls as the vendor's kernel needs. Return
        None if no call can be made."""
        if not self.bidirectional:
            return self.follow(in_one_range(self.length))
        return self.run_held(scans=False) if has_slopes(self.nets(self.weights)[0]) else None

    def run(self, plan: Plan) -> tuple[Tensor, State]:
        """Run a plan, each recurrence on the outputs of the one before. Returns the outputs, laid
        out as the inputs are, and the final state."""
        place = self.module.place
        if self.has_dropout and place is None:
            place = Place(torch.randint(2**62, (), device=self.x.device))
        x, finals = self.x, []
        nets = self.nets(_apart(self.weights))
        for number, (net, state) in enumerate(zip(nets, self.states(), strict=True)):
            arguments = self.masks(number, place), self.anew(number)
            x, final = self._run(*plan.parts[number], net, x, state, *arguments)
            finals.append(final)
        if len(finals) == 1:
            return x, tuple(finals[0])
        return x, tuple(torch.cat(tensors) for tensors in zip(*finals, strict=True))

    def _run(
        self, runner: Kernel | HeldPlan | None, schedule: Schedule, net: Layers, x: Tensor,
        state: Tensors, masks: Dropout | None, resets: SequenceResets | None,
    ) -> tuple[Tensor, Tensors]:  # fmt: skip
        """Run one recurrence by a schedule. Returns the outputs and the last state."""
        is_held = isinstance(runner, HeldPlan)
        layout = Rows(self.length, self.sizes, numbered=masks is not None and not is_held)
        net = laid_out(net, apart=is_held or masks is not None)
        core: Core
        if runner is None:
            (y,), final = Fused(net, dropout=masks)(layout.read([x])[0 : self.length], state)
            return y, final
        if isinstance(runner, HeldPlan):
            core = HeldLayers(net, layout, self.batch, runner, masks=masks, resets=resets)
        else:
            core = Fused(net, runner, masks)
        if is_held or torch.is_grad_enabled():
            (y,), final = run_schedule(core, schedule, [x], state, layout)
        else:
            (y,), final = run_without_gradient(core, layout.read([x]), state, layout)
        return y, final

    def shapes(self) -> Any:
        """Return everything that the bytes of a range depend on, except its length."""
        module, x, device = self.module, self.x, self.x.device.type
        resets = None if self.resets is None else [t.requires_grad for t in self.resets.state]
        return (
            repr(resets),
            (module.backward, self.has_dropout and module.dropout, x.shape[1:]),
            (self.sizes is None, self.is_ragged, self.given, self.sorts),
            sums_at_once(self.length, self.batch),
            *(tuple(s.shape) for s in self.state),
            *((t.is_contiguous(), t.stride(-1), 0 in t.stride()) for t in (x, *self.state)),
            *((t.dtype, t.requires_grad) for t in (x, *self.state)),
            *((w.dtype, w.requires_grad, w.is_contiguous()) for w in self.weights),
            (x.device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
            torch.get_num_threads(),  # each thread has a buffer of its own
        )

    def check_measurable(self) -> None:
        """Raise CellError if the bytes of this call cannot be measured: a tensor is fake or on the
        meta device, or none requires a gradient."""
        tensors = [self.x, *self.state, *self.weights]
        if is_unreal(tensors):
            places = ", ".join(sorted({str(t.device) for t in tensors}))
            raise CellError(
                f"the input or a weight is fake or on the meta device ({places}): expected real "
                "tensors, for what they take is measured; call the module with real ones, and ask "
                "again"
            )
        if not any(t.requires_grad for t in tensors):
            raise CellError(
                "there is nothing to backpropagate: expected a weight or an input that requires a "
                "gradient; give the input as training will, with requires_grad_()"
            )


def _apart(weights: Tensors) -> Tensors:
    """Return the weights, as views if one is used twice or computed from another tensor. Autograd
    then gives each view its own share of the gradient."""
    if all(w.is_leaf for w in weights) and len({id(w) for w in weights}) == len(weights):
        return weights
    return [w.view_as(w) for w in weights]
