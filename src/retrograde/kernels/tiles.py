"""Products of small matrices in numba, with the sums held in registers.

A tile of sums has four rows and three vectors. As in BLAS libraries, it stays in registers until
its sums are complete. This reaches nine tenths of the processor's peak, at sizes where the call of
a BLAS function takes longer than its arithmetic. Every tile adds the terms of a sum in the same
order, so a row's result does not depend on the rows beside it.
"""

from typing import Any

from llvmlite import ir
from numba import types
from torch import Tensor

from retrograde.kernels.lanes import LANES, Reals, broadcast, compiled, intrinsic, vector_of

#: The columns of a panel.
PANEL = 3 * LANES

_INDEX = ir.IntType(64)


@compiled  # type: ignore[untyped-decorator]
def product(a: Reals, start: int, stride: int, rows: int, u: Reals, width: int, out: Reals) -> None:
    """Add a @ u to out.

    ``a`` and ``out`` are flat. The rows of ``a`` begin at ``start``, ``stride`` apart, and have R
    numbers. ``u`` is in :func:`panels` (P, R, PANEL), or a plain matrix (1, R, W). W and
    ``width``, the row length of ``out``, are multiples of :data:`LANES`.
    """
    count = -(-width // PANEL)
    for p in range(count):
        left = width - p * PANEL
        for row in range(0, rows - 3, 4):
            at, to = start + row * stride, row * width + p * PANEL
            if left >= PANEL:
                _tile(a, at, stride, 1, u, p, out, to, width, 4, 3)
            elif left > LANES:
                _tile(a, at, stride, 1, u, p, out, to, width, 4, 2)
            else:
                _tile(a, at, stride, 1, u, p, out, to, width, 4, 1)
    for row in range(rows - rows % 4, rows):
        at, p = start + row * stride, 0
        while width - p * PANEL >= 3 * PANEL:
            _tile(a, at, stride, 1, u, p, out, row * width + p * PANEL, width, 1, 9)
            p += 3
        vectors = (width - p * PANEL) // LANES
        if vectors == 8:  # additions to few sums would wait for one another
            _tile(a, at, stride, 1, u, p, out, row * width + p * PANEL, width, 1, 8)
            p += 3
        elif vectors >= 6:
            _tile(a, at, stride, 1, u, p, out, row * width + p * PANEL, width, 1, 6)
            p += 2
        while p < count:
            _one_row(a, at, 1, u, p, out, row * width, width)
            p += 1


@compiled  # type: ignore[untyped-decorator]
def add_outer(a: Reals, column: int, stride: int, u: Reals, out: Reals) -> None:
    """Add aᵀ @ u to out (N, W), where W is a multiple of :data:`LANES`.

    ``a`` is flat and has R rows, ``stride`` apart. Only its N columns from ``column`` on are used.
    ``u`` is in :func:`panels` (P, R, PANEL).
    """
    columns, width = out.shape
    flat = out.reshape(-1)
    for p in range(u.shape[0]):
        left = width - p * PANEL
        for i in range(0, columns - 3, 4):
            to = i * width + p * PANEL
            if left >= PANEL:
                _tile(a, column + i, 1, stride, u, p, flat, to, width, 4, 3)
            elif left > LANES:
                _tile(a, column + i, 1, stride, u, p, flat, to, width, 4, 2)
            else:
                _tile(a, column + i, 1, stride, u, p, flat, to, width, 4, 1)
        for i in range(columns - columns % 4, columns):
            _one_row(a, column + i, stride, u, p, flat, i * width, width)


@compiled  # type: ignore[untyped-decorator]
def _one_row(
    a: Reals, at: int, to_term: int, u: Reals, p: int, out: Reals, row: int, width: int
) -> None:
    """Add one panel's part to the row of ``out`` that begins at ``row``."""
    left, to = width - p * PANEL, row + p * PANEL
    if left >= PANEL:
        _tile(a, at, 0, to_term, u, p, out, to, width, 1, 3)
    elif left > LANES:
        _tile(a, at, 0, to_term, u, p, out, to, width, 1, 2)
    else:
        _tile(a, at, 0, to_term, u, p, out, to, width, 1, 1)


def panels(u: Tensor) -> Tensor:
    """Return a copy of a matrix (R, N) in panels (P, R, PANEL), the last one padded with zeros.

    A panel is contiguous, so it stays in the nearest cache while many rows are multiplied by it.
    """
    found = u.new_empty(-(-u.shape[1] // PANEL), len(u), PANEL)
    _pack(u.detach().numpy(), found.numpy())
    return found


@compiled  # type: ignore[untyped-decorator]
def _pack(u: Any, panels: Any) -> None:
    rows, columns = u.shape
    for p in range(panels.shape[0]):
        first, count = p * PANEL, min(PANEL, columns - p * PANEL)
        if u.strides[0] >= u.strides[1]:
            for i in range(rows):
                for j in range(count):
                    panels[p, i, j] = u[i, first + j]
        else:
            for j in range(count):
                for i in range(rows):
                    panels[p, i, j] = u[i, first + j]
        for i in range(rows if count < PANEL else 0):
            panels[p, i, count:] = 0


@compiled  # type: ignore[untyped-decorator]
def whole_vectors(width: int) -> Any:
    """Return the least multiple of :data:`LANES` that is no less than ``width``."""
    return -(-width // LANES) * LANES


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _tile(
    _: Any,
    a: Any,
    at: Any,
    to_row: Any,
    to_term: Any,
    u: Any,
    panel: Any,
    out: Any,
    to: Any,
    width: Any,
    rows: Any,
    vectors: Any,
) -> Any:
    """Add one tile of a @ u to ``out`` at ``to``.

    The tile has ``rows`` rows and ``vectors`` vectors, both literal numbers. Rows of ``a`` begin at
    ``at``, ``to_row`` apart, and their terms are ``to_term`` apart. The columns begin with panel
    number ``panel`` of ``u``, which is (panels, terms, PANEL) or (1, terms, W).
    """
    n = types.intp
    signature = types.void(a, n, n, n, u, n, out, n, n, rows, vectors)
    shape = rows.literal_value, vectors.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        arrays = [
            context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 4, 6)
        ]
        tile = _Tile(builder, [array.data for array in arrays], a.dtype.bitwidth // 8)
        sizes = [builder.extract_value(arrays[1].shape, i) for i in range(3)]
        tile.add(shape, args[1:4], args[5], args[7:9], sizes)
        return context.get_dummy_value()

    return signature, code


class _Tile:
    """Writes LLVM's code of a tile: a loop over terms that adds to sums in registers."""

    def __init__(self, builder: Any, pointers: list[Any], item_bytes: int) -> None:
        self.builder, self.item_bytes = builder, item_bytes
        self.a, self.u, self.out = pointers
        self.vector = vector_of(self.a.type.pointee)

    def add(
        self, shape: tuple[int, int], of_a: Any, panel: Any, of_out: Any, of_u: list[Any]
    ) -> None:
        """Write the code of a tile of ``shape`` (rows, vectors), with :func:`_tile`'s places."""
        b, (rows, vectors) = self.builder, shape
        (at, to_row, to_term), (to, width), (count, terms, wide) = of_a, of_out, of_u
        alone = b.icmp_signed("==", count, _INDEX(1))
        to_panel = b.select(alone, _INDEX(PANEL), b.mul(terms, _INDEX(PANEL)))
        pairs = [(i, j) for i in range(rows) for j in range(vectors)]
        places = {(i, j): self._plus(to, b.mul(width, _INDEX(i)), j * LANES) for i, j in pairs}
        firsts = [self._plus(at, b.mul(to_row, _INDEX(i))) for i in range(rows)]
        columns = [self._column(panel, j, to_panel) for j in range(vectors)]
        before, loop, done = b.block, b.append_basic_block("terms"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        term = b.phi(_INDEX)
        sums = {pair: b.phi(self.vector) for pair in pairs}
        row = b.mul(term, wide)
        factors = [self._load(self.u, self._plus(column, row)) for column in columns]
        step, after = b.mul(term, to_term), {}
        for i in range(rows):
            x = broadcast(b, b.load(b.gep(self.a, [self._plus(firsts[i], step)])))
            for j in range(vectors):
                more = b.fmul(x, factors[j], flags=("contract",))
                after[i, j] = b.fadd(sums[i, j], more, flags=("contract",))
        following = self._plus(term, 1)
        zero = ir.Constant(self.vector, [0.0] * LANES)
        changing = [(term, _INDEX(0), following), *((sums[p], zero, after[p]) for p in pairs)]
        for value, start, end in changing:
            value.add_incoming(start, before)
            value.add_incoming(end, loop)
        b.cbranch(b.icmp_signed("<", following, terms), loop, done)
        b.position_at_end(done)
        for pair, place in places.items():
            total = b.fadd(self._load(self.out, place), after[pair])
            b.store(total, self._vector_at(self.out, place), align=self.item_bytes)

    def _column(self, panel: Any, vector: int, to_panel: Any) -> Any:
        """Return where in ``u`` a vector begins; ``vector`` counts from the panel's first one."""
        panels, rest = divmod(vector, 3)
        return self._plus(self.builder.mul(self._plus(panel, panels), to_panel), rest * LANES)

    def _plus(self, *parts: Any) -> Any:
        total, *rest = (_INDEX(part) if isinstance(part, int) else part for part in parts)
        for part in rest:
            total = self.builder.add(total, part)
        return total

    def _vector_at(self, pointer: Any, place: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [place]), self.vector.as_pointer())

    def _load(self, pointer: Any, place: Any) -> Any:
        return self.builder.load(self._vector_at(pointer, place), align=self.item_bytes)
