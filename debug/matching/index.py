"""Index of the evidence: the ranks of each collective, pairs of send and receive, and all waits.

Remote calls have actors: a rank (its program's own threads), a thread that serves one call, or the agent of a worker,
which handles requests and replies as long as its process lives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from distsim.debug.matching.secondary_errors import aftermath, lost_in, unrelated
from distsim.debug.records import P2P, CallRecord, CallWait, Evidence, Group, Phase, RankState, State, Wait
from distsim.debug.records.call import REMOTE_CALLS, SERVE
from distsim.debug.records.obligations import CREATIONS

Actor = int | tuple[str, int, int]
"""A rank, ("serving", rank, index of the record), ("agent", rank, 0), or ("anyone", rank, 0)."""


def serving(record: CallRecord) -> Actor:
    """Return the actor that serves the call of *record* (an `rpc_serve` record)."""
    return "serving", record.rank, record.index


def agent(rank: int) -> Actor:
    """Return the actor that handles requests and replies for *rank*."""
    return "agent", rank, 0


def anyone(rank: int) -> Actor:
    """Return the actor that stands for any thread of a rank that may make a group's call."""
    return "anyone", rank, 0


def rank_of(actor: Actor) -> int:
    """Return the rank of its process."""
    return actor if isinstance(actor, int) else actor[1]


@dataclass(frozen=True, slots=True)
class Answer:
    """The threads or workers for which an open remote call waits."""

    actors: tuple[Actor, ...]
    busy: int | None = None
    """Rank of a worker whose threads are all busy, so that the end of any one of *actors* is enough; None if a
    thread is free.
    """


class RemoteCalls:
    """Index of all records of remote calls."""

    def __init__(self, records: Mapping[int, Sequence[CallRecord]]) -> None:
        self._by_number: dict[tuple[int, int], CallRecord] = {}
        self._serves: dict[tuple[int, int], CallRecord] = {}
        """Served calls by rank and index of the request."""
        self._makers: dict[tuple[int, int], CallRecord] = {}
        """`remote` calls by the RRefId of the value that they requested."""
        self.open: dict[int, list[CallRecord]] = {}
        """Calls that each rank serves and has not answered, by rank."""
        self._names: dict[int, str] = {}
        for rank, calls in records.items():
            for call in calls:
                if call.remote is None:
                    continue
                self._by_number[rank, call.index] = call
                self._names[rank] = call.remote.callee if call.op == SERVE else call.remote.caller
                if call.op != SERVE:
                    if call.op == "remote" and call.remote.rref is not None:
                        self._makers[call.remote.rref] = call
                    continue
                if call.remote.request is not None:
                    self._serves[call.remote.request] = call
                if not call.done:
                    self.open.setdefault(rank, []).append(call)

    def __bool__(self) -> bool:
        return bool(self._by_number)

    def request(self, served: CallRecord) -> CallRecord | None:
        """Return the caller's record of a served call."""
        number = served.remote.request if served.remote is not None else None
        return self._by_number.get(number) if number is not None else None

    def served(self, call: CallRecord) -> CallRecord | None:
        """Return the callee's record of a call, if the callee has started it."""
        return self._serves.get((call.rank, call.index))

    def request_of(self, call: CallRecord) -> CallRecord:
        """Return the request that an open call waits for. A fetch waits for the request that creates its value."""
        rref = call.remote.rref if call.remote is not None and call.op == "to_here" else None
        return call if rref is None else self._makers.get(rref, call)

    def name(self, rank: int) -> str | None:
        """Return the name of its worker."""
        return self._names.get(rank)

    def record(self, actor: Actor) -> CallRecord | None:
        """Return the call that a serving actor serves."""
        return self._by_number.get(actor[1:]) if isinstance(actor, tuple) and actor[0] == "serving" else None

    def waits_of(self, served: CallRecord, calls: Sequence[CallRecord]) -> list[CallRecord]:
        """Return the calls among *calls* in which the serving thread waits."""
        if served.is_async:
            return []
        return [
            call
            for call in calls
            if call.index > served.index
            and call.thread == served.thread
            and call.op != SERVE
            and not call.done
            and (call.waited or not call.is_async)
        ]

    def busy(self, rank: int) -> list[CallRecord]:
        """Return what occupies the threads of a rank's worker if none is free."""
        held = [one for one in self.open.get(rank, ()) if not one.is_async]
        limit = next((one.remote.threads for one in held if one.remote is not None and one.remote.threads), 0)
        return held if limit and len(held) >= limit else []

    def answer(self, call: CallRecord) -> Answer:
        """Return the threads or workers that must act before the open *call* returns."""
        remote, to = call.remote, call.peer
        assert remote is not None
        if to is None:
            return Answer(())
        request = self.request_of(call)
        served = self._serves.get((request.rank, request.index))
        if served is not None and not served.done:
            return Answer((serving(served),))
        if served is None and (held := self.busy(to)):
            return Answer(tuple(serving(one) for one in held), busy=to)
        if served is not None and request is call and (held := self.busy(call.rank)):  # a reply takes a thread, too
            return Answer(tuple(serving(one) for one in held), busy=call.rank)
        return Answer((agent(to),))


APART = CREATIONS | {"init_process_group"}
"""Operations with their own numbering. They are kept even if the rank's other calls of that time are overwritten."""
DEAD = frozenset(
    {Phase.FINISHED, Phase.EXITED, Phase.RAISED, Phase.KILLED, Phase.FROZEN, Phase.HOST_STUCK, Phase.ABSENT}
)
"""Phases in which a rank makes no further call without outside help."""


@dataclass(slots=True)
class GroupCalls:
    """The collectives of one group, by number. A world that is initialized again has a new log."""

    id: int
    group: Group
    meetings: dict[int, dict[int, CallRecord]] = field(default_factory=dict)
    """Call of each rank, by number and rank."""
    calls: dict[int, list[CallRecord]] = field(default_factory=dict)
    """Calls of each rank, in order."""

    def absent(self, seq: int) -> list[int]:
        met = self.meetings.get(seq, {})
        return [rank for rank in self.group.ranks if rank not in met]


@dataclass(slots=True)
class Pairing:
    """Sends and receives, matched first come first served by (sender, receiver, tag, group)."""

    partner: dict[int, CallRecord] = field(default_factory=dict)
    """Other end of each message, by id of the record."""
    lonely_sends: list[CallRecord] = field(default_factory=list)
    lonely_recvs: list[CallRecord] = field(default_factory=list)

    def of(self, record: CallRecord) -> CallRecord | None:
        return self.partner.get(id(record))


class EvidenceIndex:
    """Evidence with the look-ups that a diagnosis needs. It does not judge."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.states: dict[int, RankState] = {
            rank: evidence.ranks.get(rank) or _unknown(evidence, rank)
            for rank in range(evidence.world_size)
            if rank not in evidence.not_run
        }
        self.strangers: set[int] = set()
        """Ranks that records name although the world has no such rank (damaged records)."""
        self._records: dict[int, Sequence[CallRecord]] = {
            rank: [call for call in calls if not call.rejected] if any(call.rejected for call in calls) else calls
            for rank, calls in evidence.records.items()
        }
        """Records by rank, without calls that their own rank refused, because no other rank noticed these."""
        self.refused = [call for rank in sorted(evidence.records) for call in evidence.records[rank] if call.rejected]
        self.group_logs: list[GroupCalls] = []
        self._logs_of: dict[tuple[str, tuple[int, ...], str], list[GroupCalls]] = {}
        """Logs by the group's name and ranks, and by operation if that has logs of its own."""
        self._logs_of_members: dict[tuple[str, int, str], list[GroupCalls]] = {}
        """The same logs by the identity of the ranks, because hashing thousands of ranks for each rank is slow."""
        self._num_own: dict[tuple[int, int], int] = {}
        """Number of logs that a rank is in, of those of one group, by the identity of their list and the rank; a rank
        enters them in order.
        """
        self._p2p: list[CallRecord] = []
        self._index()
        self._died_inside: dict[int, CallRecord | None] = {}
        self.pairs = self._match()
        self.remote = RemoteCalls(self._records)

    # --- records

    def _index(self) -> None:
        known: dict[int, frozenset[int]] = {}  # id(group) -> its members
        for rank in sorted(self.evidence.records):
            current: dict[tuple[int, str], tuple[GroupCalls, list[CallRecord]]] = {}  # the log, and the rank's calls
            groups: dict[int, bool] = {}  # id(group) -> whether the rank is a member
            since = self._in_a_row(rank)
            for record in self.records(rank):
                member = groups.get(id(record.group))
                if member is None:
                    members = known.get(id(record.group))
                    if members is None:
                        members = known[id(record.group)] = frozenset(record.group.ranks)
                        self._know(record.group.ranks)
                    member = groups[id(record.group)] = rank in members
                if record.peer is not None and record.peer not in self.states:
                    self._know((record.peer,))
                if record.new_ranks is not None:
                    self._know(record.new_ranks)
                if record.remote is not None or (record.index < since and record.done and record.is_async):
                    continue
                if not member:
                    continue  # a group whose members could not be read: who met whom is not known
                if record.op in P2P:
                    self._p2p.append(record)
                    continue
                where = id(record.group), self._apart(record)
                entry, seq = current.get(where), record.seq
                if entry is None or (seq <= 1 and rank in entry[0].meetings.get(seq, ())):
                    log = self._open(record)
                    entry = current[where] = log, log.calls.setdefault(rank, [])
                log, calls = entry
                if record.op == "destroy_process_group":
                    continue  # nobody waits in it: who destroyed a group comes to no further meeting
                met = log.meetings.get(seq)
                if met is None:
                    met = log.meetings[seq] = {}
                if rank not in met:
                    met[rank] = record
                    calls.append(record)
        for log in self.group_logs:  # of a rank that has only destroyed the group, nothing is known in it
            log.calls = {rank: sorted(calls, key=lambda r: r.seq) for rank, calls in log.calls.items() if calls}
        self._know_awaited()

    def _know_awaited(self) -> None:
        for state in list(self.states.values()):
            for wait in state.waits:  # in a call that its own rank refused, too
                if isinstance(wait, CallWait):
                    self._know(wait.record.members)

    def _in_a_row(self, rank: int) -> int:
        """Return the number from which on all calls of a rank are recorded.

        Earlier records are kept if their handle was never waited for, without their neighbours; a missing one among
        them proves nothing.
        """
        if rank not in self.evidence.cut:
            return 0
        numbers = [record.index for record in self.evidence.records.get(rank, ())]
        return next((after for before, after in reversed([*pairwise(numbers)]) if after - before > 1), 0)

    def _apart(self, record: CallRecord) -> str:
        """Return the part of a log's key that keeps other numbering apart; after forgotten calls numbers alone do not
        identify a log."""
        return record.op if self.evidence.cut and record.op in APART else ""

    def _know(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank not in self.states:
                self.states[rank] = RankState(rank)
                self.strangers.add(rank)

    def _open(self, record: CallRecord) -> GroupCalls:
        """Return the log that the record belongs to. A second call with number 1 of a rank starts a new log."""
        group, rank = record.group, record.rank
        logs = self._logs(group, self._apart(record))
        own = self._num_own.get((id(logs), rank), 0)
        if own and (record.seq > 1 or rank not in logs[own - 1].meetings.get(record.seq, ())):
            return logs[own - 1]
        if own == len(logs):
            logs.append(GroupCalls(len(self.group_logs), group))
            self.group_logs.append(logs[own])
        self._num_own[id(logs), rank] = own + 1
        return logs[own]

    def _logs(self, group: Group, apart: str) -> list[GroupCalls]:
        """Return the logs of the groups with the same name and ranks."""
        where = group.name, id(group.ranks), apart
        logs = self._logs_of_members.get(where)
        if logs is None:
            logs = self._logs_of.setdefault((group.name, group.ranks, apart), [])
            self._logs_of_members[where] = logs
        return logs

    def group_log(self, record: CallRecord) -> GroupCalls | None:
        """Return the log of the group of a collective that is among the evidence's records, or of an equal copy of
        it.
        """
        group, apart = record.group, self._apart(record)
        logs = self._logs_of_members.get((group.name, id(group.ranks), apart))
        if logs is None:
            logs = self._logs_of.get((group.name, group.ranks, apart), [])
        holding = [log for log in logs if record.rank in log.meetings.get(record.seq, ())]
        exact = [log for log in holding if log.meetings[record.seq][record.rank] is record]
        return next(iter(exact or holding[-1:]), None)

    def records(self, rank: int) -> Sequence[CallRecord]:
        return self._records.get(rank, ())

    def truncated(self, rank: int) -> bool:
        """Return whether its oldest records were overwritten."""
        records = self.evidence.records.get(rank, ())
        return rank in self.evidence.cut or (bool(records) and records[0].index > 0)

    def last(self, rank: int) -> CallRecord | None:
        records = self.records(rank)
        return records[-1] if records else None

    # --- point to point

    def _match(self) -> Pairing:
        pairing = Pairing()
        queues: dict[tuple[str, int, int, int | None], deque[CallRecord]] = {}
        recvs: list[CallRecord] = []
        for record in self._p2p:
            lossy = self.truncated(record.rank) or (record.peer is not None and self.truncated(record.peer))
            if lossy and record.done:
                continue  # its other end may be lost; done is done
            if record.op == "send":
                to = -1 if record.peer is None else record.peer
                queues.setdefault((record.group.name, record.rank, to, record.tag or 0), deque()).append(record)
            else:
                recvs.append(record)
        for recv in sorted(recvs, key=lambda r: r.peer is None):  # those from any source get what is left
            candidates = [
                queue
                for source in (recv.group.ranks if recv.peer is None else (recv.peer,))
                if (queue := queues.get((recv.group.name, source, recv.rank, recv.tag or 0)))
            ]
            if candidates:
                send = min(candidates, key=lambda q: (q[0].issued_s, q[0].rank)).popleft()
                pairing.partner[id(send)], pairing.partner[id(recv)] = recv, send
            else:
                pairing.lonely_recvs.append(recv)
        pairing.lonely_sends.extend(send for queue in queues.values() for send in queue)
        pairing.lonely_sends.sort(key=lambda r: (r.rank, r.index))
        return pairing

    def pairs_in_order(self) -> Iterator[tuple[CallRecord, CallRecord]]:
        for record in self._p2p:
            if record.op == "send" and (recv := self.pairs.of(record)) is not None:
                yield record, recv

    # --- waits

    def waits(self, rank: int) -> tuple[Wait, ...]:
        """Return what the rank waits for; for a blocked rank without a known wait, its last unfinished call."""
        state = self.states[rank]
        if state.phase is Phase.BLOCKED and not state.waits:
            unfinished = [r for r in self.records(rank) if not r.done and (r.remote is None or r.op in REMOTE_CALLS)]
            blocking = [r for r in unfinished if not r.is_async]
            if blocking:
                return (CallWait(blocking[-1]),)
            return (CallWait(unfinished[0]),) if unfinished else ()
        return state.waits

    def died_inside(self, rank: int) -> CallRecord | None:
        """Return the call in which a rank raised or was killed. The rank is first of all a victim of that call."""
        if rank not in self._died_inside:
            self._died_inside[rank] = self._last_in(rank, self.states[rank])
        return self._died_inside[rank]

    def _last_in(self, rank: int, state: RankState) -> CallRecord | None:
        if state.phase not in (Phase.RAISED, Phase.KILLED):
            return None
        for wait in state.waits:
            if isinstance(wait, CallWait):
                return wait.record
        calls = [call for call in self.records(rank) if call.op != SERVE]
        if not calls:
            return None
        last, raised = calls[-1], state.phase is Phase.RAISED
        if raised and (lost := lost_in(calls, state)) is not None:
            return lost
        followed = raised and aftermath(state.exception)
        # One that failed behind the program's back is nothing to a rank that raised something of its own.
        unseen = raised and not followed and last.is_async and not last.waited
        unseen = unseen or (raised and unrelated(last, state))
        if (last.state is State.FAILED and not unseen) or (not last.done and not last.is_async):
            return last
        if not followed:
            return None
        # A wait in C++ (DDP's reducer) leaves no record: what was lost is the oldest call still under way.
        return next((call for call in calls if not call.done and not call.is_p2p), None)

    def call_waits(self, rank: int) -> list[CallRecord]:
        """Return the calls that the rank cannot get past, including a call in which it died."""
        state = self.states[rank]
        if state.phase is Phase.BLOCKED:
            return [w.record for w in self.waits(rank) if isinstance(w, CallWait)]
        died = self.died_inside(rank)
        return [died] if died is not None else []


def _unknown(evidence: Evidence, rank: int) -> RankState:
    """Return the state of a rank without one: it runs if it ever made a call."""
    return RankState(rank, Phase.RUNNING if evidence.records.get(rank) else Phase.ABSENT)
