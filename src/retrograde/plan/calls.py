"""Calls of layers in a row: what each takes, and how a plan keeps them.

A call is kept in one of several *ways*: whole, lean, or dropped and run again. Calls in a row may
also form a *group*. A group holds its first input alone. Backward, it runs forward once more, and
its parts then follow a plan of their own (:mod:`retrograde.plan.call_planner`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Way:
    """A way to keep a call for its backward pass."""

    held_bytes: int  # what it holds until then, without its input and its output
    first_bytes: int  # its peak in the forward pass, with what it holds and its output
    backward_bytes: int  # its peak in the backward pass, with what it held
    seconds: float = 0.0  # its time beyond that of the first way
    again_seconds: float = 0.0  # the same if the call is kept so when a group runs again
    keeps_input: bool = True  # whether it holds its input
    keeps_output: bool = False  # whether it holds its output, the next call's input
    dropped: bool = False  # whether it holds nothing, and runs again


@dataclass(frozen=True)
class CallSizes:
    """Bytes and seconds of one call. The first way is ordinary backpropagation's."""

    input_bytes: int  # of its input
    output_bytes: int  # of its output
    forward_bytes: int  # its peak without a graph, with its output
    forward_seconds: float  # the time of its forward pass
    ways: tuple[Way, ...]  # in which it may be kept
    noted_bytes: int = 0  # what it notes to run again, such as random states
    left_bytes: int = 0  # what it leaves in attributes
    # Whether it hands on a gradient whose memory is not in order: where the given one's is, and
    # where it is not.
    reorders_gradient: tuple[bool, ...] = (False, False)
    reorder_bytes: int = 0  # what the backward pass takes more in the second case
    aliases_input: bool = False  # whether its result shares memory with what it is given
    handed_bytes: int = 0  # of that, what the call before made
    ordinary_seconds: float = 0.0  # the time of a pass both ways, without a plan
    # The gradient of its output, and what its backward pass makes of that before it reads anything
    # saved. These are held while a group runs again.
    gradient_bytes: int = 0
    gradient_slack_bytes: int = 0  # of the memory of a gradient that it hands on, beyond its own
    packed_bytes: int = 0  # of its input as bits, as which a group holds zeros and ones; else 0
    # Whether its input is the caller's, not the output of the call before. No group passes it.
    starts_row: bool = False

    def group_bytes(self, is_held: bool | int) -> tuple[int, int]:
        """Return what a group holds of its first input, and what it takes more while that is no
        longer held as bits."""
        new_bytes = 0 if is_held else self.input_bytes
        return (self.packed_bytes, self.input_bytes) if self.packed_bytes else (new_bytes, 0)

    def beside(self, more: int) -> "CallSizes":
        """Return the sizes if others keep some bytes from its forward pass until it goes back."""
        ways = (
            replace(w, held_bytes=w.held_bytes + more, backward_bytes=w.backward_bytes + more)
            for w in self.ways
        )
        return replace(self, ways=tuple(ways), noted_bytes=self.noted_bytes + more)

    def first_beside(self, more: int) -> "CallSizes":
        """Return the sizes if others keep some bytes while it first runs."""
        ways = (replace(way, first_bytes=way.first_bytes + more) for way in self.ways)
        return replace(self, ways=tuple(ways), forward_bytes=self.forward_bytes + more)

    def held_back(self, waits: int, copied: int = 0) -> "CallSizes":
        """Return the sizes if the given gradient takes more bytes, or has to be copied."""
        ways = (replace(w, backward_bytes=w.backward_bytes + waits + copied) for w in self.ways)
        return replace(self, ways=tuple(ways), gradient_bytes=self.gradient_bytes + waits)


class OutputLifetime(NamedTuple):
    """When a row's output is freed and when its gradient arrives, as indices of later rows. The
    gradient's memory may be ``slack`` times as large as the gradient."""

    first_run_after: int
    gradient_ready_before: int
    slack: float = 1.0

    def among(self, rows: Sequence[int]) -> "OutputLifetime":
        """Return the same where only some rows run."""
        return OutputLifetime(bisect_left(rows, self[0]), bisect_left(rows, self[1]), self.slack)


def one_after_the_other(
    rows: Sequence[Sequence[CallSizes]], waits: Sequence[OutputLifetime]
) -> list[CallSizes]:
    """Return the calls of several rows, which run in turn, and go back in the opposite order. The
    first input of all and the last output are the caller's."""
    calls: list[CallSizes] = []
    for number, row in enumerate(rows):
        outputs = [(rows[r][-1].gradient_bytes, waits[r]) for r in range(number)]
        ahead = sum(size for size, wait in outputs if number < wait.first_run_after)
        back = sum(int(size * wait.slack) for size, wait in outputs if number < wait[1])
        row_calls = [call.first_beside(ahead).held_back(back) for call in row]
        calls += [replace(row_calls[0], starts_row=bool(calls)), *row_calls[1:]]
        slack_bytes = row[-1].gradient_bytes * max(0.0, waits[number].slack - 1)
        last = calls[-1].held_back(int(slack_bytes))
        ways = (replace(w, held_bytes=after(last, w), keeps_output=False) for w in last.ways)
        calls[-1] = replace(last, output_bytes=0, ways=tuple(ways))
    return calls


@dataclass(frozen=True)
class Part:
    """A call that is kept in a way, or a group of calls with parts of its own."""

    start: int
    stop: int
    way: int = 0
    parts: tuple["Part", ...] = ()

    def moved(self, by: int) -> "Part":
        """Return the same part of calls that have other numbers."""
        inside = tuple(part.moved(by) for part in self.parts)
        return Part(self.start + by, self.stop + by, self.way, inside)


def kept_whole(calls: Sequence[CallSizes]) -> tuple[Part, ...]:
    """Return ordinary backpropagation's plan."""
    return tuple(Part(i, i + 1) for i in range(len(calls)))


def peak_of(calls: Sequence[CallSizes], parts: Sequence[Part], *, grouped: bool = False) -> int:
    """Return the peak bytes of a plan, without the first input and the last output, which are the
    caller's. If ``grouped``, it is the plan of a group, which runs again."""
    peak = 0 if grouped else left_bytes(calls)
    waits = calls[parts[-1].stop - 1].gradient_bytes if grouped else 0
    left, by_part = peak, _held(calls, parts, grouped)[0]
    for part, (before, base) in zip(parts, by_part, strict=True):
        way = calls[part.start].ways[part.way]
        if part.parts:
            inside = peak_of(calls, part.parts, grouped=True)
            more = calls[part.start].group_bytes(False)[1]
            most = base + max(waits + more + _runs(calls[part.start : part.stop]), inside)
        elif part is parts[-1] and grouped and way.dropped:
            most = base + way.backward_bytes
        else:
            most = max(before + waits + way.first_bytes, base + way.backward_bytes)
        peak = max(peak, left + most)
    return peak


def held_of(calls: Sequence[CallSizes], parts: Sequence[Part]) -> int:
    """Return what the calls of a row hold after its forward pass, its first input aside."""
    return _held(calls, parts, grouped=False)[1]


def _held(
    calls: Sequence[CallSizes], parts: Sequence[Part], grouped: bool
) -> tuple[list[tuple[int, int]], int]:
    """Return what is held while each part runs forward, with its input, and while it goes back.
    The second is what is held at the end."""
    # Whether the input of a part is held already, and not as bits.
    is_held = not (grouped and calls[parts[0].start].packed_bytes)
    by_part, held = [], 0
    for part in parts:
        call, way = calls[part.start], calls[part.start].ways[part.way]
        before = held + (0 if is_held else call.input_bytes)
        if part.parts:
            noted = 0 if grouped else sum(c.noted_bytes for c in calls[part.start : part.stop])
            base = held = held + call.group_bytes(is_held)[0] + noted
            is_held = False
        else:
            base = before if way.keeps_input else held
            held = base + after(call, way)
            is_held = way.keeps_output
        by_part.append((before, base))
    return by_part, held


def _runs(calls: Sequence[CallSizes]) -> int:
    """Return the peak of running calls one after the other without a graph, the first input
    aside."""
    inputs = [0, *(call.input_bytes for call in calls[1:])]
    return max(call.forward_bytes + size for call, size in zip(calls, inputs, strict=True))


def left_bytes(calls: Sequence[CallSizes]) -> int:
    return sum(call.left_bytes for call in calls)


def seconds_of(
    calls: Sequence[CallSizes], parts: Sequence[Part], *, grouped: bool = False
) -> float:
    """Return the time of a plan beyond ordinary backpropagation's."""
    total = 0.0
    for part in parts:
        way = calls[part.start].ways[part.way]
        if grouped and (part.parts or way.dropped) and part is not parts[-1]:
            total += sum(call.forward_seconds for call in calls[part.start : part.stop])
        if part.parts:
            total += seconds_of(calls, part.parts, grouped=True)
        else:
            total += way.seconds if way.dropped or not grouped else way.again_seconds
    return total


def after(call: CallSizes, way: Way) -> int:
    """Return what a call holds after its forward pass, besides its input."""
    return way.held_bytes + (call.output_bytes if way.keeps_output else 0)
