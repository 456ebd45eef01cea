"""Waits of remote calls, and of the threads that serve them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distsim.debug.matching.index import DEAD, EvidenceIndex
from distsim.debug.matching.remote_calls import Actor, anyone, serving
from distsim.debug.matching.secondary_errors import aftermath
from distsim.debug.records import CallRecord, CallWait, HostWait, Phase, Wait

__all__ = ["RemoteNeed", "RemoteWaits"]


@dataclass(frozen=True, slots=True)
class RemoteNeed:
    """A wait for ranks, or for threads that serve calls: for all of them or for any one."""

    wait: Wait
    ranks: tuple[Actor, ...]
    any_of: bool = False
    mismatch: int | None = None
    """Number of the contradiction that the call ran into, so that the need can never be met; None if it can."""

    @property
    def hopeless(self) -> bool:
        return self.mismatch is not None or (self.any_of and not self.ranks)


class RemoteWaits:
    """The part of a wait-for graph that is torch.distributed.rpc's. *moving*: the running ranks that are trusted."""

    def __init__(self, index: EvidenceIndex, moving: Collection[int], nothing_moves: bool) -> None:
        self._index = index
        self._moving = frozenset(moving)
        self._nothing_moves = nothing_moves
        self._patience_s = 0.0 if nothing_moves else index.evidence.hang_after_s
        self.since_s: dict[Actor, float] = {serving(one): one.issued_s for one in self.served()}
        """Time since which each thread serves a call, or each worker owes a reply."""
        self._comers: dict[tuple[Actor, ...], tuple[Actor, ...]] = {}

    def served(self) -> Iterator[CallRecord]:
        """Return all served and unanswered calls."""
        for calls in self._index.remote.open.values():
            yield from calls

    def to_serve(self, served: CallRecord, need_of: Callable[[CallRecord], RemoteNeed | None]) -> list[RemoteNeed]:
        """Return the calls in which a serving thread waits; empty if unknown."""
        if self._is_gone(served.rank):
            return [RemoteNeed(CallWait(served), (served.rank,))]
        calls = self._index.remote.waits_of(served, self._index.records(served.rank))
        return [need for call in calls if (need := need_of(call)) is not None]

    def who_comes(self, ranks: tuple[Actor, ...]) -> tuple[Actor, ...]:
        """Return the actors that may reach a group's call of *ranks*: for a serving rank any of its threads. The same
        ranks give the same tuple."""
        serves = self._index.remote.open
        if not serves:
            return ranks
        if ranks not in self._comers:
            several = [r for r in ranks if isinstance(r, int) and r in serves and not self._is_gone(r)]
            self._comers[ranks] = tuple(anyone(r) if r in several and isinstance(r, int) else r for r in ranks)
        comers = self._comers[ranks]
        return ranks if comers == ranks else comers

    def comers(self) -> dict[Actor, list[RemoteNeed]]:
        """Return the threads of a serving rank; any one that continues may reach the call."""
        return {
            anyone(rank): [RemoteNeed(HostWait("a thread"), (rank, *(serving(one) for one in calls)), any_of=True)]
            for rank, calls in self._index.remote.open.items()
        }

    def _is_gone(self, rank: int) -> bool:
        """Return whether the process no longer serves. A program blocked on its host does not keep RPC threads from
        serving."""
        state = self._index.states[rank]
        gone = state.phase in DEAD and state.phase is not Phase.HOST_STUCK
        return rank not in self._moving and (gone or state.silent_s is not None)

    def trusted(self, needs: Mapping[Actor, Sequence[RemoteNeed]]) -> list[Actor]:
        """Return threads and workers that are alive, have shown nothing else, and for which others have not yet waited
        longer than the hang timeout."""
        patience_s, watched_s = self._patience_s, self._index.evidence.watched_s
        return [
            actor
            for actor, since_s in self.since_s.items()
            if not needs.get(actor) and (patience_s is None or watched_s(since_s) < patience_s)
        ]

    def need(self, call: CallRecord) -> RemoteNeed | None:
        """Return the actors that a remote call waits for, or None."""
        assert call.remote is not None
        to, limit_s, patience_s = call.peer, call.remote.gives_up_s, self._index.evidence.hang_after_s
        if to is None:
            return None
        if call.done:  # it failed, and its rank with it
            return RemoteNeed(CallWait(call), (to,)) if self._is_gone(to) and aftermath(call.error) else None
        if limit_s is not None and not self._nothing_moves and (patience_s is None or limit_s <= patience_s):
            return None  # it ends by itself: the program has said when
        if self._is_gone(to):
            return RemoteNeed(CallWait(call), (to,))
        if self._may_be_overwritten(call, to):
            return None
        answer = self._index.remote.answer(call)
        for actor in answer.actors:
            if actor not in self.since_s:
                self.since_s[actor] = call.issued_s
        return RemoteNeed(CallWait(call), answer.actors, any_of=answer.busy is not None)

    def _may_be_overwritten(self, call: CallRecord, to: int) -> bool:
        """Return whether the record of a call's other end may have been overwritten by thousands of later ones.

        A trainer's whole training may be a single remote call.
        """
        index = self._index
        request, rref = index.remote.request_of(call), None if call.remote is None else call.remote.rref
        if request is call and call.op == "to_here":
            return rref is not None and index.truncated(rref[0])
        if index.remote.served(request) is not None or not index.truncated(to):
            return False
        records = index.records(to)
        return not records or records[0].issued_s > request.issued_s

    def to_shut_down(self, call: CallRecord) -> RemoteNeed | None:
        """Return what a worker in its shutdown waits for: all workers must arrive, and no call may be in progress."""
        left = [one for one in self.served() if one.rank in call.group.ranks]
        return RemoteNeed(CallWait(call), tuple(serving(one) for one in left)) if left else None
