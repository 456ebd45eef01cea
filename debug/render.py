"""The report people read: verdict, culprit and place first, then who waits, the evidence, what next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.records import Evidence
from distsim.debug.verdict import Diagnosis

__all__ = ["DiagnosisReport", "render_diagnoses"]


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """Knows how to print itself with rich; `plain` gives the same as text."""

    diagnoses: Sequence[Diagnosis]
    evidence: Evidence | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.diagnoses:
            yield Text("HEALTHY  no hang and no inconsistent collective found")
        for d in self.diagnoses:
            yield Text(f"{d.kind.label}: ranks {list(d.culprits)}")
            yield Text(f"  {d.explanation}")
            yield Text(f"  next: {d.suggestion}")

    def plain(self, width: int = 80) -> str:
        """The report as text without colour, *width* columns wide."""
        console = Console(width=width, color_system=None, force_terminal=False, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def render_diagnoses(diagnoses: Sequence[Diagnosis], evidence: Evidence | None = None) -> DiagnosisReport:
    """A rich renderable of *diagnoses*; with *evidence*, stacks and last calls are shown as well."""
    return DiagnosisReport(diagnoses, evidence)
