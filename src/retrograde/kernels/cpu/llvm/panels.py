"""Matrices copied into panels, whose columns a tile of sums reads as vectors.

A panel is a few vectors wide and contiguous, so it stays in the nearest cache while rows are
multiplied by it.
"""

from llvmlite import ir
from numba import types
from torch import Tensor

from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    compiled,
    intrinsic,
    load,
    store,
    vector_of,
)

#: The vectors of a panel, and its columns. Wide vectors come in pairs, so layers of 32, 64, …
#: units have no columns of zeros.
VECTORS = 2 if LANES == 16 else 3
PANEL = VECTORS * LANES


def panels(*matrices: Tensor) -> Tensor:
    """Return copies of matrices (R, N) in panels (M, P, R, PANEL), padded with zeros. The matrices
    may be views, and N may differ. Views (R, K, N / K) are copied once more, one at a time."""
    count, rows = -(-max(u[0].numel() for u in matrices) // PANEL), len(matrices[0])
    copies = matrices[0].new_empty(len(matrices), count, rows * PANEL)
    for matrix, copy in zip(matrices, copies.numpy(), strict=True):
        u = matrix if matrix.dim() == 2 else matrix.permute(1, 2, 0).flatten(0, 1).t()
        turned = u.stride(1) > u.stride(0)
        source = (u.t() if turned else u).detach()
        source = source if source.stride(1) == 1 else source.contiguous()
        stride, columns = source.stride(0), u.shape[1]
        flat = source.as_strided(((len(source) - 1) * stride + source.shape[1],), (1,)).numpy()
        for p, panel in enumerate(copy):
            at = p * PANEL * (stride if turned else 1)
            pack(flat, at, stride, turned, rows, columns - p * PANEL, panel)
        del u, source, flat  # before the next copy is made
    return copies.view(len(matrices), count, rows, PANEL)


def panels_of(columns: int) -> int:
    """Return the columns that a matrix with so many has in panels."""
    return -(-columns // PANEL) * PANEL


@compiled
def pack(
    u: Reals, at: int, stride: int, turned: bool, rows: int, columns: int, panel: Reals
) -> None:  # fmt: skip
    """Copy so many rows, and the first columns, of a matrix to a flat panel. ``u`` is flat. The
    matrix begins ``at`` a place, and its rows are ``stride`` apart; if it is ``turned``, its
    columns are."""
    for j in range(0, PANEL, LANES):
        whole = 0
        if turned:
            whole = rows - rows % LANES if columns >= j + LANES else 0
            for i in range(0, whole, LANES):
                _turn(u, at + j * stride + i, stride, panel, i * PANEL + j)
        for i in range(whole, rows):
            if turned:
                for k in range(j, j + LANES):
                    panel[i * PANEL + k] = u[at + k * stride + i] if k < columns else 0
            else:
                store(panel, i * PANEL + j, load(u, at + i * stride + j, columns - j), LANES)


@compiled
def whole_vectors(width: int) -> int:
    """Return the least multiple of :data:`LANES` that is no less than ``width``."""
    return -(-width // LANES) * LANES


@intrinsic
def _turn(_: object, u: Kind, at: Kind, stride: Kind, panel: Kind, to: Kind) -> Written:
    """Transpose LANES vectors of ``u``, ``stride`` apart, into a panel, by perfect shuffles."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        source, target = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (0, 3)
        )
        vector, index, half = vector_of(source.type.pointee), ir.IntType(64), LANES // 2

        def vector_at(pointer: Value, start: Value, more: Value) -> Value:
            place = builder.gep(pointer, [builder.add(start, more)])
            return builder.bitcast(place, vector.as_pointer())

        item_bytes = u.dtype.bitwidth // 8
        steps = [builder.mul(args[2], index(i)) for i in range(LANES)]
        matrix = [builder.load(vector_at(source, args[1], n), align=item_bytes) for n in steps]
        orders = [[start + k // 2 + LANES * (k % 2) for k in range(LANES)] for start in (0, half)]
        lanes = ir.VectorType(ir.IntType(32), LANES)
        for _ in range(LANES.bit_length() - 1):
            pairs = zip(matrix[:half], matrix[half:], strict=True)
            matrix = [
                builder.shuffle_vector(upper, lower, ir.Constant(lanes, order))
                for upper, lower in pairs
                for order in orders
            ]
        for i, row in enumerate(matrix):
            builder.store(row, vector_at(target, args[4], index(i * PANEL)), align=item_bytes)
        return context.get_dummy_value()

    return types.void(u, types.intp, types.intp, panel, types.intp), code
