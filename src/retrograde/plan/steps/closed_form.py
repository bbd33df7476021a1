"""HSM and ISM without a table: costs, splits and HSM's schedule.

HSM keeps hidden states. With m slots, the initial state included, and the working core free,

    C(t, m) = min over 1 ≤ y < t of  y + C(t−y, m−1) + C(y, m),     C(t, 1) = t(t+1)/2

(Gruslys et al. 2016, eqs. 1 to 3). With r the least integer such that t ≤ binom(m+r, m),

    C(t, m) = t + r·t − binom(m+r, m+1),

which is Revolve (Griewank & Walther 2000) plus the t forward steps of the working core: no step is
run more than r+1 times. A split y is optimal where both segments stay in range, that is where
binom(m+r−2, m) ≤ y ≤ binom(m+r−1, m) and binom(m+r−2, m−1) ≤ t−y ≤ binom(m+r−1, m−1).

ISM keeps internal states. With m slots, the working core included, and the initial state free,

    C(t, m) = min over 1 ≤ y ≤ t of  y + C(y−1, m) + C(t−y, m−1),   C(0, m) = 0

(eqs. 4, 5), and C_ISM(t, m) = C_HSM(t+1, m) − (t+1), with the splits of HSM at t+1. It is also MSM
with all sizes 1, which :mod:`retrograde.plan.steps.mixed` unfolds.

*Ties* of HSM break by the fewest actions. A segment of one step takes two actions, ``Record`` and
``Backward``; a longer one with k segments inside takes 4k. So t steps take 4(t−1) actions, and 2
for every segment of one step.

A cost or a split takes a few binomials and is exact at any size. A schedule takes the distinct
segments (a few for each slot and repetition) and the actions.
"""

from math import comb

from retrograde.plan.steps.unfold import Segment, Segments, check_size


def hsm_cost(length: int, memory: int) -> int:
    """The fewest forward steps with ``memory`` hidden states, the initial one included."""
    r = repetitions(length, memory)
    return length + r * length - comb(memory + r, memory + 1)


def ism_cost(length: int, memory: int) -> int:
    """The fewest forward steps with ``memory`` internal states, the working core included."""
    return hsm_cost(length + 1, memory) - (length + 1)


def repetitions(length: int, memory: int) -> int:
    """Return the most times that a step is run again: the least r with t ≤ binom(m + r, m)."""
    high = 1
    while comb(memory + high, memory) < length:
        high *= 2
    low = high // 2 if length > 1 else -1
    while high - low > 1:
        middle = (low + high) // 2
        if comb(memory + middle, memory) < length:
            low = middle
        else:
            high = middle
    return high


def split_of(length: int, memory: int, r: int) -> int:
    """Return the largest D(t, m), position of the next stored state (G16 eq. 3), with fewest
    actions. No step of the segment is run again more than r ≥ 1 times.

    The segment has binom(memory + r − 1, memory) to binom(memory + r, memory) steps, at least 2.
    Its left segment has r − 1 repetitions, its right segment a slot less. Fewest actions means
    fewest segments of one step. There are z = binom(m+r−2, r−1) such segments up to
    t = binom(m+r−1, m) + z, and one more for each later step. Up to there, a segment may take a
    second step for free; later steps are segments of their own. By Pascal's rule z is the sum of
    both segments' z, so both use their free steps first."""
    if r == 1:
        return 1
    least = _within(memory, r - 2)
    beyond = length - least - _within(memory - 1, r - 1)
    free, free_right = _free(memory, r - 1), _free(memory - 1, r)
    if beyond <= free + free_right:
        return least + min(beyond, free)
    return min(_within(memory, r - 1), least + beyond - free_right)


def _within(m: int, r: int) -> int:
    """Return binom(m+r, m), the longest sequence with no step run more than r+1 times."""
    return comb(m + r, r)


def _free(m: int, r: int) -> int:
    """Return the steps beyond the least that add no segment of one step: binom(m+r−2, r−1)."""
    return comb(m + r - 2, r - 1) if m else 0


def hsm_segments(length: int, memory: int, segments: Segments) -> int:
    """Add the segments of HSM's schedule with the fewest actions; returns the number of the whole.

    >>> segments = Segments()
    >>> print(segments.schedule(hsm_segments(2, 1, segments), length=2, policy="hsm"))
    store 0, advance 0→1, record 1→2, backward 2→1, load 0, record 0→1, backward 1→0, free 0
    """
    check_size(length, 4 * length)

    def divide(segment: tuple[int, int, int]) -> Segment:
        steps, slots, r = segment  # and the most repetitions of a step after its first run
        if steps == 1:
            return Segment(0, 1)
        y = split_of(steps, slots, r)
        left = (y, slots, r - 1)
        if steps - y == 1:  # state y is current when the last step runs, so it needs no slot
            return Segment(y, 1, None, left)
        return Segment(y, 0, (steps - y, slots - 1, r), left)

    return segments.gather((length, memory, repetitions(length, memory)), divide)
