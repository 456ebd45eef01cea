"""Code blocks of the documentation pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.tree import ROOT

__all__ = ["DOCS", "PAGES", "Block", "blocks", "commands", "write_titled"]

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("tutorials/*.md")])
"""Pages that are written by hand."""
_FENCE = re.compile(
    r'^(?P<before>[^\n]*)\n```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block and the line before it."""

    language: str
    title: str | None
    text: str
    before: str


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = [Block(m["language"], m["title"], m["text"], m["before"]) for m in _FENCE.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), f"{page.name}: a fence without its end"
    return found


def commands(block: Block) -> list[list[str]]:
    """The words of each command in a shell block, without comments; a backslash continues a line."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_titled(page: Path, folder: Path) -> list[Path]:
    """Write the page's blocks that have a title as files into *folder*."""
    written = []
    for block in blocks(page):
        if block.title is not None:
            written.append(folder / block.title)
            written[-1].write_text(block.text, encoding="utf-8")
    return written
