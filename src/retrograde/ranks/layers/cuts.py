"""Choose the cuts of a chain of layers so that the slowest rank is as fast as possible.

In a pipeline all ranks wait for the slowest. So the cost is the largest sum of seconds, forward and
backward, of the layers between two cuts. A cut can be where one tensor is passed on, and where no
parameter is on both sides.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from retrograde.machine import now

__all__ = ["balanced", "layer_seconds", "where_to_cut"]

_REPEATS = 3  # measurements, of which the fastest counts


def balanced(seconds: Sequence[float], ranks: int, places: Sequence[bool] = ()) -> list[int]:
    """Return the cuts that minimize the largest sum between two of them.

    Args:
        seconds: the seconds of each layer.
        ranks: the number of shares.
        places: whether a cut can be before each layer; by default, before any.

    Returns:
        The index of the first layer of each share except the first.

    Example:
        >>> seconds = [1, 1, 1, 9, 1, 1]
        >>> balanced(seconds, 3), balanced(seconds, 3, [True, True, True, True, False, False])
        ([3, 4], [1, 3])
    """
    count = len(seconds)
    sums = [0.0, *accumulate(seconds)]
    edges = [k for k in range(1, count) if not places or places[k]]
    least: dict[int, tuple[float, list[int]]] = {k: (sums[k], []) for k in [*edges, count]}
    for _ in range(ranks - 1):
        found: dict[int, tuple[float, list[int]]] = {}
        for stop in [*edges, count]:
            options = [
                (max(least[cut][0], sums[stop] - sums[cut]), [*least[cut][1], cut])
                for cut in [*edges, count]
                if cut <= stop
            ]
            found[stop] = min(options)
        least = found
    return least[count][1]


def where_to_cut(whole: nn.Sequential, alone: Sequence[bool]) -> list[bool]:
    """Return whether a cut can be before each layer; ``alone`` says if its input is one tensor.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> where_to_cut(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU()), [True] * 4)
        [False, False, False, True]
    """
    first: dict[int, int] = {}
    places = [k > 0 and one for k, one in enumerate(alone)]
    for k, layer in enumerate(whole):
        for parameter in layer.parameters():
            start = first.setdefault(id(parameter), k)
            places[start + 1 : k + 1] = [False] * (k - start)
    return places


def layer_seconds(whole: nn.Sequential, sample: Any) -> tuple[list[float], list[bool]]:
    """Return each layer's seconds, forward and backward, and whether its input is one tensor.

    Copies are measured, so neither the chain nor the random state changes.

    Example:
        >>> whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> seconds, alone = layer_seconds(whole, torch.ones(1, 2))
        >>> len(seconds), alone
        (2, [True, True])
    """
    seconds, alone = [], []
    given = sample
    with torch.random.fork_rng(), torch.enable_grad():
        for layer in whole:
            alone.append(isinstance(given, Tensor))
            part = copy.deepcopy(layer)
            times, after = zip(*(_time(part, given) for _ in range(_REPEATS)), strict=True)
            seconds.append(min(times))
            given = after[-1]
    return seconds, alone


def _time(layer: nn.Module, given: Any) -> tuple[float, Any]:
    """Return the seconds of a layer, forward and backward, and its output."""
    tensors = [t for t in _pytree.tree_leaves(given) if isinstance(t, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    passed = _pytree.tree_map_only(Tensor, _fresh, given)
    start = now(device)
    y = layer(passed)
    forward = now(device) - start
    roots = [t for t in _pytree.tree_leaves(y) if isinstance(t, Tensor) and t.requires_grad]
    seeds = [torch.ones_like(t) for t in roots]
    start = now(device)
    if roots:
        torch.autograd.backward(roots, seeds)
    backward = now(device) - start
    return forward + backward, _pytree.tree_map_only(Tensor, Tensor.detach, y)


def _fresh(t: Tensor) -> Tensor:
    """Return a copy that a layer may overwrite; its gradient is part of the backward pass."""
    leaf = t.detach().requires_grad_(t.is_floating_point())
    return leaf * 1 if leaf.requires_grad else leaf
