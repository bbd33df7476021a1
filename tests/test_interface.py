"""The public names and their signatures are those of a list, to be changed on purpose only."""

import inspect
from pathlib import Path

import retrograde as rg

GOLDEN = Path(__file__).parent / "golden" / "interface.txt"


def described():
    """A line for each public name: classes by how they are made, and their public methods."""
    for name in sorted(rg.__all__):
        value = getattr(rg, name)
        if not callable(value):
            yield name
            continue
        yield f"{name}{parameters(value)}"
        for method, function in sorted(methods(value).items()):
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"    {method}{parameters(function)}"


def methods(value):
    """Of a class, all that it and those of its bases that are ours define."""
    bases = reversed(value.__mro__) if inspect.isclass(value) else ()
    ours = [vars(base) for base in bases if base.__module__.startswith("retrograde")]
    return {name: method for known in ours for name, method in known.items()}


def parameters(function):
    """Names, kinds and defaults; types are written in one way or another."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return "(…)"
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in found)})"


def test_names_and_signatures_are_the_known_ones():
    assert list(described()) == GOLDEN.read_text().splitlines()
