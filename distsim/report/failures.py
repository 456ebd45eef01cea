"""Tracebacks of ranks: equal ones merged, for the report and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim.debug.messages import ranks_text
from distsim.debug.report.console import most_lines, shortened
from distsim.debug.report.render import MAX_REPORT_LINES
from distsim.debug.report.stack_tree import blank_addresses
from distsim.text.tracebacks import but_for_numbers, first_difference, others_differ

if TYPE_CHECKING:
    from distsim.errors import Failure

MAX_KINDS = 8


@dataclass(frozen=True, slots=True)
class MergedFailure:
    """One exception, and every rank that raised it."""

    ranks: tuple[int, ...]
    type: str
    message: str
    traceback: str


def merge_failures(failures: Iterable[Failure]) -> list[MergedFailure]:
    """Merge equal failures, in the order of their first rank.

    Addresses of objects are blanked, because they differ between ranks and runs.
    """
    ranks: dict[tuple[str, str, str], set[int]] = {}
    for failure in failures:
        key = (failure.type, blank_addresses(failure.message), blank_addresses(failure.traceback).rstrip())
        ranks.setdefault(key, set()).update(failure.ranks)
    merged = [MergedFailure(tuple(sorted(who)), *key) for key, who in ranks.items()]
    return sorted(merged, key=lambda failure: failure.ranks)


class Failures:
    """Tracebacks as a rich renderable; empty if no rank raised."""

    def __init__(self, failures: Iterable[Failure], shown_ranks: Iterable[int] = ()) -> None:
        """Collect the failures except those of *shown_ranks*, whose tracebacks a diagnosis already shows."""
        self.failures = [one for one in merge_failures(failures) if not set(one.ranks) <= set(shown_ranks)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        used = 0
        alike: dict[tuple[str, str], list[MergedFailure]] = {}
        for one in self.failures:
            alike.setdefault((one.type, but_for_numbers(one.traceback) or one.message), []).append(one)
        groups = list(alike.values())
        for number, (failure, *others) in enumerate(groups):
            lines = shortened(failure.traceback.splitlines(), most_lines(len(self.failures)))
            used += len(lines) + 2
            if number and used > MAX_REPORT_LINES:
                yield from self._rest([one for group in groups[number:] for one in group])
                return
            head = Text()
            head.append("RAISED", style="bold red")
            head.append(f"  {ranks_text(failure.ranks)}: {failure.type}")
            if failure.message:
                head.append(f": {shortened(failure.message.splitlines()[:1], 1)[0]}")
            yield head
            if lines:
                yield Text("\n".join(f"  {line}" for line in lines), no_wrap=True, overflow="ignore")
            if others:
                used += 1
                yield self._and_others(failure, others)
            yield Text()

    @staticmethod
    def _and_others(first: MergedFailure, others: Sequence[MergedFailure]) -> Text:
        """Return a line about failures that differ from *first* only in the numbers of their messages."""
        ranks = ranks_text([rank for failure in others for rank in failure.ranks])
        last = others[-1]
        difference = first_difference(first.traceback, last.traceback) or f"{last.type}: {last.message}"
        return Text(
            f"  ... and {others_differ(len(others))}, {ranks} (--report FILE); {ranks_text(last.ranks)}: {difference}"
        )

    @staticmethod
    def _rest(failures: Sequence[MergedFailure]) -> Iterator[Text]:
        kinds: dict[str, list[MergedFailure]] = {}
        for failure in failures:
            kinds.setdefault(failure.type, []).append(failure)
        yield Text(f"... and {len(failures)} more different exceptions (all of them: --report FILE)")
        for kind, alike in list(kinds.items())[:MAX_KINDS]:
            ranks = [rank for failure in alike for rank in failure.ranks]
            yield Text(f"  RAISED  {ranks_text(ranks)}: {kind}  ({len(alike)} different)")
        yield Text()
