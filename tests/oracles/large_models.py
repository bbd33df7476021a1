"""Models that keep a card busy: each with what it is called with, and its blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS"]

Built = tuple[nn.Module, Any, list[nn.Module]]


def encoder(width: int, layers: int, shape: tuple[int, int]) -> Built:
    layer = nn.TransformerEncoderLayer(
        width, width // 64 or 1, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
    )
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return net, torch.randn(*shape, width), list(net.layers)


def language(model: str, config: str, shape: tuple[int, int], width: int, **options: Any) -> Built:
    import transformers

    net = getattr(transformers, model)(getattr(transformers, config)(use_cache=False, **options))
    blocks = net.h if hasattr(net, "h") else net.layers
    return net, torch.randint(0, 1000, shape), list(blocks)


def gpt2(shape: tuple[int, int], width: int, layers: int) -> Built:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 64 or 1}
    return language("GPT2Model", "GPT2Config", shape, width, **sizes)


def llama(shape: tuple[int, int], width: int, layers: int) -> Built:
    heads = width // 64 or 1
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
             "intermediate_size": 3 * width, "vocab_size": 8000}  # fmt: skip
    return language("LlamaModel", "LlamaConfig", shape, width, **sizes)


def resnet50(batch: int, side: int) -> Built:
    import torchvision

    net = torchvision.models.resnet50()
    stages = (net.layer1, net.layer2, net.layer3, net.layer4)
    return net, torch.randn(batch, 3, side, side), [block for one in stages for block in one]


#: Models by name, each of its size and of a small one, and the package that has it.
MODELS: dict[str, tuple[Callable[[], Built], Callable[[], Built], str]] = {
    "encoder, 12 layers of 768, B=64, 512 tokens": (
        partial(encoder, 768, 12, (64, 512)), partial(encoder, 16, 2, (2, 8)), "torch"),
    "GPT-2, 12 layers of 768, B=32, 1,024 tokens": (
        partial(gpt2, (32, 1024), 768, 12), partial(gpt2, (2, 8), 16, 2), "transformers"),
    "Llama, 12 layers of 1,024, B=24, 1,024 tokens": (
        partial(llama, (24, 1024), 1024, 12), partial(llama, (2, 8), 16, 2), "transformers"),
    "ResNet-50, B=256, 224×224": (
        partial(resnet50, 256, 224), partial(resnet50, 2, 32), "torchvision"),
    "encoder, 4 layers of 384, B=8, 128 tokens": (
        partial(encoder, 384, 4, (8, 128)), partial(encoder, 16, 2, (2, 8)), "torch"),
}  # fmt: skip
