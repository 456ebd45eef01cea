"""The blocks of code in the pages."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.tree import ROOT

__all__ = ["DOCS", "PAGES", "Block", "blocks", "commands"]

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
"""Those that are written by hand."""
_FENCE = re.compile(
    r'^(?P<before>[^\n]*)\n```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One of them, with the line before it."""

    language: str
    title: str | None
    text: str
    before: str


def blocks(page: Path) -> list[Block]:
    """Of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    found = [Block(m["language"], m["title"], m["text"], m["before"]) for m in _FENCE.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE)), f"{page.name}: a fence without its end"
    return found


def commands(block: Block) -> list[list[str]]:
    """The words of each line of a block of shell; a comment is none, a backslash goes on."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
