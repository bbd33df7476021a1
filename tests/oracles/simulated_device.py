"""A device that a machine without a GPU can compute on, strict where CUDA is strict or slow.

It is torch's PrivateUse1 device under the name ``chip``. Its tensors wrap tensors in the
processor's memory, and every operation on one of them comes by :func:`_run`, which

- refuses operands on two devices, as CUDA does;
- counts what would be launched, by name: views and empty tensors are free;
- notes what would wait for the device: ``.item()``, ``.cpu()``, ``nonzero``, ``torch.equal``;
- notes what would be uploaded from pageable memory.

torch's recurrent layers are one launch, by the rules of cuDNN: at most 65,535 steps, no backward
pass unless ``train``, and a copy of weights that do not lie in its layout. Triton's kernels are
replaced by their plain references, one launch each, three for a scan, and one for 32 steps of a
wide sweep. Allocations are those of
the processor's memory, which the library's measurements are told to take for the device's.

*What this does not prove:* that Triton's kernels compile and compute (``tests/kernels`` does), what
cuDNN allocates and how it rounds, order between streams, seconds, CUDA's own generators and its
caching allocator. The library sees a device that is not the CPU; what it asks of ``torch.cuda``
itself is not run.
"""

import sys
import traceback
import types
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.backends import cudnn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import retrograde.kernels.cuda
from retrograde.kernels import cells, launched, sweep
from retrograde.kernels.cells import Slopes
from retrograde.recurrent import vendor
from retrograde.sizes import allocations

torch.utils.rename_privateuse1_backend("chip")
CHIP = torch.device("chip", 0)
SOURCE = "src/retrograde/"
CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
aten = torch.ops.aten

WAITS = {
    *(aten._local_scalar_dense, aten.nonzero, aten.equal, aten.is_nonzero, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.repeat_interleave, aten.bincount),
}
FREE = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    *(aten.detach, aten._unsafe_view, aten.lift_fresh, aten.alias, aten.set_, aten.is_pinned),
}
COPIES = {aten._to_copy, aten.copy_, aten._copy_from}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Book:
    """What a simulated device was asked to do since it was last cleared."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.launches, self.waits, self.uploads = Counter(), [], []
        self.calls, self.copied_weights = [], 0

    def wait(self, function):
        """Note an operation that waits for the device, if the library asks for it, and where."""
        ours = [f for f in traceback.extract_stack() if SOURCE in f.filename]
        where = f"{ours[-1].filename.split(SOURCE)[-1]}:{ours[-1].lineno}" if ours else ""
        if ours:
            self.waits.append(f"{function} in {where}")

    @property
    def launched(self):
        """Launches in all."""
        return sum(self.launches.values())


BOOK = Book()


class OnChip(torch.Tensor):
    """A tensor on the simulated device; its numbers are in ``inner``."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CHIP,
        )

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def tolist(self):
        BOOK.wait("tolist")
        return self.inner.tolist()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    def __repr__(self):
        return f"OnChip({self.inner})"


class _Everything(TorchDispatchMode):
    """Makes tensors on the device where a device is named and no tensor is given."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def unwrap(tree):
    """Tensors of the device as those that hold their numbers."""
    return pytree.tree_map(lambda t: t.inner if isinstance(t, OnChip) else t, tree)


def _run(function, args, kwargs):
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours = [t for t in tensors if isinstance(t, OnChip)]
    packet, named = function.overloadpacket, kwargs.get("device")
    there = bool(ours) if named is None else torch.device(named) == CHIP
    there = there or (named is not None and torch.device(named).type == CHIP.type)
    if not ours and not there:
        return function(*args, **kwargs)
    _note(function, packet, tensors, ours, there, args)
    known = {id(t.inner): t for t in ours}
    given = unwrap(kwargs)
    if named is not None:
        given["device"] = torch.device("cpu")
    if given.get("pin_memory"):
        given["pin_memory"] = False
    found = function(*unwrap(args), **given)
    if packet in COPIES and packet is not aten._to_copy:
        return args[0]
    if not there:
        return found.clone() if any(found is t.inner for t in ours) else found
    for t in tensors:
        if not isinstance(t, OnChip) and found is t:
            found = found.clone()  # .to(device) of a tensor in the processor's memory
    return _known(found, known)


def _known(tree, known):
    """Tensors as those of the device; what was given is itself."""

    def one(t):
        if isinstance(t, OnChip):
            return t
        return known[id(t)] if id(t) in known else OnChip(t)

    return pytree.tree_map(lambda t: one(t) if isinstance(t, torch.Tensor) else t, tree)


def _note(function, packet, tensors, ours, there, args):
    strangers = [t for t in tensors if not isinstance(t, OnChip)]
    if packet in COPIES:
        down = not there or (packet is not aten._to_copy and not isinstance(args[0], OnChip))
        if ours and down:
            BOOK.wait(function)
        elif strangers:
            BOOK.uploads.append(tuple(strangers[0].shape))
    elif packet in INDEXED:
        indices = [t for t in pytree.tree_leaves(args[1]) if isinstance(t, torch.Tensor)]
        if any(t.dtype in (torch.bool, torch.uint8) for t in indices):
            BOOK.wait(function)
    elif packet not in FREE and any(t.dim() for t in strangers):
        shapes = [(tuple(t.shape), str(t.device)) for t in tensors]
        raise RuntimeError(f"{function}: expected all tensors to be on one device, got {shapes}")
    if packet in WAITS:
        BOOK.wait(function)
    if not (packet in FREE or function.is_view):
        BOOK.launches[packet.__name__] += 1


def kernel(name, reference, launches=1):
    """A kernel of the library's own on the device, by its plain reference."""

    def launch(*args, **kwargs):
        given = pytree.tree_leaves([_parts(a) for a in args])
        assert all(isinstance(t, OnChip) for t in given if isinstance(t, torch.Tensor)), name
        BOOK.launches[name] += launches
        known = {id(t.inner): t for t in given if isinstance(t, OnChip)}
        with _disable_current_modes():
            found = reference(*map(_inner, args), **kwargs)
        if isinstance(found, Slopes):
            return found.map(lambda t: _known(t, known))
        return _known(found, known)

    return launch


def wide_sweep(hidden):
    """A wide layer's sweep by the plain one: a launch a step, of which a graph makes 32 in one."""
    hidden.new_empty(7, dtype=torch.int64)  # a table

    def run(slopes, dy, g):
        launches = 2 + -(-(len(slopes.gates) + 1) // 32)
        return kernel("steps", sweep.sweep, launches)(slopes, hidden, dy, g)

    return run


def _parts(a):
    return list(vars(a).values()) if isinstance(a, Slopes) else a


def _inner(a):
    return a.map(unwrap) if isinstance(a, Slopes) else unwrap(a)


class _Layers(torch.autograd.Function):
    """Recurrent layers as cuDNN runs them."""

    @staticmethod
    def forward(ctx, run, train, *tensors):
        leaves = [t.inner.detach().requires_grad_(t.requires_grad) for t in tensors]
        ctx.train, ctx.leaves = train, leaves
        with torch.set_grad_enabled(train), _disable_current_modes():  # what it would reserve
            found = run(*leaves)
        if train:
            ctx.save_for_backward(*map(OnChip, found))  # which autograd releases in time
        return tuple(OnChip(t.detach()) for t in found)

    @staticmethod
    def backward(ctx, *gradients):
        if not ctx.train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        BOOK.launches["backward of layers"] += 1
        wanted = [t for t in ctx.leaves if t.requires_grad]
        roots = unwrap(ctx.saved_tensors)
        given = [torch.zeros_like(r) if g is None else g.inner
                 for r, g in zip(roots, gradients, strict=True)]  # fmt: skip
        with _disable_current_modes():
            keeps = torch._C._autograd._get_current_graph_task_keep_graph()
            found = iter(torch.autograd.grad(roots, wanted, given, retain_graph=keeps))
        return None, None, *(OnChip(next(found)) if t.requires_grad else None for t in ctx.leaves)


def layers(name, plain):
    """``torch._VF.lstm`` and the others, with the device's own form."""

    def call(x, *rest):
        if not isinstance(x, OnChip):
            return plain(x, *rest)
        rest = list(rest)
        packed = isinstance(rest[0], torch.Tensor) and isinstance(rest[1], torch.Tensor | tuple)
        sizes = rest.pop(0) if packed else None
        state, weights, *options = rest
        states = list(state) if name == "lstm" else [state]
        count, train = options[1], options[3]
        length = len(x) if sizes is None else len(sizes)
        BOOK.calls.append((length, train, torch.is_grad_enabled()))
        BOOK.launches["layers"] += 1
        if length > vendor.MOST_STEPS:
            raise RuntimeError(f"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED, of {length} steps")
        BOOK.copied_weights += not in_layout(weights)

        def run(x, *others):
            h, w = others[: len(states)], others[len(states) :]
            lead = [x] if sizes is None else [x, sizes]
            return plain(*lead, tuple(h) if name == "lstm" else h[0], list(w), *options)

        assert count
        return _Layers.apply(run, train, x, *states, *weights)

    return call


def in_layout(weights):
    """Whether weights lie in one buffer as cuDNN has them: all matrices, then all biases."""
    ordered = sorted(weights, key=lambda w: w.dim() == 1)
    at, memory = 0, weights[0].inner.untyped_storage()
    for w in ordered:
        alike = w.inner.untyped_storage().data_ptr() == memory.data_ptr()
        if not alike or w.inner.storage_offset() != at:
            return False
        at += w.numel()
    return memory.nbytes() == at * weights[0].itemsize


def flatten_weights(weights, *_):
    """``torch._cudnn_rnn_flatten_weight``: moves weights into one buffer, in its layout."""
    ordered = sorted(weights, key=lambda w: w.dim() == 1)
    buffer, at = unwrap(ordered[0]).new_empty(sum(w.numel() for w in ordered)), 0
    BOOK.launches["flatten"] += 1
    for w in ordered:
        part = buffer[at : at + w.numel()].view(w.shape)
        part.copy_(w.inner.detach())
        w.inner, at = part, at + w.numel()
    return OnChip(buffer)


def place(module):
    """Move a module to the device, recurrent layers with their weights in layout."""
    module.to(CHIP)
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):
            flatten_weights([p.data for p in part._flat_weights])
            _adopt(part)
    return module


def _adopt(module):
    """``.data`` is another wrapper, so the parameters are told where their numbers are now."""
    weights = module._flat_weights
    shared = [p.detach() for p in weights]
    flatten_weights(shared)
    for p, other in zip(weights, shared, strict=True):
        p.inner = other.inner


class _Registered:
    library = None


def _register():
    """Tell torch of the device, once a process."""
    if _Registered.library is not None:
        return
    # The engine starts a thread for each device when it is first used; ours needs none.
    torch.ones((), requires_grad=True).backward()
    _setup_privateuseone_for_python_backend(CHIP.type)
    torch.chip.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size, stride, **options):
        inner = torch.empty_strided(size, stride, dtype=options.get("dtype"), device="cpu")
        return OnChip(inner)

    def copy_from(source, into, non_blocking=False):
        unwrap(into).copy_(unwrap(source))
        return into

    # torch.tensor(values, device=) goes past every mode.
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    _Registered.library = library


@contextmanager
def simulated():
    """Within it there is a device ``chip``; yields its :class:`Book`."""
    _register()
    triton = types.ModuleType("retrograde.kernels.cuda.launch")
    triton.sweep, triton.scan = kernel("sweep", sweep.sweep), kernel("scan", sweep.scan, 3)
    triton.wide_sweep, triton.forward = wide_sweep, kernel("forward", launched.forward)
    triton.gru_slopes = kernel("slopes", cells.gru_slopes)
    triton.lstm_slopes = kernel("slopes", cells.lstm_slopes)
    found = retrograde.kernels.kernels

    def kernels(device, dtype, size):
        return found("cuda" if device == CHIP.type else device, dtype, size)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setitem(sys.modules, triton.__name__, triton)
        patch.setattr(retrograde.kernels.cuda, "launch", triton, raising=False)
        for module in [m for n, m in sys.modules.items() if n.startswith("retrograde.")]:
            if getattr(module, "kernels", None) is found:
                patch.setattr(module, "kernels", kernels)
        for name in CELLS:
            plain = getattr(torch._VF, name)
            patch.setattr(torch._VF, name, layers(name, plain), raising=False)
        patch.setattr(torch, "_cudnn_rnn_flatten_weight", flatten_weights)
        patch.setattr(cudnn, "is_acceptable", lambda t: isinstance(t, OnChip))
        patch.setattr(allocations, "_on", lambda _, events: [e for e in events if e.place == "cpu"])
        found.cache_clear()
        stack.callback(found.cache_clear)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Everything())
        BOOK.clear()
        yield BOOK
