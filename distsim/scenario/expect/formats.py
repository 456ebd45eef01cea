"""Results for CI: JUnit XML of a suite, and annotations of GitHub Actions.

The XML is what Jenkins' xunit plugin takes (junit-10.xsd), the strictest of its readers.
"""

from __future__ import annotations

import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from distsim.scenario.expect.result import Result
from distsim.text.github import error_line, on_github

__all__ = ["annotation", "on_github", "write_junit"]

_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that are not allowed in XML 1.0 (https://www.w3.org/TR/xml/#charsets)."""


def write_junit(results: Sequence[Result], path: str) -> None:
    """Write *results* to *path*; the report is the text of each failure. What could not run is an error."""
    failed = sum(result.ran and not result.passed for result in results)
    errors = sum(not result.ran for result in results)
    total_s = sum(result.wall_s for result in results)
    figures = {"tests": str(len(results)), "failures": str(failed), "errors": str(errors)}
    figures["time"] = f"{total_s:.3f}"
    suites = ET.Element("testsuites", {"name": "distsim", **figures})
    began = datetime.now(UTC) - timedelta(seconds=total_s)
    where = {"timestamp": began.isoformat(timespec="seconds"), "hostname": _clean(socket.gethostname())}
    suite = ET.SubElement(suites, "testsuite", {"name": "distsim scenarios", "skipped": "0", **figures, **where})
    for result in results:
        folder, _, name = result.name.rpartition("/")
        seconds = f"{result.wall_s:.3f}"
        case = ET.SubElement(suite, "testcase", classname=_clean(folder), name=_clean(name), time=seconds)
        if not result.passed:
            word = "failure" if result.ran else "error"
            failure = ET.SubElement(case, word, message=_clean(result.wrong[0]), type=result.verdict)
            failure.text = _clean(result.text)
    ET.indent(suites)
    Path(path).write_bytes(ET.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)


def annotation(result: Result, root: str | None = None) -> str:
    """Return the line that GitHub reads, at the culprit's line."""
    file, line = result.site or (result.path, 1)
    title = f"scenario {result.name}: {result.wrong[0]}" if result.wrong else f"scenario {result.name}"
    return error_line(file, line, title, result.text, root)
