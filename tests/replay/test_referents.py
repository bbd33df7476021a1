"""What a call refers to is found wherever a program keeps it, since reruns must put it back."""

import functools
import types

import pytest
from torch import nn

from retrograde.replay.referents import find_referents

NORM = nn.BatchNorm1d(3)
SETTINGS = types.ModuleType("settings")
SETTINGS.norm = NORM


class Of:
    norm = NORM


class Helper:
    __slots__ = ("held",)

    def __init__(self, held=None):
        self.held = held

    def run(self, x):
        return NORM(x)

    @property
    def norm(self):
        return NORM

    def __call__(self, x):
        return NORM(x)


class Cell(nn.Module):
    def forward(self, x, h):
        return self.part(x), h

    def part(self, x):
        return NORM(x)


def by_default(x, h, norm=NORM):
    return norm(x), h


def by_global(x, h):
    return NORM(x), h


def by_module(x, h):
    return SETTINGS.norm(x), h


def by_class(x, h):
    return Of.norm(x), h


def closure(norm):
    return lambda x, h: (norm(x), h)


def calls(helper, name):
    return {
        "run": lambda x, h: (helper.run(x), h),
        "norm": lambda x, h: (helper.norm(x), h),
        "held": lambda x, h: (helper.held[0](x), h),
        "itself": lambda x, h: (helper(x), h),
    }[name]


def with_attribute():
    def cell(x, h):
        return cell.norm(x), h

    cell.norm = NORM
    return cell


def with_hook():
    cell = nn.GRUCell(3, 3)
    cell.register_forward_hook(lambda module, given, result: NORM(result))
    return cell


PLACES = {
    "a default": by_default,
    "a global": by_global,
    "a global of a module": by_module,
    "a class attribute": by_class,
    "a closure": closure(NORM),
    "a list": calls(Helper([NORM]), "held"),
    "a dict": closure({"one": NORM}),
    "a tuple in a list": closure([(NORM,)]),
    "a set": closure({NORM}),
    "an argument of partial": functools.partial(lambda norm, x, h: (norm(x), h), NORM),
    "a keyword of partial": functools.partial(by_default, norm=NORM),
    "a method of a module": Cell(),
    "a bound method": Cell().forward,
    "a method of a helper": calls(Helper(), "run"),
    "a property": calls(Helper(), "norm"),
    "a call of a helper": calls(Helper(), "itself"),
    "an attribute of the function": with_attribute(),
    "a hook": with_hook(),
}


@pytest.mark.quick(99)
@pytest.mark.parametrize("place", PLACES)
def test_a_module_is_found_wherever_it_is_kept(place):
    found = find_referents([PLACES[place]])
    assert any(module is NORM for module in found.modules)
    assert any(part is NORM for part in found.parts())
