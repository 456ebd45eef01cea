"""Pages of tests on ranks that failed: `pytest --distsim-html DIR`, one file a test."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.debug.postmortem import examine
from distsim.errors import UsageError
from distsim.report.html.extra import needed
from distsim.text.output_files import check_folder

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome

__all__ = ["FLAG", "check_pages", "page_of_outcome", "page_of_records", "page_of_report"]

FLAG = "--distsim-html"
LONGEST = 120
"""Letters of a test's name in that of its file."""


def check_pages(folder: str | None) -> None:
    """Refuse a folder that cannot be one, and a page that cannot be made, before any test runs."""
    if folder:
        check_folder(folder, FLAG)
        needed(FLAG)


def page_of_outcome(folder: str, test: str, outcome: Outcome) -> str:
    """Write the page of a simulated test; what its failure says of it."""
    from distsim.report.html.reports import outcome_document

    return page_of_report(folder, test, outcome_document(outcome, _replay(test)))


def page_of_records(folder: str, test: str, directory: Path) -> str:
    """The same of a real one, from the rings in *directory*; empty where they accuse nobody."""
    from distsim.report.html.reports import records_document

    try:
        found = examine(directory)
    except UsageError:  # no rank came to init_process_group
        return ""
    if not found.diagnoses:
        return ""
    return page_of_report(folder, test, records_document(found.diagnoses, found.evidence, _replay(test)))


def page_of_report(folder: str, test: str, document: Mapping[str, Any]) -> str:
    """Write the page of a report; what its failure says of it: a full disk hides no failure."""
    from distsim.report.html.page import write_page
    from distsim.report.html.pages import run_page

    # The checksum: names that differ only in what no file may be called.
    name = f"{re.sub(r'[^A-Za-z0-9.]+', '-', test).strip('-')[-LONGEST:]}-{zlib.crc32(test.encode()):08x}.html"
    path = Path(folder) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(run_page({**document, "program": test}), str(path))
    except OSError as error:
        return f"no page of this run: {FLAG} {folder} cannot be written ({error.strerror})"
    return f"this run as a page: {path}"


def _replay(test: str) -> str:
    return f"pytest '{test}'"
