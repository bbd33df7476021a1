"""A chain of layers within a byte budget: measured once, planned once, run by its schedule.

The first call for a kind of input tries every layer, measures it, and finds a schedule for the
budget. Later calls look these up. Measurements depend on shapes, so shapes are their key. A link
(layers that run as one) holds parameters and buffers, so these are in the key of links.

Measured times decide which schedule is fastest, and they vary from run to run. So another process
may follow another schedule; its gradient is the same, bit for bit.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograde.errors import BudgetError, CellError
from retrograde.models.chain.examine import examine_layers
from retrograde.models.chain.layer_sizes import measure_chain, prefix_bytes
from retrograde.models.chain.links import Links
from retrograde.models.chain.nodes import run_chain
from retrograde.plan.chain.search import chain_minimum, plan_chain, record_everything
from retrograde.replay.places import Place
from retrograde.replay.referents import Referents, find_referents
from retrograde.replay.trees import Structure, flatten
from retrograde.run.transforms import is_unreal, refuse_sharded, refuse_transforms
from retrograde.schedule import Chain, Schedule
from retrograde.sizes.cache import LRUCache, identity, signature
from retrograde.units import Memory, as_bytes, format_bytes

__all__ = ["ChainFit", "Plans", "measure_network", "named_layers"]

Tensors = list[Tensor]

_MOST_LINKS = 8
_LEVELS = 250  # of memory for the planner: 1,000 take longer, and gave the same schedules
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class ChainFit:
    """The schedule of a chain for a budget, and its bytes; ``print`` shows it.

    ``chain`` leaves out the layers before the first gradient, and ``peak_bytes`` includes them.
    ``minimum_bytes`` is the least budget.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    peak_bytes: int

    @property
    def ordinary(self) -> bool:
        """Whether ordinary backpropagation fits the budget. If so, it is what runs."""
        return self.budget_bytes >= self.ordinary_bytes

    @property
    def seconds(self) -> float:
        """The predicted time of an iteration."""
        return float(self.schedule.seconds or 0.0)

    def __str__(self) -> str:
        ratio = self.seconds / (self.chain.ordinary_seconds or 1.0)
        return (
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} allowed; "
            f"ordinary backpropagation holds {format_bytes(self.ordinary_bytes)}, and "
            f"{format_bytes(self.minimum_bytes)} would do\n"
            f"{self.schedule.cost} layers run forward for {len(self.chain)}: {self.seconds:.3g} s "
            f"an iteration, {ratio:.2f} times ordinary backpropagation's"
        )


@dataclass
class Plans:
    """The measurements, schedules and links of the recent calls of one module."""

    chains: LRUCache[tuple[Chain, int]] = field(default_factory=LRUCache)
    fits: LRUCache[ChainFit] = field(default_factory=LRUCache)
    links: LRUCache[Links] = field(default_factory=partial(LRUCache, most=_MOST_LINKS))
    moving: set[tuple[int, Any]] = field(
        default_factory=set
    )  # the values that layers change: (id of the holder, name)

    def fit(self, net: nn.Sequential, memory: Memory, input: Any) -> ChainFit:
        """Return the schedule of the layers for a budget and an input of this kind.

        Raises:
            BudgetError: the budget is too small; the message names the least budget.
            CellError: a layer cannot be run exactly, or nothing requires a gradient.
        """
        leaves, structure = flatten(input, "input")
        call = _Call.of(net, leaves, structure)
        return self._fitted(memory, call, self._links(call))

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
        leaves, structure = flatten(input, "input")
        if is_unreal(leaves):
            return None
        call = _Call.of(net, leaves, structure)
        wanted = [*leaves, *call.tensors]
        if not any(t.requires_grad for t in wanted) or is_unreal(wanted):
            return None
        refuse_transforms(wanted)
        links = self._links(call)
        found = self._fitted(memory, call, links) if links.chain else None
        if found is None or found.ordinary:
            return None
        return links.returned.unflatten(run_chain(links, found.schedule, leaves))

    def _fitted(self, memory: Memory, call: "_Call", links: Links) -> ChainFit:
        def find() -> ChainFit:
            def sizes() -> tuple[Chain, int]:
                return _measure(links, call.leaves), prefix_bytes(links, call.leaves)

            return _fit(*self.chains.get(key, sizes, of=call.parts), memory)

        key = call.shapes(self.moving), len(links.prefix), len(links.chain)
        return self.fits.get((key, memory), find, of=call.parts)

    def _links(self, call: "_Call") -> Links:
        def find() -> Links:
            links = examine_layers(_apart(call.net), call.leaves, call.structure)
            for link in (*links.prefix, *links.chain):
                self.moving.update(link.ambient.names_changed())
            return links

        known = len(self.moving)
        found = self.links.get(call.key(self.moving), find, of=call.tensors)
        if len(self.moving) > known:  # values that layers change are not part of the key
            self.links.get(call.key(self.moving), lambda: found, of=call.tensors)
        return found


def measure_network(net: nn.Sequential, input: Any, repeats: int) -> Chain:
    """Measure the layers of a network from the first gradient on, and time each ``repeats`` times.

    Raises:
        CellError: a layer cannot be run exactly, or nothing requires a gradient.
    """
    leaves, structure = flatten(input, "input")
    return _measure(examine_layers(_apart(net), leaves, structure), leaves, repeats)


def _measure(links: Links, leaves: Tensors, repeats: int | None = None) -> Chain:
    if not links.chain:
        raise CellError(
            "there is nothing to backpropagate: expected a layer with a parameter, or an input, "
            "that requires a gradient"
        )
    with torch.enable_grad():
        return measure_chain(links, leaves, repeats)


def _fit(chain: Chain, before: int, memory: Memory) -> ChainFit:
    whole = record_everything(chain)
    ordinary = max(whole.peak, before)
    least = max(chain_minimum(chain)[0], before)
    room = as_bytes(memory, ordinary)
    if room < before:
        raise BudgetError(
            f"memory is {room} bytes ({format_bytes(room)}): expected at least {before} "
            f"({format_bytes(before)}), which the layers before the first gradient need, whatever "
            "is planned behind them; give that much, or a smaller batch",
            least,
        )
    schedule = whole if room >= ordinary else plan_chain(chain, room, levels=_LEVELS)
    peak = max(schedule.peak, before)
    return ChainFit(chain, schedule, room, least, ordinary, peak)


@dataclass(frozen=True, eq=False)
class _Call:
    """A call, and the parts of the keys by which its results are cached.

    Attributes:
        known: everything that bytes and seconds depend on, except the values the layers refer to.
        found: the values that the layers refer to.
        parts: the layers, and all modules in them.
        tensors: the parameters and buffers that links hold.
    """

    net: nn.Sequential
    leaves: Tensors
    structure: Structure
    known: Hashable
    found: Referents
    parts: list[nn.Module]
    tensors: Tensors
    identities: dict[int, Hashable] = field(default_factory=dict)

    def shapes(self, moving: Collection[tuple[int, Any]]) -> Hashable:
        """Return the key of measurements: everything that bytes and seconds depend on.

        The layers' ids are in it. ``moving`` are the values that layers change.
        """
        if len(moving) not in self.identities:
            places = _still(self.found.places, moving)
            self.identities[len(moving)] = identity(self.found, places)
        return self.known, self.identities[len(moving)]

    def key(self, moving: Collection[tuple[int, Any]]) -> Hashable:
        """Return the key of links: :meth:`shapes`, the tensors, and the holders of the values that
        the layers refer to."""
        holders = tuple(id(place.holder) for place in self.found.places)
        return self.shapes(moving), tuple(map(id, self.tensors)), holders

    @classmethod
    def of(cls, net: nn.Sequential, leaves: Tensors, structure: Structure) -> "_Call":
        found = find_referents([*net])  # the chain itself does not affect the bytes of its layers
        parts = found.parts()
        named = [
            named
            for part in parts
            for table in (part._parameters, part._buffers)
            for named in table.items()
        ]
        tensors = [t for _, t in named if t is not None]
        if any(map(is_lazy, tensors)):
            raise CellError(
                "the layers have parameters without a shape yet: expected all of them; call the "
                "lazy model once before, with memory=None"
            )
        refuse_sharded(net.modules(), net.parameters())
        layers = tuple(map(id, parts))
        names = tuple(name if t is not None else None for name, t in named)
        owned = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        asked = str(structure), torch.get_num_threads()
        known = tuple(map(signature, leaves)), asked, layers, names, owned
        return cls(net, leaves, structure, known, found, parts, tensors)


def _still(places: Sequence[Place], moving: Collection[tuple[int, Any]]) -> Iterator[Place]:
    """Yield the places of values that no layer changes."""
    holders = {holder for holder, _ in moving}
    for place in places:
        if getattr(place, "registered", None) is not None:
            continue  # parameters and buffers are in the key already
        if id(place.holder) not in holders:
            yield place
        elif not place.growing:
            yield place.without({key for holder, key in moving if holder == id(place.holder)})


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
