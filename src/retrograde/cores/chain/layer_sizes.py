"""What the links of a chain take: bytes as they are allocated, seconds as they pass.

Both are measured link by link with the core's own functions: one that keeps nothing, one that is
recorded, one that is backpropagated. What a tape refers to is found by letting go of the link's
input, and of its output, and looking what is released.

No more is held meanwhile than one link takes, its output once more, the gradients of its parameters
and, for the first link, a copy of its input. A budget that has room for these is kept meanwhile.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograde.cores.chain.chain_core import NO_INPUTS, ChainCore, LinkTape
from retrograde.cores.chain.links import Link, Links
from retrograde.cores.timing import Stopwatch
from retrograde.measure.allocations import Phase, measure_phases
from retrograde.schedule import Chain

__all__ = ["measure_chain", "prefix_bytes"]

Tensors = list[Tensor]
Gradient = Tensor | None
Seconds = list[tuple[float, float]]  # of each link: forward, and backward
_MORE_SECONDS = 0.5  # for timing alone
_TOKEN_BYTES = 8  # an element for each state of the chain, in the caller's graph


def measure_chain(links: Links, state: Tensors, repeats: int | None = None) -> Chain:
    """Measure every link for a flat input, and leave no trace of it. Seconds are medians of
    ``repeats`` further passes, by default up to three within :data:`_MORE_SECONDS`. With no repeats
    they come from the pass that counts bytes."""
    device, before = state[0].device, len(links.prefix)
    core = ChainCore(links.chain, device)
    with ExitStack() as stack:
        for link in (*links.prefix, *links.chain):
            stack.enter_context(link.ambient.measured())
        with torch.no_grad():
            first = _run_prefix(links, state)
        sizes, once = _measure_links(core, first)
        seconds = [once]
        if repeats is None:
            repeats = min(3, int(_MORE_SECONDS / max(sum(map(sum, once)), 1e-9)))
        if repeats:  # the others were taken while memory was watched
            seconds = [_seconds(core, first) for _ in range(repeats)]
    forward, backward = _medians(links.chain, sizes, seconds)
    columns: dict[str, Any] = {
        name: [getattr(size, name) for size in sizes] for name in _Size._fields
    }
    return Chain(
        forward_seconds=forward,
        backward_seconds=backward,
        **columns,
        names=[link.name for link in links.chain],
        input_bytes=sum(t.nbytes for t in state),
        overhead_bytes=_overhead(links, device),
        hands_on=[  # what the prefix made is held anyhow
            [at - before + 1 for at in link.hands_on if at >= before] for link in links.chain
        ],
    )


def _run_prefix(links: Links, state: Tensors) -> Tensors:
    state = [t.detach() for t in state]
    for link in links.prefix:
        state = link.run(state)
    return state


def prefix_bytes(links: Links, state: Tensors) -> int:
    """The peak of the links before the first gradient, which run before the others."""
    with ExitStack() as stack, torch.no_grad():
        for link in links.prefix:
            stack.enter_context(link.ambient.measured())
        (phase,) = measure_phases([lambda: _run_prefix(links, state)], device=state[0].device)
        return phase.peak()


class _Size(NamedTuple):
    """Bytes of one link, as :class:`retrograde.schedule.Chain` has them."""

    output_bytes: int
    output_gradient_bytes: int
    internal_bytes: int
    forward_transient_bytes: int
    record_transient_bytes: int
    backward_transient_bytes: int
    release_bytes: int
    keeps_input: bool
    keeps_output: bool


class _LinkMeasurement:
    """One link, phase by phase. It alone holds its input, which ``take`` moves from the link
    before, so clearing a list shows what memory the link still refers to."""

    def __init__(self, core: ChainCore, k: int, take: Callable[[], Tensors]) -> None:
        self.core, self.k, self.take = core, k, take
        self.last = k == len(core.links) - 1
        self.state: Tensors = []
        self.output: Tensors = []  # for the link behind
        self.after: Tensors = []
        self.tape: list[LinkTape] = []
        self.gradients: list[Gradient] = []
        self.for_caller: list[Gradient] = []
        self.watch = Stopwatch(core.ambient.device)

    def phases(self) -> list[Callable[[], None]]:
        return [
            self.begin, self.advance, self.after.clear, self.record, self.state.clear,
            self.after.clear, self.seed, self.backpropagate, self.gradients.clear,
            self.for_caller.clear,
        ]  # fmt: skip

    def give(self) -> Tensors:
        state = [*self.output]
        self.output.clear()
        return state

    def begin(self) -> None:
        """Run the link the first time; what follows are reruns."""
        self.state += self.take()
        self.output += self._run()
        memory = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.state)}
        handed_on = {t.untyped_storage().data_ptr() for t in self.output}
        self.own_bytes = sum(size for at, size in memory.items() if at not in handed_on)
        self.given_bytes = sum(t.nbytes for t in self.state)

    def _run(self) -> Tensors:
        (after,) = self.core.advance(NO_INPUTS, self.k, [self.k + 1], self.state, None)
        return after

    def advance(self) -> None:
        with self.watch.lap():
            self.after += self._run()

    def record(self) -> None:
        with self.watch.lap():
            tape = self.core.record(NO_INPUTS, self.k, self.k + 1, [*self.state], None)
        self.after += tape.state_after
        tape.state_after = []
        self.tape.append(tape)
        if self.last:
            self.for_caller += self.after

    def seed(self) -> None:
        self.gradients += _ones(self.core.links[self.k])

    def backpropagate(self) -> None:
        with self.watch.lap():
            gradients = self.core.gradients(self.gradients)
            self.gradients.clear()
            self.core.backpropagate(self.tape.pop(), gradients)
        self.gradients += gradients.states
        self.for_caller += gradients.parameters
        if self.k == 0:
            self.for_caller += gradients.states

    def size(self, phases: Sequence[Phase], before: int) -> _Size:
        """What the phases showed; ``before`` is what the gradient of the input is taken to be."""
        _, advance, _, record, less_input, less_output, _, back, _, _ = phases
        first = self.k * len(phases) + 1  # what there was before is not the link's
        last = first + len(phases) - 2  # what is let go of then is the caller's
        output, recorded = advance.growth(), record.growth(first, last)
        gradient = min(self.given_bytes, before) if self.k else 0  # else it is the caller's
        backward = back.peak(first, last)
        ones = sum(int(t.nbytes) for t in _ones(self.core.links[self.k]) if t is not None)
        return _Size(
            output_bytes=output,
            output_gradient_bytes=max(output, ones),
            internal_bytes=recorded + output if self.last else recorded,
            forward_transient_bytes=advance.peak() - output,
            record_transient_bytes=record.peak(first, last) - recorded,
            backward_transient_bytes=max(0, backward - gradient),
            release_bytes=max(0, backward - back.peak(before=last)) if self.k else 0,
            keeps_input=self.own_bytes + less_input.growth() > 0,
            keeps_output=output + less_output.growth() > 0,
        )


def _measure_links(core: ChainCore, first: Tensors) -> tuple[list[_Size], Seconds]:
    """Measure link after link: bytes, and seconds that the watching is a part of."""
    measured: list[_LinkMeasurement] = []
    for k in range(len(core.links)):
        take = measured[-1].give if k else lambda: [t.clone() for t in first]
        measured.append(_LinkMeasurement(core, k, take))
    phases = [one.phases() for one in measured]
    found = iter(measure_phases([*chain(*phases)], device=core.ambient.device))
    sizes: list[_Size] = []
    for one, own in zip(measured, phases, strict=True):
        before = sizes[-1].output_gradient_bytes if sizes else 0
        sizes.append(one.size([*islice(found, len(own))], before))
    return sizes, _forward_and_backward(one.watch for one in measured)


def _seconds(core: ChainCore, state: Tensors) -> Seconds:
    """The seconds of each link, with memory not watched. A link is recorded only after the next one
    was run, since its data would otherwise still be in the cache."""
    watches = [Stopwatch(core.ambient.device) for _ in core.links]
    before: Tensors = []
    state = [*state]
    for k, watch in enumerate(watches):
        with watch.lap():
            core.advance(NO_INPUTS, k, [k + 1], state, None)
        if k:
            _back(core, k - 1, before, watches[k - 1])
        # Once more, for its output was not held meanwhile.
        (after,) = core.advance(NO_INPUTS, k, [k + 1], state, None)
        before, state = state, after
    _back(core, len(watches) - 1, before, watches[-1])
    return _forward_and_backward(watches)


def _back(core: ChainCore, k: int, state: Tensors, watch: Stopwatch) -> None:
    """Time recording a link, and going back through it; its input is let go of."""
    with watch.lap():
        tape = core.record(NO_INPUTS, k, k + 1, state, None)
        tape.state_after = []
    gradients = core.gradients(_ones(core.links[k]))
    with watch.lap():
        core.backpropagate(tape, gradients)


def _forward_and_backward(watches: Iterable[Stopwatch]) -> Seconds:
    """Forward; and backward, with what recording takes longer."""
    laps = (watch.seconds for watch in watches)
    return [(forward, backward + max(0.0, record - forward)) for forward, record, backward in laps]


def _ones(link: Link) -> list[Gradient]:
    """A gradient of a link's output."""
    return [
        torch.ones(shape, dtype=dtype, device=device) if passes else None
        for (shape, dtype, device), passes in zip(link.like, link.passes, strict=True)
    ]


def _medians(
    links: Sequence[Link], sizes: Sequence[_Size], seconds: Sequence[Seconds]
) -> tuple[list[float], list[float]]:
    """Median forward and backward seconds, over repeats and over links of equal make and size.
    Differences between equal links are noise, which a solver would exploit."""
    makes: list[Hashable] = [
        (str(link.layers), tuple(p.shape for p in link.own), link.like, size)
        for link, size in zip(links, sizes, strict=True)
    ]
    times: dict[Hashable, Seconds] = defaultdict(list)
    for each in seconds:
        for make, pair in zip(makes, each, strict=True):
            times[make].append(pair)
    forward, backward = (
        {make: statistics.median(pair[way] for pair in pairs) for make, pairs in times.items()}
        for way in (0, 1)
    )
    return [forward[make] for make in makes], [backward[make] for make in makes]


def _overhead(links: Links, device: torch.device) -> int:
    """What is held from first to last: what the prefix made, what first runs began with, tokens."""
    snapshots = [link.ambient.capture() for link in links.chain]
    ours = (t for snapshot in snapshots for t in snapshot if t.is_cuda == (device.type == "cuda"))
    tokens = sum(len(link.like) for link in links.chain) * _TOKEN_BYTES
    handed = {at for link in links.chain for at in link.hands_on if at < len(links.prefix) - 1}
    handed.update(range(len(links.prefix))[-1:])
    prefix = sum(links.prefix[at].output_bytes for at in handed)
    held = sum(link.ambient.place_bytes for link in links.chain)
    return tokens + prefix + held + sum(int(t.nbytes) for t in ours)
