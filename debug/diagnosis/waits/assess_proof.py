"""Decides whether a verdict is proven, and how long a running rank is trusted.

A verdict is proven where ranks stay stuck even if every other one moves (see `records.kinds`). A running rank that
others wait for is not a hang. Others may wait `Evidence.straggler_after_s` for it before it is named a straggler (a
warning), and `Evidence.hang_after_s` before it counts as missing; where these are None, a running rank is trusted for
ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

from distsim.debug.diagnosis.causes.program_text import ProgramText
from distsim.debug.diagnosis.context import Case
from distsim.debug.diagnosis.waits.keys import KeySetters
from distsim.debug.diagnosis.waits.locks import waits_for_lock
from distsim.debug.diagnosis.waits.wait_graph import Contradictions, RemoteNeed, WaitGraph
from distsim.debug.matching.index import Actor, EvidenceIndex
from distsim.debug.messages import advice, are, call_text, capital, group_text, ranks_text, site_text, some_ranks_text
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, RankState, StoreWait, Wait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import PROOFS, Kind, Proof

ENDED = frozenset({Phase.FINISHED, Phase.EXITED, Phase.RAISED, Phase.KILLED})
"""Phases in which a process, or its program, has ended."""

UNSEEN_BY_WAITS = frozenset({Kind.NETWORK_FAULT, Kind.NEVER_JOINED})
"""Kinds that other findings report (`Evidence.findings`): by the records all ranks have reached the call."""
INIT = "init_process_group"


def longest_waits(index: EvidenceIndex, ranks: Collection[int]) -> dict[int, CallRecord]:
    """Return, for each of *ranks* for which others wait, the call with the longest wait."""
    wanted = frozenset(ranks)
    graph = WaitGraph(index, wanted)
    late: dict[int, CallRecord] = {}
    oldest: dict[int, tuple[tuple[Actor, ...], CallRecord]] = {}
    for rank, needs in graph.needs.items():
        for need in needs:
            for call in index.call_waits(rank) if isinstance(rank, int) else _call_of(need):
                seen = oldest.get(id(need.ranks))
                if seen is None or call.issued_s < seen[1].issued_s:
                    oldest[id(need.ranks)] = (need.ranks, call)
    for needed, call in oldest.values():
        for actor in needed:
            rank = actor if isinstance(actor, int) or actor[0] != "anyone" else actor[1]
            if isinstance(rank, int) and rank in wanted and (rank not in late or call.issued_s < late[rank].issued_s):
                late[rank] = call
    return late


def _call_of(need: RemoteNeed) -> tuple[CallRecord, ...]:
    return (need.wait.record,) if isinstance(need.wait, CallWait) else ()


class Weigher:
    """Decides which ranks can still continue by themselves, and so what is proven about the others."""

    def __init__(self, index: EvidenceIndex, moving: Collection[int], contradictions: Contradictions) -> None:
        """Args:
        index: The evidence.
        moving: Running ranks that are still expected to arrive.
        contradictions: Contradictions between calls that met.
        """
        self._index = index
        self._patience_s = index.evidence.hang_after_s
        self._moving = frozenset(moving)
        self._contradictions = contradictions
        self._text = ProgramText(index.evidence.sources)
        self._keys = KeySetters(index, self._text)
        self._lost = frozenset(
            rank for finding in index.evidence.findings if finding.kind is Kind.NETWORK_FAULT for rank in finding.ranks
        )
        """Ranks of a host that no longer answers; they may still run."""

    def proof(self, diagnosis: Diagnosis) -> Proof | None:
        """Return the ground of a diagnosis; None if nothing moves any more, so that it is certain."""
        if not self._patience_s:
            return None
        fits = PROOFS[diagnosis.kind]
        for alone in (Proof.SEEN, Proof.NOTHING):
            if alone in fits and (not diagnosis.victims or len(fits) == 1) and diagnosis.kind is not Kind.NETWORK_FAULT:
                return alone
        over = all(self._is_over(rank) for rank in diagnosis.culprits)
        if not over and self.stuck.isdisjoint((*diagnosis.culprits, *diagnosis.victims)):
            return (
                Proof.PATIENCE if diagnosis.kind in UNSEEN_BY_WAITS and self._was_waited(diagnosis) else Proof.NOT_YET
            )
        if over and Proof.GONE in fits:
            return Proof.GONE
        phases = {self._index.states[rank].phase for rank in diagnosis.culprits if rank in self._index.states}
        if phases == {Phase.BLOCKED} and Proof.CIRCLE in fits:
            return Proof.CIRCLE
        return next(proof for proof in (Proof.PATIENCE, Proof.GONE, Proof.CIRCLE, Proof.MET) if proof in fits)

    def _was_waited(self, diagnosis: Diagnosis) -> bool:
        """Return whether a rank has waited until the hang timeout."""
        waiting = diagnosis.victims or diagnosis.culprits
        since = [call.issued_s for rank in waiting for call in self._index.call_waits(rank)]
        return bool(since) and self._index.evidence.watched_s(min(since)) >= (self._patience_s or 0.0)

    def _is_over(self, rank: int) -> bool:
        """Return whether the rank has ended or did not start in time."""
        state = self._index.states.get(rank)
        return state is not None and (state.phase in ENDED or (state.phase is Phase.ABSENT and rank not in self._lost))

    @cached_property
    def stuck(self) -> frozenset[Actor]:
        """Return the ranks that can never continue, regardless of the others."""
        return frozenset(WaitGraph(self._index, self._moving | self._may_move(), self._contradictions).stuck)

    def _may_move(self) -> frozenset[int]:
        """Return blocked ranks that others have waited for less than the hang timeout."""
        evidence, states = self._index.evidence, self._index.states
        waited_ranks = [
            rank
            for rank, state in states.items()
            if (_by_itself(state) and not self._has_edges(rank))
            or (rank in self._lost and state.phase not in (*ENDED, Phase.RUNNING))
        ]
        late = longest_waits(self._index, waited_ranks) if waited_ranks else {}
        movable = set()
        for rank in waited_ranks:
            since = [late[rank].issued_s] if rank in late else []
            own_s = states[rank].since_s
            if states[rank].phase is Phase.BLOCKED and own_s is not None:
                since.append(own_s)
            if not since or evidence.watched_s(min(since)) < (self._patience_s or 0.0):
                movable.add(rank)
        return frozenset(movable)

    def _has_edges(self, rank: int) -> bool:
        """Return whether it is known who alone can end the wait of *rank* on its host: threads in calls, or ranks."""
        return waits_for_lock(self._index, rank, self._text) or self._keys.setters(rank) is not None


def _by_itself(state: RankState) -> bool:
    """Return whether the rank does not move but may continue by itself."""
    if state.phase in (Phase.FROZEN, Phase.HOST_STUCK):
        return True
    return state.phase is Phase.BLOCKED and (
        state.at_large or any(isinstance(wait, StoreWait | HostWait) or _meets(wait) for wait in state.waits)
    )


def _meets(wait: Wait) -> bool:
    """Return whether the rank waits for others to start, which may take long because their host may be booting."""
    return isinstance(wait, CallWait) and wait.record.op == "init_process_group"


def lateness(index: EvidenceIndex) -> dict[int, CallRecord]:
    """Return, for each running rank that others wait for, the call in which they have waited longest."""
    unseen = index.evidence.unseen
    running = [rank for rank, state in index.states.items() if state.phase is Phase.RUNNING and rank not in unseen]
    if not running or (index.evidence.straggler_after_s is None and index.evidence.hang_after_s is None):
        return {}
    return longest_waits(index, running)


def patience(
    index: EvidenceIndex, late: Mapping[int, CallRecord]
) -> tuple[list[int], Callable[[Case], list[Diagnosis]]]:
    """Return the running ranks that have not exceeded the hang timeout, and the stragglers among them as diagnoses."""
    evidence = index.evidence
    # The last beat of a dead job may be older than its last call.
    age = {rank: evidence.watched_s(call.issued_s) for rank, call in late.items()}
    missing = {r for r, s in age.items() if evidence.hang_after_s is not None and s >= evidence.hang_after_s}
    slow = [
        r
        for r, s in age.items()
        if r not in missing and evidence.straggler_after_s is not None and s >= evidence.straggler_after_s
    ]
    moving = [r for r, s in index.states.items() if s.phase is Phase.RUNNING and r not in missing]

    def stragglers(case: Case) -> list[Diagnosis]:
        by_call: dict[tuple[str, str, int, bool], tuple[CallRecord, list[int]]] = {}
        for rank in sorted(slow):
            call = late[rank]
            unseen = call.op == INIT and index.states[rank].host is None
            by_call.setdefault((call.op, call.group.name, call.seq, unseen), (call, []))[1].append(rank)
        result = []
        for (*_, unseen), (call, ranks) in by_call.items():
            waiting = [
                r
                for r in index.states
                for c in index.call_waits(r)
                if (c.op, c.seq, c.group) == (call.op, call.seq, call.group)
            ]
            who, num = ranks_text(ranks), len(set(waiting))
            kind = Kind.NEVER_JOINED if unseen else Kind.STRAGGLER
            if unseen:  # its host may still be booting, and its launcher another one
                late_text = (
                    f"{capital(who)} {are(ranks, 'has', 'have')} not joined {group_text(call.group)} so far, and "
                )
                late_text += "no process of theirs is known here"
            else:
                late_text = f"{capital(who)} {are(ranks, 'is', 'are')} late for {_awaited(call)} on "
                late_text += f"{group_text(call.group)} but still {are(ranks, 'runs', 'run')}{_where(index, ranks[0])}"
            result.append(
                case.diagnosis(
                    kind,
                    ranks,
                    waiting,
                    call=call,
                    explanation=f"{late_text}. "
                    f"{num} {'rank waits' if num == 1 else 'ranks wait'} at {site_text(call.site)} for "
                    f"{evidence.now_s - call.issued_s:.1f} s so far.{case.store_text(waiting) if unseen else ''}",
                    suggestion=advice(kind, who=some_ranks_text(ranks)),
                )
            )
        return result

    return moving, stragglers


def _awaited(call: CallRecord) -> str:
    """Return the call that a late rank has to make; for a message, the call of the other end."""
    return f"rank {call.rank}'s {call_text(call)}" if call.is_of_two else call_text(call)


def _where(index: EvidenceIndex, rank: int) -> str:
    """Return the current or last position of the rank."""
    at, last = index.states[rank].site, index.last(rank)
    if at is not None:
        return f", at {site_text(at)}"
    return (
        "" if last is None or last.site is None else f"; its last call was {call_text(last)} at {site_text(last.site)}"
    )
