"""``budget``: one memory budget for all the recurrent modules and deep chains of a model.

What is given a part is every recurrent module; every ``Sequential`` of two layers or more that has
no recurrent module in it and stands in no other such one; and every run of layers that the model
calls one after the other (:mod:`retrograde.nn.call_order`). The model is run on a sample. There
each of them is asked, for the very input that it is given, how little memory it can do with (mᵢ)
and how much ordinary backpropagation would take (oᵢ). All then get their least, and the same share
λ of what they could use beyond it,

    bᵢ = mᵢ + λ (oᵢ − mᵢ),    λ ≤ 1 the largest with    Σ over calls min(bᵢ, o of the call) ≤ total,

since what one call holds stays until it is backpropagated: the calls of a forward pass add up. The
sum is an upper bound, for only one module at a time is at its own peak.

In that run these modules record nothing (:mod:`retrograde.nn.sample_run`), so it takes what the
rest of the model takes. Modules are replaced by :mod:`retrograde.nn.replace_modules`.

Known limits: what a model changes in place and is no buffer (a list that it appends to) is not put
back; a model whose forward pass differentiates through such a module cannot be run so.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from retrograde.errors import BudgetError, CellError
from retrograde.nn.call_order import CallOrder, Layers
from retrograde.nn.called_chain import release
from retrograde.nn.chain_plans import named_layers
from retrograde.nn.replace_modules import is_chain
from retrograde.nn.sample_run import (
    NotAChainError,
    Watched,
    WatchedChain,
    WatchedModule,
    called_in_turn,
    run_model,
    run_name,
    untouched,
)
from retrograde.units import Memory, aligned, as_bytes, format_bytes, parse_memory

__all__ = ["Division", "Share", "budget"]

_TOLD = 3  # reasons in one message
_NO_USE = "hardly holds more than it has to: a budget would gain nothing"
_FINENESS = 2**40  # parts that λ is counted in: finer than the bytes of any memory


@dataclass(frozen=True)
class Share:
    """What one module was given, and why. Bytes are those of one call.

    Attributes:
        calls: how often a forward pass calls it with something to backpropagate.
        budget_bytes: its ``memory``.
        minimum_bytes: the least that it can do with.
        ordinary_bytes: what ordinary backpropagation would hold; of several calls, the largest.
    """

    calls: int
    budget_bytes: int
    minimum_bytes: int
    ordinary_bytes: int


@dataclass(frozen=True)
class Division:
    """How a budget was divided; ``print`` shows it as a table.

    Attributes:
        model: the model, the same object that was given.
        shares: by the names of :meth:`torch.nn.Module.named_modules`; "" is the model itself.
        left: modules left as they were: the sample gave them nothing to backpropagate.
        total_bytes: the budget.
        minimum_bytes: the least budget that would have done. Where that has every layer run whole,
            less may do: a smaller budget is tried with parts of layers run by themselves.
        ordinary_bytes: what ordinary backpropagation of these modules would hold.
        refused: what could not be given a budget, and why.
    """

    model: nn.Module = field(repr=False)
    shares: dict[str, Share]
    left: tuple[str, ...]
    total_bytes: int
    minimum_bytes: int
    ordinary_bytes: int
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = {name: _title(name, self.model) for name in (*self.shares, *self.left)}
        rows: list[tuple[str, ...]] = [("module", "calls", "budget", "share", "least", "ordinary")]
        for name, share in self.shares.items():
            sizes = share.budget_bytes, share.minimum_bytes, share.ordinary_bytes
            rows.append(_row(names[name], share.calls, *sizes))
        calls = sum(share.calls for share in self.shares.values())
        sizes = self.total_bytes, self.minimum_bytes, self.ordinary_bytes
        rows.append(_row("all", calls, *sizes))
        left = [f"left as it was, with nothing to backpropagate: {names[n]}" for n in self.left]
        left += [f"left as it was: {name} {reason}" for name, reason in self.refused.items()]
        return "\n".join([aligned(rows), *left])


def budget(model: nn.Module, memory: Memory, sample: Any) -> Division:
    """Give what is deep or long in a model one memory budget, divided by what each part needs.

    Every ``torch.nn.RNN``, ``GRU``, ``LSTM`` and ``Sequential`` in the model, at any depth, becomes
    the module of this library with the same parameters, and gets its part as ``memory``; modules of
    this library get another ``memory`` (in place of a ``schedule``, too), and recurrent ones keep
    their ``backward``. A ``Sequential`` within another one, with fewer than two layers, with
    recurrent modules in it or with a ``backward`` is left as it is. Layers that the model calls
    itself, each on what the one before returned, as a transformer's blocks, become one chain.

    All this is done in place, the model itself included: optimizers, hooks, references and
    ``state_dict`` stay good. Nothing is changed if anything is refused.

    Args:
        model: any module with recurrent modules or Sequentials in it, or one of these.
        memory: for all calls of one forward and backward pass, beyond what the modules hand on
            (outputs, gradients): bytes (``67108864``), a size (``"64MiB"``), or a fraction of what
            ordinary backpropagation of these modules would hold (``0.05``, ``"5%"``).
        sample: what the model is called with: a tuple is its arguments, a dict its keyword
            arguments, anything else its one argument. It should be the largest that training will
            bring, and the model in the mode in which it will be trained. The model is called a few
            times, and of that no trace is left.

    Returns:
        A :class:`Division`.

    Raises:
        BudgetError: the budget is too small; the message names the least.
        CellError: there is nothing to swap, or a module cannot be kept to a budget.
        UnitError: the memory cannot be read.

    Example:
        >>> model = nn.Sequential(nn.LSTM(8, 8), nn.Identity())
        >>> division = budget(model, "20%", torch.randn(100, 4, 8))
        >>> share = division.shares["0"]
        >>> share.budget_bytes == share.ordinary_bytes // 5 == model[0].memory
        True
    """
    parse_memory(memory)
    _check(model)
    order = called_in_turn(model, sample)
    refused = order.refusals() if order else {}
    for apart in (False, True):  # the second takes several times as long
        watched = _watched(model, sample, order, refused, apart=apart)
        needs = [one for one in watched if one.calls]
        if not needs:
            names = ", ".join(one.title for one in watched)
            raise CellError(
                f"the sample gave the modules to be budgeted ({names}) nothing to backpropagate: "
                "expected the model to call at least one of them, with a parameter or an input "
                "that requires a gradient"
            )
        ordinary = sum(one.used(one.ordinary_bytes) for one in needs)
        least = sum(one.used(one.minimum_bytes) for one in needs)
        total = as_bytes(memory, ordinary)
        if total >= least or not any(one.within for one in needs):
            break
    if total < least:
        raise BudgetError(_too_little(memory, total, least, ordinary, needs), least)
    shares = {}
    release(model.modules())
    for one, part in zip(needs, _divide(needs, total), strict=True):
        one.give(part)
        calls = sum(one.calls.values())
        shares[one.name] = Share(calls, part, one.minimum_bytes, one.ordinary_bytes)
    left = tuple(one.name for one in watched if not one.calls)
    return Division(model, shares, left, total, least, ordinary, refused)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CellError(f"got a {type(model).__name__}: expected a torch.nn.Module")
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise CellError(
            "the model has parameters without a shape yet: expected all of them; call the lazy "
            "model once before"
        )


def _watched(
    model: nn.Module,
    sample: Any,
    order: CallOrder | None,
    refused: dict[str, str],
    *,
    apart: bool,
) -> list[Watched]:
    """All that is to be budgeted, watched in a run on the sample, with parts of layers ``apart``
    where they can be. A chain that turns out not to be one is added to what is refused, and the
    model is run again."""
    while True:
        runs = [run for run in order.preferred if run_name(run) not in refused] if order else []
        watched: list[Watched] = [*_modules(model, runs, order)]
        for run in runs:
            within = order.runs_within([one.module for one in run]) if order else []
            watched.append(WatchedChain(run, within))
        try:
            with untouched(model), torch.enable_grad(), ExitStack() as stack:
                for one in watched:
                    one.apart = apart
                    stack.enter_context(one.watched())
                run_model(model, sample)
        except NotAChainError as refusal:
            refused[refusal.chain.name] = refusal.reason
            continue
        refused |= {one.name: _NO_USE for one in watched if one.useless}
        watched = [one for one in watched if not one.useless]
        if not watched:
            raise CellError(_nothing(model, refused))
        return watched


def _modules(
    model: nn.Module, runs: Sequence[Layers], order: CallOrder | None
) -> Iterator[WatchedModule]:
    """Every module to be budgeted, once, whatever it is called, but for layers called in turn."""
    called = [part for run in runs for one in run for part in one.module.modules()]
    taken = {id(part) for part in called}  # by a chain
    for name, m in model.named_modules():
        if isinstance(m, nn.RNNBase):
            yield WatchedModule(name, m, _title(name, model))
        elif is_chain(m) and taken.isdisjoint(map(id, m.modules())):
            layers = [layer for _, layer in named_layers(m, lambda _: True)]
            within = order.runs_within(layers) if order else []
            yield WatchedModule(name, m, _title(name, model), within)
            taken |= {id(part) for part in m.modules()}


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


def _title(name: str, model: nn.Module) -> str:
    return name or type(model).__name__


def _divide(needs: Sequence[Watched], total: int) -> list[int]:
    """Each module's least, and the same share of what it could use beyond, as large as fits."""
    fits = range(_FINENESS + 1)

    def parts(share: int) -> list[int]:
        return [one.part(share, _FINENESS) for one in needs]

    def used(share: int) -> int:
        return sum(one.used(part) for one, part in zip(needs, parts(share), strict=True))

    return parts(bisect_right(fits, total, key=used) - 1)


def _too_little(
    memory: Memory, total: int, least: int, ordinary: int, needs: Sequence[Watched]
) -> str:
    most = max(needs, key=lambda one: one.used(one.minimum_bytes))
    given = f"{memory!r} is {total} bytes ({format_bytes(total)})"
    return (
        f"the memory {given}, but the budgeted modules need at least {least} bytes "
        f"({format_bytes(least)}) together, that is {least / ordinary:.2%} of ordinary "
        f"backpropagation's; most of it is for {most.title}: raise the budget, or make the batch "
        "or the state smaller"
    )


def _row(name: str, calls: int, part: int, least: int, ordinary: int) -> tuple[str, ...]:
    sizes = [format_bytes(size) for size in (part, least, ordinary)]
    return name, str(calls), sizes[0], f"{part / ordinary:.1%}", *sizes[1:]
