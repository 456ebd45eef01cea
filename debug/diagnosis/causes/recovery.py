"""Ranks that died in a job whose groups are reconfigured, and that went on.

Such a death is not a fault: the job was written for it. It becomes one if the other ranks wait for the dead one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from distsim.debug.messages import are, call_text, ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, Evidence, Phase, RankState, State
from distsim.debug.records.obligations import RECOVERIES
from distsim.text.units import format_time

_DEAD = (Phase.KILLED, Phase.EXITED)
"""An exception stays a fault of the program."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A reconfiguration by which ranks went on without others that had died."""

    lost: tuple[int, ...]
    """Ranks that died."""
    record: CallRecord
    """The survivors' last call to end of that reconfiguration."""
    died_s: float | None
    """When the last of them died, if it is known."""
    last: CallRecord | None
    """The survivors' first call that failed."""
    back_s: float | None = None
    """When the ranks, started again, were all members again."""

    @property
    def text(self) -> str:
        """Return the sentence for the report."""
        who, rest = ranks_text(self.lost), ranks_text(self.record.group.ranks)
        at_s = self.record.completed_s or 0.0
        after = lost = back = ""
        if self.died_s is not None:
            after = f", {format_time(at_s - self.died_s)} after {who} ended"
        if self.last is not None:
            lost = f"; {call_text(self.last)} at {site_text(self.last.site)} was lost"
        if self.back_s is not None:
            back = f"; {who} {are(self.lost, 'was', 'were')} back {format_time(self.back_s - at_s)} later"
        return f"{rest} went on without {who} by {self.record.op} at {site_text(self.record.site)}{after}{lost}{back}"


def recoveries(evidence: Evidence, restarted: Mapping[int, float] | None = None) -> list[Recovery]:
    """Return the reconfigurations by which ranks of the job went on without others, in order.

    *restarted* has the time of death of ranks that were started again.
    """
    states = evidence.ranks
    died_s = {r: state.since_s for r, state in states.items() if state.phase in _DEAD and state.exit_code != 0}
    dead: dict[int, float | None] = {**died_s, **(restarted or {})}
    by_group: dict[str, Recovery] = {}
    for record in _reconfigurations(evidence) if dead else ():
        lost = tuple(
            rank
            for rank, end_s in dead.items()
            if rank not in record.group.ranks
            and (end_s is None or record.completed_s is None or record.completed_s >= end_s)
            and _belonged(evidence, rank, record)
        )
        if lost and record.rank not in dead:
            failed = [call for call in _of_group(evidence, record) if call.state is State.FAILED]
            ends_s = [s for rank in lost if (s := dead[rank]) is not None]
            back_s = [_back_s(evidence, rank, record) for rank in lost if restarted and rank in restarted]
            back = max(filter(None, back_s), default=None) if len(back_s) == len(lost) and all(back_s) else None
            recovery = Recovery(lost, record, max(ends_s, default=None), min(failed, key=_begin, default=None), back)
            last = by_group.get(record.group.name)
            if last is None or (record.completed_s or 0.0) >= (last.record.completed_s or 0.0):
                by_group[record.group.name] = recovery
    firsts: dict[tuple[tuple[int, ...], str], Recovery] = {}
    for recovery in by_group.values():  # a later reconfiguration is without the same ranks
        firsts.setdefault((recovery.lost, recovery.record.group.first_name), recovery)
    return list(firsts.values())


def left_behind(evidence: Evidence) -> Evidence:
    """Return *evidence* without what a reconfiguration has left behind: calls of earlier groups, and ranks that died.

    A rank that died a moment ago, in a job that reconfigures, counts as running until others have waited half as long
    as for a running rank. So does one that a reconfiguration waits for: it may be starting again.
    """
    last = {(r.rank, r.group.first_name): r for r in _reconfigurations(evidence)}
    if not last:
        return evidence
    states, lost = dict(evidence.ranks), {rank for recovery in recoveries(evidence) for rank in recovery.lost}
    calls = [call for r, own in evidence.records.items() if r not in lost for call in own if call.op in RECOVERIES]
    lost -= {rank for call in calls if call.completed_s is None for rank in call.group.ranks}
    patience_s = (evidence.hang_after_s or 0.0) / 2
    waits_s = [_waits_s(evidence, state) for state in states.values() if state.phase is Phase.BLOCKED]
    for rank, state in states.items():
        if rank in lost:
            states[rank] = RankState(rank, Phase.FINISHED, exit_code=0, host=state.host)
        elif state.phase is Phase.KILLED and patience_s and max(waits_s, default=0.0) < patience_s:
            if any(other.phase in (Phase.RUNNING, Phase.BLOCKED) for other in states.values()):
                states[rank] = replace(state, phase=Phase.RUNNING, signal=None, exit_code=None, since_s=None)
    raised = {rank for rank, state in evidence.ranks.items() if state.phase is Phase.RAISED}
    gone = lost | {rank for rank in raised if any(rank not in record.group.ranks for record in last.values())}
    records = {
        rank: [
            call for call in calls if rank not in gone and _is_current(call, last.get((rank, call.group.first_name)))
        ]
        for rank, calls in evidence.records.items()
    }
    return replace(evidence, ranks=states, records=records)


def _reconfigurations(evidence: Evidence) -> Iterable[CallRecord]:
    calls = (call for calls in evidence.records.values() for call in calls)
    return sorted((c for c in calls if c.op in RECOVERIES and c.state is State.COMPLETED), key=_begin)


def _begin(call: CallRecord) -> float:
    return call.issued_s


def _back_s(evidence: Evidence, rank: int, record: CallRecord) -> float | None:
    """Return when *rank* was first again in a group of the one that *record* reconfigured."""
    name = record.group.first_name
    own = (call for call in _reconfigurations(evidence) if call.rank == rank and call.group.first_name == name)
    return next((call.completed_s for call in own if call.issued_s >= record.issued_s), None)


def _belonged(evidence: Evidence, rank: int, record: CallRecord) -> bool:
    """Return whether *rank* was a member of an earlier group of the one that *record* reconfigured."""
    name = record.group.first_name
    return any(call.group.first_name == name for call in evidence.records.get(rank, ()))


def _of_group(evidence: Evidence, record: CallRecord) -> list[CallRecord]:
    """Return the calls of the reconfiguration's rank in the group before it."""
    name = record.group.first_name
    calls = evidence.records[record.rank]
    return [c for c in calls if c.group.first_name == name and c.group != record.group and c.index < record.index]


def _is_current(call: CallRecord, last: CallRecord | None) -> bool:
    return last is None or call.group == last.group or call.index > last.index


def _waits_s(evidence: Evidence, state: RankState) -> float:
    begun_s = [wait.record.issued_s for wait in state.waits if isinstance(wait, CallWait)]
    begun_s += [] if state.since_s is None else [state.since_s]  # a reconfiguration waits for keys of the store
    return evidence.now_s - min(begun_s, default=evidence.now_s)
