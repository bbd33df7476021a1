"""The transposed Jacobian of a layer, as a public function."""

import os
from math import prod

import torch
from torch import Tensor, nn

from retrograde.errors import ScanError
from retrograde.scan.sparse.arithmetic import sparse_kernels
from retrograde.scan.sparse.composition import matrix_of, observe
from retrograde.scan.sparse.csr import CSR
from retrograde.scan.sparse.outline import ledger_of, outlines
from retrograde.units import Memory, as_bytes, format_bytes


def transposed_jacobian(layer: nn.Module, input: Tensor, *, memory: Memory | None = None) -> CSR:
    """Return the transposed Jacobian (∂y/∂x)ᵀ of y = layer(x), analytically (W20, 3.3, 3.4).

    The layer is run once in its present mode, so a dropout in training mode draws a mask.

    Args:
        layer: a layer of torch's, a residual block, a sequence of layers, or a registered layer.
        input: x, (samples, …); of any strides.
        memory: the most bytes of the Jacobian, such as ``"2GiB"``; None for half the machine's.

    Returns:
        (inputs, outputs) of one sample, flattened; values (nnz,) where they depend on weights
        only, else (samples, nnz).

    Raises:
        ScanError: the layer has no rule, couples samples, or its Jacobian takes more bytes.

    Example:
        >>> layer = nn.Conv2d(3, 64, 3, padding=1)
        >>> jacobian = transposed_jacobian(layer, torch.ones(1, 3, 32, 32))
        >>> jacobian.shape, jacobian.nnz, round(jacobian.pattern.sparsity, 5)
        ((3072, 65536), 1696512, 0.99157)
    """
    with torch.enable_grad():
        y, path = observe(layer, input.detach().requires_grad_())
        limit = room(memory, input.device)
        lists = sparse_kernels(input.device.type, input.dtype).name != "numba"
        ledger = ledger_of([path], input.dtype.itemsize, lists)
        matrix_of(path, outlines(len(input), ledger))
        wanted = ledger.bytes_for(len(input))
        if wanted > limit:
            raise ScanError(
                f"the transposed Jacobian of {type(layer).__name__}, {prod(input.shape[1:]):,}×"
                f"{prod(y.shape[1:]):,}, takes {format_bytes(wanted)} for {len(input):,} samples, "
                f"and {format_bytes(limit)} are available: expected memory for all of it; give "
                "fewer samples, or more memory"
            )
        matrix: CSR = matrix_of(path, lambda piece: piece.csr(input))
    return CSR(matrix.pattern, matrix.data.detach())


def room(memory: Memory | None, device: torch.device) -> int:
    """Return the bytes that Jacobians and their products may take. A fraction is of the device's
    memory; None means half of it. Raises UnitError if the memory cannot be read."""
    if device.type == "cuda":
        whole = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return as_bytes(0.5 if memory is None else memory, whole)
