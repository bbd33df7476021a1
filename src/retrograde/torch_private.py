"""The private names of torch that this library uses, in one place, each with its reason.

All were tested with torch 2.10.0, 2.13.0, 2.14.1 and 2.15.0. A test fails where a private name of
``torch`` stands in another file. The tables of a module, such as ``_modules``, and
``Tensor._version`` are taken for public: many libraries read them.
"""

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd, _functorch, _TorchDispatchModeKey
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _EventType,
    _ExperimentalConfig,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import has_torch_function

#: The number that the next node of this thread's graph gets. Backward, nodes of larger numbers run
#: first; so it tells what was made later, and whether a call made a node at all.
next_node: Callable[[], int] = _autograd._get_sequence_nr
#: The number of a node, and the shapes and types of its outputs, which no public attribute tells.
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
outputs_of: Callable[[Any], Any] = attrgetter("_input_metadata")
#: Calls a function at the end of the backward pass that runs.
after_backward: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
#: The number of the backward pass that runs, or −1: what a pass filled is let go at its end.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
#: Whether a transform such as ``torch.func.grad`` wraps a tensor, whose memory is then another's.
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
#: Whether hooks for saved tensors are allowed, and the pair that is on top.
saved_hooks_are_on: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
default_saved_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks
push_saved_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks
pop_saved_hooks: Callable[[], Any] = _autograd._pop_saved_tensors_default_hooks
#: Looking at a tensor must not be seen by modes and subclasses that count what is called.
has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
without_functions: Any = torch._C.DisableTorchFunction  # type: ignore[attr-defined]
without_subclasses: Any = torch._C.DisableTorchFunctionSubclass
without_autocast: Any = torch._C._DisableAutocast
without_dispatch: Any = torch._C._DisableTorchDispatch
#: What is computed again for a node has no history of its own.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
#: How many modes there are that see what is called.
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
#: Whether a transform of ``torch.func``, or the tracer, runs.
top_transform: Callable[[], Any] = _functorch.peek_interpreter_stack
is_tracing: Callable[[], bool] = torch._C._is_tracing
#: What ``torch.compile`` does with the frames of this thread; None where it follows none.
compiler_callback: Callable[[], Any] = get_eval_frame_callback
#: Where all of torch's switches are, ``_get_…`` beside ``_set_…``, which no list names.
switches = torch._C
#: Adds tensors to others in one call.
add_each: Any = torch._foreach_add_
#: The names of a recurrent module's weights in torch's order.
flat_names: Callable[[nn.RNNBase], list[str]] = attrgetter("_flat_weights_names")
#: The calls of cuDNN and oneDNN that torch's recurrent modules make.
recurrent_calls: Any = torch._VF
#: The base of torch's dropouts.
Dropout = _DropoutNd
#: The functions that a node ran, whose public forms choose a type first.
softmax, log_softmax = torch._softmax, torch._log_softmax
#: Reads the text of an operator's arguments.
schema_of: Callable[[str], Any] = torch._C.parse_schema  # type: ignore[attr-defined]
#: The kinds of a profiler's events.
EventType: Any = _EventType


def is_profiled() -> bool:
    """Return whether this thread runs a profiler."""
    return bool(_autograd._profiler_enabled())


def profile_memory(*, legacy: bool = False) -> None:
    """Start torch's profiler with memory events only; operations would slow it down. The public
    one does not leave them out. The ``legacy`` one watches a thread of its own."""
    state = ProfilerState.CPU if legacy else ProfilerState.KINETO
    config = ProfilerConfig(state, False, True, False, False, False, _ExperimentalConfig())
    if legacy:
        _autograd._enable_profiler_legacy(config)
    else:
        _autograd._prepare_profiler(config, {ProfilerActivity.CPU})
        _autograd._enable_profiler(config, {ProfilerActivity.CPU})
    _autograd._enable_record_function(False)


def stop_profiler(*, legacy: bool = False) -> Any:
    """Stop the profiler, and return its events."""
    if legacy:
        return _autograd._disable_profiler_legacy()
    _autograd._enable_record_function(True)
    return _autograd._disable_profiler()


def keeps_graph() -> bool:
    """Return whether the backward pass that runs keeps its graph; older torch does not tell."""
    asked = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return asked is None or bool(asked())


def raw_saved(node: Any, name: str) -> Any:
    """Return what a node saved as a hook packed it, or None; to read it otherwise unpacks it."""
    return getattr(node, f"_raw_saved_{name}", None)


def base_of(t: Tensor) -> Tensor:
    """Return the tensor of which one is a view that autograd knows, or the tensor itself."""
    return t if t._base is None else t._base


def address_of(t: Tensor | torch.UntypedStorage) -> int:
    """Return a number of a tensor's memory, which no other memory has while it lives."""
    return int((t.untyped_storage() if isinstance(t, Tensor) else t)._cdata)


def side_stream(t: Tensor) -> int:
    """Return the number of the stream that a tensor's device uses, which is 0 by default."""
    return int(torch._C._cuda_getCurrentRawStream(t.get_device())) if t.is_cuda else 0


def keeps_cuda_history() -> bool:
    """Return whether the user has torch note what a card allocates."""
    return bool(torch._C._cuda_isHistoryEnabled())


_PLAIN = {Tensor, nn.Parameter}  # which are looked at sooner than others
_MODES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def traces_unreal() -> bool:
    """Return whether a mode runs in which no tensor has memory."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)


def has_no_memory(t: Tensor) -> bool:
    """Return whether a tensor has no memory: it is fake, functional, or on the meta device."""
    if t.__class__ not in _PLAIN and isinstance(t, (FakeTensor, FunctionalTensor)):
        return True
    return t.is_meta or bool(torch._is_functional_tensor(t))  # type: ignore[attr-defined]


def is_batched(t: Tensor) -> bool:
    """Return whether a tensor stands for several, within ``vmap`` or a batched gradient."""
    return _functorch.is_batchedtensor(t) or _functorch.is_legacy_batchedtensor(t)


def will_run(node: Any) -> bool:
    """Return whether the backward pass that runs goes on to a node; torch tells of no leaf that it
    returns."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def sharded_modules() -> Any:
    """Return what FSDP2 notes of modules; it marks only the roots."""
    states = sys.modules.get("torch.distributed._composable_state")
    return getattr(states, "_module_state_mapping", ())


def flat_weights(module: nn.RNNBase, *, anew: bool = False) -> list[Any]:
    """Return a recurrent module's weights in torch's order; ``anew``: after it has read them."""
    if anew:
        module._update_flat_weights()  # type: ignore[no-untyped-call]
    return module._flat_weights


def give_flat_weights(module: nn.RNNBase, weights: Iterable[Tensor]) -> None:
    """Let a recurrent module run over some weights."""
    vars(module).update(_flat_weights=[*weights], _flat_weights_names=[], _flat_weight_refs=[])


def gradients_of(
    roots: Any, wanted: Any, seeds: Any, *, stays: bool = False, in_modes: bool = False
) -> Any:
    """Return gradients as ``torch.autograd.grad`` does, with None for what is not used. torch's own
    loads sympy to compare shapes. It switches modes off, unless the pass is to run ``in_modes``."""
    roots, wanted = tuple(roots), tuple(wanted)
    if not wanted or (not in_modes and has_torch_function((*roots, *wanted))):
        return torch.autograd.grad(roots, wanted, seeds, retain_graph=stays, allow_unused=True)
    return _engine_run_backward(roots, tuple(seeds), stays, False, wanted, True, False)


def lay_out(weights: Any, *options: Any) -> None:
    """Move weights into one buffer, as cuDNN wants them."""
    torch._cudnn_rnn_flatten_weight(weights, *options)
