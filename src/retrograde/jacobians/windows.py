"""How inputs and outputs of a convolution or a pooling meet along one dimension."""

import numpy as np

from retrograde.jacobians.factor import Factor, Ints, from_pairs

__all__ = ["adaptive", "band", "padding"]


def band(
    size: int, outputs: int, kernel: int, stride: int, before: int, dilation: int
) -> tuple[Factor, Ints]:
    """Windows that move: output o reads the inputs o·stride − before + k·dilation, 0 ≤ k < kernel.

    Args:
        size: inputs.
        outputs: how many.
        kernel: positions of a window.
        stride: from a window to the next.
        before: padding before the first input.
        dilation: from a position to the next.

    Returns:
        The factor, inputs × outputs, and the position k of each entry. What lies in the padding is
        no entry.

    Example:
        >>> factor, k = band(size=4, outputs=4, kernel=3, stride=1, before=1, dilation=1)
        >>> factor.nnz, k.tolist()
        (10, [1, 0, 2, 1, 0, 2, 1, 0, 2, 1])
    """
    o, k = np.meshgrid(np.arange(outputs), np.arange(kernel), indexing="ij")
    read = o * stride - before + k * dilation
    inside = (read >= 0) & (read < size)
    return _sorted(read[inside], o[inside], k[inside], (size, outputs))


def adaptive(size: int, outputs: int) -> Factor:
    """Windows as adaptive pooling has them: from ⌊o·size/outputs⌋ to ⌈(o+1)·size/outputs⌉.

    Args:
        size: inputs.
        outputs: how many.

    Returns:
        The factor, inputs × outputs.

    Example:
        >>> adaptive(5, 2).column_counts.tolist()
        [3, 3]
    """
    o, i = np.meshgrid(np.arange(outputs), np.arange(size), indexing="ij")
    inside = (i >= o * size // outputs) & (i < -(-(o + 1) * size // outputs))
    return _sorted(i[inside], o[inside], o[inside], (size, outputs))[0]


def padding(reads: np.ndarray, size: int) -> Factor:
    """Padding: output o is the input ``reads[o]``, or a constant where that is negative.

    Args:
        reads: (outputs,).
        size: inputs.

    Returns:
        The factor, inputs × outputs.

    Example:
        >>> padding(np.array([-1, 0, 1, -1]), 2).indices.tolist()
        [1, 2]
    """
    o = np.arange(len(reads))
    inside = reads >= 0
    return _sorted(reads[inside], o[inside], o[inside], (size, len(reads)))[0]


def _sorted(
    rows: np.ndarray, columns: np.ndarray, places: np.ndarray, shape: tuple[int, int]
) -> tuple[Factor, Ints]:
    order = np.lexsort((columns, rows))
    return from_pairs(rows[order], columns[order], shape), places[order].astype(np.int32)
