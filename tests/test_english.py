"""Docstrings and comments are plain English: sentences of at most 25 words, and no riddles."""

import ast
import io
import re
import tokenize
from itertools import groupby
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "retrograde"
MOST_WORDS = 25

# The rooms and files that are still to be read. This list may only shrink.
NOT_YET = (
    "kernels", "cores", "jax", "nn",
    "discover", "run",
    "__init__", "cli", "console", "errors", "files", "interchange", "interrupts", "machine",
    "precompile", "profile_command", "units",
)  # fmt: skip

RIDDLES = re.compile(
    r"\bfor (it|they|there|this|that) (is|are|was|has|have|would)\b"
    r"|\bwhat (all )?else\b|\bof which (there|it)\b|\bwhereof\b|\bthereby\b"
    r"|\bas (it|they) (is|are|was|were)$|\bin this wise\b|\bwherefore\b",
    re.IGNORECASE,
)


def prose(text):
    """The paragraphs and list items of a docstring, without doctests, formulas and tables."""
    text = re.sub(r"(?ms)^\s*==+ .*==$", "", text)
    paragraph, doctest = [], False
    for line in [*text.expandtabs().splitlines(), ""]:
        words = line.strip()
        doctest = bool(words) and (doctest or words.startswith(">>>"))
        apart = not words or doctest or line.startswith("    ") or re.match(r"\||`+\w+`+  ", words)
        if apart or re.match(r"[-*] |\d+\. |\w[\w, *`]*: ", words):
            yield " ".join(paragraph)
            paragraph = []
        if words and not doctest and not re.match(r"\||`+\w+`+  ", words):
            paragraph.append(words)
    yield " ".join(paragraph)


def sentences(paragraph):
    paragraph = re.sub(r"(:\w+:)?`+[^`]*`+", "Code", paragraph)
    return re.split(r"(?<=[.!?:])[)*]*\s+(?=[A-Z`(*α-ω])", paragraph)


def texts(path):
    """Every docstring, and every run of comment lines, with the line where it begins."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    lines = [
        (token.start[0], token.string.lstrip("# "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    ]
    for _, block in groupby(enumerate(lines), lambda pair: pair[1][0] - pair[0]):
        comment = [line for _, line in block]
        yield comment[0][0], "\n".join(text for _, text in comment)


def faults(path):
    for line, text in texts(path):
        for paragraph in prose(text):
            for sentence in sentences(paragraph):
                words = [word for word in sentence.split() if re.search(r"\w", word)]
                if len(words) > MOST_WORDS:
                    yield f"{path.name}:{line}: {len(words)} words: {sentence}"
                if found := RIDDLES.search(sentence):
                    yield f"{path.name}:{line}: {found[0]!r}: {sentence}"


FILES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not str(path.relative_to(PACKAGE)).startswith(NOT_YET)
]


@pytest.mark.quick(999)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_and_comments_are_plain(path):
    found = list(faults(path))
    assert not found, "\n".join(found)
