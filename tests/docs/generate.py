"""Generates the reference pages and the outputs in docs: `python -m tests.docs.generate`.

With `--recorded` those outputs, too, that take minutes.
"""

from __future__ import annotations

import sys

from tests.docs.blocks import PAGES as WRITTEN
from tests.docs.reference import PAGES
from tests.docs.reports import fill
from tests.house.tree import ROOT


def main() -> None:
    """Write the reference pages, and refresh the outputs that other pages show."""
    for name, made in PAGES.items():
        (ROOT / "docs" / name).write_text(made().rstrip() + "\n", encoding="utf-8")
    for page in WRITTEN:
        page.write_text(fill(page, recorded="--recorded" in sys.argv[1:]), encoding="utf-8")


if __name__ == "__main__":
    main()
