"""The convolutional networks of the experiments, as plain lists of layers.

The same list fits a :class:`torch.nn.Sequential` and a :class:`retrograde.Sequential`. All take
images of 32×32 pixels in three colours.
"""

from torch import nn

from retrograde.scan.sparse.composition import Residual

__all__ = ["lenet5", "resnet18", "resnet34", "vgg11"]

_VGG11: tuple[int | None, ...] = (
    64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None,
)  # fmt: skip


def lenet5(classes: int = 10) -> list[nn.Module]:
    """Return LeNet-5 (LeCun et al., 1998) with ReLUs and max-pooling, in twelve layers."""
    return [
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    ]


def vgg11(classes: int = 10, width: int = 64) -> list[nn.Module]:
    """Return VGG-11 (Simonyan and Zisserman, 2015) with one linear layer; the paper has ``width``
    64. Weights are drawn as by He et al. (2015): without batch normalisation it would not learn
    otherwise."""
    layers: list[nn.Module] = []
    channels = 3
    for wanted in _VGG11:
        if wanted is None:
            layers.append(nn.MaxPool2d(2))
            continue
        convolution = nn.Conv2d(channels, wanted * width // 64, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers += [convolution, nn.ReLU()]
        channels = convolution.out_channels
    return [*layers, nn.Flatten(), nn.Linear(channels, classes)]


def resnet18(classes: int = 10, width: int = 64) -> list[nn.Module]:
    """Return ResNet-18 (He et al., 2016) with a 3×3 stem and no pooling after it, in 22 layers. The
    paper has ``width`` 64. A block is one layer, and the ReLU after its sum is the next."""
    return _resnet((2, 2, 2, 2), classes, width)


def resnet34(classes: int = 10, width: int = 64) -> list[nn.Module]:
    """Return ResNet-34 (He et al., 2016): :func:`resnet18` with twice its blocks, 38 layers."""
    return _resnet((3, 4, 6, 3), classes, width)


def _resnet(blocks: tuple[int, ...], classes: int, width: int) -> list[nn.Module]:
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            wanted, stride = width << stage, 2 if stage and not number else 1
            layers += [_block(channels, wanted, stride), nn.ReLU()]
            channels = wanted
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def _block(channels: int, wanted: int, stride: int) -> Residual:
    """Return two convolutions with a shortcut, which is a 1×1 convolution if the shape changes."""
    shortcut = None
    if stride != 1 or channels != wanted:
        projection = nn.Conv2d(channels, wanted, 1, stride, bias=False)
        shortcut = nn.Sequential(projection, nn.BatchNorm2d(wanted))
    return Residual(
        nn.Conv2d(channels, wanted, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(wanted),
        nn.ReLU(),
        nn.Conv2d(wanted, wanted, 3, padding=1, bias=False),
        nn.BatchNorm2d(wanted),
        shortcut=shortcut,
    )
