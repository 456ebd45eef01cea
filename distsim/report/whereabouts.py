"""What the summary of a run that was cut short says: where every rank was, and who left with which exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.report.whereabouts import sentences, whereabouts

if TYPE_CHECKING:
    from distsim.sim.outcome import Outcome

__all__ = ["Whereabouts", "leavers"]


def leavers(outcome: Outcome) -> list[str]:
    """Ranks that left with an exit code and without a traceback that would say why."""
    told = {rank for failure in outcome.failures for rank in failure.ranks}
    together: dict[str, list[int]] = {}
    for summary in outcome.ranks:
        if summary.exit_code and summary.rank not in told:
            together.setdefault(f"left with exit code {summary.exit_code}", []).append(summary.rank)
    return sentences(together)


class Whereabouts:
    """What an unfinished run owes its reader, as a rich renderable; nothing where a diagnosis says it."""

    def __init__(self, outcome: Outcome) -> None:
        self.title, self.lines = "", list[str]()
        if outcome.diagnoses:
            return
        if outcome.interrupted and outcome.evidence is not None:
            self.title, self.lines = "INTERRUPTED", whereabouts(outcome.evidence)
        elif outcome.exit_code:
            self.title, self.lines = "EXITED", leavers(outcome)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.lines:
            yield Text(self.title, style="bold red")
            for line in self.lines:
                yield Text(f"  {line}")
            yield Text()
