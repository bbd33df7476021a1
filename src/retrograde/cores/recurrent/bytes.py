"""The bytes that held layers take, counted allocation by allocation without running anything.

Everything that :class:`~retrograde.cores.recurrent.core.HeldLayers` allocates is a number of times
the units, the inputs or the weights. So its peak is a closed form of the shape, of the length of a
piece and of the steps whose gates are kept. ``tests/cores/recurrent/test_held.py`` compares it with
what is measured.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from retrograde.kernels import cpu_backward
from retrograde.kernels.cells import GATES, Kind
from retrograde.kernels.lanes import LANES
from retrograde.kernels.tiles import PANEL
from retrograde.plan.fit import Curve

__all__ = ["FORWARD_BYTES", "LAID_ROWS", "LARGE", "Means", "Shape", "sums_at_once"]

#: What runs the layers: one loop for a whole backward pass; loops for the recurrence, and matrix
#: products for the rest; a product a step, which needs no copy of the weights; or on a GPU the
#: vendor's forward pass, torch's operations and compiled sweeps.
Means = Literal["loops", "sweeps", "blas", "torch"]

#: What the inputs bring to the gates, that is held at a time.
FORWARD_BYTES = 2**20

#: The most numbers in hidden weights whose products our own loops do faster than BLAS.
LARGE = 2**18

#: Rows of the outputs' gradient that are laid out at a time, where they have to be; a step if lean.
LAID_ROWS = 128

# Rows whose gradients may be added to a total without an order: sums of 64 each, one by one.
_FEW_ROWS = 2**14


def sums_at_once(length: int, batch: int) -> bool:
    """Whether T × B is so small that summing weights' gradients in place rounds little."""
    return length * batch <= _FEW_ROWS


def _whole(width: int, unit: int = LANES) -> int:
    return -(-width // unit) * unit


def _panels(count: int, width: int, samples: int) -> int:
    """Numbers of a matrix in panels; none where few samples read it as it is."""
    as_it_is = samples <= 4 and count * width <= 2**15 and width % LANES == 0
    return 0 if as_it_is else count * _whole(width, PANEL)


@dataclass(frozen=True)
class Shape:
    """The layers of one or two tracks (directions), and a batch of B; I is ``width``, H is
    ``size``. ``straight`` tells whether inputs are contiguous, ``first`` whether they are dropped
    too. ``item`` is the bytes of a number; ``at_once`` is as for ``LayerBackward``; ``onward`` and
    ``back`` are as for :class:`~retrograde.cores.recurrent.plan.HeldPlan`. ``vendor`` has, for each
    layer, the bytes of the vendor's forward pass by steps, which are not ours to count."""

    kind: Kind
    batch: int
    width: int
    size: int
    count: int = 1
    tracks: int = 1
    item: int = 4
    threads: int = 1
    needs_x: bool = True
    straight: bool = True
    drops: bool = False
    first: bool = False
    at_once: bool = False
    onward: Means = "loops"
    back: tuple[Means, ...] = ()
    vendor: tuple[Curve, ...] = ()

    @property
    def widths(self) -> list[int]:
        """The inputs of each layer, from the lowest up."""
        return [self._width(k) for k in range(self.count)]

    @property
    def state(self) -> int:
        """Bytes of a state of all layers and tracks."""
        return self._units((1 + self._lstm) * self.batch)

    def mark(self, pieces: int) -> int:
        """Bytes of the marks of so many pieces of the whole batch."""
        return self._units(self._lstm * pieces * self.batch)

    def gates(self, rows: int) -> int:
        """Bytes of kept gates and cells."""
        return self._units(self._keeps * 5 * rows)

    def top_gates(self, rows: int) -> int:
        """The same of the top layer alone, in one direction."""
        return self._keeps * 5 * rows * self.size * self.item

    def along(self, rows: int) -> int:
        """What following outputs that are there takes, besides kept gates: states and inputs."""
        top = self.count - 1
        numbers = rows * (self.size + self._width(top) * (self._copies_x(top) + self.drops))
        return (numbers + 4 * (self.batch + 1) * self.size) * self.item

    @property
    def _lstm(self) -> bool:
        return self.kind == "LSTM"

    @property
    def _keeps(self) -> bool:
        """Whether a forward pass can leave its gates; the vendor's tells none."""
        return self._lstm and self.onward != "torch"

    def _units(self, numbers: int) -> int:
        """Bytes of some numbers for each unit of all layers and tracks."""
        return numbers * self.count * self.tracks * self.size * self.item

    def below(self, rows: int) -> int:
        """Bytes of the outputs of all layers but the top one."""
        return (self.count - 1) * rows * self.size * self.item

    def forward(self, rows: int, pass_rows: int) -> int:
        """The most that a layer's forward pass takes besides, for pieces of some rows, with room
        for the gates of some."""
        most = 0
        for k in range(self.count):
            width = self._width(k)
            numbers = self._pass(k, pass_rows)
            numbers += rows * width * (self._copies_x(k) + (self.tracks > 1 or self.drops))
            if self.tracks > 1:
                numbers += 2 * rows * self.size
            if self.onward == "torch":
                numbers += rows * self.size  # outputs that the caller has already
            most = max(most, numbers * self.item)
        return most

    def advance(self, pass_rows: int) -> int:
        """What running any number of steps takes that keeps nothing."""
        numbers = 0
        rows = max(pass_rows, self.batch)
        for k in range(self.count):
            numbers += self._pass(k, pass_rows) + rows * (2 * self._width(k) + self.size)
        return numbers * self.item

    def fixed(self, rows: int) -> int:
        """What the backward pass holds from its beginning to its end, besides the gradients."""
        numbers = sum(self._fixed(k, rows) for k in range(self.count))
        return numbers * self.item + self.state * 3

    def piece(self, rows: int, *, kept: bool) -> int:
        """The most that going back through a piece of some rows takes."""
        most = 0
        size, lstm = self.size, self._lstm
        for k in range(self.count):
            width, gates = self._width(k), GATES[self.kind] * size
            top = k == self.count - 1
            numbers = rows * size + 2 * self.batch * 2 * size  # before, and what enters
            if self.tracks > 1 and top:
                numbers += 2 * rows * size  # its states and their gradients, turned round
            if top:
                laid = {"blas": 0, "torch": rows}.get(self._means(k), min(rows, LAID_ROWS))
                numbers += max(laid, self.batch) * size
            if not top:
                numbers += rows * size  # what the layer above handed on
            if self._copies_x(k):
                numbers += rows * width * (2 if self.tracks > 1 or self.drops else 1)
            if k or (self.needs_x and (self.tracks > 1 or not self.straight or self.first)):
                numbers += rows * width * (3 if self.tracks > 1 or self.drops else 1)
            if self._means(k) == "torch":
                numbers += self._slopes * rows * size + 2 * gates + 12 * self.batch * size
            elif self.loops(k):
                numbers += 0 if kept or not lstm else 5 * rows * size
            elif lstm:
                numbers += rows * size * (2 if kept else 6) + 2 * gates
            elif self.kind == "GRU":
                numbers += 8 * rows * size + 2 * gates
            else:
                numbers += 2 * rows * size + 2 * gates
            if not (self.loops(k) or self.at_once or self._means(k) == "torch"):
                numbers += gates * max(width, size)  # a product, before it is added
            most = max(most, numbers * self.item)
        return most

    def pass_rows(self, block: int) -> int:
        """Rows that a forward pass works on at a time, in pieces of some rows."""
        if self.onward == "torch":
            return block
        wide = GATES[self.kind] * self.size * self.item
        return max(self.batch, min(FORWARD_BYTES // wide, block))

    def loops(self, k: int) -> bool:
        """Whether one loop does the backward pass of a layer."""
        return (
            self._means(k) == "loops"
            and self.batch > 1
            and GATES[self.kind] * self.size * self.size <= LARGE
        )

    def _means(self, k: int) -> Means:
        return self.back[k] if self.back else "loops"

    @property
    def _slopes(self) -> int:
        """Numbers for each unit and row while torch's operations make slopes."""
        return {"LSTM": 9, "GRU": 9}.get(self.kind, 2)

    def _width(self, k: int) -> int:
        return self.size if k else self.width

    def _copies_x(self, k: int) -> bool:
        dropped = self.first if k == 0 else self.drops
        return dropped or (k == 0 and (self.tracks > 1 or not self.straight))

    def _pass(self, k: int, rows: int) -> int:
        """Numbers of a layer's forward pass."""
        gates = GATES[self.kind] * self.size
        if self.onward == "torch":
            steps = -(-rows // self.batch)
            return -(-int(self.vendor[k](steps)) // self.item) if steps else 0
        if self.onward == "blas":
            return (rows * (gates > self.size) + self.batch) * gates + gates
        numbers = _whole(gates, PANEL) * self.size + self.batch * _whole(gates) + gates
        if not self.kind.startswith("RNN"):
            numbers += rows * gates
        return numbers

    def _fixed(self, k: int, rows: int) -> int:
        """Numbers that a layer's backward pass holds throughout."""
        size, width, gates = self.size, self._width(k), GATES[self.kind] * self.size
        if self._means(k) in ("blas", "torch"):
            return self.batch * size
        if not self.loops(k):
            return gates * _whole(size, PANEL) + self.threads * self.batch * _whole(size)
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
        if self.at_once:  # one thread sums where the gradients are
            numbers -= gates * width * (width % LANES == 0)
            numbers -= hidden * size * (size % LANES == 0 and not gru)
        room = max(
            cpu_backward.room_for(self.kind, steps, max(1, samples), width, size)
            for samples in (each, each - 1, each - 2)
        )
        return numbers + parts * room
