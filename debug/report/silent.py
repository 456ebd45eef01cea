"""Silent findings as a section of a report, and the search for them at the end of a real job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distsim.debug.diagnosis.silent.facts import Severity, SilentFinding
from distsim.debug.messages import ranks_text, site_text
from distsim.debug.report.console import Line
from distsim.debug.report.news import show

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTICE: "bold"}
SHOWN = 8
"""Findings that are shown in full, and tensors that a heading names."""


class SilentReport:
    """The SILENT section as a rich renderable."""

    def __init__(self, findings: Sequence[SilentFinding]) -> None:
        self.findings = findings

    def plain(self, width: int = 80) -> str:
        """Return the section as text without color, *width* columns wide."""
        return "\n".join(part.plain for line in silent_lines(self.findings) for part in line.wrapped(width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in silent_lines(self.findings):
            yield from line.wrapped(options.max_width)


def silent_lines(findings: Sequence[SilentFinding]) -> list[Line]:
    """Return the lines of the section."""
    lines = []
    for finding in findings[:SHOWN]:
        names = ", ".join(finding.tensors[:SHOWN])
        names += f" and {len(finding.tensors) - SHOWN} more" if len(finding.tensors) > SHOWN else ""
        heading = ["SILENT", finding.level.value, finding.kind.label, names, ranks_text(finding.ranks)]
        heading.append(f"at step {finding.step}" if finding.step else "before the first step")
        lines.append(Line("  ".join(part for part in heading if part), 0, 8, STYLES[finding.level]))
        where = (
            ""
            if finding.site is None
            else f" The {'step' if finding.tensors else 'call'} is at {site_text(finding.site)}."
        )
        apart = "" if finding.distance is None else f" Distance: {finding.distance:.2g}."
        lines.append(Line(" ".join(filter(None, [finding.explanation, finding.evidence])) + where + apart))
        lines.append(Line(f"next: {finding.suggestion} See {finding.see}", style="bold"))
    if len(findings) > SHOWN:
        lines.append(Line(f"... and {len(findings) - SHOWN} more silent findings (--report FILE has all)", 0))
    return lines


def search_silent(
    rings: Mapping[int, Path], world_size: int, patterns: Sequence[str], say: Callable[[str], None]
) -> list[dict[str, Any]] | None:
    """Print the silent findings from the ranks' own records, and return them for the report; None if the search
    failed.

    They come after the verdict, which they do not change.
    """
    from distsim.debug.diagnosis.silent.judge import search  # numpy, and all checks: few jobs ask for it

    try:
        result = search(rings, world_size, patterns)
    except Exception as error:  # an extra: the verdict stands
        say(f"silent faults: not searched, because the search itself failed with {type(error).__name__}")
        return None
    for note in result.notes:
        say(note)
    if result.findings:
        show(SilentReport(result.findings))
    return [finding.to_json() for finding in result.findings]
