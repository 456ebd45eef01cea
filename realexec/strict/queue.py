"""Queue of one group at level strict: the calls that wait for their members, and their comparison."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from os import sched_yield
from time import monotonic
from typing import Any

from distsim.debug.matching.agreement import check_meeting
from distsim.debug.records import CallRecord, Group
from distsim.debug.rings import layout as rings
from distsim.debug.rings.writer import RingWriter
from distsim.errors import CollectiveMismatch
from distsim.realexec.guard.recorder import GroupLog
from distsim.realexec.strict.deferred import Deferred
from distsim.realexec.strict.peers import Peers, StorePeer
from distsim.text.ranks import of_ranks

REFUSED_S, LEAST_S = 0.5, 0.02
"""Largest and smallest number of seconds to wait, after the backend refused a call here, for the refusal on another
rank.

That rank had seen that all agree, and may be descheduled. A rank whose backend accepted the call shows nothing until
the call ends; if that happened, the next wait is shorter.
"""


class Queue:
    """Calls of one group that wait for their members, and the calls that the members show."""

    def __init__(
        self, log: GroupLog, row: int | None, peers: list[Any], group: Group, rank: int, rings_of: Peers
    ) -> None:
        self._rank = rank
        self._rings = rings_of
        self._verdicts: set[tuple[int, ...]] = set()
        """Patterns of fingerprints that were compared in full and match, although fingerprints alone do not decide."""
        self.group_log = log
        self.row = row
        self.peers = peers
        self.group = group
        self.waiting: deque[Deferred] = deque()
        self.turn = threading.Lock()
        """Lock of the thread that makes calls of this queue."""
        self.done = 0
        """Number of the last call that was made."""
        self.again: tuple[int, dict[int, tuple[int, int]]] = (0, {})
        """Number of a call that the backend refused and that is made again, and the fingerprints that the peers
        showed for it.

        If a peer's call is refused, too, the fingerprint that it showed does not belong to the new call.
        """
        self.patience_s = REFUSED_S
        self.remote = any(isinstance(peer, StorePeer) for peer in peers)
        self.rows: list[tuple[memoryview, int]] = []
        """Memory in which each peer shows its calls; empty until all have shown one."""

    def is_near(self) -> bool:
        """Return whether the calls of all members can be read in shared memory."""
        if self.remote or self.row is None:
            return False
        if not self.rows:
            name = self.group_log.key
            rows = [peer.row(name) for peer in self.peers]
            if None in rows:
                return False
            self.rows = [(peer.words, row) for peer, row in zip(self.peers, rows, strict=True)]
        return True

    def meet(self, seq: int, slot: int, print_: int, limit_s: float) -> bool:
        """Poll for the calls *seq* of members on this host for *limit_s* seconds, and yield the core in between.

        Return whether all arrived and their fingerprints show that they agree. *slot* is the position of that number
        in a row.
        """
        until = 0.0
        odd = print_ & 1
        for words, row in self.rows:
            at = row + slot
            while words[at] != seq:
                if not until:
                    until = monotonic() + limit_s
                elif monotonic() > until:
                    return False
                sched_yield()
            if words[at + 1] != print_:
                odd = 1
        if odd:
            answers = self.arrived(seq)
            if answers is None or not self.equal(print_, answers):
                return False
        self.done = seq
        return True

    def arrived(self, seq: int) -> list[tuple[int, int]] | None:
        """Return the entries of all peers, or None while one is missing."""
        name = self.group_log.key
        answers = []
        for peer in self.peers:
            answer = peer.shown_call(name, seq)
            if answer is None or (seq == self.again[0] and self.again[1].get(peer.rank) == answer):
                return None
            answers.append(answer)
        return answers

    def absent(self, seq: int) -> list[Any]:
        """Return the peers that have not made their call *seq*."""
        name, old = self.group_log.key, self.again[1] if seq == self.again[0] else {}
        return [
            peer
            for peer in self.peers
            if (answer := peer.shown_call(name, seq)) is None or answer == old.get(peer.rank)
        ]

    def refused(self, seq: int, index: int, ring: RingWriter) -> bool:
        """Handle a call of this rank that the backend refused, before it is recorded, and return whether its number
        is used up.

        No peer has shown its next call yet. An asynchronous call uses up its number, because others may have
        numbered more calls before they notice. A call that no rank was shown leaves no trace.
        """
        if self.row is None or ring.words[self.row + rings.meeting_slot(seq) + 2] != index + 1:
            return False
        if ring.flags(index) & rings.ASYNC:
            return True
        name = self.group_log.key
        self.again = seq, {peer.rank: shown for peer in self.peers if (shown := peer.shown_call(name, seq)) is not None}
        self.group_log.near = None  # the next call goes the long way, and asks `settle`
        return False

    def settle(self, seq: int) -> None:
        """Wait until the peers have finished with a refused call before its number is used again.

        They would otherwise take the new call for the old one. A peer whose old call was not refused is compared by
        that call.
        """
        name, old = self.group_log.key, self.again[1] if seq == self.again[0] else {}
        until = monotonic() + self.patience_s
        for peer in self.peers:
            while (shown := old.get(peer.rank)) is not None and not peer.refused(name, seq, shown):
                if (late := monotonic() > until) or peer.gone():
                    del old[peer.rank]
                    self.patience_s = max(self.patience_s / 4, LEAST_S) if late else self.patience_s
                    break
                sched_yield()

    def late(self, seq: int, timeout_s: float) -> str:
        """Return the error text for a call that timed out."""
        who = of_ranks(peer.rank for peer in self.absent(seq))
        # Programs look for gloo's words, with a space before and after.
        return (
            f"[distsim] Timed out waiting {timeout_s * 1000:.0f}ms for {who} to make call #{seq} on group "
            f"{self.group.label} ({of_ranks(self.group.ranks)})"
        )

    def _pattern(self, print_: int, answers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the fingerprints of this rank and of its peers, in the order of the peers."""
        return (print_, *[answer[0] for answer in answers])

    def equal(self, print_: int, answers: Sequence[tuple[int, int]]) -> bool:
        """Return whether the fingerprints alone show that the members agree."""
        if self._verdicts and self._pattern(print_, answers) in self._verdicts:
            return True
        if print_ & 1:
            return False
        for answer in answers:  # noqa: SIM110  (every microsecond counts here)
            if answer[0] != print_:
                return False
        return True

    def compare(self, seq: int, print_: int, index: int, answers: Sequence[tuple[int, int]]) -> None:
        """Raise CollectiveMismatch if the members' calls contradict each other."""
        if self.equal(print_, answers):
            return
        records = self._records(seq, index, answers)
        mismatch = check_meeting(records) if len(records) > 1 else None
        if mismatch is None:
            if len(records) == len(self.group.ranks):
                self._verdicts.add(self._pattern(print_, answers))
            return
        from distsim.realexec.strict.refusal import refusal_text  # the diagnosis, which few jobs ever need

        readers = [
            peer.reader
            for peer in (self._rings.neighbour(self.group_log.world, self._rank), *self.peers)
            if peer and peer.reader
        ]
        raise CollectiveMismatch(refusal_text(mismatch, records, self._rank, readers), records)

    def _records(self, seq: int, index: int, answers: Sequence[tuple[int, int]]) -> list[CallRecord]:
        name = self.group_log.key
        me = self._rings.neighbour(self.group_log.world, self._rank)
        records = [me.record(name, seq, index) if me is not None else None]
        for peer, answer in zip(self.peers, answers, strict=True):
            records.append(peer.record(name, seq, answer[1]))
        return [record for record in records if record is not None]
