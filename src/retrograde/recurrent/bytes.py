"""The bytes of held layers, counted allocation by allocation without running anything.

Everything that :class:`~retrograde.recurrent.core.HeldLayers` allocates is proportional to
the units, the inputs or the weights. So its peak has a closed form. It depends on the shape, the
length of a span, and the number of steps whose gates are kept.
``tests/recurrent/test_held.py`` compares it with the measured peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from retrograde.kernels.cells import AnyKind, Formula, form_of
from retrograde.kernels.cpu.layer import Backward, Forward
from retrograde.kernels.cpu.llvm.barrier import MANY_SAMPLES, parts_of_units
from retrograde.kernels.cpu.llvm.panels import PANEL, panels_of, whole_vectors
from retrograde.kernels.cpu.products import room_of_outer, room_of_product, threads_with_room
from retrograde.kernels.cpu.sweep import numbers_of_sweep
from retrograde.kernels.cpu.sweep_loops import room_for_products
from retrograde.plan.footprint import Curve

#: What runs the layers. ``"loops"`` is one loop for a whole backward pass. ``"sweeps"`` is loops
#: for the recurrence, and matrix products for the rest. ``"in place"`` is the same, but reads the
#: weights without a copy of them. ``"torch"``, on a GPU, is the vendor's forward pass, torch's
#: operations and compiled sweeps. ``"launches"``, there, is a forward pass of our own.
Backend = Literal["loops", "sweeps", "in place", "torch", "launches"]

#: The bytes of the inputs' contribution to the gates that are held at a time.
FORWARD_BYTES = 2**21

#: The outputs' gradient may have to be laid into contiguous memory: so many rows, or a quarter of a
#: span, at a time. What runs in place copies a quarter, or a step.
LAID_ROWS, LAID_SHARE = 128, 4

# The most rows whose gradients may be added to a total in place, one sum of 64 rows after the
# other.
_FEW_ROWS = 2**14


def sums_at_once(length: int, batch: int) -> bool:
    """Return whether T × B is so small that summing weights' gradients in place rounds little."""
    return length * batch <= _FEW_ROWS


@dataclass(frozen=True)
class Layer:
    """A layer in one or two tracks (directions), and a batch of B samples."""

    kind: AnyKind
    batch: int  # B
    width: int  # I
    size: int  # H
    tracks: int = 1
    item: int = 4  # the bytes of a number
    threads: int = 1
    needs_x: bool = True
    straight: bool = True  # whether inputs are contiguous
    packed: bool = False  # whether later steps may have fewer samples
    views: bool = False  # whether the states before a span but the first are a view of outputs
    drops: bool = False  # whether there is dropout between the layers of its recurrence
    first: bool = False  # whether the inputs of the lowest of these are dropped too
    at_once: bool = False  # as for :class:`LayerBackward`
    lowest: bool = True  # in its recurrence, as ``top``
    top: bool = True
    forward_by: Backend = "loops"
    backward_by: Backend = "loops"
    vendor: Curve | None = None  # the measured bytes of the vendor's forward pass, by steps
    calls: int = 0  # as of :class:`HeldPlan`, and
    chunk: int | None = None  # the steps in a chunk of a scan, None for none

    @property
    def form(self) -> Formula:
        """The numbers of the cell."""
        return form_of(self.kind)

    @property
    def on_gpu(self) -> bool:
        return self.backward_by == "torch"

    @property
    def state(self) -> int:
        """The bytes of a state, in all tracks."""
        return self._units(self.form.states * self.batch)

    def mark(self, spans: int) -> int:
        """Return the bytes of the marks of ``spans`` spans of the whole batch."""
        return self._units(self.form.others * spans * self.batch)

    def gates(self, rows: int) -> int:
        """Return the bytes of kept gates and cells; the vendor's forward pass cannot keep them."""
        keeps = self.form.keeps and not self.on_gpu
        return self._units(self._kept * rows) if keeps else 0

    def along(self, rows: int) -> int:
        """Return the bytes of following existing outputs, besides kept gates: states and inputs."""
        numbers = rows * (self.size + self.width * (self._copies_x + self.drops))
        numbers += self._room(rows, self.width, self.size) + self._apart(rows)
        return (numbers + 4 * (self.batch + 1) * self.size) * self.item

    def below(self, rows: int) -> int:
        """Return the bytes of outputs that the caller does not hold."""
        return 0 if self.top else rows * self.size * self.item

    def forward(self, rows: int, pass_rows: int) -> int:
        """Return the peak of the working bytes of a forward pass. A span has ``rows`` rows, and
        ``pass_rows`` is the rows that the gates' buffer holds."""
        numbers = self._pass(pass_rows)
        numbers += rows * self.width * (self._copies_x + (self.tracks > 1 or self.drops))
        if self.tracks > 1:
            numbers += 2 * rows * self.size
        if self.on_gpu:
            numbers += rows * self.size  # outputs that the caller already holds
        return numbers * self.item

    def advance(self, pass_rows: int) -> int:
        """Return the working bytes of running any number of steps without recording."""
        most = max(pass_rows, self.batch)
        return (self._pass(pass_rows) + most * (2 * self.width + self.size)) * self.item

    def span(self, rows: int, *, kept: bool, tight: bool = False, first: bool = True) -> int:
        """Return the peak bytes of a span; if ``tight``, it is of unequal ones, maybe the first."""
        size, width, gates = self.size, self.width, self.form.gates * self.size
        lstm = self.form.others > 0
        dropped = self.tracks > 1 or self.drops
        before = rows if first or not (tight and self.views) else 0
        states = max(2, self.form.states)  # before steps; entering states
        numbers = before * size + 2 * self.batch * states * size
        if self.top:
            few = {"in place": 0, "torch": rows}.get(
                self.backward_by, min(rows, LAID_ROWS) * (not tight)
            )
            numbers += max(few, rows // LAID_SHARE, self.batch) * size
            # With two tracks, its states and their gradients are reversed in time.
            numbers += 2 * rows * size if self.tracks > 1 else 0
        else:
            numbers += rows * size  # the gradient from the layer above
        if self._copies_x:
            numbers += rows * width * (2 if dropped else 1)
        aside = self.tracks > 1 or not self.straight or self.first
        if not self.lowest or (self.needs_x and aside):
            numbers += rows * width * (3 if dropped else 1)
        if self.backward_by == "torch":
            steps = (10 if lstm else 3) * self.batch * size  # of the sweep, step by step
            slopes = 2 if self.form.gates == 1 else 9  # for each unit and row
            numbers += slopes * rows * size + steps
        elif self.loops:
            again = lstm or (self.form.keeps and self.backward_by == "in place")
            if again and not kept:
                numbers += self._kept * rows * size + self._room(rows, width, size)
                numbers += self._apart(rows)
        elif lstm:
            numbers += rows * size * (2 if kept else 6) + 2 * gates
        else:
            numbers += (8 if self.kind == "GRU" else 2) * rows * size + 2 * gates
        numbers += self._scanned(rows) if self.chunk else 0
        if not (self.loops or self.backward_by == "torch"):
            outer = room_of_outer(rows, gates, max(width, size))
            numbers += self._room(rows, width, size, gates, outer=outer)
            if not self.at_once:
                numbers += gates * max(width, size)  # a product, before it is added
        return numbers * self.item

    def pass_rows(self, block: int) -> int:
        """Return the rows that a forward pass processes at a time, in spans of ``block`` rows."""
        if self.on_gpu:
            return min(block, self.calls * self.batch) if self.calls else block
        wide = self.form.gates * self.size * self.item
        return max(self.batch, min(FORWARD_BYTES // wide, block))

    def fixed(self, rows: int) -> int:
        """Return the bytes that a whole backward pass holds, besides the gradients."""
        return self._fixed(rows) * self.item + self.state * 3

    @property
    def loops(self) -> bool:
        """Whether one loop does the whole backward pass."""
        may = self.backward_by == "loops" or self.form.step is not None
        return may and Backward.pays(self.form, self.batch, self.size, self.threads)

    @cached_property
    def _parts_onward(self) -> int:
        """The same of a forward pass, to which a step of a packed batch may bring fewer samples."""
        most = min(self.batch, max(MANY_SAMPLES))
        counts = range(1, most + 1) if self.packed else [self.batch]
        return max(parts_of_units(n, self.size, self.form.gates, self.threads) for n in counts)

    @property
    def _kept(self) -> int:
        """The numbers of a unit and step that a forward pass may keep."""
        return self.form.gates + self.form.aside

    def _apart(self, rows: int) -> int:
        """Return the numbers that recomputed gates take in addition, if some are split."""
        split = self.form.keeps and self.form.split
        return 2 * self.form.gates * rows * self.size if split else 0

    def _units(self, numbers: int) -> int:
        """Return the bytes of so many numbers for each unit of all tracks."""
        return numbers * self.tracks * self.size * self.item

    @property
    def _copies_x(self) -> bool:
        if not self.lowest:
            return self.drops
        return self.first or self.tracks > 1 or not self.straight

    def _room(self, rows: int, *terms: int, outer: int = 0) -> int:
        """Return the most numbers that products of ``rows`` rows copy at a time."""
        work = rows * self.form.gates * self.size * max(self.width, self.size)
        each = max(room_of_product(rows, max(terms), PANEL + 1, turned=True), outer)
        return threads_with_room(work, self.threads) * each

    def _scanned(self, rows: int) -> int:
        """Return the numbers that a scan of a span holds at most. On a CPU the products are there
        twice while it is seen whether they can be trusted."""
        assert self.chunk is not None
        n, chunks = self.form.states * self.size, rows // self.chunk
        numbers = rows * self.size + (2 - self.on_gpu) * chunks * n * (n + 4)
        copies = self.form.gates * panels_of(self.size) * self.size
        return numbers + copies + self.threads * room_for_products(self.size, self.form.states)

    def _pass(self, pass_rows: int) -> int:
        """Return the numbers that a forward pass allocates."""
        gates = self.form.gates * self.size
        if self.forward_by == "torch":
            assert self.vendor is not None
            steps = -(-pass_rows // self.batch)
            return -(-int(self.vendor(steps)) // self.item) if steps else 0
        if self.forward_by == "launches":
            return pass_rows * gates + gates
        shape = self.form, self.batch, self.size, self._parts_onward
        numbers = Forward.numbers(*shape, in_panels=self.forward_by == "loops")
        numbers += self._room(pass_rows, self.width)
        if not self.form.gates == self.form.states == 1:
            numbers += pass_rows * gates
        return numbers

    def _fixed(self, rows: int) -> int:
        """Return the numbers that a backward pass holds throughout."""
        in_place = self.backward_by == "in place"
        if self.loops:
            shape = self.form, self.batch, self.width, self.size, max(1, rows // self.batch)
            return Backward.numbers(*shape, self.threads, self.at_once, in_place)
        if self.on_gpu:  # every layer keeps its biases, their sums, and ones
            apart = 2 * self.form.gates * self.size + rows
            return self.batch * int(whole_vectors(self.size)) + 16 + apart
        if in_place:
            # A wide sweep's table, and its graph's random state.
            return self.batch * int(whole_vectors(self.size)) + 16
        return numbers_of_sweep(self.form.gates, self.batch, self.size, self.threads)


def stacked(layer: Layer, count: int, vendor: Sequence[Curve | None] = ()) -> tuple[Layer, ...]:
    """Return ``count`` layers above one another in one recurrence, given the lowest of them."""
    upper = replace(layer, width=layer.size, needs_x=True, straight=True, lowest=False)
    return tuple(
        replace(upper if k else layer, top=k == count - 1, vendor=curve)
        for k, curve in zip(range(count), vendor or [None] * count, strict=True)
    )
