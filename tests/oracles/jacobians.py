"""The dense transposed Jacobians of recurrent cells, from their factors."""

import torch

__all__ = ["jacobians"]


def jacobians(steps, hidden):
    """Return the dense transposed Jacobians (∂s_t/∂s_{t−1})ᵀ (L, B, n, n).

    These are the elements of W20's scan. The gradient that they multiply is a column. n is H, or
    2 H for (h, c).
    """
    weights = hidden.unflatten(0, (-1, hidden.shape[1]))
    parts = steps.gates.unsqueeze(-1) * weights
    keep = steps.keep
    if parts.shape[-3] < 4:
        forward = parts.sum(-3)
        if keep is not None:
            forward = forward + keep.diag_embed()
        return forward.mT
    assert keep is not None
    assert steps.inner is not None
    f, e = keep.diag_embed(), steps.inner.diag_embed()
    h_from_h, h_from_c = parts[..., 3, :, :], torch.zeros_like(f)
    c_from_h = parts[..., :3, :, :].sum(-3)
    second = torch.cat([torch.cat([h_from_h, h_from_c], -1), torch.cat([c_from_h, f], -1)], -2)
    eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand_as(f)
    first = torch.cat([torch.cat([eye, e], -1), torch.cat([h_from_c, eye], -1)], -2)
    return (first @ second).mT
