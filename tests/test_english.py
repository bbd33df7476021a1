"""Code and pages are in plain English: sentences of at most 25 words, and no riddles."""

import ast
import io
import re
import tokenize
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "retrograde"
MOST_WORDS = 25

# Phrases that were habits here, and made sentences into riddles.
RIDDLES = re.compile(
    r"\bfor (it|they|there|this|that) (is|are|was|were|has|have|would|may|can)\b"
    r"|\bwhat (all )?else\b|\bof which (there|it)\b|\bto be had\b|\b(is|are) told\b|\blets? go of\b"
    r"|\bin the place of\b|\bsees? to it\b|\bwhat (is|was) (left|held|kept|run|found) (is|was)\b",
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


def too_long(paragraph):
    for sentence in sentences(paragraph):
        words = [word for word in sentence.split() if re.search(r"\w", word)]
        if len(words) > MOST_WORDS:
            yield f"{len(words)} words: {sentence}"


def long_sentences(path):
    for line, text in texts(path):
        for paragraph in prose(text):
            for told in too_long(paragraph):
                yield f"{path.name}:{line}: {told}"


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.quick(999)
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sentences_are_short_and_no_riddles(path):
    folded = re.sub(r'(?:[\s#"]|\bf")+', " ", path.read_text())  # messages and comments on one line
    riddles = [folded[max(0, m.start() - 60) : m.end() + 60] for m in RIDDLES.finditer(folded)]
    assert not (found := [*long_sentences(path), *riddles]), "\n".join(found)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def page_paragraphs(text):
    """The paragraphs and list items of a page, without code, tables, headings and addresses."""
    text = re.sub(r"^(```.*?^```$|    .*?$|:::.*?$)", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.DOTALL).replace("*", "")
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(#.*|\|.*|<.*)$", "\n", text, flags=re.MULTILINE)
    return [
        " ".join(part.split()) for part in re.split(r"\n\s*\n|^(?:[-] |\d+\. )", text, flags=re.M)
    ]


@pytest.mark.quick(999)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_short_sentences_and_no_riddles(page):
    paragraphs = page_paragraphs(page.read_text())
    long = [told for paragraph in paragraphs for told in too_long(paragraph)]
    folded = " ".join(paragraphs)
    riddles = [folded[max(0, m.start() - 60) : m.end() + 60] for m in RIDDLES.finditer(folded)]
    assert not (found := [*long, *riddles]), "\n".join(found)
