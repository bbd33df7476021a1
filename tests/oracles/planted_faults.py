"""Faults to plant in the source, each with the test that has to fail for it.

A fault is the name of a file, the text that stands there once, and what replaces it; then a file of
tests, and the words that choose some of them.
"""

__all__ = ["FAULTS"]

FAULTS = {
    # run/
    "a state keeps the memory that it is a part of": (
        "run/states.py", "    return room.as_strided(t.shape, t.stride(), shift)\n",
        "    return t\n", "run/test_states.py", "",
    ),
    "a step that ran again is not compared": (
        "run/prints.py", "        if (start + self.turn) % self.stride:\n",
        "        if self.found or (start + self.turn) % self.stride:\n",
        "cells/test_same_steps.py", "",
    ),
    "a state is freed and kept all the same": (
        "run/executor.py", "                del self.stored[at]\n",
        "                self.stored[-1 - at] = self.stored.pop(at)\n", "cells/test_unroll.py", "",
    ),
    "reruns change buffers": (
        "run/executor.py", "            with surroundings.without_trace() if changes",
        "            with surroundings.without_trace() if not changes", "cells/test_unroll.py", "",
    ),
    "steps larger than those that were measured are not noticed": (
        "run/settled.py", "        if self.left < 0:\n", "        if self.left < -1e9:\n",
        "cells/test_same_steps.py", "",
    ),
    # replay/
    "words of a tensor have no weights": (
        "replay/fingerprints.py", "np.arange(_COLUMNS) * _WEIGHT + 1",
        "np.arange(_COLUMNS) * 0 + 1", "replay/test_fingerprints.py", "",
    ),
    "Python's generator is not set back": (
        "replay/generators.py", "                self.generator.setstate(state)\n",
        "                pass\n", "cells/test_unroll_cells.py", "",
    ),
    "the variables of a closure are not found": (
        "replay/referents.py", '        self.named(variables, "the variable {!r}", depth)\n', "",
        "replay/test_referents.py", "",
    ),
    "buffers are not copied back": (
        "replay/surroundings.py", "        copy_back(self.buffers, rest)\n",
        "        copy_back(self.buffers, [b.clone() for b, _ in zip(self.buffers, rest)])\n",
        "together/test_surroundings.py", "",
    ),
    "torch's switches are not set back": (
        "replay/switches.py",
        "            for put, _, value in differ:\n                put(value)\n",
        "            pass\n", "replay/test_switches.py", "",
    ),
    # sizes/
    "a block is released when it is allocated": (
        "sizes/allocations.py", "                born[index], died[allocated] = allocated, index\n",
        "                born[index], died[allocated] = index, allocated\n",
        "sizes/test_allocations.py", "",
    ),
    "what stays after a call counts as its work": (
        "sizes/allocations.py", "    transient = (born >= 0) & (died < len(events))\n",
        "    transient = born >= 0\n", "sizes/test_allocations.py", "",
    ),
    "a result outlives the objects in its key": (
        "sizes/cache.py", "        return all(reference() is not None for reference in self.of)\n",
        "        return True\n", "sizes/test_cache.py", "",
    ),
    "larger steps are planned for as the smaller ones": (
        "sizes/footprint.py", "    if factor <= _ALIKE:\n", "    if factor:\n",
        "sizes/test_footprint.py", "",
    ),
    "the nodes of one step are counted": (
        "sizes/footprint.py", "    return 1024 * operations * int(recorded.max())\n",
        "    return 1024 * operations\n", "sizes/test_footprint.py", "",
    ),
    # models/
    "what a rerun saves is not compared": (
        "models/rows/checks.py",
        "        verify(self.noted.prints[number], t, self.differs, self.noted.part)\n",
        "        pass\n", "models/test_same_call.py", "",
    ),
    "a weight that was changed before the backward pass is not noticed": (
        "models/rows/rerun.py",
        "        if self.versions != [version(t) for t in self.unit.reads]:\n",
        "        if False:\n", "models/test_chain.py", "",
    ),
    "a late row counts as if it kept its calls": (
        "models/rows/joint_plan.py", "late = {k: kind.late_bytes for",
        "late = {k: kind.least_bytes for", "models/test_rows.py", "late_row",
    ),
    "the calls of ways that give other gradients are accepted": (
        "models/rows/phases.py", "        if any(shown != ways[0] for shown in ways):\n",
        "        if False:\n", "models/test_chain.py", "",
    ),
    "a value that can be made anew is never let go": (
        "models/lean/tape.py",
        "        if peak - box.nbytes * (2 if grad_is_to_come else 1) > self._credit:\n",
        "        if True:\n", "models/test_lean.py", "",
    ),
}  # fmt: skip
