"""A result as a page's overview wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.report.html.page import PageEntry
from distsim.scenario.expect.result import Result

__all__ = ["entry"]


def entry(result: Result, settings: Mapping[str, Any] | None = None) -> PageEntry:
    """Return the entry of a result on a page of several runs.

    *settings* are those of a point of a sweep; there the state of the run counts, and not the file's expectations.
    """
    passed = result.passed if settings is None else result.ran and not result.exit_code and not result.limit
    return PageEntry(
        result.name,
        passed,
        result.verdict,
        wrong=result.wrong,
        settings=settings or {},
        figures=result.figures,
        wall_s=result.wall_s,
        document=result.document,
    )
