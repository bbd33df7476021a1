"""What one call of a layer takes, in each way to keep it; and a trial of the call.

The call runs by itself, on the arguments that a model gives it: without a graph, and with one that
is kept whole, lean, or dropped. So measuring holds what one call takes, and the gradients of its
parameters. It leaves no trace.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retrograde.errors import CellError
from retrograde.machine import now
from retrograde.measure.allocations import measure_phases
from retrograde.models.lean import lean
from retrograde.models.refill import Dropped, Unit
from retrograde.plan.calls import CallSizes, Way
from retrograde.replay.dry_run import try_out
from retrograde.replay.referents import MODULE_TABLES

__all__ = ["make_of", "measure_call", "try_call"]

_ROUNDS = 3
_SIMPLE = (bool, int, float, str, tuple, torch.Size, type(None))


def try_call(
    name: str, layers: Sequence[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Unit:
    """Run a layer and its riders once, and return what they are as a unit.

    Raises:
        CellError: the call cannot be run again.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = type(layers[0]).forward(layers[0], *args, **kwargs)
        for rider in layers[1:]:
            value = type(rider).forward(rider, value)
        return value

    call, (device, *_) = _fresh(args, kwargs)
    trial = try_out(lambda: forward(*call()[0], **call()[1]), layers, device, _tensors)
    if trial.decides:
        raise CellError(
            f"layer {name} draws random numbers of Python's, which may decide what it computes, so "
            "its bytes cannot be known before: expected drawn tensors; multiply by a drawn mask, "
            "as torchvision.ops.StochasticDepth does, or use memory=None"
        )
    changing = {id(b) for b in trial.ambient.buffers}
    parts = [part for layer in layers for part in layer.modules()]
    owned = [
        t for part in parts for table in (part._parameters, part._buffers) for t in table.values()
    ]
    reads = [t for t in (*owned, *trial.found.tensors) if t is not None and id(t) not in changing]
    return Unit(name, forward, trial.ambient, list({id(t): t for t in reads}.values()))


def _fresh(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any], list[torch.device]]:
    """Return a function that makes the arguments anew, without their graph; and their devices."""
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def make() -> Any:
        found = [
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(found, spec)

    return make, [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]


class _Measurement:
    """The phases of a call, for each way to keep it."""

    def __init__(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.unit = unit
        self.make, _ = _fresh(args, kwargs)
        self.result: Any = None
        self.root: Any = None
        self.for_caller: list[Tensor | None] = []
        self.seconds: dict[str, list[float]] = {}
        self.leaves: list[Tensor] = []

    def advance(self) -> None:
        args, kwargs = self.make()
        with torch.no_grad():
            self.result = self.unit.forward(*args, **kwargs)

    def record(self) -> None:
        self._record(self.unit.forward)

    def lean(self) -> None:
        with lean():
            self._record(self.unit.forward)

    def drop(self) -> None:
        self._drop(lean=False)

    def drop_lean(self) -> None:
        self._drop(lean=True)

    def _drop(self, *, lean: bool) -> None:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = Dropped(self.unit, args, kwargs, lean=lean)
            return call.run(self.unit.forward, args, kwargs)

        self._record(run)

    def _record(self, run: Callable[..., Any]) -> None:
        args, kwargs = self.make()
        self.leaves = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        with torch.enable_grad():
            self.result = run(*args, **kwargs)

    def release(self) -> None:
        """Let go the result, and keep its graph."""
        found = [t for t in _tensors(self.result) if t.requires_grad]
        self.like = [(t.shape, t.dtype, t.device) for t in found]
        self.root = [torch.autograd.graph.get_gradient_edge(t) for t in found]
        self.result = None

    def backpropagate(self) -> None:
        roots, self.root = self.root, None
        seeds = [torch.ones(s, dtype=d, device=at) for s, d, at in self.like]
        own = [t for t in self.unit.reads if t.requires_grad and t.is_leaf]
        wanted = [*self.leaves, *own]
        if roots and wanted:
            found = torch.autograd.grad(roots, wanted, seeds, allow_unused=True)
            self.for_caller = list(found[len(self.leaves) :])

    def clear(self) -> None:
        self.result = self.root = None
        self.for_caller, self.leaves = [], []


_WAYS = ("record", "lean", "drop", "drop_lean")


def measure_call(
    unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor
) -> CallSizes:
    """Measure a call."""
    one = _Measurement(unit, args, kwargs)
    phases: list[Callable[[], None]] = [one.advance, one.clear]
    for way in _WAYS:
        phases += [getattr(one, way), one.release, one.backpropagate, one.clear]
    with unit.ambient.measured():
        found = measure_phases(phases, device=state.device)
        seconds = _seconds(one, state.device)
    output = found[0].growth()
    ways = []
    for k, way in enumerate(_WAYS):
        first = 2 + 4 * k
        record, release, back = found[first : first + 3]
        last = first + 3  # what is released then is the caller's
        held, freed = record.growth(before=last), -release.growth()
        keeps = freed < output
        back_peak = held - freed + back.peak(before=last)
        ways.append(
            Way(
                held_bytes=max(0, held - output),
                first_bytes=record.peak(),
                backward_bytes=back_peak,
                seconds=seconds[way],
                keeps_output=keeps,
                dropped=k > 1,
            )
        )
    captured = (t for t in unit.ambient.capture() if t.is_cuda == state.is_cuda)
    return CallSizes(
        input_bytes=state.untyped_storage().nbytes(),
        output_bytes=output,
        forward_bytes=found[0].peak(),
        forward_seconds=seconds[""],
        ways=tuple(ways),
        noted_bytes=sum(int(t.nbytes) for t in captured),
    )


def _seconds(one: _Measurement, device: torch.device) -> dict[str, float]:
    """Return the seconds of a forward pass, and what each way adds to the first one's."""

    def timed(*steps: Callable[[], None]) -> float:
        start = now(device)
        for step in steps:
            step()
        taken = now(device) - start
        one.clear()
        return taken

    taken: dict[str, list[float]] = {way: [] for way in ("", *_WAYS)}
    for _ in range(_ROUNDS):
        taken[""].append(timed(one.advance))
        for way in _WAYS:
            taken[way].append(timed(getattr(one, way), one.release, one.backpropagate))
    least = {way: min(each) for way, each in taken.items()}
    return {"": least[""]} | {way: max(0.0, least[way] - least["record"]) for way in _WAYS}


def make_of(layers: Sequence[nn.Module]) -> Hashable:
    """Return a description of some modules, equal for modules that take the same.

    It has their classes, options and sizes. It is None unless all are torch's own, without hooks.
    """
    found = []
    for part in (part for layer in layers for part in layer.modules()):
        kind, own = type(part), vars(part)
        if not kind.__module__.startswith("torch.nn.modules."):
            return None
        options = {name: own[name] for name in own.keys() - MODULE_TABLES - {"forward"}}
        hooked = any(own[name] for name in own if name.endswith("_hooks"))
        if hooked or not all(isinstance(v, _SIMPLE) for v in options.values()):
            return None
        tensors = [
            (name, t if t is None else (t.shape, t.dtype, t.requires_grad))
            for table in (own["_parameters"], own["_buffers"])
            for name, t in table.items()
        ]
        found.append((kind, repr(sorted(options.items())), tuple(tensors)))
    return tuple(found)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
