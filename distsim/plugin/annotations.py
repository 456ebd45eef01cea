"""GitHub Actions annotations of failed tests on ranks and of failed scenarios."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pytest

from distsim.debug.records.frames import Owner, owner
from distsim.text.github import error_line


def in_library(file: str) -> bool:
    """Return whether *file* belongs to Python, distsim or another package."""
    return owner(os.path.abspath(file)) is not Owner.USER


def annotated_line(item: pytest.Item, report: pytest.TestReport) -> tuple[str, int]:
    """Return the file and line to annotate: the scenario's culprit, the line where the body failed, or else the test
    itself.
    """
    culprit: tuple[str, int] | None = getattr(item, "culprit", None)
    if culprit is not None:
        return os.path.abspath(culprit[0]), culprit[1]
    trace = getattr(report.longrepr, "reprtraceback", None)
    inner = [getattr(entry, "reprfileloc", None) for entry in reversed(getattr(trace, "reprentries", ()))]
    for spot in (getattr(report.longrepr, "reprcrash", None), *inner):
        if spot is not None and not in_library(spot.path):
            return os.path.abspath(spot.path), spot.lineno
    return str(item.path), (item.location[1] or 0) + 1


def error_lines(reports: Iterable[object]) -> Iterator[str]:
    """Yield one line for each of *reports* that failed and has a place."""
    for report in reports:
        where = getattr(report, "distsim_place", None)
        if where is None or not isinstance(report, pytest.TestReport) or not report.failed:
            continue
        text = report.longreprtext.strip()
        crash = getattr(report.longrepr, "reprcrash", None)
        message = getattr(report, "distsim_headline", None) or (crash.message if crash is not None else text)
        yield error_line(where[0], where[1], f"{report.head_line}: {message.partition(chr(10))[0]}", text)
