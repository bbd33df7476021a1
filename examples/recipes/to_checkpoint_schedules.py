"""A plan for ``checkpoint_schedules``, by which pyadjoint and Firedrake run an adjoint model.

Restart data there are a hidden state here, adjoint data an internal state, and ``WORK`` is the
working core. ``tape.enable_checkpointing`` takes the result.
"""

import checkpoint_schedules as cs

import retrograde as rg

RAM, WORK = cs.StorageType.RAM, cs.StorageType.WORK


class Exported(cs.CheckpointSchedule):
    """A plan of HSM, or of all steps: ISM and MSM also load states that were never stored."""

    is_exhausted = False

    def __init__(self, plan):
        if plan.policy not in ("hsm", "store-all"):
            raise ValueError(f"cannot export a plan of {plan.policy!r}: take one of 'hsm'")
        super().__init__(max_n=plan.length)
        self.plan, self.again, ahead = list(plan), [], set()
        for action in reversed(self.plan):  # is the state loaded later?
            if isinstance(action, rg.Load | rg.Store):
                self.again.append(action.at in ahead)
                (ahead.add if isinstance(action, rg.Load) else ahead.discard)(action.at)

    def _iterator(self):
        for action in self.plan:
            match action:
                case rg.Store():
                    keep = self.again.pop()
                case rg.Load(at):
                    keep, self._n = False, at
                    yield (cs.Copy if self.again.pop() else cs.Move)(at, RAM, WORK)
                case rg.Advance(start, stop):
                    self._n = stop
                    yield cs.Forward(start, stop, keep, False, RAM if keep else WORK)
                case rg.Record(start, stop):
                    for self._n in range(start + 1, stop + 1):
                        into = WORK if self._n == stop else RAM
                        yield cs.Forward(self._n - 1, self._n, False, True, into)
                    yield from [cs.EndForward()] * (stop == self._max_n)
                case rg.Backward(start, stop):
                    for step in reversed(range(start, stop)):
                        if step < stop - 1:
                            yield cs.Move(step, RAM, WORK)
                        self._r += 1
                        yield cs.Reverse(step + 1, step, True)
        self.is_exhausted = True
        yield cs.EndReverse()

    def uses_storage_type(self, storage_type):
        return storage_type in (RAM, WORK)


if __name__ == "__main__":
    print(*Exported(rg.plan(4, 2)), sep="\n")
