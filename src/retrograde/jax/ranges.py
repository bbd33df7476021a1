"""A table carried out: two compiled loops, one for each direction, whose size is that of a step.

Each loop follows the rows of the table. It is a loop of loops, one for each kind of row, so that no
branch has to be taken: a loop whose kind is not next runs zero times. States lie in preallocated
slots, internal states on a preallocated tape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from retrograde.jax.step import Recorded, filled, is_real, some_of, type_of
from retrograde.jax.table import Kind, Table

__all__ = ["Order", "sweep_backward", "sweep_forward"]

Arrays = list[Any]
Row = tuple[Array, ...]  # start, stop, load, store, tape


@dataclass(frozen=True)
class Order:
    """How many steps there are, from which end, and how many of them a loop runs at once."""

    length: int
    reverse: bool
    unroll: int

    def read(self, arrays: Arrays, step: Any) -> Arrays:
        """One step of arrays over all steps."""
        return _read(arrays, self._at(step))

    def write(self, arrays: Arrays, step: Any, values: Sequence[Any]) -> Arrays:
        return _write(arrays, self._at(step), values)

    def _at(self, step: Any) -> Any:
        return self.length - 1 - step if self.reverse else step

    def each(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], carried: Any) -> Any:
        """Run ``body`` for start … stop − 1, several at once as long as there are enough."""
        if self.unroll < 2:
            return lax.fori_loop(start, stop, body, carried)

        def several(k: Any, carried: Any) -> Any:
            for i in range(self.unroll):
                carried = body(start + k * self.unroll + i, carried)
            return carried

        times = (stop - start) // self.unroll
        carried = lax.fori_loop(0, times, several, carried)
        return lax.fori_loop(start + times * self.unroll, stop, body, carried)


class _State(NamedTuple):
    """What rows read and write. The carry and outputs are empty lists where nobody wants them."""

    carry: Arrays
    ys: Arrays
    slots: Arrays
    tape: Arrays
    totals: Any = ()


Perform = Callable[[Row, _State], _State]


def sweep_forward(
    recorded: Recorded, table: Table, order: Order, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[Arrays, Arrays, tuple[Arrays, Arrays]]:
    """The rows of the forward sweep: the carry after all steps, the outputs, and what is held
    until the backward sweep: slots and tape."""
    slots = _write([c.zeros(table.slots) for c in recorded.step.carry], table.first, init)
    recording = Kind.RECORD in table.rows[: table.forward, 0]
    tape = [h.zeros(table.tape) for h in recorded.held] if recording else []
    ys = [y.zeros(order.length) for y in recorded.step.y]
    # The carry goes along by itself. Read from the slots afterwards, it would make XLA copy these,
    # for nothing says that the backward sweep writes to them later.
    state = _State(init, ys, slots, tape)
    kinds = _forward_kinds(recorded, order, consts, xs)
    carry, ys, *held, _ = _follow(table, 0, table.forward, kinds, state)
    return carry, ys, (held[0], held[1])


def sweep_backward(
    recorded: Recorded,
    table: Table,
    order: Order,
    consts: Arrays,
    xs: Arrays,
    held: tuple[Arrays, Arrays],
    after: Arrays,
    g_ys: Arrays,
) -> tuple[Arrays, Arrays, Arrays]:
    """The rows after the forward sweep: from cotangents of the last carry and of the outputs
    (None: zero) to those of the constants, of the carry and of the inputs that want one."""
    fixed = recorded.fixed(*consts)

    def pulled(k: Any, held: Arrays, x: Arrays, g_y: Arrays, totals: Any) -> Any:
        """Backpropagate one step; ``g_y`` are the cotangents of its outputs."""
        g_consts, g_carry, g_xs = totals
        residuals = recorded.residuals(held=held, fixed=fixed, consts=consts, x=x)
        shares, g_carry, g_x = recorded.pull(residuals, g_carry, filled(g_y, recorded.step.y))
        g_consts = jax.tree.map(jnp.add, g_consts, shares)
        return g_consts, g_carry, order.write(g_xs, k, g_x)

    def back(row: Row, state: _State) -> _State:
        start, stop, _, _, base = row

        def one(n: Any, inner: Any) -> Any:
            g_y, totals = inner
            place = table.tape - 1 - n
            k = start + (place - base)
            held, x = _read(state.tape, place), order.read(xs, k)
            return order.read(g_ys, k - 1), pulled(k, held, x, g_y, totals)

        # XLA's kernels for the CPU are slow unless all that they read has one index, which is a
        # constant less a counter. So places are counted from the end of the tape, and cotangents
        # are read a step ahead.
        end = table.tape - base
        carried = order.read(g_ys, stop - 1), state.totals
        return state._replace(totals=order.each(end - (stop - start), end, one, carried)[1])

    def again(row: Row, state: _State) -> _State:
        k, _, load, _, _ = row
        x = order.read(xs, k)
        _, _, held = recorded(consts, _read(state.slots, load), x)
        return state._replace(totals=pulled(k, held, x, order.read(g_ys, k), state.totals))

    slots, tape = held
    wanted_consts, wanted_xs = recorded.wanted
    shares, g_xs = jax.tree.map(
        lambda v: type_of(v).zeros(), (some_of(consts, wanted_consts), some_of(xs, wanted_xs))
    )
    if not tape:
        tape = [h.zeros(table.tape) for h in recorded.held]
        # Tied to a gradient, or XLA may make the tape while the outputs still take memory.
        for g in [g for g in jax.tree.leaves((g_ys, after)) if g.size][:1]:
            there = jnp.isnan(g.ravel()[0])
            tape = [jnp.where(there, jnp.ones_like(b), b) if is_real(b) else b for b in tape]
    state = _State([], [], slots, tape, (shares, after, g_xs))
    kinds = _forward_kinds(recorded, order, consts, xs) | {Kind.TAPE: back, Kind.STEP: again}
    totals = _follow(table, table.forward, len(table.rows) - 1, kinds, state).totals
    found: tuple[Arrays, Arrays, Arrays] = totals
    return found


def _forward_kinds(
    recorded: Recorded, order: Order, consts: Arrays, xs: Arrays
) -> dict[Kind, Perform]:
    """Rows that run steps."""

    def run(row: Row, state: _State, recording: bool) -> _State:
        start, stop, load, store, base = row
        first = base if recording else start  # one index for the tape, and what it is ahead of it
        ahead = start - base if recording else 0

        def one(n: Any, inner: Any) -> Any:
            carry, ys, tape = inner
            k = n + ahead
            carry, y, held = (recorded if recording else plain)(consts, carry, order.read(xs, k))
            return carry, order.write(ys, k, y[: len(ys)]), _write(tape, n, held)

        carried = _read(state.slots, load), state.ys, state.tape if recording else []
        carry, ys, tape = order.each(first, first + (stop - start), one, carried)
        slots = _write(state.slots, store, carry)
        return _State(carry[: len(state.carry)], ys, slots, tape or state.tape, state.totals)

    def plain(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        return *recorded.step(consts, carry, x), []

    return {
        Kind.ADVANCE: lambda row, state: run(row, state, False),
        Kind.RECORD: lambda row, state: run(row, state, True),
    }


def _follow(
    table: Table, first: int, stop: int, kinds: Mapping[Kind, Perform], state: _State
) -> _State:
    """Carry out the rows ``first`` … ``stop − 1``."""
    rows = jnp.asarray(table.rows)
    used = [Kind(kind) for kind in np.unique(table.rows[first:stop, 0])]

    def body(now: Any) -> Any:
        for kind in used:  # all rows of a kind that are next
            now = lax.while_loop(
                lambda now, kind=kind: (now[0] < stop) & (rows[now[0], 0] == kind),
                lambda now, kind=kind: (now[0] + 1, kinds[kind](tuple(rows[now[0]][1:]), now[1])),
                now,
            )
        return now

    found: _State = lax.while_loop(lambda now: now[0] < stop, body, (jnp.int32(first), state))[1]
    return found


def _read(buffers: Arrays, at: Any) -> Arrays:
    plain = {"keepdims": False, "allow_negative_indices": False}
    return jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, at, **plain), buffers)  # type: ignore[no-any-return]


def _write(buffers: Arrays, at: Any, values: Sequence[Any]) -> Arrays:
    return [
        b
        if b is None
        else lax.dynamic_update_index_in_dim(b, v, at, 0, allow_negative_indices=False)
        for b, v in zip(buffers, values, strict=True)
    ]
