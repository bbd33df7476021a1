"""Models that nobody here wrote, each in the library that has it: torch, torchvision, timm and
transformers. A model skips where its library is absent."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["MODELS", "Case", "build"]

#: Sizes of transformers: layers, width, batch, length.
SMALL, LARGE = (4, 32, 4, 16), (12, 256, 4, 256)


@dataclass
class Case:
    """A model, what it is called with, and the layers that one would checkpoint."""

    model: nn.Module
    sample: Any
    blocks: list[nn.Module]

    def loss(self, model: nn.Module) -> Tensor:
        """A number to go back from."""
        sample = self.sample
        if isinstance(sample, dict):
            y = model(**sample)
        else:
            y = model(*sample) if isinstance(sample, tuple) else model(sample)
        for name in ("logits", "last_hidden_state"):
            y = getattr(y, name, y)
        return y.float().square().mean()


def transformer(model: str, config: str, blocks: str, **options: Any) -> Callable[[bool], Case]:
    def make(large: bool) -> Case:
        library = import_module("transformers")
        layers, width, batch, length = LARGE if large else SMALL
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": 4,
            "intermediate_size": 4 * width,
            "vocab_size": 100,
        }
        net = getattr(library, model)(getattr(library, config)(**sizes, **options))
        ids = torch.randint(0, 100, (batch, length))
        sample = {"input_ids": ids}
        if model.endswith("LM") or "GPT2" in model:
            sample["use_cache"] = False
        return Case(net, sample, [*net.get_submodule(blocks)])

    return make


def vision(name: str, blocks: tuple[str, ...], size: int = 128) -> Callable[[bool], Case]:
    def make(large: bool) -> Case:
        net = getattr(import_module("torchvision.models"), name)()
        found = [layer for at in blocks for layer in net.get_submodule(at).children()]
        shape = (8, 3, size, size) if large else (2, 3, 64, 64)
        return Case(net, torch.randn(shape), found)

    return make


def timm(name: str, blocks: str, **options: Any) -> Callable[[bool], Case]:
    def make(large: bool) -> Case:
        size = 128 if large else 64
        net = import_module("timm").create_model(name, **options, img_size=size)
        return Case(
            net, torch.randn(8 if large else 2, 3, size, size), [*net.get_submodule(blocks)]
        )

    return make


def torchs_encoder(large: bool) -> Case:
    layers, width, batch, length = LARGE if large else SMALL
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return Case(net, torch.randn(batch, length, width), [*net.layers])


def torchs_transformer(large: bool) -> Case:
    layers, width, batch, length = LARGE if large else SMALL
    half = layers // 2
    net = nn.Transformer(width, 4, half, half, 4 * width, batch_first=True)
    pair = torch.randn(batch, length, width), torch.randn(batch, length, width)
    return Case(net, pair, [*net.encoder.layers, *net.decoder.layers])


MODELS: dict[str, Callable[[bool], Case]] = {
    "nn.TransformerEncoder": torchs_encoder,
    "nn.Transformer": torchs_transformer,
    "transformers GPT-2": transformer("GPT2LMHeadModel", "GPT2Config", "transformer.h"),
    "transformers BERT": transformer("BertModel", "BertConfig", "encoder.layer"),
    "transformers Llama": transformer("LlamaForCausalLM", "LlamaConfig", "model.layers"),
    "torchvision ResNet-18": vision("resnet18", ("layer1", "layer2", "layer3", "layer4")),
    "torchvision ResNet-50": vision("resnet50", ("layer1", "layer2", "layer3", "layer4")),
    "torchvision Swin-T": vision(
        "swin_t", ("features.1", "features.3", "features.5", "features.7")
    ),
    "timm ViT-Ti": timm("vit_tiny_patch16_224", "blocks", patch_size=8),
}


def build(name: str, *, large: bool = False) -> Case | None:
    """A model in training, None where its library is not installed."""
    torch.manual_seed(0)
    try:
        case = MODELS[name](large)
    except ImportError:
        return None
    case.model.train()
    return case
