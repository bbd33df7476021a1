"""The layers of a ``Sequential`` within a byte budget: measured once, planned once, run by a plan.

The first call for a kind of input tries every layer, measures it, and finds a plan for the budget
(:mod:`retrograde.plan.calls`). Later calls look these up. A layer that writes to its input (an
in-place ReLU), or only reshapes it (``Flatten``), shares memory with the layer before it. Both
become one *unit*, so no later layer writes to what is kept.

Measured times decide which plan is fastest, and they vary from run to run. So another process may
follow another plan; its gradient is the same, bit for bit.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.errors import NotExactError
from retrograde.models.rows.arguments import Arguments, made_by, tensors_in, tied
from retrograde.models.rows.call_sizes import PassMeasurements, Plans, larger
from retrograde.models.rows.phases import do_most
from retrograde.models.rows.rerun import RunningPlan
from retrograde.models.rows.rerun_arguments import with_nodes
from retrograde.models.rows.trials import Tried, try_call
from retrograde.plan.calls import CallSizes, Part, Way, kept_whole, peak_of, seconds_of
from retrograde.run.core import unsaved
from retrograde.run.transforms import besides_forward
from retrograde.schedule import Chain
from retrograde.units import Memory, as_bytes, format_bytes

_MOST_UNITS = 200  # a plan for more takes long: neighbours are taken together
_WRITES = (
    "layer {} writes in place to {}, which is used again: expected it to leave that as it is; give "
    "it inplace=False, or let it return a new tensor"
)


@dataclass(frozen=True, eq=False)
class ChainFit:
    """The plan of the layers of a ``Sequential`` for a budget; ``print`` shows it.

    Attributes:
        names: of the layers; those that share memory have one name.
        sizes: of each layer's call.
        parts: how each call is kept.
        budget_bytes: the budget.
        minimum_bytes: the least budget.
        ordinary_bytes: the memory of ordinary backpropagation.
        peak_bytes: the predicted peak of the plan.
    """

    names: tuple[str, ...]
    sizes: tuple[CallSizes, ...]
    parts: tuple[Part, ...]
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    peak_bytes: int

    @property
    def ordinary(self) -> bool:
        """Whether ordinary backpropagation fits the budget. If so, it is what runs."""
        return self.parts == kept_whole(self.sizes)

    @property
    def ordinary_seconds(self) -> float:
        """The predicted time of an iteration of ordinary backpropagation."""
        return sum(size.forward_seconds + size.backward_seconds for size in self.sizes)

    @property
    def seconds(self) -> float:
        """The predicted time of an iteration."""
        return self.ordinary_seconds + seconds_of(self.sizes, self.parts)

    @property
    def forward_layers(self) -> int:
        """The number of layers that run forward, each as often as it runs."""
        kept, dropped = Way(0, 0, 0, again_seconds=1.0), Way(0, 0, 0, seconds=1.0, dropped=True)
        units = [CallSizes(0, 0, 0, 1.0, (kept, kept, dropped, dropped))] * len(self.sizes)
        return len(units) + round(seconds_of(units, self.parts))

    def __str__(self) -> str:
        ratio = self.seconds / (self.ordinary_seconds or 1.0)
        return (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"ordinary backpropagation holds {format_bytes(self.ordinary_bytes)}, and "
            f"{format_bytes(self.minimum_bytes)} would do\n"
            f"{self.forward_layers} layers run forward for {len(self.names)}: {self.seconds:.3g} s "
            f"an iteration, {ratio:.2f} times ordinary backpropagation's"
        )


class ChainPlans(Plans):
    """The plans of a ``Sequential``."""

    def fit(self, net: nn.Sequential, memory: Memory, input: object) -> ChainFit:
        """Return the plan of the layers for a budget and an input of this kind.

        Raises:
            BudgetError: the budget is too small; the message names the least budget.
            NotExactError: a layer cannot be run exactly, or nothing requires a gradient.
        """
        kind = self._kind(net, input)
        if kind is None:
            raise NotExactError(_NOTHING)
        room = as_bytes(memory, kind.ordinary_bytes)
        plan = kind.plan(room)
        return ChainFit(
            names=tuple(unit.name for unit in kind.units),
            sizes=(*kind.sizes,),
            parts=plan,
            budget_bytes=room,
            minimum_bytes=kind.least_bytes,
            ordinary_bytes=kind.ordinary_bytes,
            peak_bytes=peak_of(kind.sizes, plan),
        )

    def run(self, net: nn.Sequential, memory: Memory, input: object) -> Any:
        """Run the layers so that their gradient stays within a budget.

        Returns the output of the last layer, or None where torch's own pass should run. That is so
        if nothing requires a gradient, a tensor is not real, or ordinary backpropagation fits.

        Raises:
            BudgetError: the budget is too small; the message names the least budget.
            NotExactError: a layer cannot be run exactly.
        """
        kind = self._kind(net, input) if torch.is_grad_enabled() else None
        if kind is None:
            return None
        plan = kind.plan(room := as_bytes(memory, kind.ordinary_bytes))
        if kind.is_ordinary(plan) and not kind.most:
            return None
        row, before, value, made = RunningPlan(plan, kind.tied), None, input, list[Tensor | None]()
        grown = list[str]()
        for number, unit in enumerate(kind.units):
            given = Arguments((value,))
            with kind.watched(number, [net], given, made if number else None) as grew:
                value, before = row.run(number, unit, unit.forward, given, made, before)
            made = made_by(value, given.leaves if unit.fill is None else ())
            grown += grew
        if grown and (need := peak_of(kind.sizes, plan)) > room:
            warnings.warn(larger(grown[0], need, room, kind), stacklevel=4)
        return value

    def _kind(self, net: nn.Sequential, input: object) -> PassMeasurements | None:
        layers = named_layers(net, all_chains=False)
        modules, find = [layer for _, layer in layers], partial(measured, layers, input, self)
        return self.kind_of(modules, Arguments((input,)), find)


Layers = Sequence[tuple[str, nn.Module]]
_NOTHING = (
    "there is nothing to backpropagate: expected a layer with a parameter, or an input, that "
    "requires a gradient, and no meta or fake tensors"
)


def measure_network(net: nn.Sequential, input: object, repeats: int) -> Chain:
    """Measure the layers of a network, and time each ``repeats`` times.

    Raises:
        NotExactError: a layer cannot be run exactly, or nothing requires a gradient.
    """
    if not any(t.requires_grad for t in (*tensors_in(input), *net.parameters())):
        raise NotExactError(_NOTHING)
    layers = named_layers(net, all_chains=False)
    kind = measured(layers, input, Plans(), repeats)
    sizes = kind.sizes  # of calls that are kept whole
    held, forward, record, backward = [], [], [], []
    for size in sizes:
        way, output = size.ways[0], size.output_bytes
        held.append(way.held_bytes + output)
        forward.append(max(0, size.forward_bytes - size.noted_bytes - output))
        record.append(max(0, way.first_bytes - size.noted_bytes - held[-1]))
        ends = size.input_bytes + output * (1 + way.keeps_output)
        backward.append(max(0, way.backward_bytes - way.held_bytes - ends))
    return Chain(
        forward_seconds=[size.forward_seconds for size in sizes],
        backward_seconds=[size.backward_seconds for size in sizes],
        output_bytes=[size.output_bytes for size in sizes],
        internal_bytes=held,
        forward_transient_bytes=forward,
        record_transient_bytes=record,
        backward_transient_bytes=backward,
        keeps_input=[size.ways[0].keeps_input for size in sizes],
        keeps_output=[size.ways[0].keeps_output for size in sizes],
        names=[unit.name for unit in kind.units],
        input_bytes=sizes[0].input_bytes,
        overhead_bytes=sum(size.noted_bytes + size.left_bytes for size in sizes),
    )


def measured(
    layers: Layers, input: object, plans: Plans, repeats: int | None = None
) -> PassMeasurements:
    """Divide layers into units, and try and measure each, on an input.

    Raises:
        NotExactError: a layer cannot be run exactly; the message names it.
    """
    together = -(-len(layers) // _MOST_UNITS)
    kind = PassMeasurements(tied=tied(layer.parameters() for _, layer in layers))
    made, value = None, _alone(input, None)
    tried = _try(layers[:1], value)
    if tried.writes:
        raise NotExactError(_WRITES.format(layers[0][0], "the chain's input"))
    while layers:
        after, size = tried, 1
        while size < len(layers):
            after = _try(layers[size : size + 1], _result(tried, value))
            begins = not kind.units and not tried.is_apart
            if after.is_apart and not (after.writes or begins or size < together):
                break
            size += 1
            tried = _try(layers[:size], value)
            if tried.writes:
                whose = (
                    f"what layer {layers[0][0]} was given" if kind.units else "the chain's input"
                )
                raise NotExactError(_WRITES.format(layers[size - 1][0], whose))
        modules, given = [layer for _, layer in layers[:size]], Arguments((value,))
        # The unit's result is not held meanwhile, but computed once more.
        found = plans.measure(tried.unit, modules, given, made, kind.tied, repeats)
        kind.add(tried.unit, found, last=size == len(layers), made=tried.made_bytes)
        if size < len(layers):
            value = _result(tried, value)
            made = made_by(value, given.leaves)
        layers, tried = layers[size:], after
    return kind


def _try(layers: Layers, value: object) -> Tried:
    """Try a unit of some layers."""
    given, name = Arguments((value,)), "-".join(dict.fromkeys((layers[0][0], layers[-1][0])))
    if (reason := given.refusal()) is not None:
        raise NotExactError(f"layer {name} {reason}")
    modules = [layer for _, layer in layers]

    def forward(value: object) -> Any:
        for layer in modules:
            value = layer(value)
        return value

    return try_call(name, forward, modules, given)


def _result(tried: Tried, value: object) -> Any:
    """Run a unit, and leave no trace."""
    with tried.unit.surroundings.measured(), unsaved():
        return _alone(do_most(tried.unit, value), tried.wants)


def _alone(value: object, wants: Sequence[bool] | None) -> Any:
    """Return a value without the graph that it came from; its tensors require what they did."""
    found = iter([t.requires_grad for t in tensors_in(value)] if wants is None else wants)

    def alone(t: Tensor) -> Tensor:
        return with_nodes([t])[0] if next(found) else t.detach()

    with torch.enable_grad():
        return pytree.tree_map_only(Tensor, alone, value)


#: Chains that only call their layers in turn.
CHAINS: set[type[nn.Module]] = {nn.Sequential}


def named_layers(net: nn.Module, *, all_chains: bool, prefix: str = "") -> Layers:
    """Return the layers with dotted names, those of nested chains one by one. A chain with hooks
    stays whole, and so does one with its own budget or scan unless ``all_chains``."""
    found: list[tuple[str, nn.Module]] = []
    for name, layer in net._modules.items():  # one layer may stand in it twice
        assert layer is not None
        asked = [vars(layer).get(option) for option in ("memory", "backward")]
        opens = type(layer) in CHAINS and (all_chains or asked == [None, None])
        if opens and besides_forward(layer) is None:
            found += named_layers(layer, all_chains=all_chains, prefix=f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", layer))
    return found
