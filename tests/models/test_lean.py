"""The lean tape: the same bits, less memory, and whatever a caller may do beside it."""

import copy
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from oracles.autocast import run_or_skip
from oracles.drawn_graphs import train
from oracles.lean_models import OTHERS, OWN, build
from oracles.processes import leave, spawn
from retrograde.kernels.cpu.masks import packed, unpack_into
from retrograde.models.lean import lean as lean_module
from retrograde.models.lean import recipes, tape
from retrograde.models.lean.cheap import CHEAP


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let small values go too."""
    monkeypatch.setattr(tape, "LEAST_BYTES", 256)
    monkeypatch.setattr(recipes, "START_BYTES", 0)


class Ordinary:
    """Not a lean pass."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def mlp(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), *(middle or [nn.GELU()]), nn.Linear(64, 16))


def gradients(model, x, way=Ordinary, loss_of=lambda y: y.square().mean()):
    """The gradients of one pass, and its context."""
    torch.manual_seed(1)
    model.zero_grad()
    with way() as context:
        loss = loss_of(model(x))
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], context


def check(model, x, gone=True, **options):
    """Compare a pass with ordinary autograd, and return its context."""
    expected, _ = gradients(copy.deepcopy(model), x, **options)
    found, context = gradients(model, x, rg.lean, **options)
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))
    assert gone is None or bool(context.let_go_bytes) == gone
    return context


def peak(model, x, way):
    return rg.measure(lambda: gradients(model, x, way)).working_bytes


# ---------------------------------------------------------------------------------------------
# Operations


class Apply(nn.Module):
    """An operation between two products, after one that gives the tape some credit."""

    def __init__(self, function):
        super().__init__()
        self.function, self.before = function, mlp(nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.first, self.last = nn.Linear(16, 64), nn.Linear(128, 16)
        self.weight, self.bias = nn.Parameter(torch.rand(64)), nn.Parameter(torch.rand(64))

    def forward(self, x):
        y = self.function(self.first(self.before(x)), self)
        return functional.linear(y, self.last.weight[:, : y.shape[-1]].to(y.dtype)).float()


OPERATIONS = {
    "Gelu": [
        lambda x, m: functional.gelu(x),
        lambda x, m: functional.gelu(x, approximate="tanh"),
    ],
    "Silu": [
        lambda x, m: functional.silu(x),
        lambda x, m: functional.silu(x.clone(), inplace=True),
    ],
    "Relu": [lambda x, m: functional.relu(x * m.weight), lambda x, m: (x * m.weight).relu_()],
    "LeakyRelu": [lambda x, m: functional.leaky_relu(x, 0.3)],
    "PreluKernel": [
        lambda x, m: functional.prelu(x * m.weight, m.bias),
        lambda x, m: functional.prelu(x, m.weight.detach()),
    ],
    "UpsampleNearest2D": [
        lambda x, m: functional.interpolate((x * x)[None, None], scale_factor=2)[0, 0],
        lambda x, m: functional.interpolate((x * x)[None, None], size=(60, 99))[0, 0],
    ],
    "Hardtanh": [lambda x, m: functional.relu6(x)],
    "Hardswish": [lambda x, m: functional.hardswish(x)],
    "Clamp": [lambda x, m: x.clamp(-0.5, 0.5), lambda x, m: x.clamp(min=0.1)],
    "Abs": [lambda x, m: x.abs()],
    "Glu": [lambda x, m: functional.glu(x), lambda x, m: functional.glu(x, dim=-1)],
    "Sigmoid": [lambda x, m: torch.sigmoid(x * m.weight)],
    "Exp": [lambda x, m: torch.exp(x * m.weight)],
    "Sqrt": [lambda x, m: torch.sqrt(x * x)],
    "Rsqrt": [lambda x, m: torch.rsqrt(x * x + 1)],
    "Reciprocal": [lambda x, m: 1 / (x * x + 1)],
    "Pow": [lambda x, m: x**2, lambda x, m: x**3],
    "Mul": [
        lambda x, m: x * m.weight,
        lambda x, m: x.sigmoid() * 0.3,
        lambda x, m: x * torch.sin(x),
    ],
    "Div": [lambda x, m: x.sigmoid() / 3, lambda x, m: x / (m.weight + 1)],
    "Add": [lambda x, m: (x * x) + 1, lambda x, m: torch.add(x * x, m.bias, alpha=2)],
    "Sub": [
        lambda x, m: (x * x) - 2.5,
        lambda x, m: x * x - m.bias,
        lambda x, m: torch.sub(x * x, other=2),
    ],
    "Rsub": [lambda x, m: 1 - x * x, lambda x, m: 2.5 - x * x],
    "Neg": [lambda x, m: -(x * x)],
    "Softmax": [lambda x, m: functional.softmax(x * m.weight, -1)],
    "LogSoftmax": [lambda x, m: functional.log_softmax(x * x, -1)],
    "NativeLayerNorm": [
        lambda x, m: functional.layer_norm(x, (64,), m.weight, m.bias, 0.1),
        lambda x, m: functional.layer_norm(x, (64,)),
        lambda x, m: torch.layer_norm(x, (64,), m.weight, None, 1e-3),
        lambda x, m: functional.layer_norm(x, (64,), m.weight.detach(), m.bias.detach()),
    ],
    "NativeGroupNorm": [
        lambda x, m: functional.group_norm(x, 4, m.weight, m.bias, 1e-2),
        lambda x, m: functional.group_norm(x, 4, m.weight.detach(), m.bias.detach()),
        lambda x, m: functional.group_norm(x[:, :, None], 8)[:, :, 0],
    ],
    "NativeBatchNorm": [
        lambda x, m: functional.batch_norm(x, None, None, m.weight, m.bias, True),
        lambda x, m: functional.batch_norm(x, None, None, training=True),
        lambda x, m: functional.batch_norm(x, m.bias.detach(), m.weight.detach(), m.weight, m.bias),
        lambda x, m: functional.batch_norm(
            x.t().contiguous().t(), None, None, m.weight, None, True
        ),
    ],
    "NativeBatchNorm of instances": [
        lambda x, m: functional.instance_norm(x.view(6, 8, 64)).view_as(x),
        lambda x, m: functional.instance_norm(
            x.view(3, 16, 64), weight=m.weight[:16], bias=m.bias[:16]
        ).view_as(x),
    ],
    "Repeat": [lambda x, m: x.exp().repeat(2, 2)],
    "Cat": [lambda x, m: torch.cat([x * x, x.exp()], -1)],
    "Stack": [lambda x, m: torch.stack([x * x, x.exp()]).sum(0) * x],
    "Roll": [lambda x, m: (x * x).roll((1, 2), (0, 1))],
    "ToCopy": [lambda x, m: (x * x).bfloat16()],
    "Clone": [lambda x, m: torch.sigmoid(x).t().contiguous().t()],
    "UnsafeView": [lambda x, m: torch.sigmoid(x).view(-1, 4, 16).transpose(1, 2).reshape(-1, 64)],
    "Embedding": [lambda x, m: functional.embedding(torch.arange(len(x)) % 16, m.last.weight)],
    "Dropout": [
        lambda x, m: functional.dropout(x, 0.4),
        lambda x, m: functional.dropout(x, 0.1) * 2,
    ],
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("train", [True, False])
def test_an_operation_is_computed_again_in_the_same_bits(name, train):
    for function in OPERATIONS[name]:
        model = Apply(function).train(train)
        context = check(model, torch.randn(48, 16))
        assert name.split()[0] in context.let_go_bytes or name in ("Stack",), context


def test_what_the_node_of_a_normalisation_does_not_save_is_noted():
    """Which arguments these are depends on the version of torch."""
    for name in ("NativeGroupNorm", "NativeLayerNorm", "NativeBatchNorm"):
        for function in OPERATIONS[name]:
            assert name in check(Apply(function), torch.randn(48, 16)).let_go_bytes


def test_each_row_of_the_table_is_tried():
    views = {name for name, row in CHEAP.items() if not row.passes}
    elsewhere = {"NativeDropoutBackward0", "CudnnBatchNormBackward0"}  # of a GPU
    tried = {f"{name}Backward" for name in OPERATIONS}
    for name in CHEAP.keys() - views - elsewhere - {"evaluation"}:
        assert any(name.startswith(one) for one in tried), name


@pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_noise_of_a_dropout_is_made_of_its_mask(p, dtype):
    noise = torch.empty(4096, dtype=dtype).bernoulli_(1 - p).div_(1 - p)
    one = torch.ones((), dtype=dtype).div_(1 - p)
    assert torch.equal(tape._noise(packed(noise), one, noise.shape), noise)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.int64, torch.float32])
def test_a_mask_is_kept_as_bits(kind):
    for rows in (1, 8, 9, 21_847):
        mask = torch.randint(2, (rows, 3)).to(kind)
        assert packed(mask).nbytes == -(-3 * rows // 8)
        for known in (mask, mask.t()):
            found = torch.full(known.shape, 1, dtype=kind)
            assert unpack_into(packed(known), found) is found
            assert torch.equal(found, known)


@pytest.mark.parametrize("heads", [None, "weights", "no weights"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_noise_of_attention_is_let_go(heads, bf16):
    def attend(x, m):
        x = x.view(2, 24, 64)
        if heads:
            return m.heads(x, x, x, need_weights=heads == "weights")[0].flatten(0, 1)
        p = 0.2 if m.training else 0.0
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=p).flatten(0, 1)

    model = Apply(attend)
    model.heads = nn.MultiheadAttention(64, 2, dropout=0.2, batch_first=True) if heads else None
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert check(model.train(), torch.randn(48, 16)).let_go_bytes["Dropout"]
        assert "Dropout" not in check(model.eval(), torch.randn(48, 16)).let_go_bytes


@pytest.mark.filterwarnings("ignore:This overload")
@pytest.mark.parametrize("function", [torch.add, torch.sub])
def test_a_factor_that_comes_before_the_other_tensor_is_not_taken_for_it(function):
    check(Apply(lambda x, m: function(x * x, 2, m.bias.detach())), torch.randn(48, 16), gone=None)


def test_a_dropout_that_drops_nothing_leaves_the_product_before_it_alone():
    def product(x, m):
        y = functional.dropout(x, 0.3, m.training)
        return functional.dropout(y * m.last(torch.cat([y, y], -1)).repeat(1, 4), 0.3, m.training)

    model = Apply(product)
    assert "Dropout" in check(model.train(), torch.randn(48, 16)).let_go_bytes
    assert "Dropout" not in check(model.eval(), torch.randn(48, 16)).let_go_bytes


@pytest.mark.parametrize("other", ["weight", "product", "number", "scalar"])
@pytest.mark.parametrize("change", ["__imul__", "__iadd__", "__isub__", "__itruediv__", "half"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_change_in_place_by_a_wider_type_keeps_the_narrow_one(change, other, bf16):
    def narrow(x, m):
        others = {"weight": m.weight + 1, "product": x * 2 + 9, "number": 1.7}
        one = others.get(other, torch.tensor(1.7))
        y = functional.gelu(x).to(torch.float16 if change == "half" else torch.bfloat16)
        y = torch.ops.aten.mul_(y, one) if change == "half" else getattr(y, change)(one)
        return (y * torch.relu(y)).float()

    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        check(Apply(narrow), torch.randn(48, 16))


READERS = {
    "cast": lambda k: k.double().float(),
    "narrow cast": lambda k: k.bfloat16(),
    "number": lambda k: functional.relu(2.5 - k) + functional.silu(k + 1.5) * (k - 0.5),
    "norms": lambda k: functional.layer_norm(k, (64,)) * functional.group_norm(k, 4),
    "copy": lambda k: k.t().contiguous().t() * functional.softmax(k, -1) * (k * 2) ** 2,
    "pieces": lambda k: torch.cat([k, k.exp()], -1)[:, :64] * torch.stack([k, k])[1],
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_view_that_was_made_without_gradients_has_no_node_before_it(name, bf16):
    def run(x, m):
        y = torch.sigmoid(x)
        with torch.no_grad():
            keys = y.view(-1, 64)
        return x * READERS[name](keys) * torch.relu(READERS[name](keys) * m.weight)

    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        check(Apply(run), torch.randn(48, 16))


class OwnStatistics(nn.Module):
    """Normalises with buffers of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("variance", torch.ones(64))

    def forward(self, x):
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Instances(nn.InstanceNorm1d):
    """Normalises pieces of each sample."""

    def forward(self, x):
        return super().forward(x.view(-1, 16, 4)).reshape(x.shape)


NORMS = {
    "batch": lambda: nn.BatchNorm1d(64),
    "synchronous": lambda: nn.SyncBatchNorm(64),
    "own": OwnStatistics,
    "instances": lambda: Instances(16, track_running_stats=True),
    "affine instances": lambda: Instances(16, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_that_training_moves_after_an_evaluation(norm):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(nn.GELU(), nn.Linear(64, 64), NORMS[norm](), nn.ReLU())

        def forward(self, x):
            clean = self.net.eval()(x)
            return clean * self.net.train()(x + torch.arange(16.0))

    assert "Relu" in check(Branches(), torch.randn(48, 16)).let_go_bytes


def test_noise_that_is_written_after_it_was_saved():
    for inplace in (False, True):
        check(mlp(nn.RReLU(inplace=inplace), nn.GELU(), nn.RReLU()), torch.randn(48, 16))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_normalisation_takes_the_same_bits_from_its_statistics(form, dtype, affine):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, affine=affine), nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16, affine=affine), nn.ReLU(inplace=True),
        nn.Conv2d(16, 4, 3),
    )  # fmt: skip
    net, twin = net.to(dtype, memory_format=form), None
    twin = copy.deepcopy(net)
    x = torch.randn(4, 3, 14, 14, dtype=dtype).to(memory_format=form)
    context = check(net, x)
    assert context.let_go_bytes["Relu"]
    gradients(twin, x)
    gradients(twin, x)  # once in each of the deepcopy and the twin: statistics move once a pass
    gradients(net, x, rg.lean)
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


@pytest.mark.parametrize("name", [*OWN, *OTHERS])
@pytest.mark.parametrize("bf16", [False, True])
def test_models_of_many_kinds(name, bf16):
    built = build(name)
    if built is None:
        pytest.skip("transformers is not installed")
    model, loss_of = built
    if bf16:
        run_or_skip(loss_of, copy.deepcopy(model))
    for train_ in (True, False):
        found = []
        for way in (Ordinary, rg.lean):
            net = copy.deepcopy(model).train(train_)
            torch.manual_seed(1)
            with way() as context, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = loss_of(net)
            loss.backward()
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            found.append([loss.detach(), *grads, *net.buffers()])
        assert all(map(torch.equal, *found))
        assert context.let_go_bytes or name == "Field"


# ---------------------------------------------------------------------------------------------
# Drawn graphs


@pytest.mark.quick(1, every=4)
@pytest.mark.parametrize("hundred", range(10))
def test_drawn_graphs_have_the_same_bits_errors_and_memory(hundred):
    gone = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        expected, _ = train(seed, Ordinary)
        found, context = train(seed, rg.lean)
        assert type(found) is type(expected), seed
        if isinstance(found, str):
            assert found == expected
            continue
        gone += bool(context.let_go_bytes)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), seed
        sizes = [
            rg.measure(lambda way=way, seed=seed: train(seed, way, 64)).working_bytes
            for way in (Ordinary, rg.lean)
        ]
        assert sizes[1] <= sizes[0], seed
    assert gone > 25


# ---------------------------------------------------------------------------------------------
# The rules


def calls(monkeypatch):
    """Note the operations that are called again."""
    names, original = [], recipes.Recipe.open

    def noting(self):
        names.append(self.operation.name)
        return original(self)

    monkeypatch.setattr(recipes.Recipe, "open", noting)
    return names


def test_readers_share_what_is_computed_once_and_no_longer_than_they_live(monkeypatch):
    names, boxes, original = calls(monkeypatch), [], recipes.Box.__init__
    monkeypatch.setattr(
        recipes.Box, "__init__", lambda box, *a: boxes.append(weakref.ref(box)) or original(box, *a)
    )
    first, left, right = nn.Linear(16, 64), nn.Linear(64, 8), nn.Linear(64, 8)
    with rg.lean():
        y = functional.gelu(first(torch.randn(8, 16)))
        loss = (left(y) * right(y)).sum()
        del y
    loss.backward(retain_graph=True)
    assert names == ["Gelu"]
    assert any(box() is not None for box in boxes)
    loss.backward()
    assert names == ["Gelu"]
    assert all(box() is None for box in boxes)  # though the loss is alive


def test_nothing_is_held_apart_that_is_larger_than_what_is_let_go():
    def apart(width):
        def run(x, m):
            y = functional.gelu(x)  # saves x; the sum below does not
            z = x + 1
            return torch.relu(z if width == 64 else z[:, :width]) * y.mean()

        return Apply(run)

    x = torch.randn(48, 16)
    assert "Relu" in check(apart(64), x).let_go_bytes
    assert "Relu" not in check(apart(32), x).let_go_bytes


def test_a_result_that_its_node_saves_costs_a_recipe_nothing():
    """Of the sum's operands, one is held apart, and the ReLU's own node saves the other."""

    def residual(x, m):
        y = torch.tanh(x)
        return y + torch.relu(functional.linear(y, m.last.weight[:, :64].repeat(4, 1)))

    assert "Add" in check(Apply(residual), torch.randn(48, 16)).let_go_bytes


def test_what_a_recipe_takes_for_a_moment_is_covered():
    """Three products at once are two more than the gradient to come covers, without any credit."""

    def three(x, m):
        return x * m.weight + (x * m.bias + x * m.last.weight[0, :64])

    with_credit = Apply(three)
    without = copy.deepcopy(with_credit)
    without.before = nn.Identity()
    x = torch.randn(48, 16)
    assert "Add" in check(with_credit, x).let_go_bytes
    check(without, x, gone=False)
    for model in (mlp(), mlp(nn.LayerNorm(64), nn.GELU()), mlp(nn.BatchNorm1d(64), nn.ReLU(True))):
        assert peak(model, x, rg.lean) <= peak(model, x, Ordinary)


def test_dear_operations_are_not_called_again():
    for dear in (torch.tanh, torch.sin, torch.erf, lambda x: x.sigmoid() ** 1.5, torch.sinc):
        check(mlp(Call(dear)), torch.rand(8, 16), gone=False)


def test_a_recipe_that_costs_more_than_its_bytes_are_worth_is_not_used():
    def sums(count):
        def run(x, m):
            y = torch.sigmoid(x)
            for _ in range(count):
                y = y + m.bias
            return y

        return Apply(run)

    assert "Add" in check(sums(4), torch.randn(48, 16)).let_go_bytes
    assert "Add" not in check(sums(7), torch.randn(48, 16)).let_go_bytes


def test_a_chain_of_many_operations_is_cut():
    def chain(x):
        for _ in range(200):
            x = functional.silu(x)
        return x

    context = check(mlp(Call(chain)), torch.randn(8, 16))
    assert context.kept_bytes > 200 // recipes.MOST_OPERATIONS * 8 * 64 * 4


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_relu_in_place_on_a_normalisation_gains():
    model = mlp(nn.BatchNorm1d(64), nn.ReLU(inplace=True))
    assert check(model, torch.randn(8, 16)).let_go_bytes == {"Relu": 8 * 64 * 4}


def test_what_was_changed_after_it_was_saved_raises_what_autograd_raises():
    for way in (Ordinary, rg.lean):
        first, last = nn.Linear(16, 64), nn.Linear(64, 8)
        with way():
            y = functional.gelu(first(torch.randn(8, 16)))
            loss = last(y).sum()
            y.add_(1)
            del y
        with pytest.raises(RuntimeError, match=r"modified by an\s+inplace operation"):
            loss.backward()


def test_a_change_that_autograd_does_not_follow_is_kept():
    def change(x):
        y = functional.silu(x)
        with torch.no_grad():
            y.mul_(3)
        z = functional.silu(x)
        z.data.mul_(2)
        w = functional.silu(x)
        w.detach().mul_(2)
        v = functional.silu(x)
        torch._foreach_mul_([v.detach()], 2.0)
        return torch.relu(y + 1) * torch.relu(z + 2) * torch.relu(w + 3) * torch.relu(v + 1)

    torch.manual_seed(0)
    check(Apply(lambda x, m: change(x)), torch.randn(48, 16))


def test_a_parameter_that_changes_in_the_pass_is_read_before():
    def scale(x, m, change):
        y = functional.silu(x) * m.weight
        change(m.weight)
        return y * torch.relu(x * m.weight)

    def set_data(p):
        p.data = p.data * 2

    for change in (lambda p: p.data.mul_(2), set_data):
        model = Apply(lambda x, m, change=change: scale(x, m, change))
        check(model, torch.randn(48, 16), gone=None)

    def in_place(x, m):
        y = torch.relu(torch.sigmoid(x) + m.bias)
        with torch.no_grad():
            m.bias.mul_(2)
        return y

    check(Apply(in_place), torch.randn(48, 16), gone=None)


def test_a_value_of_before_may_have_changed_unseen():
    model, scale, found = mlp(), nn.Parameter(torch.rand(64)), []
    for way in (Ordinary, rg.lean):
        model.zero_grad()
        y = model[0](torch.ones(8, 16)) * scale
        alias = y.detach()
        with way():
            alias.mul_(3)
            loss = model[2](functional.gelu(mlp()[0](torch.ones(8, 16))) * torch.relu(y)).sum()
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_parameter_that_changed_raises():
    model = mlp(nn.LayerNorm(64), nn.GELU())
    with rg.lean():
        loss = model(torch.randn(8, 16)).sum()
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an\s+inplace operation"):
        loss.backward()


@pytest.mark.parametrize("late", [False, True])  # late, as on a GPU: nobody waits for a sum
@pytest.mark.parametrize("name", ["NativeLayerNorm", "NativeBatchNorm", "Gelu", "Embedding"])
def test_a_value_that_has_other_bits_when_it_is_computed_again_raises(monkeypatch, name, late):
    """Something that a recipe reads is changed between the passes, and autograd is not told."""
    if late:
        glance = recipes.glance
        monkeypatch.setattr(recipes, "glance", lambda *a: torch.tensor(glance(*a)))
    stored, numbers = [], torch.arange(16).repeat(32)
    norm = {"NativeLayerNorm": nn.LayerNorm, "NativeBatchNorm": nn.BatchNorm1d}.get(name)
    net, table = mlp(norm(64) if norm else nn.GELU()), nn.Parameter(torch.randn(16, 16))

    def forward():
        x = net[0](functional.embedding(numbers, table))
        stored.append(x.untyped_storage())
        return net[2](net[1](x)).square().mean()

    changes = {
        "Gelu": lambda: torch.empty(0).set_(stored.pop(), 0, (512, 64)).add_(1),
        "Embedding": lambda: numbers.numpy().__imul__(0),
    }
    with rg.lean() as tape:
        loss = forward()
    assert name in tape.let_go_bytes
    changes.get(name, lambda: net[1].weight.data.add_(1))()
    with pytest.raises(rg.RetrogradeError, match=rf"result of {name}, .* computed again"):
        loss.backward()


def test_a_glance_reads_every_word_in_some_turn():
    for size in (1, 7, 488, 489, 5000, 9001):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            whole = torch.zeros(size, dtype=dtype)
            for at in range(0, size, 97):
                other = whole.clone()
                other[at] = 1
                turns = range(16)
                assert any(recipes.glance(whole, n) != recipes.glance(other, n) for n in turns)


def test_what_the_caller_holds_is_not_computed_again(monkeypatch):
    names = calls(monkeypatch)
    model = mlp()
    with rg.lean() as context:
        y = functional.gelu(model[0](torch.randn(8, 16)))
        loss = model[2](y).sum()
    assert context.let_go_bytes == {}
    loss.backward()
    assert names == []


# ---------------------------------------------------------------------------------------------
# What a caller may do beside it


def test_second_derivatives():
    found = []
    for way in (Ordinary, rg.lean):
        model, x = mlp(nn.LayerNorm(64), nn.SiLU()), torch.randn(8, 16, requires_grad=True)
        torch.manual_seed(2)
        x = torch.randn(8, 16, requires_grad=True)
        with way():
            y = model(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_hooks_of_modules_and_tensors_see_what_they_see_without_it():
    seen = {way: [] for way in (Ordinary, rg.lean)}
    for way, values in seen.items():
        model = mlp()
        model[1].register_full_backward_hook(lambda m, i, o, v=values: v.extend([*i, *o]))
        model[0].register_forward_hook(lambda m, a, y, v=values: y.register_hook(v.append) and None)
        gradients(model, torch.ones(8, 16), way)
    assert all(map(torch.equal, *seen.values()))
    assert len(seen[rg.lean]) == 3


def test_threads_have_passes_of_their_own():
    model, x = mlp(nn.LayerNorm(64), nn.GELU()), torch.randn(32, 16)
    expected, _ = gradients(copy.deepcopy(model), x)
    found = {}

    def run(i):
        net = copy.deepcopy(model)
        for _ in range(20):
            found[i] = gradients(net, x, rg.lean)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert all(all(map(torch.equal, expected, grads)) for grads in found.values())
    assert len(found) == 4


def test_a_backward_pass_in_another_thread_and_two_passes_interleaved():
    model, x = mlp(), torch.randn(8, 16)
    expected, _ = gradients(copy.deepcopy(model), x, loss_of=lambda y: y.square().mean() * 2)
    model.zero_grad()
    losses = []
    for _ in range(2):
        with rg.lean():
            losses.append(model(x).square().mean())
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert all(map(torch.allclose, [p.grad for p in model.parameters()], expected))


def test_an_error_in_the_middle_ends_the_pass():
    model = rg.lean(mlp(Call(lambda x: 1 / 0)))
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(8, 16))
    with pytest.raises(ZeroDivisionError), rg.lean():
        model(torch.randn(8, 16))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.overrides._len_torch_function_stack() == 0
    check(mlp(), torch.randn(8, 16))


def test_an_inner_pass_steps_aside():
    with rg.lean() as outer, rg.lean() as inner:
        loss = rg.lean(mlp())(torch.randn(8, 16)).sum()
    loss.backward()
    assert inner.aside == "another lean pass runs"
    assert str(inner) == "ordinary autograd: another lean pass runs"
    assert outer.let_go_bytes == {"Gelu": 8 * 64 * 4}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_and_outside(reentrant):
    blocks = nn.ModuleList(mlp(nn.LayerNorm(64), nn.GELU()) for _ in range(3))

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=reentrant) if i == 1 else block(x)
            return x

    x = torch.randn(32, 16, requires_grad=True)
    check(Inside(), x)
    blocks.zero_grad()
    expected, _ = gradients(copy.deepcopy(blocks[0]), x)
    found, _ = gradients(
        Call(lambda x: checkpoint(rg.lean(blocks[0]), x, use_reentrant=reentrant)), x
    )
    assert found == []
    assert all(map(torch.equal, [p.grad for p in blocks[0].parameters()], expected))
    if not reentrant:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), rg.lean() as aside:
            pass
        assert aside.aside == "hooks of the caller's save its tensors"


def test_save_on_cpu_inside_and_outside():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = mlp(nn.LayerNorm(64), nn.GELU()), mlp()

        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                x = self.net[1](self.net[0](x))
            return self.last(self.net[3](self.net[2](x)))

    check(Inside(), torch.randn(8, 16))
    with torch.autograd.graph.save_on_cpu():
        assert "hooks of the caller" in str(gradients(mlp(), torch.randn(8, 16), rg.lean)[1])


def test_torch_func():
    model, x = mlp(), torch.randn(8, 16)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        with rg.lean() as context:
            y = torch.func.functional_call(model, parameters, x).square().mean()
        assert context.aside == "torch.func takes no hooks for saved tensors"
        return y

    found = torch.func.grad(loss)(parameters)
    expected, _ = gradients(model, x)
    assert all(map(torch.equal, found.values(), expected))
    with rg.lean(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.square().sum())(x)


def test_tensors_that_are_more_than_a_storage():
    def strange(x):
        sparse = torch.eye(64).to_sparse()
        y = torch.sparse.mm(sparse, x.t()).t()
        z = torch.complex(y, x * 2).conj()
        nested = torch.nested.nested_tensor([x, y * 1])
        both = torch.nested.to_padded_tensor(nested * 2, 0.0).sum(0)
        return (z * z.imag * (z + 1)).real + both

    check(Apply(lambda x, m: strange(x)), torch.randn(48, 16))


def test_without_gradients_it_steps_aside():
    for way in (torch.no_grad, torch.inference_mode):
        with way(), rg.lean() as context:
            mlp()(torch.randn(8, 16))
        assert context.aside == "nothing is saved without gradients"
    with rg.lean():  # a frozen part
        with torch.inference_mode():
            y = mlp()(torch.randn(8, 16)).add_(1)
        mlp()(y.clone()).sum().backward()


@pytest.mark.quick(0)
def test_compiled_parts():
    model = mlp(nn.LayerNorm(64), nn.GELU())
    compiled = torch.compile(model[1:3], backend="aot_eager")
    both = nn.Sequential(model[0], compiled, model[3], *mlp())
    x = torch.randn(8, 16)
    expected, _ = gradients(both, x)
    found, context = gradients(both, x, rg.lean)
    assert all(map(torch.equal, found, expected))
    assert context.let_go_bytes == {"Gelu": 8 * 64 * 4}
    with pytest.warns(UserWarning, match="steps aside for what torch.compile made"):
        assert rg.lean(compiled) is compiled

    @torch.compile(backend="aot_eager")
    def inside(x):
        with rg.lean():
            return model(x).square().mean()

    inside(x)
    whole = torch.compile(rg.lean(mlp()), backend="aot_eager")
    assert whole(x).shape == (8, 16)


def test_a_wrapped_model_is_the_model(tmp_path):
    model, x = mlp(nn.LayerNorm(64), nn.GELU()), torch.randn(8, 16)
    keys, expected = list(model.state_dict()), gradients(copy.deepcopy(model), x)[0]
    assert rg.lean(model) is model
    assert rg.lean(rg.lean(model)) is model
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    assert list(model.state_dict()) == keys
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    buffer = io.BytesIO(pickle.dumps(model))
    for one in (model, copy.deepcopy(model), loaded, pickle.load(buffer)):
        names = gradients(one, x)[0]
        assert all(map(torch.equal, names, expected))


def test_a_wrapped_model_lets_go(monkeypatch):
    names = calls(monkeypatch)
    gradients(rg.lean(mlp()), torch.randn(8, 16))
    assert names == ["Gelu"]


def test_a_hook_that_fails_before_a_pass_begins_ends_no_other_pass(monkeypatch):
    def fail(module, args):
        raise ZeroDivisionError

    inner = mlp()
    inner.register_forward_pre_hook(fail)
    rg.lean(inner)

    def forward(x):
        with pytest.raises(ZeroDivisionError):
            inner(x)
        return functional.silu(x)

    names = calls(monkeypatch)
    gradients(rg.lean(mlp(Call(forward))), torch.randn(8, 16))
    assert names == ["Silu"]
    assert not lean_module._running.passes


def test_wrong_inputs():
    context = rg.lean()
    with context, pytest.raises(rg.RetrogradeError, match="has begun already"):
        context.__enter__()
    with pytest.raises(rg.CellError, match=r"rg.lean\(\) takes a torch.nn.Module, or nothing"):
        rg.lean(3)
    assert str(rg.lean()) == "ordinary autograd: no pass was begun"


def test_unrolled_steps():
    cell = nn.GRUCell(16, 16)

    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.net = cell, mlp()

        def forward(self, xs):
            step = lambda x, h: (functional.gelu(self.cell(x, h)),) * 2  # noqa: E731
            ys, _ = rg.unroll(step, self.net(xs), torch.zeros(4, 16), memory="60%")
            return self.net(ys)

    check(Unrolled(), torch.randn(20, 4, 16))


def _a_rank(rank, folder, kind):
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    tape.LEAST_BYTES, recipes.START_BYTES = 256, 0
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        x, found = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)), []
        nets = []  # none is destroyed before the process is left
        for lean in (False, True):
            net = mlp(nn.LayerNorm(64), nn.GELU())
            if kind == "data":
                net = DistributedDataParallel(rg.lean(net) if lean else net)
            else:
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard

                mesh = init_device_mesh("cpu", (2,))
                for layer in net:
                    if list(layer.parameters()):
                        fully_shard(layer, mesh=mesh)
                net = fully_shard(net, mesh=mesh)
            nets.append(net)
            for _ in range(2):
                with rg.lean() if lean else Ordinary() as context:
                    loss = net(x).square().mean()
                loss.backward()
            found.append([getattr(p.grad, "_local_tensor", p.grad) for p in net.parameters()])
        assert all(map(torch.equal, *found))
        expected = {"Gelu", "NativeLayerNorm"} if kind == "data" else {"Gelu"}
        assert context.let_go_bytes.keys() == expected  # shards of parameters do not stay
        distributed.barrier()
        leave()
    finally:
        distributed.destroy_process_group()


@pytest.mark.quick(0)
@pytest.mark.parametrize("kind", ["data", "shards"])
def test_two_processes(tmp_path, kind):
    spawn(_a_rank, (tmp_path, kind), 2)


# ---------------------------------------------------------------------------------------------
# Training libraries


def test_the_trainer_of_transformers(tmp_path):
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    ids = torch.randint(0, 50, (8, 16))
    data = [{"input_ids": one, "labels": one} for one in ids]

    def trained(wrap, **options):
        torch.manual_seed(0)
        model = wrap(hf.GPT2LMHeadModel(config))
        arguments = hf.TrainingArguments(
            tmp_path, max_steps=3, report_to=[], use_cpu=True, save_strategy="no", **options
        )
        hf.Trainer(model, arguments, train_dataset=data).train()
        return list(model.parameters())

    expected = trained(lambda model: model)
    assert all(map(torch.equal, trained(rg.lean), expected))
    trained(rg.lean, gradient_checkpointing=True)


def test_the_trainer_of_lightning():
    lightning = pytest.importorskip("lightning")

    class Regressor(lightning.LightningModule):
        def __init__(self, wrap):
            super().__init__()
            self.model = wrap(mlp(nn.LayerNorm(64), nn.GELU()))

        def training_step(self, batch, index):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    def trained(wrap):
        model = Regressor(wrap)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8))
        return list(model.parameters())

    data = torch.randn(16, 16)
    assert all(map(torch.equal, trained(rg.lean), trained(lambda model: model)))


def test_what_is_a_small_part_of_what_is_kept_is_kept(monkeypatch):
    """A product that is kept comes first; then what is let go must be a good part of it."""
    wide, narrow = nn.Linear(64, 4096), nn.Sequential(nn.Linear(4096, 64), nn.GELU())
    model, x = nn.Sequential(wide, nn.Tanh(), narrow, nn.Linear(64, 8)), torch.randn(1024, 64)
    found = []
    for part in (0.0, 1.0):
        monkeypatch.setattr("retrograde.models.lean.tape.LEAST_PART", part)
        with rg.lean() as tape:
            loss = model(x).square().mean()
        loss.backward()
        found.append(
            (tape.let_go_bytes.get("Gelu", 0), [p.grad.clone() for p in wide.parameters()])
        )
        model.zero_grad()
    assert [let_go for let_go, _ in found] == [4 * 1024 * 64, 0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
