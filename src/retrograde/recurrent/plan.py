"""The fastest way to run held layers: the length of a span, and the steps that keep their gates.

If the caller holds the outputs and the sequences between layers fit, every step runs forward at
most twice. The second run computes all steps of a span by one matrix product. So the plan is a
closed form. Spans are as long as the cache and the budget allow. The rest of the budget keeps
gates, each of which saves a recomputation. If the sequences between layers, or an LSTM's marks, do
not fit, ranges of steps are planned as for any other core. No clock is read, so a budget gives one
plan.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import cycle
from math import ceil, inf

from retrograde.plan.fit import Fit, fit, refusal, whole_fit
from retrograde.plan.footprint import Curve, Footprint
from retrograde.plan.steps.closed_form import hsm_cost
from retrograde.recurrent.bytes import Backend, Layer
from retrograde.recurrent.spans import Sequences, chunk_of
from retrograde.recurrent.vendor import is_faster
from retrograde.sizes import nominal
from retrograde.sizes.footprint import HEAP_BYTES
from retrograde.units import Memory, as_bytes, asks_for_all

_THREAD_ROWS = 128  # the most rows that a thread of a backward pass buffers


@dataclass(frozen=True)
class HeldPlan:
    """How held layers run: in spans of ``block`` rows, with gates kept for the last steps.

    ``kept`` is the number of those steps in each track. ``forward_by`` runs all layers
    forward. ``backward_by`` names what backpropagates each layer, from the lowest up; if it is
    empty, loops backpropagate all. ``chunk`` is the steps in a chunk of a scan; None for no scan.
    ``steps`` are those of each span; if it is empty, spans are equally long. ``calls`` is the most
    steps of one call of the vendor's forward pass; 0 for a whole span.
    """

    block: int
    kept: int = 0
    forward_by: Backend = "loops"
    backward_by: tuple[Backend, ...] = ()
    chunk: int | None = None
    steps: tuple[int, ...] = ()
    calls: int = 0


def ordinary_fit(length: int, **told: int) -> Fit:
    """Return the fit of torch's own module."""
    passes = {"forward_steps": length, "calls": 2, "time": 3.0 * length}
    return replace(whole_fit(length, length, **passes, **told), ordinary=True)


@dataclass(frozen=True)
class Planner:
    """Plans for held layers, for any lengths."""

    # In one direction they are one recurrence; in two, each is a recurrence of its own.
    layers: tuple[Layer, ...]
    most: int  # the rows of a span that the cache allows
    extra: int = 0  # the reserve: bytes that can appear on top of any other peak
    copied: int = 0  # bytes of weights in the vendor's layout, and of sums for frozen weights
    gradient_copy: int = 0  # bytes per step that torch's own pass takes in addition
    torchs: bool = True  # whether torch's own module can run this
    masks: int = 0  # bytes that dropout adds to torch's kernels, which then run only if need be
    scans: bool = False  # whether spans are scanned

    def least_bytes(self, lengths: Sequences) -> int:
        """Return the smallest budget for held layers."""
        plan, *others = self._spanned(self._means[-1], lengths)[::-1]
        least = self.peak(lengths, plan)
        for other in others:
            peak = self.peak(lengths, other)
            if peak > 1.1 * least:
                break  # fewer marks, but more for a span than they take
            least = min(least, peak)
        if not self._both:
            least = min(least, self._footprint(plan, lengths, 1).minimum_bytes())
        return least

    def fit(
        self, lengths: Sequences, memory: Memory | None, ordinary: int,
        exact: Callable[[], int] | None = None,
    ) -> tuple[HeldPlan | None, Fit]:  # fmt: skip
        """Return the fastest plan within a budget, and the fit of each recurrence.

        The fit's bytes are those of all recurrences together. The budget is ``ordinary`` bytes if
        ``memory`` is None. The plan is None if torch's own module is to run. ``exact`` measures
        that one, if it may be what runs, or what needs least. Raises BudgetError, which states the
        minimum, if the memory is too small.
        """
        budget = ordinary if memory is None else as_bytes(memory, ordinary)
        least, length = self.least_bytes(lengths), lengths.length
        may = self.torchs and (ordinary < least or (budget >= ordinary and self._lags(lengths)))
        vendors = self.layers[0].on_gpu and asks_for_all(memory)
        if exact is not None and may and not vendors:
            ordinary = exact() - self.gradient_copy * length
            budget = ordinary if memory is None else as_bytes(memory, ordinary)
        usual = ordinary + self.gradient_copy * length + self.extra + self.masks
        if self.layers[0].on_gpu:
            # A caller that drops the final state is not handed it. Then torch holds that state,
            # zeros for its gradient, and the gradient of the initial state.
            usual += 3 * sum(layer.state for layer in self.layers)
        minimum = min(least, usual) if self.torchs else least
        if asks_for_all(memory):
            budget = max(budget, usual if self.torchs else least)
        if budget < minimum:
            raise refusal(length, memory, budget, minimum, ordinary)
        told = {"budget_bytes": budget, "ordinary_bytes": ordinary, "minimum_bytes": minimum}
        if self.torchs and budget >= usual and (budget < least or self._lags(lengths)):
            return None, ordinary_fit(length, peak_bytes=usual, **told)
        return self._fastest(lengths, budget, told)

    def _spanned(self, means: HeldPlan, lengths: Sequences) -> list[HeldPlan]:
        """Return plans of some means by the lengths of a span to try, the longest first. The last
        is one step, or a call of the vendor."""
        batch, least = self.layers[0].batch, max(1, min(means.calls, lengths.length))
        steps, counts = max(least, min(self.most // batch, lengths.length)), {least}
        while steps > least:
            counts.add(steps)
            steps = steps * 2 // 3
        pairs = [(n, chunk_of(n) if self.scans else 1) for n in sorted(counts, reverse=True)]
        plans = [replace(means, block=n // c * c * batch, chunk=c) for n, c in pairs]
        return plans if self.scans else [replace(plan, chunk=None) for plan in plans]

    def _run_by(self, plan: HeldPlan) -> list[list[Layer]]:
        """Return the layers of every recurrence, run as a plan says."""
        backends: cycle[Backend] = cycle(plan.backward_by or ("loops",))
        pairs = zip(self.layers, backends, strict=False)
        of_plan = {name: getattr(plan, name) for name in ("forward_by", "calls", "chunk")}
        onward = partial(replace, **of_plan)
        layers = [onward(layer, backward_by=by) for layer, by in pairs]
        return [[layer] for layer in layers] if self._both else [layers]

    @property
    def _both(self) -> bool:
        """Whether the layers have two directions; then no range can be a part of the steps."""
        return self.layers[0].tracks > 1

    def _lags(self, lengths: Sequences) -> bool:
        """Return whether torch's own pass is faster, if there is memory for it."""
        return not self.masks and is_faster(self.layers, lengths)

    def _fastest(
        self, lengths: Sequences, budget: int, told: dict[str, int]
    ) -> tuple[HeldPlan, Fit]:
        """Return the plan of least nominal time. Ranges of a part of the steps are planned only if
        no plan with one range of all steps fits."""
        layer, best, least = self.layers[0], None, inf
        if layer.loops:  # no spans needed for the cache
            whole = self._keeping(lengths, HeldPlan(lengths.length * layer.batch), budget)
            if whole is not None and not (whole.steps or self._again(lengths, whole)):
                return whole, self._told(lengths, whole, told)
        for means in self._means:
            spanned = self._spanned(means, lengths)
            for plan in (self._keeping(lengths, each, budget) for each in spanned):
                if plan is not None:
                    again = self._again(lengths, plan) / lengths.length
                    time = self._pass_time(lengths, plan, 1.0, again)
                    if time < least:
                        best, least = plan, time
            if best is not None and best.block == spanned[0].block and not best.steps:
                break  # no other means allows longer spans
        if best is not None:
            return best, self._told(lengths, best, told)
        return self._in_ranges(lengths, budget, told)

    @cached_property
    def _means(self) -> list[HeldPlan]:
        """The means that may run the layers, the fastest first. Loops need copies of the weights in
        a layout of their own. The backward pass holds the copies of all layers at once. As many of
        the lower layers as the budget requires run without, and slower."""
        layer, count = self.layers[0], 1 if self._both else len(self.layers)
        if layer.on_gpu:
            calls = [n for n, _ in layer.vendor.points] if layer.vendor else []
            plan = HeldPlan(0, 0, layer.forward_by, (layer.backward_by,) * count)
            return [replace(plan, calls=n) for n in reversed(calls)] or [plan]
        sweeps: tuple[Backend, ...] = tuple(["sweeps"] * count)
        if self.scans:
            return [HeldPlan(0, backward_by=sweeps)]
        placed: tuple[Backend, ...] = tuple(["in place"] * count)
        means = [HeldPlan(0)]
        if layer.loops and layer.form.step is None:
            means.append(HeldPlan(0, backward_by=sweeps))
        for lower in range(1, count + 1):
            means.append(HeldPlan(0, backward_by=placed[:lower] + sweeps[lower:]))
        return [*means, HeldPlan(0, forward_by="in place", backward_by=placed)]

    def _in_ranges(
        self, lengths: Sequences, budget: int, told: dict[str, int]
    ) -> tuple[HeldPlan, Fit]:
        """Return a plan in ranges of steps. First the means and the length of a span are chosen, by
        nominal time. For this, ranges have equal length and Revolve decides which of them are
        recomputed. Then the ranges themselves are planned."""
        timed: list[tuple[float, HeldPlan, Footprint]] = []
        for means in self._means:
            for plan in self._spanned(means, lengths):
                sizes = self._footprint(plan, lengths, told["ordinary_bytes"])
                if sizes.minimum_bytes() <= budget:
                    timed.append((self._time_in_ranges(lengths, plan, budget, sizes), plan, sizes))
        _, plan, sizes = min(timed, key=lambda choice: choice[0])
        fits = fit(lengths.length, budget, sizes)
        return plan, replace(fits, minimum_bytes=told["minimum_bytes"])

    def _keeping(self, lengths: Sequences, plan: HeldPlan, budget: int) -> HeldPlan | None:
        """Return the plan with what gates memory allows, or unequal spans; None if none fits."""
        peak = self._peaks(lengths, plan)
        if peak(0) > budget:
            return self._unequal(lengths, plan, budget)
        if not self._run_by(plan)[0][0].gates(1):
            return plan
        kept = bisect_right(range(1, lengths.length), budget, key=peak)
        return replace(plan, kept=lengths.length if peak(lengths.length) <= budget else kept)

    def _unequal(self, lengths: Sequences, plan: HeldPlan, budget: int) -> HeldPlan | None:
        """Return the plan with the longest spans that fit beside the marks before them, or None."""
        layers, batch = self._run_by(plan)[0], self.layers[0].batch
        mark, most = sum(layer.mark(1) for layer in layers), plan.block // batch
        if self._both or lengths.offsets is not None or self.layers[0].on_gpu or self.scans:
            return None

        @cache
        def takes(n: int, first: bool) -> int:
            ways = {"kept": False, "tight": True, "first": first}
            return max(layer.span(n * batch, **ways) for layer in layers)

        room = takes(most, True) + budget - self.peak(lengths, replace(plan, steps=(most,)))
        steps, left = list[int](), lengths.length
        while left and most:
            some = range(1, min(plan.block // batch, left) + 1)
            most = bisect_right(some, room, key=partial(takes, first=not steps))
            alike = 1 if mark or not steps or not most else left // most
            steps += [most] * alike
            left, room = left - alike * most, room - mark
        plan = replace(plan, steps=tuple(steps))
        return plan if most and self.peak(lengths, plan) <= budget else None

    def _again(self, lengths: Sequences, plan: HeldPlan) -> int:
        """Return how many steps' gates are recomputed for lack of memory; only an LSTM's are."""
        return lengths.length - plan.kept if self.layers[0].form.keeps else 0

    def _time_in_ranges(
        self, lengths: Sequences, plan: HeldPlan, budget: int, sizes: Footprint
    ) -> float:
        """Return the least nominal microseconds of a plan, over ranges of 1, 2, 4, … spans. Only
        what depends on the plan is counted. If recomputed steps have a single layer, products
        follow its outputs. If they have several layers, all but the top one run step by step. If a
        range has several spans, the gates of most are computed again."""
        lstm, length, best = self.layers[0].form.keeps, lengths.length, inf
        steps = span = max(1, plan.block // self.layers[0].batch)
        weights = sum(4 * layer.size * (layer.size + layer.width) for layer in self.layers)
        while (room := budget - sizes.overhead_bytes(min(steps, length))) >= 0:
            ranges = -(-length // steps)
            runs = int(hsm_cost(ranges, 1 + room // sizes.state_bytes))
            more, passes, again = runs / ranges - 1, 1.0, 0.0
            if len(self.layers) > 1:
                passes += more
                again += lstm
            elif lstm:
                again += more + (steps > span)
            calls = (runs + ranges) * (nominal.CALL * len(self.layers) + 1e-3 * weights)
            time = self._pass_time(lengths, plan, passes, again) + calls
            best, steps = min(best, time), 2 * steps
            if ranges == 1:
                break
        return best

    def _pass_time(self, lengths: Sequences, plan: HeldPlan, passes: float, again: float) -> float:
        """Return the nominal microseconds of a forward and a backward pass. ``passes`` counts
        forward passes step by step. ``again`` is the share of gates that products recompute."""
        spans, total = len(plan.steps) or lengths.spans(plan.block), 0.0
        for layer in self._run_by(plan)[0]:
            size, gates = layer.size, layer.form.gates
            weights = gates * size * (size + layer.width)
            recurrent = 2 * gates * size**2 * lengths.rows / nominal.RATE
            elements = nominal.ELEMENT * lengths.rows * gates * size
            run = 2 * weights * lengths.rows / nominal.RATE + elements
            each, of_weight = nominal.SPAN[layer.loops and plan.block >= _THREAD_ROWS]
            total += (again + passes - 1) * run + spans * (each + of_weight * weights)
            if plan.forward_by == "torch":
                steps = max(1, min(plan.block, layer.pass_rows(plan.block)) // layer.batch)
                total += passes * -(-lengths.length // steps) * nominal.VENDOR
            if plan.forward_by == "in place":
                total += passes * (nominal.IN_PLACE + nominal.FEW_UNITS / size) * recurrent
            if layer.backward_by == "in place":
                total += nominal.BACK_IN_PLACE * recurrent
            if layer.kind == "GRU" and plan.backward_by and not layer.loops:
                total += nominal.SWEEPS * run
        return total

    def _told(self, lengths: Sequences, plan: HeldPlan, told: dict[str, int]) -> Fit:
        """Return the fit of a plan with one range of all steps."""
        length, again = lengths.length, self._again(lengths, plan)
        block, time = max(1, plan.block // self.layers[0].batch), float(3 * length + again)
        peak = self.peak(lengths, plan)
        passes = {"forward_steps": length + again, "calls": 2, "peak_bytes": peak}
        return whole_fit(length, block, time=time, **passes, **told)

    def _footprint(self, plan: HeldPlan, lengths: Sequences, ordinary: int) -> Footprint:
        """Return the bytes of ranges of steps, for any schedule over them. A range of one span
        keeps the gates of its top layer. A longer range recomputes them in its backward pass."""
        (layers,) = self._run_by(plan)
        length, block, top = lengths.length, plan.block, layers[-1]
        state = sum(layer.state for layer in layers)
        step = sum(layer.below(layer.batch) for layer in layers)
        most = max(1, block // top.batch)

        def held(steps: int) -> int:
            return without(steps) + top.gates(min(steps, most) * top.batch)

        def without(steps: int) -> int:
            spans = 1 if steps <= most else steps // most + 1
            return step * steps + sum(layer.mark(spans) for layer in layers) + state

        def record(steps: int) -> int:
            return max(without(steps) + forward, held(steps) + keeping)

        later = max(layer.span(block, kept=False) for layer in layers) - top.gates(block)
        work = max(*(layer.span(block, kept=True) for layer in layers), later)
        work += sum(layer.fixed(block) for layer in layers)
        along, pass_rows = top.along(block), top.pass_rows(block)
        forward, keeping = (
            max(along, *(layer.forward(block, n) for layer in layers)) for n in (pass_rows, 0)
        )
        advance = state + sum(layer.advance(pass_rows) for layer in layers)
        if len(layers) == 1:
            advance = max(advance, state + along + top.gates(block))
        points = sorted({n for n in (1, 2, most, most + 1, length) if n <= length})
        return Footprint(
            state_bytes=state,
            advance=Curve(((1, advance),)),
            held=Curve(tuple((n, held(n)) for n in points)),
            record=Curve(tuple((n, record(n)) for n in points)),
            backward=Curve(((1, work),)),
            ordinary=Curve(((length, ordinary),)),
            gradient_bytes=2 * state,
            heap_bytes=HEAP_BYTES,
            call_steps=nominal.CALL_STEPS,
            record_steps=nominal.RECORD_STEPS,
            scheduled=True,
            extra_bytes=self.extra + self.copied,
        )

    def _between(self, lengths: Sequences) -> int:
        """Return the bytes of sequences between layers of two directions, and of their gradients.
        One gradient is held at a time, or two if there are more than two layers."""
        layer, many = self.layers[0], len(self.layers)
        if many == 1 or not self._both:
            return 0
        sequences = many + (many > 2)
        return lengths.rows * 2 * layer.size * layer.item * sequences + 2 * many * layer.state

    def peak(self, lengths: Sequences, plan: HeldPlan) -> int:
        """Return the peak bytes of a call."""
        return self._peaks(lengths, plan)(plan.kept)

    def _peaks(self, lengths: Sequences, plan: HeldPlan) -> Callable[[int], int]:
        """Return the peak bytes of a call, by the number of steps that keep their gates. There is a
        peak while gates are kept, and a later one. Gates are kept until the backward pass has
        passed their spans."""
        nets, both = self._run_by(plan), self._both
        layers = [layer for net in nets for layer in net]
        most = threads = lengths.largest(plan.block)
        spans = 1 + (len(plan.steps) or lengths.spans(plan.block))  # one begins with kept gates
        always = self.extra + sum(layer.mark(spans) + layer.below(lengths.rows) for layer in layers)
        always += 2 * sum(layer.state for layer in layers) + self._between(lengths) + self.copied
        if lengths.offsets is not None:  # with fewer sequences a thread may have more rows
            threads = max(most, min(plan.block, _THREAD_ROWS))
            always += always // 64 + _THREAD_ROWS * layers[0].item

        @cache
        def backward(rows: int, **of: bool) -> int:
            spans = [max(layer.span(rows, **of) for layer in net) for net in nets]
            fixed = [sum(layer.fixed(threads) for layer in net) for net in nets]
            return max(map(int.__add__, spans, fixed))

        forward = max(layer.forward(most, layer.pass_rows(most)) for layer in layers)
        if plan.steps:  # when a span goes back, the marks of later ones are free
            mark, batch = sum(layer.mark(1) for layer in layers), layers[0].batch
            tight = partial(backward, kept=False, tight=True)
            free = {(n, k == 2): (spans - k) * mark for k, n in enumerate(plan.steps, 2)}
            each = (tight(n * batch, first=f) - more for (n, f), more in free.items())
            early = later = max(forward, *each)
        else:
            alone = not both and len(layers) == 1  # no forward pass runs while its gates are kept
            early = max(layers[0].forward(most, 0) if alone else forward, backward(most, kept=True))
            later = max(forward, backward(most, kept=False))

        def peak(kept: int) -> int:
            last = lengths.last(kept, both)
            *lower, top = (sum(layer.gates(last) for layer in net) for net in nets)
            # The gates of another track, or of a lower layer, wait while others are backpropagated.
            waiting = sum(lower) + (ceil(top / 2) if both else 0)
            after = later if kept < lengths.length else early
            return always + max(sum(lower) + top + early, waiting + after)

        return peak
