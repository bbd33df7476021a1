"""What the links of a chain take: bytes as they are allocated, seconds as they pass.

Both are found by the core's own functions, link by link: one that keeps nothing, one that is
recorded, one that is backpropagated. What a tape refers to is found by letting go of the link's
input, and of its output, and looking what is released.

No more is held meanwhile than one link takes, its output once more, the gradients of its parameters
and, for the first link, a copy of its input. A budget that has room for these is kept meanwhile.
"""

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice, pairwise

import torch
from torch import Tensor

from retrograde.cores.chain.chain_core import ChainCore, LinkTape
from retrograde.cores.chain.links import Link, Links
from retrograde.machine import now
from retrograde.measure.allocations import Phase, measure_phases
from retrograde.run.core import Gradients
from retrograde.run.inputs import Held
from retrograde.run.layout import Straight
from retrograde.schedule import Chain

__all__ = ["measure_chain", "prefix_bytes"]

Tensors = list[Tensor]
Gradient = Tensor | None
_NO_INPUTS = Held([])
Seconds = list[tuple[float, float]]  # of each link: forward, and backward
_MORE_SECONDS = 0.5  # for timing alone
_TOKEN_BYTES = 8  # an element for each state of the chain, in the caller's graph


def measure_chain(links: Links, state: Tensors, repeats: int | None = None) -> Chain:
    """Measure every link of a chain, and leave no trace of it.

    Args:
        links: as examined for an input like this.
        state: the flat input.
        repeats: how often seconds are taken besides, medians being told; by default up to three
            times, as far as they take no more than :data:`_MORE_SECONDS`.

    Returns:
        The chain, of as many layers as there are links.
    """
    device = state[0].device
    core = ChainCore(links.chain, device)
    with ExitStack() as stack:
        for link in (*links.prefix, *links.chain):
            stack.enter_context(link.ambient.measured())
        with torch.no_grad():
            first = [t.detach() for t in state]
            for link in links.prefix:
                first = link.run(first)
        sizes, once = _trials(core, first)
        seconds = [once]
        if repeats is None:
            repeats = min(3, int(_MORE_SECONDS / max(sum(map(sum, once)), 1e-9)))
        if repeats:  # the others were taken while memory was watched
            seconds = [_seconds(core, first) for _ in range(repeats)]
    forward, backward = _medians(links.chain, sizes, seconds)
    return Chain(
        forward_seconds=forward,
        backward_seconds=backward,
        output_bytes=[size.output for size in sizes],
        output_gradient_bytes=[size.gradient for size in sizes],
        internal_bytes=[size.internal for size in sizes],
        forward_transient_bytes=[size.forward for size in sizes],
        backward_transient_bytes=[size.backward for size in sizes],
        record_transient_bytes=[size.record for size in sizes],
        release_bytes=[max(0, size.release) for size in sizes],
        keeps_input=[size.keeps_input for size in sizes],
        keeps_output=[size.keeps_output for size in sizes],
        names=[link.name for link in links.chain],
        input_bytes=sum(t.nbytes for t in state),
        overhead_bytes=_overhead(links, core, device),
        hands_on=[_states_of(link, len(links.prefix)) for link in links.chain],
    )


def _states_of(link: Link, prefix: int) -> list[int]:
    """The states of the chain that a link hands on; what the prefix made is held anyhow."""
    return [at - prefix + 1 for at in link.hands_on if at >= prefix]


def prefix_bytes(links: Links, state: Tensors) -> int:
    """What the links before the first gradient take at their peak, before the others begin.

    Args:
        links: as examined for an input like this.
        state: the flat input.

    Returns:
        Bytes.
    """
    with ExitStack() as stack, torch.no_grad():
        for link in links.prefix:
            stack.enter_context(link.ambient.measured())

        def run() -> None:
            inside = [t.detach() for t in state]
            for link in links.prefix:
                inside = link.run(inside)

        return measure_phases([run], device=state[0].device)[0].peak()


@dataclass(frozen=True)
class _Size:
    """Bytes of one link, as :class:`retrograde.schedule.Chain` has them; the transient ones by
    what is going on."""

    output: int
    gradient: int
    internal: int
    forward: int
    record: int
    backward: int
    release: int
    keeps_input: bool
    keeps_output: bool


class _Trial:
    """One link, phase by phase: what it does, and what lets go of what it needed.

    Nobody else holds its input. The link before gives it, and the link behind takes its output.
    """

    def __init__(self, core: ChainCore, k: int, take: Callable[[], Tensors]) -> None:
        self.core, self.k, self.take = core, k, take
        self.last = k == len(core.links) - 1
        self.state: Tensors = []
        self.output: Tensors = []  # for the link behind
        self.after: Tensors = []
        self.tape: list[LinkTape] = []
        self.gradients: list[Gradient] = []
        self.for_caller: list[Gradient] = []
        self.moments: list[float] = []

    def phases(self) -> list[Callable[[], None]]:
        return [
            self.begin, self.advance, self.drop_after, self.record, self.drop_state,
            self.drop_after, self.seed, self.backpropagate, self.drop_gradients, self.hand_over,
        ]  # fmt: skip

    def give(self) -> Tensors:
        state, self.output = self.output, []
        return state

    def begin(self) -> None:
        """Run the link the first time; what follows are reruns."""
        self.state = self.take()
        (self.output,) = self.core.advance(_NO_INPUTS, self.k, [self.k + 1], self.state, None)
        memory = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in self.state)}
        handed_on = {t.untyped_storage().data_ptr() for t in self.output}
        self.own_bytes = sum(size for at, size in memory.items() if at not in handed_on)
        self.given_bytes = sum(t.nbytes for t in self.state)

    def advance(self) -> None:
        with self._timed():
            (self.after,) = self.core.advance(_NO_INPUTS, self.k, [self.k + 1], self.state, None)

    def record(self) -> None:
        with self._timed():
            tape = self.core.record(_NO_INPUTS, self.k, self.k + 1, [*self.state], None)
        self.after, tape.state_after = tape.state_after, []
        self.tape = [tape]
        if self.last:
            self.for_caller += self.after

    def drop_state(self) -> None:
        self.state = []

    def drop_after(self) -> None:
        self.after = []

    def seed(self) -> None:
        self.gradients = _ones(self.core.links[self.k])

    def backpropagate(self) -> None:
        with self._timed():
            gradients, self.gradients = _gradients(self.core, self.gradients), []
            self.core.backpropagate(self.tape.pop(), gradients)
        self.gradients = gradients.states
        self.for_caller += gradients.parameters
        if self.k == 0:
            self.for_caller += gradients.states

    def drop_gradients(self) -> None:
        self.gradients = []

    def hand_over(self) -> None:
        self.for_caller = []

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = now(self.core.ambient.device)
        yield
        self.moments.append(now(self.core.ambient.device) - start)

    @property
    def seconds(self) -> tuple[float, float]:
        """Forward; and backward, with what recording takes longer."""
        forward, record, backward = self.moments
        return forward, backward + max(0.0, record - forward)

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
            output=output,
            gradient=max(output, ones),
            internal=recorded + output if self.last else recorded,
            forward=advance.peak() - output,
            record=record.peak(first, last) - recorded,
            backward=max(0, backward - gradient),
            release=backward - back.peak(before=last) if self.k else 0,
            keeps_input=self.own_bytes + less_input.growth() > 0,
            keeps_output=output + less_output.growth() > 0,
        )


def _trials(core: ChainCore, first: Tensors) -> tuple[list[_Size], Seconds]:
    """Measure link after link: bytes, and seconds that the watching is a part of."""
    trials: list[_Trial] = []
    for k in range(len(core.links)):
        take = trials[-1].give if k else lambda: [t.clone() for t in first]
        trials.append(_Trial(core, k, take))
    phases = [trial.phases() for trial in trials]
    found = iter(measure_phases([*chain(*phases)], device=core.ambient.device))
    sizes: list[_Size] = []
    for trial, own in zip(trials, phases, strict=True):
        before = sizes[-1].gradient if sizes else 0
        sizes.append(trial.size([*islice(found, len(own))], before))
    return sizes, [trial.seconds for trial in trials]


def _seconds(core: ChainCore, state: Tensors) -> Seconds:
    """Of each link: forward; and backward, with what recording takes longer.

    A link is recorded after the next one was run, for else what it needs would still be at hand.
    """
    device, forwards, found = core.ambient.device, [], []
    before: Tensors = []
    state = [*state]
    for k in range(len(core.links) + 1):
        if k < len(core.links):
            start = now(device)
            core.advance(_NO_INPUTS, k, [k + 1], state, None)
            forwards.append(now(device) - start)
        if k:
            record, backward = _back(core, k - 1, before)
            found.append((forwards[k - 1], backward + max(0.0, record - forwards[k - 1])))
        if k < len(core.links):  # once more, for its output was not held meanwhile
            (after,) = core.advance(_NO_INPUTS, k, [k + 1], state, None)
            before, state = state, after
    return found


def _back(core: ChainCore, k: int, state: Tensors) -> tuple[float, float]:
    """The seconds to record a link, and to go back through it; its input is let go of."""
    device = core.ambient.device
    moments = [now(device)]
    tape = core.record(_NO_INPUTS, k, k + 1, state, None)
    tape.state_after = []
    moments.append(now(device))
    gradients = _gradients(core, _ones(core.links[k]))
    moments.append(now(device))
    core.backpropagate(tape, gradients)
    moments.append(now(device))
    record, _, backward = (b - a for a, b in pairwise(moments))
    return record, backward


def _ones(link: Link) -> list[Gradient]:
    """A gradient of a link's output."""
    return [
        torch.ones(shape, dtype=dtype, device=device) if passes else None
        for (shape, dtype, device), passes in zip(link.like, link.passes, strict=True)
    ]


def _gradients(core: ChainCore, states: Sequence[Gradient]) -> Gradients:
    length = len(core.links)
    return Gradients([], list(states), [], [], length, Straight(length, False))


def _medians(
    links: Sequence[Link], sizes: Sequence[_Size], seconds: Sequence[Seconds]
) -> tuple[list[float], list[float]]:
    """Forward and backward, over the repeats and over all links of one make and one size.

    What differs between equal links is chance, and a solver would build on it.
    """
    makes: list[Hashable] = [
        (str(link.layers), tuple(p.shape for p in link.own), link.like, size)
        for link, size in zip(links, sizes, strict=True)
    ]
    times: dict[Hashable, list[tuple[float, float]]] = {}
    for each in seconds:
        for make, pair in zip(makes, each, strict=True):
            times.setdefault(make, []).append(pair)
    found = {
        make: [statistics.median(column) for column in zip(*pairs, strict=True)]
        for make, pairs in times.items()
    }
    forward, backward = zip(*(found[make] for make in makes), strict=True)
    return list(forward), list(backward)


def _overhead(links: Links, core: ChainCore, device: torch.device) -> int:
    """What is held from first to last: what the prefix made, what first runs began with, tokens."""
    snapshots = [link.ambient.capture() for link in links.chain]
    ours = (t for snapshot in snapshots for t in snapshot if t.is_cuda == (device.type == "cuda"))
    tokens = sum(len(link.like) for link in links.chain) * _TOKEN_BYTES
    handed = {at for link in links.chain for at in link.hands_on if at < len(links.prefix) - 1}
    handed.update(range(len(links.prefix))[-1:])
    prefix = sum(links.prefix[at].output_bytes for at in handed)
    held = sum(link.ambient.place_bytes for link in links.chain)
    return tokens + prefix + held + sum(int(t.nbytes) for t in ours)
