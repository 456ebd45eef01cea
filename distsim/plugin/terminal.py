"""Writes to the terminal: the orders explored, and the report of a test that never ends."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap

import pytest

stderr_fd: int | None = None
"""A copy of stderr's file descriptor, made before pytest captures it; None if there is none."""


def keep_stderr() -> None:
    """Copy it, once."""
    global stderr_fd
    if stderr_fd is None and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):
            stderr_fd = os.dup(sys.__stderr__.fileno())


def write_orders(reporter: pytest.TerminalReporter) -> None:
    """Write what the explorations of passed tests have proven, a test a line."""
    reports = [report for report in reporter.stats.get("passed", ()) if report.when == "call"]
    explored = [(report, dict(report.user_properties).get("orders")) for report in reports]
    lines = [(report.nodeid.rpartition("::")[2], text) for report, text in explored if text]
    if not lines:
        return
    reporter.section("orders explored", sep="-")
    width = max(60, min(120, reporter._tw.fullwidth))
    for name, text in lines:
        head, *more = str(text).splitlines()
        for line in (f"{name}: {head}", *(f"  {one}" for one in more)):
            for part in textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False):
                reporter.write_line(part)
