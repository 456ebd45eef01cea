"""The cause of one diagnosis, and the locations of its two sides in the program."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.debug.diagnosis.context import Case
from distsim.debug.records import CallRecord, CallWait, Phase, Site
from distsim.debug.records.diagnosis import Diagnosis

__all__ = ["Cause", "Sides", "met_calls", "sides_of"]


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a diagnosis."""

    suggestion: str
    """The cure, in the first words: a report shows it in lines of 80 columns."""
    says: str = ""
    """A sentence of evidence for the explanation."""
    lines: tuple[Site, ...] = ()
    """Lines of the program that the report shows."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Frames of the culprits and of the other ranks, innermost first; empty for a rank that has ended."""

    culprits: tuple[Site, ...]
    others: tuple[Site, ...]
    op: str
    """Operation in which the other ranks wait."""
    culprit_lines: frozenset[tuple[str, int]] = frozenset()
    """File and line of the frames of all that the first culprit has called, and below of the other rank."""
    other_lines: frozenset[tuple[str, int]] = frozenset()


def sides_of(case: Case, d: Diagnosis) -> Sides:
    """Return the frames of the first culprit, and those of another rank.

    A line that the culprit has called before is preferred, because two ranks may reach a call by different loops.
    """
    calls = met_calls(case, d)
    culprit = next(iter(d.culprits), None)
    ways = set() if culprit is None else {record.way for record in case.index.records(culprit)}
    rest = [r for r in calls if r not in d.culprits]
    other = next((r for r in rest if calls[r].way in ways), next(iter(rest), None))
    if other is None:
        other = next((r for r in (*d.victims, *sorted(case.index.states)) if r not in d.culprits), None)
    own, reference = _frames(case, culprit, calls), _frames(case, other, calls)
    return Sides(own, reference, "" if d.call is None else d.call.op, _lines(case, culprit), _lines(case, other))


def _lines(case: Case, rank: int | None) -> frozenset[tuple[str, int]]:
    ways = set() if rank is None else {record.way for record in case.index.records(rank)}
    return frozenset((frame.file, frame.line) for way in ways for frame in way)


def met_calls(case: Case, d: Diagnosis) -> dict[int, CallRecord]:
    """The calls that met at the diagnosed number, by rank."""
    if d.call is None or d.group is None:
        return {}
    for log in case.index.group_logs:
        met = log.meetings.get(d.call.seq)
        if met and log.group == d.group and any(call.op == d.call.op for call in met.values()):
            return met
    return {}


def _frames(case: Case, rank: int | None, calls: dict[int, CallRecord]) -> tuple[Site, ...]:
    if rank is None:
        return ()
    if rank in calls:
        return calls[rank].way
    state = case.index.states[rank]
    if state.phase is Phase.FINISHED or state.over or state.leaving:
        return ()
    for wait in case.index.waits(rank):
        if isinstance(wait, CallWait):
            return wait.record.way
    return state.stack or (() if state.site is None else (state.site,))
