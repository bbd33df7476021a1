"""A table carried out: two compiled loops, one for each direction, whose size is that of a step.

Each loop follows the rows of the table, which are operands. It is a loop of loops, one for each
kind of row, so that no branch has to be taken: a loop whose kind is not next runs zero times.
States lie in preallocated slots, internal states on a preallocated tape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from retrograde.jax.step import Recorded, is_real, some_of, type_of
from retrograde.jax.table import Kind, Table

__all__ = ["Held", "Order", "sweep_backward", "sweep_forward"]

Arrays = list[Any]
Row = tuple[Array, ...]  # start, stop, load, store, tape
Kinds = Mapping[Kind, Callable[[Row, Any], Any]]


@dataclass(frozen=True)
class Order:
    """How many steps there are, from which end, and how many of them a loop runs at once."""

    length: int
    reverse: bool
    unroll: int

    def at(self, step: Any) -> Any:
        """Where a step lies in arrays over all steps."""
        return self.length - 1 - step if self.reverse else step

    def read(self, arrays: Arrays, step: Any) -> Arrays:
        return _read(arrays, self.at(step))

    def write(self, arrays: Arrays, step: Any, values: Sequence[Any]) -> Arrays:
        return _write(arrays, self.at(step), values)

    def each(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], carried: Any) -> Any:
        """Run steps ``start`` … ``stop − 1``, several at once as long as there are enough."""

        if self.unroll < 2:
            return lax.fori_loop(start, stop, body, carried)

        def several(k: Any, carried: Any) -> Any:
            for i in range(self.unroll):
                carried = body(start + k * self.unroll + i, carried)
            return carried

        times = (stop - start) // self.unroll
        carried = lax.fori_loop(0, times, several, carried)
        return lax.fori_loop(start + times * self.unroll, stop, body, carried)


@dataclass(frozen=True)
class Held:
    """What is held between the two sweeps: stored states, and recorded steps."""

    slots: Arrays
    tape: Arrays


jax.tree_util.register_dataclass(Held, ["slots", "tape"], [])


def sweep_forward(
    recorded: Recorded,
    table: Table,
    rows: Array,
    order: Order,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[Arrays, Arrays, Held]:
    """The rows of the forward sweep: the carry after all steps, the outputs, and what is held."""
    slots = _write([c.zeros(table.slots) for c in recorded.step.carry], table.first, init)
    used = _used(table.rows[: table.forward])
    tape = _tape(recorded, table) if Kind.RECORD in used else []
    ys = [y.zeros(order.length) for y in recorded.step.y]
    # The carry goes along by itself. Read from the slots afterwards, it would make XLA copy these,
    # for nothing says that the backward sweep writes to them later.
    kinds = _forward_kinds(recorded, order, consts, xs)
    chosen = {kind: kinds[kind] for kind in used}
    state = (init, ys, slots, tape, ())
    carry, ys, slots, tape, _ = _follow(rows, 0, table.forward, chosen, state)
    return carry, ys, Held(slots, tape)


def sweep_backward(
    recorded: Recorded,
    table: Table,
    rows: Array,
    order: Order,
    consts: Arrays,
    xs: Arrays,
    held: Held,
    after: Arrays,
    outputs: Sequence[Array | None],
) -> tuple[Arrays, Arrays, Arrays]:
    """The rows after the forward sweep: from the cotangents of the last carry's real parts and of
    the outputs (None: zero) to those of the constants, of the carry and of the inputs that want
    one."""
    given, fixed = [y for y in outputs if y is not None], recorded.fixed(consts)

    def pulled(k: Any, held: Arrays, x: Arrays, g_given: Arrays, totals: Any) -> Any:
        """Backpropagate one step; ``g_given`` are the cotangents of its outputs."""
        g_carry, g_consts, g_xs = totals
        reals = [y for y in recorded.step.y if is_real(y)]
        rest = iter(g_given)
        g_y = [
            like.zeros() if g is None else next(rest)
            for like, g in zip(reals, outputs, strict=True)
        ]
        residuals = recorded.residuals(held, fixed, consts, x)
        shares, g_carry, g_x = recorded.pull(residuals, g_carry, g_y)
        g_consts = [total + share for total, share in zip(g_consts, shares, strict=True)]
        return g_carry, g_consts, order.write(g_xs, k, g_x)

    def back(row: Row, state: Any) -> Any:
        start, stop, _, _, base = row
        *rest, tape, totals = state

        def one(i: Any, inner: Any) -> Any:
            g_given, totals = inner
            k = start + stop - 1 - i
            held, x = _read(tape, base + k - start), order.read(xs, k)
            return order.read(given, k - 1), pulled(k, held, x, g_given, totals)

        # Cotangents are read a step ahead: XLA is slow where one kernel reads by two indices.
        first = order.read(given, stop - 1), totals
        return *rest, tape, order.each(start, stop, one, first)[1]

    def again(row: Row, state: Any) -> Any:
        k, _, load, _, _ = row
        *rest, slots, tape, totals = state
        x = order.read(xs, k)
        _, _, held = recorded(consts, _read(slots, load), x)
        return *rest, slots, tape, pulled(k, held, x, order.read(given, k), totals)

    wanted_consts, wanted_xs = recorded.wanted
    totals = (
        after,
        [type_of(c).zeros() for c in some_of(consts, wanted_consts)],
        [type_of(x).zeros() for x in some_of(xs, wanted_xs)],
    )
    tape, tied = held.tape or _tape(recorded, table), [g for g in [*given, *after] if g.size]
    if tied and not held.tape:
        # Tied to a gradient, or XLA may make the tape while the outputs still take memory.
        there = jnp.isnan(tied[0].ravel()[0])
        tape = [jnp.where(there, jnp.ones_like(b), b) if is_real(b) else b for b in tape]
    kinds = {
        **_forward_kinds(recorded, order, consts, xs),
        Kind.TAPE: back,
        Kind.STEP: again,
    }
    chosen = {kind: kinds[kind] for kind in _used(table.rows[table.forward : -1])}
    state: Any = ([], [], held.slots, tape, totals)
    *_, totals = _follow(rows, table.forward, len(table.rows) - 1, chosen, state)
    g_carry, g_consts, g_xs = totals
    return g_consts, g_carry, g_xs


def _forward_kinds(recorded: Recorded, order: Order, consts: Arrays, xs: Arrays) -> Kinds:
    """Rows that run steps. Their state is (last carry, outputs, slots, tape, totals); the first two
    are empty where nobody wants them."""

    def advance(row: Row, state: Any) -> Any:
        start, stop, load, store, _ = row
        last, ys, slots, tape, totals = state

        def one(k: Any, inner: Any) -> Any:
            carry, ys = inner
            carry, y = recorded.step(consts, carry, order.read(xs, k))
            return carry, order.write(ys, k, y[: len(ys)])

        carry, ys = order.each(start, stop, one, (_read(slots, load), ys))
        return carry[: len(last)], ys, _write(slots, store, carry), tape, totals

    def record(row: Row, state: Any) -> Any:
        start, stop, load, store, base = row
        last, ys, slots, tape, totals = state

        def one(k: Any, inner: Any) -> Any:
            carry, ys, tape = inner
            carry, y, held = recorded(consts, carry, order.read(xs, k))
            return carry, order.write(ys, k, y[: len(ys)]), _write(tape, base + k - start, held)

        carry, ys, tape = order.each(start, stop, one, (_read(slots, load), ys, tape))
        return carry[: len(last)], ys, _write(slots, store, carry), tape, totals

    return {Kind.ADVANCE: advance, Kind.RECORD: record}


def _used(rows: NDArray[np.int32]) -> list[Kind]:
    """The kinds of rows of a sweep."""
    return [Kind(kind) for kind in np.unique(rows[:, 0])]


def _tape(recorded: Recorded, table: Table) -> Arrays:
    return [h.zeros(table.tape) for h in recorded.held]


def _follow(rows: Array, first: int, stop: int, kinds: Kinds, state: Any) -> Any:
    """Carry out the rows ``first`` … ``stop − 1``."""

    def run_of(kind: Kind, perform: Callable[[Row, Any], Any], now: Any) -> Any:
        """All rows of a kind that are next."""

        def body(now: Any) -> Any:
            r, state = now
            return r + 1, perform(tuple(rows[r][1:]), state)

        return lax.while_loop(lambda now: (now[0] < stop) & (rows[now[0], 0] == kind), body, now)

    def body(now: Any) -> Any:
        for kind, perform in kinds.items():
            now = run_of(kind, perform, now)
        return now

    return lax.while_loop(lambda now: now[0] < stop, body, (jnp.int32(first), state))[1]


def _read(buffers: Arrays, at: Any) -> Arrays:
    plain = {"keepdims": False, "allow_negative_indices": False}
    return [lax.dynamic_index_in_dim(b, at, **plain) for b in buffers]


def _write(buffers: Arrays, at: Any, values: Sequence[Any]) -> Arrays:
    return [
        lax.dynamic_update_index_in_dim(b, v, at, 0, allow_negative_indices=False)
        for b, v in zip(buffers, values, strict=True)
    ]
