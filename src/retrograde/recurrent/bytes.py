"""The bytes of held layers, counted allocation by allocation without running anything.

Everything that :class:`~retrograde.recurrent.core.HeldLayers` allocates is proportional to
the units, the inputs or the weights. So its peak has a closed form. It depends on the shape, the
length of a span, and the number of steps whose gates are kept.
``tests/recurrent/test_held.py`` compares it with the measured peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

from retrograde.kernels.cells import GATES, Kind
from retrograde.kernels.cpu import backward_loops
from retrograde.kernels.cpu.llvm.barrier import MANY_SAMPLES, parts_of_units
from retrograde.kernels.cpu.llvm.lanes import LANES
from retrograde.kernels.cpu.llvm.tiles import PANEL
from retrograde.kernels.cpu.products import room_of_outer, room_of_product, threads_with_room
from retrograde.plan.fit import Curve

#: What runs the layers. ``"loops"`` is one loop for a whole backward pass. ``"sweeps"`` is loops
#: for the recurrence, and matrix products for the rest. ``"in place"`` is the same, but reads the
#: weights without a copy of them. ``"torch"``, on a GPU, is the vendor's forward pass, torch's
#: operations and compiled sweeps.
Backend = Literal["loops", "sweeps", "in place", "torch"]

#: The bytes of the inputs' contribution to the gates that are held at a time.
FORWARD_BYTES = 2**21

#: The most numbers in hidden weights for which our own loops are faster than BLAS.
LARGE = 2**18

#: The outputs' gradient may have to be laid into contiguous memory: so many rows, or a quarter of a
#: span, at a time. What runs in place copies a quarter, or a step.
LAID_ROWS, LAID_SHARE = 128, 4

# The most rows whose gradients may be added to a total in place, one sum of 64 rows after the
# other.
_FEW_ROWS = 2**14


def sums_at_once(length: int, batch: int) -> bool:
    """Return whether T × B is so small that summing weights' gradients in place rounds little."""
    return length * batch <= _FEW_ROWS


def _whole(width: int, unit: int = LANES) -> int:
    return -(-width // unit) * unit


def _panels(count: int, width: int, samples: int) -> int:
    """Return the numbers of a matrix copied into panels; none if few samples read it uncopied."""
    as_it_is = samples <= 4 and count * width <= 2**15 and width % LANES == 0
    return 0 if as_it_is else count * _whole(width, PANEL)


@dataclass(frozen=True)
class Layer:
    """A layer in one or two tracks (directions), and a batch of B samples.

    ``width`` is I and ``size`` is H. ``item`` is the bytes of a number. ``straight`` says whether
    inputs are contiguous, ``packed`` whether later steps may have fewer samples. ``views`` says
    whether the states before a span, unless it is the first, are a view of outputs. ``lowest`` and
    ``top`` say where it is in its recurrence. ``drops`` says whether there is dropout between the
    layers of that, and ``first`` whether the inputs of the lowest are dropped too. ``at_once`` is
    as for ``LayerBackward``. ``forward_by`` and ``backward_by`` are what runs the layer.
    ``vendor`` has the bytes of the vendor's forward pass by steps, which are measured.
    """

    kind: Kind
    batch: int
    width: int
    size: int
    tracks: int = 1
    item: int = 4
    threads: int = 1
    needs_x: bool = True
    straight: bool = True
    packed: bool = False
    views: bool = False
    drops: bool = False
    first: bool = False
    at_once: bool = False
    lowest: bool = True
    top: bool = True
    forward_by: Backend = "loops"
    backward_by: Backend = "loops"
    vendor: Curve | None = None

    @property
    def state(self) -> int:
        """The bytes of a state, in all tracks."""
        return self._units((1 + self._lstm) * self.batch)

    def mark(self, spans: int) -> int:
        """Return the bytes of the marks of ``spans`` spans of the whole batch."""
        return self._units(self._lstm * spans * self.batch)

    def gates(self, rows: int) -> int:
        """Return the bytes of kept gates and cells; the vendor's forward pass cannot keep them."""
        return self._units(5 * rows) if self._lstm and self.forward_by != "torch" else 0

    def along(self, rows: int) -> int:
        """Return the bytes of following existing outputs, besides kept gates: states and inputs."""
        numbers = rows * (self.size + self.width * (self._copies_x + self.drops))
        numbers += self._room(rows, self.width, self.size)
        return (numbers + 4 * (self.batch + 1) * self.size) * self.item

    def below(self, rows: int) -> int:
        """Return the bytes of outputs that the caller does not hold."""
        return 0 if self.top else rows * self.size * self.item

    def forward(self, rows: int, pass_rows: int) -> int:
        """Return the peak of the working bytes of a forward pass.

        A span has ``rows`` rows, and ``pass_rows`` is the rows that the gates' buffer holds.
        """
        numbers = self._pass(pass_rows)
        numbers += rows * self.width * (self._copies_x + (self.tracks > 1 or self.drops))
        if self.tracks > 1:
            numbers += 2 * rows * self.size
        if self.forward_by == "torch":
            numbers += rows * self.size  # outputs that the caller already holds
        return numbers * self.item

    def advance(self, pass_rows: int) -> int:
        """Return the working bytes of running any number of steps without recording."""
        rows = max(pass_rows, self.batch)
        return (self._pass(pass_rows) + rows * (2 * self.width + self.size)) * self.item

    def span(self, rows: int, *, kept: bool, tight: bool = False, first: bool = True) -> int:
        """Return the peak bytes of a span; if ``tight``, it is of unequal ones, maybe the first."""
        size, width, lstm, gates = self.size, self.width, self._lstm, GATES[self.kind] * self.size
        dropped = self.tracks > 1 or self.drops
        before = rows if first or not (tight and self.views) else 0
        numbers = before * size + 2 * self.batch * 2 * size  # before steps; entering states
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
            slopes = 2 if self.kind.startswith("RNN") else 9  # for each unit and row
            numbers += slopes * rows * size + 2 * gates + rows + steps
        elif self.loops:
            again = lstm and not kept
            numbers += 5 * rows * size + self._room(rows, width, size) if again else 0
        elif lstm:
            numbers += rows * size * (2 if kept else 6) + 2 * gates
        else:
            numbers += (8 if self.kind == "GRU" else 2) * rows * size + 2 * gates
        if not (self.loops or self.backward_by == "torch"):
            outer = room_of_outer(rows, gates, max(width, size))
            numbers += self._room(rows, width, size, gates, outer=outer)
            if not self.at_once:
                numbers += gates * max(width, size)  # a product, before it is added
        return numbers * self.item

    def pass_rows(self, block: int) -> int:
        """Return the rows that a forward pass processes at a time, in spans of ``block`` rows."""
        if self.forward_by == "torch":
            return block
        wide = GATES[self.kind] * self.size * self.item
        return max(self.batch, min(FORWARD_BYTES // wide, block))

    def fixed(self, rows: int) -> int:
        """Return the bytes that a whole backward pass holds, besides the gradients."""
        return self._fixed(rows) * self.item + self.state * 3

    @property
    def loops(self) -> bool:
        """Whether one loop does the whole backward pass."""
        small = GATES[self.kind] * self.size * self.size <= LARGE
        return self.backward_by == "loops" and self.batch > 1 and small and self._parts == 1

    @property
    def _parts(self) -> int:
        """The parts of the units that threads share if there are few samples."""
        return parts_of_units(self.batch, self.size, GATES[self.kind], self.threads)

    @cached_property
    def _parts_onward(self) -> int:
        """The same of a forward pass, to which a step of a packed batch may bring fewer samples."""
        most = min(self.batch, max(MANY_SAMPLES))
        counts = range(1, most + 1) if self.packed else [self.batch]
        return max(parts_of_units(n, self.size, GATES[self.kind], self.threads) for n in counts)

    def _each(self, parts: int) -> int:
        """Return the most units of a part."""
        return min(self.size, _whole(-(-self.size // parts)))

    @property
    def _lstm(self) -> bool:
        return self.kind == "LSTM"

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
        work = rows * GATES[self.kind] * self.size * max(self.width, self.size)
        each = max(room_of_product(rows, max(terms), PANEL + 1, turned=True), outer)
        return threads_with_room(work, self.threads) * each

    def _pass(self, rows: int) -> int:
        """Return the numbers that a forward pass allocates."""
        gates = GATES[self.kind] * self.size
        if self.forward_by == "torch":
            assert self.vendor is not None
            steps = -(-rows // self.batch)
            return -(-int(self.vendor(steps)) // self.item) if steps else 0
        parts = self._parts_onward
        own = GATES[self.kind] * self._each(parts)
        numbers = parts * self.batch * _whole(own) + gates + self._room(rows, self.width)
        if self.forward_by == "loops":
            numbers += parts * _whole(own, PANEL) * self.size
            numbers += own * self.size if parts > 1 else 0  # a part is copied twice
        if not self.kind.startswith("RNN"):
            numbers += rows * gates
        return numbers

    def _fixed(self, rows: int) -> int:
        """Return the numbers that a backward pass holds throughout."""
        size, width, gates = self.size, self.width, GATES[self.kind] * self.size
        if self.backward_by in (
            "in place",
            "torch",
        ):  # a wide sweep's table, its graph's random state
            return self.batch * _whole(size) + 16
        if not self.loops:
            numbers = self._parts * gates * _whole(self._each(self._parts), PANEL)
            return numbers + self.threads * self.batch * _whole(size)
        steps = max(1, rows // self.batch)
        parts = min(self.threads, max(1, self.batch // 2))
        each = ceil(self.batch / parts) + (parts > 1)
        gru = self.kind == "GRU"
        hidden = 3 * size if gru else gates
        numbers = _panels(gates, width, each) + _panels(hidden, size, each)
        if gru:
            numbers += (width + size) * _whole(3 * size, PANEL) + 6 * size + hidden * size
        row = (1 if self.kind.startswith("RNN") else 4) * size
        sums = gates * _whole(width) + hidden * _whole(size) + row
        numbers += parts * sums
        if self.at_once:  # one thread sums directly into the gradients
            numbers -= gates * width * (width % LANES == 0)
            numbers -= hidden * size * (size % LANES == 0 and not gru)
        room = max(
            backward_loops.room_for(self.kind, steps, max(1, samples), width, size)
            for samples in (each, each - 1, each - 2)
        )
        return numbers + parts * room


def stacked(layer: Layer, count: int, vendor: Sequence[Curve | None] = ()) -> tuple[Layer, ...]:
    """Return ``count`` layers above one another in one recurrence, given the lowest of them."""
    upper = replace(layer, width=layer.size, needs_x=True, straight=True, lowest=False)
    return tuple(
        replace(upper if k else layer, top=k == count - 1, vendor=own)
        for k, own in zip(range(count), vendor or [None] * count, strict=True)
    )
