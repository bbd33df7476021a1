"""With transformers' ``Trainer``: a budget for the blocks, in one line before the ``Trainer``.

The ``Trainer`` needs no setting. ``gradient_checkpointing=True`` drops every block, however much
memory there is, and switches caches off. ``rg.budget`` keeps what the bytes have room for. The
weights are random here: nothing is loaded.

    python examples/recipes/with_trainer.py
"""

import copy
import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

import retrograde as rg
from compare import compare


def main(layers: int = 4, length: int = 128, rounds: int = 3) -> dict[str, float]:
    """Compare some steps of training, and the weights that come of it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokens = torch.randint(500, (32, length), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": one, "labels": one} for one in tokens]
    sizes = {"n_embd": 256, "n_head": 4, "vocab_size": 500, "n_positions": length}
    config = GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **sizes)

    torch.manual_seed(0)
    before = GPT2LMHeadModel(config)
    start, after = copy.deepcopy(before.state_dict()), copy.deepcopy(before)
    batch = {"input_ids": tokens[:16], "labels": tokens[:16]}
    print(rg.budget(after, "50%", sample=batch))  # the whole change

    def weights(model: GPT2LMHeadModel) -> list[Tensor]:
        torch.manual_seed(0)
        model.load_state_dict(start)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=16, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=data).train()
        return [p.detach().clone() for p in model.parameters()]

    return compare(
        ("Trainer", lambda: weights(before)),
        ('rg.budget(model, "50%")', lambda: weights(after)),
        rounds,
    )


if __name__ == "__main__":
    main()
