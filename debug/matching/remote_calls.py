"""Remote calls in the evidence: which thread serves which call, and what an open call waits for.

An *actor* is a rank (its program's own threads), a thread that serves one call, or the agent of a worker, which
handles requests and replies as long as its process lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distsim.debug.records import CallRecord
from distsim.debug.records.call import SERVE

__all__ = ["Actor", "Answer", "RemoteCalls", "agent", "anyone", "rank_of", "serving"]

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
