"""Runs of layers: modules that a model calls one after the other, each on the previous output.

The model is called once, without gradients, and every call of a module is recorded: its arguments,
its result, and the calls within it. Runs are then found from the outermost calls inward. The layers
of a ``Sequential`` count as calls of the model, since it calls them one after the other too. The
search opens a module that holds more than a quarter of the model's bytes, if runs within it hold
nearly all of these.
"""

import itertools
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import container
from torch.utils.weak import WeakTensorKeyDictionary

from retrograde.cells.any_recurrent import Recurrent
from retrograde.models.budget.replace_modules import is_chain
from retrograde.models.rows.arguments import Arguments, made_by, tensors_in, tied
from retrograde.models.rows.layer_run import Tied, passes_through
from retrograde.models.rows.row_forward import is_inplace_activation
from retrograde.models.sequential import Sequential
from retrograde.replay.surroundings import Slot, version
from retrograde.run.transforms import besides_forward

_BUDGETED = (nn.RNNBase, Sequential, Recurrent)
_CHECKPOINTED = "is run again by torch.utils.checkpoint: turn the model's own checkpointing off"
_OPENED = 1 / 4  # of the model's bytes: a module with more is opened
_NEARLY_ALL = 0.9
_SMALL = 1 / 64  # of the model's bytes: a run with less is ignored


@dataclass(eq=False)
class ModuleCall:
    """One call of a module. It has numbers instead of tensors, so that it keeps none alive. A write
    to a tensor gives it another number."""

    name: str
    module: nn.Module
    checkpoints: bool = False  # whether torch.utils.checkpoint runs it, or a call within it
    given: dict[int | str, set[int]] = field(default_factory=dict)  # by argument: its tensors
    slot: int | str = 0  # the argument that is the state, in a run
    made: set[int] = field(default_factory=set)  # returned tensors that lie in memory of their own
    refusal: str | None = None  # why it can be no layer of a run; "" if a user could not help it
    inside: list["ModuleCall"] = field(default_factory=list)  # the calls within it
    takes: int = 0  # the bytes of its first argument
    held: int = 0  # the bytes of all tensors returned within it

    def slot_of(self, numbers: Collection[int]) -> int | str | None:
        """Return the first argument that has a tensor with one of these numbers."""
        return next((slot for slot, tensors in self.given.items() if tensors & {*numbers}), None)

    @property
    def reads(self) -> set[int]:
        return set().union(*self.given.values())


#: Layers that are called one after the other.
Layers = list[ModuleCall]


class _Begun(Arguments):
    """The arguments of a call, and the tensors' versions, when it began."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        super().__init__(args, kwargs)
        self.versions = {id(t): version(t) for t in tensors_in(self.leaves)}

    def changes(self, now: Arguments) -> str | None:
        """Return why a call cannot be run again that ends with these arguments, or None."""
        (leaves, spec), (after, spec_after) = self.given, now.given
        if spec != spec_after or [*map(id, leaves)] != [*map(id, after)]:
            return "changes a list or a dict that it is given: expected it to return what is new"
        writes = any(version(t) != self.versions[id(t)] for t in tensors_in(self.leaves))
        return "" if writes else None


@contextmanager
def noted(model: nn.Module) -> Iterator[ModuleCall]:
    """Record every call of a model's modules within a block; the yielded call contains them."""
    names = {id(module): name for name, module in model.named_modules()}
    top = ModuleCall("", model)
    stack = [(top, _Begun((), {}))]
    numbered: Any = WeakTensorKeyDictionary()
    count = itertools.count()

    def number(t: Tensor, begun: _Begun | None = None) -> int:
        """Return the number of a tensor, as it is now or was when a call began."""
        at = version(t) if begun is None else begun.versions.get(id(t), version(t))
        tensor_number: int = numbered.setdefault(t, {}).setdefault(at, next(count))
        return tensor_number

    def before(module: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        call = ModuleCall(names[id(module)], module, _in_checkpoint())
        stack[-1][0].inside.append(call)
        stack.append((call, _Begun(args, kwargs)))

    def after(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        call, begun = stack.pop()
        assert call.module is module
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        by_slot = {slot: {number(t, begun) for t in tensors_in(value)} for slot, value in named}
        call.given = {slot: numbers for slot, numbers in by_slot.items() if numbers}
        made = made_by(result, tensors_in((args, kwargs)))
        is_outermost = call.checkpoints and not stack[-1][0].checkpoints
        call.checkpoints |= any(inner.checkpoints for inner in call.inside)
        if call.checkpoints:
            call.refusal = _CHECKPOINTED if is_outermost else ""
        elif not call.given or not _is_plain(module):
            call.refusal = ""
        else:
            call.refusal = begun.refusal() or begun.changes(Arguments(args, kwargs))
            if call.refusal is None and not any(t is not None for t in made):
                call.refusal = ""
        call.takes = sum(t.nbytes for t in tensors_in(args[:1]))
        outputs = tensors_in(result)
        call.made = {
            number(t) for t in (outputs if is_inplace_activation(module) else made) if t is not None
        }
        theirs = {id(t) for t in tensors_in(args)}
        own_bytes = sum(t.nbytes for t in outputs if id(t) not in theirs)
        call.held = sum(inner.held for inner in call.inside) if call.inside else own_bytes

    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            # Before other hooks: what one of them returns in place of a result is not the layer's.
            late = module.register_forward_hook(after, prepend=True, with_kwargs=True)
            hooks.callback(late.remove)
        yield top


class CallOrder:
    """The calls of a model, and the runs of layers among them. ``leaves`` are attributes in
    which the model leaves something, which its next pass finds."""

    def __init__(
        self, top: ModuleCall, fill: float | None = None, leaves: Sequence[Slot] = ()
    ) -> None:
        self.top, self.every, self.leaves = top, [*_all(top)], leaves
        self.whole = sum(call.held for call in top.inside)
        self.times = Counter(id(call.module) for call in self.every)
        self.tied = tied(call.module.parameters(recurse=not call.inside) for call in self.every)
        self.preferred: list[Layers] = []  # the runs that should become chains
        self.refused: dict[str, str] = {}  # those that cannot, and the reasons
        self.fill = fill  # what numbers are to be drawn, so that all layers run

    def runs(self) -> list[Layers]:
        """Return the runs of calls, the outermost possible; small runs are ignored. Layers may be
        called several times, if always in the same run. Others divide a run. A run of one call is
        one of no others."""
        opened, whole = (self._runs(self.top, large) for large in (_OPENED * self.whole, inf))
        runs: list[Layers] = [[]]
        for same in _alike(self._divided(min(whole, opened, key=self._least))):
            uneven = self._uneven(same)
            for call in same[0]:
                if id(call.module) in uneven:
                    runs.append([])
                elif runs[-1] or not is_inplace_activation(call.module):
                    runs[-1].append(call)
            runs.append([])
        least = _SMALL * self.whole
        holds = Counter[int]()  # by module, in all of its calls
        for call in self.every:
            holds[id(call.module)] += call.held
        sums = [sum(holds[module_id] for module_id in {id(c.module) for c in run}) for run in runs]
        pairs = zip(runs, sums, strict=True)
        runs = [run for run, run_bytes in pairs if len(run) > 1 and run_bytes >= least]
        taken = {id(call) for run in runs for call in run}
        return runs + [[call] for call in self._alone(self.top, taken) if call.held >= least]

    def _uneven(self, same: list[Layers]) -> set[int]:
        """Return the modules of equal runs that are also called elsewhere, but for riders."""
        times = Counter(id(call.module) for call in same[0] for _ in same)
        riders = {id(c.module) for c in same[0] if is_inplace_activation(c.module)}
        return {one for one in times.keys() - riders if self.times[one] != times[one]}

    def _divided(self, runs: list[Layers]) -> list[Layers]:
        """Divide runs that are not always called alike, such as the steps of a rollout, of which
        the first also has the stem before it. A part has calls that always follow each other."""
        uneven = [run for same in _alike(runs) if self._uneven(same) for run in same]
        neighbours: dict[Hashable, set[Hashable]] = defaultdict(set)
        for run in uneven:
            layers = [_key(call) for call in run if not is_inplace_activation(call.module)]
            for before, after in pairwise([None, *layers, None]):
                neighbours["after", before].add(after)
                neighbours["before", after].add(before)
        divided = list[Layers]()
        for run in runs:
            divided.append([])
            last: Hashable = None
            divides = run in uneven
            for call in run:
                key = _key(call)
                if divides and not is_inplace_activation(call.module):
                    ends = neighbours["after", last], neighbours["before", key]
                    divided += [] if ends == ({key}, {last}) else [[]]
                    last = key
                divided[-1].append(call)
        return [run for run in divided if run]

    def _alone(self, around: ModuleCall, taken: set[int]) -> Iterator[ModuleCall]:
        """Yield the outermost calls of several modules that are in no run, and have none within."""
        for call in around.inside:
            if id(call) in taken:
                continue
            ready = call.name and call.refusal is None and self.times[id(call.module)] == 1
            if not ready or any(id(inner) in taken for inner in _all(call)):
                yield from self._alone(call, taken)
            elif call.inside:
                call.slot = next(iter(call.given))
                yield call

    def _runs(self, around: ModuleCall, large: float) -> list[Layers]:
        """Return the outermost runs among the calls within one call. A call that holds a ``large``
        part of the model's bytes is opened, or a quarter if it stands alone."""
        runs, current = list[Layers](), Layers()

        def close() -> None:
            call, *more = current or [around]
            is_run = more or (call.inside and self.times[id(call.module)] == 1)
            if current and is_run and (more or call.held <= _OPENED * self.whole):
                runs.append(current[:])
            elif current:
                within = self._runs(call, large)
                if is_run:
                    runs.extend(within or [current[:]])
                elif _is_better(within, call):
                    runs.extend(within)
            current.clear()

        calls = _opened(around)
        uses = _uses(calls)
        for call in calls:
            rides = current and is_inplace_activation(call.module)
            if rides and call.given.get(0) == current[-1].made:
                current.append(call)
                continue
            within = self._runs(call, large) if call.held > large else []
            if call.refusal is not None or _is_better(within, call):
                close()
                runs.extend(within or self._runs(call, large))
                continue
            made = {n for n in current[-1].made if uses[n] == 1} if current else set()
            slot = call.slot_of(made)
            if slot is None:
                close()
                slot = next(iter(call.given))
            call.slot = slot
            current.append(call)
        close()
        return runs

    def tied_from(self, run: Layers) -> Tied:
        """Return where the weights of several calls are, one of which is in a run or comes after
        it."""
        later = self.every[self.every.index(run[0]) :]
        modules = dict.fromkeys(module for call in later for module in call.module.modules())
        return [(m, name) for m in modules for name, p in m._parameters.items() if p in self.tied]

    def refuse(self, layer_class: type[nn.Module]) -> None:
        """Leave the layers of a class out of all runs, for one of them was refused."""
        for call in self.every:
            if type(call.module) is layer_class:
                call.refusal = call.refusal or ""
        self.preferred = self.runs()

    def _least(self, runs: list[Layers]) -> int:
        """Return what the model holds if later runs hold their input, and one layer holds more."""
        held = [call.held for run in runs for call in run]
        return self.whole - sum(held) + max(held, default=0) + sum(r[0].takes for r in runs[1:])

    def refusals(self) -> dict[str, str]:
        """Return the reasons why larger modules of the model cannot be layers of a chain."""
        large = (call for call in self.every if call.held >= _SMALL * self.whole)
        told = {call.name: call.refusal for call in large if call.refusal}
        return self.refused | told


def _key(call: ModuleCall) -> Hashable:
    return id(call.module), call.slot


def _alike(runs: list[Layers]) -> list[list[Layers]]:
    """Return runs, those together that call the same modules in the same order."""
    groups: dict[Hashable, list[Layers]] = defaultdict(list)
    for run in runs:
        groups[tuple(map(_key, run))].append(run)
    return [*groups.values()]


def _is_better(runs: list[Layers], call: ModuleCall) -> bool:
    """Return whether runs within a call hold nearly all of its bytes, no layer most of them."""
    held = [layer.held for run in runs for layer in run]
    return sum(held) >= _NEARLY_ALL * call.held > 0 and 4 * max(held) < 3 * call.held


def _opened(around: ModuleCall) -> Layers:
    """Return the calls within one call, with those within a ``Sequential`` in place of it. So is a
    module replaced that only calls one layer after the other."""
    opened = []
    for call in around.inside:
        layers = _opened(call) if call.inside else []
        if layers and (_is_sequential(call.module) or _is_straight(call, layers)):
            opened += layers
        elif not passes_through(call.module):
            opened.append(call)
    return opened


def _is_sequential(module: nn.Module) -> bool:
    calls = type(module).forward is container.Sequential.forward or is_chain(module)
    return calls and besides_forward(module) is None


def _is_straight(call: ModuleCall, layers: Layers) -> bool:
    """Return whether a call only calls its layers in turn, and returns the last one's output."""
    if call.refusal is not None or is_inplace_activation(layers[0].module):
        return False
    uses = _uses(layers)
    for layer, after in pairwise(layers):
        if after.slot_of(layer.made) is None or max(uses[n] for n in layer.made) > 1:
            return False
    usable = all(is_inplace_activation(layer.module) or layer.refusal is None for layer in layers)
    return bool(usable and layers[0].reads & call.reads and layers[-1].made == call.made)


def _uses(calls: Layers) -> Counter[int]:
    """Count, for each tensor, the calls that are given it."""
    return Counter(n for call in calls for n in call.reads)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module has its class's own forward, and nothing with a budget inside."""
    modules = (inner for inner in module.modules() if not is_chain(inner))
    has_budget = any(isinstance(inner, _BUDGETED) for inner in modules)
    return "forward" not in vars(module) and not has_budget


def _all(around: ModuleCall) -> Iterator[ModuleCall]:
    for call in around.inside:
        yield call
        yield from _all(call)


def _in_checkpoint() -> bool:
    """Return whether ``torch.utils.checkpoint`` runs the caller of this function."""
    file = getattr(sys.modules.get("torch.utils.checkpoint"), "__file__", None)
    frames = traceback.walk_stack(None) if file is not None else ()
    return any(frame.f_code.co_filename == file for frame, _ in frames)
