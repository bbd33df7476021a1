"""Chains of layers with unequal seconds and bytes (G16, appendix C).

A layer of a chain is a call that is recorded, or that is passed and run again. So a chain is
planned as calls in a row are (:mod:`retrograde.plan.calls`). The schedules searched are
*persistent*: a kept state stays until backpropagation reaches it, and nothing before it is touched
until then. Few chains gain from other schedules.

- ``msm`` may keep hidden and internal states.
- ``hsm`` keeps no internal state while it works on later layers.
- ``ism`` stores no hidden state except the chain's input. It may still start from a state that the
  tape before it refers to.

If every tape refers to both ends and nothing is transient, ``msm`` is appendix C with its start
state counted. Bytes are counted in multiples of their common divisor. A schedule is the fastest if
there are few enough of these for a level each. Otherwise they are rounded up for the plan, and
rounded down for its ``bound``.
"""

from dataclasses import replace
from math import gcd

import numpy as np

from retrograde.errors import BudgetError, ScheduleError
from retrograde.plan.call_planner import MayKeep, fastest, least, least_seconds, level_bytes
from retrograde.plan.calls import CallSizes, Part, Way
from retrograde.plan.steps.unfold import NOTHING, Segments, store_all
from retrograde.schedule import Action, Advance, Backward, Chain, Record, Schedule, simulate
from retrograde.units import Memory, as_bytes, format_bytes

#: The most layers of a chain that is planned.
LONGEST = 400


def plan_chain(
    chain: Chain, memory: Memory | None, policy: str = "msm", *, certify: bool = False
) -> Schedule:
    """Return the fastest persistent schedule of a chain within a budget; with None, store-all.

    Arguments and errors are those of :func:`~retrograde.plan.planner.plan`.

    >>> chain = Chain([1] * 5, [2] * 5, output_bytes=[1] * 5, internal_bytes=[3] * 5)
    >>> schedule = plan_chain(chain, "50%")
    >>> schedule.seconds, schedule.peak, plan_chain(chain, "100%").seconds
    (19.0, 8, 15.0)
    """
    ordinary = store_all(len(chain), chain)
    if memory is None:
        return ordinary
    room = as_bytes(memory, ordinary.peak)
    kinds, (calls, unit) = _kinds(policy), _calls_of(chain)
    if kinds.tapes and room >= ordinary.peak:
        return replace(ordinary, policy=policy, memory=room, bound=ordinary.seconds)
    units = (room - chain.overhead_bytes) // unit
    try:
        parts = fastest(calls, units, kinds)
    except ValueError:
        raise _too_small(chain, room, policy) from None
    schedule = _schedule(chain, parts, policy, room)
    is_best = level_bytes(len(calls) * (len(calls) + 1) // 2, units) == 1
    if not (is_best or certify):
        return schedule
    seconds = schedule.seconds or 0.0
    if not is_best:
        seconds = min(seconds, chain.ordinary_seconds + least_seconds(calls, units, kinds))
    return replace(schedule, bound=seconds)


def chain_minimum(chain: Chain, policy: str = "msm") -> int:
    """Return the smallest budget that a policy can keep, in bytes."""
    kinds, (calls, unit) = _kinds(policy), _calls_of(chain)
    smallest = least(calls, kinds) * unit + chain.overhead_bytes
    return min(smallest, store_all(len(chain), chain).peak) if kinds.tapes else smallest


def _too_small(chain: Chain, room: int, policy: str) -> BudgetError:
    """Return an error that names the smallest budget, and the layer at which it is used up."""
    smallest, (calls, _) = chain_minimum(chain, policy), _calls_of(chain)
    parts = fastest(calls, least(calls, _kinds(policy)), _kinds(policy))
    actions: list[Action] = []
    for action in _schedule(chain, parts, policy, None):
        if isinstance(action, Advance | Record | Backward):
            layers = [type(action)(k, k + 1) for k in range(action.start, action.stop)]
            actions += layers[::-1] if isinstance(action, Backward) else layers
        else:
            actions.append(action)
    apart = Schedule.from_actions(actions, length=len(chain), units=chain)
    layer = getattr(actions[int(np.argmax(simulate(apart).high))], "start", 0)
    return BudgetError(
        f"memory is {room} bytes ({format_bytes(room)}): expected at least {smallest} "
        f"({format_bytes(smallest)}), which layer {chain.names[layer]!r} needs, "
        f"for the policy {policy!r}; give that much, or a smaller batch",
        smallest,
    )


def _kinds(policy: str) -> MayKeep:
    return MayKeep(inputs=policy != "ism", tapes=policy != "hsm")


def _calls_of(chain: Chain) -> tuple[list[CallSizes], int]:
    """Return the layers as calls, and the unit in which their bytes are counted."""
    if len(chain) > LONGEST:
        raise ScheduleError(
            f"the chain has {len(chain)} layers: expected at most {LONGEST}; join neighbouring "
            "layers to blocks"
        )
    state, gradient, tape = chain.state_bytes, chain.gradient_bytes, chain.tape_bytes
    columns = (
        state, gradient, tape, chain.forward_transient_bytes, chain.record_transient_bytes,
        chain.backward_transient_bytes,
    )  # fmt: skip
    unit = max(1, gcd(*(size for column in columns for size in column)))
    state, gradient, tape, running, recording, back = (
        tuple(size // unit for size in column) for column in columns
    )
    calls = []
    for k, seconds in enumerate(chain.forward_seconds):
        waits = gradient[k + 1] if k + 1 < len(chain) else 0
        record, forward = (part[k] + state[k + 1] for part in (recording, running))
        after = tape[k] + state[k + 1] * chain.keeps_output[k]
        backward = after + gradient[k + 1] + gradient[k] + back[k]
        flags = chain.keeps_input[k], chain.keeps_output[k]
        recorded = Way(tape[k], tape[k] + record, backward, 0.0, seconds, *flags)
        again = max(backward, tape[k] + record + waits)
        passed = Way(0, forward, again, seconds, seconds, dropped=True)
        calls.append(
            CallSizes(
                state[k], state[k + 1], forward, seconds, (recorded, passed), gradient_bytes=waits
            )
        )
    return calls, unit


def _schedule(chain: Chain, parts: tuple[Part, ...], policy: str, memory: int | None) -> Schedule:
    """Return the actions of a plan for calls."""
    segments = Segments()

    def number(parts: tuple[Part, ...], *, grouped: bool) -> int:
        rest = NOTHING
        for k in range(len(parts) - 1, -1, -1):
            part, is_last = parts[k], k == len(parts) - 1
            if not part.parts and (part.way == 0 or (grouped and is_last)):
                rest = segments.add(0, 1, rest)
                continue
            inside = number(part.parts, grouped=True) if part.parts else segments.add(0, 1)
            rest = segments.add(part.stop - part.start, -1, rest, inside)
            if k and not (
                parts[k - 1].way == 0
                and not parts[k - 1].parts
                and chain.keeps_output[part.start - 1]
            ):
                rest = segments.add(0, 0, rest)
        return rest

    root = number(parts, grouped=False)
    return segments.schedule(root, length=len(chain), policy=policy, memory=memory, units=chain)
