"""Claim: whatever a model of transformers does, it is right within its budget, or refused by name.

Every architecture of transformers that can be made small by its configuration and runs on token
numbers, pixels or sound alone, with random weights. Each is checked as in ``timm_models.py``. A
model that needs other inputs, or more than 30 million parameters or two minutes, is left out, and
the JSON says why.

    pip install transformers
    python benchmarks/transformers_models.py            # JSON into benchmarks/results/
    python benchmarks/transformers_models.py albert t5  # a quick look; nothing is written
"""

import copy
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.machine import machine_of
from timm_models import measured, step

RESULTS = Path(__file__).parent / "results"
SECONDS, PARAMETERS = 120, 30_000_000
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


class LateError(BaseException):
    """A model takes too long. No handler of exceptions may end it."""


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


def runs(kind: str) -> Loss:
    """A small model of a kind, with inputs that it takes; raises if there are none."""
    model, error = made(kind), Exception()
    for given in inputs(model):
        loss = Loss(model, given)
        try:
            step(copy.deepcopy(loss), torch.ones(()))
            return loss
        except Exception as failed:
            error = failed
    raise error


def row(kind: str) -> dict[str, Any]:
    """One architecture, or why it is left out or refused."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def late(*_: Any) -> None:
        raise LateError(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        try:
            loss = runs(kind)
        except Exception as error:
            return {"model": kind, "left out": f"{type(error).__name__}: {error}"[:100]}
        return measured(kind, loss, torch.ones(()))
    except (rg.BudgetError, rg.CellError) as refusal:
        return {"model": kind, "refused": str(refusal)}
    except LateError as error:
        return {"model": kind, "left out": str(error)}
    except Exception as error:
        return {"model": kind, "raised": f"{type(error).__name__}: {error}"}
    finally:
        signal.alarm(0)


def main() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    with get_context("fork").Pool(2, maxtasksperchild=40) as pool:
        rows = []
        for found in pool.imap(row, sys.argv[1:] or CONFIG_MAPPING_NAMES):
            rows.append(found)
            print(found, flush=True)
    if not sys.argv[1:]:
        document = {"machine": machine_of(torch.device("cpu")), "rows": rows}
        path = RESULTS / "transformers_models_cpu.json"
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
