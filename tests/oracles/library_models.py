"""Models that nobody here wrote, each in the library that has it: torch, torchvision, timm,
transformers, diffusers, MONAI and segmentation-models-pytorch. A model skips where its library is
absent. Weights are drawn, and sizes are small."""

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

    def outputs(self, model: nn.Module) -> Any:
        """What the model returns."""
        sample = self.sample
        if isinstance(sample, dict):
            return model(**sample)
        return model(*sample) if isinstance(sample, tuple) else model(sample)

    def loss(self, model: nn.Module) -> Tensor:
        """A number to go back from."""
        y = self.outputs(model)
        for name in ("logits", "last_hidden_state", "sample"):
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
        shape = (8, 3, size, size) if large else (8, 3, 96, 96)
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


def hugging(
    model: str, config: str, sizes: Callable[[int, int], dict[str, Any]], blocks: tuple[str, ...],
    sample: Callable[[int, int], dict[str, Tensor]],
) -> Callable[[bool], Case]:  # fmt: skip
    """A model of transformers whose options or samples are its own, from layers and width."""

    def make(large: bool) -> Case:
        library = import_module("transformers")
        layers, width, batch, length = (8, 256, 4, 256) if large else SMALL
        options = (
            {"use_cache": False, "pad_token_id": 0, "eos_token_id": 1} if config in _TEXT else {}
        )
        net = getattr(library, model)(getattr(library, config)(**options, **sizes(layers, width)))
        found = [layer for at in blocks for layer in net.get_submodule(at).children()]
        return Case(net, sample(batch, length), found)

    return make


_TEXT = "T5Config", "BartConfig", "WhisperConfig", "MambaConfig", "Gemma2Config", "GPTNeoXConfig"


def ids(batch: int, length: int) -> Tensor:
    return torch.randint(2, 100, (batch, length))


def text(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, length)}


def pair_of_texts(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, length)}


def spoken(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 20 * length + 200)}


def images(batch: int, length: int) -> dict[str, Tensor]:
    size = max(64, length)
    return {"pixel_values": torch.randn(batch, 3, size, size)}


def plain_sizes(layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": 100, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": 4 * width,
    }  # fmt: skip


def two_halves(layers: int, width: int) -> dict[str, Any]:
    names = ("encoder_layers", "decoder_layers")
    heads = ("encoder_attention_heads", "decoder_attention_heads")
    wide = ("encoder_ffn_dim", "decoder_ffn_dim")
    return (
        {"d_model": width}
        | dict.fromkeys(names, layers // 2)
        | dict.fromkeys(heads, 4)
        | dict.fromkeys(wide, 4 * width)
    )


def whisper(layers: int, width: int) -> dict[str, Any]:
    return two_halves(layers, width) | {
        "vocab_size": 100, "num_mel_bins": 16, "max_source_positions": 2 * width,
        "max_target_positions": 256, "decoder_start_token_id": 1, "bos_token_id": 1,
        "apply_spec_augment": False,  # it draws NumPy's numbers, which the seed does not set
    }  # fmt: skip


def t5(layers: int, width: int) -> dict[str, Any]:
    return {
        "vocab_size": 100, "d_model": width, "d_kv": width // 4, "d_ff": 4 * width,
        "num_layers": layers // 2, "num_decoder_layers": layers // 2, "num_heads": 4,
        "decoder_start_token_id": 0,
    }  # fmt: skip


def speech(layers: int, width: int) -> dict[str, Any]:
    return plain_sizes(layers, width) | {
        "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
        "layerdrop": 0.0, "mask_time_prob": 0.0, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }  # fmt: skip


def detr(layers: int, width: int) -> dict[str, Any]:
    residual = import_module("transformers").ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[2, 2, 2, 2],
        out_features=["stage4"],
    )  # fmt: skip
    return two_halves(layers, width) | {
        "use_pretrained_backbone": False, "backbone_config": residual,
        "use_timm_backbone": False, "backbone": None, "num_queries": 20,
    }  # fmt: skip


def convnext(layers: int, width: int) -> dict[str, Any]:
    return {"hidden_sizes": [width // 4, width // 2, width, width], "depths": [2, 2, layers, 2]}


def unet_of_monai(large: bool) -> Case:
    widths = (32, 64, 128, 256) if large else (4, 8, 16)
    strides = (2,) * (len(widths) - 1)
    net = import_module("monai.networks.nets").UNet(2, 1, 2, widths, strides, num_res_units=2)
    size = 128 if large else 64
    return Case(net, torch.randn(4 if large else 1, 1, size, size), [])


def unet_of_smp(large: bool) -> Case:
    net = import_module("segmentation_models_pytorch").Unet(
        "resnet18", encoder_weights=None, in_channels=3, classes=2
    )
    blocks = [*net.encoder.layer1, *net.encoder.layer2, *net.encoder.layer3, *net.decoder.blocks]
    size = 192 if large else 96
    return Case(net, torch.randn(4, 3, size, size), blocks)


def unet_of_diffusers(large: bool) -> Case:
    widths, size = ((64, 128, 128), 64) if large else ((32, 32), 32)
    net = import_module("diffusers").UNet2DModel(
        sample_size=size, block_out_channels=widths, layers_per_block=2, norm_num_groups=8,
        down_block_types=("DownBlock2D",) * len(widths),
        up_block_types=("UpBlock2D",) * len(widths),
    )  # fmt: skip
    sample = {"sample": torch.randn(4 if large else 1, 3, size, size), "timestep": torch.tensor(3)}
    return Case(net, sample, [*net.down_blocks, *net.up_blocks])


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
    "transformers Gemma 2": hugging(
        "Gemma2Model", "Gemma2Config",
        lambda n, w: plain_sizes(n, w) | {"num_key_value_heads": 2, "head_dim": w // 4},
        ("layers",), text,
    ),
    "transformers GPT-NeoX": hugging(
        "GPTNeoXModel", "GPTNeoXConfig", plain_sizes, ("layers",), text
    ),
    "transformers T5": hugging(
        "T5Model", "T5Config", t5, ("encoder.block", "decoder.block"), pair_of_texts
    ),
    "transformers Whisper": hugging(
        "WhisperModel", "WhisperConfig", whisper, ("encoder.layers", "decoder.layers"),
        lambda b, t: {
            "input_features": torch.randn(b, 16, 128 if t == SMALL[3] else 4 * t),
            "decoder_input_ids": ids(b, t),
        },
    ),
    "transformers Wav2Vec2": hugging(
        "Wav2Vec2Model", "Wav2Vec2Config", speech, ("encoder.layers",), spoken
    ),
    "transformers Conformer": hugging(
        "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", speech, ("encoder.layers",), spoken
    ),
    "transformers Mamba": hugging(
        "MambaModel", "MambaConfig",
        lambda n, w: {
            "vocab_size": 100, "hidden_size": w, "num_hidden_layers": n // 2, "state_size": 8
        },
        ("layers",), lambda b, t: text(b, t // 4),
    ),
    "transformers ConvNeXt": hugging(
        "ConvNextModel", "ConvNextConfig", convnext,
        tuple(f"encoder.stages.{k}.layers" for k in range(4)), images,
    ),
    "transformers DETR": hugging(
        "DetrModel", "DetrConfig", detr, ("encoder.layers", "decoder.layers"), images
    ),
    "MONAI U-Net": unet_of_monai,
    "segmentation-models U-Net": unet_of_smp,
    "diffusers U-Net": unet_of_diffusers,
}  # fmt: skip


def build(name: str, *, large: bool = False) -> Case | None:
    """A model in training, None where its library is not installed."""
    torch.manual_seed(0)
    try:
        case = MODELS[name](large)
    except ImportError:
        return None
    case.model.train()
    return case
