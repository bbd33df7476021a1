"""Places of Python values: noted, compared, put back, whatever holds them."""

import io
import itertools
import types
from collections import OrderedDict, deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from retrograde.replay import places as places_of
from retrograde.replay.places import Unreadable
from retrograde.replay.referents import find_referents

SCALE = 2.0
NAMES = ["mask", "scale"]


class Holder:
    kind = "class"

    def __init__(self):
        self.value = 1
        self.rows = [1, 2]

    def __call__(self, x, h):
        return self.helper(x), h

    def helper(self, x):
        return x * self.value * len(self.rows) * len(self.kind)


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1

    def __call__(self, x, h):
        return x * self.value, h


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Dropout(0.5)
        self.k = 3
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, h):
        return self.inner(x) * self.k * SCALE, h


def note(cell):
    places = find_referents([cell]).places
    return places, [place.note() for place in places]


def changed(places, before):
    pairs = zip(places, before, strict=True)
    return sorted(place.called(key) for place, seen in pairs for key in place.changed(seen))


def put_back(places, before):
    for place, seen in zip(places, before, strict=True):
        if place.changed(seen):
            place.restore(seen)


def closure():
    n, rows, table, seen, things = 1, [1], {"a": 1}, {1}, deque([1])

    def cell(x, h, scale=1, *, more=2):
        return x * n * scale * more * len(rows) * len(table) * len(seen) * len(things), h

    def change(what):
        nonlocal n
        if what == "variable":
            n = 2
        elif what == "list":
            rows.append(2)
        elif what == "item of a list":
            rows[0] = 7
        elif what == "dict":
            table["b"] = 2
        elif what == "removed from a dict":
            del table["a"]
        elif what == "set":
            seen.add(2)
        elif what == "deque":
            things.appendleft(5)
        elif what == "default":
            cell.__defaults__ = (4,)
        elif what == "keyword default":
            cell.__kwdefaults__ = {"more": 9}

    return cell, change, lambda: (n, rows, table, seen, list(things), cell(1, 0))


@pytest.mark.parametrize(
    "what",
    ["variable", "list", "item of a list", "dict", "removed from a dict", "set", "deque",
     "default", "keyword default"],
)  # fmt: skip
def test_what_a_closure_reads(what):
    cell, change, state = closure()
    found = repr(state())
    places, before = note(cell)
    assert not changed(places, before)
    change(what)
    assert len(set(changed(places, before))) == 1
    put_back(places, before)
    assert repr(state()) == found
    assert not changed(places, before)


@pytest.mark.parametrize(
    ("make", "change", "name"),
    [
        (Holder, lambda c: setattr(c, "value", 5), "Holder.value"),
        (Holder, lambda c: setattr(Holder, "kind", "other"), "Holder.kind"),
        (Slotted, lambda c: setattr(c, "value", 5), "Slotted.value"),
        (Layer, lambda c: setattr(c, "k", 5), "Layer.k"),
        (Layer, lambda c: c.inner.eval(), "Dropout.training"),
        (Layer, lambda c: setattr(c.inner, "p", 0.1), "Dropout.p"),
        (Layer, lambda c: setattr(c, "count", torch.ones(())), "Layer.count"),
        (Layer, lambda c: setattr(c, "inner", nn.Identity()), "Layer.inner"),
        (Layer, lambda c: globals().update(SCALE=9.0), f"'SCALE' of the module {__name__}"),
        (lambda: Holder().helper, lambda c: setattr(c.__self__, "value", 3), "Holder.value"),
        (lambda: partial(lambda x, h, k: (x * k, h), k=2),
         lambda c: c.keywords.update(k=4), "the arguments of the cell['k']"),
        (lambda: torch.no_grad()(Holder().__call__),
         lambda c: setattr(c.__wrapped__.__self__, "value", 3), "Holder.value"),
    ],
)  # fmt: skip
def test_what_objects_modules_and_functions_read(make, change, name):
    cell = make()
    places, before = note(cell)
    change(cell)
    assert changed(places, before) == [name]
    put_back(places, before)
    assert not changed(places, before)
    assert (SCALE, Holder.kind) == (2.0, "class")


MOVING = {
    "list": lambda: iter([1, 2, 3]),
    "items": lambda: iter({1: 2, 3: 4}.items()),
    "count": lambda: itertools.count(5),
    "cycle": lambda: itertools.cycle([1, 2]),
    "zip": lambda: zip([1, 2, 3], itertools.count(), strict=False),
    "generator": lambda: (k for k in range(9)),
    "text in memory": lambda: io.StringIO("a\nb\nc\n"),
}


@pytest.mark.parametrize("kind", MOVING)
def test_what_moves_by_being_read_is_named_if_code_reads_it(kind):
    it = MOVING[kind]()

    class Reader:
        def __init__(self):
            self.rows, self.unread = [it], MOVING[kind]()

        def __call__(self, x, h):
            return next(self.rows[0]), h

    assert find_referents([lambda x, h: (next(it), h)]).moving == ["the variable 'it'"]
    assert find_referents([Reader()]).read().moving == ["Reader.rows"]


def test_a_file_that_is_written_does_not_move(tmp_path):
    with (tmp_path / "log").open("w") as log:
        assert not find_referents([lambda x, h: (log.write("x"), h)]).moving


def test_a_long_list_is_noted_by_its_length():
    rows = list(range(5000))

    def cell(x, h):
        rows.append(x)
        return x, h

    places, before = note(cell)
    cell(1, 0)
    assert changed(places, before) == ["the variable 'rows'"]
    put_back(places, before)
    assert rows == [*range(5000), 1]  # the entries are not noted


def test_small_arrays_are_places_and_large_ones_data():
    small, large = np.zeros(3), np.zeros(10**5)

    def cell(x, h):
        small[0] += 1
        return x + large[0], h

    places, before = note(cell)
    cell(0, 0)
    large[0] = 1
    assert changed(places, before) == ["the variable 'small'"]
    put_back(places, before)
    assert not small.any()
    assert large[0] == 1


def test_a_dict_that_makes_what_it_returns_is_noted_without_asking_it():
    class Makes(OrderedDict):
        def __getitem__(self, key):
            raise AssertionError(f"{key} was made")

    kinds = Makes(gelu=nn.GELU)

    def cell(x, h):
        return x if "gelu" in kinds else h, h

    places, before = note(cell)
    kinds["relu"] = nn.ReLU
    assert changed(places, before) == ["the variable 'kinds'['relu']"]
    put_back(places, before)
    assert [*kinds] == ["gelu"]


def test_libraries_are_not_looked_into():
    def cell(x, h):
        return torch.tanh(np.add(x, h)), io.StringIO

    assert not any(
        "torch" in place.name or "numpy" in place.name for place in find_referents([cell]).places
    )


def test_names_that_code_does_not_use_concern_nobody():
    holder = Holder()
    holder.progress = 0
    read = find_referents([holder]).read()
    (place,) = (p for p in read.places if p.holder is vars(holder))
    assert [key for key in ("progress", "value") if read.reads(place, key)] == ["value"]


def test_equal_values_of_plain_kinds_are_no_change():
    holder = Holder()
    places, before = note(holder)
    holder.value, holder.rows = 1, [1, 2]
    assert not changed(places, before)
    holder.rows = [1, 3]
    assert changed(places, before) == ["Holder.rows"]


@pytest.mark.parametrize("error", [KeyError, TypeError])
def test_what_must_not_be_read_raises_however_it_is_read(error):
    gone = Unreadable.of(lambda: error("gone"))
    reads = [
        lambda: gone + 1, lambda: 1 - gone, lambda: torch.ones(2) * gone, lambda: gone[0],
        lambda: gone.sum(), lambda: torch.tanh(gone), lambda: float(gone), lambda: len(gone),
        lambda: bool(gone), lambda: torch.stack([torch.ones(()), gone]), lambda: gone @ gone,
        lambda: 0.5 * gone, lambda: gone == "a", lambda: gone == "a", lambda: gone(1),
        lambda: {}.get(gone), lambda: range(gone), lambda: gone.shape, lambda: 2**gone,
        lambda: gone.anything, lambda: gone > 3, lambda: f"{gone}", lambda: [*gone],
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(error, match="gone"):
            read()


class Kinded:
    kind = "plain"


def with_default(x=1):
    return x


def test_places_watched_together_tell_what_each_alone_would():
    """Each change is told by its name, with the value that was there before."""
    inside, numbers, table = {"a": 1.5, "b": object()}, [object(), "c"], {"d": 2}
    array, long, cell = np.ones(3), [*range(2000)], types.CellType(3)
    places = [
        places_of.Contents(numbers, "numbers"),
        places_of.Entries(inside, "inside"),
        places_of.Entries(inside, "inside", ["b", "gone"]),
        places_of.Contents(table, "table").without(["d"]),
        places_of.Attributes(Kinded, "Kinded", ["kind"]),
        places_of.Attributes(with_default, "with_default", ["__defaults__"]),
        places_of.Attributes(cell, "cell", ["cell_contents"]),
        places_of.Contents(array, "array"),
        places_of.Contents(long, "long"),
    ]
    watch = places_of.Watch(places)

    def changed(write, back):
        then, notes = watch.now(), places_of.note(places)
        assert not watch.changes(then)
        write()
        found = watch.changes(then)
        expected = places_of.changes(notes)
        assert [*found] == [*expected]
        assert [*map(str, found.values())] == [*map(str, expected.values())]
        back()
        return [slot.called for slot in found]

    assert changed(lambda: inside.update(a=2), lambda: inside.update(a=1.5)) == ["inside.a"]
    assert changed(lambda: inside.update(gone=1), lambda: inside.pop("gone")) == ["inside.gone"] * 2
    assert changed(lambda: numbers.append(1), numbers.pop) == ["numbers"]
    assert changed(lambda: numbers.insert(0, 1), lambda: numbers.pop(0))
    assert changed(lambda: table.update(d=3, e=1), lambda: table.pop("e")) == ["table['e']"]
    assert changed(lambda: setattr(Kinded, "kind", 1), lambda: setattr(Kinded, "kind", "plain"))
    assert changed(
        lambda: setattr(with_default, "__defaults__", (2,)),
        lambda: setattr(with_default, "__defaults__", (1,)),
    )
    assert changed(
        lambda: delattr(cell, "cell_contents"), lambda: setattr(cell, "cell_contents", 3)
    )
    assert changed(lambda: array.fill(2), lambda: array.fill(1)) == ["array"]
    assert changed(lambda: long.append(1), long.pop) == ["long"]
    assert not changed(lambda: inside.update(a=float("1.5")), lambda: None)  # an equal number
