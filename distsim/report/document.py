"""The JSON report, `"schema": "distsim.report/1"`.

The same content as the terminal's summary, for programs. Two runs with the same seed give the same
bytes: nothing of it is measured on the machine that simulates. Fields are only ever added; what
takes one away or changes its meaning changes the schema's number.

`distsim.report.schema.RunReport` describes its keys (`distsim schema report`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from distsim import __version__
from distsim.debug.messages import ranks_text
from distsim.debug.records.diagnosis import SCHEMA
from distsim.debug.report.console import most_lines, shortened
from distsim.debug.report.render import MAX_REPORT_LINES
from distsim.debug.report.stack_tree import blank_addresses
from distsim.report.training.section import training_section
from distsim.text.output_files import write_text
from distsim.text.ranks import ranges_of
from distsim.text.tracebacks import but_for_numbers, first_difference, others_differ

if TYPE_CHECKING:
    from distsim.errors import Failure
    from distsim.sim.outcome import Outcome, RankSummary

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


def report_document(outcome: Outcome) -> dict[str, Any]:
    """Return the report as JSON data."""
    document = {
        "schema": SCHEMA,
        "version": __version__,
        "program": outcome.program,
        "cluster": outcome.cluster,
        "backend": outcome.backend,
        "seed": outcome.seed,
        "software": outcome.software or None,
        "world_size": outcome.world_size,
        "exit_code": outcome.exit_code,
        "interrupted": outcome.interrupted,
        "proof": outcome.proof,
        "not_traced": ranges_of(outcome.not_traced) if outcome.world_size >= MANY_RANKS else outcome.not_traced,
        "unseen": outcome.unseen,
        "virtual_time_s": outcome.virtual_time_s,
        "events": outcome.events,
        "ranks": [_rank(rank) for rank in outcome.ranks],
        "collectives": outcome.collectives,
        "links": [link for link in outcome.links if link.bytes > 0],
        "diagnoses": _diagnoses(outcome),
        "failures": merge_failures(outcome.failures),
        "silent": [finding.to_json() for finding in outcome.silent],
        "notes": outcome.notes,
    }
    if outcome.training is not None:
        document["training"] = training_section(outcome.training)
    cleaned: dict[str, Any] = clean(document)
    return cleaned


MANY_RANKS = 4_096
"""World size from which ranks that were not traced are ranges."""


def write_report(outcome: Outcome, path: str) -> None:
    """Write the JSON report to *path*; `-` is standard output."""
    text = json.dumps(report_document(outcome), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def _diagnoses(outcome: Outcome) -> list[dict[str, Any]]:
    if not outcome.diagnoses:
        return []
    from distsim.debug.report.shown import with_evidence

    return [diagnosis.to_json() for diagnosis in with_evidence(outcome.diagnoses, outcome.evidence)]


def _rank(rank: RankSummary) -> dict[str, Any]:
    return {name: value for name, value in fields_of(rank).items() if (name, value) != ("peak_memory_bytes", None)}


def fields_of(item: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, whose values are not copied."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


def clean(value: Any) -> Any:
    """Return *value* as JSON data: an object for a dataclass, and null for infinity (such as a loopback link's
    bandwidth) and NaN, which JSON does not have.

    Addresses of objects in messages are blanked, because they differ from run to run.
    """
    if is_dataclass(value):
        value = fields_of(value)
    if isinstance(value, str):
        return blank_addresses(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value
