"""Recurrent layers whose outputs the caller holds anyway, so that few states need to be kept.

The outputs of RNN and GRU are their hidden states; those of an LSTM are half of its states. So
little else has to be recorded. A recorded range keeps an LSTM's c before each span (a *mark*). It
also keeps the outputs of all layers below the top one. The backward pass recomputes the gates of a
span from these by one matrix product. The last steps keep their gates instead, as many as memory
allows, at five numbers per unit and step.

Two directions are two tracks. The second track runs from the last step to the first. In a packed
batch, each sequence joins the second track at that sequence's own last step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from retrograde.kernels import kernels
from retrograde.kernels.cells import Block, Kept, Resets, Weights, form_of
from retrograde.kernels.cpu.llvm.threads import paced
from retrograde.recurrent.backward import LayerBackward
from retrograde.recurrent.bytes import Backend, sums_at_once
from retrograde.recurrent.dropout import Dropout
from retrograde.recurrent.forward import LayerForward, room_for
from retrograde.recurrent.plan import HeldPlan
from retrograde.recurrent.resets import SequenceResets
from retrograde.recurrent.spans import Span, cut
from retrograde.recurrent.vendor import Layers
from retrograde.replay.surroundings import Surroundings
from retrograde.replay.trees import Tensors
from retrograde.run.core import Core, Emit, Gradients, Tape, discard
from retrograde.run.layout import InMemory, Inputs, Rows


@dataclass
class _LayerTape(Tape):
    """The contents of a recorded range.

    They are the state before it (``first``), and h of all layers ``below`` the top one (rows, H).
    For each track, layer and span of an LSTM there is an entry in one of two dicts. ``marks`` has
    c before the span (n, H), and ``kept`` its gates and cells.
    """

    first: Tensors
    below: Tensors
    marks: dict[tuple[int, int, Span], Tensor] = field(default_factory=dict)
    kept: dict[tuple[int, int, Span], Kept] = field(default_factory=dict)


class LayerPass:
    """One layer of a track in a range of steps: where a span's numbers are, and how it runs.
    ``track`` and ``layer`` are numbers; ``place`` is the layer's number among those of all tracks.
    """

    def __init__(
        self, core: "HeldLayers", inputs: Inputs, tape: _LayerTape, track: int, layer: int
    ) -> None:
        self.core, self.inputs, self.tape, self.track, self.layer = core, inputs, tape, track, layer
        self.weights, self.place = core.tracks[track][layer], track * core.count + layer
        self.is_top = layer == core.count - 1

    def state(self, span: Span) -> Tensors:
        """Return views of the layer's state, which goes from before the range to after it."""
        return [s[self.place, : span.samples] for s in self.tape.state_after]

    def record(self, emit: Emit | None) -> None:
        """Run the layer over the range."""
        core, tape, emits = self.core, self.tape, emit not in (None, discard)
        spans = core.spans(self.track, tape.start, tape.stop)
        if not self.is_top:
            row_count = sum(span.rows for span in spans)
            tape.below.append(tape.state_after[0].new_empty(row_count, core.size))
        run = LayerForward(core.forward, self.weights, core.block, core.calls)
        for span in spans:
            key, keeps, room = (self.track, self.layer, span), self._keeps(span), None
            if core.form.others and not keeps:
                tape.marks[key] = self.state(span)[1].clone()
            if self.is_top and emit is None and core.follows:
                kept = self.follow(span)
                if keeps and kept is not None:
                    tape.kept[key] = kept
                del kept  # before the next ones are made
                continue
            x = self.given(span)
            if keeps and (room := room_for(self.weights, x)) is not None:
                tape.kept[key] = room
            y = self.outputs(span)
            # In a second run the caller's outputs exist already.
            direct = not self.is_top or (emits and y.is_contiguous() and len(core.tracks) == 1)
            into = y if direct else x.new_empty(*x.shape[:-1], core.size)
            run(x, self.state(span), into, room, self.resets(span))
            if emits and not direct:
                y.copy_(self.turned(into))
            del x, into  # before the next ones are made

    def follow(self, span: Span) -> Kept | None:
        """Move a top layer's state from before a span to after it, when its outputs exist already.
        No recurrence of h is run. Return an LSTM's gates, which its c needs, or None."""
        h, *c = self.state(span)
        if not c:
            h.copy_(self.outputs(span)[0 if self.track else -1])
            return None
        assert self.core.recall is not None
        after = self._states(span)
        before = torch.cat([h.unsqueeze(0), after[:-1]])
        h.copy_(after[-1])
        resets = self.resets(span)
        if resets is not None:
            resets.enter(slice(None), before)
        return self.core.recall(self.weights, self.given(span), before, *c, resets)

    def block(self, span: Span, earlier: list[Span]) -> Block:
        """Return a span in the form that its backward pass needs."""
        core, tape, key = self.core, self.tape, (self.track, self.layer, span)
        after, resets = self._states(span), self.resets(span)
        if core.views and earlier and resets is None:
            before = self._states(Span(span.start - 1, span.stop - 1, span.samples))
        else:
            entering = tape.first[0][self.place, : span.samples]
            if earlier:
                end = earlier[-1].start if self.track else earlier[-1].stop - 1
                last = self._states(Span(end, end + 1, earlier[-1].samples))[0]
                entering = torch.cat([last[: span.samples], entering[len(last) :]])
            before = torch.cat([entering.unsqueeze(0), after[:-1]])
        c, kept = tape.marks.pop(key, None), tape.kept.pop(key, None)
        x = self.given(span)
        if resets is not None:
            resets.enter(slice(None), before)
        return Block(x, before, after, c, kept, resets).cast(core.real)

    def turned(self, t: Tensor) -> Tensor:
        """Return a tensor over steps in the order of the track, or one of the track in theirs."""
        return t.flip(0) if self.track else t

    def resets(self, span: Span) -> Resets | None:
        """Return where the samples of a span begin anew, in the order of the track."""
        core = self.core
        if core.resets is None:
            return None
        starts = core.rows_of(core.resets.starts[self.track], span)[..., 0]
        entries = core.resets.entries
        into = entries if core.to_entries is None else core.to_entries
        samples = self.place, slice(span.samples)
        return Resets(self.turned(starts).contiguous(), entries[samples], into[samples])

    def given(self, span: Span) -> Tensor:
        """Return the layer's inputs for a span (L, n, I), in the order of the track."""
        if self.layer:
            return self.core.dropped(self._below(self.layer - 1, span), self.layer, span)
        (x,) = cast(InMemory, self.inputs).tensors
        x = self.core.dropped(self.core.rows_of(x.detach(), span), 0, span)
        return self.turned(x).contiguous()

    def outputs(self, span: Span) -> Tensor:
        """Return a view of the outputs of a span (L, n, H), a top layer's in the caller's order."""
        if self.is_top:
            return self.core.columns(cast(InMemory, self.inputs).outputs[0], self.track, span)
        return self._below(self.layer, span)

    def _states(self, span: Span) -> Tensor:
        """Return h after every step of a span (L, n, H), in the order of the track."""
        y = self.outputs(span)
        return self.turned(y).to(self.core.real).contiguous() if self.is_top else y

    def _below(self, layer: int, span: Span) -> Tensor:
        """Return the outputs of a layer that is not the top one (L, n, H)."""
        core, steps = self.core, (self.tape.start, span.start, span.stop)
        origin, a, b = (
            t * core.batch if core.sizes is None else core.rows.offsets[t] for t in steps
        )
        return self.tape.below[layer][a - origin : b - origin].view(len(span), span.samples, -1)

    def _keeps(self, span: Span) -> bool:
        """Return whether the gates of a span are kept. They are kept for the last steps of each
        track. A recorded range of one span that is only a part of all steps keeps those of its top
        layer, which is backpropagated next."""
        core, length = self.core, self.core.rows.length
        if not core.form.keeps or core.recall is None:
            return False
        if len(span) == self.tape.stop - self.tape.start < length:
            return self.is_top
        return span.stop <= core.kept if self.track else span.start >= length - core.kept


class HeldLayers(Core):
    """Several layers in one direction, or one layer in two directions; without projections. The
    last ``plan.kept`` steps of each track of an LSTM keep their gates."""

    advances_many = True

    def __init__(
        self, net: Layers, rows: Rows, batch: int, plan: HeldPlan, *, masks: Dropout | None = None,
        resets: SequenceResets | None = None,
    ) -> None:  # fmt: skip
        self.net, self.rows, self.batch, self.chunk = net, rows, batch, plan.chunk
        self.kept, self.steps, self.calls = plan.kept, plan.steps, plan.calls * batch
        self.block = min(plan.block, rows.length * batch)
        self.masks, self.at_once = masks, sums_at_once(rows.length, batch)
        self.resets = resets
        #: The gradients of the states with which samples begin anew, while a range goes backward.
        self.to_entries: Tensor | None = None
        weight = net.weights[1]
        self.surroundings = Surroundings(weight.device)
        # Whether the states before a span are a view of outputs; on a GPU it is one launch less.
        self.views = plan.steps or not (weight.is_cpu or net.both or rows.sizes is not None)
        self.form, self.size, self.count = form_of(net.mode), weight.shape[1], net.count
        self.real = torch.float64 if weight.dtype == torch.float64 else torch.float32
        layers = [Weights.of(part.mode, [w.detach() for w in part.weights]) for part in net.parts]
        #: The layers of each track.
        self.tracks = [[layer] for layer in layers] if net.both else [layers]
        self.backward_by = cast(tuple[Backend, ...], plan.backward_by or ("loops",) * self.count)
        use = kernels(weight.device.type, weight.dtype, self.size)
        forward = (use.in_place if plan.forward_by == "in place" else use).forward
        self.forward = use.onward if plan.forward_by == "launches" else forward
        self.recall = use.recall
        #: Whether a second run can take h from the outputs of the top layer, without a recurrence.
        self.follows = not self.form.others or self.recall is not None

    @cached_property
    def parameters(self) -> Tensors:
        entry = () if self.resets is None else self.resets.state
        return [t for t in (*self.net.weights, *entry) if t.requires_grad]

    @cached_property
    def sizes(self) -> list[int] | None:
        """The number of sequences at each step of a packed batch, or None."""
        return None if self.rows.sizes is None else self.rows.sizes.tolist()

    def room(self, inputs: Inputs) -> Tensors:
        """Return buffers for the outputs of all steps, which this core writes itself."""
        (x,) = cast(InMemory, inputs).tensors
        return [x.new_empty(*x.shape[:-1], self.size * len(self.tracks))]

    def totals(self) -> list[Tensor | None]:
        return [torch.zeros_like(w, dtype=self.real) for w in self.parameters]

    @paced
    @torch.no_grad()
    def advance(
        self, inputs: Inputs, start: int, stops: Sequence[int], state: Tensors, emit: Emit | None
    ) -> list[Tensors]:
        """Run a few steps at a time through all layers; memory does not grow with their number."""
        tape, states = self._tape(inputs, start, stops[-1], state), []
        layers, after = self._passes(inputs, tape), tape.state_after
        top, emits = layers[-1], emit not in (None, discard)
        follows = emit is None and self.count == 1 and self.follows
        runs = [LayerForward(self.forward, each.weights, self.block, self.calls) for each in layers]
        for a, b in pairwise([start, *stops]):
            if follows:
                for span in self.spans(0, a, b):
                    top.follow(span)
            else:
                most = min(run.rows for run in runs)
                for span in cut(a, b, most, self.batch, self.sizes):
                    y = layers[0].given(span)
                    for k, (layer, run) in enumerate(zip(layers, runs, strict=True)):
                        x = y = self.dropped(y, k, span) if k else y
                        direct = layer is top and emits
                        y = top.outputs(span) if direct else x.new_empty(*x.shape[:-1], self.size)
                        run(x, layer.state(span), y, None, layer.resets(span))
            states.append(after if b == stops[-1] else [s.clone() for s in after])
        return states

    @paced
    @torch.no_grad()
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape:
        tape = self._tape(inputs, start, stop, state)
        for track in range(len(self.tracks)):
            for layer in self._passes(inputs, tape, track):
                layer.record(emit)
        return tape

    def _tape(self, inputs: Inputs, start: int, stop: int, state: Tensors) -> _LayerTape:
        after = [s.detach().clone(memory_format=torch.contiguous_format) for s in state]
        wanted, passes = [*inputs.differentiable], [True] * len(state)
        return _LayerTape(start, stop, [], wanted, passes, after, (), [*state], [])

    def _passes(self, inputs: Inputs, tape: _LayerTape, track: int = 0) -> list[LayerPass]:
        return [LayerPass(self, inputs, tape, track, layer) for layer in range(self.count)]

    @paced
    @torch.no_grad()
    def backpropagate(self, tape: Any, gradients: Gradients) -> None:
        ends = [
            torch.zeros_like(t) if g is None else g
            for t, g in zip(tape.state_after, gradients.states, strict=True)
        ]
        g = torch.cat([s.to(self.real) for s in ends], -1)
        if self.resets is not None:
            self.to_entries = torch.zeros_like(self.resets.entries)
        for number in range(len(self.tracks)):
            layers = slice(number * self.count, (number + 1) * self.count)
            self._backpropagate(tape, gradients, number, g[layers])
        dtype = tape.first[0].dtype
        before = g.tensor_split([self.size], -1)[: len(ends)]
        gradients.states = [t.to(dtype).contiguous() for t in before]
        if self.resets is not None and self.to_entries is not None:
            totals = {id(t): g for t, g in zip(self.parameters, gradients.parameters, strict=True)}
            entries = self.to_entries.split(self.size, -1)
            for t, entry in zip(self.resets.state, entries, strict=True):
                total = totals.get(id(t))
                if total is not None:
                    total += entry
            self.to_entries = None

    def _backpropagate(self, tape: _LayerTape, gradients: Gradients, track: int, g: Tensor) -> None:
        """Backpropagate a track; g (layers, B, n) goes from after the range to before it."""
        spans = self.spans(track, tape.start, tape.stop)
        totals = self._totals(track, gradients.parameters)
        options: Any = {"chunk": self.chunk, "at_once": self.at_once, "tight": bool(self.steps)}
        options["resets"] = self.resets is not None
        backs = [
            LayerBackward(w.cast(self.real), total, self.batch, self.block, means=means, **options)
            for w, total, means in zip(self.tracks[track], totals, self.backward_by, strict=True)
        ]
        (total_dx,), (seeds,) = gradients.inputs, gradients.outputs
        ends = [*g]
        lowest, *_ = layers = self._passes(cast(Inputs, gradients.read), tape, track)
        while spans:
            span = spans.pop()
            dy = None if seeds is None else lowest.turned(self.columns(seeds, track, span))
            into = None if total_dx is None else self.rows_of(total_dx, span)
            for k in reversed(range(self.count)):
                block = layers[k].block(span, spans)
                direct = k == 0 and (into is None or self._writes(into))
                dx = into if direct else torch.empty_like(block.x)
                before = backs[k].add(block, dy, ends[k][: span.samples], dx)
                if backs[k].on_cpu or span.samples < self.batch:
                    ends[k][: span.samples].copy_(before)
                else:
                    ends[k] = before
                del block  # before the next one is made
                dy = self.dropped(dx, k, span) if k and dx is not None else dx
            if dx is not None and into is not None and dx is not into:
                dx = self.dropped(lowest.turned(dx), 0, span)
                _ = into.add_(dx) if track else into.copy_(dx)
            dx = dy = None  # before the next ones are made
        for back, end, at in zip(backs, ends, g, strict=True):
            back.finish()
            at.copy_(end)
        tape.below.clear()

    def spans(self, number: int, start: int, stop: int) -> list[Span]:
        """Return the spans of a range, in the order in which a track runs them. A new span begins
        where gates begin to be kept."""
        if self.steps:
            assert (number, start, stop) == (0, 0, self.rows.length)
            return [Span(a, b, self.batch) for a, b in pairwise(accumulate(self.steps, initial=0))]
        edge = self.kept if number else self.rows.length - self.kept
        bounds = [start, *([edge] if start < edge < stop else []), stop]
        spans = [
            span
            for a, b in pairwise(bounds)
            for span in cut(a, b, self.block, self.batch, self.sizes)
        ]
        return spans[::-1] if number else spans

    def rows_of(self, t: Tensor, span: Span) -> Tensor:
        """Return a span's rows of a tensor over all steps (L, n, …), in the order of the steps."""
        if self.sizes is None:
            return t[span.start : span.stop]
        offsets = self.rows.offsets
        return t[offsets[span.start] : offsets[span.stop]].view(len(span), span.samples, -1)

    def columns(self, t: Tensor, number: int, span: Span) -> Tensor:
        """Return a span's rows for one track, from a tensor that has the tracks side by side."""
        return self.rows_of(t, span)[..., number * self.size : (number + 1) * self.size]

    def _writes(self, into: Tensor) -> bool:
        """Return whether the gradients of inputs can be written where they are collected."""
        drops = self.masks is not None and self.masks.first
        alike = into.is_contiguous() and into.dtype == self.real
        return alike and not (self.net.both or drops)

    def dropped(self, x: Tensor, k: int, span: Span) -> Tensor:
        """Apply dropout to a layer's input, or to that input's gradient."""
        if self.masks is None or not (k or self.masks.first):
            return x
        steps = torch.arange(span.start, span.stop, device=x.device)
        return self.masks(x.contiguous(), k, steps)

    def _totals(self, number: int, parameters: list[Tensor | None]) -> list[dict[str, Tensor]]:
        """Return, for each layer, the sums of its weights' gradients by name. A frozen weight gets
        a sum of its own, which is discarded."""
        by_weight = {id(w): t for w, t in zip(self.parameters, parameters, strict=True)}
        by_layer = []
        layers = self.net.parts[number * self.count :]
        for weights, layer in zip(self.tracks[number], layers, strict=False):
            totals = {}
            for (name, w), weight in zip(weights.tensors().items(), layer.weights, strict=True):
                total = by_weight.get(id(weight))
                totals[name] = torch.zeros_like(w, dtype=self.real) if total is None else total
            by_layer.append(totals)
        return by_layer
