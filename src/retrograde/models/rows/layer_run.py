"""Layers that a model calls one after the other, within a byte budget.

A model may call its layers itself: the blocks of a transformer in a loop, or ``layer1`` to
``layer4`` of a ResNet in turn. Each such layer keeps its class. Its ``forward`` becomes a
:class:`RowForward`, which passes the call to the :class:`LayerRun` of all of them. The row plans
how each call is kept (:mod:`retrograde.plan.calls`): whole, lean, or dropped and run again
(:mod:`retrograde.models.rows.rerun`).

The first pass with another kind of input drops all but its first input, and measures every call.
Its plan is made when it goes back. A layer that is not given the result of the layer
before it runs by ordinary backpropagation, and a warning says so.

A *rider* is an activation that writes to its input, such as an in-place ReLU. It is a part of the
layer before it.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from retrograde.errors import CellError, NotExactError
from retrograde.machine import MEASURING
from retrograde.models.rows.arguments import Arguments, made_by, tensors_in
from retrograde.models.rows.call_sizes import PassMeasurements, Plans
from retrograde.models.rows.joint_plan import Handed, JointPlan, Pass, where
from retrograde.models.rows.rerun import RecomputedCall
from retrograde.models.rows.rest_of_model import RestOfModel
from retrograde.models.rows.row_forward import (
    Attributes,
    Named,
    RowForward,
    is_inplace_activation,
    own_forward,
)
from retrograde.models.rows.running_plan import RunningPlan
from retrograde.models.rows.trials import try_call
from retrograde.torch_private import Dropout

Tied = Sequence[tuple[nn.Module, str]]  # where weights are: a module and a name


_OUT_OF_TURN = (
    "layer {} was not called on the output of the layer before it, as it was for the sample: it is "
    "run by ordinary backpropagation, beyond the budget"
)


def _same(*arguments: Any) -> Any:
    return arguments


class RefusedLayerError(NotExactError):
    """A layer cannot be called by its row, as the run on the sample shows."""

    def __init__(self, name: str, layer: nn.Module, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name, self.layer, self.reason = name, layer, reason


@dataclass
class OnSample:
    """What a row notes in the run on a sample."""

    rest: RestOfModel  # what is held besides
    kinds: list[PassMeasurements] = field(default_factory=list)  # of all passes
    made: list[list[ref[Tensor]]] = field(default_factory=list)  # the first input and outputs
    numbers: list[list[int]] = field(default_factory=lambda: [[]])  # of calls: early, in each pass


class LayerRun:
    """Layers that a model calls one after the other. One that it calls again is there again.

    ``calls`` are the called modules in order; riders are parts of the layers before them. ``slots``
    has the argument of each that is the state. ``tied`` tells where the weights are that several
    calls of the model have, of these or later ones.
    """

    def __init__(self, calls: Named, slots: Sequence[int | str], tied: Tied) -> None:
        self.calls, self.joint_plan, self.tied = [*calls], JointPlan([self]), tied
        for _, module in calls:
            Attributes.of(module)  # before anybody notes what they are
        starts = [i for i, (_, module) in enumerate(calls) if not is_inplace_activation(module)]
        self.names, self.layers = [], list[list[nn.Module]]()
        self.slots: list[int | str] = []
        self.parts: list[tuple[int, int]] = []  # each call's layer, and 0 or its rider
        for k, (start, stop) in enumerate(pairwise([*starts, len(calls)])):
            self.names.append(calls[start][0])
            self.layers.append([module for _, module in calls[start:stop]])
            self.slots.append(slots[start])
            self.parts += [(k, part) for part in range(stop - start)]
        self.plans = Plans()
        self.handed = Handed()
        self.sample: OnSample | None = None  # during the run on a sample
        self.kept = set[int]()  # which states the model keeps for later, as that run showed
        self.lingers = set[tuple[int, int]]()  # calls, and which are still there when they run

    def install(self) -> None:
        """Pass the calls of the layers to this row from now on."""
        for number, (_, module) in enumerate(self.calls):
            attributes = Attributes.of(module)
            attributes.setdefault("forward", RowForward(module)).places.append((self, number))

    def is_installed(self) -> bool:
        """Return whether the calls of the layers are still passed to this row."""
        forwards = (vars(module).get("forward") for _, module in self.calls)
        return all(isinstance(each, RowForward) and self in dict(each.places) for each in forwards)

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of the model that has this number in the row."""
        result, sample = None, self.sample
        if sample is not None:
            called = sample.rest.rows
            if called and (last := called[-1]) is not self:
                last.kept.update(last._alive())  # which states but the last are still there
            called.append(self)
            sample.numbers[-1].append(sample.rest.begin((args, kwargs), counts=True))
        try:
            result = self._call(number, args, kwargs)
            return result
        except CellError as refusal:
            if sample is None or isinstance(refusal, RefusedLayerError):
                raise
            reason = f"cannot be run again: {refusal}"
            raise RefusedLayerError(*self.calls[number], reason) from refusal
        finally:
            if sample is not None:
                sample.rest.end(result)

    def _alive(self) -> list[int]:
        states = () if self.sample is None else self.sample.made
        return [k for k, made in enumerate(states) if any(t() is not None for t in made)]

    def _call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        k, part = self.parts[number]
        forward = own_forward(self.calls[number][1])
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        arguments = Arguments(args, kwargs, 0 if part else self.slots[k])
        if (reason := arguments.refusal()) is not None:
            raise NotExactError(f"layer {self.names[k]} {reason}")
        now = self._pass(number, arguments)
        if now is None or k not in now.kind.active:
            result = forward(*args, **kwargs)
        elif part:
            result = forward(*args) if now.last is None else now.last.run(forward, arguments)
        else:
            made, at = now.made_of(arguments), now.kind.active.index(k)
            if now.calls is not None:
                self._measure(now.kind, at, arguments, made if at else None)
            watch: Any = nullcontext()
            if self.sample is None and now.kind.may_grow(at):
                watch = now.kind.watched(at, self.layers[k], arguments, made if at else None)
            with watch as grew:
                if now.calls is None:
                    result = forward(*args, **kwargs)
                else:
                    run, unit = now.calls.run, now.kind.units[at]
                    result, now.last = run(at, unit, forward, arguments, made, now.last)
                    if grew is not None and now.kind.is_whole(at, now.last, made):
                        grew.append(self.names[k])
            if grew:
                self.joint_plan.grows(now.kind.units[at].name, now.kind)
            if self.sample is not None:
                self._looks(self.sample.rest, at, arguments, made, now.last)
        if now is not None and number + 1 < len(self.calls):
            now.next = number + 1
            is_own = not part and k in now.kind.active  # and has not the same tensors as before
            may_skip = is_own and now.kind.units and now.kind.units[at].fill is not None
            outputs = made_by(result, arguments.tensors if is_own and not may_skip else ())
            places = self.handed.on(now, outputs)
            if is_own:
                now.made = places
                if self.sample is not None:
                    self.sample.made.append([ref(y) for y in outputs if y is not None])
        elif now is not None:
            self.handed.on(now, ())
            if self.sample is None and now.kind.sizes:
                self.joint_plan.end(result)
        if self.sample is not None:
            self.sample.rest.made_by_rows += map(ref, tensors_in(result))
        return result

    def _looks(
        self, rest: RestOfModel, at: int, arguments: Arguments, made: Sequence[Tensor | None],
        call: RecomputedCall | None,
    ) -> None:  # fmt: skip
        """Note, in the run on the sample, what is there while a call runs and what it holds."""
        self.lingers |= {(at, k) for k in self._alive() if 0 < k < at}
        if call is None:
            return
        later = at or rest.rows[0] is not self
        ours = {id(t) for t in (made if later else tensors_in(arguments.state))}
        ours |= {id(t()) for t in rest.made_by_rows}
        for argument in call.given.each:
            if isinstance(argument.value, Tensor):  # else it would look as if the model kept it
                argument.value = argument.value.detach()
        pairs = zip(arguments.leaves, call.given.each, strict=True)
        rest.hold([argument.value for x, argument in pairs if id(x) not in ours])

    def _pass(self, number: int, arguments: Arguments) -> Pass | None:
        """Return the pass of a call whose state is the output of the call before it. The call of
        the first active layer begins a pass. Otherwise the result is None, and the call of an
        active layer warns, or is refused on a sample."""
        state = tensors_in(arguments.state)
        now = self.handed.to(state)
        if now is not None and (now.next == number or self._leaves_out(now, number, arguments)):
            return now
        k, part = self.parts[number]
        active = [k for k, modules in enumerate(self.layers) if not passes_through(modules[0])]
        if part == 0 and active[:1] == [k] and state:
            return self._begin(active, arguments)
        if k not in active:
            return None
        if now is None and part == 0 and state and not self.joint_plan.is_in(self, number):
            now = self._begin(active, arguments)  # the first ones may not be called
            if self._leaves_out(now, number, arguments):
                return now
        if self.sample is not None:
            reason = "is not called in turn where gradients are recorded"
            raise RefusedLayerError(*self.calls[number], reason)
        warnings.warn(_OUT_OF_TURN.format(self.names[k]), stacklevel=6)
        return None

    def _leaves_out(self, now: Pass, number: int, arguments: Arguments) -> bool:
        """Pass over the calls before one that the model does not make this time. In the plan they
        are made, and return what they are given. Return whether this is possible."""
        (first_layer, rider), (k, part) = self.parts[now.next], self.parts[number]
        if self.sample is not None or rider or part or now.next > number:
            return False
        state = tensors_in(arguments.state)
        now.made = now.made or [*map(where, state)]
        made = now.made_of(arguments)
        same = Arguments(tuple(torch.empty(0, device="cpu") if t is None else t for t in made))
        for at in (at for at, k_ in enumerate(now.kind.active) if first_layer <= k_ < k):
            if now.calls is None:
                break
            try:
                self._measure(now.kind, at, arguments, made if at else None)
            except Exception:  # it may not take what a later one is given
                return False
            unit = replace(now.kind.units[at], forward=_same, reads=())
            _, now.last = now.calls.run(at, unit, _same, same, made, now.last)
        now.next = number
        return True

    def _begin(self, active: list[int], arguments: Arguments) -> Pass:
        layers = [layer for modules in self.layers for layer in modules]

        def unknown() -> PassMeasurements:
            weights = (m._parameters.get(name) for m, name in self.tied)
            tied = frozenset(p for p in weights if p is not None)
            return PassMeasurements(active, tied=tied, kept=self.kept, lingers=self.lingers)

        measurements = self.plans.kind_of(layers, arguments, unknown)
        if measurements is None:
            return Pass(unknown(), None)
        if (sample := self.sample) is not None:
            sample.kinds.append(measurements)
            sample.numbers.append([sample.numbers[-1].pop()])
            self.kept.update(self._alive())
            sample.made = [[*map(ref, tensors_in(arguments.state))]]
            late = partial(measurements.late_plan, 0)
            return Pass(measurements, RunningPlan((), measurements.tied, late))
        return self.joint_plan.begin(self, measurements)

    def _measure(
        self, measurements: PassMeasurements, at: int, arguments: Arguments,
        made: Sequence[Tensor | None] | None,
    ) -> None:  # fmt: skip
        """Try and measure an active layer, if it is the next one that is not known. ``made`` are
        the tensors that the call before made."""
        if len(measurements.sizes) > at:
            return
        layers = self.layers[k := measurements.active[at]]

        def forward(*args: Any, **kwargs: Any) -> Any:
            value = own_forward(layers[0])(*args, **kwargs)
            for rider in layers[1:]:
                value = own_forward(rider)(value)
            return value

        with MEASURING:  # another thread may be measuring the same
            if len(measurements.sizes) == at:
                unit = try_call(self.names[k], forward, layers, arguments)[0]
                sizes = self.plans.measure(unit, layers, arguments, made, measurements.tied)
                measurements.add(unit, sizes)
                if measurements.is_measured and self.sample is None:
                    measurements.settle()


def passes_through(layer: nn.Module) -> bool:
    """Return whether a layer returns the very tensor that it is given."""
    is_off = isinstance(layer, Dropout) and (not layer.training or layer.p == 0)
    return is_off or isinstance(layer, nn.Identity)
