"""Transposed Jacobians of layers, and the zeros that they guarantee, held against autograd."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import retrograde as rg
from oracles.sparse import bumps, dense, guaranteed, jacobians
from retrograde.errors import ScanError, UnitError
from retrograde.scan import CSR, Affine, Dense, Diagonal, Vector, combine, transposed_jacobian
from retrograde.scan.elements import flops
from retrograde.scan.sparse.factor import full, identity
from retrograde.scan.sparse.pattern import Pattern
from retrograde.scan.sparse.rules import rule_of

DOUBLE = torch.float64

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def few(count=25):
    return settings(deadline=None, derandomize=True, max_examples=count)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def tied(*shape, seed=0):
    """Small whole numbers, many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).double()


def check_values(layer, x, seed=0):
    """Our Jacobian is autograd's, each sample's; what it was given stays as it was."""
    before = x.clone()
    torch.manual_seed(seed)
    expected = jacobians(layer, x)
    torch.manual_seed(seed)
    found = transposed_jacobian(layer, x)
    dense_found = found.to_dense().expand(len(x), -1, -1)
    assert not found.data.requires_grad
    assert found.data.dtype == x.dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(dense_found, expected, rtol=1e-12, atol=1e-12)
    return found


def check(layer, shape, x=None):
    """Values, and the pattern: nothing is missing, and nothing is in it besides."""
    layer = layer.double()
    torch.manual_seed(0)
    found = check_values(layer, normal(2, *shape) if x is None else x)
    expected = guaranteed(layer, bumps(*shape))
    assert np.array_equal(dense(found.pattern), expected), (layer, shape)
    return found


def spans(draw, count, largest):
    """A number for each dimension."""
    return tuple(draw(st.integers(1, largest)) for _ in range(count))


@st.composite
def convolutions(draw, count):
    most = (7, 4, 3)[count - 1]
    groups = draw(st.integers(1, 3))
    kernel, dilation = spans(draw, count, min(4, most)), spans(draw, count, 2)
    padding = draw(st.sampled_from(["same", "valid", "numbers", "numbers"]))
    stride = (1,) * count if padding == "same" else spans(draw, count, 5)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "numbers":
        padding = tuple(draw(st.integers(0, 2)) for _ in range(count))
    around = list(reach) if padding == "same" else [0] * count
    around = [2 * p for p in padding] if isinstance(padding, tuple) else around
    least = [max(1, 1 + r - a) for r, a in zip(reach, around, strict=True)]
    sizes = tuple(draw(st.integers(low, low + most - 1)) for low in least)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[count - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride,
        padding,
        dilation,
        groups,
        draw(st.booleans()),
    )
    return layer, (layer.in_channels, *sizes)


@few(60)
@given(convolutions(1))
def test_convolutions_of_one_dimension(drawn):
    check(*drawn)


@few(40)
@given(convolutions(2))
def test_convolutions_of_two_dimensions(drawn):
    check(*drawn)


@few(15)
@given(convolutions(3))
def test_convolutions_of_three_dimensions(drawn):
    check(*drawn)


@pytest.mark.slow
@few(600)
@given(st.sampled_from([1, 2, 3]).flatmap(convolutions))
def test_very_many_convolutions(drawn):
    check(*drawn)


def test_a_kernel_of_even_size_is_padded_more_at_the_end():
    found = check(nn.Conv1d(1, 1, 4, padding="same"), (1, 5))
    assert dense(found.pattern)[:, 0].tolist() == [True, True, True, False, False]


@few()
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 7), st.integers(1, 7))
def test_linear_layers(leading, inputs, outputs):
    check(nn.Linear(inputs, outputs), (*leading, inputs))


ACTIVATIONS = [
    nn.CELU(), nn.ELU(), nn.GELU(), nn.GELU("tanh"), nn.Hardshrink(), nn.Hardsigmoid(),
    nn.Hardswish(), nn.Hardtanh(), nn.Identity(), nn.LeakyReLU(0.1), nn.LogSigmoid(), nn.Mish(),
    nn.PReLU(), nn.PReLU(3), nn.ReLU(), nn.ReLU6(), nn.SELU(), nn.SiLU(), nn.Sigmoid(),
    nn.Softplus(), nn.Softshrink(), nn.Softsign(), nn.Tanh(), nn.Tanhshrink(),
    nn.Threshold(0.1, 2.0),
    *(kind(inplace=True) for kind in (nn.ReLU, nn.ELU, nn.SiLU, nn.Hardtanh, nn.LeakyReLU)),
]  # fmt: skip


@pytest.mark.parametrize("layer", ACTIVATIONS, ids=str)
def test_activations(layer):
    for x in (4 * normal(5, 3, 7), tied(5, 3, 7), 4 * normal(1, 3), normal(2, 3, 2, 2)):
        found = check_values(layer.double(), x)
        assert found.pattern.kind == "diagonal"


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (5, 7)),
        (nn.Dropout1d, (5, 7)),
        (nn.Dropout2d, (5, 3, 4)),
        (nn.Dropout3d, (5, 2, 3, 2)),
        (nn.AlphaDropout, (5, 7)),
        (nn.FeatureAlphaDropout, (5, 3, 2)),
    ],
)
def test_dropouts_have_the_mask_of_their_call(kind, shape, p):
    for layer in (kind(p), kind(p).eval()):
        found = check_values(layer, normal(4, *shape), seed=3)
        assert found.pattern.kind == "diagonal"
        assert (found.data == 0).any() == (layer.training and p > 0)


def test_a_dropout_in_place_has_the_mask_of_its_call():
    check_values(nn.Dropout(0.4, inplace=True), normal(4, 9), seed=3)


@st.composite
def pools(draw, count, name):
    most = (6, 4, 2)[count - 1]
    kernel, stride = spans(draw, count, 3), spans(draw, count, 4)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    options = {"padding": padding, "ceil_mode": draw(st.booleans())}
    dilation = (1,) * count
    if name == "Max":
        dilation = options["dilation"] = spans(draw, count, 2)
    else:
        options["count_include_pad"] = draw(st.booleans())
        if count > 1:
            options["divisor_override"] = draw(st.sampled_from([None, None, 3]))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    least = [max(1, 1 + r - 2 * p) for r, p in zip(reach, padding, strict=True)]
    if count == 3 and name == "Avg":  # torch wants that, whatever the padding
        least = kernel
    sizes = tuple(draw(st.integers(low, low + most)) for low in least)
    for size, k, p, d in zip(sizes, kernel, padding, dilation, strict=True):
        # torch crashes at the gradient of a window that reads no input at all.
        reads = [[o - p + i * d for i in range(k)] for o in range(size + 2 * p)]
        assume(all(any(0 <= i < size for i in window) for window in reads if window[0] < size))
    layer = getattr(nn, f"{name}Pool{count}d")(kernel, stride, **options)
    return layer, (draw(st.integers(1, 2)), *sizes)


@few(60)
@given(st.sampled_from([1, 1, 2, 2, 3]).flatmap(lambda count: pools(count, "Max")))
def test_max_pooling(drawn):
    layer, shape = drawn
    found = check(layer, shape, tied(3, *shape))
    assert set(found.data.unique().tolist()) <= {0.0, 1.0}
    check_values(layer, normal(3, *shape))


@few(60)
@given(st.sampled_from([1, 1, 2, 2, 3]).flatmap(lambda count: pools(count, "Avg")))
def test_average_pooling(drawn):
    found = check(*drawn)
    assert found.data.ndim == 1  # the same for all samples


@pytest.mark.slow
@few(600)
@given(
    st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from(["Max", "Avg"])).flatmap(
        lambda drawn: pools(*drawn)
    )
)
def test_very_many_poolings(drawn):
    layer, shape = drawn
    check(layer, shape, tied(3, *shape))


@pytest.mark.parametrize("name", ["MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d"])
def test_pooling_by_one_number(name):
    shape = (2, 7) if "1d" in name else (2, 5, 7)
    check(getattr(nn, name)(3, padding=1), shape)
    check(getattr(nn, name)(2), shape)


@few(30)
@given(
    st.sampled_from(["AdaptiveMaxPool", "AdaptiveAvgPool"]),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=3),
)
def test_adaptive_pooling(name, pairs):
    sizes, outputs = zip(*(pair if len(pairs) < 3 else (pair[0] // 2 + 1, pair[1] // 2 + 1)
                           for pair in pairs), strict=True)  # fmt: skip
    check(getattr(nn, f"{name}{len(pairs)}d")(outputs), (2, *sizes), tied(2, 2, *sizes))


def test_adaptive_pooling_that_leaves_a_dimension():
    check(nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 5))
    check(nn.AdaptiveMaxPool2d(2), (2, 3, 5))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Flatten(), (2, 3, 4)),
        (nn.Flatten(2), (2, 3, 4)),
        (nn.Unflatten(1, (2, 3)), (6,)),
        (nn.Identity(), (5,)),
        (nn.Sequential(), (5,)),
    ],
)
def test_what_changes_nothing_but_shapes(layer, shape):
    assert check(layer, shape).pattern.kind == "diagonal"


PADS = [
    (kind, count)
    for kind in ("Zero", "Constant", "Reflection", "Replication", "Circular")
    for count in (1, 2, 3)
]


@pytest.mark.parametrize(("kind", "count"), PADS)
def test_padding(kind, count):
    kind_of = getattr(nn, f"{kind}Pad{count}d")
    value = (1.5,) if kind == "Constant" else ()
    shape = (2, 4, 3, 3)[: count + 1]
    check(kind_of((1, 2, 0, 1, 2, 0)[: 2 * count], *value), shape)
    check(kind_of(2 if count == 1 else 1, *value), shape)
    if kind in ("Zero", "Constant"):
        check(kind_of((-1, 2, 0, -1, 1, 1)[: 2 * count], *value), shape)  # which cuts off


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (5,)),
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm2d, (5, 2, 3)),
        (nn.BatchNorm3d, (5, 2, 1, 3)),
    ],
)
def test_batch_normalisation_in_evaluation(kind, shape, affine):
    layer = kind(5, affine=affine).double()
    layer(normal(4, *shape))
    layer(3 * normal(4, *shape, seed=1))
    assert check(layer.eval(), shape).data.ndim == 1


def block(shortcut=None):
    return rg.Residual(
        nn.Conv2d(2, 3 if shortcut else 2, 3, padding=1),
        nn.BatchNorm2d(3 if shortcut else 2).eval(),
        nn.ReLU(inplace=True),
        shortcut=shortcut,
    )


PATHS = {
    "in turn": (
        nn.Sequential(nn.Conv1d(2, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 4)),
        (2, 5),
    ),
    "nested": (nn.Sequential(nn.Sequential(nn.Conv1d(1, 2, 2)), nn.Sequential(nn.Tanh())), (1, 7)),
    "a block": (block(), (2, 5, 4)),
    "a shortcut": (block(nn.Conv2d(2, 3, 1)), (2, 5, 4)),
    "blocks": (nn.Sequential(block(), nn.ReLU(), block(nn.Conv2d(2, 3, 1))), (2, 4, 5)),
    "a block in a block": (rg.Residual(block(), nn.Sigmoid()), (2, 3, 4)),
    "our own": (nn.Sequential(rg.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)), (3,)),
}


@pytest.mark.parametrize("name", PATHS)
def test_layers_in_turn_and_residual_blocks(name):
    """A product of which half is no guaranteed zero is kept whole; of others the zeros are kept."""
    layer, shape = PATHS[name]
    layer = layer.double()
    found = check_values(layer, normal(3, *shape))
    expected = guaranteed(layer, torch.rand(1, *shape, dtype=DOUBLE) + 0.5)
    if found.pattern.kind == "full":
        assert expected.mean() >= 0.5
    else:
        assert np.array_equal(dense(found.pattern), expected)


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: x.flip(0)[::2],
    ],
)
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, (3, 2), padding=1),
        nn.MaxPool2d(3, 1),
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.AdaptiveMaxPool2d(2),
        nn.AvgPool2d(2, padding=1),
        nn.BatchNorm2d(2).eval(),
        nn.Flatten(),
        nn.Linear(4, 3),
        nn.ReflectionPad2d((1, 0, 2, 1)),
    ],
    ids=str,
)
def test_inputs_may_lie_anyhow(layer, strided):
    check_values(layer.double(), strided(normal(3, 2, 5, 4)))


def test_layers_may_lie_anyhow():
    layer = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    check_values(layer, normal(2, 3, 5, 5))


def test_table_3_1():
    """W20: the first convolution, ReLU and pooling of VGG-11 on images of 32×32."""
    layers = nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    x, found = torch.randn(1, 3, 32, 32), []
    for layer in layers:
        found.append(transposed_jacobian(layer, x))
        x = layer(x).detach()
    assert [round(each.pattern.sparsity, 5) for each in found] == [0.99157, 0.99998, 0.99994]
    first = found[0]
    assert first.shape == (3072, 65536)
    assert math.prod(first.shape) * 4 == 768 * 2**20
    values_mib = first.data.numel() * first.data.element_size() / 2**20
    assert round(values_mib, 1) == 6.5


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_other_types(kind):
    layer, x = nn.Conv2d(2, 3, 3, padding=1), normal(2, 2, 5, 4)
    exact = transposed_jacobian(layer.double(), x).to_dense()
    found = transposed_jacobian(layer.to(kind), x.to(kind))
    assert found.data.dtype == kind
    torch.testing.assert_close(found.to_dense().double(), exact, rtol=0.01, atol=0)


PRUNED = [
    (nn.Conv2d(4, 4, 3, padding=1, groups=2), (4, 5, 3)),
    (nn.Conv1d(3, 4, 4, padding="same"), (3, 9)),
    (nn.Linear(6, 5), (6,)),
    (nn.Linear(6, 5), (2, 3, 6)),
]


@pytest.mark.parametrize(("layer", "shape"), PRUNED)
def test_pruned_weights_are_no_entries(layer, shape):
    layer, x = layer.double(), normal(2, *shape)
    nn.init.normal_(layer.weight)
    whole = transposed_jacobian(layer, x).nnz  # whose pattern is not held here
    prune.random_unstructured(layer, "weight", amount=0.4)
    sparse = check_values(layer, x)
    expected = (jacobians(layer, x)[0] != 0).numpy()
    assert np.array_equal(dense(sparse.pattern), expected)
    assert sparse.nnz < whole
    assert transposed_jacobian(layer, x).pattern is sparse.pattern
    with torch.no_grad():
        layer.weight_mask.copy_(layer.weight_mask.flip(0))
    other = check_values(layer, x)
    assert other.pattern is not sparse.pattern
    assert np.array_equal(dense(other.pattern), (jacobians(layer, x)[0] != 0).numpy())
    prune.remove(layer, "weight")
    with torch.no_grad():
        layer.weight.fill_(1.0)
    again = check_values(layer, x)
    assert again.nnz == whole


def test_a_pattern_is_made_once():
    one, other = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)
    x = torch.ones(1, 2, 5, 5)
    whole = transposed_jacobian(one, x)
    assert transposed_jacobian(other, x).pattern is whole.pattern
    assert transposed_jacobian(one, torch.ones(4, 2, 5, 5)).pattern is whole.pattern
    for different in (
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(2, 3, 3, stride=2),
        nn.Conv2d(2, 3, 2, dilation=2),
        nn.Conv2d(2, 4, 3),
    ):
        assert transposed_jacobian(different, x).pattern is not whole.pattern
    with torch.no_grad():
        one.weight[0, 0, 1, 1] = 0
    assert transposed_jacobian(one, x).nnz == whole.nnz - 9
    with torch.no_grad():
        one.weight[0, 0, 1, 1] = 1
    assert transposed_jacobian(one, x).pattern is whole.pattern


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(2, 3, 2)])
def test_all_weights_pruned(layer):
    nn.init.zeros_(layer.weight)
    found = transposed_jacobian(layer, torch.ones(2, 2, 4))
    assert found.nnz == 0
    assert found.to_dense().count_nonzero() == 0
    assert (found @ Vector(torch.ones(2, found.shape[-1]))).data.count_nonzero() == 0


@pytest.mark.parametrize("kind", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_weights_that_are_computed(kind):
    """A spectral norm takes a step of its iteration whenever the weight is looked at."""
    torch.manual_seed(0)
    layer, x = kind(nn.Linear(9, 8).double()), normal(2, 9)
    for buffer in layer.buffers():
        buffer.copy_(nn.functional.normalize(normal(*buffer.shape), dim=0))  # far from its end
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    expected = jacobians(layer, x)
    layer.load_state_dict(before)
    found = transposed_jacobian(layer, x).to_dense()
    torch.testing.assert_close(found.expand_as(expected), expected, rtol=1e-12, atol=1e-12)


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


class Kinked(nn.Module):
    """A layer whose values are those of each sample."""

    def forward(self, x):
        return x.abs()


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Tanh()

    def forward(self, x):
        return self.two(self.one(x))


def test_layers_of_ones_own():
    rg.scan.register_layer(
        Halved, jacobian=lambda layer, x, y: CSR.from_dense(0.5 * torch.eye(x[0].numel()).to(x))
    )
    rg.scan.register_layer(
        Kinked,
        jacobian=lambda layer, x, y: CSR(Pattern(identity(x[0].numel())), x.sign().flatten(1)),
    )
    rg.scan.register_layer(Twins, parts=lambda layer: nn.Sequential(layer.one, layer.two))
    assert check(Halved(), (2, 3)).data.ndim == 1
    assert check_values(Kinked(), normal(3, 5)).data.ndim == 2
    check_values(Twins().double(), normal(2, 3))
    check_values(nn.Sequential(Twins(), Halved(), Kinked()).double(), normal(2, 3))

    class Inheriting(Halved):
        pass

    check_values(Inheriting(), normal(2, 3))
    # What was said last counts, in either form.
    rg.scan.register_layer(Halved, parts=lambda layer: nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ScanError, match="Halved"):
        rule_of(Halved())
    rg.scan.register_layer(Twins, jacobian=lambda layer, x, y: None)
    assert rule_of(Twins())


def test_a_layer_derived_from_a_known_one_is_known_as_long_as_it_runs_alike():
    class Named(nn.Conv2d):
        pass

    class Doubled(nn.Conv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    class Chain(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    class Block(rg.Residual):
        def forward(self, x):
            return 2 * super().forward(x)

    check_values(Named(2, 3, 3).double(), normal(2, 2, 4, 5))
    changed = nn.Conv2d(2, 3, 3)
    changed.forward = lambda x: 2 * x
    for layer in (Doubled(2, 3, 3), Chain(nn.ReLU()), Block(nn.ReLU()), changed):
        with pytest.raises(ScanError, match=f"{type(layer).__name__} has no transposed Jacobian"):
            transposed_jacobian(layer, torch.ones(2, 2, 4, 5))


def matrix(rows, columns, share=0.4, samples=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns) if samples is None else (samples, rows, columns)
    keep = torch.rand(rows, columns, generator=generator) < share
    return torch.randn(shape, generator=generator, dtype=DOUBLE) * keep


def test_csr():
    dense_one = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 4.0]])
    one = CSR.from_dense(dense_one)
    assert one.indptr.tolist() == [0, 1, 1, 3]
    assert one.indices.tolist() == [1, 0, 2]
    assert one.data.tolist() == [2.0, 3.0, 4.0]
    assert (one.shape, one.nnz) == ((3, 3), 3)
    assert torch.equal(one.to_dense(), dense_one)
    many = torch.stack([dense_one, 2 * dense_one, torch.zeros(3, 3)])
    many[2, 1, 1] = 5
    each = CSR.from_dense(many)
    assert (each.shape, each.nnz) == ((3, 3, 3), 4)
    assert torch.equal(each.to_dense(), many)
    assert torch.equal(each.samples(slice(1, 3)).to_dense(), many[1:])
    assert one.samples(slice(1, 3)) is one
    assert CSR.from_dense(torch.zeros(2, 3)).nnz == 0
    assert CSR.from_dense(torch.ones(2, 3)).pattern.kind == "full"
    assert CSR.from_dense(torch.eye(3)).pattern.kind == "diagonal"


def test_csr_for_scipy():
    sparse = pytest.importorskip("scipy.sparse")
    many = matrix(5, 7, samples=3)
    found = CSR.from_dense(many).to_scipy(2)
    assert isinstance(found, sparse.csr_array)
    assert found.has_canonical_format
    assert np.array_equal(found.toarray(), many[2].numpy())
    shared = CSR.from_dense(many[0]).to_scipy(9)
    assert np.array_equal(shared.toarray(), many[0].numpy())


@pytest.mark.parametrize("samples", [(None, None), (3, None), (None, 3), (3, 3)])
def test_products_with_the_other_elements(samples):
    one, other = samples
    a, b = matrix(5, 4, samples=one), matrix(4, 6, samples=other, seed=1)
    scale = normal(*([] if other is None else [other]), 4, seed=2)
    vector = Vector(scale)
    ours, theirs = CSR.from_dense(a), CSR.from_dense(b)
    assert torch.allclose((ours @ theirs).to_dense(), a @ b)
    assert torch.allclose((ours @ Dense(b)).to_dense(), a @ b)
    assert torch.allclose((Dense(a) @ theirs).to_dense(), a @ b)
    assert torch.allclose((ours @ Diagonal(scale)).to_dense(), a * scale[..., None, :])
    assert torch.allclose((Diagonal(scale) @ theirs).to_dense(), scale[..., None] * b)
    assert torch.allclose((ours @ vector).data, (a @ scale[..., None])[..., 0])
    offset = Vector(normal(5, seed=3))
    after = Affine(ours, offset) @ theirs
    assert torch.allclose(after.jacobian.to_dense(), a @ b)
    assert after.offset is offset
    before = ours @ Affine(theirs, vector)
    assert torch.allclose(before.jacobian.to_dense(), a @ b)
    assert torch.allclose(before.offset.data, (a @ scale[..., None])[..., 0])
    moved = combine(vector, Affine(ours, offset)).data
    assert torch.allclose(moved, offset.data + (a @ scale[..., None])[..., 0])
    assert torch.allclose(
        (ours + CSR.from_dense(b[..., :1, :4] + a)).to_dense(), 2 * a + b[..., :1, :4]
    )


def test_flops_are_those_counted_term_by_term():
    a, b, c = matrix(9, 8, 0.2), matrix(8, 7, 0.2, seed=1), normal(4)
    ours, theirs = CSR.from_dense(a), CSR.from_dense(b.expand(3, -1, -1))
    terms = int(((a != 0).double() @ (b != 0).double()).sum())
    assert ours.pattern.product(theirs.pattern).method == "sparse"
    assert flops(theirs, ours) == 3 * 2 * terms
    assert flops(Vector(torch.ones(3, 8)), ours) == 3 * 2 * ours.nnz
    assert flops(Vector(torch.ones(8)), ours) == 2 * ours.nnz
    assert flops(Diagonal(torch.ones(5, 8)), ours) == 5 * ours.nnz
    assert flops(ours, Diagonal(torch.ones(9))) == ours.nnz
    assert flops(Vector(c), CSR(Pattern(identity(4)), c)) == 4
    whole = Dense(torch.ones(2, 4, 9))
    product_terms = 4 * int((a != 0).sum())
    dense_terms = 4 * 9 * 8
    assert flops(ours, whole) in (2 * 2 * product_terms, 2 * 2 * dense_terms)
    assert flops("word", ours) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: transposed_jacobian(nn.Softmax(1), torch.ones(2, 3)),
            r"Softmax has no transposed Jacobian here: expected a layer with a rule; give it one "
            r"by rg\.scan\.register_layer\(Softmax, jacobian=\.\.\.\), or parts=\.\.\. if it is "
            r"made of layers that have one, or use backward=None",
        ),
        (
            lambda: transposed_jacobian(nn.Sequential(nn.ReLU(), nn.GLU()), torch.ones(2, 4)),
            r"GLU has no transposed Jacobian here",
        ),
        (
            lambda: transposed_jacobian(nn.BatchNorm2d(3), torch.ones(2, 3, 4, 4)),
            r"BatchNorm2d in training mode takes its mean and variance from the batch, so a "
            r"sample's output depends on all samples .* expected evaluation mode; call \.eval\(\)",
        ),
        (
            lambda: transposed_jacobian(
                nn.BatchNorm1d(3, track_running_stats=False).eval(), torch.ones(2, 3)
            ),
            r"BatchNorm1d without running statistics takes its mean and variance from the batch",
        ),
        (
            lambda: transposed_jacobian(nn.Conv2d(3, 3, 3), torch.ones(3, 8, 8)),
            r"Conv2d was given an input of shape \(3, 8, 8\): expected 4 dimensions, the samples "
            r"first; add one by input\[None\]",
        ),
        (
            lambda: transposed_jacobian(
                nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), torch.ones(1, 2, 8)
            ),
            r"Conv1d with padding_mode='circular' has no transposed Jacobian here: expected "
            r"'zeros'; put a padding layer of that mode before a convolution with padding=0, or "
            r"use backward=None",
        ),
        (
            lambda: transposed_jacobian(nn.MaxPool2d(2), torch.ones(3, 8, 8)),
            r"MaxPool2d was given an input of shape \(3, 8, 8\): expected 4 dimensions",
        ),
        (
            lambda: transposed_jacobian(nn.Conv2d(3, 5, 3), torch.ones(3, 8, 8)),
            r"Conv2d .* \(3, 8, 8\).*: expected .*samples first",
        ),
        (
            lambda: transposed_jacobian(nn.ReLU(), torch.ones(3)),
            r"ReLU took an input of shape \(3,\) to \(3,\): expected samples first, as many in the "
            r"output as in the input, and one more dimension",
        ),
        (
            lambda: transposed_jacobian(nn.Flatten(0), torch.ones(3, 4)),
            r"Flatten took an input of shape \(3, 4\) to \(12,\): expected samples first",
        ),
        (
            lambda: transposed_jacobian(
                nn.MaxPool2d(2, return_indices=True), torch.ones(1, 1, 4, 4)
            ),
            r"MaxPool2d returned a tuple: expected one tensor",
        ),
        (
            lambda: transposed_jacobian(nn.Conv2d(3, 64, 3), torch.ones(2, 3, 9, 9), memory="1KiB"),
            r"the transposed Jacobian of Conv2d, 243×3,136, takes \d+ KiB for 2 samples, and "
            r"1 KiB are available: expected memory for all of it; give fewer samples, or more "
            r"memory",
        ),
        (
            lambda: CSR(Pattern(full(2, 3)), torch.ones(5)),
            r"values of shape \(5,\) were given for a pattern of 6 entries: expected \(6,\) or "
            r"\(samples, 6\)",
        ),
        (lambda: CSR(Pattern(full(2, 3)), torch.ones(2, 1, 6)), r"values of shape \(2, 1, 6\)"),
        (
            lambda: CSR.from_dense(torch.ones(2, 3)) @ Vector(torch.ones(2)),
            r"CSR 2×3 cannot be applied to Vector 2: expected 3 rows, not 2",
        ),
        (
            lambda: CSR.from_dense(torch.ones(2, 3)) @ CSR.from_dense(torch.ones(4, 2)),
            r"CSR 2×3 cannot be applied to CSR 4×2: expected 3 rows, not 4",
        ),
        (
            lambda: CSR.from_dense(torch.ones(4, 2, 3)) @ Vector(torch.ones(5, 3)),
            r"CSR 4×2×3 and Vector 5×3 have the batches \(4,\) and \(5,\)",
        ),
        (
            lambda: CSR.from_dense(torch.ones(2, 3)) + CSR.from_dense(torch.ones(2, 2)),
            r"patterns 2×3 and 2×2 cannot be added: expected paths from the same inputs to the",
        ),
        (lambda: rg.scan.register_layer(Halved), "jacobian and parts: neither given; expected one"),
        (
            lambda: rg.scan.register_layer(Halved, jacobian=min, parts=max),
            "jacobian and parts: both given; expected one of them",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ScanError, match=message):
        call()


def test_a_size_that_cannot_be_read_is_refused():
    with pytest.raises(UnitError):
        transposed_jacobian(nn.ReLU(), torch.ones(2, 3), memory="a lot")


def test_a_rule_whose_pattern_has_the_wrong_shape_is_refused():
    class Wrong(nn.Module):
        def forward(self, x):
            return x[:, :2]

    rg.scan.register_layer(Wrong, jacobian=lambda layer, x, y: CSR.from_dense(torch.eye(3)))
    text = r"the rule for Wrong gave a Jacobian of 3×3: expected 3×2, the inputs and the outputs"
    with pytest.raises(ScanError, match=text):
        transposed_jacobian(Wrong(), torch.ones(2, 3))


def test_a_refused_batch_normalisation_has_learnt_nothing():
    layer = nn.BatchNorm1d(3)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(ScanError):
        transposed_jacobian(layer, torch.randn(4, 3))
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


def test_a_hook_may_look_but_not_change():
    """Also hooks of blocks and of layers in turn are called."""
    seen = []
    for layer in (nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), rg.Residual(nn.Linear(3, 3))):
        layer.register_forward_hook(lambda m, args, y: seen.append(m))
        layer.register_forward_pre_hook(lambda m, args: seen.append(m))
        transposed_jacobian(layer, torch.ones(2, 3))
        assert seen == [layer, layer]
        seen.clear()
        handle = layer.register_forward_hook(lambda m, args, y: 2 * y)
        text = f"a forward .*hook of {type(layer).__name__} changed .*: expected hooks that only"
        with pytest.raises(ScanError, match=text):
            transposed_jacobian(layer, torch.ones(2, 3))
        handle.remove()
        layer.register_forward_pre_hook(lambda m, args: (2 * args[0],))
        with pytest.raises(ScanError, match=text):
            transposed_jacobian(layer, torch.ones(2, 3))
        seen.clear()


def test_samples_that_do_not_fit_are_counted_before_any_value_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(CSR, "__post_init__", lambda self: made.append(self))
    with pytest.raises(ScanError, match="for 1,000 samples"):
        transposed_jacobian(nn.Tanh(), torch.ones(1000, 100), memory="100KiB")
    assert not made


def test_a_jacobian_is_pickled_with_its_pattern():
    layer = nn.Conv2d(2, 3, 3, padding=1)
    prune.random_unstructured(layer, "weight", amount=0.4)
    for each in (layer, nn.MaxPool2d(2), nn.Flatten()):
        found = transposed_jacobian(each, torch.randn(2, 2, 4, 5))
        same = pickle.loads(pickle.dumps(found))
        assert torch.equal(same.to_dense(), found.to_dense())
        assert torch.equal((same @ CSR.from_dense(torch.eye(found.shape[-1]))).data, found.data)
