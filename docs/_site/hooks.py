"""What the site does beside showing pages: notebooks become pages, linked files come along.

A link in a page to a file of the repository (``../benchmarks/step.py``) works on a code host; on
the site it leads to a copy of that file. A link to a folder becomes its name.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?\[[^\]]*\])\(((?:\.\./)+[^)#]+)\)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
COPIES = "repository"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and the files that pages link to."""
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        name = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=page_of(path)))
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes()))
    for target in sorted(linked(files)):
        content = (ROOT / target).read_bytes()
        files.append(File.generated(config, f"{COPIES}/{target}.txt", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links out of ``docs`` to the copies."""
    here = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = outside(here, link[2])
        if target is None:
            return link[0]
        if (ROOT / target).is_dir():
            return link[1][1:-1]
        return f"{link[1]}({posixpath.relpath(f'{COPIES}/{target}.txt', here or '.')})"

    return LINK.sub(moved, markdown)


def linked(files: Files) -> set[str]:
    """Files of the repository that pages link to."""
    found = set[str]()
    for file in files.documentation_pages():
        here = posixpath.dirname(file.src_uri)
        targets = (outside(here, link[2]) for link in LINK.finditer(file.content_string))
        found |= {each for each in targets if each and not (ROOT / each).is_dir()}
    return found


def outside(here: str, target: str) -> str | None:
    """Where a link leads in the repository, or None where it stays in ``docs``."""
    path = posixpath.normpath(posixpath.join("docs", here, target))
    return None if path.startswith("docs/") else path


def page_of(notebook: Path) -> str:
    """A notebook as Markdown: text as it is, code and what it printed as blocks."""
    content = json.loads(notebook.read_text())
    parts = [part for cell in content["cells"] for part in parts_of(cell)]
    return "\n\n".join([parts[0], f"[Download this notebook]({notebook.name})", *parts[1:]])


def parts_of(cell: dict[str, Any]) -> list[str]:
    """One cell: its source, what it printed, and what it drew."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    printed = "".join("".join(each.get("text", ())) for each in cell["outputs"])
    parts = [fenced(source, "python")]
    if printed.strip():
        parts.append(fenced(COLOUR.sub("", printed), "text"))
    return [*parts, *(shown(each["data"]) for each in cell["outputs"] if "data" in each)]


def shown(data: dict[str, Any]) -> str:
    """A value that a cell ended with: a drawing, or its text."""
    if "image/svg+xml" in data:
        drawing = "".join(data["image/svg+xml"])
        return f'<figure markdown="0">\n{drawing}\n</figure>'
    return fenced("".join(data["text/plain"]), "text")


def fenced(text: str, language: str) -> str:
    """A block of code or output."""
    return f"````{language}\n{text.rstrip()}\n````"
