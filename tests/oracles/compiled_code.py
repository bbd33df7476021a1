"""What Triton's compiled code says of memory that a kernel reads and writes over.

The text of the GPU dialect (TTGIR) names the arrays, PTX has the barriers of the hardware. Both are
straight lines within a loop, so the order of lines is the order of execution.
"""

import re
from collections import Counter

#: The kernels that host code launches, by the module of ``kernels/cuda``.
LAUNCHED = {
    "forward_kernels": ("forward",),
    "sweep_kernels": ("carry", "products", "sweep"),
    "slope_kernels": ("gru_slopes", "lstm_slopes"),
    "step_kernels": ("begin", "step"),
}

_DEFINED = re.compile(r"\s*%([\w-]+)(?::\d+)? = ([\w.]+) ([^\n]*)")
_POINTER = {"tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "ttg.convert_layout"}
_READS, _COPIES, _WRITES = "tt.load", "ttg.async_copy_global_to_local", "tt.store"
_BARRIERS = ("gpu.barrier", "ttg.barrier", "tt.debug_barrier")


def _accesses(ir):
    """(operation, array) in the order of the text; a barrier has no array."""
    ir = re.sub(r" loc\([^\n]*", "", ir)
    defined, carried = {}, {}
    for line in ir.splitlines():
        if found := _DEFINED.match(line):
            defined[found[1]] = found[2], re.findall(r"%([\w-]+)", found[3])
        if "iter_args(" in line:
            pairs = re.findall(r"%([\w-]+) = %([\w-]+)", line.split("iter_args(")[1])
            carried.update(pairs)

    def array(name):
        if name in carried:
            return array(carried[name])
        operation, operands = defined.get(name, ("argument", []))
        return array(operands[0]) if operation in _POINTER else name

    for line in ir.splitlines():
        if any(barrier in line for barrier in _BARRIERS):
            yield "barrier", None
        for operation in (_READS, _COPIES, _WRITES):
            if found := re.search(rf"(?<!\S){re.escape(operation)} %([\w-]+)", line):
                yield operation, array(found[1])


def overwritten(ir):
    """The arrays of global memory that are both read and written, by their parameters' names."""
    seen = list(_accesses(ir))
    read, written = (
        {name for operation, name in seen if operation in kinds}
        for kinds in ((_READS, _COPIES), (_WRITES,))
    )
    return sorted(read & written)


def unsafe(ir, ptx, stages):
    """What may be read after another thread has written over it, in words; nothing if all is safe.

    A number is safe if a barrier of the whole program stands between all that read it and what
    writes it. For a load, that is a barrier operation in between. A copy made ahead is read by
    ``cp.async``, is waited for by ``cp.async.wait_group``, which lets at most the copies of later
    steps be under way, and is handed to the other threads by the ``bar.sync`` after that.
    """
    names, seen = overwritten(ir), list(_accesses(ir))
    found = _copies_not_waited_for(ptx, stages) if names else []
    for name in names:
        begun = False  # loads since the last barrier
        for operation, array in seen:
            if operation == "barrier":
                begun = False
            elif (operation, array) == (_READS, name):
                begun = True
            elif (operation, array) == (_WRITES, name) and begun:
                found.append(f"{name} is loaded and written with no barrier between")
        if (_READS, name) in seen and (_COPIES, name) in seen:
            found.append(f"{name} is read in two ways")
    return found


def _copies_not_waited_for(ptx, stages):
    """Of the loop that copies ahead: that it waits before it writes, for enough, by all threads."""
    order = re.findall(
        r"cp\.async\.(?:commit|wait)_group\s*\d*|bar\.sync|st\.global|\$L__BB\w+:", ptx
    )
    waits = [i for i, one in enumerate(order) if "wait_group" in one]
    if not waits:
        return []
    loop = waits[0]  # the wait in the loop; the last one, for nothing, is behind it
    start = max(i for i in range(loop) if order[i].startswith("$L"))
    end = min((i for i in range(loop, len(order)) if order[i].startswith("$L")), default=len(order))
    body, allowed = order[start:end], int(order[loop].split()[-1])
    each = sum("commit_group" in one for one in body)
    first = next((i for i in range(start, end) if order[i] == "st.global"), end)
    found = []
    if first < loop or "bar.sync" not in order[loop:first]:
        found.append("global memory is written before the copies are waited for by all threads")
    if each == 0 or allowed > each * (stages - 2):
        found.append(f"{allowed} copies may be under way, of {each} a step in {stages} stages")
    return found


def loop(sass):
    """How often each kind of instruction stands in the longest loop of a program, by its name."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9.]+)([^;]*);", sass)
    code = [(int(at, 16), name.split(".")[0], rest) for at, name, rest in lines]
    back = [(int(found[0], 16), at) for at, name, rest in code if name == "BRA"
            if (found := re.findall("0x([0-9a-f]+)", rest))]  # fmt: skip
    loops = [(start, end) for start, end in back if start < end]
    start, end = max(loops, key=lambda pair: pair[1] - pair[0], default=(1, 0))
    return Counter(name for at, name, _ in code if start <= at <= end)
