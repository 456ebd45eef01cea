"""Result of one scenario as plain data that can be sent between processes, and the command that repeats its run.

For CI, the results of a suite are written as JUnit XML, which is valid for Jenkins' xunit plugin (junit-10.xsd, the
strictest schema), and as annotations of GitHub Actions.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from distsim.debug.report.console import stream_width
from distsim.report.html.draw.plots import PageEntry
from distsim.scenario.file.load import Scenario
from distsim.sim.faults.fault import Rule
from distsim.text.github import error_line
from distsim.text.output_files import open_output
from distsim.text.units import format_time

if TYPE_CHECKING:
    from distsim.debug.records import Site
    from distsim.debug.records.diagnosis import Diagnosis
    from distsim.sim.kernel.limits import Limits

NOT_RUN = "not run"
"""Kind of a scenario that could not run because of its file or its environment."""


@dataclass(slots=True)
class Result:
    """The result of one scenario. It passed if *wrong* is empty."""

    name: str
    path: str
    wrong: list[str] = field(default_factory=list)
    """One line for each expectation that failed: path in the file, expected, got."""
    report: str = ""
    """The diagnosis or summary of the run, as people read it."""
    output: str = ""
    """Output of the ranks."""
    replay: str = ""
    """Command that repeats the run exactly."""
    wall_s: float = 0.0
    virtual_time_s: float = 0.0
    exit_code: int = 0
    kind: str = "healthy"
    culprits: tuple[int, ...] = ()
    limit: str = ""
    """Limit of the scenario file that ended the run; empty if none did."""
    step_time: str = ""
    """The step time and how it compares with its baseline, as text; empty if the file expects none."""
    figures: dict[str, float] = field(default_factory=dict)
    """Step time, bus bandwidths, the busiest link: for sweeps and baselines."""
    site: tuple[str, int] | None = None
    """File and line that an annotation points at: the first culprit's."""
    notes: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    """What was explored, and who came last at which line in how many classes; empty for a single run."""
    document: dict[str, Any] = field(default_factory=dict)
    """The JSON report (distsim.report/1)."""

    @property
    def passed(self) -> bool:
        return not self.wrong

    @property
    def ran(self) -> bool:
        return self.kind != NOT_RUN

    @property
    def verdict(self) -> str:
        """Return the result in a few words: the diagnosis, the limit that ended it, or an unexplained exit code."""
        words = [] if self.kind == "healthy" and (self.limit or self.exit_code) else [self.kind]
        if self.limit:
            words.append(f"ended by {self.limit}")
        elif self.kind == "healthy" and self.exit_code:
            words.append(f"exit code {self.exit_code}")
        return ", ".join(words)

    def accuses(self, diagnosis: Diagnosis, site: Site | None) -> None:
        """Set the diagnosis that is shown first, and its location."""
        self.kind, self.culprits = diagnosis.kind.value, diagnosis.culprits
        self.site = None if site is None else (site.file, site.line)

    def ended_by(self, limits: Limits) -> None:
        """Return the limit that ended the run, if any."""
        self.limit = f"limits.{limits.name}"
        self.wrong.insert(0, f"{self.limit}: {limits.reached}")

    @property
    def text(self) -> str:
        """Return the failure, whole: what was expected, the report, how to see it again."""
        parts = [*self.wrong, *(["", self.report.rstrip()] if self.report else [])]
        if self.output:
            lines = self.output.rstrip().splitlines()
            shown = lines[-40:]
            parts += [
                "",
                f"printed (last {len(shown)} of {len(lines)} lines):",
                *(f"  {line}" for line in shown),
            ]
        if self.replay:
            parts += ["", f"replay: {self.replay}"]
        return "\n".join(parts).strip() + "\n"


INDENT = 7
"""Columns before a report or what was explored, where `distsim scenario run` prints it."""
REST = "distsim scenario run --html FILE"
"""Command that shows the whole of a shortened report."""


def report_width() -> int:
    """Return the columns of a report, so that it fits the terminal (in a pipe: COLUMNS) where it is printed."""
    return max(40, stream_width(sys.stdout) - INDENT)


def replay_command(scenario: Scenario, replay: str = "") -> str:
    """Return the command that repeats the run, in the order of the string *replay*."""
    words = ["distsim", "scenario", "run", os.path.relpath(scenario.path), "--seed", str(scenario.spec.seed)]
    if replay:
        words += ["--replay", replay]
    return shlex.join(words)


def never_struck(rule: Rule, ended_s: float | None = None) -> str:
    """Return a note that *rule* never struck, and the remedy if the run ended first, after *ended_s*."""
    text = f"{rule.path}: never struck ({rule}, {rule.when})"
    if ended_s is None or ended_s > rule.when.start_s:
        return text
    return f"{text}; the run was over after {format_time(ended_s)}: choose an earlier at_s, or a call (call = 3)"


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
        orders=result.orders,
    )


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
        if result.orders:
            ET.SubElement(case, "system-out").text = _clean("\n".join(result.orders))
    ET.indent(suites)
    with open_output(path, "wb") as file:
        file.write(ET.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)


def annotation(result: Result, root: str | None = None) -> str:
    """Return the line that GitHub reads, at the culprit's line."""
    file, line = result.site or (result.path, 1)
    title = f"scenario {result.name}: {result.wrong[0]}" if result.wrong else f"scenario {result.name}"
    return error_line(file, line, title, result.text, root)
