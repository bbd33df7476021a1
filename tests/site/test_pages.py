"""What the site promises of its pages: names, messages, links and words are those of the code."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import retrograde as rg
from retrograde import figures, scan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SOURCE = ROOT / "src" / "retrograde"


def entries():
    """Of each ``:::`` block of the reference, the path, and the name in its heading."""
    text = "\n".join(page.read_text() for page in DOCS.glob("reference*.md"))
    return re.findall(r'^::: (\S+)\n    options:\n      heading: "(\S+)"$', text, re.MULTILINE)


def found(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.quick(99)
@pytest.mark.parametrize(
    ("prefix", "module"), [("rg", rg), ("rg.scan", scan), ("figures", figures)], ids=str
)
def test_every_public_name_is_in_the_reference(prefix, module):
    shown = {heading: path for path, heading in entries()}
    for name in module.__all__:
        assert found(shown[f"{prefix}.{name}"]) is getattr(module, name)


def test_every_name_for_jax_is_in_the_reference():
    rj = pytest.importorskip("retrograde.jax", exc_type=ImportError)
    shown = {heading: path for path, heading in entries()}
    for name in rj.__all__:
        assert found(shown[f"rj.{name}"]) is getattr(rj, name)


# Errors that are no message to a user: raised and caught within, or Python's own protocol.
WITHIN = {
    "AssertionError", "AttributeError", "KeyError", "ModuleNotFoundError", "NotAChainError",
    "OSError", "TypeError", "ValueError", "_MissingError",
}  # fmt: skip


def template(node, constants):
    """What a message is made of, with an ellipsis for each value; None if it is not to be seen."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, constants) + template(node.right, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return template(constants[node.id], constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return template(constants.get(node.func.id), constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = template(node.func.value, constants)
        if node.func.attr == "format":
            return re.sub(r"\{[^}]*\}", "…", text)
    return "…"


def assigned(tree):
    """The names that a module gives to constants, and to functions that return a text, with what
    stands for them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return):
            yield node.name, node.body[-1].value
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def messages():
    """The messages that the library's code gives to errors and warnings, each with its class."""
    trees = [ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
    own_of = [dict(assigned(tree)) for tree in trees]
    shared = {name: value for own in own_of for name, value in own.items() if name[0] != "_"}
    for tree, own in zip(trees, own_of, strict=True):
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name == "warn" or (name.endswith("Error") and name not in WITHIN):
                text = template(node.args[0], {**shared, **own})
                if text.strip("…"):
                    yield ("RuntimeWarning" if name == "warn" else name), text


def quoted():
    """The beginnings that the page on errors quotes, each with its section's class."""
    section = None
    for line in (DOCS / "reference_errors.md").read_text().splitlines():
        if line.startswith("## "):
            section = "RuntimeWarning" if line == "## Warnings" else line[3:]
        elif section and (match := re.match(r"\| `(.+?)` \|", line)):
            yield section, match[1]


def begins(message, quote):
    if quote.startswith("…: ") and not message.startswith("…: "):
        return False  # else it would stand for every message
    return re.match(".*?".join(map(re.escape, quote.split("…"))), message, re.DOTALL) is not None


NEAR = {  # classes that are raised under another's name, or quoted there
    "NotExactError": "CellError",
    "TooManyEntriesError": "ScanError",
    "_OverwrittenError": "RuntimeError",
}


def test_each_quoted_message_begins_as_the_code_does():
    known = [(NEAR.get(name, name), text) for name, text in messages()]
    odd = [
        (section, quote)
        for section, quote in quoted()
        if not any(section == name and begins(text, quote) for name, text in known)
    ]
    assert not odd


def test_each_message_of_the_code_is_on_the_page():
    shown = list(quoted())
    missing = [
        (name, text)
        for name, text in messages()
        if not any(NEAR.get(name, name) == section and begins(text, q) for section, q in shown)
    ]
    assert not missing


def slug(heading):
    """The anchor of a heading, as the site and the repository's pages make it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


MOST_WORDS = 1500  # of a page, code excepted
LONG = {"gpu.md", "measured.md", "papers.md", "science.md", "reference_errors.md"}


@pytest.mark.quick(99)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_is_read_in_a_sitting(page):
    assert page.name in LONG or len(prose(page).split()) <= MOST_WORDS
    assert page.name != "README.md" or len(page.read_text().splitlines()) <= 100


@pytest.mark.quick(99)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_link_is_broken(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor and other.suffix == ".md":
            assert anchor in {slug(h) for h in re.findall(r"^#+ (.*)$", prose(other), re.M)}, target


def test_the_glossary_is_short_and_linked_from_every_page():
    rows = re.findall(r"^\| (?!word|---)", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(rows) <= 15
    for page in DOCS.glob("*.md"):
        if page.name != "glossary.md":
            assert "\nWords: [glossary](glossary.md).\n" in page.read_text(), page.name


def test_the_start_of_the_site_is_linked_from_the_readme():
    text = (ROOT / "README.md").read_text()
    for page in ("index", "planning", "troubleshooting"):
        assert f"(docs/{page}.md" in text


def test_the_page_for_wrong_addresses_leads_on():
    text = (DOCS / "overrides" / "404.html").read_text()
    assert 'for="__search"' in text
    for page in re.findall(r"'(\w+)\.html' \| url", text):
        assert (DOCS / f"{page}.md").exists()
    assert "'index.html' | url" in text


def test_every_statement_of_the_theorems_names_tests_that_exist():
    text = (DOCS / "science.md").read_text()
    rows = re.findall(
        r"^\| (?!statement|---)(.*?) \| (.*?) \|$", text.split("## The model")[0], re.M
    )
    for statement in re.findall(r"\*\*((?:Theorem|Lemma|Proposition) \w+)", text):
        assert any(row.startswith(f"{statement}:") for row, _ in rows), statement
    for statement, cell in rows:
        named = re.findall(r"`(test_\w+)`(?: in `([\w/.]+)`)?", cell)
        assert named or cell == "those of theorem A", statement
        for name, file in named:
            path = ROOT / file if "/" in file else ROOT / "tests/plan" / (file or "test_science.py")
            assert f"def {name}(" in path.read_text(), name
