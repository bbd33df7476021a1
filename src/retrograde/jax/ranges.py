"""Carry out a table by two compiled loops, one for each direction.

The size of each compiled loop is that of a few steps, whatever the length. A loop follows the rows
of the table. It contains one inner loop for each kind of row. An inner loop whose kind is not next
runs zero times, so no branches are needed. States are in preallocated slots, internal states on a
preallocated tape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from retrograde.jax.step import Arrays, Recorded, filled, is_real, some_of, zeros
from retrograde.jax.table import Kind, Table

Holding = tuple[Arrays, Arrays]  # the slots and the tape
Row = tuple[Array, ...]  # start, stop, load, store, tape; see Table


@dataclass(frozen=True)
class Order:
    """The number of steps, the end to begin at, and how many steps a loop runs at once."""

    length: int
    reverse: bool
    unroll: int

    def read(self, arrays: Arrays, step: object) -> Arrays:
        """Return one step's part of arrays that have all steps."""
        return _read(arrays, self._at(step))

    def write(self, arrays: Arrays, step: object, values: Sequence[Any]) -> Arrays:
        return _write(arrays, self._at(step), values)

    def _at(self, step: Any) -> Any:
        return self.length - 1 - step if self.reverse else step

    def each(self, start: Any, stop: Any, body: Callable[[Any, Any], Any], carried: Any) -> Any:
        """Run ``body`` for start … stop − 1, ``unroll`` steps at once while enough remain."""
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
    """The arrays that rows read and write. Carry and outputs are empty in the backward sweep."""

    carry: Arrays
    ys: Arrays
    slots: Arrays
    tape: Arrays
    totals: Any = ()


Perform = Callable[[Row, _State], _State]


@dataclass(frozen=True)
class Sweeps:
    """The forward and the backward sweep of a table over a recorded step."""

    recorded: Recorded
    table: Table
    order: Order

    def forward(self, consts: Arrays, init: Arrays, xs: Arrays) -> tuple[Arrays, Arrays, Holding]:
        """Return the carry after all steps, the outputs, and the slots and tape that are held."""
        table, step = self.table, self.recorded.step
        slots = _write([zeros(c, table.slots) for c in step.carry], table.first, init)
        recording = Kind.RECORD in table.rows[: table.forward, 0]
        # The carry is a part of the state. If it were read from the slots afterwards, XLA would
        # copy them: it does not know that only the backward sweep writes to them later.
        ys = [zeros(y, self.order.length) for y in step.y]
        state = _State(init, ys, slots, self._tape() if recording else [])
        carry, ys, slots, tape, _ = self._follow(0, table.forward, self._runs(consts, xs), state)
        return carry, ys, (slots, tape)

    def backward(
        self, consts: Arrays, xs: Arrays, holding: Holding, after: Arrays, g_ys: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Return the cotangents of constants, of the first carry and of inputs. ``after`` and
        ``g_ys`` are the cotangents of the last carry and of the outputs, where None means zero.
        Constants and inputs without a gradient get None."""
        slots, tape = holding
        if not tape:
            tape = self._tape()
            # The tape depends on a gradient here. Otherwise XLA may allocate it while the
            # outputs still take memory.
            gradients = [*(g[0] for g in jax.tree.leaves(g_ys)), *jax.tree.leaves(after)]
            for g in [g for g in gradients if g.size][:1]:
                there = jnp.isnan(g).any()
                tape = [jnp.where(there, jnp.ones_like(b), b) if is_real(b) else b for b in tape]
        operands = map(some_of, (consts, xs), self.recorded.wanted)
        shares, g_xs = (jax.tree.map(zeros, part) for part in operands)
        state = _State([], [], slots, tape, (shares, after, g_xs))
        kinds = self._runs(consts, xs) | self._backs(consts, xs, g_ys)
        stop = len(self.table.rows) - 1
        totals: tuple[Arrays, Arrays, Arrays]
        totals = self._follow(self.table.forward, stop, kinds, state).totals
        return totals

    def _runs(self, consts: Arrays, xs: Arrays) -> dict[Kind, Perform]:
        """Return the functions of the rows that run steps, by kind."""
        recorded, order = self.recorded, self.order

        def run(row: Row, state: _State, recording: bool) -> _State:
            start, stop, load, store, base = row
            # The loop counts recorded steps by their places on the tape.
            loop_start, ahead = (base, start - base) if recording else (start, 0)

            def one(n: Any, inner: Any) -> Any:
                carry, ys, tape = inner
                x = order.read(xs, n + ahead)
                if recording:
                    carry, y, stored = recorded(consts, carry, x)
                    tape = _write(tape, n, stored)
                else:
                    carry, y = recorded.step(consts, carry, x)
                return carry, order.write(ys, n + ahead, y[: len(ys)]), tape

            carried = _read(state.slots, load), state.ys, state.tape if recording else []
            carry, ys, tape = order.each(loop_start, loop_start + (stop - start), one, carried)
            slots = _write(state.slots, store, carry)
            return _State(carry[: len(state.carry)], ys, slots, tape or state.tape, state.totals)

        return {
            Kind.ADVANCE: lambda row, state: run(row, state, False),
            Kind.RECORD: lambda row, state: run(row, state, True),
        }

    def _backs(self, consts: Arrays, xs: Arrays, g_ys: Arrays) -> dict[Kind, Perform]:
        """Return the functions of the rows that backpropagate steps, by kind."""
        recorded, order, places = self.recorded, self.order, self.table.tape
        fixed = recorded.fixed(*consts)

        def pulled(k: Any, stored: Arrays, x: Arrays, g_y: Arrays, totals: Any) -> Any:
            """Backpropagate step ``k``; ``g_y`` are the cotangents of its outputs."""
            g_consts, g_carry, g_xs = totals
            residuals = recorded.residuals(held=stored, fixed=fixed, consts=consts, x=x)
            shares, g_carry, g_x = recorded.pull(residuals, g_carry, filled(g_y, recorded.step.y))
            return jax.tree.map(jnp.add, g_consts, shares), g_carry, order.write(g_xs, k, g_x)

        def back(row: Row, state: _State) -> _State:
            start, stop, _, _, base = row
            end = places - base

            def one(n: Any, inner: Any) -> Any:
                g_y, totals = inner
                place = places - 1 - n
                k = start + (place - base)
                stored, x = _read(state.tape, place), order.read(xs, k)
                return order.read(g_ys, k - 1), pulled(k, stored, x, g_y, totals)

            # XLA vectorizes a kernel for the CPU if all its reads have one index that comes from
            # one counter. So places are counted from the end, and cotangents are read a step ahead.
            carried = order.read(g_ys, stop - 1), state.totals
            return state._replace(totals=order.each(end - (stop - start), end, one, carried)[1])

        def again(row: Row, state: _State) -> _State:
            k, _, load, _, _ = row
            x = order.read(xs, k)
            _, _, stored = recorded(consts, _read(state.slots, load), x)
            return state._replace(totals=pulled(k, stored, x, order.read(g_ys, k), state.totals))

        return {Kind.TAPE: back, Kind.STEP: again}

    def _tape(self) -> Arrays:
        return [zeros(h, self.table.tape) for h in self.recorded.held]

    def _follow(
        self, first_row: int, stop: int, kinds: Mapping[Kind, Perform], state: _State
    ) -> _State:
        """Carry out the rows first_row … stop − 1."""
        table_rows = jnp.asarray(self.table.rows)

        def rows_of(kind: Kind, now: Any) -> Any:
            """Carry out rows while the next one is of a kind."""
            return lax.while_loop(
                lambda now: (now[0] < stop) & (table_rows[now[0], 0] == kind),
                lambda now: (now[0] + 1, kinds[kind](tuple(table_rows[now[0]][1:]), now[1])),
                now,
            )

        def body(now: object) -> Any:
            for kind in np.unique(self.table.rows[first_row:stop, 0]):
                now = rows_of(Kind(kind), now)
            return now

        final: _State
        final = lax.while_loop(lambda now: now[0] < stop, body, (jnp.int32(first_row), state))[1]
        return final


def _read(buffers: Arrays, at: object) -> Arrays:
    plain = {"keepdims": False, "allow_negative_indices": False}
    values: Arrays = jax.tree.map(lambda b: lax.dynamic_index_in_dim(b, at, **plain), buffers)
    return values


def _write(buffers: Arrays, at: object, values: Sequence[Any]) -> Arrays:
    plain = {"axis": 0, "allow_negative_indices": False}
    pairs = zip(buffers, values, strict=True)
    return [
        b if b is None else lax.dynamic_update_index_in_dim(b, v, at, **plain) for b, v in pairs
    ]
