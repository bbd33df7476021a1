"""Pruned networks: smaller Jacobians, planned anew for a changed mask, and taken where they pay."""

import torch
from torch import nn
from torch.nn.utils import prune

import retrograde as rg
from retrograde_papers.networks import vgg11
from wang2020.pruning import prune_weights


def gradients(net, x):
    x = x.clone().requires_grad_()
    net.zero_grad()
    (net(x).sin().sum()).backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


def nets(share, **options):
    torch.manual_seed(0)
    layers = vgg11(width=8)
    if share:
        prune_weights(nn.Sequential(*layers), share)
    plain = nn.Sequential(*layers).double()
    return plain, rg.Sequential(*layers, backward="scan", **options)


def close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.abs().max()))


def test_every_scan_of_a_pruned_network():
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for options in (
        {"algorithm": "linear"},
        {"algorithm": "blelloch"},
        {"algorithm": "hybrid", "levels": 1},
    ):
        plain, ours = nets(0.9, **options)
        close(gradients(ours, x), gradients(plain, x))


def test_a_changed_mask_is_planned_anew():
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    plain, ours = nets(0.5, algorithm="hybrid", levels=1)
    first = ours.explain(x).chosen.report.flops
    close(gradients(ours, x), gradients(plain, x))
    prune_weights(plain, 0.9)
    assert ours.explain(x).chosen.report.flops < first / 2
    close(gradients(ours, x), gradients(plain, x))
    for layer in plain:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            prune.remove(layer, "weight")
            with torch.no_grad():
                layer.weight.add_(1e-3)  # no zeros any more
    assert ours.explain(x).chosen.report.flops > first
    close(gradients(ours, x), gradients(plain, x))


def test_masks_hold_through_training():
    torch.manual_seed(0)
    layers = vgg11(width=8)
    prune_weights(nn.Sequential(*layers), 0.9)
    net = rg.Sequential(*layers, backward="scan")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    kept = [int(layer.weight.count_nonzero()) for layer in net if hasattr(layer, "weight")]
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 3, 32, 32)).square().sum().backward()
        optimizer.step()
    net(torch.randn(1, 3, 32, 32))
    assert kept == [int(layer.weight.count_nonzero()) for layer in net if hasattr(layer, "weight")]
