"""What the links of a chain take: bytes as they are allocated, seconds as they pass.

Both are found by the core's own functions, link by link: one that keeps nothing, one that is
recorded, one that is backpropagated. What a tape refers to is found by letting go of the link's
input, and of its output, and looking what is released.
"""

import statistics
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, UntypedStorage

from retrograde.cores.chain.chain_core import ChainCore, LinkTape
from retrograde.cores.chain.links import Link, Links
from retrograde.machine import now
from retrograde.measure.allocations import measure_phases
from retrograde.run.core import Gradients
from retrograde.run.inputs import Held
from retrograde.run.layout import Straight
from retrograde.schedule import Chain

__all__ = ["measure_chain", "prefix_bytes"]

Tensors = list[Tensor]
Gradient = Tensor | None
_NO_INPUTS = Held([])
_TOKEN_BYTES = 8  # an element for each state of the chain, in the caller's graph


def measure_chain(links: Links, state: Tensors, repeats: int = 3) -> Chain:
    """Measure every link of a chain, and leave no trace of it.

    Args:
        links: as examined for an input like this.
        state: the flat input.
        repeats: how often seconds are taken; medians are told.

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
        sizes: list[_Size] = []
        for k, before in _states(core, first):
            sizes.append(_sizes(core, k, before, sizes[-1].gradient if k else 0))
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

        return measure_phases([run], device=state[0].device)[0][0]


def _states(core: ChainCore, state: Tensors) -> Iterator[tuple[int, Tensors]]:
    """Link after link, and the state before it; what is done with them are reruns."""
    for k in range(len(core.links)):
        (after,) = core.advance(_NO_INPUTS, k, [k + 1], state, None)
        yield k, state
        state = after


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


@dataclass
class _Held:
    """What is held while the bytes of a link are measured."""

    state: Tensors = field(default_factory=list)
    after: Tensors = field(default_factory=list)
    passed: list[UntypedStorage] = field(default_factory=list)
    passed_bytes: int = 0
    tape: list[LinkTape] = field(default_factory=list)
    seeds: list[Gradient] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    for_caller: list[Gradient] = field(default_factory=list)


def _sizes(core: ChainCore, k: int, state: Tensors, before: int) -> _Size:
    """Measure link k; ``before`` is what the gradient of its input is taken to be."""
    phases, held = _phases(core, k, state), _Held()
    device = core.ambient.device
    found = measure_phases([partial(phase, held) for phase in phases], device=device, working=True)
    (_, given), (forward, output), _, (record, recorded), (_, less_input), (_, less_output) = found[
        :6
    ]
    (alone, _), (backward, _) = found[7], found[-2]
    last = k == len(core.links) - 1
    tape = recorded if last else recorded - output
    gradient = min(given, before) if k else 0  # that of the chain's input is the caller's
    return _Size(
        output=output,
        gradient=max(output, sum(int(t.nbytes) for t in _ones(core.links[k]) if t is not None)),
        internal=tape + output,
        forward=forward - output,
        record=record - recorded,
        backward=max(0, backward - gradient),
        release=backward - alone if k else 0,
        keeps_input=given - held.passed_bytes + less_input > 0,
        keeps_output=output + less_output > 0,
    )


def _phases(core: ChainCore, k: int, state: Tensors) -> list[Callable[[_Held], None]]:
    """One after the other: what a link does, and what lets go of what it needed."""
    link, last = core.links[k], k == len(core.links) - 1

    def give(held: _Held) -> None:
        held.state = [t.clone() for t in state]

    def advance(held: _Held) -> None:
        (held.after,) = core.advance(_NO_INPUTS, k, [k + 1], held.state, None)
        # What the link hands on as it was given it is neither its input nor its output here.
        given = {t.untyped_storage().data_ptr() for t in held.state}
        after = {s.data_ptr(): s for s in (t.untyped_storage() for t in held.after)}
        held.passed = [s for pointer, s in after.items() if pointer in given]
        held.passed_bytes = sum(s.nbytes() for s in held.passed)

    def record(held: _Held) -> None:
        tape = core.record(_NO_INPUTS, k, k + 1, [*held.state], None)
        held.after, tape.state_after = tape.state_after, []
        held.tape = [tape]
        if last:
            held.for_caller += held.after

    def drop_state(held: _Held) -> None:
        held.state = []

    def drop_after(held: _Held) -> None:
        held.after = []

    def seed(held: _Held) -> None:
        held.seeds = _ones(link)

    def backpropagate(held: _Held) -> None:
        gradients, held.seeds = _gradients(core, held.seeds), []
        core.backpropagate(held.tape.pop(), gradients)
        held.gradients = gradients.states
        held.for_caller += gradients.parameters
        if k == 0:
            held.for_caller += gradients.states

    def drop(held: _Held) -> None:
        held.state, held.seeds, held.gradients, held.passed = [], [], [], []

    # Once with an input that nobody else holds, once with one that is held meanwhile.
    alone = [give, advance, drop_after, record, drop_state, drop_after, seed, backpropagate, drop]
    return [*alone, give, record, drop_after, seed, backpropagate, drop]


def _seconds(core: ChainCore, state: Tensors) -> list[tuple[float, float]]:
    """Of each link: forward; and backward, with what recording takes longer.

    A link is recorded after the next one was run, for else what it needs would still be at hand.
    """
    device, forwards, found = core.ambient.device, [], []
    before: Tensors = []
    for k in range(len(core.links) + 1):
        if k < len(core.links):
            start = now(device)
            (after,) = core.advance(_NO_INPUTS, k, [k + 1], state, None)
            forwards.append(now(device) - start)
        if k:
            record, backward = _back(core, k - 1, before)
            found.append((forwards[k - 1], backward + max(0.0, record - forwards[k - 1])))
        before, state = state, after
    return found


def _back(core: ChainCore, k: int, state: Tensors) -> tuple[float, float]:
    """The seconds to record a link, and to go back through it."""
    device = core.ambient.device
    moments = [now(device)]
    tape = core.record(_NO_INPUTS, k, k + 1, [*state], None)
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
    links: Sequence[Link], sizes: Sequence[_Size], seconds: Sequence[Sequence[tuple[float, float]]]
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
