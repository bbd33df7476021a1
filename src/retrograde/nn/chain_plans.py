"""A chain of layers within a byte budget: measured once, planned once, run by its schedule.

At the first call for an input of some kind every layer is tried, measured, and a schedule is found
for the budget; later calls look it up. What is measured depends on shapes, so it is kept by them; a
link holds parameters and buffers, so links are kept by these.

Seconds decide which schedule is fastest, and no two measurements agree. So another process may
follow another schedule; the gradient is the same, bit for bit.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from retrograde.cores.chain.examine import examine_layers
from retrograde.cores.chain.layer_sizes import measure_chain, prefix_bytes
from retrograde.cores.chain.links import Links
from retrograde.cores.chain.nodes import run_chain
from retrograde.discover.places import Place
from retrograde.discover.referents import Referents, find_referents
from retrograde.discover.trees import Structure, flatten
from retrograde.errors import BudgetError, CellError
from retrograde.nn.cache import LRUCache, identity, signature
from retrograde.plan.chain.search import chain_minimum, plan_chain, record_everything
from retrograde.run.transforms import is_unreal, refuse_transforms
from retrograde.schedule import Chain, Schedule
from retrograde.units import Memory, as_bytes, format_bytes

__all__ = ["LEAST", "ChainFit", "Plans", "measure_network", "named_layers"]

#: A ``memory``: as little as the layers can do with.
LEAST = "least"

Tensors = list[Tensor]

_MOST_LINKS = 8
_LEVELS = 1000  # that bytes are counted in: more hardly find a faster schedule, and take longer
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, eq=False)
class ChainFit:
    """What a budget buys for a chain; ``print`` shows it. ``chain`` leaves out the layers before
    the first gradient, ``peak_bytes`` includes them; ``minimum_bytes`` is the least budget."""

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    peak_bytes: int

    @property
    def ordinary(self) -> bool:
        """Whether ordinary backpropagation fits the budget, and so is what is done."""
        return self.budget_bytes >= self.ordinary_bytes

    @property
    def seconds(self) -> float:
        """An iteration, as predicted."""
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
    """What was found for recent calls of one module."""

    chains: LRUCache[tuple[Chain, int]] = field(default_factory=LRUCache)
    fits: LRUCache[ChainFit] = field(default_factory=LRUCache)
    links: LRUCache[Links] = field(default_factory=partial(LRUCache, most=_MOST_LINKS))
    moving: set[tuple[int, Any]] = field(
        default_factory=set
    )  # what layers change: (id of its holder, name)
    #: Of layers that a model calls: whose outputs it holds meanwhile, by names. None for others.
    holds: dict[str, list[str]] | None = None

    def fit(self, net: nn.Sequential, memory: Memory, input: Any) -> ChainFit:
        """The schedule of the layers for a budget and an input of this kind. Raises BudgetError,
        which names the least budget, or CellError if a layer cannot be run exactly or nothing
        requires a gradient."""
        leaves, structure = flatten(input, "input")
        call = _Call.of(net, leaves, structure)
        self._links(call)
        return self._fitted(memory, call)

    def find(
        self, net: nn.Sequential, memory: Memory, x: Tensor, given: Hashable
    ) -> tuple[Links, ChainFit]:
        """The links of a called chain, and :meth:`fit`; ``given`` is all that bytes depend on
        besides the layers and the input."""
        call = _Call.of(net, *flatten(x, "input"), given)
        return self._links(call), self._fitted(memory, call)

    def run(self, net: nn.Sequential, memory: Memory, input: Any) -> Any:
        """The output of the last layer, its gradient within a budget; None to run torch's own pass.
        Raises BudgetError, which names the least budget, or CellError if a layer cannot be run
        exactly."""
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
        found = self._fitted(memory, call) if links.chain else None
        if found is None or found.ordinary:
            return None
        return links.returned.unflatten(run_chain(links, found.schedule, leaves))

    def _fitted(self, memory: Memory, call: "_Call") -> ChainFit:
        def find() -> ChainFit:
            links = self._links(call)

            def sizes() -> tuple[Chain, int]:
                chain = _measure(links, call.leaves, called=self.holds is not None)
                return _holding(chain, self.holds or {}), prefix_bytes(links, call.leaves)

            return _fit(*self.chains.get(key, sizes, of=call.parts), memory)

        key = call.shapes(self.moving)
        return self.fits.get((key, memory), find, of=call.parts)

    def _links(self, call: "_Call") -> Links:
        def find() -> Links:
            links = examine_layers(_apart(call.net), call.leaves, call.structure)
            for link in (*links.prefix, *links.chain):
                self.moving.update(link.ambient.names_changed())
            return links

        known = len(self.moving)
        found = self.links.get(call.key(self.moving), find, of=call.tensors)
        if len(self.moving) > known:  # what a layer itself changes is no part of the key
            self.links.get(call.key(self.moving), lambda: found, of=call.tensors)
        return found


def measure_network(net: nn.Sequential, input: Any, repeats: int) -> Chain:
    """Measure the layers of a network, without those before the first gradient, timing ``repeats``
    times. Raises CellError if a layer cannot be run exactly or nothing requires a gradient."""
    leaves, structure = flatten(input, "input")
    return _measure(examine_layers(_apart(net), leaves, structure), leaves, repeats)


def _measure(
    links: Links, leaves: Tensors, repeats: int | None = None, *, called: bool = False
) -> Chain:
    if not links.chain:
        raise CellError(
            "there is nothing to backpropagate: expected a layer with a parameter, or an input, "
            "that requires a gradient"
        )
    with torch.enable_grad():
        return measure_chain(links, leaves, repeats, called=called)


def _holding(chain: Chain, holds: dict[str, list[str]]) -> Chain:
    """The chain, where running a layer takes the outputs that its caller holds meanwhile, too."""
    if not holds:
        return chain
    output = dict(zip(chain.names, chain.output_bytes, strict=True))
    more = [sum(output.get(held, 0) for held in holds.get(name, ())) for name in chain.names]
    transients: dict[str, Any] = {
        name: [size + m for size, m in zip(getattr(chain, name), more, strict=True)]
        for name in ("forward_transient_bytes", "record_transient_bytes")
    }
    return replace(chain, **transients)


def _fit(chain: Chain, before: int, memory: Memory) -> ChainFit:
    whole = record_everything(chain)
    ordinary = max(whole.peak, before)
    least = max(chain_minimum(chain)[0], before)
    room = min(least, ordinary) if memory == LEAST else as_bytes(memory, ordinary)
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
    """A call, and what is looked up for it.

    Attributes:
        known: all that bytes and seconds depend on, except what the layers refer to.
        found: what the layers refer to.
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
        """All that bytes and seconds depend on, the layers themselves (their ids) included."""
        if len(moving) not in self.identities:
            places = _still(self.found.places, moving)
            self.identities[len(moving)] = identity(self.found, places)
        return self.known, self.identities[len(moving)]

    def key(self, moving: Collection[tuple[int, Any]]) -> Hashable:
        """All that links depend on: besides, the very objects that hold what layers refer to."""
        holders = tuple(id(place.holder) for place in self.found.places)
        return self.shapes(moving), tuple(map(id, self.tensors)), holders

    @classmethod
    def of(
        cls, net: nn.Sequential, leaves: Tensors, structure: Structure, given: Hashable = None
    ) -> "_Call":
        found = find_referents([*net])  # what the chain itself is, is no part of what it takes
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
        layers = tuple(map(id, parts))
        names = tuple(name if t is not None else None for name, t in named)
        owned = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        asked = str(structure), torch.get_num_threads(), given
        known = tuple(map(signature, leaves)), asked, layers, names, owned
        return cls(net, leaves, structure, known, found, parts, tensors)


def _still(places: Sequence[Place], moving: Collection[tuple[int, Any]]) -> Iterator[Place]:
    """The places, without those that layers change."""
    holders = {holder for holder, _ in moving}
    for place in places:
        if getattr(place, "registered", None) is not None:
            continue  # tensors are known by themselves
        if id(place.holder) not in holders:
            yield place
        elif not place.growing:
            yield place.without({key for holder, key in moving if holder == id(place.holder)})


def named_layers(
    net: nn.Sequential, opens: Callable[[nn.Sequential], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """The layers with dotted names; a nested chain without hooks is taken apart if ``opens`` says
    so."""
    for name, layer in net._modules.items():  # a layer may come twice
        if (
            isinstance(layer, nn.Sequential)
            and opens(layer)
            and not any(getattr(layer, hooks) for hooks in _HOOKS)
        ):
            yield from named_layers(layer, opens, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", layer


def _apart(net: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers of a chain: nested ones with a budget or a scan of their own stay whole."""

    def opens(nested: nn.Sequential) -> bool:
        options = vars(nested)
        plain = "backward" in options and options["backward"] is options["memory"] is None
        return type(nested) is nn.Sequential or plain

    return list(named_layers(net, opens))
