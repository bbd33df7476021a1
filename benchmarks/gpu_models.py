"""Models on a card: the lean tape and budgets, beside ordinary backpropagation and ``checkpoint``.

A section of ``gpu.py``. Sizes keep an H100 busy and fill a good part of its memory; the last model
is too small for that. Each way makes training steps in bfloat16 autocast, in turn with the others.
"""

import contextlib
import copy
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

import retrograde as rg
from harness import Row, medians
from models import checkpointed
from oracles.large_models import MODELS


def measured(name: str, device: str, quick: bool) -> Row:
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
    models["checkpoint"] = checkpointed(plain, names)
    row: Row = {"refused": {}, "over": []}

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
