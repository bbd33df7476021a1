"""Share a loop among torch's own threads.

Between two parallel operations, torch's OpenMP threads spin for milliseconds. Threads of any other
kind would wait for a processor longer than the loops here take. So the loops run on torch's own
team of threads. They enter it from compiled code, by ``GOMP_parallel`` in the OpenMP library that
torch loaded. It is the entry point for compilers in libgomp, libiomp5 and, on Linux, libomp. If it
is not found, one thread runs the whole loop.
"""

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from retrograde.kernels.cpu.llvm.kinds import Args, Builder, Kind, Signature, Target, Value, Written
from retrograde.kernels.cpu.llvm.lanes import Compiled, compiled, intrinsic

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on Linux
    getrusage = None  # type: ignore[assignment]

_INDEX = ir.IntType(64)

Range = tuple[int, int]
Part = tuple[int, ...]
Run = TypeVar("Run", bound=Callable[..., Any])

#: The multiplications for which one more thread pays; they take about a tenth of a millisecond.
THREAD_WORK = 2_000_000
_LONG = 1e-3  # seconds of a call that is long enough to tell
_RAN = 0.75  # the least share of its time for which a thread runs that has a processor of its own
_PAUSES = 0.1, 5.0  # seconds on one thread: the first time, and the most


class _Crew(threading.local):
    """The number of threads that torch has otherwise, while this thread runs on one."""

    size = 0


_crew = _Crew()
_alone = [0.0, _PAUSES[0]]  # until when calls run on one thread, and for how long the next time


def paced(run: Run) -> Run:
    """Let a core's method run on one thread for a while, where others want its processors.

    A parallel region ends when its last thread has had a processor. Beside other busy processes
    that takes milliseconds, whatever the region's own work takes. They are noticed by the calling
    thread: it was ready to run, and did not for a good part of the time. Work is cut into the same
    parts on one thread, and so results have the same bits.
    """
    if getrusage is None:
        return run

    @functools.wraps(run)
    def within(self: Any, *args: Any, **options: Any) -> Any:
        threads = torch.get_num_threads()
        if threads == 1 or self.surroundings.device.type != "cpu":
            return run(self, *args, **options)
        start, ran, switched = _clocks()
        is_alone = start < _alone[0]
        if is_alone:
            _crew.size = threads
            torch.set_num_threads(1)
        try:
            return run(self, *args, **options)
        finally:
            if is_alone:
                torch.set_num_threads(threads)
                _crew.size = 0
            now, *spent = _clocks()
            if now - start > _LONG:
                is_crowded = spent[0] - ran < _RAN * (now - start) and spent[1] > switched
                if is_crowded:
                    _alone[:] = now + _alone[1], min(2 * _alone[1], _PAUSES[1])
                elif not is_alone:
                    _alone[:] = 0.0, _PAUSES[0]

    return within  # type: ignore[return-value]


def _clocks() -> tuple[float, float, int]:
    """Return the time, that for which this thread ran, and how often it was made to stop."""
    return time.perf_counter(), time.thread_time(), getrusage(RUSAGE_THREAD).ru_nivcsw


def ranges(count: int, threads: int) -> list[Range]:
    """Cut 0 … count − 1 into about equal ranges (first, last), one for each thread. ``last`` is
    excluded. All lengths but the last are even. There are at most as many ranges as torch has
    threads, and as there are pairs of items."""
    threads = min(threads, team_size(), count // 2)
    if threads <= 1:
        return [(0, count)]
    bounds = [2 * round(i * count / threads / 2) for i in range(threads)] + [count]
    return list(pairwise(bounds))


def parts_for(count: int, work: int) -> list[Range]:
    """Return ranges of items, for as many threads as pay for the multiplications."""
    return ranges(count, 1 + work // THREAD_WORK)


def numbered(parts: list[Range]) -> list[tuple[int, int, int]]:
    """Return (number, first, last) of the parts, for loops that have memory for each part."""
    return [(number, *part) for number, part in enumerate(parts)]


def team_size() -> int:
    """Return how many threads parallel loops have."""
    return _crew.size or torch.get_num_threads()


def share(loop: Compiled, parts: Sequence[Part], *args: Any, alone: Part | None = None) -> None:
    """Call a compiled ``loop(*args, *part)`` for every part, on the threads of the team. ``alone``
    is the whole index range, for one thread. If it is given, each part gets a thread of its own. If
    there are not so many, one thread runs this part."""
    start, members = _entry() if len(parts) > 1 and not _crew.size else (0, 0)
    if alone is not None:
        parts = [*parts, alone] if start else [alone]
    if _shared(loop)(start, 0 if alone is None else members, np.array(parts, np.intp), args):
        raise RuntimeError(f"{loop.__name__} failed on a thread")


_loop: Compiled = None  # each copy of the function below has one


def _call(start: int, members: int, parts: Kind, args: Kind) -> Kind:
    return _in_team(start, members, parts, _loop, args)


@functools.cache
def _shared(loop: Compiled) -> Compiled:
    """Return a compiled copy of :func:`_call`, which numba caches beside the loop."""
    of, name = loop.py_func.__code__, f"shared_{loop.__name__}"
    code = _call.__code__.replace(co_filename=of.co_filename, co_firstlineno=of.co_firstlineno)
    names = {"_in_team": _in_team, "_loop": loop, "__name__": loop.__module__}
    copy = FunctionType(code, names, name)
    copy.__qualname__ = name
    return compiled(copy)


def _lent(builder: Builder, kind: Kind, value: Value) -> Value:
    """Write the code of arrays without an owner: threads would wait to count who uses them."""
    if isinstance(kind, types.Array):
        return builder.insert_value(value, ir.Constant(value.type.elements[0], None), 0)
    for k in range(len(kind) if isinstance(kind, types.BaseTuple) else 0):
        lent = _lent(builder, kind[k], builder.extract_value(value, k))
        value = builder.insert_value(value, lent, k)
    return value


@intrinsic
def _in_team(
    typing: Target, start: Kind, members: Kind, parts: Kind, loop: Kind, args: Kind
) -> Written:
    """Call ``loop(*args, *part)`` for each row of ``parts``, and return whether a call failed.
    Whoever is free takes the next row. ``start`` is the address of ``GOMP_parallel``, or 0 for one
    thread. ``members`` is that of ``omp_get_num_threads``, or 0. If it is given, a team of too few
    threads for the other rows runs the last row alone."""
    numbers = loop.dispatcher.py_func.__code__.co_argcount - len(args)
    called = loop.get_call_type(typing, (*args.types, *[types.intp] * numbers), {})

    def code(context: Target, builder: Builder, signature: Signature, passed: Args) -> Value:
        word, flag, data, none = _INDEX, ir.IntType(32), ir.IntType(8).as_pointer(), ir.VoidType()
        table = context.make_array(parts)(context, builder, passed[2])
        count = builder.extract_value(table.shape, 0)
        lent = _lent(builder, args, passed[4])
        values = [builder.extract_value(lent, k) for k in range(len(args))]
        taken, failed = word(0), word(0)
        fields = [taken, failed, count, table.data, passed[1], *values]
        layout = ir.LiteralStructType([field.type for field in fields])
        shared = cgutils.alloca_once(builder, layout)
        for k, field in enumerate(fields):
            builder.store(field, cgutils.gep_inbounds(builder, shared, 0, k))

        of_thread = ir.FunctionType(none, [data])
        thread = ir.Function(builder.module, of_thread, builder.module.get_unique_name("thread"))
        thread.linkage = "internal"
        b = ir.IRBuilder(thread.append_basic_block())
        received = b.bitcast(thread.args[0], layout.as_pointer())
        places = [cgutils.gep_inbounds(b, received, 0, k) for k in range(len(fields))]
        _, _, all_rows, table_start, address, *loaded = (b.load(place) for place in places)
        begin, end = (cgutils.alloca_once_value(b, value) for value in (word(0), all_rows))
        with b.if_then(cgutils.is_not_null(b, address)):
            many = b.sub(all_rows, word(1))
            came = b.call(b.inttoptr(address, ir.FunctionType(flag, []).as_pointer()), [])
            is_small = b.icmp_signed("<", b.zext(came, word), many)
            b.store(b.select(is_small, many, word(0)), begin)
            b.store(b.select(is_small, word(1), many), end)
        look, work, done = (b.append_basic_block() for _ in range(3))
        b.branch(look)
        b.position_at_end(look)
        number = b.atomic_rmw("add", places[0], word(1), "monotonic")
        b.cbranch(b.icmp_signed("<", number, b.load(end)), work, done)
        b.position_at_end(work)
        row = b.gep(table_start, [b.mul(b.add(number, b.load(begin)), word(numbers))])
        part = [b.load(b.gep(row, [word(k)])) for k in range(numbers)]
        compilation = loop.dispatcher.get_compile_result(called)
        context.active_code_library.add_linking_library(compilation.library)
        callee = context.declare_function(b.module, compilation.fndesc)
        call = called.return_type, called.args, [*loaded, *part]
        # Inlined, it would be optimized once more, and be slower.
        status, _ = context.call_conv.call_function(b, callee, *call, attrs=("noinline",))
        with cgutils.if_unlikely(b, status.is_error):
            b.store(word(1), places[1])
        b.branch(look)
        b.position_at_end(done)
        b.ret_void()

        to = builder.bitcast(shared, data)
        alone = builder.zext(cgutils.is_not_null(builder, passed[1]), word)
        wanted = builder.trunc(builder.sub(count, alone), flag)
        with builder.if_else(cgutils.is_null(builder, passed[0])) as (by_one, by_many):
            with by_one:
                builder.call(thread, [to])
            with by_many:
                team = ir.FunctionType(none, [of_thread.as_pointer(), data, flag, flag])
                enter = builder.inttoptr(passed[0], team.as_pointer())
                builder.call(enter, [thread, to, wanted, flag(0)])
        return builder.load(cgutils.gep_inbounds(builder, shared, 0, 1))

    return types.intp(types.intp, types.intp, parts, loop, args), code


@functools.cache
def _entry() -> tuple[int, int]:
    """Return the addresses of ``GOMP_parallel`` and ``omp_get_num_threads`` in torch's OpenMP. They
    are 0 if there is no such library."""
    folder = Path(torch.__file__).parent / "lib"
    names = sorted(str(path) for path in folder.glob("lib*omp*.so*"))
    for name in [*names, "libgomp.so.1"]:
        try:
            library = ctypes.CDLL(name)
            functions = library.GOMP_parallel, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        start, members = (ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in functions)
        return start, members
    return 0, 0
