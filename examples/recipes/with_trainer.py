"""With transformers' ``Trainer``: a lean tape, one line beside ``gradient_checkpointing``.

``rg.lean(model)`` wraps the forward pass for good. Tensors that cheap operations made are computed
again in the backward pass, with the same bits. The weights are random here: nothing is loaded.

    python examples/recipes/with_trainer.py
"""

import tempfile

import torch
from torch import Tensor, nn
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

    def weights(*, lean: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model: nn.Module = GPT2LMHeadModel(config)
        if lean:
            model = rg.lean(model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=16, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            Trainer(model, arguments, train_dataset=data).train()
        return [p.detach() for p in model.parameters()]

    return compare(
        ("Trainer", lambda: weights(lean=False)),
        ("rg.lean(model)", lambda: weights(lean=True)),
        rounds,
    )


if __name__ == "__main__":
    main()
