"""Architectures of timm and transformers: as they are, or made small by their configuration.

Each comes with inputs, as a module of one tensor. What needs other inputs, or has more than 30
million parameters, is left out by an error.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oracles.judged import step

__all__ = ["TIMM", "of_timm", "of_transformers"]

PARAMETERS = 30_000_000
TIMM = """
    convnextv2_atto efficientnet_b0 mobilenetv3_small_050 regnetx_002 densenet121 resnext50_32x4d
    deit_tiny_patch16_224 coat_tiny xcit_nano_12_p16_224 poolformer_s12 edgenext_xx_small
    maxvit_rmlp_pico_rw_256 nfnet_l0 repvgg_a0 ghostnet_050 hrnet_w18_small inception_v3 levit_128s
    visformer_tiny gmlp_ti16_224 resmlp_12_224 volo_d1_224 efficientformer_l1 focalnet_tiny_srf
    davit_tiny res2net50_14w_8s dpn68 selecsls42 tinynet_e rexnet_100 cspresnet50 skresnet18
    legacy_seresnet18 eca_nfnet_l0 pit_ti_224 convit_tiny beit_base_patch16_224
    eva02_tiny_patch14_224 hiera_tiny_224 fastvit_t8 starnet_s1 mambaout_femto tiny_vit_5m_224
    sequencer2d_s swinv2_cr_tiny_224 twins_svt_small xception41
"""
#: Numbers of a configuration, in place of its own.
SMALL = {
    64: "hidden_size d_model n_embd dim embedding_size embed_dim d_embed image_size",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim
        feed_forward_size d_inner max_position_embeddings n_positions""",
    32: "projection_dim moe_intermediate_size shared_expert_intermediate_size",
    16: """head_dim d_kv d_head v_head_dim kv_lora_rank q_lora_rank patch_size attention_window
        hidden_size_per_layer_input""",
    8: "qk_rope_head_dim qk_nope_head_dim state_size",
    4: """num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads
        encoder_attention_heads decoder_attention_heads num_local_experts num_experts
        n_routed_experts""",
    3: """encoder_layers decoder_layers num_decoder_layers num_encoder_layers
        encoder_num_hidden_layers""",
    2: "num_key_value_heads num_experts_per_tok eos_token_id",
    1: "n_group topk_group bos_token_id decoder_start_token_id",
    0: "pad_token_id",
    300: "vocab_size vocab_size_per_layer_input",
}
NUMBERS = {name: value for value, names in SMALL.items() for name in names.split()}
GROUPED = ("head_dim", "num_key_value_heads")  # which some configurations compute themselves


class Loss(nn.Module):
    """A model with its inputs, and a loss that is the mean square of its first output."""

    def __init__(self, model: nn.Module, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(**self.given)
        outputs = found.to_tuple() if hasattr(found, "to_tuple") else found
        numbers = (t for t in outputs if isinstance(t, Tensor) and t.is_floating_point())
        return next(numbers).square().mean() * x


def made(kind: str) -> nn.Module:
    """A small model of a kind; raises if there is none."""
    from transformers import AutoModel, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base, error = CONFIG_MAPPING[kind], Exception("too many parameters")
    plain = {k for k, v in base().to_dict().items() if not isinstance(v, list | tuple | dict)}
    for without in ((), GROUPED[:1], GROUPED[1:], GROUPED, NUMBERS):
        small = {k: v for k, v in NUMBERS.items() if k not in without}
        try:
            config = base(**{k: v for k, v in small.items() if k in plain})
            parts = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
            for part in parts:
                for name in [k for k in small if isinstance(getattr(part, k, None), int)]:
                    setattr(part, name, small[name])
            for one in (config, *parts):
                one.use_cache = False
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
            if count <= PARAMETERS:
                return AutoModel.from_config(config).float().train()
        except Exception as failed:
            error = failed
    raise error


def inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What such a model may want to be given."""
    name, config = model.main_input_name, model.config
    ids = torch.randint(3, 250, (2, 48))
    size = getattr(config, "image_size", 64)
    image = 2, getattr(config, "num_channels", 3), *2 * [size if isinstance(size, int) else size[0]]
    if name == "pixel_values":
        yield from ({name: torch.randn(image)}, {name: torch.randn(image), "input_ids": ids})
    elif name == "input_values":
        yield from ({name: torch.randn(2, 4000)}, {name: torch.randn(2, 100, 64)})
    elif name == "input_features":
        yield {name: torch.randn(2, 80, 100), "decoder_input_ids": ids[:, :10]}
        yield from ({name: torch.randn(2, 100, n)} for n in (80, 160))
    else:
        yield {"input_ids": ids}
        yield {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
        yield {"input_ids": ids, "pixel_values": torch.randn(2, 3, 64, 64)}


def of_transformers(kind: str) -> tuple[nn.Module, Tensor]:
    """A small model of a kind, with inputs that it takes; raises if there are none."""
    model, error = made(kind), Exception()
    for given in inputs(model):
        loss = Loss(model, given)
        try:
            step(copy.deepcopy(loss), torch.ones(()))
            return loss, torch.ones(())
        except Exception as failed:
            error = failed
    raise error


def of_timm(name: str) -> tuple[nn.Module, Tensor]:
    """An architecture, and two images."""
    import timm

    model = timm.create_model(name, num_classes=10).train()
    fixed, size = model.default_cfg.get("fixed_input_size"), model.default_cfg["input_size"][-1]
    return model, torch.randn(2, 3, *2 * [size if fixed else 96 if size <= 300 else 160])
