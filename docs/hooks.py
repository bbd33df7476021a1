"""What the site does beside Markdown: pages refer to files of the repository, so those come along.

A page links to ``../benchmarks/x.py`` as it does where the repository is browsed. The site has a
copy of the file under ``source/``, scripts as text, so that no link leads nowhere.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(\.\./([^)#\s]+)\)")
AS_TEXT = {".py", ".toml", ".yml", ".sh", ".md"}  # neither saved by browsers nor pages
# Who searches has a question first, and reads proofs and tables of figures later.
BOOSTS = {"troubleshooting.md": 3, "papers.md": 0.3, "science.md": 0.3, "gpu.md": 0.5}


def place(path):
    """Where a file of the repository is on the site; of a folder, its list of files."""
    whole = ROOT / path
    if whole.is_dir():
        return f"source/{path}/files.txt"
    return f"source/{path}.txt" if whole.suffix in AS_TEXT else f"source/{path}"


def on_files(files, config):
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for path in sorted({link for page in pages for link in LINK.findall(page.read_text())}):
        whole = ROOT / path
        if whole.is_dir():
            names = "\n".join(sorted(p.name for p in whole.iterdir() if p.is_file()))
            files.append(File.generated(config, place(path), content=names))
        elif whole.is_file():
            files.append(File.generated(config, place(path), content=whole.read_bytes()))
    return files


def on_page_markdown(markdown, page, **_):
    """A link to the repository becomes one to its copy; one that leads nowhere stays, and warns."""
    if page.file.src_uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[page.file.src_uri]}

    def to_copy(match):
        path = str(PurePosixPath(match[1]))
        return f"]({place(path)})" if (ROOT / path).exists() else match[0]

    return LINK.sub(to_copy, markdown)
