"""Matrix products of a layer's many rows: gates from inputs, and gradients from those of gates.

On a CPU these are the tiles of ``tiles``, shared among threads. They reach the processor's peak,
whoever made it, and write to memory that exists. The terms of a sum are added in the same order for
any number of threads. Small ones, and those on other devices and in other dtypes, are torch's own.
"""

import torch
from torch import Tensor

from retrograde.kernels.cpu.llvm.lanes import LANES, Reals, compiled, load, store
from retrograde.kernels.cpu.llvm.panels import PANEL, pack
from retrograde.kernels.cpu.llvm.threads import THREAD_WORK, numbered, parts_for, share
from retrograde.kernels.cpu.llvm.tiles import dots, product

#: The rows from which on a product copies what it reads often, a few columns at a time.
MANY_ROWS = 128
#: The terms of a sum that are added at a time.
DEPTH = 256
_SIDE = 16  # the columns of gates that are copied at a time
# The rows whose factors stay in the last cache while all columns are computed. Of those, the rows
# whose sums stay in the nearest cache while a panel's terms are added.
_BLOCK, _STRIP = 512, 32
_SMALL = 2**21  # the multiplications up to which torch's own products take less time to begin


def linear(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, *, add: bool = False) -> None:
    """Write x Wᵀ + bias to ``out`` (N, M), or add x Wᵀ to it; x is (N, K) and W (M, K)."""
    if not _is_ours(x.numel() * w.shape[0], x, w, out):
        if add:
            out.addmm_(x, w.t())
        elif bias is None:
            torch.mm(x, w.t(), out=out)
        else:
            torch.addmm(bias, x, w.t(), out=out)
    elif x.shape[0] >= MANY_ROWS:
        _multiply(x, w, bias, out, turned=True, add=add)
    else:
        if not add:
            out.copy_(out.new_zeros(()) if bias is None else bias.detach())
        arrays = _array(x), _array(w.unsqueeze(1)), out.numpy()
        share(_few_rows, parts_for(len(w), x.numel() * len(w)), *arrays)


def times(g: Tensor, w: Tensor, out: Tensor) -> None:
    """Write g W to ``out`` (N, M); g is (N, K) and W (K, M)."""
    if _is_ours(g.numel() * w.shape[1], g, w, out):
        _multiply(g, w, None, out, turned=False, add=False)
    else:
        torch.mm(g, w, out=out)


def add_outer(g: Tensor, x: Tensor, total: Tensor) -> None:
    """Add gᵀ x to ``total`` (M, K); g is (N, M) and x (N, K)."""
    work = g.numel() * x.shape[1]
    if not _is_ours(work, g, total) or x.dtype != g.dtype:
        total.addmm_(g.t(), x)
        return
    row_ranges = parts_for(g.shape[1], work)
    room = g.new_empty(len(row_ranges), room_of_outer(len(g), g.shape[1], x.shape[1]))
    share(_add_outer, numbered(row_ranges), _array(g), _array(x), total.numpy(), room.numpy())


def threads_with_room(work: int, threads: int) -> int:
    """Return how many threads copy for products of so many multiplications at most."""
    return min(threads, 1 + work // THREAD_WORK) if work > _SMALL else 0


def room_of_product(rows: int, terms: int, columns: int, *, turned: bool) -> int:
    """Return the numbers that each thread copies for the columns of a matrix."""
    copies = rows >= MANY_ROWS and (turned or columns > PANEL)
    return PANEL * min(terms, DEPTH) if copies else 0


def room_of_outer(rows: int, gates: int, columns: int) -> int:
    """Return the numbers that each thread of :func:`add_outer` copies."""
    if rows < MANY_ROWS:
        return 0
    whole = -(-columns // PANEL) * PANEL if columns > PANEL else 0
    return (whole + (_SIDE if gates > _SIDE else 0)) * min(rows, DEPTH)


def _is_ours(work: int, x: Tensor, *others: Tensor) -> bool:
    usual = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return work > _SMALL and usual and all(t.dtype == x.dtype and t.is_contiguous() for t in others)


def _array(t: Tensor) -> Reals:
    return t.detach().contiguous().numpy()


def _multiply(
    a: Tensor, u: Tensor, bias: Tensor | None, out: Tensor, *, turned: bool, add: bool
) -> None:
    """Write a @ u + bias, or add a @ u; threads share the rows of the result, or its panels."""
    (rows, columns), terms = out.shape, a.shape[1]
    start = _array(out[0, :0] if bias is None else bias)
    numbers = room_of_product(rows, terms, columns, turned=turned)
    wide = numbers > 0 and columns >= rows
    ranges = parts_for(-(-columns // PANEL) if wide else rows, rows * terms * columns)
    rooms = a.new_empty(len(ranges), numbers).numpy()
    arrays = _array(a), _array(u), turned, start, add, out.numpy(), rooms
    share(_product, numbered(ranges), wide, *arrays)


@compiled
def _product(
    wide: bool, a: Reals, u: Reals, turned: bool, bias: Reals, add: bool, out: Reals, rooms: Reals,
    number: int, first: int, last: int,
) -> None:  # fmt: skip
    """Write rows first … last − 1 of a @ u + bias or, if it is ``wide``, those of its panels."""
    terms, (many, width), stride, room = a.shape[1], out.shape, u.shape[1], rooms[number]
    left, right = 0, width
    if wide:
        left, right, first, last = first * PANEL, min(last * PANEL, width), 0, many
    inputs, flat, weights = a.reshape(-1), out.reshape(-1), u.reshape(-1)
    each = PANEL if len(room) else right
    for top in range(first, last, _BLOCK):
        for column in range(left, right, each):
            count = min(each, right - column)
            for k in range(0, terms, DEPTH):
                depth = min(DEPTH, terms - k)
                if len(room):
                    at = column * stride + k if turned else k * stride + column
                    pack(weights, at, stride, turned, depth, count, room)
                    panel = room[: depth * PANEL].reshape(1, depth, PANEL)
                else:
                    panel = weights[k * stride : (k + depth) * stride].reshape(1, depth, stride)
                for row in range(top, min(top + _BLOCK, last), _STRIP):
                    many, sums = min(_STRIP, last - row), flat[row * width + column :]
                    if k == 0 and not add:
                        _begin(bias, column, count, sums, width, many)
                    product(inputs, row * terms + k, terms, 1, many, panel, count, sums, width)


@compiled
def _few_rows(x: Reals, w: Reals, out: Reals, first_column: int, last_column: int) -> None:
    """Add columns first_column … last_column − 1 of x Wᵀ."""
    sums = out.reshape(-1)[first_column:]
    dots(x.reshape(-1), 0, len(x), w[first_column:last_column], out.shape[1], sums)


@compiled
def _begin(
    bias: Reals, column: int, count: int, out: Reals, width: int, rows: int
) -> None:  # fmt: skip
    """Write a bias, or zeros if it is empty, to so many columns of rows ``width`` apart."""
    for j in range(0, count, LANES):
        value = load(bias, column + j, min(count - j, len(bias)))
        for i in range(rows):
            store(out, i * width + j, value, count - j)


@compiled
def _add_outer(
    g: Reals, x: Reals, total: Reals, rooms: Reals, number: int, top: int, bottom: int
) -> None:
    """Add rows top … bottom − 1 of gᵀ x."""
    (many, gates), width, room = g.shape, x.shape[1], rooms[number]
    flat, gradients, out = x.reshape(-1), g.reshape(-1), total.reshape(-1)
    copies, aside = len(room) > 0 and width > PANEL, len(room) > 0 and gates > _SIDE
    count = -(-width // PANEL) if copies else 0
    for k in range(0, many, DEPTH):
        depth = min(DEPTH, many - k)
        panels = flat[k * width : (k + depth) * width].reshape(1, depth, width)
        if copies:
            panels = room[: count * depth * PANEL].reshape(count, depth, PANEL)
        for p in range(count):
            at, left = k * width + p * PANEL, width - p * PANEL
            pack(flat, at, width, False, depth, left, panels[p].reshape(-1))
        for i in range(top, bottom, _SIDE):
            height, sums = min(_SIDE, bottom - i), out[i * width :]
            if aside:
                side = room[count * depth * PANEL :]
                for term in range(depth):
                    for j in range(0, _SIDE, LANES):
                        value = load(gradients, (k + term) * gates + i + j, height - j)
                        store(side, term * _SIDE + j, value, LANES)
                product(side, 0, 1, _SIDE, height, panels, width, sums, width)
            else:
                product(gradients, k * gates + i, 1, gates, height, panels, width, sums, width)
