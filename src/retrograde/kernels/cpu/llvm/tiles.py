"""Products of small matrices in numba, with the sums held in registers.

A tile of sums has four or eight rows, and three vectors. As in BLAS libraries, it stays in
registers until its sums are complete. This reaches nine tenths of the processor's peak, at sizes
where the call of a BLAS function takes longer than its arithmetic. Every tile adds the terms of a
sum in the same order, so a row's result does not depend on the rows beside it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir
from numba import types

from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import (
    LANES,
    Reals,
    broadcast,
    compiled,
    inlined,
    intrinsic,
    mask,
    masked,
    total_of,
    vector_of,
)
from retrograde.kernels.cpu.llvm.panels import PANEL, VECTORS

#: The most rows of a tile. Their sums fill most of 16 registers, or of 32 large ones.
ROWS = 8 if LANES == 16 else 4

# The most vectors of one row that a tile has, and one less, and two less.
_MOST = 8 if LANES == 16 else 9
_LAST, _LESS = _MOST - 1, _MOST - 2

_INDEX = ir.IntType(64)

#: Of each row and column of a tile, a sum or its place.
Sums = dict[tuple[int, int], Value]
#: Its numbers of rows and columns.
Shape = tuple[int, int]
#: Writes the loads of a term's factors, of the columns and of the rows.
Read = Callable[[Value], tuple[list[Value], list[Value]]]


@compiled
def product(
    a: Reals, start: int, to_row: int, to_term: int, rows: int, u: Reals, columns: int, out: Reals,
    width: int,
) -> None:  # fmt: skip
    """Add a @ u to out. ``a`` and ``out`` are flat. The rows of ``a`` begin at ``start``,
    ``to_row`` apart, and have R numbers, ``to_term`` apart. Those of ``out`` are ``width`` apart.
    ``u`` is in panels (P, R, PANEL), of which the first ``columns`` columns are used, or a
    plain matrix (1, R, W)."""
    short = u.shape[2] % LANES  # what a plain row has behind its whole vectors
    full = u.shape[2] - short if short else columns
    count = -(-full // PANEL)
    for p in range(count):
        left, row = full - p * PANEL, 0
        while row < rows - 1:
            at, to = start + row * to_row, row * width + p * PANEL
            if row <= rows - ROWS:
                _in_panel(a, at, to_row, to_term, u, p, out, to, width, left, ROWS)
                row += ROWS
            elif row <= rows - 4:
                _in_panel(a, at, to_row, to_term, u, p, out, to, width, left, 4)
                row += 4
            else:
                _in_panel(a, at, to_row, to_term, u, p, out, to, width, left, 2)
                row += 2
    for row in range(0, rows - 1 if short else 0, 2):
        at, to = start + row * to_row, row * width + full
        _tile(a, at, to_row, to_term, u, 0, out, to, width, short, 2, 0)
    for row in range(rows - rows % 2, rows):
        at, to, p = start + row * to_row, row * width, 0
        if short:
            _tile(a, at, 0, to_term, u, 0, out, to + full, 0, short, 1, 0)
        while full - p * PANEL >= _MOST * LANES:
            _tile(a, at, 0, to_term, u, p, out, to + p * PANEL, 0, LANES, 1, _MOST)
            p += _MOST // VECTORS
        left = full - p * PANEL
        vectors = -(-left // LANES)
        if vectors == _MOST - 1:  # additions to few sums would wait for one another
            _tile(a, at, 0, to_term, u, p, out, to + p * PANEL, 0, left - _LESS * LANES, 1, _LAST)
            p = count
        elif vectors >= 6:
            _tile(a, at, 0, to_term, u, p, out, to + p * PANEL, 0, left - 5 * LANES, 1, 6)
            p += 6 // VECTORS
        elif vectors >= 4 and VECTORS == 2:
            _tile(a, at, 0, to_term, u, p, out, to + p * PANEL, 0, left - 3 * LANES, 1, 4)
            p += 2
        while p < count:
            left = full - p * PANEL
            _in_panel(a, at, 0, to_term, u, p, out, to + p * PANEL, 0, left, 1)
            p += 1


@compiled
def dots(a: Reals, start: int, rows: int, w: Reals, width: int, out: Reals) -> None:
    """Add a @ wᵀ to out, where the terms of a sum are neighbours in both. ``a`` and ``out`` are
    flat. The rows of ``a`` begin at ``start``, and those of ``out`` are ``width`` long. ``w`` is a
    plain matrix (N, 1, R)."""
    columns, terms = w.shape[0], w.shape[2]
    even, eight = rows - rows % 2, columns - columns % 8
    three = columns - columns % 3 if rows >= 4 else 0
    for j in range(0, three, 3):
        for row in range(0, rows - 3, 4):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 4, 3)
    for j in range(three, columns if rows >= 4 else 0):
        for row in range(0, rows - 3, 4):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 4, 1)
    for row in range(rows - rows % 4, even, 2):
        for j in range(0, columns - 3, 4):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 2, 4)
        for j in range(columns - columns % 4, columns):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 2, 1)
    for row in range(even, rows):
        for j in range(0, eight, 8):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 1, 8)
        for j in range(eight, columns):
            _dots(a, start + row * terms, w, j, out, row * width + j, width, 1, 1)


@inlined
def _in_panel(
    a: Reals, at: int, to_row: int, to_term: int, u: Reals, p: int, out: Reals, to: int, width: int,
    left: int, rows: int,
) -> None:  # fmt: skip
    """Add the tile of ``rows`` rows that one panel gives, of which ``left`` columns are in use."""
    if VECTORS == 3 and left > 2 * LANES:
        _tile(a, at, to_row, to_term, u, p, out, to, width, left - 2 * LANES, rows, 3)
    elif left > LANES:
        _tile(a, at, to_row, to_term, u, p, out, to, width, left - LANES, rows, 2)
    else:
        _tile(a, at, to_row, to_term, u, p, out, to, width, left, rows, 1)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _tile(
    _: object, a: Kind, at: Kind, to_row: Kind, to_term: Kind, u: Kind, panel: Kind, out: Kind,
    to: Kind, width: Kind, left: Kind, rows: Kind, vectors: Kind,
) -> Written:  # fmt: skip
    """Add one tile of a @ u to ``out``.

    The tile has ``rows`` rows and ``vectors`` vectors, both literal numbers. Of the last vector, at
    most ``left`` numbers are stored. With no vectors, there are ``left`` numbers, which a row of
    ``u`` has behind its whole ones. Rows of ``a`` begin at ``at``, ``to_row`` apart, and their
    terms are ``to_term`` apart. Those of ``out`` begin at ``to``, ``width`` apart. The columns
    begin with panel number ``panel`` of ``u``, which is (panels, terms, PANEL) or (1, terms, W).
    """

    def write(tile: "_Tile", args: Any, sizes: list[Value]) -> None:
        tile.add(args[10:], args[1:4], args[5], args[7:10], sizes)

    argument_kinds = a, at, to_row, to_term, u, panel, out, to, width, left, rows, vectors
    return _code_of(write, argument_kinds, (0, 4, 6))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _dots(
    _: object, a: Kind, at: Kind, w: Kind, row: Kind, out: Kind, to: Kind, width: Kind,
    rows: Kind, columns: Kind,
) -> Written:  # fmt: skip
    """Add one tile of a @ wᵀ to ``out``. Its rows are ``rows`` ones of ``a``, from ``at`` on. Its
    columns are ``columns`` rows of ``w`` (N, 1, terms), from number ``row`` on. Both are literal
    numbers."""

    def write(tile: "_Tile", args: Any, sizes: list[Value]) -> None:
        tile.add_dots(args[7:], args[1], args[3], args[5:7], sizes[2])

    return _code_of(write, (a, at, w, row, out, to, width, rows, columns), (0, 2, 4))


def _code_of(
    write: Callable[..., None], argument_kinds: tuple[Kind, ...], arrays: tuple[int, int, int]
) -> Written:
    """Return what numba asks of an intrinsic whose last two arguments are the tile's shape.
    ``arrays`` are the places of a, u and out among its arguments."""
    kinds = [kind if k in arrays else types.intp for k, kind in enumerate(argument_kinds[:-2])]
    shape = [kind.literal_value for kind in argument_kinds[-2:]]

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        trio = [context.make_array(signature.args[i])(context, builder, args[i]) for i in arrays]
        tile = _Tile(builder, [array.data for array in trio], argument_kinds[0].dtype.bitwidth // 8)
        sizes = [builder.extract_value(trio[1].shape, i) for i in range(3)]
        write(tile, [*args[:-2], *shape], sizes)
        return context.get_dummy_value()

    return types.void(*kinds, *argument_kinds[-2:]), code


class _Tile:
    """Writes LLVM's code of a tile: a loop over terms that adds to sums in registers."""

    def __init__(self, builder: Builder, pointers: list[Value], item_bytes: int) -> None:
        self.builder, self.item_bytes = builder, item_bytes
        self.a, self.u, self.out = pointers
        self.vector = vector_of(self.a.type.pointee)

    def add(self, shape: Shape, of_a: Args, panel: Value, of_out: Args, of_u: Args) -> None:
        """Write the code of a tile, with :func:`_tile`'s ``shape`` and places."""
        b, (rows, vectors) = self.builder, shape
        (at, to_row, to_term), (to, width, left), (count, terms, wide) = of_a, of_out, of_u
        if vectors:
            alone = b.icmp_signed("==", count, _INDEX(1))
            to_panel = b.select(alone, _INDEX(PANEL), b.mul(terms, _INDEX(PANEL)))
            columns = [self._column(panel, j, to_panel) for j in range(vectors)]
        else:
            columns = [b.sub(wide, left)]
        places = self._places(to, width, rows, range(0, max(vectors, 1) * LANES, LANES))
        firsts = [self._plus(at, b.mul(to_row, _INDEX(i))) for i in range(rows)]

        def read(term: Value) -> tuple[list[Value], list[Value]]:
            row, step = b.mul(term, wide), b.mul(term, to_term)
            starts = [self._plus(column, row) for column in columns]
            factors = [self._load(self.u, place, None if vectors else left) for place in starts]
            return factors, [self._spread(self._plus(base, step)) for base in firsts]

        sums = self._sums(rows, len(columns), terms, 1, read)
        last = len(columns) - 1
        whole = [pair for pair in places if pair[1] < last]
        self._add_to_out({pair: places[pair] for pair in whole}, sums, None)
        ends = {pair: place for pair, place in places.items() if pair[1] == last}
        with b.if_else(b.icmp_signed(">=", left, _INDEX(LANES))) as (then, otherwise):
            with then:
                self._add_to_out(ends, sums, None)
            with otherwise:
                self._add_to_out(ends, sums, left)

    def _add_to_out(self, places: Sums, sums: Sums, left: Value) -> None:
        """Write the code that adds sums to ``out``, of each the first ``left`` numbers if given."""
        b = self.builder
        for pair, place in places.items():
            total = b.fadd(self._load(self.out, place, left), sums[pair])
            at = self._vector_at(self.out, place)
            if left is None:
                b.store(total, at, align=self.item_bytes)
            else:
                arguments = [total, at, ir.IntType(32)(self.item_bytes), mask(b, left)]
                masked(b, "store", self.vector, ir.VoidType(), arguments)

    def add_dots(self, shape: Shape, at: Value, row: Value, of_out: Args, terms: Value) -> None:
        """Write the code of a tile, with :func:`_dots`'s ``shape`` and places."""
        b, (rows, columns), (to, width) = self.builder, shape, of_out
        places = self._places(to, width, rows, range(columns))
        firsts = [self._plus(at, b.mul(terms, _INDEX(i))) for i in range(rows)]
        others = [b.mul(self._plus(row, j), terms) for j in range(columns)]

        left = b.and_(terms, _INDEX(LANES - 1))
        whole = b.sub(terms, left)

        def read(term: Value, left: Value = None) -> tuple[list[Value], list[Value]]:
            factors = [self._load(self.u, self._plus(other, term), left) for other in others]
            return factors, [self._load(self.a, self._plus(base, term), left) for base in firsts]

        sums = self._sums(rows, columns, whole, LANES, read)
        sums = self._sums(rows, columns, left, LANES, lambda _: read(whole, left), sums)
        for pair, place in places.items():
            pointer = b.gep(self.out, [place])
            b.store(b.fadd(b.load(pointer), total_of(b, sums[pair])), pointer)

    def _sums(
        self, rows: int, columns: int, terms: Value, step: int, read: Read,
        start: Sums | None = None,
    ) -> Sums:  # fmt: skip
        """Write the loop over terms, ``step`` at a time. ``read`` writes the loads of factors."""
        b, zero = self.builder, ir.Constant(self.vector, [0.0] * LANES)
        pairs = [(i, j) for i in range(rows) for j in range(columns)]
        start = start or dict.fromkeys(pairs, zero)
        before, loop, done = b.block, b.append_basic_block("terms"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed(">", terms, _INDEX(0)), loop, done)
        b.position_at_end(loop)
        term = b.phi(_INDEX)
        sums, after = {pair: b.phi(self.vector) for pair in pairs}, {}
        factors, others = read(term)
        for i, j in pairs:
            more = b.fmul(others[i], factors[j], flags=("contract",))
            after[i, j] = b.fadd(sums[i, j], more, flags=("contract",))
        following = self._plus(term, step)
        for value, initial, updated in [(term, _INDEX(0), following)] + [
            (sums[pair], start[pair], after[pair]) for pair in pairs
        ]:
            value.add_incoming(initial, before)
            value.add_incoming(updated, loop)
        b.cbranch(b.icmp_signed("<", following, terms), loop, done)
        b.position_at_end(done)
        totals = {pair: b.phi(self.vector) for pair in pairs}
        for pair, value in totals.items():
            value.add_incoming(start[pair], before)
            value.add_incoming(after[pair], loop)
        return totals

    def _places(self, to: Value, width: Value, rows: int, columns: Iterable[int]) -> Sums:
        """Return where in ``out`` each sum belongs."""
        b = self.builder
        return {
            (i, j): self._plus(to, b.mul(width, _INDEX(i)), column)
            for i in range(rows)
            for j, column in enumerate(columns)
        }

    def _spread(self, place: Value) -> Value:
        return broadcast(self.builder, self.builder.load(self.builder.gep(self.a, [place])))

    def _column(self, panel: Value, vector: int, to_panel: Value) -> Value:
        """Return where in ``u`` a vector begins; ``vector`` counts from the panel's first one."""
        panels, rest = divmod(vector, VECTORS)
        return self._plus(self.builder.mul(self._plus(panel, panels), to_panel), rest * LANES)

    def _plus(self, *terms: Value | int) -> Value:
        total, *rest = (_INDEX(term) if isinstance(term, int) else term for term in terms)
        for term in rest:
            total = self.builder.add(total, term)
        return total

    def _vector_at(self, pointer: Value, place: Value) -> Value:
        return self.builder.bitcast(self.builder.gep(pointer, [place]), self.vector.as_pointer())

    def _load(self, pointer: Value, place: Value, left: Value = None) -> Value:
        """Write the load of a vector; lanes from ``left`` on are zero, if it is given."""
        b, at = self.builder, self._vector_at(pointer, place)
        if left is None:
            return b.load(at, align=self.item_bytes)
        zero = ir.Constant(self.vector, [0.0] * LANES)
        arguments = [at, ir.IntType(32)(self.item_bytes), mask(b, left), zero]
        return masked(b, "load", self.vector, self.vector, arguments)
