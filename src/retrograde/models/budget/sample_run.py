"""A run of a model on a sample, which finds the calls of its modules and the bytes of each.

In this run the modules that will get a budget record nothing, so it takes only the memory of the
rest of the model. The run leaves no trace.
"""

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from retrograde.errors import NotExactError, RetrogradeError
from retrograde.models.budget.call_order import CallOrder, ModuleCall, noted
from retrograde.models.rows.arguments import Arguments, tensors_in, unflatten
from retrograde.models.rows.phases import as_accumulated
from retrograde.models.rows.rest_of_model import FILLS, Filling, RestOfModel, draw, filling
from retrograde.models.rows.row_forward import released
from retrograde.replay.generators import sources
from retrograde.replay.referents import find_referents
from retrograde.replay.surroundings import Surroundings, Values, muted_modules
from retrograde.run.core import hooked
from retrograde.run.transforms import hooks_of_all
from retrograde.sizes.allocations import measure
from retrograde.sizes.ordinary import expanded
from retrograde.torch_private import flat_weights, gradients_of

if TYPE_CHECKING:
    from retrograde.models.budget.watched import Watched


def called_in_turn(model: nn.Module, sample: object) -> CallOrder:
    """Return the calls of a model on a sample, with its preferred runs; none if it raises."""
    model = getattr(model, "_orig_mod", model)  # if it is compiled
    try:
        order, draws = _noted(model, sample)
    except Exception as error:  # the run that measures has gradients, and may not raise it again
        none = CallOrder(ModuleCall("", model))
        none.refused = {type(model).__name__: f"raises without gradients: {error!r}"}
        return none
    for fill in FILLS if draws else ():  # some layers may be left out by chance
        other, _ = _noted(model, sample, fill)
        order = other if len(other.every) > len(order.every) else order
    order.preferred = order.runs()
    return order


def _noted(model: nn.Module, sample: object, fill: float | None = None) -> tuple[CallOrder, bool]:
    """Return the calls of a model on a sample, and whether it draws numbers by which it may decide.
    These are as near to ``fill`` as they can be, if that is given."""
    with released(model), untouched(model) as values, _eager():
        draw(fill)
        numpy: Any = np.random.get_state
        before = random.getstate(), numpy()[2]
        with Filling(fill) as watch, noted(model) as top:
            run_model(model, sample)
        torch.clear_autocast_cache()  # older torch would use its casts, which have no gradient
        python = before != (random.getstate(), numpy()[2])
        leaves = [slot for slot, *_ in values.changed()]
        return CallOrder(top, fill, leaves), watch.drawn > 0 or python


@contextmanager
def _eager() -> Iterator[None]:
    """Switch off compilation and warnings within a block."""
    is_loaded = "torch._dynamo" in sys.modules
    eager: Any = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
    with warnings.catch_warnings(action="ignore"), eager:
        yield


def run_model(model: nn.Module, sample: object) -> Any:
    """Call a model on a sample: a tuple is its arguments, a dict its keyword arguments. A cache in
    it is given as a copy, so that it does not grow with every run."""
    for t in tensors_in(sample):
        if t.layout is torch.strided and t.numel() and not t.untyped_storage().nbytes():
            raise NotExactError(
                f"the model released the memory of its sample, a tensor {tuple(t.shape)}, as "
                "reversible layers do: expected a model that can be called on it several times; "
                "have it keep its input (torch_geometric: disable=True), or give it no budget"
            )
    arguments = Arguments((sample,))
    (sample,), _ = unflatten(arguments.leaves, arguments.spec)
    try:
        if isinstance(sample, dict):
            return model(**sample)
        if type(sample) is tuple:  # not a named tuple, such as a PackedSequence
            return model(*sample)
        return model(sample)
    except (TypeError, AttributeError) as error:
        if type(sample) in _GIVEN:
            error.add_note(f"The model was given {_GIVEN[type(sample)]}.")
        raise


_GIVEN: dict[type, str] = {
    tuple: "the entries of the sample, a tuple, as its arguments",
    dict: "the entries of the sample, a dict, as its keyword arguments",
    list: "the sample, a list, as its one argument",
}


def run_watched(
    model: nn.Module, sample: object, fill: float | None, parts: "Sequence[Watched]"
) -> RestOfModel:
    """Run a model and watch its parts. Return what the rest of it holds, beside its parameters, its
    input and its output: for its backward pass, or for later while a part runs. Masks and the like,
    which rows are given, are among it: a dropped call holds its arguments."""
    rest = RestOfModel(fill)
    hooks = torch.autograd.graph.saved_tensors_hooks(rest.pack, lambda t: t)
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.watched(rest))
        draw(fill)
        with hooked("the model"), hooks, rest:
            output = run_model(model, sample)
    rest.finish([*model.parameters(), *model.buffers(), *tensors_in(sample)], tensors_in(output))
    return rest


def bytes_of_a_pass(model: nn.Module, sample: object, fill: float | None) -> int:
    """Return the working bytes of a pass, which draws ``fill`` if it is given; 0 if it raises."""
    weights = [p for p in model.parameters() if p.requires_grad]
    wanted = [*weights, *(t for t in tensors_in(sample) if t.requires_grad)]
    if not wanted:
        return 0

    def both_ways() -> Any:
        torch.clear_autocast_cache()  # of an earlier pass
        outputs = [t for t in tensors_in(run_model(model, sample)) if t.requires_grad]
        torch.clear_autocast_cache()  # as at the end of a context, in which backward() is not
        ones = tuple(map(expanded, outputs))
        return outputs, gradients_of(outputs, wanted, ones, in_modes=fill is not None)

    try:
        muted, alike = muted_modules([*model.modules()]), as_accumulated(weights)
        with untouched(model), filling(fill), _eager(), torch.enable_grad(), muted, alike:
            return measure(both_ways).working_bytes
    except Exception as error:  # a model may allow only backward(), for example
        if type(error) is not RetrogradeError:
            return 0
        if fill is None:  # a rerun computes something else
            raise
        return bytes_of_a_pass(model, sample, None)  # reruns on other threads drew otherwise


@contextmanager
def untouched(model: nn.Module) -> Iterator[Values]:
    """Restore, after the block, everything that a forward pass changes in a model (rule 3). These
    are random states, buffers, gradients, hooks, and the attributes of all modules, which the block
    gets as they were."""
    referents = find_referents([model, *hooks_of_all()])
    modules = referents.parts()
    devices = {t.device for t in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    chance = dict.fromkeys(s for device in devices for s in sources(device, referents.generators))
    weights = [(w := flat_weights(m), [*w]) for m in modules if isinstance(m, nn.RNNBase)]
    buffers = tuple({id(b): b for m in modules for b in m.buffers(recurse=False)}.values())
    grads = [(p, p.grad) for p in model.parameters()]
    tables = (table for m in modules for name, table in vars(m).items() if name.endswith("_hooks"))
    hooks = [(table, {**table}) for table in tables if isinstance(table, dict)]
    surroundings = Surroundings(torch.device("cpu"), tuple(chance), buffers)
    try:
        with surroundings.without_trace(), ExitStack() as stack:
            stack.callback((values := Values(referents)).restore)
            yield values
    finally:
        for listed, were in weights:
            listed[:] = were  # torch changes them with an attribute
        for table, had in hooks:
            table.clear()
            table.update(had)
        for p, grad in grads:
            p.grad = grad
