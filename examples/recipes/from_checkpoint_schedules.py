"""A schedule of ``checkpoint_schedules`` as one of this library: to replay, price or draw it.

All its storage becomes one memory.
"""

import checkpoint_schedules as cs

import retrograde as rg

WORK = cs.StorageType.WORK


def imported(stream):
    """The first reversal of a schedule that knows its length."""
    actions, restarts = [], {}  # whether there are restart data, by place and step
    for action in stream:
        match action:
            case cs.Forward():
                start, stop = int(action.n0), int(action.n1)  # Mixed has numpy's integers
                if action.storage is not WORK:
                    restarts[action.storage, start] = action.write_ics
                    actions += [rg.Store(start)] * action.write_ics
                actions.append((rg.Record if action.write_adj_deps else rg.Advance)(start, stop))
            case cs.Copy() | cs.Move() if action.to_storage is WORK:
                at = int(action.n)
                actions += [rg.Load(at)] * restarts[action.from_storage, at]
            case cs.Copy() | cs.Move():
                restarts[action.to_storage, action.n] = restarts[action.from_storage, action.n]
            case cs.Reverse():
                actions.append(rg.Backward(int(action.n0), int(action.n1)))
            case cs.EndReverse():
                break
    plan = rg.Schedule.from_actions(freed(actions), length=stream.max_n, policy="imported")
    rg.simulate(plan)  # raises ScheduleError if it is not legal
    return plan


def freed(actions):
    """The same, with each state stored only if it is loaded later, and freed by its last load."""
    found, ahead = [], set()
    for action in reversed(actions):
        match action:
            case rg.Load(at):
                found += [action] if at in ahead else [rg.Free(at), action]
                ahead.add(at)
            case rg.Store(at) if at not in ahead:
                pass
            case _:
                found.append(action)
                if isinstance(action, rg.Store):
                    ahead.discard(action.at)
    return found[::-1]


if __name__ == "__main__":
    theirs = imported(cs.HRevolve(100, 3, 5))  # 3 states in memory, 5 on disk
    print(f"HRevolve: {theirs.cost} forward steps; rg.plan: {rg.cost(100, 8)}")
