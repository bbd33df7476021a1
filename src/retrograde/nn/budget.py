"""``budget``: one memory budget for all the recurrent modules and deep chains of a model.

What is given a part is every recurrent module, and every ``Sequential`` of two layers or more that
has no recurrent module in it and stands in no other such one. The model is run once on a sample.
There each of them is asked, for the very input that it is given, how little memory it can do with
(mᵢ) and how much ordinary backpropagation would take (oᵢ). All modules then get their least, and
the same share λ of what they could use beyond it,

    bᵢ = mᵢ + λ (oᵢ − mᵢ),    λ ≤ 1 the largest with    Σ over calls min(bᵢ, o of the call) ≤ total,

since what one call holds stays until it is backpropagated: the calls of a forward pass add up. The
sum is an upper bound, for only one module at a time is at its own peak.

In that run these modules record nothing, so it takes what the rest of the model takes.

Modules are replaced by :mod:`retrograde.nn.replace_modules`; here they are asked and given bytes.

Known limits: what a model changes in place and is no buffer (a list that it appends to) is not put
back; a model whose forward pass differentiates through such a module cannot be run so.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from retrograde.discover.generators import sources
from retrograde.discover.referents import find_referents
from retrograde.discover.surroundings import Ambient
from retrograde.errors import BudgetError, CellError
from retrograde.nn.cache import signature
from retrograde.nn.chain_plans import ChainFit
from retrograde.nn.replace_modules import (
    Budgeted,
    Swappable,
    is_chain,
    replace_module,
    twin,
    wrapped,
)
from retrograde.nn.weights import last_weights
from retrograde.run.transforms import is_unreal, refuse_transforms, uncompiled
from retrograde.units import Memory, aligned, as_bytes, format_bytes, parse_memory

__all__ = ["Division", "Share", "budget"]

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
        minimum_bytes: the least budget that would have done.
        ordinary_bytes: what ordinary backpropagation of these modules would hold.
    """

    model: nn.Module = field(repr=False)
    shares: dict[str, Share]
    left: tuple[str, ...]
    total_bytes: int
    minimum_bytes: int
    ordinary_bytes: int

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
        return "\n".join([aligned(rows), *left])


def budget(model: nn.Module, memory: Memory, sample: Any) -> Division:
    """Give what is deep or long in a model one memory budget, divided by what each part needs.

    Every ``torch.nn.RNN``, ``GRU``, ``LSTM`` and ``Sequential`` in the model, at any depth, becomes
    the module of this library with the same parameters, and gets its part as ``memory``; modules of
    this library get another ``memory`` (in place of a ``schedule``, too), and recurrent ones keep
    their ``backward``. A ``Sequential`` within another one, with fewer than two layers, with
    recurrent modules in it or with a ``backward`` is left as it is. All this
    is done in place, the model itself included: optimizers, hooks, references and ``state_dict``
    stay good. Nothing is changed if anything is refused.

    Args:
        model: any module with recurrent modules or Sequentials in it, or one of these.
        memory: for all calls of one forward and backward pass, beyond what the modules hand on
            (outputs, gradients): bytes (``67108864``), a size (``"64MiB"``), or a fraction of what
            ordinary backpropagation of these modules would hold (``0.05``, ``"5%"``).
        sample: what the model is called with: a tuple is its arguments, a dict its keyword
            arguments, anything else its one argument. It should be the largest that training will
            bring, and the model in the mode in which it will be trained. The model is called once,
            and of that no trace is left.

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
    watched = _find(model)
    with _untouched(model), torch.enable_grad(), ExitStack() as stack:
        for one in watched:
            stack.enter_context(one.watched())
        _call(model, sample)
    needs = [one for one in watched if one.calls]
    if not needs:
        names = ", ".join(one.title for one in watched)
        raise CellError(
            f"the sample gave the modules to be budgeted ({names}) nothing to backpropagate: "
            "expected the model to call at least one of them, with a parameter or an input that "
            "requires a gradient"
        )
    ordinary = sum(one.used(one.ordinary_bytes) for one in needs)
    least = sum(one.used(one.minimum_bytes) for one in needs)
    total = as_bytes(memory, ordinary)
    if total < least:
        raise BudgetError(_too_little(memory, total, least, ordinary, needs), least)
    shares = {}
    for one, part in zip(needs, _divide(needs, total), strict=True):
        one.twin.memory = part
        replace_module(one.module, one.twin)
        calls = sum(one.calls.values())
        shares[one.name] = Share(calls, part, one.minimum_bytes, one.ordinary_bytes)
    left = tuple(one.name for one in watched if not one.calls)
    return Division(model, shares, left, total, least, ordinary)


class _Watched:
    """A module that is to become its ``twin``, with the calls that were seen. ``calls`` counts them
    for each kind of input; ``sizes`` has each kind's least bytes and ordinary backpropagation's."""

    def __init__(self, name: str, module: Swappable, title: str) -> None:
        self.name, self.module, self.title = name, module, title
        self.twin: Budgeted = self._named(lambda: twin(module))
        self.calls: dict[Hashable, int] = {}
        self.sizes: dict[Hashable, tuple[int, int]] = {}

    @property
    def minimum_bytes(self) -> int:
        return max(least for least, _ in self.sizes.values())

    @property
    def ordinary_bytes(self) -> int:
        return max(ordinary for _, ordinary in self.sizes.values())

    def used(self, part: int) -> int:
        """What all calls take, each being given a part."""
        return sum(calls * min(part, self.sizes[kind][1]) for kind, calls in self.calls.items())

    def part(self, share: int) -> int:
        """The part that a share of what it could use comes to, in units of ``_FINENESS``."""
        least = self.minimum_bytes
        return least + max(0, self.ordinary_bytes - least) * share // _FINENESS

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have torch's forward pass of the module watched, which a derived class may wrap."""
        kind, base = type(self.module), wrapped(type(self.module))
        if base is None:
            vars(self.module)["forward"] = self._watch(self.module.forward)
            yield
            return
        run = self._watch(partial(base.forward, self.module))
        inner = type(
            base.__name__, (base,), {"forward": lambda _, *args, **more: run(*args, **more)}
        )
        self.module.__class__ = type(kind.__name__, (kind, inner), {})
        try:
            yield
        finally:
            self.module.__class__ = kind

    def _watch(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The module's forward pass, which learns what it is called with and records nothing."""

        @uncompiled
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
            used = [*given, *self._trained()]
            if not (torch.is_grad_enabled() and any(t.requires_grad for t in used)):
                return run(*args, **kwargs)
            refuse_transforms(used)
            if is_unreal(used):
                raise CellError(
                    f"{self.title}: it is on the meta device, or was given fake tensors: expected "
                    "a real model and sample, for their bytes are measured"
                )
            kind = (*map(signature, given), *_sizes(args), *_sizes(tuple(kwargs.values())))
            if kind not in self.sizes:
                self.sizes[kind] = self._named(lambda: self._ask(args, kwargs))
            self.calls[kind] = self.calls.get(kind, 0) + 1
            with torch.no_grad():
                outputs = run(*args, **kwargs)
            return _as_if_recorded(outputs, used)

        return forward

    def _trained(self) -> list[Tensor]:
        """What it may have to pass a gradient to: weights may be computed outside the module."""
        if isinstance(self.module, nn.RNNBase):
            return last_weights(self.module)
        return [*self.module.parameters()]

    def _ask(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
        """The least bytes for a call, and those of ordinary backpropagation."""
        if isinstance(self.module, nn.RNNBase):  # a hook may have just computed a weight
            now, names = vars(self.module), self.module._flat_weights_names
            vars(self.twin).update({name: now[name] for name in names if name in now})
        whole = self.twin._fit_within("100%", *args, **kwargs)
        ordinary: int = whole.ordinary_bytes
        if isinstance(whole, ChainFit):
            return min(whole.minimum_bytes, ordinary), ordinary
        try:
            least: int = self.twin._fit_within(1, *args, **kwargs).minimum_bytes
        except BudgetError as refusal:
            least = refusal.minimum_bytes
        return min(least, ordinary), ordinary

    def _named(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except CellError as refusal:
            raise CellError(f"{self.title}: {refusal}") from refusal


def _find(model: nn.Module) -> list[_Watched]:
    """Every module to be budgeted, once, whatever it is called."""
    if not isinstance(model, nn.Module):
        raise CellError(f"got a {type(model).__name__}: expected a torch.nn.Module")
    found: list[tuple[str, Swappable]] = []
    inside: set[int] = set()  # of a chain
    for name, m in model.named_modules():
        if isinstance(m, nn.RNNBase):
            found.append((name, m))
        elif is_chain(m) and id(m) not in inside:
            found.append((name, m))
            inside |= {id(part) for part in m.modules()}
    if not found:
        raise CellError(
            f"the {type(model).__name__} has nothing to budget: expected an RNN, a GRU, an LSTM or "
            "a Sequential of two layers or more in it; for cells that are called step by step, use "
            "rg.unroll with memory="
        )
    if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
        raise CellError(
            "the model has parameters without a shape yet: expected all of them; call the lazy "
            "model once before"
        )
    return [_Watched(name, m, _title(name, model)) for name, m in found]


def _title(name: str, model: nn.Module) -> str:
    return name or type(model).__name__


def _divide(needs: Sequence[_Watched], total: int) -> list[int]:
    """Each module's least, and the same share of what it could use beyond, as large as fits."""
    fits = range(_FINENESS + 1)
    share = bisect_right(fits, total, key=lambda k: sum(one.used(one.part(k)) for one in needs)) - 1
    return [one.part(share) for one in needs]


def _too_little(
    memory: Memory, total: int, least: int, ordinary: int, needs: Sequence[_Watched]
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


def _call(model: nn.Module, sample: Any) -> None:
    if isinstance(sample, dict):
        model(**sample)
    elif type(sample) is tuple:  # not one with names, such as a PackedSequence
        model(*sample)
    else:
        model(sample)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _sizes(args: tuple[Any, ...]) -> list[Hashable]:
    """What a packed sequence's bytes depend on, besides its tensors' shapes."""
    return [tuple(a.batch_sizes.tolist()) for a in args if isinstance(a, PackedSequence)]


def _as_if_recorded(outputs: Any, given: Sequence[Tensor]) -> Any:
    """Outputs that require a gradient as recorded ones do; they may be written to."""
    if isinstance(outputs, PackedSequence):
        return outputs._replace(data=_as_if_recorded(outputs.data, given))
    if not isinstance(outputs, Tensor):
        return pytree.tree_map_only(Tensor, lambda t: _as_if_recorded(t, given), outputs)
    if not (outputs.is_floating_point() or outputs.is_complex()):
        return outputs
    return _Recorded.apply(outputs.detach(), *given)  # type: ignore[no-untyped-call]


class _Recorded(torch.autograd.Function):
    """The same tensor, with a history that nothing is kept for."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *given: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise CellError(
            "the model's forward pass differentiates through a budgeted module: budget() runs it "
            "on the sample without recording that; expected a model that is differentiated by its "
            "caller"
        )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put back, after the block, what a forward pass leaves behind (rule 3): random states,
    buffers, gradients, and the attributes of all modules."""
    found = find_referents([model])
    parts = found.parts()
    devices = {t.device for t in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    chance = [source for device in devices for source in sources(device, found.generators)]
    states = [source.capture() for source in chance]
    owned = [vars(part) for part in parts]
    tables = [held for part in parts for held in (part._buffers, part._parameters, part._modules)]
    before = [(held, dict(held)) for held in (*owned, *tables)]
    flat = [part._flat_weights for part in parts if isinstance(part, nn.RNNBase)]
    weights = [(held, [*held]) for held in flat]  # which torch changes with an attribute
    buffers = tuple({id(b): b for part in parts for b in part.buffers(recurse=False)}.values())
    values = tuple(b.detach().clone() for b in buffers)
    grads = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        for held, then in before:
            held.clear()
            held.update(then)
        for listed, were in weights:
            listed[:] = were
        Ambient(torch.device("cpu"), buffers=buffers).restore(values)
        for source, state in zip(chance, states, strict=True):
            source.restore(state)
        for p, grad in grads:
            p.grad = grad
