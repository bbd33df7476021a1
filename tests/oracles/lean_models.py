"""Models of many kinds, with random weights: what saves memory in all of them is measured on these.

``build(name, large)`` returns a model and a function of it that returns its loss. Models of other
libraries are made by those; None is returned where one is not installed.
"""

import itertools
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg

Built = tuple[nn.Module, Callable[[Any], Tensor]]


def mean_square(found: Any) -> Tensor:
    """A loss of a model's output: a tensor, or what transformers return."""
    if not isinstance(found, Tensor):
        found = found[0]
    return found.float().square().mean()


def _of(model: nn.Module, *args: Any, **kwargs: Any) -> Built:
    return model, lambda net: mean_square(net(*args, **kwargs))


def encoder(large: bool, norm_first: bool = True) -> Built:
    width, layers, tokens = (384, 4, 128) if large else (32, 2, 16)
    layer = nn.TransformerEncoderLayer(
        width, width // 64 or 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=norm_first
    )
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return _of(net, torch.randn(8 if large else 2, tokens, width))


def _transformers(name: str, large: bool) -> Built | None:
    if find_spec("transformers") is None:
        return None
    import transformers as hf

    width, layers, tokens, batch = (384, 4, 128, 8) if large else (32, 2, 16, 2)
    ids = torch.randint(0, 200, (batch, tokens))
    common = {
        "vocab_size": 200,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64 or 4,
        "intermediate_size": 4 * width,
    }
    few = {**common, "intermediate_size": 3 * width, "num_key_value_heads": 2}
    heads = common["num_attention_heads"]
    side = 32 if not large else 64 if name == "ViT" else 128
    image = torch.randn(batch, 3, side, side)
    patches = {"image_size": image.shape[-1], "patch_size": 8}
    if name == "GPT-2":
        config = hf.GPT2Config(
            vocab_size=200,
            n_positions=256,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            use_cache=False,
        )
        return _of(hf.GPT2LMHeadModel(config), ids, labels=ids)
    if name == "BERT":
        return _of(hf.BertModel(hf.BertConfig(**common)), ids)
    if name == "Llama":
        return _of(hf.LlamaModel(hf.LlamaConfig(**few, use_cache=False)), ids)
    if name == "Gemma 2":
        config = hf.Gemma2Config(**few, head_dim=width // heads, use_cache=False)
        return _of(hf.Gemma2Model(config), ids)
    if name == "T5":
        config = hf.T5Config(
            vocab_size=200,
            d_model=width,
            d_kv=width // heads,
            d_ff=4 * width,
            num_layers=layers // 2,
            num_heads=heads,
            use_cache=False,
        )
        return _of(hf.T5Model(config), input_ids=ids, decoder_input_ids=ids)
    if name == "Whisper":
        config = hf.WhisperConfig(
            vocab_size=200,
            num_mel_bins=20,
            d_model=width,
            encoder_layers=layers // 2,
            decoder_layers=layers // 2,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            max_source_positions=tokens,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        features = torch.randn(batch, 20, 2 * tokens)
        return _of(hf.WhisperModel(config), features, decoder_input_ids=ids[:, : tokens // 2])
    if name in ("Wav2Vec2", "Conformer"):
        kind = "Wav2Vec2Conformer" if name == "Conformer" else "Wav2Vec2"
        sizes = {key: one for key, one in common.items() if key != "vocab_size"}
        config = getattr(hf, f"{kind}Config")(
            **sizes,
            conv_dim=(width // 2,) * 4,
            conv_stride=(5, 4, 2, 2),
            conv_kernel=(10, 4, 3, 2),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            layerdrop=0.0,
        )
        return _of(getattr(hf, f"{kind}Model")(config), torch.randn(batch, 80 * tokens))
    if name == "ViT":
        sizes = {key: one for key, one in common.items() if key != "vocab_size"}
        return _of(hf.ViTModel(hf.ViTConfig(**sizes, **patches)), image)
    if name == "Swin":
        config = hf.SwinConfig(
            image_size=image.shape[-1],
            patch_size=4,
            embed_dim=96 if large else 16,
            depths=[2, 2],
            num_heads=[3, 6] if large else [2, 4],
            window_size=4,
        )
        return _of(hf.SwinModel(config), image)
    if name == "ConvNeXt":
        sizes = [96, 192, 384] if large else [8, 16, 32]
        return _of(
            hf.ConvNextModel(hf.ConvNextConfig(hidden_sizes=sizes, depths=[2, 2, 2], num_stages=3)),
            image,
        )
    if name == "ResNet-50":
        sizes = [256, 512, 1024, 2048] if large else [16, 32, 32, 32]
        depths = [3, 4, 6, 3] if large else [1, 1, 1, 1]
        config = hf.ResNetConfig(
            embedding_size=64 if large else 8, hidden_sizes=sizes, depths=depths
        )
        return _of(hf.ResNetModel(config), image)
    raise ValueError(name)


class _Block(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return self.relu(y)


def resnet18(large: bool) -> Built:
    widths = [64, 64, 128, 256, 512] if large else [8, 8, 16]
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
    ]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [_Block(a, b, 1 if i == 0 else 2), _Block(b, b, 1)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return _of(net, torch.randn(16 if large else 2, 3, 32 if large else 16, 32 if large else 16))


class UNet(nn.Module):
    """Down, up and connections between: with batch or group normalisation, ReLU or SiLU."""

    def __init__(self, width: int, levels: int, group: bool) -> None:
        super().__init__()
        self.group = group
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(
            self.two(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(self.two(2 * w, w) for w in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, 3, 1)

    def two(self, inputs: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for i in (inputs, outputs):
            layers.append(nn.Conv2d(i, outputs, 3, 1, 1))
            layers.append(nn.GroupNorm(4, outputs) if self.group else nn.BatchNorm2d(outputs))
            layers.append(nn.SiLU() if self.group else nn.ReLU(inplace=True))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


class Recommender(nn.Module):
    """Like DLRM: embeddings, their products, and two multilayer perceptrons."""

    def __init__(self, width: int, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(100, width) for _ in range(tables))
        self.bottom = self.mlp(13, 4 * width, 2 * width, width)
        pairs = tables * (tables + 1) // 2
        self.top = self.mlp(width + pairs, 8 * width, 4 * width, 1)

    @staticmethod
    def mlp(*widths: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
        return nn.Sequential(*layers[:-2])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        all_ = torch.stack([x, *(t(i) for t, i in zip(self.tables, ids, strict=True))], 1)
        products = all_ @ all_.transpose(1, 2)
        i, j = torch.tril_indices(products.shape[1], products.shape[2], -1)
        return self.top(torch.cat([x, products[:, i, j]], 1))


class Field(nn.Module):
    """Like a neural radiance field with sines: a multilayer perceptron of encoded positions."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if i else 63, width) for i in range(layers))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        encoded = [f(x * 2**k) for k in range(10) for f in (torch.sin, torch.cos)]
        x = torch.cat([x, *encoded], -1)
        for i, layer in enumerate(self.layers):
            x = torch.sin(layer(x)) if i % 2 else torch.cos(layer(x))
        return self.last(x)


class HandMade(nn.Module):
    """An LSTM written by hand, a step at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, xs: Tensor) -> Tensor:
        h = c = xs.new_zeros(xs.shape[1:])
        outputs = []
        for x in xs:
            i, f, g, o = (self.inputs(x) + self.hidden(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs)


class Language(nn.Module):
    """This library's LSTM between an embedding and logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(200, width), nn.Dropout(0.2)
        self.lstm, self.norm = rg.LSTM(width, width, memory="80%"), nn.LayerNorm(width)
        self.logits = nn.Linear(width, 200)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.drop(self.embed(ids)))
        return nn.functional.log_softmax(self.logits(self.drop(self.norm(x))), -1)


class Swish(nn.Module):
    """A state of the art block in plain Python: RMSNorm, SwiGLU and GPT-2's GELU."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.scale = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.rise = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.fall = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for scale, gate, rise, fall in zip(
            self.scale, self.gate, self.rise, self.fall, strict=True
        ):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
            y = nn.functional.silu(gate(y)) * rise(y)
            x = x + fall(0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))
        return x


def _own(name: str, large: bool) -> Built:
    if name == "Encoder":
        return encoder(large)
    if name == "Encoder, norm last":
        return encoder(large, norm_first=False)
    if name == "ResNet-18":
        return resnet18(large)
    if name in ("U-Net", "U-Net, groups"):
        net: nn.Module = UNet(64 if large else 8, 4 if large else 2, name != "U-Net")
        return _of(net, torch.randn(4 if large else 2, 3, 64 if large else 16, 64 if large else 16))
    if name == "Recommender":
        rows, width, tables = (4096, 64, 8) if large else (32, 8, 3)
        dense, ids = torch.randn(rows, 13), torch.randint(0, 100, (tables, rows))
        return _of(Recommender(width, tables), dense, ids)
    if name == "Field":
        return _of(
            Field(256 if large else 32, 8 if large else 3), torch.rand(4096 if large else 64, 3)
        )
    if name == "LSTM by hand":
        steps, batch, width = (50, 64, 256) if large else (5, 4, 16)
        return _of(HandMade(width), torch.randn(steps, batch, width))
    if name == "LSTM language model":
        steps, batch, width = (100, 32, 256) if large else (20, 4, 16)
        return _of(Language(width), torch.randint(0, 200, (steps, batch)))
    width, layers, rows = (256, 6, 1024) if large else (32, 2, 32)
    return _of(Swish(width, layers), torch.randn(rows, width))


OWN = [
    "Encoder",
    "Encoder, norm last",
    "ResNet-18",
    "U-Net",
    "U-Net, groups",
    "Recommender",
    "Field",
    "LSTM by hand",
    "LSTM language model",
    "Gated",
]
OTHERS = [
    "GPT-2",
    "BERT",
    "Llama",
    "Gemma 2",
    "T5",
    "Whisper",
    "Wav2Vec2",
    "Conformer",
    "ViT",
    "Swin",
    "ConvNeXt",
    "ResNet-50",
]


def build(name: str, large: bool = False) -> Built | None:
    """Return a model and its loss, or None if its library is not installed."""
    torch.manual_seed(0)
    return _own(name, large) if name in OWN else _transformers(name, large)
