"""Decides whether a verdict is proven: which ranks stay stuck even if every other one moves (see `records.kinds`)."""

from __future__ import annotations

from collections.abc import Collection

from distsim.debug.diagnosis.waits.remote_waits import Need
from distsim.debug.diagnosis.waits.wait_graph import Contradictions, WaitGraph
from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.matching.remote_calls import Actor
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, RankState, StoreWait, Wait
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import PROOFS, Kind, Proof

__all__ = ["Weigher", "longest_waits"]

ENDED = frozenset({Phase.FINISHED, Phase.EXITED, Phase.RAISED, Phase.KILLED})
"""Phases of a process, or a program, that is over for good."""

UNSEEN_BY_WAITS = frozenset({Kind.NETWORK_FAULT, Kind.NEVER_JOINED})
"""Somebody else tells of these (`Evidence.findings`): by the records all have come to the call, and none is missing."""


def longest_waits(index: EvidenceIndex, ranks: Collection[int]) -> dict[int, CallRecord]:
    """Those of *ranks* that others wait for in a call -> the call that was waited in the longest."""
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


def _call_of(need: Need) -> tuple[CallRecord, ...]:
    return (need.wait.record,) if isinstance(need.wait, CallWait) else ()


class Weigher:
    """What the ranks of one world can still do by themselves, and so what is proven of them."""

    def __init__(self, index: EvidenceIndex, moving: Collection[int], contradictions: Contradictions) -> None:
        """*moving*: the running ranks that are trusted to come; *contradictions*: of calls that met."""
        self._index = index
        self._patience_s = index.evidence.hang_after_s
        self._moving = frozenset(moving)
        self._contradictions = contradictions
        self._stuck: frozenset[Actor] | None = None
        self._lost = frozenset(
            rank for said in index.evidence.findings if said.kind is Kind.NETWORK_FAULT for rank in said.ranks
        )
        """Of a host that is not heard of: they may run on."""

    def proof(self, found: Diagnosis) -> Proof | None:
        """What a diagnosis rests on; None: nothing moves any more, so whatever it says is so."""
        if not self._patience_s:
            return None
        fits = PROOFS[found.kind]
        for alone in (Proof.SEEN, Proof.NOTHING):
            if alone in fits and (not found.victims or len(fits) == 1) and found.kind is not Kind.NETWORK_FAULT:
                return alone
        over = all(self._is_over(rank) for rank in found.culprits)
        if not over and self.stuck.isdisjoint((*found.culprits, *found.victims)):
            return Proof.PATIENCE if found.kind in UNSEEN_BY_WAITS and self._was_waited(found) else Proof.NOT_YET
        if over and Proof.GONE in fits:
            return Proof.GONE
        phases = {self._index.states[rank].phase for rank in found.culprits if rank in self._index.states}
        if phases == {Phase.BLOCKED} and Proof.CIRCLE in fits:
            return Proof.CIRCLE
        return next(proof for proof in (Proof.PATIENCE, Proof.GONE, Proof.CIRCLE, Proof.MET) if proof in fits)

    def _was_waited(self, found: Diagnosis) -> bool:
        """Somebody has waited in vain for as long as patience lasts."""
        waiting = found.victims or found.culprits
        since = [call.issued_s for rank in waiting for call in self._index.call_waits(rank)]
        return bool(since) and self._index.evidence.watched_s(min(since)) >= (self._patience_s or 0.0)

    def _is_over(self, rank: int) -> bool:
        """It has ended, or has not come up in all the time it had."""
        state = self._index.states.get(rank)
        return state is not None and (state.phase in ENDED or (state.phase is Phase.ABSENT and rank not in self._lost))

    @property
    def stuck(self) -> frozenset[Actor]:
        """Who can never go on, whatever the others do."""
        if self._stuck is None:
            graph = WaitGraph(self._index, self._moving | self._may_move(), self._contradictions)
            self._stuck = frozenset(graph.stuck)
        return self._stuck

    def _may_move(self) -> frozenset[int]:
        """Ranks that stand still, and that others have not yet lost patience with."""
        evidence, states = self._index.evidence, self._index.states
        asked = [
            rank
            for rank, state in states.items()
            if _by_itself(state) or (rank in self._lost and state.phase not in (*ENDED, Phase.RUNNING))
        ]
        late = longest_waits(self._index, asked) if asked else {}
        found = set()
        for rank in asked:
            since = [late[rank].issued_s] if rank in late else []
            own_s = states[rank].since_s
            if states[rank].phase is Phase.BLOCKED and own_s is not None:
                since.append(own_s)
            if not since or evidence.watched_s(min(since)) < (self._patience_s or 0.0):
                found.add(rank)
        return frozenset(found)


def _by_itself(state: RankState) -> bool:
    """It stands still, but nothing that is known keeps it from going on."""
    if state.phase in (Phase.FROZEN, Phase.HOST_STUCK):
        return True
    return state.phase is Phase.BLOCKED and (
        state.at_large or any(isinstance(wait, StoreWait | HostWait) or _meets(wait) for wait in state.waits)
    )


def _meets(wait: Wait) -> bool:
    """It waits for others to come up, which takes as long as it takes: their host may still be booting."""
    return isinstance(wait, CallWait) and wait.record.op == "init_process_group"
