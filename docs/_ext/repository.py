"""Sphinx extension for the repository's Markdown: table of contents, and links between files.

Pages are changed as they are read, not on disk.  A page that SECTIONS does not name is put into the last
section, and a name without a page is left out.

    docs/*.md                     pages as they are
    docs/project/*.md    <--      SECURITY.md, CHANGELOG.md ... of the repository's root
    links out of docs/   -->      a page; a file to download; the path of a folder; a decision's number
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent

SECTIONS = {
    "Tutorials": ("quickstart/owner", "quickstart/volunteer", "quickstart/sdk"),
    "How-to guides": (
        "lora",
        "volunteering",
        "docker",
        "operations",
        "dashboard",
        "planning",
        "frozen-base",
        "data",
        "adapters",
    ),
    "Reference": (
        "cli",
        "configuration",
        "api",
        "exchanges",
        "benchmarks",
        "project/protocol",
        "project/security-policy",
        "glossary",
    ),
    "Explanation": (
        "how-it-works",
        "architecture",
        "local-steps",
        "overlap",
        "stragglers",
        "pipeline",
        "reliability",
        "comparison",
    ),
    "Project": ("project/contributing", "project/changelog"),  # and whatever is not named above
}
"""Caption -> pages: the four kinds of Diataxis (https://diataxis.fr), and the project's own pages."""

LAST = "Project"
"""The section of pages that are not named."""

RECORDS = DOCS / "decisions"
"""Decision records: for those who change the code, so not in the book; of links to them the text remains."""

BORROWED = {
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/protocol": "gridtrain/network/wire/PROTOCOL.md",
    "project/security-policy": "SECURITY.md",
}
"""Page -> the file whose text it shows."""

CONTENTS = "<!-- contents -->"
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
_BLOCK = re.compile(r"(^```.*?^```)", flags=re.DOTALL | re.MULTILINE)


def contents(found: set[str]) -> str:
    """The table of contents of the pages that are there."""
    named = {page for pages in SECTIONS.values() for page in pages}
    others = sorted(found - named - {"index"})
    parts = []
    for caption, pages in SECTIONS.items():
        there = [page for page in pages if page in found]
        there += others if caption == LAST else []
        if there:
            parts.append(_toctree(there, f":caption: {caption}", ":maxdepth: 1"))
    return "\n\n".join(parts)


def _toctree(pages: list[str], *options: str) -> str:
    return "\n".join(["```{toctree}", *options, "", *pages, "```"])


def relinked(text: str, source: Path, page: str) -> str:
    """`text` of the file `source`, with links that lead to the same from the page `page`."""

    def one(link: re.Match[str]) -> str:
        target, _, anchor = link["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = (source.parent / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return link[0]  # Sphinx will say that it is broken
        if path.is_dir() or (path.suffix == ".md" and _page_of(path) is None):
            name = path.relative_to(ROOT).as_posix()
            if path.is_relative_to(RECORDS) and path.name[:4].isdigit():
                return link["text"]  # such as "decision 0066"
            return f"`{name}`" if link["text"].strip("`") == name else f"{link['text']} (`{name}`)"
        at = _page_of(path)
        to = DOCS / f"{at}.md" if at else path
        href = os.path.relpath(to, (DOCS / page).parent)
        return f"{link['image']}[{link['text']}]({href}{'#' + anchor if anchor else ''})"

    parts = _BLOCK.split(text)  # blocks stand at the odd places; a link's own text may hold `code`
    parts[0::2] = [_LINK.sub(one, part) for part in parts[0::2]]
    return "".join(parts)


def _page_of(path: Path) -> str | None:
    """The page that shows this file, if one does."""
    for page, borrowed in BORROWED.items():
        if path == ROOT / borrowed:
            return page
    if path == ROOT / "README.md":
        return "index"
    if path.suffix == ".md" and path.is_relative_to(DOCS) and not path.is_relative_to(RECORDS):
        return path.relative_to(DOCS).with_suffix("").as_posix()
    return None


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Sphinx has read a page: put in what belongs there."""
    if page in BORROWED:
        borrowed = ROOT / BORROWED[page]
        text = relinked(borrowed.read_text(encoding="utf-8"), borrowed, page)
    else:
        text = relinked(source[0], DOCS / f"{page}.md", page)
    if page == "index":
        text = text.replace(CONTENTS, contents(set(app.env.found_docs)))
    source[0] = text


def outdated(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages whose own file does not tell when they change: they are read at each build."""
    return ["index", *BORROWED]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
