"""Writes what of docs is made: `python -m tests.docs.generate`."""

from __future__ import annotations

from tests.docs.reference import PAGES
from tests.docs.reports import fill
from tests.house.tree import ROOT


def main() -> None:
    """The pages of reference, and the reports that pages show."""
    for name, made in PAGES.items():
        (ROOT / "docs" / name).write_text(made().rstrip() + "\n", encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text), encoding="utf-8")


if __name__ == "__main__":
    main()
