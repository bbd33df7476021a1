"""Models of other libraries as people train them: default dropout, their task's head, and labels.

case = CASES["timm levit_128s"]()    # a model, how a batch is drawn, and its loss
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CASES", "Case"]

WIDTH, BATCH, LENGTH, VOCABULARY = 64, 4, 64, 200


@dataclass
class Case:
    """A model, how a batch is drawn, and its loss; ``inside``: the model computes it itself."""

    model: nn.Module
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor] | None = None

    def of(self, model: nn.Module, batch: Any) -> Tensor:
        given = batch[0] if self.loss else batch
        if isinstance(given, dict):
            found = model(**given)
        else:
            found = model(*given) if isinstance(given, tuple) else model(given)
        if self.loss:
            return self.loss(found, batch[1])
        return found if isinstance(found, Tensor) else found["loss"]


def ids(*shape: int) -> Tensor:
    return torch.randint(5, VOCABULARY, shape or (BATCH, LENGTH))


# transformers: configurations of its own, with default dropout.

HUGGING: dict[str, tuple[str, str, dict[str, Any]]] = {}  # model: configuration, labels, options


def hugging(name: str, config: str, labels: str = "class", **options: Any) -> None:
    HUGGING[name] = config, labels, options


PLAIN = {
    "hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH, "vocab_size": VOCABULARY,
}  # fmt: skip
GROUPED = PLAIN | {"num_key_value_heads": 2}
HALVES = {
    "d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "vocab_size": VOCABULARY,
}  # fmt: skip
hugging("BertForSequenceClassification", "BertConfig", **PLAIN)
hugging("RobertaForMaskedLM", "RobertaConfig", "token", **PLAIN)
hugging("AlbertForSequenceClassification", "AlbertConfig", embedding_size=32, **PLAIN)
hugging("ElectraForTokenClassification", "ElectraConfig", "tag", embedding_size=32, **PLAIN)
hugging("DebertaV2ForSequenceClassification", "DebertaV2Config", relative_attention=True,
        pos_att_type=["p2c", "c2p"], **PLAIN)  # fmt: skip
hugging("DistilBertForQuestionAnswering", "DistilBertConfig", "span", dim=WIDTH, n_layers=4,
        n_heads=4, hidden_dim=256, vocab_size=VOCABULARY)  # fmt: skip
hugging("GPT2LMHeadModel", "GPT2Config", "token", n_embd=WIDTH, n_layer=4, n_head=4,
        vocab_size=VOCABULARY)  # fmt: skip
hugging("GPT2ForSequenceClassification", "GPT2Config", n_embd=WIDTH, n_layer=4, n_head=4,
        vocab_size=VOCABULARY, pad_token_id=0)  # fmt: skip
hugging("LlamaForCausalLM", "LlamaConfig", "token", **GROUPED)
hugging("Qwen2ForSequenceClassification", "Qwen2Config", pad_token_id=0, **GROUPED)
hugging("Gemma2ForCausalLM", "Gemma2Config", "token", head_dim=16, **GROUPED)
hugging("MixtralForCausalLM", "MixtralConfig", "token", num_local_experts=4,
        output_router_logits=True, **GROUPED)  # fmt: skip
hugging("OPTForCausalLM", "OPTConfig", "token", ffn_dim=256, word_embed_proj_dim=WIDTH,
        layerdrop=0.1, **{k: v for k, v in PLAIN.items() if k != "intermediate_size"})  # fmt: skip
hugging("BloomForCausalLM", "BloomConfig", "token", hidden_size=WIDTH, n_layer=4, n_head=4,
        hidden_dropout=0.1, attention_dropout=0.1, vocab_size=VOCABULARY)  # fmt: skip
hugging("T5ForConditionalGeneration", "T5Config", "token", d_model=WIDTH, d_kv=16, d_ff=256,
        num_layers=3, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0)  # fmt: skip
hugging("BartForConditionalGeneration", "BartConfig", "token", **HALVES)
hugging("MambaForCausalLM", "MambaConfig", "token", hidden_size=WIDTH, num_hidden_layers=4,
        state_size=8, vocab_size=VOCABULARY)  # fmt: skip
hugging("ViTForImageClassification", "ViTConfig", "image", image_size=64, patch_size=8,
        hidden_dropout_prob=0.1, **PLAIN)  # fmt: skip
hugging("SwinForImageClassification", "SwinConfig", "image", image_size=64, patch_size=4,
        embed_dim=32, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4)  # fmt: skip
hugging("SegformerForSemanticSegmentation", "SegformerConfig", "mask", depths=[2, 2, 2, 2],
        hidden_sizes=[16, 32, 64, 64], decoder_hidden_size=64)  # fmt: skip
hugging("Wav2Vec2ForCTC", "Wav2Vec2Config", "sound", conv_dim=(32, 32, 32), conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        mask_time_length=4, pad_token_id=0, **PLAIN)  # fmt: skip
hugging("WhisperForConditionalGeneration", "WhisperConfig", "speech", num_mel_bins=16,
        max_source_positions=64, max_target_positions=64, decoder_start_token_id=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, dropout=0.1, **HALVES)  # fmt: skip


def labelled(kind: str) -> dict[str, Tensor]:
    """A batch as a data collator gives it."""
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1))).long()
    image = {"pixel_values": torch.randn(BATCH, 3, 64, 64)}
    text, tokens = {"input_ids": ids(), "attention_mask": mask}, ids().where(mask > 0, -100)
    classes = torch.randint(2, (BATCH,))
    return {
        "class": lambda: text | {"labels": classes},
        "token": lambda: text | {"labels": tokens},
        "tag": lambda: text | {"labels": torch.randint(2, (BATCH, LENGTH)).where(mask > 0, -100)},
        "span": lambda: text | {"start_positions": classes + 3, "end_positions": classes + 9},
        "image": lambda: image | {"labels": classes},
        "mask": lambda: image | {"labels": torch.randint(2, (BATCH, 64, 64))},
        "sound": lambda: {"input_values": torch.randn(BATCH, 1600), "labels": ids(BATCH, 6) % 30},
        "speech": lambda: {"input_features": torch.randn(BATCH, 16, 128), "labels": ids(BATCH, 40)},
    }[kind]()


def from_transformers(name: str) -> Case:
    library = import_module("transformers")
    config, labels, options = HUGGING[name]
    net = getattr(library, name)(getattr(library, config)(**options))
    return Case(net, partial(labelled, labels))


# Images: torchvision and timm.


def classes(y: Any, target: Tensor) -> Tensor:
    """Cross-entropy, with auxiliary heads as torchvision's recipes weigh them."""
    if isinstance(y, Tensor):
        return functional.cross_entropy(y, target)
    if isinstance(y, dict):
        return functional.cross_entropy(
            y["out"], target[:, None, None].expand(-1, *y["out"].shape[2:])
        )
    first, *more = [t for t in y if t is not None]
    return classes(first, target) + sum(0.3 * classes(t, target) for t in more)


def images(model: nn.Module, size: int, batch: int = BATCH, frames: tuple[int, ...] = ()) -> Case:
    def draw() -> Any:
        return torch.randn(batch, 3, *frames, size, size), torch.randint(10, (batch,))

    return Case(model, draw, classes)


VISION = {
    "resnet18": {}, "resnet50": {}, "mobilenet_v3_small": {}, "efficientnet_b0": {},
    "vgg11_bn": {}, "alexnet": {}, "densenet121": {}, "squeezenet1_1": {},
    "shufflenet_v2_x0_5": {}, "googlenet": {"init_weights": False}, "mnasnet0_5": {},
    "regnet_y_400mf": {}, "convnext_tiny": {}, "swin_t": {}, "lraspp_mobilenet_v3_large": {},
    "r3d_18": {},
}  # fmt: skip


def from_torchvision(name: str) -> Case:
    models = import_module("torchvision.models")
    if name == "VisionTransformer":
        return images(models.VisionTransformer(64, 8, 4, 4, 64, 256, 0.1, 0.1, num_classes=10), 64)
    if name == "lraspp_mobilenet_v3_large":
        net = models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=10)
    elif name == "r3d_18":
        return images(models.video.r3d_18(num_classes=10), 32, 2, (4,))
    else:
        net = getattr(models, name)(num_classes=10, **VISION[name])
    return images(net, 96 if name in ("alexnet", "vgg11_bn") else 64)


TIMM = {
    "deit_tiny_patch16_224": {"img_size": 64, "drop_path_rate": 0.1},
    "convnext_atto": {"drop_path_rate": 0.1}, "efficientnet_lite0": {"drop_rate": 0.2},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 4, "embed_dim": 32},
    "mixer_s32_224": {"img_size": 64}, "levit_128s": {"img_size": 64}, "mobilevit_xxs": {},
    "pvt_v2_b0": {"drop_path_rate": 0.1}, "regnety_002": {}, "resnet26t": {"drop_rate": 0.1},
    "eva02_tiny_patch14_224": {"img_size": 56, "drop_path_rate": 0.1},
}  # fmt: skip


def from_timm(name: str) -> Case:
    net = import_module("timm").create_model(name, num_classes=10, **TIMM[name])
    return images(net, TIMM[name].get("img_size", 64))


def squares(y: Any, target: Any) -> Tensor:
    y = getattr(y, "sample", y)
    return functional.mse_loss((y[0] if isinstance(y, tuple) else y).float(), target)


def from_diffusers(name: str) -> Case:
    library = import_module("diffusers")
    times = lambda: torch.randint(1000, (BATCH,))  # noqa: E731
    noise = lambda c=4: torch.randn(BATCH, c, 16, 16)  # noqa: E731
    if name == "UNet2DModel":
        net = library.UNet2DModel(
            sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64),
            norm_num_groups=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1,
        )  # fmt: skip
        return Case(net, lambda: ({"sample": noise(), "timestep": times()}, noise()), squares)
    if name == "UNet2DConditionModel":
        net = library.UNet2DConditionModel(
            sample_size=16, block_out_channels=(32, 64), cross_attention_dim=32, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip

        def draw() -> Any:
            texts = torch.randn(BATCH, 8, 32)
            given = {"sample": noise(), "timestep": times(), "encoder_hidden_states": texts}
            return given, noise()

        return Case(net, draw, squares)
    if name == "DiTTransformer2DModel":
        net = library.DiTTransformer2DModel(
            num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=4,
            num_layers=4, sample_size=16, norm_num_groups=8, dropout=0.1,
        )  # fmt: skip

        def draw() -> Any:
            labels = torch.randint(1000, (BATCH,))
            return {"hidden_states": noise(), "timestep": times(), "class_labels": labels}, noise()

        return Case(net, draw, squares)
    net = library.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=2, sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    draw = lambda: ((torch.randn(BATCH, 3, 32, 32),), torch.randn(BATCH, 3, 32, 32))  # noqa: E731
    return Case(net, draw, squares)


def from_torchaudio(name: str) -> Case:
    models = import_module("torchaudio.models")
    lengths = torch.full((BATCH,), 64)
    target = lambda n: torch.randn(BATCH, 64, n)  # noqa: E731
    if name == "Conformer":
        net = models.Conformer(32, 4, 128, 4, 15, dropout=0.1)
        return Case(net, lambda: ((target(32), lengths), target(32)), squares)
    if name == "Emformer":
        net = models.Emformer(32, 4, 128, 4, 16, dropout=0.1)
        return Case(net, lambda: ((target(32), lengths), target(32)), squares)
    if name == "ConvTasNet":
        net = models.ConvTasNet(2, 8, 32, 3, 16, 32, 4, 2)
        draw = lambda: (torch.randn(BATCH, 1, 1000), torch.randn(BATCH, 2, 1000))  # noqa: E731
        return Case(net, draw, squares)
    if name == "DeepSpeech":
        net = models.DeepSpeech(32, 64, 20, 0.1)
        draw = lambda: (torch.randn(BATCH, 1, 64, 32), target(20))  # noqa: E731
        return Case(net, draw, squares)
    net = models.wav2vec2_model(
        "group_norm", [(32, 10, 5), (32, 3, 2), (32, 3, 2)], False, 64, 0.1, 16, 4, 4, 4, 0.1, 256,
        0.1, 0.1, False, 0.1, 20,
    )  # fmt: skip

    def ctc(y: Any, target: Tensor) -> Tensor:
        y = (y[0] if isinstance(y, tuple) else y).float().log_softmax(-1).transpose(0, 1)
        given = torch.full((BATCH,), len(y)), torch.full((BATCH,), target.shape[1])
        return functional.ctc_loss(y, target, *given)

    draw = lambda: (torch.randn(BATCH, 1600), torch.randint(1, 20, (BATCH, 6)))  # noqa: E731
    return Case(net, draw, ctc)


X_DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {}, "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1},
    "rotary, flash": {"rotary_pos_emb": True, "attn_flash": True},
    "alibi, GLU": {"alibi_pos_bias": True, "ff_glu": True, "attn_num_mem_kv": 4},
    "layer dropout": {"layer_dropout": 0.1},
    "sandwich, RMS": {"sandwich_coef": 2, "use_rmsnorm": True, "residual_attn": True},
}  # fmt: skip


def from_x_transformers(name: str) -> Case:
    library = import_module("x_transformers")
    if name == "encoder and decoder":
        net = library.XTransformer(
            dim=WIDTH, enc_num_tokens=VOCABULARY, enc_depth=3, enc_heads=4, enc_max_seq_len=LENGTH,
            dec_num_tokens=VOCABULARY, dec_depth=3, dec_heads=4, dec_max_seq_len=LENGTH,
            tie_token_emb=True,
        )  # fmt: skip
        return Case(net, lambda: (ids(), ids()))
    if name == "ViT":
        layers = library.Encoder(dim=WIDTH, depth=4, heads=4, layer_dropout=0.0, ff_dropout=0.1)
        net = library.ViTransformerWrapper(
            image_size=64, patch_size=8, num_classes=10, attn_layers=layers, emb_dropout=0.1
        )
        return images(net, 64)
    layers = library.Decoder(dim=WIDTH, depth=6, heads=4, **X_DECODERS[name])
    inner = library.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers
    )
    return Case(library.AutoregressiveWrapper(inner), ids)


def from_peft(name: str) -> Case:
    library = import_module("peft")
    kind, options = {
        "LoRA of Llama": ("LlamaForCausalLM", {"target_modules": ["q_proj", "v_proj"]}),
        "IA3 of BERT": (
            "BertForSequenceClassification",
            {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": []},
        ),
        "DoRA of GPT-2": ("GPT2LMHeadModel", {"target_modules": ["c_attn"], "use_dora": True}),
    }[name]
    case = from_transformers(kind)
    if name.startswith("IA3"):
        config = library.IA3Config(task_type="SEQ_CLS", **options)
    else:
        config = library.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, **options)
    return Case(library.get_peft_model(case.model, config), case.batch)


CASES: dict[str, Callable[[], Case]] = {
    f"{library} {name}": partial(make, name)
    for library, make, names in (
        ("transformers", from_transformers, HUGGING),
        ("torchvision", from_torchvision, (*VISION, "VisionTransformer")),
        ("timm", from_timm, TIMM),
        ("diffusers", from_diffusers, ("UNet2DModel", "UNet2DConditionModel",
                                       "DiTTransformer2DModel", "AutoencoderKL")),
        ("torchaudio", from_torchaudio, ("Conformer", "Emformer", "ConvTasNet", "DeepSpeech",
                                         "Wav2Vec2")),
        ("x-transformers", from_x_transformers, (*X_DECODERS, "encoder and decoder", "ViT")),
        ("peft", from_peft, ("LoRA of Llama", "IA3 of BERT", "DoRA of GPT-2")),
    )
    for name in names
}  # fmt: skip
