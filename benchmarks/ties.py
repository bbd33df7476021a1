"""Claim: of equally cheap schedules, the planner's has no more actions than the paper's rule gives.

Algorithm 1 of Gruslys et al. (2016) takes the first best y, and prefers a hidden state to an
internal one. Here that rule is followed part by part, with the same costs. The actions of both
schedules are counted, with adjacent ranges merged. The launches of this planner's schedule are
counted too: one for each range that is run or backpropagated, beside one for each step. Nothing is
timed, so the figures are the same on every machine.

    python benchmarks/ties.py             # a table, and JSON into benchmarks/results/
"""

import argparse
import json
from pathlib import Path

import numpy as np

import retrograde as rg
from retrograde.plan.steps.unfold import Segment, Segments
from retrograde.schedule import Verb

RESULTS = Path(__file__).parent / "results"
LENGTH = 1000
CASES = [
    ("hsm", 10, None),
    ("hsm", 50, None),
    ("hsm", 500, None),
    ("ism", 10, None),
    ("ism", 50, None),
    ("ism", 500, None),
    ("ism", 1000, None),
    ("msm", 50, 5),
    ("msm", 300, 5),
    ("msm", 2000, 5),
    ("msm", 4000, 5),
]


def first_best(length: int, memory: int, policy: str, alpha: int | None) -> rg.Schedule:
    """A cheapest schedule by the paper's rule."""
    sizes = {} if alpha is None else {"alpha": alpha}
    lengths, memories = np.arange(1, length + 1)[:, None], np.arange(1, memory + 1)
    costs = np.full((length + 1, memory + 1), 2**40)
    costs[0], costs[1:, 1:] = 0, rg.cost(lengths, memories, policy, **sizes)
    costs[1, 0] = 1  # a last step in the working core needs no slot
    parts = Segments()

    def divide(part: tuple[int, int]) -> Segment:
        t, m = part
        if t == 1:
            return Segment(0, 1)
        y = np.arange(1, t)
        if policy != "ism":
            best = np.flatnonzero(y + costs[y, m] + costs[t - y, m - 1] == costs[t, m])
            if best.size:
                at = int(y[best[0]])
                if t - at == 1:
                    return Segment(at, 1, None, (at, m))
                return Segment(at, 0, (t - at, m - 1), (at, m))
        y = np.arange(1, t + 1)
        room = m - (1 if policy == "ism" else np.where(y == 1, alpha - 1, alpha))
        right = np.where(room > 0, costs[t - y, np.maximum(room, 0)], 2**40)
        right[-1] = 0
        at = int(y[np.flatnonzero(y + costs[y - 1, m] + right == costs[t, m])[0]])
        after = m - (1 if policy == "ism" else alpha - (at == 1))
        behind, before = (t - at, after) if at < t else None, (at - 1, m) if at > 1 else None
        return Segment(at - 1, 1, behind, before)

    root = parts.gather((length, memory), divide)
    units = rg.plan(2, 2, policy, **sizes).units
    return parts.schedule(root, length=length, policy=policy, memory=memory, units=units)


def main() -> None:
    """Count, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder")
    arguments = parser.parse_args()
    print(
        f"| policy, {LENGTH} steps | memory | forward steps | actions, first y "
        "| actions, this rule | launches step by step | in ranges |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    found = []
    for policy, memory, alpha in CASES:
        sizes = {} if alpha is None else {"alpha": alpha}
        theirs, ours = (
            first_best(LENGTH, memory, policy, alpha),
            rg.plan(LENGTH, memory, policy, **sizes),
        )
        assert theirs.cost == ours.cost
        assert theirs.peak <= memory
        name = policy.upper() + ("" if alpha is None else f", α = {alpha}")
        launches = int(np.isin(ours.kind, [Verb.ADVANCE, Verb.RECORD, Verb.BACKWARD]).sum())
        steps = ours.cost + LENGTH
        print(
            f"| {name} | {memory} | {ours.cost} | {len(theirs)} | {len(ours)} | {steps} "
            f"| {launches} |"
        )
        found.append(
            {"policy": policy, "alpha": alpha, "length": LENGTH, "memory": memory,
             "cost": ours.cost, "actions_first_y": len(theirs), "actions": len(ours),
             "launches_step_by_step": steps, "launches": launches}
        )  # fmt: skip
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "ties.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
