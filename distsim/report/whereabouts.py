"""Where every rank was when a run was cut short, and who left with which exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.words.phrases import capital, ranks_text, several, state_text

if TYPE_CHECKING:
    from distsim.debug.records import Evidence
    from distsim.sim.outcome import Outcome

__all__ = ["Whereabouts", "leavers", "whereabouts"]


def whereabouts(evidence: Evidence) -> list[str]:
    """One sentence for all ranks at the same place, in the order of their first rank."""
    together: dict[str, list[int]] = {}
    for rank, state in sorted(evidence.ranks.items()):
        calls = evidence.records.get(rank, ())
        text = state_text(state, state.waits, calls[-1] if calls else None)
        together.setdefault(text, []).append(rank)
    return _sentences(together)


def leavers(outcome: Outcome) -> list[str]:
    """Ranks that left with an exit code and without a traceback that would say why."""
    told = {rank for failure in outcome.failures for rank in failure.ranks}
    together: dict[str, list[int]] = {}
    for summary in outcome.ranks:
        if summary.exit_code and summary.rank not in told:
            together.setdefault(f"left with exit code {summary.exit_code}", []).append(summary.rank)
    return _sentences(together)


def _sentences(together: Mapping[str, Iterable[int]]) -> list[str]:
    return [f"{capital(ranks_text(ranks))} {several(text, ranks)}" for text, ranks in together.items()]


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
