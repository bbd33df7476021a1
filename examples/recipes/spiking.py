"""A spiking network of snnTorch, over many time steps.

The neurons keep their membrane potentials in themselves (``init_hidden=True``). ``stateful=`` names
the modules that do so; ``rg.unroll`` then carries the potentials from step to step, and restores
them where steps run again.

    python examples/recipes/spiking.py
"""

from collections.abc import Callable

import snntorch
import torch
from snntorch import surrogate, utils
from torch import Tensor, nn

import retrograde as rg


def ways(steps: int = 400) -> dict[str, Callable[[], list[Tensor]]]:
    """The usual loop over time steps, and ``rg.unroll``."""
    torch.manual_seed(0)
    options = {"beta": 0.9, "init_hidden": True, "spike_grad": surrogate.fast_sigmoid()}
    net = nn.Sequential(
        nn.Linear(32, 128), snntorch.Leaky(**options), nn.Linear(128, 10), snntorch.Leaky(**options)
    )
    spikes_in = torch.bernoulli(torch.full((steps, 32, 32), 0.2))  # (time, batch, neurons)
    labels = torch.randint(10, (32,))

    def gradients(spikes: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(spikes.sum(0), labels)  # the class that spikes most
        return [*torch.autograd.grad(loss, [*net.parameters()])]

    def before() -> list[Tensor]:
        utils.reset(net)
        return gradients(torch.stack([net(x_t) for x_t in spikes_in]))

    def after() -> list[Tensor]:
        utils.reset(net)
        spikes, _ = rg.unroll(net, spikes_in, memory="10%", stateful=[net])
        return gradients(spikes)

    return {"loop": before, "rg.unroll within 10%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
