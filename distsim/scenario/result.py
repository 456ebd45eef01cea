"""What came of one scenario: plain data that travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Result"]


@dataclass(slots=True)
class Result:
    """One scenario that ran. It passed where *wrong* is empty."""

    name: str
    path: str
    wrong: list[str] = field(default_factory=list)
    """One line for each expectation that failed: path in the file, expected, got."""
    report: str = ""
    """The diagnosis or summary of the run, as people read it."""
    output: str = ""
    """What the ranks printed."""
    replay: str = ""
    """The command that gives the same again, bit for bit."""
    wall_s: float = 0.0
    virtual_time_s: float = 0.0
    exit_code: int = 0
    kind: str = "healthy"
    culprits: tuple[int, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    """Step time, bus bandwidths, the busiest link: for sweeps and baselines."""
    place: tuple[str, int] | None = None
    """File and line that an annotation points at: the first culprit's."""
    notes: list[str] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    """The JSON report (distsim.report/1)."""

    @property
    def passed(self) -> bool:
        return not self.wrong

    @property
    def text(self) -> str:
        """The failure, whole: what was expected, the report, how to see it again."""
        parts = [*self.wrong, *(["", self.report.rstrip()] if self.report else [])]
        if self.output:
            lines = self.output.rstrip().splitlines()
            shown = lines[-40:]
            parts += [
                "",
                f"printed (last {len(shown)} of {len(lines)} lines):",
                *(f"  {line}" for line in shown),
            ]
        parts += ["", f"replay: {self.replay}"]
        return "\n".join(parts).strip() + "\n"
