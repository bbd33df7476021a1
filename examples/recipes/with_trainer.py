"""With transformers' ``Trainer``: a budget for the blocks, in one line before the ``Trainer``.

The ``Trainer`` needs no setting. ``gradient_checkpointing=True`` drops every block, however much
memory there is. ``rg.budget`` keeps what the bytes have room for. The weights are random here: with
a network, ``GPT2LMHeadModel.from_pretrained("gpt2")`` is budgeted in the same way.

    python examples/recipes/with_trainer.py
"""

import copy
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

import retrograde as rg


def ways(layers: int = 4, length: int = 128) -> dict[str, Callable[[], list[Tensor]]]:
    """Two steps of training, and the weights that come of it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens = torch.randint(500, (32, length), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": one, "labels": one} for one in tokens]
    sizes = {"n_embd": 256, "n_head": 4, "vocab_size": 500, "n_positions": length}
    config = GPT2Config(n_layer=layers, use_cache=False, **sizes)

    torch.manual_seed(0)
    before = GPT2LMHeadModel(config)
    start, after = copy.deepcopy(before.state_dict()), copy.deepcopy(before)
    batch = {"input_ids": tokens[:16], "labels": tokens[:16]}
    print(rg.budget(after, "30%", sample=batch))  # the whole change

    def weights(model: GPT2LMHeadModel, drop: bool = False) -> list[Tensor]:
        torch.manual_seed(0)
        model.load_state_dict(start)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=16, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
                gradient_checkpointing=drop,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=data).train()
        return [p.detach().clone() for p in model.parameters()]

    return {
        "Trainer": lambda: weights(before),
        "gradient_checkpointing=True": lambda: weights(copy.deepcopy(before), drop=True),
        'rg.budget(model, "30%")': lambda: weights(after),
    }


if __name__ == "__main__":
    for name, way in ways().items():
        way()  # a first call measures
        print(f"{name}: {rg.measure(way)}")
