"""Networks that are chains of layers, as lists of modules."""

import copy
import itertools

from torch import Tensor, nn

import retrograde as rg

__all__ = [
    "convolutions", "encoder", "layers_of_74", "mixer", "perceptron", "pyramid", "resnet18",
]  # fmt: skip


def resnet18() -> list[nn.Module]:
    """ResNet-18's layers for images of 32×32: a stem, eight residual blocks, a linear layer.

    Every ReLU stands behind what it writes to: ``checkpoint_sequential`` takes no segment that
    begins with one in place.
    """

    def block(channels: int, wide: int, stride: int) -> nn.Module:
        path = (
            nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
        )
        same = channels == wide and stride == 1
        shortcut = None if same else nn.Conv2d(channels, wide, 1, stride=stride, bias=False)
        return nn.Sequential(rg.Residual(*path, shortcut=shortcut), nn.ReLU(inplace=True))

    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    stem = nn.Sequential(first, nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    sizes = (
        (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
        (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
    )  # fmt: skip
    blocks = [block(*size) for size in sizes]
    return [stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]


class Mixer(nn.Module):
    """A block of an MLP-mixer: one perceptron across tokens, one across channels."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(channels), nn.LayerNorm(channels)])
        self.across = nn.Sequential(nn.Linear(tokens, tokens), nn.GELU(), nn.Linear(tokens, tokens))
        self.along = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.norms[1](x))  # type: ignore[no-any-return]


def mixer() -> list[nn.Module]:
    """48 equal blocks."""
    return [*(Mixer(64, 96) for _ in range(48)), nn.Linear(96, 10)]


def encoder(layers: int, width: int, dropout: float = 0.1) -> list[nn.Module]:
    """Equal layers of a transformer's encoder."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True)
    return [copy.deepcopy(layer) for _ in range(layers)]


def layers_of_74() -> list[nn.Module]:
    """74 layers."""
    triples = ((nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(24))
    first = nn.Conv2d(3, 32, 3, padding=1)
    return [first, *(layer for triple in triples for layer in triple), nn.AdaptiveAvgPool2d(1)]


def perceptron() -> list[nn.Module]:
    """A hundred equal layers."""
    return [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(100)]


def pyramid() -> list[nn.Module]:
    """Layers that halve: the first ones hold nearly everything."""
    widths = [2048, 1024, 512, 256, 128, 64, 32]
    return [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]


def convolutions() -> list[nn.Module]:
    """Thirty equal convolutions with batch normalisation."""
    block = nn.Sequential
    parts = [(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(30)]
    return [nn.Conv2d(3, 64, 3, padding=1), *(block(*part) for part in parts)]
