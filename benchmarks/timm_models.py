"""Claim: whatever an image model does, it is right within its budget, and keeps it.

Architectures of timm, as they are, with random weights and small images. Each makes two steps
within 60 and 30 % of the memory of ordinary backpropagation and within its least budget. Losses,
gradients and buffers must be equal in every bit. The peak of the second step is beside what the
budget and the rest of the model take together, and beside what a pass was told to take. A lean pass
is compared too.

    pip install timm
    python benchmarks/timm_models.py                  # JSON into benchmarks/results/
    python benchmarks/timm_models.py davit_tiny       # a quick look; nothing is written
"""

import contextlib
import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.machine import machine_of

RESULTS = Path(__file__).parent / "results"
MODELS = """
    convnextv2_atto efficientnet_b0 mobilenetv3_small_050 regnetx_002 densenet121 resnext50_32x4d
    deit_tiny_patch16_224 coat_tiny xcit_nano_12_p16_224 poolformer_s12 edgenext_xx_small
    maxvit_rmlp_pico_rw_256 nfnet_l0 repvgg_a0 ghostnet_050 hrnet_w18_small inception_v3 levit_128s
    visformer_tiny gmlp_ti16_224 resmlp_12_224 volo_d1_224 efficientformer_l1 focalnet_tiny_srf
    davit_tiny res2net50_14w_8s dpn68 selecsls42 tinynet_e rexnet_100 cspresnet50 skresnet18
    legacy_seresnet18 eca_nfnet_l0 pit_ti_224 convit_tiny beit_base_patch16_224
    eva02_tiny_patch14_224 hiera_tiny_224 fastvit_t8 starnet_s1 mambaout_femto tiny_vit_5m_224
    sequencer2d_s swinv2_cr_tiny_224 twins_svt_small xception41
"""


def step(model: nn.Module, x: Tensor, way: Any = contextlib.nullcontext) -> list[Tensor]:
    """All that a training step leaves behind."""
    torch.manual_seed(5)
    with way():
        loss = model(x).square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers())]


def at_least(nbytes: int, net: nn.Module, x: Tensor) -> Any:
    """The division of the least bytes that are not refused: what the rest holds may be more."""
    try:
        return rg.budget(net, nbytes, x)
    except rg.BudgetError as refusal:
        return rg.budget(net, refusal.minimum_bytes, x)


def measured(name: str, model: nn.Module, x: Tensor) -> dict[str, Any]:
    """A row: whether bits are equal, and the peak of each budget as a part of what is allowed."""
    expected = step(copy.deepcopy(model), x)
    again = step(copy.deepcopy(model), x)
    row: dict[str, Any] = {"model": name, "own_bits": all(map(torch.equal, expected, again))}
    lean = step(copy.deepcopy(model), x, rg.lean)
    row |= {"lean_bits": all(map(torch.equal, expected, lean)), "bits": {}, "peaks": {}}
    row["told"] = {}
    for share in ("60%", "30%", "least"):
        net = copy.deepcopy(model)
        try:
            division = rg.budget(net, "1%" if share == "least" else share, x)
        except rg.BudgetError as refusal:
            if share != "least":
                continue
            division = at_least(refusal.minimum_bytes, net, x)
        row["least_share"] = round(division.minimum_bytes / division.ordinary_bytes, 3)
        row["bits"][share] = all(map(torch.equal, expected, step(net, x)))
        for p in net.parameters():
            p.grad = None
        peak = rg.measure(lambda net=net: step(net, x)).working_bytes
        row["peaks"][share] = round(peak / (division.total_bytes + division.elsewhere_bytes), 3)
        row["told"][share] = round(peak / division.peak_bytes, 3)
    return row


def main() -> None:
    import timm

    warnings.simplefilter("ignore")
    rows = []
    for name in sys.argv[1:] or MODELS.split():
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=10).train()
        fixed, size = model.default_cfg.get("fixed_input_size"), model.default_cfg["input_size"][-1]
        x = torch.randn(2, 3, *2 * [size if fixed else 96 if size <= 300 else 160])
        try:
            rows.append(measured(name, model, x))
        except (rg.BudgetError, rg.CellError) as refusal:
            rows.append({"model": name, "refused": str(refusal)})
        print(rows[-1], flush=True)
    if not sys.argv[1:]:
        found = {"machine": machine_of(torch.device("cpu")), "rows": rows}
        (RESULTS / "timm_models_cpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
