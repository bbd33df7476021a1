"""Values of convolutions and poolings: the compiled loops do what the plain forms do."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from retrograde.scan.sparse import arithmetic
from retrograde.scan.sparse import cpu_products as cpu_sparse
from retrograde.scan.sparse.composition import observe
from retrograde.scan.sparse.transposed import transposed_jacobian


def pattern_of(layer, x):
    return transposed_jacobian(layer, x).pattern


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_taken_from_where_they_are(dtype):
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    pattern = pattern_of(layer, torch.randn(1, 4, 7, 9))
    flat = layer.weight.detach().to(dtype).flatten()
    assert torch.equal(cpu_sparse.take(flat, pattern), arithmetic.take(flat, pattern))


@pytest.mark.parametrize("samples", [1, 2, 9])
@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(2, 3, dilation=2)]
)
def test_maxima_are_marked(layer, samples):
    x = torch.randn(samples, 3, 8, 7)
    y = layer(x)
    found = transposed_jacobian(layer, x).to_dense()
    assert set(found.unique().tolist()) == {0, 1}
    assert torch.equal(found.sum(1), torch.ones(samples, y[0].numel()))
    assert torch.equal((found * x.flatten(1)[..., None]).sum(1), y.flatten(1))


def test_where_the_forward_pass_left_no_places_they_are_found_once_more():
    x = torch.randn(2, 3, 8, requires_grad=True)
    layer = nn.MaxPool1d(3, 2, 1)
    y, path = observe(layer, x)
    assert not hasattr(y.grad_fn, "_saved_result1")
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    values = path.csr(x)
    found = arithmetic.apply(values.pattern, values.data, torch.ones(2, values.shape[-1]))
    torch.testing.assert_close(found, gradient.flatten(1))


def test_equal_maxima_go_where_torch_says():
    x = torch.zeros(1, 1, 4, 4)
    jacobian = transposed_jacobian(nn.MaxPool2d(2), x)
    leaf = x.clone().requires_grad_()
    functional.max_pool2d(leaf, 2).sum().backward()
    torch.testing.assert_close(jacobian.to_dense()[0].sum(1), leaf.grad.flatten())
