"""From ``torch.utils.checkpoint`` to ``rg.Sequential``.

Checkpoints placed by hand treat all layers alike. The layers of a pyramid of convolutions are not:
the first ones are large, the last ones small. ``rg.Sequential`` measures each layer and plans for
the bytes that you name, which may be fewer than any number of segments takes.

    python examples/recipes/checkpoint.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import retrograde as rg


def pyramid(width: int, blocks: int) -> list[nn.Module]:
    """Convolutions at four sizes of the image, each half of the one before."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for level in range(4):
        channels = width * 2**level
        for _ in range(blocks):
            layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False)]
            layers += [nn.GroupNorm(4, channels), nn.GELU()]
        layers += [nn.Conv2d(channels, 2 * channels, 2, stride=2)]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, 10)]


def ways(blocks: int = 4, segments: int = 16) -> dict[str, Callable[[], list[Tensor]]]:
    """Evenly placed checkpoints, and a schedule within 25 percent of all that is held."""
    torch.manual_seed(0)
    layers, images = pyramid(16, blocks), torch.randn(8, 3, 64, 64)
    net = rg.Sequential(*layers, memory="25%")

    def gradients(outputs: Tensor) -> list[Tensor]:
        return [*torch.autograd.grad(outputs.square().mean(), [*net.parameters()])]

    def before() -> list[Tensor]:
        return gradients(
            checkpoint_sequential(nn.Sequential(*layers), segments, images, use_reentrant=False)
        )

    def after() -> list[Tensor]:
        return gradients(net(images))

    return {f"{segments} checkpoints": before, "rg.Sequential, 25%": after}


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
