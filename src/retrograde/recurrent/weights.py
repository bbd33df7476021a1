"""The weights of recurrent modules, and torch's own modules over given weights.

A module's weights may be computed: by a parametrization, by a hook, by a module around it. A
measurement must neither consume their graph nor compute them again, which may change buffers. So it
runs on stand-ins, in a shell of the module that uses only these weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from retrograde.torch_private import flat_names, flat_weights, give_flat_weights

#: torch's classes, even if a program replaces ``torch.nn.GRU`` and the others later.
TORCHS_OWN: tuple[type[nn.RNNBase], ...] = (nn.RNN, nn.GRU, nn.LSTM)


def over_weights(
    module: nn.RNNBase, weights: Sequence[Tensor], shell_class: type[nn.RNNBase] | None = None
) -> Any:
    """Return a shell of a module over given weights (in torch's order), with its options and mode.
    ``shell_class`` None means torch's own class. The shell computes no weights. Only its
    ``forward`` may be called, since a call would run the module's hooks. In ``eval()`` mode it
    drops nothing, but trains if gradients are recorded: cuDNN refuses any other backward pass."""
    shell_class = shell_class or next(c for c in type(module).__mro__ if c in TORCHS_OWN)
    shell: Any = shell_class.__new__(shell_class)
    vars(shell).update(vars(module))
    give_flat_weights(shell, weights)
    vars(shell).pop("forward", None)
    if weights and weights[0].device.type != "cpu" and not module.training:
        vars(shell).update(training=torch.is_grad_enabled(), dropout=0.0)
    return shell


def stand_ins(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return leaves that share the memory of weights, without a graph and without hooks."""
    return [w.detach().requires_grad_(w.requires_grad) for w in weights]


def last_weights(module: nn.RNNBase) -> list[Tensor]:
    """Return a module's weights as last computed, in torch's order. A weight that a parametrization
    or a hook of torch's computes requires a gradient where its origin does."""
    weights: list[Tensor] = []
    for name, last in zip(flat_names(module), flat_weights(module), strict=True):
        weight: Any = module._parameters.get(name, vars(module).get(name, last))
        origin = module._parameters.get(f"{name}_orig")  # of spectral_norm, or of pruning
        origins: list[Tensor] = [] if origin is None else [origin]
        if is_parametrized(module, name):
            origins = [*module.parametrizations[name].parameters()]  # type: ignore[index,union-attr]
        if origins:
            weight = weight.detach().requires_grad_(any(p.requires_grad for p in origins))
        weights.append(weight)
    return weights
