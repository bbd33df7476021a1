"""Docstrings as the site reads them: examples are code, roles are names, overloads are one."""

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([^`]+)`")


def short(match):
    """The name that a role refers to, as this library's users write it."""
    return f"`{match[1].rpartition('.')[2]}`"


class Readable(griffe.Extension):
    def on_instance(self, *, obj, **_):
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = ROLE.sub(short, text)

    def on_function(self, *, func, **_):
        func.overloads = None  # the implementation's signature says the same, once
