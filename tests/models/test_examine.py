"""One trial serves all of torch's own layers of one make."""

import pytest
import torch
from torch import nn

from retrograde.models.chain import examine
from retrograde.replay.trees import flatten


def triples(inplace):
    return [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace))
    ]


class Own(nn.Module):
    """A layer of the user's, which has to see a real state."""

    def forward(self, x):
        assert not torch.equal(x, torch.ones_like(x))
        return x * 2


def tied():
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    third.weight = first.weight
    return [nn.Sequential(first, second), nn.Sequential(first, third), nn.Sequential(first, first)]


IMAGE, ROW = torch.randn(2, 3, 5, 5), torch.randn(3, 4)
NETWORKS = {
    "convolutions": (lambda: [*triples(False), nn.Flatten(), nn.Linear(75, 4)], IMAGE),
    "in place": (lambda: triples(True), IMAGE),
    "evaluation": (lambda: [layer.eval() for layer in triples(False)], IMAGE),
    "own in the middle": (lambda: [*triples(False), Own(), *triples(True)], IMAGE),
    "own at the end": (lambda: [*triples(False), Own()], IMAGE),
    "flat first": (lambda: [nn.Flatten(), nn.Linear(75, 75), nn.Flatten(0), nn.ReLU()], IMAGE),
    "dropout": (lambda: [nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.2)], ROW),
    "one layer twice": (lambda: [nn.Linear(4, 4), *[nn.BatchNorm1d(4)] * 3], ROW),
    "tied": (tied, ROW),
    "indices behind": (lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)], ROW),
    "frozen": (lambda: [nn.Linear(4, 4).requires_grad_(k != 1) for k in range(3)], ROW),
    "frozen first": (lambda: [nn.Linear(4, 4).requires_grad_(k > 1) for k in range(4)], ROW),
}


def named(layers):
    return [(str(k), layer) for k, layer in enumerate(layers)]


def facts(link):
    ambient, steady = link.ambient, link.ambient.steady
    tensors = (link.own, link.reads, ambient.buffers, steady.tensors)
    return (
        link.name, link.layers, link.given, link.returned, link.like, link.wanted, link.passes,
        [[id(t) for t in some] for some in tensors],
        [id(node) for node in link.leaves],
        {*ambient.sources}, {*steady.sources},
        [id(place.holder) for place in steady.places], ambient.left,
        ambient.modules, link.output_bytes, link.hands_on, link.laid,
        link.make,
    )  # fmt: skip


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_layer_that_is_not_tried_is_described_as_if_it_were(name, monkeypatch):
    make, x = NETWORKS[name]
    layers = named(make())
    leaves, structure = flatten(x, "input")
    found = examine.examine_layers(layers, leaves, structure)
    monkeypatch.setattr(examine._Tried, "serves_others", lambda self: False)
    tried = examine.examine_layers(layers, leaves, structure)
    for part in ("prefix", "chain"):
        ours, theirs = getattr(found, part), getattr(tried, part)
        assert [*map(facts, ours)] == [*map(facts, theirs)]
    assert set(found.steady.sources) == set(tried.steady.sources)


@pytest.mark.parametrize(
    ("name", "most"), [("convolutions", 7), ("in place", 5), ("own at the end", 13), ("tied", 3)]
)
def test_trials_are_counted(name, most, monkeypatch):
    make, x = NETWORKS[name]
    calls, plain = [], examine.try_out
    monkeypatch.setattr(examine, "try_out", lambda *a: calls.append(0) or plain(*a))
    leaves, structure = flatten(x, "input")
    examine.examine_layers(named(make()), leaves, structure)
    assert len(calls) == most


def test_modules_that_nest_otherwise_are_of_another_make():
    a, b = nn.Linear(4, 4), nn.ReLU()
    makes = [
        examine.make_of(examine.parts_of([net]))
        for net in (nn.Sequential(a, b, a), nn.Sequential(a, b, b), nn.Sequential(a, b, a))
    ]
    assert makes[0] == makes[2] != makes[1]
