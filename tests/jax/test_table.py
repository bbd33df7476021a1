"""Tables that a compiled loop follows, beside the schedules that they are made of."""

import pytest

import retrograde as rg

pytest.importorskip("jax")

from retrograde.jax.table import Kind, table_of


def replay(table, length):
    """Follow a table as the loops do: every state and tape place holds what it should."""
    slots, tape = {table.first: 0, 0: 0} if table.first == 0 else {table.first: 0}, {}
    left, steps, reached = length, 0, 0
    for number, (kind, start, stop, load, store, place) in enumerate(table.rows.tolist()):
        if number == table.forward:
            assert reached == length
        if kind == Kind.END:
            break
        if kind in (Kind.ADVANCE, Kind.RECORD, Kind.STEP):
            assert slots[load] == start
            steps += stop - start
        if kind in (Kind.ADVANCE, Kind.RECORD):
            slots[store] = reached = stop
        if kind == Kind.RECORD:
            tape |= {place + k - start: k for k in range(start, stop)}
        if kind == Kind.TAPE:
            assert all(tape.pop(place + k - start) == k for k in range(start, stop))
        if kind in (Kind.TAPE, Kind.STEP):
            assert stop == left
            left = start
        assert max(slots) < table.slots
        assert len(tape) <= table.tape
        assert max(tape, default=-1) < table.tape
    assert left == 0
    return steps


CASES = [
    *(("hsm", t, m, {}) for t in (1, 2, 7, 30) for m in (1, 2, 5, 40)),
    *(("ism", t, m, {}) for t in (1, 2, 7, 30) for m in (1, 2, 5, 40)),
    *(("msm", t, m, {"alpha": a}) for t in (1, 2, 7, 30) for m in (1, 4, 9, 60) for a in (2, 4)),
    *(
        ("best", t, m, {"alpha": a, "beta": a})
        for t in (1, 2, 7, 30)
        for m in (1, 9)
        for a in (1, 3)
    ),
    *(("store-all", t, None, {}) for t in (1, 2, 7, 30)),
]


@pytest.mark.quick(12)
@pytest.mark.parametrize(("policy", "length", "memory", "options"), CASES)
def test_a_table_runs_the_steps_of_its_schedule(policy, length, memory, options):
    schedule = rg.plan(length, memory, policy, **options)
    assert replay(table_of(schedule), length) == schedule.cost


@pytest.mark.quick(12)
@pytest.mark.parametrize(("policy", "length", "memory", "options"), CASES)
def test_a_short_last_range_is_run_again(policy, length, memory, options):
    schedule = rg.plan(length, memory, policy, **options)
    table, plain = table_of(schedule, again=True), table_of(schedule)
    more = replay(table, length) - schedule.cost
    assert table.steps == schedule.cost + more
    assert 0 <= more <= length / 7
    if more:
        assert Kind.RECORD not in table.rows[: table.forward, 0]
        assert table.slots == plain.slots + 1
    else:
        assert table.rows.tolist() == plain.rows.tolist()


def test_no_more_slots_than_the_policy_keeps():
    for length, memory in ((10, 4), (100, 7), (1000, 20)):
        table = table_of(rg.plan(length, memory, "hsm"))
        assert table.slots == memory + 1  # the current state's is one more
        assert table.tape == 1
