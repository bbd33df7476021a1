"""Models on a card: the lean tape and budgets, beside ordinary backpropagation and ``checkpoint``.

A section of ``gpu.py``. Sizes keep an H100 busy and fill a good part of its memory; the last model
is too small for that. Each way makes training steps in bfloat16 autocast, in turn with the others.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import retrograde as rg
from alternating import medians

__all__ = ["MODELS", "measured"]

Built = tuple[nn.Module, Any, list[nn.Module]]


def encoder(width: int, layers: int, shape: tuple[int, int]) -> Built:
    layer = nn.TransformerEncoderLayer(
        width, width // 64 or 1, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
    )
    net = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return net, torch.randn(*shape, width), list(net.layers)


def language(model: str, config: str, shape: tuple[int, int], width: int, **options: Any) -> Built:
    import transformers

    net = getattr(transformers, model)(getattr(transformers, config)(use_cache=False, **options))
    blocks = net.h if hasattr(net, "h") else net.layers
    return net, torch.randint(0, 1000, shape), list(blocks)


def gpt2(shape: tuple[int, int], width: int, layers: int) -> Built:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": width // 64 or 1}
    return language("GPT2Model", "GPT2Config", shape, width, **sizes)


def llama(shape: tuple[int, int], width: int, layers: int) -> Built:
    heads = width // 64 or 1
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
             "intermediate_size": 3 * width, "vocab_size": 8000}  # fmt: skip
    return language("LlamaModel", "LlamaConfig", shape, width, **sizes)


def resnet50(batch: int, side: int) -> Built:
    import torchvision

    net = torchvision.models.resnet50()
    stages = (net.layer1, net.layer2, net.layer3, net.layer4)
    return net, torch.randn(batch, 3, side, side), [block for one in stages for block in one]


#: Models by name, each of its size and of a small one, and the package that has it.
MODELS: dict[str, tuple[Callable[[], Built], Callable[[], Built], str]] = {
    "encoder, 12 layers of 768, B=64, 512 tokens": (
        partial(encoder, 768, 12, (64, 512)), partial(encoder, 16, 2, (2, 8)), "torch"),
    "GPT-2, 12 layers of 768, B=32, 1,024 tokens": (
        partial(gpt2, (32, 1024), 768, 12), partial(gpt2, (2, 8), 16, 2), "transformers"),
    "Llama, 12 layers of 1,024, B=24, 1,024 tokens": (
        partial(llama, (24, 1024), 1024, 12), partial(llama, (2, 8), 16, 2), "transformers"),
    "ResNet-50, B=256, 224×224": (
        partial(resnet50, 256, 224), partial(resnet50, 2, 32), "torchvision"),
    "encoder, 4 layers of 384, B=8, 128 tokens": (
        partial(encoder, 384, 4, (8, 128)), partial(encoder, 16, 2, (2, 8)), "torch"),
}  # fmt: skip


def measured(name: str, device: str, quick: bool) -> dict[str, Any]:
    """Bytes, milliseconds and bits of every way; shares are of ordinary working memory."""
    large, small, package = MODELS[name]
    if find_spec(package) is None:
        return {"error": f"{package} is not installed"}
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients have other bits each time
    torch.manual_seed(0)
    with torch.device(device):
        plain, x, blocks = (small if quick else large)()
    names = [n for n, m in plain.named_modules() if m in blocks]
    models: dict[str, nn.Module] = {"ordinary": plain, "lean": plain}
    models["checkpoint"] = copy.deepcopy(plain)
    for one in names:
        block = models["checkpoint"].get_submodule(one)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    row: dict[str, Any] = {"refused": {}, "over": []}

    def step(way: str) -> list[Tensor]:
        model = models[way]
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        lean = rg.lean() if way == "lean" else contextlib.nullcontext()
        with lean, torch.autocast(device, torch.bfloat16):
            y = model(x)
            y = y if isinstance(y, Tensor) else y[0]
            loss = y.float().square().mean()
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    limits: dict[str, rg.Division] = {}
    for share in ("50%", "20%"):
        models[share] = copy.deepcopy(plain)
        try:
            with torch.autocast(device, torch.bfloat16):
                limits[share] = rg.budget(models[share], share, x)
        except rg.BudgetError as error:
            row["refused"][share] = error.minimum_bytes
            del models[share]
    torch.use_deterministic_algorithms(True)
    buffers = copy.deepcopy(plain.state_dict())
    expected = [g.clone() for g in step("ordinary")]
    row["same_bits"] = {}
    for way in models:
        models[way].load_state_dict(buffers)
        row["same_bits"][way] = all(map(torch.equal, expected, step(way)))
    torch.use_deterministic_algorithms(False)
    del expected
    for way in models:
        step(way)
    row["bytes"] = {}
    for way in models:
        models[way].zero_grad(set_to_none=True)
        row["bytes"][way] = rg.measure(partial(step, way), device=device).working_bytes
        models[way].zero_grad(set_to_none=True)
    with torch.no_grad():  # the loss is not the model's: it squares the output in float32
        y = plain(x)
        loss_bytes = 8 * (y if isinstance(y, Tensor) else y[0]).numel()
    for share, limit in limits.items():
        most = limit.total_bytes + limit.elsewhere_bytes + loss_bytes
        row["over"] += [share] * (row["bytes"][share] > most)
    calls = {way: partial(step, way) for way in models}
    row["seconds"] = medians(calls, 1 if quick else 5, torch.device(device))
    return row
