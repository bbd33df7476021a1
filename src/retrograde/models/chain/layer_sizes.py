"""Measurements of the links of a chain: the bytes that they allocate and the seconds that they
take.

Both are measured link by link with the core's own functions: run without recording, record,
backpropagate. To find what a tape refers to, the link's input and then its output are released, and
the memory that this frees is counted.

Measuring holds at most what one link takes, a second copy of its output, and the gradients of its
parameters. For the first link it also holds a copy of its input. If a budget has room for these,
measuring keeps to it.

Links that consist of torch's own modules, are of one make and get tensors of one form are measured
once. The others of that make run only if a link that is not torch's own follows them, because its
input must be real.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retrograde.measure.allocations import Phase, measure_phases
from retrograde.models.chain.chain_core import NO_INPUTS, ChainCore, LinkTape
from retrograde.models.chain.examine import made_up
from retrograde.models.chain.links import Link, Links
from retrograde.run.states import each_once
from retrograde.schedule import Chain
from retrograde.sizes.timing import Stopwatch

__all__ = ["measure_chain", "prefix_bytes"]

Tensors = list[Tensor]
Gradient = Tensor | None
Seconds = list[tuple[float, float]]  # for each link: forward, and backward
_MORE_SECONDS = 0.1  # for timing without counting bytes
_TOKEN_BYTES = 8  # one element for each state of the chain, in the caller's graph


def measure_chain(links: Links, state: Tensors, repeats: int | None = None) -> Chain:
    """Measure every link for a flat input, and leave no trace of it.

    Seconds are medians of ``repeats`` further passes, by default one, and up to three within
    :data:`_MORE_SECONDS`. With no repeats they come from the pass that counts bytes, in which
    kernels may still be compiled.
    """
    device, before = state[0].device, len(links.prefix)
    core = ChainCore(links.chain, device)
    firsts = _firsts(links.chain)
    with ExitStack() as stack:
        for link in (*links.prefix, *links.chain):
            stack.enter_context(link.ambient.measured())
        first = [t.detach() for t in _after_prefix(links, state)]
        found, once, turns = _measure_links(core, first, firsts)
        if turns:
            found, once, _ = _measure_links(core, first, firsts, turned=True)
        seconds = [once]
        if repeats is None:
            more = int(_MORE_SECONDS / max(sum(map(sum, once.values())), 1e-9))
            repeats = min(3, max(1, more))
        if repeats:  # the first pass was timed while memory was watched
            seconds = [_seconds(core, first, firsts) for _ in range(repeats)]
    sizes = [found[one] for one in firsts]
    times = [[each[one] for one in firsts] for each in seconds]
    forward, backward = _medians(links.chain, sizes, times)
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
        hands_on=[  # the prefix's outputs are held anyway
            [at - before + 1 for at in link.hands_on if at >= before] for link in links.chain
        ],
    )


def _firsts(links: Sequence[Link]) -> list[int]:
    """Return, for each link, the first link like it: itself if there is none before it."""
    known: dict[Hashable, int] = {}
    found = []
    for k, link in enumerate(links):
        before = links[k - 1] if k else None
        key: Hashable = k
        if link.make is not None and not link.hands_on and before is not None:
            around = before.passes, before.output_bytes, k == len(links) - 1
            key = link.make, link.laid, link.wanted, link.like, link.output_bytes, around
        found.append(known.setdefault(key, k))
    return found


def _to_run(links: Sequence[Link], firsts: Sequence[int]) -> list[tuple[int, bool]]:
    """Return the links to run, in turn, and whether their input has to be made up."""
    real = max((k for k, link in enumerate(links) if link.make is None), default=0)
    chosen = [k for k, one in enumerate(firsts) if one == k or k < real]
    return [(k, k > 0 and (not n or chosen[n - 1] != k - 1)) for n, k in enumerate(chosen)]


def _after_prefix(links: Links, state: Tensors) -> Tensors:
    with torch.enable_grad():
        return links.enter([t.detach().requires_grad_(t.requires_grad) for t in state])


def prefix_bytes(links: Links, state: Tensors) -> int:
    """Return the peak bytes of the prefix, the links before the first gradient, which run first."""
    with ExitStack() as stack:
        for link in links.prefix:
            stack.enter_context(link.ambient.measured())
        (phase,) = measure_phases([lambda: _after_prefix(links, state)], device=state[0].device)
        return phase.peak()


class _Size(NamedTuple):
    """The bytes of one link, named as in :class:`retrograde.schedule.Chain`."""

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
    """One link, measured phase by phase.

    It alone holds its input, which ``take`` moves here from the previous link. So clearing a list
    shows what memory the link still refers to.
    """

    def __init__(
        self, core: ChainCore, k: int, take: Callable[[], Tensors], *, turned: bool
    ) -> None:
        self.core, self.k, self.take = core, k, take
        self.last = k == len(core.links) - 1
        # The caller's gradient may lie in memory so that a link has to copy it.
        self.turned, self.turns = turned or self.last, False
        self.state: Tensors = []
        self.output: Tensors = []  # for the next link
        self.after: Tensors = []
        self.tape: list[LinkTape] = []
        self.gradients: list[Gradient] = []
        self.for_caller: list[Gradient] = []
        self.watch = Stopwatch(core.ambient.device)

    def phases(self, *, whole: bool) -> list[Callable[[], None]]:
        if not whole:
            return [self.begin, self.state.clear]
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
        """Run the link for the first time; the runs that follow are recomputations."""
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
        self.gradients += _ones(self.core.links[self.k], turned=self.turned)

    def backpropagate(self) -> None:
        with self.watch.lap():
            gradients = self.core.gradients(self.gradients)
            self.gradients.clear()
            self.core.backpropagate(self.tape.pop(), gradients)
        self.turns = any(g is not None and not g.is_contiguous() for g in gradients.states)
        self.gradients += gradients.states
        self.for_caller += gradients.parameters
        if self.k == 0:
            self.for_caller += gradients.states

    def size(self, phases: Sequence[Phase], number: int, before: int) -> _Size:
        """Return the sizes that the phases showed.

        ``number`` is the index of the first phase. ``before`` is the size that the gradient of the
        input is taken to have.
        """
        _, advance, _, record, less_input, less_output, _, back, _, _ = phases[:10]
        first = number + 1  # memory held earlier is not the link's
        last = first + 8  # memory released then is the caller's
        output, recorded = advance.growth(), record.growth(first, last)
        gradient = min(self.given_bytes, before) if self.k else 0  # link 0's is the caller's
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


def _measure_links(
    core: ChainCore,
    first: Tensors,
    firsts: Sequence[int],
    *,
    turned: bool = False,
) -> tuple[dict[int, _Size], dict[int, tuple[float, float]], bool]:
    """Measure the first link of every make: bytes, and seconds that include counting the bytes.

    The last link gets a gradient with reversed strides, and with ``turned`` every link. The third
    result says whether the last link hands such strides on.
    """
    run: list[_LinkMeasurement] = []
    phases: list[list[Callable[[], None]]] = []
    for k, apart in _to_run(core.links, firsts):
        take: Callable[[], Tensors] = partial(made_up, core.links[k].laid)
        if not k:
            take = partial(each_once, Tensor.clone, first)
        elif not apart:
            take = run[-1].give
        if run and apart:
            phases[-1].append(run[-1].output.clear)
        run.append(_LinkMeasurement(core, k, take, turned=turned))
        phases.append(run[-1].phases(whole=firsts[k] == k))
    found = iter(measure_phases([*chain(*phases)], device=core.ambient.device))
    sizes: dict[int, _Size] = {}
    number = 0
    for one, own in zip(run, phases, strict=True):
        seen = [*islice(found, len(own))]
        if firsts[one.k] == one.k:
            before = sizes[firsts[one.k - 1]].output_gradient_bytes if one.k else 0
            sizes[one.k] = one.size(seen, number, before)
        number += len(own)
    seconds = _forward_and_backward(one.watch for one in run if one.k in sizes)
    return sizes, dict(zip(sizes, seconds, strict=True)), run[-1].turns


def _seconds(
    core: ChainCore, first: Tensors, firsts: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """Return the seconds of the same links while memory is not watched.

    A link is recorded only after the next one was run. Otherwise its data would still be in the
    cache.
    """
    watches: dict[int, Stopwatch] = {}
    pending: list[tuple[int, Tensors]] = []
    state = [*first]
    for k, apart in _to_run(core.links, firsts):
        if apart:
            state = []  # the previous link's output is released first
            state = made_up(core.links[k].laid)
        watch = Stopwatch(core.ambient.device)
        with watch.lap():
            core.advance(NO_INPUTS, k, [k + 1], state, None)
        if pending:
            _back(core, *pending.pop(), watches)
        # The link runs once more, because its output was not held in the meantime.
        (after,) = core.advance(NO_INPUTS, k, [k + 1], state, None)
        if firsts[k] == k:
            watches[k] = watch
            pending.append((k, state))
        state = after
        del after
    if pending:
        _back(core, *pending.pop(), watches)
    return dict(zip(watches, _forward_and_backward(watches.values()), strict=True))


def _back(core: ChainCore, k: int, state: Tensors, watches: dict[int, Stopwatch]) -> None:
    """Time recording a link and backpropagating it; its input is released."""
    watch = watches[k]
    with watch.lap():
        tape = core.record(NO_INPUTS, k, k + 1, state, None)
        tape.state_after = []
    gradients = core.gradients(_ones(core.links[k]))
    with watch.lap():
        core.backpropagate(tape, gradients)


def _forward_and_backward(watches: Iterable[Stopwatch]) -> Seconds:
    """Return the forward seconds, and the backward seconds plus the extra cost of recording."""
    laps = (watch.seconds for watch in watches)
    return [(forward, backward + max(0.0, record - forward)) for forward, record, backward in laps]


def _ones(link: Link, *, turned: bool = False) -> list[Gradient]:
    """Return a gradient of a link's output, made of ones; ``turned`` has its strides reversed."""
    order = -1 if turned else 1
    ones = [
        torch.ones(shape[::order], dtype=dtype, device=device) if passes else None
        for (shape, dtype, device), passes in zip(link.like, link.passes, strict=True)
    ]
    return [g.permute(*reversed(range(g.dim()))) if turned and g is not None else g for g in ones]


def _medians(
    links: Sequence[Link], sizes: Sequence[_Size], seconds: Sequence[Seconds]
) -> tuple[list[float], list[float]]:
    """Return median forward and backward seconds, over repeats and links of equal make and size.

    Differences between equal links are noise, which a solver would exploit.
    """
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
    """Return the bytes that are held from first to last.

    These are the prefix's output, the surroundings at first runs, and tokens.
    """
    snapshots = [link.ambient.capture() for link in links.chain]
    ours = (t for snapshot in snapshots for t in snapshot if t.is_cuda == (device.type == "cuda"))
    tokens = sum(len(link.like) for link in links.chain) * _TOKEN_BYTES
    handed = {at for link in links.chain for at in link.hands_on if at < len(links.prefix) - 1}
    handed.update(range(len(links.prefix))[-1:])
    prefix = sum(links.prefix[at].output_bytes for at in handed)
    held = sum(left.nbytes for link in links.chain for left in link.ambient.left)
    return tokens + prefix + held + sum(int(t.nbytes) for t in ours)
