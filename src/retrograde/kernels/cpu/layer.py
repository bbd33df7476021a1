"""A recurrent layer on a CPU: its forward and backward passes, by compiled loops.

A step of a sample is a few elementwise products, and one product of a short vector with the hidden
weights. The call of each takes torch microseconds. Here a step is a compiled loop, and each thread
takes its samples through all steps. The inputs' part of the gates is one matrix product for a
whole block of steps. The dtype is float32 or float64.

The references are torch's own kernel for :class:`Forward`, and for :class:`Backward` the functions
of :mod:`retrograde.kernels.sweep` and :mod:`retrograde.kernels.cells`. The loops are in
``forward_loops`` and ``backward_loops``, and what torch's cells compute in ``cells``. A formula is
a cell as those are. Vectors are in ``lanes``, and matrix products in ``tiles``.
"""

from functools import partial, reduce
from itertools import pairwise
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from retrograde.kernels.cells import Block, Formula, Kept, Resets, Weights
from retrograde.kernels.cpu.backward_loops import BackwardArrays, room_for
from retrograde.kernels.cpu.forward_loops import ForwardArrays
from retrograde.kernels.cpu.llvm.barrier import bounds_of_units, parts_of_units, share_or_meet
from retrograde.kernels.cpu.llvm.lanes import LANES, Reals
from retrograde.kernels.cpu.llvm.panels import panels, panels_of, whole_vectors
from retrograde.kernels.cpu.llvm.threads import numbered, parts_for, share
from retrograde.kernels.cpu.loops import loops_of
from retrograde.kernels.cpu.products import linear
from retrograde.kernels.cpu.sweep import ELEMENT_WORK, starts_of
from retrograde.kernels.launched import biases_of

State = tuple[Tensor, ...]


def _own(weights: Weights) -> Reals:
    """Return the numbers of each unit (V, H)."""
    units = weights.hidden[:0] if weights.units is None else weights.units
    return units.detach().contiguous().numpy()


class Forward:
    """A layer's forward pass for B samples, one range of steps at each call. Without ``in_panels``
    there is no copy of the weights, which is slower for small layers."""

    def __init__(self, weights: Weights, samples: int, *, in_panels: bool = True) -> None:
        self.weights, gates = weights, weights.form.gates
        self.loops = loops_of(weights.kind, weights.hidden.dtype)
        self.bias, of_split = biases_of(weights)
        u = weights.hidden.detach()
        part_count = parts_of_units(samples, weights.size, gates)
        self.units, each = bounds_of_units(weights.size, part_count)
        if in_panels:  # the columns of a part are all gates of its units, the first gate first
            by_gate = u.unflatten(0, (-1, u.shape[1]))
            ends = pairwise(self.units.tolist())
            hidden = panels(*(by_gate[:, a:b].permute(2, 0, 1) for a, b in ends))
        else:
            hidden = u.contiguous()[None, :, None]
        bias = u.new_empty(0) if of_split is None else of_split.detach().contiguous()
        self.fixed = bias.numpy(), _own(weights), hidden.numpy()
        self.absent = [u.new_empty((0,) * dimensions).numpy() for dimensions in (2, 3)]
        self.sums = u.new_empty(part_count, samples, int(whole_vectors(gates * each)))
        self.work = samples * len(u) * (weights.size + ELEMENT_WORK // 4)

    @staticmethod
    def numbers(form: Formula, samples: int, size: int, part_count: int, *, in_panels: bool) -> int:
        """Return how many numbers an instance allocates; a part of several is copied twice."""
        whole, largest = form.gates * size, form.gates * bounds_of_units(size, part_count)[1]
        total = part_count * samples * int(whole_vectors(largest)) + whole
        copies = part_count * panels_of(largest) + (largest if part_count > 1 else 0)
        return total + (copies * size if in_panels else 0)

    def room(self, steps: int) -> Tensor:
        """Return an uninitialized tensor for the gates of ``steps`` steps (L, B, K·H)."""
        return self.sums.new_empty(steps, self.sums.shape[1], len(self.weights.inputs))

    def __call__(
        self, x: Tensor, state: State, outputs: Tensor, gates: Tensor, cells: Tensor | None = None,
        resets: Resets | None = None,
    ) -> None:  # fmt: skip
        """Run the layer on inputs x (L, B, I). ``outputs`` (L, B, H) receives h after each step.

        ``state`` is (h,) or (h, c), contiguous. It is overwritten by the state after. h is (B, H),
        as an LSTM's c is. A formula's c (B, N H) has all other parts of the state. ``gates`` is
        scratch memory (L, B, K·H), which receives what is kept of gates. Of a cell with one gate
        and one state it may be the outputs. ``cells`` receives what is kept beside them, if any is.
        """
        linear(x.flatten(0, 1), self.weights.inputs, self.bias, gates.flatten(0, 1))
        h, *c = (t.numpy() for t in state)
        no_c, aside = self.absent
        aside = aside if cells is None else cells.numpy()
        arrays: list[Any] = [gates.numpy(), outputs.numpy(), aside, *self.fixed, h, *(c or [no_c])]
        arrays += [*starts_of(resets, self.sums)[:2], self.sums.numpy(), cells is not None]
        arguments = ForwardArrays(*arrays), self.units
        sample_ranges = parts_for(len(state[0]), len(x) * self.work)
        many = 0 if resets is not None else len(self.units) - 1
        share_or_meet(self.loops.run, sample_ranges, many, *arguments)


class Backward:
    """A layer's backward pass, one block of steps at a time, from the last block to the first.

    Each thread sums the gradients of the weights in its own arrays. :meth:`finish` adds these to
    the totals, since adding each small number to a large total would round more.

    ``totals`` are the gradients of the weights, by name. ``steps`` is the most steps of a block of
    B ``samples``. With ``at_once``, the first thread adds directly to the totals, every few dozen
    steps, which takes less memory and rounds more. ``in_place`` copies no weights, and adds all
    sums directly, on one thread. Then gates must be kept.
    """

    def __init__(
        self, weights: Weights, totals: dict[str, Tensor], samples: int, steps: int, *,
        at_once: bool = False, in_place: bool = False,
    ) -> None:  # fmt: skip
        size, width = weights.size, weights.inputs.shape[1]
        self.weights, self.totals = weights, totals
        form = weights.form
        self.loops = loops_of(weights.kind, weights.hidden.dtype)
        again, hidden = form.again and not in_place, weights.hidden
        self.constants = *_constants(weights, again), _own(weights)
        work = steps * samples * hidden.shape[0] * (2 * size + width)
        self.parts = [(0, samples)] if in_place else parts_for(samples, work)
        self.numbered = numbered(self.parts)
        each = max(stop - start for start, stop in self.parts)
        matrices = weights.inputs, hidden
        self.read = [
            (w.detach().contiguous()[None] if in_place else _readable(w, each)).numpy()
            for w in matrices
        ]
        straight = totals["inputs"].is_contiguous() and totals["hidden"].is_contiguous()
        self.direct = ("inputs", "hidden") if straight and (in_place or at_once) else ()
        self.sums = {
            name: hidden.new_zeros(len(self.parts) - (name in self.direct), *shape)
            for name, shape in _shapes_of_sums(form, width, size).items()
        }
        # A thread with fewer samples may have more rows.
        rooms = (room_for(form, steps, b - a, width, size, again=again) for a, b in self.parts)
        room = hidden.new_empty(len(self.parts), max(rooms))
        arrays = {name: sums.numpy() for name, sums in self.sums.items()}
        twice = [
            (totals[name][None].numpy() if name in self.direct else arrays[name][:0], arrays[name])
            for name in ("inputs", "hidden")
        ]
        self.own = *twice, arrays["biases"], arrays["units"], room.numpy()
        self.absent: Reals = hidden.new_empty(0, 1, 1).numpy()

    @staticmethod
    def pays(form: Formula, samples: int, size: int, threads: int = 0) -> bool:
        """Return whether this is the fastest: if weights are few and threads share the samples. A
        formula has no other."""
        if form.step is not None:
            return True
        few = form.gates * size**2 <= _LARGE
        return few and samples > 1 and parts_of_units(samples, size, form.gates, threads) == 1

    @staticmethod
    def numbers(
        form: Formula, samples: int, width: int, size: int, steps: int, threads: int, at_once: bool,
        in_place: bool = False,
    ) -> int:  # fmt: skip
        """Return how many numbers an instance holds at most, on so many threads."""
        if in_place:
            room = room_for(form, steps, samples, width, size, again=False)
            return room + (form.row + form.units) * size
        height, part_count = form.gates * size, min(threads, max(1, samples // 2))
        each = ceil(samples / part_count) + (part_count > 1)
        total = sum(height * panels_of(n) for n in (width, size) if not _is_plain(each, height, n))
        if form.again:
            total += (width + size) * panels_of(height) + 2 * height
        sums = {name: prod(shape) for name, shape in _shapes_of_sums(form, width, size).items()}
        total += part_count * sum(sums.values())
        if at_once:  # one thread sums directly into the gradients
            total -= sums["inputs"] + sums["hidden"]
        each_room = partial(room_for, form, steps, inputs=width, size=size, again=form.again)
        rooms = (each_room(samples=max(1, each - fewer)) for fewer in range(3))
        return total + part_count * max(rooms)

    def add(self, block: Block, dy: Tensor | None, g: Tensor, dx: Tensor | None) -> Tensor:
        """Backpropagate a block, and return the gradient of the state before it.

        ``dy`` (L, B, H) is the loss's gradient of each output, None for zero. g (B, n) is that of
        the state after the block. ``dx`` (L, B, I) receives those of the inputs; None if they are
        not needed. A block with c among its states must have kept gates and cells.
        """
        kept = block.kept
        assert kept is not None or not self.weights.form.others
        g = g.clone(memory_format=torch.contiguous_format)

        def array(t: Tensor | None) -> Reals:
            return self.absent if t is None else t.contiguous().numpy()

        gates, cells = (None, None) if kept is None else (kept.gates, kept.cells)
        states = gates, cells, block.after, block.x, block.before
        starts, _, to_entry = starts_of(block.resets, g)
        arrays: list[Any] = [*self.constants, *map(array, states), *self.read]
        arrays += [array(dy), g.numpy(), starts, to_entry, array(dx), *self.own]
        share(self.loops.backward, self.numbered, BackwardArrays(*arrays))
        return g

    def finish(self) -> None:
        """Add the sums of all threads to the totals, and set the sums to zero."""
        form, size, totals = self.weights.form, self.weights.size, self.totals
        whole, every = form.whole * size, form.gates * size
        for name in ("inputs", "hidden"):
            total = self._sum(name)
            if not self.direct:
                totals[name] += total[:, : totals[name].shape[1]]
        if "bias_inputs" in totals:
            biases = self._sum("biases")
            totals["bias_hidden"] += biases[:every]
            totals["bias_inputs"][:whole] += biases[:whole]
            if form.split:
                totals["bias_inputs"][whole:] += biases[every:]
        if "units" in totals:
            totals["units"] += self._sum("units")
        for sums in self.sums.values():
            sums.zero_()

    def _sum(self, name: str) -> Tensor:
        """Return the sum of all threads. It is in the array of the first, or in the total."""
        sums = list(self.sums[name])
        if name in self.direct:
            whole = self.totals[name]
            sums = [whole, *(of_thread[:, : whole.shape[1]] for of_thread in sums)]
        total: Tensor = reduce(Tensor.add_, sums)
        return total


def _shapes_of_sums(form: Formula, width: int, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a thread's sums of the weights' gradients, by name."""
    height, wide = form.gates * size, [int(whole_vectors(n)) for n in (width, size)]
    sums = {"inputs": (height, wide[0]), "hidden": (height, wide[1])}
    return {**sums, "biases": (form.row * size,), "units": (form.units, size)}


def _constants(weights: Weights, again: bool) -> list[Reals]:
    """Return what computes gates again."""
    hidden = weights.hidden.detach()
    if not again:
        absent = hidden[:0].numpy()
        return [absent[None], absent[None], absent]
    zero = hidden.new_zeros(hidden.shape[0])
    both = [weights.bias_inputs, weights.bias_hidden]
    biases = torch.stack([zero if bias is None else bias.detach() for bias in both])
    return [t.numpy() for t in (panels(weights.inputs.t())[0], panels(hidden.t())[0], biases)]


# The rows of a tile of a product, and the most numbers of a matrix that is read without panels.
# Such a matrix stays in the caches although its rows are not in panels.
_TILE_ROWS = 4
_COMPACT = 2**15
# The most numbers in hidden weights for which one loop is faster than BLAS.
_LARGE = 2**18


def _readable(w: Tensor, samples: int) -> Tensor:
    """Return a matrix (R, N) for products with ``samples`` rows. It is in panels, unless copying
    does not pay: it is then returned as (1, R, N). That is so if it is small, its rows are whole
    vectors, and each of its numbers is read only once."""
    is_plain = _is_plain(samples, *w.shape) and w.is_contiguous()
    return w.detach().unsqueeze(0) if is_plain else panels(w)[0]


def _is_plain(samples: int, count: int, width: int) -> bool:
    return samples <= _TILE_ROWS and count * width <= _COMPACT and width % LANES == 0


def recall(
    weights: Weights, x: Tensor, before: Tensor, c: Tensor | None, resets: Resets | None = None
) -> Kept:
    """Recompute what a forward pass keeps, such as an LSTM's gates and c, from the kept h. This
    takes matrix products, and a recurrence of c but none of h. ``x`` is (L, B, I), ``before`` is h
    before each step (L, B, H). ``c`` (B, N H), the other parts of the state before the first step,
    is overwritten by those after the last. It is None if there are none."""
    c = before.new_empty(0, weights.size) if c is None else c
    form, size = weights.form, weights.size
    gates, cells = (before.new_empty(*before.shape[:2], n * size) for n in (form.gates, form.aside))
    (bias, of_split), flat, h = biases_of(weights), gates.flatten(0, 1), before.flatten(0, 1)
    linear(x.flatten(0, 1), weights.inputs, bias, flat)
    if of_split is None:
        linear(h, weights.hidden, None, flat, add=True)
    else:
        whole = form.whole * size
        flat[:, :whole] += h @ weights.hidden[:whole].t()
        cells[..., form.others * size :] = before @ weights.hidden[whole:].t() + of_split
    arrays = gates.numpy(), cells.numpy(), before.contiguous().numpy(), c.numpy(), _own(weights)
    sample_ranges = parts_for(before.shape[1], before.numel() * ELEMENT_WORK)
    loops = loops_of(weights.kind, weights.hidden.dtype)
    share(loops.recall, sample_ranges, *arrays, *starts_of(resets, c)[:2])
    return Kept(gates, cells)
