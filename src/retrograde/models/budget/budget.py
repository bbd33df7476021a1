"""``budget``: one memory budget for all the recurrent modules and deep chains of a model.

Two kinds of parts get a share of the budget:

- every recurrent module;
- every run of layers that the model calls one after the other (``call_order.py``).

The model runs on a sample. For the input of each part, two sizes are found: the least memory of the
part (mᵢ), and the memory of ordinary backpropagation (oᵢ). Every part then gets its least memory,
and the same share λ of the memory that it could use beyond that:

    bᵢ = mᵢ + λ (oᵢ − mᵢ),    λ ≤ 1 the largest with    Σ over calls min(bᵢ, o of the call) ≤ total.

The calls of a forward pass add up, since a call holds its memory until it is backpropagated. The
sum is an upper bound, since only one module at a time is at its own peak.

Known limits: values that a model changes in place are not put back unless they are buffers (a list
that it appends to, for example). The forward pass of the model must not differentiate through one
of the parts.
"""

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from retrograde.errors import BudgetError, NotExactError
from retrograde.models.budget.call_order import CallOrder
from retrograde.models.budget.replace_modules import is_chain
from retrograde.models.budget.sample_run import (
    bytes_of_a_pass,
    called_in_turn,
    run_watched,
    untouched,
)
from retrograde.models.budget.watched import Watched, WatchedModule, WatchedRow, WatchedRows
from retrograde.models.rows.arguments import tensors_in
from retrograde.models.rows.layer_run import RefusedLayerError
from retrograde.models.rows.row_forward import install, released
from retrograde.recurrent.base import BudgetedRNN
from retrograde.run.transforms import is_unreal
from retrograde.units import Memory, aligned, as_bytes, as_given, format_bytes, parse_memory

_TOLD = 3  # the most reasons in one message
_NO_USE = "hardly holds more than it has to: a budget would gain nothing"
_REST = "takes {} at a time of its own: no budget of the budgeted modules lowers it"
_LITTLE, _TRIES = 1 / 50, 4  # of what ordinary backpropagation takes; of plans within a budget
_FINENESS = 2**40  # λ is a multiple of 1 / this, which is finer than a byte of any memory


@dataclass(frozen=True)
class Share:
    """The share of one module, and the sizes that it depends on. Bytes are those of one call.

    Attributes:
        calls: how often a forward pass calls it with something to backpropagate.
        budget_bytes: its ``memory``; of several runs of layers, the peak of each.
        minimum_bytes: its least budget.
        ordinary_bytes: the memory of ordinary backpropagation, of the largest call.
    """

    calls: int
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int


@dataclass(frozen=True)
class Division:
    """A divided budget; ``print`` shows it as a table.

    Attributes:
        model: the model, the same object that was given.
        shares: by the names of :meth:`torch.nn.Module.named_modules`; "" is the model itself.
        left: the modules that are unchanged, since the sample gave them nothing to backpropagate.
        total_bytes: the budget.
        minimum_bytes: the least budget.
        ordinary_bytes: the memory of ordinary backpropagation of these modules.
        refused: the modules that cannot have a budget, and the reasons.
        elsewhere_bytes: what the rest of the model holds or keeps for later, beyond the budget.
        peak_bytes: the working memory of a pass of the whole model on the sample with this budget,
            as measured; it is 0 if such a pass raises.
        rest_bytes: the peak of the rest of the model, if these modules never take more beside what
            it holds; 0 otherwise. No budget of theirs lowers it.
        seconds: the predicted time of these modules in a pass both ways; None if some are recurrent
            modules, whose times ``rg.fit`` tells.
        ordinary_seconds: the same for ordinary backpropagation.
    """

    model: nn.Module = field(repr=False)
    shares: dict[str, Share]
    left: tuple[str, ...]
    total_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    refused: dict[str, str] = field(default_factory=dict)
    elsewhere_bytes: int = 0
    peak_bytes: int = 0
    rest_bytes: int = 0
    seconds: float | None = None
    ordinary_seconds: float | None = None

    def __str__(self) -> str:
        class_name = type(self.model).__name__
        names = {name: name or class_name for name in (*self.shares, *self.left)}
        table: list[tuple[str, ...]] = [("module", "calls", "budget", "share", "least", "ordinary")]
        calls = sum(share.calls for share in self.shares.values())
        every = Share(calls, self.total_bytes, self.minimum_bytes, self.ordinary_bytes)
        for name, share in [*self.shares.items(), ("all", every)]:
            part = f"{share.budget_bytes / share.ordinary_bytes:.1%}"
            sizes = share.budget_bytes, share.minimum_bytes, share.ordinary_bytes
            budget, *others = map(format_bytes, sizes)
            table.append((names.get(name, name), str(share.calls), budget, part, *others))
        held, most = self.ordinary_bytes, self.ordinary_bytes + self.elsewhere_bytes
        told = [f"budgeted modules hold {format_bytes(held)} of the model's {format_bytes(most)}"]
        if self.peak_bytes:
            told[0] += f"; a pass within the budget takes {format_bytes(self.peak_bytes)} in all"
        if self.rest_bytes:
            told.append(f"the rest of the model {_REST.format(format_bytes(self.rest_bytes))}")
        if self.seconds and self.ordinary_seconds:
            times = f"{self.seconds:.3g} s, {self.seconds / self.ordinary_seconds:.2f} times"
            told.append(f"these modules take {times} ordinary ones'")
        told += [f"left as it was, with nothing to backpropagate: {names[n]}" for n in self.left]
        told += [f"left as it was: {name} {reason}" for name, reason in self.refused.items()]
        return "\n".join([aligned(table), *told])


@overload
def budget(model: nn.Module, memory: None, sample: object = None) -> None: ...


@overload
def budget(model: nn.Module, memory: Memory, sample: object) -> Division: ...


def budget(model: nn.Module, memory: Memory | None, sample: object = None) -> Division | None:
    """Divide one memory budget among the recurrent modules and layers of a model.

    Every ``torch.nn.RNN``, ``GRU`` and ``LSTM`` in the model, at any depth, becomes the module of
    this library with the same parameters. Its ``memory`` is its share. Modules of this library get
    a new ``memory``, which also replaces a ``schedule``; recurrent modules keep their ``backward``.

    Layers that the model calls one after the other, such as the blocks of a transformer, keep their
    class. Each of their calls is kept whole, lean, or dropped and run again. Those of a
    ``Sequential`` of this library are among them, in place of a ``memory`` of its own.

    All changes are in place, even if the model itself is such a module. Optimizers, hooks,
    references and ``state_dict`` stay valid. If the call raises an error, nothing is changed.

    Args:
        model: any module with recurrent modules or Sequentials in it, or one of these.
        memory: the budget for all calls of one forward and backward pass, beyond the outputs and
            gradients of the modules: bytes (``67108864``), a size (``"64MiB"``), or a fraction of
            ordinary backpropagation's memory for these modules (``0.05``, ``"5%"``). None takes
            every budget off; modules that became ours then run as torch's do.
        sample: the input of the model: a tuple of arguments, a dict of keyword arguments, or its
            one argument. It should be the largest input of the training. The model should be in
            the mode in which it is trained. It is called a few times, which leaves no trace.

    Returns:
        A :class:`Division`; None if the budgets are taken off.

    Raises:
        BudgetError: the budget is too small; the message names the least one.
        NotExactError: there is nothing to replace, or a module cannot be kept to a budget.
        UnitError: the memory cannot be read.

    Example:
        >>> model = nn.Sequential(nn.LSTM(8, 8), nn.Identity())
        >>> division = budget(model, "20%", torch.randn(100, 4, 8))
        >>> share = division.shares["0"]
        >>> share.budget_bytes == share.ordinary_bytes // 5 == model[0].memory
        True
    """
    if memory is None:
        for module in model.modules():
            if isinstance(module, BudgetedRNN) or is_chain(module):
                module.memory = None
        install(model, [])
        return None
    parse_memory(memory)
    _check(model, sample)
    with _unless_refused(model):
        for chain in filter(is_chain, model.modules()):  # its layers share this budget
            chain.memory = None
        return _divided(model, memory, sample)


def _divided(model: nn.Module, memory: Memory, sample: object) -> Division:
    """Give the parts of a model their shares."""
    order = called_in_turn(model, sample)
    refused = order.refusals()
    watched, elsewhere, useless = _watched(model, sample, order, refused)
    needs = [need for need in watched if need.calls]
    if not needs:
        names = ", ".join(need.title for need in watched)
        raise NotExactError(
            f"the sample gave the modules to be budgeted ({names}) nothing to backpropagate: "
            "expected the model to call at least one of them, with a parameter or an input "
            "that requires a gradient"
        )
    kept = _Kept(model, sample, order.fill, needs, elsewhere + useless)
    least = sum(need.used(need.minimum_bytes) for need in needs)
    total = as_bytes(memory, ordinary := kept.ordinary)
    most = kept.least(least) if total < least else kept.within(total, least)
    if most > total:
        largest = max(needs, key=lambda need: need.used(need.minimum_bytes))
        raise BudgetError(
            f"the memory {as_given(memory, total, ordinary)}, but the budgeted modules need at "
            f"least {most} bytes ({format_bytes(most)}) together, that is {most / ordinary:.2%} of "
            f"ordinary backpropagation's; most of it is for {largest.title}: raise the budget, or "
            "make the batch or the state smaller",
            most,
        )
    left = tuple(need.name for need in watched if not need.calls)
    seconds = [need.seconds for need in needs]
    times = zip(*filter(None, seconds), strict=True) if None not in seconds else ((), ())
    return Division(
        model, kept.shares, left, total, least, ordinary, refused, kept.elsewhere,
        kept.peak, kept.rest, *(sum(each) or None for each in times),
    )  # fmt: skip


class _Kept:
    """A budget that is kept, as a pass on the sample shows."""

    def __init__(
        self, model: nn.Module, sample: object, fill: float | None, needs: Sequence[Watched],
        elsewhere: int,
    ) -> None:  # fmt: skip
        self.model, self.sample, self.fill, self.needs = model, sample, fill, needs
        self.ordinary = sum(need.used(need.ordinary_bytes) for need in needs)
        self.elsewhere = elsewhere  # what the rest of the model holds
        self.rest = 0  # its own peak, if that is more than the parts ever add to what it holds
        self.peak = 0  # the working memory of a pass with these shares; 0 if it raises
        self.shares: dict[str, Share] = {}
        self.are_rows = all(need.called_rows for need in needs)

    def give(self, total: int) -> int:
        """Give the parts so many bytes together. Return what a pass takes beyond the rest's."""
        self.shares = {}
        for need, part in zip(self.needs, _divide(self.needs, total), strict=True):
            for each, size in need.give(part):
                calls = each.calls.total()
                self.shares[each.name] = Share(calls, size, each.minimum_bytes, each.ordinary_bytes)
        install(self.model, [row for need in self.needs for row in need.called_rows])
        self.peak = bytes_of_a_pass(self.model, self.sample, self.fill)
        return self.peak - self.elsewhere

    def least(self, least: int) -> int:
        """Return the least budget that is kept, if the parts can do with ``least``."""
        if not self.are_rows:
            return least
        taken = self.give(least)
        return least if self._is_rest(taken) or self._is_little(taken - least) else taken

    def within(self, total: int, least: int) -> int:
        """Give the parts what keeps a pass within a budget. Return the least budget that is kept if
        none does."""
        more, allowed, above = self.give(total) - total, total, total
        if not self.are_rows:  # the results of modules are beyond their budget
            return total
        if self._is_little(more) or (total >= self.ordinary and not self._is_rest(more + total)):
            self.elsewhere += max(0, more)
            return total
        for left in reversed(range(_TRIES)):
            above, allowed = allowed, max(least, allowed - more) if left else least
            more = self.give(allowed) - total
            if more <= 0 or allowed == least:
                break
        if more <= 0:
            for _ in range(_TRIES):  # the plan may drop more than it has to
                between = (allowed + above) // 2
                fits = self.give(between) <= total
                allowed, above = (between, above) if fits else (allowed, between)
            self.give(allowed)
            return total
        if self._is_rest(more + total):
            self.give(total)
            self.rest, self.elsewhere = self.peak, self.peak - self.ordinary
            warnings.warn(
                f"the rest of the model {_REST.format(format_bytes(self.rest))}", stacklevel=4
            )
            return total
        little = more if self._is_little(more) else 0  # as of other plans for the same bytes
        self.elsewhere += little
        return total + more - little

    def _is_little(self, more: int) -> bool:
        return more <= _LITTLE * (self.ordinary + self.elsewhere)

    def _is_rest(self, taken: int) -> bool:
        """Return whether a pass takes as much as ordinary backpropagation, or more."""
        return taken >= (1 - _LITTLE) * self.ordinary


@contextmanager
def _unless_refused(model: nn.Module) -> Iterator[None]:
    """Leave the classes and attributes of all modules as they were, if a block raises."""
    before = [(m, type(m), dict(dict.items(vars(m)))) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, old_class, were in before:
            object.__setattr__(module, "__class__", old_class)
            attributes = vars(module)
            attributes.clear()
            attributes.update(were)
        raise


def _check(model: nn.Module, sample: object) -> None:
    if not isinstance(model, nn.Module):
        raise NotExactError(f"got a {type(model).__name__}: expected a torch.nn.Module")
    if isinstance(sample, tuple | list) and sample and all(type(n) is int for n in sample):
        raise NotExactError(
            f"the sample {sample} is a shape: expected what the model is called with, as it is "
            f"trained; give torch.randn{tuple(sample)}, or a batch of the data"
        )
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        raise NotExactError(
            "the model has parameters without a shape yet: expected all of them; call the lazy "
            "model once before"
        )
    if is_unreal([*tensors, *tensors_in(sample)]):
        raise NotExactError(
            "the model or its sample is on the meta device, or fake: expected real ones, for their "
            "bytes are measured"
        )


def _watched(
    model: nn.Module, sample: object, order: CallOrder, refused: dict[str, str]
) -> tuple[list[Watched], int, int]:
    """Run the model on the sample. Return its parts with their calls and sizes, and the bytes that
    the rest of it holds. The last result is those of parts for which a budget would gain nothing. A
    layer that turns out to be in no run is added to ``refused``."""
    while True:
        modules = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase))
        watched: list[Watched] = [WatchedModule(*named) for named in modules]
        watched += [WatchedRow(run, order.tied_from(run), order.leaves) for run in order.preferred]
        try:
            with released(model), untouched(model), torch.enable_grad():
                joined = list[Watched]()
                for _ in range(1 + bool(order.leaves)):  # a pass finds what the one before left
                    rest = run_watched(model, sample, order.fill, watched)
                    joined = WatchedRows.join(watched, rest, joined)
        except RefusedLayerError as refusal:
            refused[refusal.name] = refusal.reason
            order.refuse(type(refusal.layer))
            continue
        times = [time for need in joined if isinstance(need, WatchedRows) for time in need.times]
        elsewhere = rest.held_bytes([time.numbers for time in times])
        useful = [need for need in joined if not need.useless] or joined  # or errors name a least
        without = [need for need in joined if need not in useful]
        refused |= {need.name: _NO_USE for need in without}
        if not useful:
            raise NotExactError(_nothing(model, refused))
        return useful, elsewhere, sum(need.used(need.ordinary_bytes) for need in without)


def _nothing(model: nn.Module, refused: dict[str, str]) -> str:
    reasons = [f"{name} {reason}" for name, reason in refused.items()]
    if len(reasons) > _TOLD:
        reasons[_TOLD:] = [f"{len(reasons) - _TOLD} more"]
    but = f" ({'; '.join(reasons)})" if reasons else ""
    return (
        f"the {type(model).__name__} has nothing to budget{but}: expected an RNN, a GRU, an LSTM, "
        "a Sequential of two layers or more, or layers that it calls one after the other; for "
        "cells that are called step by step, use rg.unroll with memory="
    )


def _divide(needs: Sequence[Watched], total: int) -> list[int]:
    """Return each part's budget: its least, and the largest share λ of the rest that fits. Layers
    get what is left beyond ordinary backpropagation's."""
    fits = range(_FINENESS + 1)

    def parts(share: int) -> list[int]:
        return [need.part(share, _FINENESS) for need in needs]

    def used(share: int) -> int:
        return sum(need.used(part) for need, part in zip(needs, parts(share), strict=True))

    share = bisect_right(fits, total, key=used) - 1
    budgets = parts(share)
    if share == _FINENESS and needs[-1].called_rows:  # another input may take more than the sample
        budgets[-1] += (total - used(share)) // needs[-1].calls.total()
    return budgets
