"""Every operation of torch's own database, with samples that torch's tests use.

Each stands between cheap operations, under a lean tape and as a layer of a chain within its least
budget. Outputs, gradients and errors are those of ordinary autograd.
"""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import retrograde as rg
from retrograde.models.lean import recipes, tape
from retrograde.models.rows import rest_of_model as elsewhere

_SAMPLES = 2  # of each operation; torch's first ones are the most different
_FEWEST = 500  # passes that let something go
_PARTS = 10  # in which all operations are tried


@pytest.fixture
def op_db():
    """The database; importing it forbids, in the whole process, to set some of torch's flags."""
    pytest.importorskip("expecttest", reason="torch's database of operations needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads of max_unpool3d may write to one element, in any order
    yield op_db
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _everything(monkeypatch):
    """Let everything go that may be."""
    monkeypatch.setattr(tape, "LEAST_BYTES", 1)
    monkeypatch.setattr(tape, "LEAST_PART", 0)
    monkeypatch.setattr(tape, "WORTH", 1e9)
    monkeypatch.setattr(recipes, "START_BYTES", 0)


def _norm(t):
    return functional.layer_norm(t, t.shape[-1:]) * 0.5 + t if t.dim() and t.numel() else t + 0


def _pieces(t):
    flat = t.reshape(-1)
    return torch.cat([flat * 2, flat.exp()])[: t.numel()].view(t.shape).div(2)


_CHEAP = {
    "silu": lambda t: functional.silu(t) + t,
    "relu in place": lambda t: (t * 1.25).relu_(),
    "norm": _norm,
    "softmax": lambda t: functional.softmax(t, -1) + t if t.dim() else t + 0,
    "dropout": lambda t: functional.dropout(t, 0.3),
    "cast": lambda t: t.to(torch.float64).mul(1.5).to(t.dtype).div_(1.5),
    "pieces": _pieces,
    "exp": lambda t: t.exp().sqrt().log().mul(2),
}


def _is_real(value):
    return isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()


def _train(call, sample, cheap, way):
    """The loss and the gradients of one pass, or its error; and whether something was let go."""
    torch.manual_seed(0)
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [
        t.detach().clone().requires_grad_(t.requires_grad) if _is_real(t) else t for t in leaves
    ]
    wanted = [t for t in leaves if _is_real(t) and t.requires_grad]

    def forward():
        given = [cheap(t) if _is_real(t) and t.requires_grad else t for t in leaves]
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        del given
        found = [t for t in pytree.tree_leaves(call(first, *args, **kwargs)) if _is_real(t)]
        del first, args, kwargs
        loss = torch.zeros(())
        while found:  # no result lives longer than it is used
            t = cheap(found.pop(0))
            loss = loss + (t * torch.linspace(0.5, 1.5, t.numel()).to(t.dtype).view(t.shape)).sum()
        return loss

    try:
        with way() as context:
            loss = forward()
        return [loss, *torch.autograd.grad(loss, wanted, allow_unused=True)], context
    except Exception as error:
        return type(error), None


def _equal(found, expected):
    if isinstance(found, type) and isinstance(expected, type):
        return issubclass(found, expected)
    if isinstance(found, type) or isinstance(expected, type):
        return False
    pairs = [*zip(found, expected, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return all(a is None or _nan_equal(a, b) for a, b in pairs)


def _nan_equal(a, b):
    same = (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
    return same and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("turn", "dtype"),
    [
        (0, torch.float32),
        (3, torch.bfloat16),
        pytest.param(0, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.quick(1, every=8)
def test_every_operation_of_torch(op_db, turn, dtype, part):
    kinds = itertools.cycle([*_CHEAP.values()])
    next(itertools.islice(kinds, turn, turn), None)  # begins at another one
    lean = 0
    for op in op_db[part::_PARTS]:
        if not op.supports_autograd or dtype not in op.supported_backward_dtypes("cpu"):
            continue
        samples = op.sample_inputs("cpu", dtype, requires_grad=True)
        calls = [call for call in (op, op.inplace_variant) if call is not None]
        for number, sample in zip(range(_SAMPLES), samples, strict=False):
            for call in calls:
                given = call, sample, next(kinds)
                expected, _ = _train(*given, contextlib.nullcontext)
                found, context = _train(*given, rg.lean)
                lean += context is not None and bool(context.let_go_bytes)
                assert _equal(found, expected), (op.name, number, call is op)
    assert lean > _FEWEST / _PARTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.quick(1, every=3)
def test_nodes_that_hand_on_a_gradients_memory_are_known(op_db, part):
    """RestOfModel, what waits is counted by the memory that it may lie in."""
    seen = 0
    for op in op_db[part::_PARTS]:
        if not op.supports_autograd or torch.float32 not in op.supported_backward_dtypes("cpu"):
            continue
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
        for _, sample in zip(range(6), samples, strict=False):
            with contextlib.suppress(RuntimeError, NotImplementedError):
                result = op(sample.input, *sample.args, **sample.kwargs)
                for node, handed in _handed_on(pytree.tree_leaves(result)):
                    seen += 1
                    assert elsewhere.hands_on(node, handed), (op.name, node.name(), handed)
    assert seen > 10


def _handed_on(results):
    """Yield the nodes behind some results, and which of their inputs get the given memory."""
    pending = [t.grad_fn for t in results if isinstance(t, Tensor) and t.grad_fn is not None]
    done = set()
    while pending:
        if (node := pending.pop()) in done or "Backward" not in node.name():
            continue
        done.add(node)
        pending += [inner for inner, _ in node.next_functions if inner is not None]
        with contextlib.suppress(Exception):  # a node that wants more than plain gradients
            given = [torch.randn(*like.shape, dtype=like.dtype) for like in node._input_metadata]
            found = node(*given)
            memory = {t.untyped_storage().data_ptr() for t in given if t.numel()}
            for at, t in enumerate(found if isinstance(found, tuple) else (found,)):
                if type(t) is Tensor and t.numel() and t.untyped_storage().data_ptr() in memory:
                    yield node, at


def test_complex_numbers_are_kept():
    """torch divides complex numbers in place to other bits than out of place."""
    torch.manual_seed(0)
    x, z = torch.randn(3, 5, dtype=torch.complex64), torch.randn(5, dtype=torch.complex64)
    x.requires_grad_()
    z.requires_grad_()
    found = []
    for way in (contextlib.nullcontext, rg.lean):
        with way():
            loss = (x * 1).div_(z).exp().sqrt().log().abs().sum()
        found += torch.autograd.grad(loss, x)
    assert found[0].equal(found[1])


def test_memory_with_versions_of_its_own():
    """kron saves its argument through a tensor that counts its changes anew."""
    x = torch.randn(4, 6, requires_grad=True)
    found = []
    for way in (contextlib.nullcontext, rg.lean):
        with way():
            loss = torch.kron((x * 2).relu_(), (x * 3).relu_()).exp().sum()
        found += torch.autograd.grad(loss, x)
    assert found[0].equal(found[1])


class _Layer(nn.Module):
    def __init__(self, call, *args, **kwargs):
        super().__init__()
        self.call, self.args, self.kwargs = call, args, kwargs

    def forward(self, x):
        return self.call(x, *self.args, **self.kwargs)


def _sum(found):
    """A number from all tensors of a result."""
    real = (t for t in pytree.tree_leaves(found) if _is_real(t))
    parts = (functional.gelu(t) * torch.linspace(0.5, 1.5, t.numel()).view(t.shape) for t in real)
    return sum((part.sum() for part in parts), torch.zeros(()))


#: What these write to, besides what they return, is no buffer of a module here.
_REFUSED = {"batch_norm", "native_batch_norm", "_batch_norm_with_update", "instance_norm"}
_REFUSED |= {"_native_batch_norm_legit"}
_REFUSED |= {"ctc_loss"}  # it saves memory that it never writes, so reruns differ


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(2 * _PARTS))
@pytest.mark.quick(1, every=5)
def test_every_operation_as_a_layer(op_db, part):
    """The chain ends in a number, as one does whose last layer is a loss."""
    tried = 0
    for op in op_db[part :: 2 * _PARTS]:
        if not op.supports_autograd or torch.float32 not in op.supported_backward_dtypes("cpu"):
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=True)))
        if not _is_real(sample.input) or op.name.split(".")[-1] in _REFUSED:
            continue
        args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (sample.args, sample.kwargs))
        for call in filter(None, (op, op.inplace_variant)):
            found = []
            net = rg.Sequential(nn.SiLU(), _Layer(call, *args, **kwargs), _Layer(_sum))

            def train(memory, net=net, sample=sample):
                net.memory = memory
                torch.manual_seed(0)
                x = sample.input.detach().clone().requires_grad_()
                loss = net(x)
                return [loss, *torch.autograd.grad(loss, x)]

            try:
                found.append(train(None))
            except (RuntimeError, TypeError):  # it has no such form, or takes no such input
                continue
            try:
                found.append(train("1%"))
            except rg.BudgetError as refusal:
                found.append(train(refusal.minimum_bytes))
            assert _equal(*found), op.name
            tried += 1
    assert tried > 300 / (2 * _PARTS)
