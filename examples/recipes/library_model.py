"""A model of a library: GPT-2 of transformers, within a budget.

``rg.budget`` looks for recurrent modules, for ``Sequential`` and for layers that the model calls
one after the other, as GPT-2 does its blocks. It divides the bytes among them, and the model is
used as before. The weights are random here: nothing is loaded.

    python examples/recipes/library_model.py
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import retrograde as rg


def ways(layers: int = 8, length: int = 128) -> dict[str, Callable[[], list[Tensor]]]:
    """The model, and its copy within 30 percent of what its blocks hold."""
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_head": 4, "vocab_size": 500, "n_positions": length}
    config = GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **sizes)
    before = GPT2LMHeadModel(config).train()
    tokens = torch.randint(500, (8, length))
    sample = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    after = copy.deepcopy(before)
    print(rg.budget(after, "30%", sample))  # which layers, and their shares

    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)  # the same dropout in both
        model.zero_grad()
        model(**sample).loss.backward()
        return [p.grad for p in model.parameters()]

    return {
        "GPT2LMHeadModel": lambda: gradients(before),
        "within 30%": lambda: gradients(after),
    }


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
