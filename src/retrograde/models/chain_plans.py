"""The layers of a ``Sequential`` within a byte budget: measured once, planned once, run by a plan.

The first call for a kind of input tries every layer, measures it, and finds a plan for the budget
(:mod:`retrograde.plan.calls`). Later calls look these up. A layer that writes to its input (an
in-place ReLU), or only reshapes it (``Flatten``), shares memory with the layer before it. Both
become one *unit*, so no later layer writes to what is kept.

Measured times decide which plan is fastest, and they vary from run to run. So another process may
follow another plan; its gradient is the same, bit for bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.models.call_sizes import Kind, Meter
from retrograde.models.refill import Row, made_by, tensors_in
from retrograde.models.rows import Given
from retrograde.models.trials import Tried, parts_of, tensors_of, texts_of
from retrograde.plan.calls import CallSizes, Part, kept_whole, peak_of, seconds_of
from retrograde.replay.surroundings import Steady
from retrograde.run.core import unrecorded
from retrograde.run.transforms import is_unreal, refuse_sharded, refuse_transforms
from retrograde.schedule import Chain
from retrograde.sizes.cache import LRUCache
from retrograde.units import Memory, as_bytes, format_bytes

__all__ = ["ChainFit", "Plans", "measure_network", "named_layers"]

_MOST_UNITS = 200  # a plan for more takes long: neighbours are taken together
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GONE = (
    "a ChainFit has no chain and no schedule any more: rg.profile(net, input) returns the chain, "
    "and rg.plan(chain, memory) its schedule"
)
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
        units = [
            replace(
                size,
                forward_seconds=1.0,
                ways=tuple(
                    replace(way, seconds=float(way.dropped), again_seconds=1.0) for way in size.ways
                ),
            )
            for size in self.sizes
        ]
        return len(units) + round(seconds_of(units, self.parts))

    def __getattr__(self, name: str) -> Any:
        gone = name in ("chain", "schedule")
        raise AttributeError(_GONE if gone else f"'ChainFit' object has no attribute {name!r}")

    def __str__(self) -> str:
        ratio = self.seconds / (self.ordinary_seconds or 1.0)
        return (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"ordinary backpropagation holds {format_bytes(self.ordinary_bytes)}, and "
            f"{format_bytes(self.minimum_bytes)} would do\n"
            f"{self.forward_layers} layers run forward for {len(self.names)}: {self.seconds:.3g} s "
            f"an iteration, {ratio:.2f} times ordinary backpropagation's"
        )


@dataclass
class Plans:
    """The measurements and plans of the recent calls of one module."""

    kinds: LRUCache[Kind] = field(default_factory=LRUCache)
    meter: Meter = field(default_factory=Meter)

    def fit(self, net: nn.Sequential, memory: Memory, input: Any) -> ChainFit:
        """Return the plan of the layers for a budget and an input of this kind.

        Raises:
            BudgetError: the budget is too small; the message names the least budget.
            CellError: a layer cannot be run exactly, or nothing requires a gradient.
        """
        layers = _apart(net)
        parts = _parts_of(layers)
        tensors = tensors_of(parts)
        if not any(t.requires_grad for t in (*tensors_in(input), *tensors)):
            raise CellError(_NOTHING)
        kind = self._kind(layers, parts, tensors, input)
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

    def run(self, net: nn.Sequential, memory: Memory, input: Any) -> Any:
        """Run the layers so that their gradient stays within a budget.

        Returns the output of the last layer, or None where torch's own pass should run. That is so
        if nothing requires a gradient, a tensor is not real, or ordinary backpropagation fits.

        Raises:
            BudgetError: the budget is too small; the message names the least budget.
            CellError: a layer cannot be run exactly.
        """
        if not torch.is_grad_enabled():
            return None
        layers = _apart(net)
        parts = _parts_of(layers)
        tensors = tensors_of(parts)
        used = (*tensors_in(input), *tensors)
        if is_unreal(used) or not any(t.requires_grad for t in used):
            return None
        refuse_transforms(used)
        refuse_sharded(parts, used)
        kind = self._kind(layers, parts, tensors, input)
        plan = kind.plan(as_bytes(memory, kind.ordinary_bytes))
        if plan == kept_whole(kind.sizes):
            return None
        row, before, value, made = Row(plan), None, input, list[Tensor | None]()
        still = kind.still.marks()
        for number, unit in enumerate(kind.units):
            args = (value,) if isinstance(value, Tensor) else Given.of((value,), {}, 0).args
            value, before = row.run(number, unit, unit.forward, args, {}, made, before)
            made = made_by(value, args)
        first, last = kind.units[0].name, kind.units[-1].name
        kind.still.refuse_changes(still, f"one of the layers {first} … {last}")
        return value

    def _kind(
        self, layers: "Layers", parts: Sequence[nn.Module], tensors: Sequence[Tensor], input: Any
    ) -> Kind:
        """Return what is known of calls with an input of this kind."""
        if any(map(is_lazy, tensors)):
            raise CellError(
                "the layers have parameters without a shape yet: expected all of them; call the "
                "lazy model once before, with memory=None"
            )
        key = (
            Given((input,), {}, 0).kind(),
            texts_of(parts, tensors, fractions=True),
            tuple(id(one) for _, one in layers),
        )
        return self.kinds.get(key, lambda: measured(layers, input, self.meter), (*parts, *tensors))


Layers = Sequence[tuple[str, nn.Module]]
_NOTHING = (
    "there is nothing to backpropagate: expected a layer with a parameter, or an input, that "
    "requires a gradient"
)


def measure_network(net: nn.Sequential, input: Any, repeats: int) -> Chain:
    """Measure the layers of a network from the first gradient on, and time each ``repeats`` times.

    Raises:
        CellError: a layer cannot be run exactly, or nothing requires a gradient.
    """
    layers = _apart(net)
    kind = measured(layers, input, Meter(), repeats)
    stopped = (k for k, wants in enumerate(kind.passes) if not wants)
    start = 1 + max(stopped, default=-1)
    if start == len(kind.sizes):
        raise CellError(_NOTHING)
    return chain_of([unit.name for unit in kind.units[start:]], kind.sizes[start:])


def chain_of(names: Sequence[str], sizes: Sequence[CallSizes]) -> Chain:
    """Return the sizes of calls that are kept whole, as a chain."""
    ways = [size.ways[0] for size in sizes]
    pairs = [*zip(sizes, ways, strict=True)]
    whole = [way.held_bytes + size.output_bytes for size, way in pairs]
    return Chain(
        forward_seconds=[size.forward_seconds for size in sizes],
        backward_seconds=[size.backward_seconds for size in sizes],
        output_bytes=[size.output_bytes for size in sizes],
        internal_bytes=whole,
        forward_transient_bytes=[
            max(0, size.forward_bytes - size.noted_bytes - size.output_bytes) for size in sizes
        ],
        record_transient_bytes=[
            max(0, way.first_bytes - size.noted_bytes - held)
            for (size, way), held in zip(pairs, whole, strict=True)
        ],
        backward_transient_bytes=[
            max(
                0,
                way.backward_bytes - way.held_bytes - size.input_bytes - size.output_bytes * times,
            )
            for size, way in pairs
            for times in (1 + way.keeps_output,)
        ],
        keeps_input=[way.keeps_input for way in ways],
        keeps_output=[way.keeps_output for way in ways],
        names=names,
        input_bytes=sizes[0].input_bytes,
        overhead_bytes=sum(size.noted_bytes + size.left_bytes for size in sizes),
    )


def measured(layers: Layers, input: Any, meter: Meter, repeats: int | None = None) -> Kind:
    """Divide layers into units, and try and measure each, on an input.

    Raises:
        CellError: a layer cannot be run exactly; the message names it.
    """
    walk = _Walk(input, meter, repeats, -(-len(layers) // _MOST_UNITS))
    for name, layer in layers:
        walk.add(name, layer)
    walk.close(last=True)
    return _parted(walk.kind)


def _parted(kind: Kind) -> Kind:
    """Return what is known, with the generators apart that no unit draws from. These are checked
    once over all units, and not by each."""
    drawn = {source for unit in kind.units for source in unit.ambient.sources}
    still = {s: None for unit in kind.units for s in unit.ambient.steady.sources if s not in drawn}
    units = []
    for unit in kind.units:
        steady = unit.ambient.steady
        steady = replace(steady, sources=tuple(s for s in steady.sources if s in drawn))
        units.append(replace(unit, ambient=replace(unit.ambient, steady=steady)))
    return replace(kind, units=units, still=Steady(tuple(still)))


class _Walk:
    """The units of the layers so far, of which the last is not measured yet."""

    def __init__(self, input: Any, meter: Meter, repeats: int | None, together: int) -> None:
        self.kind, self.meter, self.repeats, self.together = Kind([]), meter, repeats, together
        self.given = self.value = _alone(input, None)  # before and after the last unit
        self.made: list[Tensor | None] = []
        self.layers: list[nn.Module] = []
        self.names: list[str] = []
        self.tried: Tried | None = None

    def add(self, name: str, layer: nn.Module) -> None:
        """Add one more layer to the last unit, or as the next one."""
        tried, first = self._try([name], [layer], self.value), not self.kind.units
        if not self.layers and tried.writes:
            raise CellError(_WRITES.format(name, "the chain's input"))
        begins = first and self.tried is not None and not self.tried.is_apart
        begins = begins or len(self.layers) < self.together
        if self.layers and (tried.writes or begins or not tried.is_apart):
            self.names.append(name)
            self.layers.append(layer)
            tried = self._try(self.names, self.layers, self.given)
            if tried.writes:
                whose = "the chain's input" if first else f"what layer {self.names[0]} was given"
                raise CellError(_WRITES.format(name, whose))
        else:
            if self.layers:
                self.close()
            self.names, self.layers = [name], [layer]
        self.tried = tried
        self._advance()

    def _advance(self) -> None:
        """Run the last unit."""
        assert self.tried is not None
        self.value = None
        with self.tried.unit.ambient.measured(), unrecorded():
            self.value = _alone(self.tried.unit.forward(self.given), self.tried.wants)

    def close(self, *, last: bool = False) -> None:
        """Measure the last unit. Its result is not held meanwhile, but computed once more."""
        assert self.tried is not None
        self.value = None
        args, unit = (self.given,), self.tried.unit
        first, of = not self.kind.units, Given(args, {}, 0).kind()
        state = tensors_in(args) if first else [t for t in self.made if t is not None]
        found = self.meter.measure(
            unit, self.layers, (of, tuple(t is None for t in self.made)), (args, {}), state,
            first=first, repeats=self.repeats,
        )  # fmt: skip
        self.kind.active.append(len(self.kind.units))
        self.kind.units.append(unit)
        self.kind.add(found, last=last)
        self.kind.passes.append(any(self.tried.wants))
        if not last:
            self._advance()
            self.made = made_by(self.value, args)
            self.given, self.layers = self.value, []

    def _try(self, names: Sequence[str], layers: Sequence[nn.Module], value: Any) -> Tried:
        given, name = Given((value,), {}, 0), "-".join([*names[:1], *names[1:][-1:]])
        if (reason := given.refusal()) is not None:
            raise CellError(f"layer {name} {reason}")
        return self.meter.try_call(name, _in_turn([*layers]), layers, given.kind(), ((value,), {}))


def _in_turn(layers: Sequence[nn.Module]) -> Callable[[Any], Any]:
    def forward(value: Any) -> Any:
        for layer in layers:
            value = layer(value)
        return value

    return forward


def _alone(value: Any, wants: Sequence[bool] | None) -> Any:
    """Return a value without the graph that it came from; its tensors require what they did."""
    leaves, spec = pytree.tree_flatten(value)
    found = [leaf.requires_grad for leaf in tensors_in(leaves)] if wants is None else wants
    rest = iter(found)
    alone = [
        leaf.detach().requires_grad_(next(rest)) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(alone, spec)


def _parts_of(layers: Layers) -> list[nn.Module]:
    return parts_of([layer for _, layer in layers])


def named_layers(
    net: nn.Sequential, opens: Callable[[nn.Sequential], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers with dotted names.

    The layers of a nested chain without hooks are yielded one by one where ``opens`` returns true.
    """
    for name, layer in net._modules.items():  # one layer may stand in it twice
        if (
            isinstance(layer, nn.Sequential)
            and opens(layer)
            and not any(getattr(layer, hooks) for hooks in _HOOKS)
        ):
            yield from named_layers(layer, opens, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", layer


def _apart(net: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain; a nested chain with its own budget or scan stays whole."""

    def opens(nested: nn.Sequential) -> bool:
        options = vars(nested)
        plain = "backward" in options and options["backward"] is options["memory"] is None
        return type(nested) is nn.Sequential or plain

    return list(named_layers(net, opens))
