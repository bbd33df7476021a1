"""Baselines: what people do without a planner, as schedules.

===================  ===========================================  ==========================
policy               keeps                                        forward steps
===================  ===========================================  ==========================
``store-hidden``     every hidden state                           2t − 1
``recompute-all``    the initial state only                       t(t+1)/2
``chen-sqrt``        hidden states between ⌈√t⌉ segments, then    2t − the last segment
                     a segment's internal states
``chen-recursive``   hidden states between k parts, each divided  about t·log_k t
                     in k again, down to parts shorter than k
===================  ===========================================  ==========================

The first two: Gruslys et al. 2016, sections 2.1 and 2.2. The last two: Chen et al., *Training
Deep Nets with Sublinear Memory Cost* (2016), as G16 section 2.2 describes it. Parts differ by at
most one step. The last segment is recorded in the first sweep already, so it is not run twice.

No baseline takes a memory; ``schedule.peak`` gives what it holds, in hidden states (α = 2, β = 1
by default). Where the last part has one step, its start is not stored: the step runs in the working
core. Time and memory are linear in the actions.
"""

from collections.abc import Iterator
from math import isqrt

from retrograde.schedule import Schedule, Units, Verb, merge
from retrograde.schedule.actions import Code

__all__ = ["chen_recursive", "chen_sqrt", "recompute_all", "store_hidden"]

_ADVANCE, _STORE, _RECORD, _LOAD, _FREE, _BACKWARD = (verb.value for verb in Verb)
_UNITS = Units()


def store_hidden(length: int, units: Units = _UNITS) -> Schedule:
    """Keep every hidden state, and run each step once more when it is backpropagated."""
    return _schedule("store-hidden", length, units, _divided(0, range(length + 1), 1))


def recompute_all(length: int, units: Units = _UNITS) -> Schedule:
    """Keep the initial state only, and run from it to each step in turn."""
    return _schedule("recompute-all", length, units, _recomputed(length))


def chen_sqrt(length: int, units: Units = _UNITS) -> Schedule:
    """Keep the hidden states between ⌈√t⌉ segments, and record a segment as a whole."""
    parts = isqrt(length - 1) + 1
    return _schedule("chen-sqrt", length, units, _divided(0, _bounds(length, parts), length))


def chen_recursive(length: int, units: Units = _UNITS, *, segments: int = 2) -> Schedule:
    """Divide into ``segments`` ≥ 2 parts, recursively, until parts are shorter than that."""
    whole = segments - 1
    codes = (
        _recorded(0, length)
        if length <= whole
        else _divided(0, _bounds(length, segments), whole, segments)
    )
    return _schedule("chen-recursive", length, units, codes)


def _schedule(policy: str, length: int, units: Units, codes: Iterator[Code]) -> Schedule:
    whole = [(_STORE, 0, 0), *codes, (_FREE, 0, 0)]
    return merge(Schedule.from_codes(whole, length=length, policy=policy, units=units))


def _bounds(length: int, parts: int) -> list[int]:
    """Return the bounds of ``parts`` parts whose lengths differ by at most one step."""
    return [length * i // parts for i in range(parts + 1)]


def _recorded(start: int, stop: int) -> Iterator[Code]:
    yield _RECORD, start, stop
    yield _BACKWARD, start, stop


def _recomputed(length: int) -> Iterator[Code]:
    for step in reversed(range(length)):
        if step < length - 1:
            yield _LOAD, 0, 0
        if step:
            yield _ADVANCE, 0, step
        yield from _recorded(step, step + 1)


def _divided(base: int, bounds: "list[int] | range", whole: int, parts: int = 0) -> Iterator[Code]:
    """Backpropagate parts from the last to the first, each from its stored start. ``bounds`` are
    relative to ``base``, which is current and stored. Parts of up to ``whole`` steps are recorded
    as a whole; longer ones are divided into ``parts`` again."""
    last = len(bounds) - 2
    for i in range(last):
        start, stop = base + bounds[i], base + bounds[i + 1]
        yield _ADVANCE, start, stop
        if i + 1 < last or bounds[-1] - bounds[-2] > 1:
            yield _STORE, stop, stop
    for i in reversed(range(last + 1)):
        start, steps = base + bounds[i], bounds[i + 1] - bounds[i]
        if i < last:
            yield _LOAD, start, start
        if steps <= whole:
            yield from _recorded(start, start + steps)
        else:
            yield from _divided(start, _bounds(steps, parts), whole, parts)
        if i and (i < last or steps > 1):
            yield _FREE, start, start
