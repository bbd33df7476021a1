"""Loops whose threads meet at every step, so that they can share the units of a layer.

Where a batch has few samples, threads that share samples would each read all weights at every step.
Threads that share units read only their own. But they need one another's states, so they meet
once a step. A thread that waits gives its processor to others after a while.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import LANES, intrinsic
from retrograde.kernels.cpu.llvm.threads import Range, share, team_size

#: The type of the bounds of units, and of what :func:`meet` counts.
Counts = NDArray[np.int64]

#: The samples of a batch from which on threads share them: with few weights, and with many.
MANY_SAMPLES = 8, 16
_LARGE = 2**21
#: Of loops that nobody meets.
NOBODY = np.zeros(3, np.int64)
_WORK = 2**17  # the multiplications of a thread between two meetings
_PATIENCE = 1000  # looks, before a processor is given to others


def parts_of_units(samples: int, size: int, gates: int, threads: int = 0) -> int:
    """Return the number of parts into which H units are divided for threads that meet."""
    threads = threads or team_size()
    weights = gates * size**2
    if samples >= MANY_SAMPLES[weights >= _LARGE]:
        return 1
    return max(1, min(threads, samples * weights // _WORK, size // LANES))


@functools.cache
def bounds_of_units(size: int, part_count: int) -> tuple[Counts, int]:
    """Return where the parts of H units begin and end, and how many units the largest has. All ends
    but the last are whole vectors."""
    vectors = -(-size // LANES)
    bounds = np.array([*(vectors * part // part_count * LANES for part in range(part_count)), size])
    return bounds, int(np.diff(bounds).max())


def share_or_meet(loop: Callable[..., None], samples: list[Range], many: int, *args: Any) -> None:
    """Call ``loop(*args, by_units, meeting, *part)`` for ranges of samples, or for
    ``many`` parts of units if these are several."""
    if many > 1:
        meeting = np.array([0, many, _address_of_yield()])
        every = [(number, number + 1) for number in range(many)]
        share(loop, every, *args, True, meeting, alone=(0, many))
    else:
        share(loop, samples, *args, False, NOBODY)


@functools.cache
def _address_of_yield() -> int:
    """Return the address of the C library's ``sched_yield``, or 0."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


@intrinsic
def meet(_: object, meeting: Kind, number: Kind) -> Written:
    """Wait until all threads have come to meeting ``number``, the first of which is 1. ``meeting``
    has the threads that came to any so far, and the threads that take part. Its last number is the
    address of a function that gives the processor to others."""

    def code(context: Target, builder: Builder, signature: Signature, args: Args) -> Value:
        b, word = builder, ir.IntType(64)
        data = context.make_array(signature.args[0])(context, b, args[0]).data
        places = [b.gep(data, [word(k)]) for k in range(3)]
        b.atomic_rmw("add", places[0], word(1), "acq_rel")
        address = b.load(places[2])
        before, look = b.block, b.append_basic_block("look")
        tired, give, done = (b.append_basic_block(name) for name in ("tired", "give", "done"))
        b.branch(look)
        b.position_at_end(look)
        looks = b.phi(word)
        came, parties = (b.load_atomic(place, "acquire", 8) for place in places[:2])
        everyone = b.icmp_signed(">=", came, b.mul(args[1], parties))
        b.cbranch(everyone, done, tired)
        b.position_at_end(tired)
        more = b.add(looks, word(1))
        long = b.icmp_signed(">=", more, word(_PATIENCE))
        b.cbranch(b.and_(long, b.icmp_signed("!=", address, word(0))), give, look)
        b.position_at_end(give)
        function_type = ir.FunctionType(ir.IntType(32), []).as_pointer()
        b.call(b.inttoptr(address, function_type), [])
        b.branch(look)
        for value, block in ((word(0), before), (more, tired), (more, give)):
            looks.add_incoming(value, block)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(meeting, types.int64), code
