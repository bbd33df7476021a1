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

from retrograde.kernels import in_place, kernels
from retrograde.kernels.cells import Block, Kept, Resets, Weights
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


class HeldLayers(Core):
    """Several layers in one direction, or one layer in two directions; without projections.

    The last ``plan.kept`` steps of each track of an LSTM keep their gates.
    """

    advances_many = True

    def __init__(
        self, net: Layers, rows: Rows, batch: int, plan: HeldPlan, *, masks: Dropout | None = None,
        resets: SequenceResets | None = None,
    ) -> None:  # fmt: skip
        self.net, self.rows, self.batch, self.chunk = net, rows, batch, plan.chunk
        self.kept, self.steps = plan.kept, plan.steps
        self.block = min(plan.block, rows.length * batch)
        self.masks, self.at_once = masks, sums_at_once(rows.length, batch)
        self.resets = resets
        #: The gradients of the states with which samples begin anew, while a range goes backward.
        self.to_entries: Tensor | None = None
        weight = net.weights[1]
        self.surroundings = Surroundings(weight.device)
        self.kind, self.size, self.count = net.mode, weight.shape[1], net.count
        self.real = torch.float64 if weight.dtype == torch.float64 else torch.float32
        parts = [Weights.of(one.mode, [w.detach() for w in one.weights]) for one in net.parts]
        #: The layers of each track.
        self.tracks = [[part] for part in parts] if net.both else [parts]
        loops: Backend = "loops"
        self.backward_by = plan.backward_by or (loops,) * self.count
        use = kernels(weight.device.type, weight.dtype, self.size)
        forward_by = in_place(weight.dtype, self.size) if plan.forward_by == "in place" else use
        self.forward, self.recall = forward_by.forward, use.recall
        #: Whether a second run can take h from the outputs of the top layer, without a recurrence.
        self.follows = self.kind != "LSTM" or self.recall is not None

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
        found, after = [], [_copied(s) for s in state]
        (track,) = self.tracks
        follows = emit is None and self.count == 1 and self.follows
        passes = [] if follows else [LayerForward(self.forward, w, self.block) for w in track]
        for a, b in pairwise([start, *stops]):
            if follows:
                for span in self._spans(0, a, b):
                    own = [s[0, : span.samples] for s in after]
                    self._follow(None, inputs, 0, span, track[0], own)
            else:
                most = min(p.rows for p in passes)
                for span in cut(a, b, most, self.batch, self.sizes):
                    y = self._given(None, inputs, 0, 0, span)
                    for k, run in enumerate(passes):
                        if k:
                            y = self._dropped(y, k, span)
                        top = k == self.count - 1 and emit not in (None, discard)
                        own, given = [s[k, : span.samples] for s in after], y
                        y = self._output(inputs, 0, span) if top else _room(given, self.size)
                        run(given, own, y, None, self._anew(0, k, span))
            found.append(after if b == stops[-1] else [s.clone() for s in after])
        return found

    @paced
    @torch.no_grad()
    def record(
        self, inputs: Inputs, start: int, stop: int, state: Tensors, emit: Emit | None
    ) -> Tape:
        after = [_copied(s) for s in state]
        wanted, passes = [*inputs.differentiable], [True] * len(state)
        tape = _LayerTape(start, stop, [], wanted, passes, after, (), [*state], [])
        for number, layers in enumerate(self.tracks):
            for k, weights in enumerate(layers):
                self._record(tape, inputs, number, k, weights, emit)
        return tape

    @paced
    @torch.no_grad()
    def backpropagate(self, tape: Any, gradients: Gradients) -> None:
        given = [
            torch.zeros_like(t) if g is None else g
            for t, g in zip(tape.state_after, gradients.states, strict=True)
        ]
        g = torch.cat([s.to(self.real) for s in given], -1)
        if self.resets is not None:
            self.to_entries = torch.zeros_like(self.resets.entries)
        for number in range(len(self.tracks)):
            own = slice(number * self.count, (number + 1) * self.count)
            self._backpropagate(tape, gradients, number, g[own])
        dtype = tape.first[0].dtype
        gradients.states = [part.to(dtype).contiguous() for part in g.split(self.size, -1)]
        if self.resets is not None and self.to_entries is not None:
            totals = {id(t): g for t, g in zip(self.parameters, gradients.parameters, strict=True)}
            parts = self.to_entries.split(self.size, -1)
            for t, part in zip(self.resets.state, parts, strict=True):
                total = totals.get(id(t))
                if total is not None:
                    total += part
            self.to_entries = None

    def _record(
        self, tape: _LayerTape, inputs: Inputs, number: int, k: int, weights: Weights,
        emit: Emit | None,
    ) -> None:  # fmt: skip
        """Run a layer over a range; its state goes from before the range to after it."""
        top, own = k == self.count - 1, number * self.count + k
        emits = emit not in (None, discard)
        spans = self._spans(number, tape.start, tape.stop)
        if not top:
            rows = sum(span.rows for span in spans)
            tape.below.append(tape.state_after[0].new_empty(rows, self.size))
        run = LayerForward(self.forward, weights, self.block)
        for span in spans:
            state = [s[own, : span.samples] for s in tape.state_after]
            keeps, room = self._keeps(tape, number, k, span), None
            if self.kind == "LSTM" and not keeps:
                tape.marks[number, k, span] = state[1].clone()
            if top and emit is None and self.follows:
                found = self._follow(tape, inputs, number, span, weights, state)
                if keeps and found is not None:
                    tape.kept[number, k, span] = found
                del found  # before the next ones are made
                continue
            x = self._given(tape, inputs, number, k, span)
            if keeps and (room := room_for(weights, x)) is not None:
                tape.kept[number, k, span] = room
            y = self._output(inputs, number, span) if top else self._below(tape, k, span)
            # In a second run the caller's outputs exist already.
            direct = not top or (emits and y.is_contiguous() and len(self.tracks) == 1)
            into = y if direct else _room(x, self.size)
            run(x, state, into, room, self._anew(number, k, span))
            if emits and not direct:
                y.copy_(into.flip(0) if number else into)
            del x, into  # before the next ones are made

    def _follow(
        self, tape: _LayerTape | None, inputs: Inputs, number: int, span: Span, weights: Weights,
        state: Tensors,
    ) -> Kept | None:  # fmt: skip
        """Move a top layer's state from before a span to after it, when its outputs exist already.

        No recurrence of h is run. Return an LSTM's gates, which its c needs; None for other layers.
        """
        h, *c = state
        if not c:
            h.copy_(self._output(inputs, number, span)[0 if number else -1])
            return None
        assert self.recall is not None
        after = self._read(self._output(inputs, number, span), number)
        before = torch.cat([h.unsqueeze(0), after[:-1]])
        h.copy_(after[-1])
        resets = self._anew(number, self.count - 1, span)
        if resets is not None:
            resets.enter(slice(None), before)
        x = self._given(tape, inputs, number, self.count - 1, span)
        return self.recall(weights, x, before, *c, resets)

    def _backpropagate(
        self, tape: _LayerTape, gradients: Gradients, number: int, g: Tensor
    ) -> None:
        """Backpropagate a track; g (layers, B, n) goes from after the range to before it."""
        spans = self._spans(number, tape.start, tape.stop)
        totals = self._totals(number, gradients.parameters)
        options: Any = {"chunk": self.chunk, "at_once": self.at_once, "tight": bool(self.steps)}
        options["resets"] = self.resets is not None
        passes = [
            LayerBackward(w.cast(self.real), total, self.batch, self.block, means=means, **options)
            for w, total, means in zip(self.tracks[number], totals, self.backward_by, strict=True)
        ]
        (total_dx,), (seeds,) = gradients.inputs, gradients.outputs
        read = cast(Inputs, gradients.read)
        while spans:
            span = spans.pop()
            dy = None if seeds is None else self._columns(seeds, number, span)
            if dy is not None and number:
                dy = dy.flip(0)
            into = None if total_dx is None else self._rows(total_dx, span)
            for k in reversed(range(self.count)):
                block = self._block(tape, read, number, k, span, spans)
                dx = into if k == 0 and (into is None or self._writes(into)) else _room(block.x)
                at = g[k, : span.samples]
                at.copy_(passes[k].add(block, dy, at, dx))
                del block  # before the next one is made
                dy = self._dropped(dx, k, span) if k and dx is not None else dx
            if dx is not None and into is not None and dx is not into:
                dx = self._dropped(dx.flip(0) if number else dx, 0, span)
                _ = into.add_(dx) if number else into.copy_(dx)
            dx = dy = None  # before the next ones are made
        for one in passes:
            one.finish()
        tape.below.clear()

    def _block(
        self, tape: _LayerTape, read: Inputs, number: int, k: int, span: Span, earlier: list[Span]
    ) -> Block:
        """Return a span in the form that its backward pass needs."""
        own = number * self.count + k
        after = self._states(tape, read, number, k, span)
        resets = self._anew(number, k, span)
        if self.steps and earlier and resets is None:  # a view
            at = Span(span.start - 1, span.stop - 1, span.samples)
            before = self._states(tape, read, number, k, at)
        else:
            entering = tape.first[0][own, : span.samples]
            if earlier:
                end = earlier[-1].start if number else earlier[-1].stop - 1
                one = Span(end, end + 1, earlier[-1].samples)
                last = self._states(tape, read, number, k, one)[0]
                entering = torch.cat([last[: span.samples], entering[len(last) :]])
            before = torch.cat([entering.unsqueeze(0), after[:-1]])
        c = tape.marks.pop((number, k, span), None)
        kept = tape.kept.pop((number, k, span), None)
        x = self._given(tape, read, number, k, span)
        if resets is not None:
            resets.enter(slice(None), before)
        return Block(x, before, after, c, kept, resets).cast(self.real)

    def _anew(self, number: int, k: int, span: Span) -> Resets | None:
        """Return where the samples of a span begin anew, in the order of a track."""
        if self.resets is None:
            return None
        starts = self._rows(self.resets.starts[number], span)[..., 0]
        starts = (starts.flip(0) if number else starts).contiguous()
        own = number * self.count + k, slice(span.samples)
        entries = self.resets.entries
        into = entries if self.to_entries is None else self.to_entries
        return Resets(starts, entries[own], into[own])

    def _states(self, tape: _LayerTape, inputs: Inputs, number: int, k: int, span: Span) -> Tensor:
        """Return h after every step of a span (L, n, H)."""
        if k < self.count - 1:
            return self._below(tape, k, span)
        return self._read(self._output(inputs, number, span), number)

    def _spans(self, number: int, start: int, stop: int) -> list[Span]:
        """Return the spans of a range, in the order in which a track runs them.

        A new span begins where gates begin to be kept.
        """
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

    def _keeps(self, tape: _LayerTape, number: int, k: int, span: Span) -> bool:
        """Return whether the gates of a span are kept.

        They are kept for the last steps of each track. A recorded range of one span that is only a
        part of all steps keeps those of its top layer, which is backpropagated next.
        """
        if self.kind != "LSTM" or self.forward is None:
            return False
        if len(span) == tape.stop - tape.start < self.rows.length:
            return k == self.count - 1
        return span.stop <= self.kept if number else span.start >= self.rows.length - self.kept

    def _rows(self, t: Tensor, span: Span) -> Tensor:
        """Return a span's rows of a tensor over all steps (L, n, …), in the order of the steps."""
        if self.sizes is None:
            return t[span.start : span.stop]
        rows = t[self.rows.offsets[span.start] : self.rows.offsets[span.stop]]
        return rows.view(len(span), span.samples, -1)

    def _columns(self, t: Tensor, number: int, span: Span) -> Tensor:
        """Return a span's rows for one track, from a tensor that has the tracks side by side."""
        return self._rows(t, span)[..., number * self.size : (number + 1) * self.size]

    def _read(self, t: Tensor, number: int) -> Tensor:
        """Return a tensor over steps in the order of a track, in contiguous memory."""
        return (t.flip(0) if number else t).to(self.real).contiguous()

    def _writes(self, into: Tensor) -> bool:
        """Return whether the gradients of inputs can be written where they are collected."""
        drops = self.masks is not None and self.masks.first
        alike = into.is_contiguous() and into.dtype == self.real
        return alike and not (self.net.both or drops)

    def _given(
        self, tape: _LayerTape | None, inputs: Inputs, number: int, k: int, span: Span
    ) -> Tensor:
        """Return a layer's inputs for a span (L, n, I), in the order of a track."""
        if k == 0:
            (x,) = cast(InMemory, inputs).tensors
            x = self._dropped(self._rows(x.detach(), span), 0, span)
            return (x.flip(0) if number else x).contiguous()
        assert tape is not None
        return self._dropped(self._below(tape, k - 1, span), k, span)

    def _below(self, tape: _LayerTape, k: int, span: Span) -> Tensor:
        """Return the outputs of a layer that is not the top one (L, n, H)."""
        at = [self._offset(t) - self._offset(tape.start) for t in (span.start, span.stop)]
        return tape.below[k][at[0] : at[1]].view(len(span), span.samples, -1)

    def _offset(self, step: int) -> int:
        """Return the row at which a step begins."""
        return step * self.batch if self.sizes is None else self.rows.offsets[step]

    def _output(self, inputs: Inputs, number: int, span: Span) -> Tensor:
        """Return a view of the outputs of a span (L, n, H), in the order of the steps."""
        return self._columns(cast(InMemory, inputs).outputs[0], number, span)

    def _dropped(self, x: Tensor, k: int, span: Span) -> Tensor:
        """Apply dropout to a layer's input, or to that input's gradient."""
        if self.masks is None or not (k or self.masks.first):
            return x
        steps = torch.arange(span.start, span.stop, device=x.device)
        return self.masks(x.contiguous(), k, steps)

    def _totals(self, number: int, parameters: list[Tensor | None]) -> list[dict[str, Tensor]]:
        """Return, for each layer, the sums of its weights' gradients by name.

        A frozen weight gets a sum of its own, which is discarded.
        """
        known = {id(w): t for w, t in zip(self.parameters, parameters, strict=True)}
        found = []
        parts = self.net.parts[number * self.count :]
        for weights, part in zip(self.tracks[number], parts, strict=False):
            totals = {}
            for (name, w), given in zip(weights.tensors().items(), part.weights, strict=True):
                total = known.get(id(given))
                totals[name] = torch.zeros_like(w, dtype=self.real) if total is None else total
            found.append(totals)
        return found


def _copied(state: Tensor) -> Tensor:
    return state.detach().clone(memory_format=torch.contiguous_format)


def _room(like: Tensor, width: int | None = None) -> Tensor:
    return like.new_empty(*like.shape[:-1], like.shape[-1] if width is None else width)
