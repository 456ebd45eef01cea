"""The strict level: a collective goes out only when all its members have called the same.

Each rank shows the fingerprint of its call to its peers and looks at theirs. A synchronous call waits
for them in place, as the collective itself would. An asynchronous one is put into its group's queue and
goes out from a thread of ours, so the caller goes on. Sends and receives are never held (`messages`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch._C._autograd import _profiler_enabled as profiler_enabled

from distsim.debug.matching.agreement import check_meeting
from distsim.debug.records import CallRecord, Group
from distsim.debug.records.arguments import FIELDS, Call
from distsim.debug.records.errors import CollectiveMismatch
from distsim.debug.records.signature import content
from distsim.debug.rings import layout as rings
from distsim.debug.words.error_text import error_line
from distsim.realexec.guard.handle import Handle
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.realexec.strict.deferred import FIRST_SLEEP_S, LAST_SLEEP_S, LIFE_CHECK_S, Deferred
from distsim.realexec.strict.messages import Messages
from distsim.realexec.strict.peers import Peers, StorePeer

__all__ = ["Strict"]

AHEAD = rings.MEETING_WINDOW // 2
"""Asynchronous calls of a group that may be shown before they went out; beyond it they queue unseen."""
DEFAULT_TIMEOUT_S = 1800.0
LEAVE_S = 2.0
"""How long the end of the process waits for a call that is just going out."""
SPIN_S = 300e-6
"""How long a synchronous call looks for its members without a pause, leaving the core to whoever wants it."""
APART_S = 15e-6
"""Every other rank goes out this much later. Two ranks that enter gloo in the same instant, as agreeing makes
them, meet in its locks: an all_reduce of 4 B then took 300 us instead of 130 (tests/benchmarks/guard_overhead.py)."""


class _Queue:
    """One group's calls that wait for their members."""

    def __init__(self, log: GroupLog, row: int | None, peers: list[Any], group: Group, odd: bool) -> None:
        self.odd = odd
        """Every other member of the group."""
        self.group_log = log
        self.row = row
        self.peers = peers
        self.group = group
        self.waiting: deque[Deferred] = deque()
        self.done = 0
        """Number of the last call that went out."""
        self.remote = any(isinstance(peer, StorePeer) for peer in peers)


class Strict:
    """Holds calls until their members agree."""

    def __init__(self, recorder: Recorder, peers: Peers) -> None:
        self._recorder = recorder
        self._peers = peers
        self._rank = recorder.ring.rank
        self._queues: dict[int, _Queue] = {}
        self._messages = Messages(recorder, peers)
        self._verdicts: dict[tuple[int, ...], bool] = {}
        self._lock = threading.Condition()
        self._busy: list[_Queue] = []
        self._thread: threading.Thread | None = None
        self._over = False
        """The process is at its end: nothing is held any more."""

    def stop(self) -> None:
        """The process is at its end: calls whose members have not all come go out as they would without a guard. The
        thread ends first: one that Python 3.11 finds inside torch's C++ then takes the process with it (SIGABRT)."""
        with self._lock:
            self._over = True
            self._lock.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LEAVE_S)
            if self._thread.is_alive():
                return
        for queue in self._queues.values():
            while queue.waiting:
                queue.waiting.popleft().went_out()

    # Collectives ----------------------------------------------------------------------------------

    def hold(
        self,
        guard: Any,
        said: Call,
        index: int,
        seq: int,
        print_: int,
        is_async: bool,
        issue: Callable[[], Any],
    ) -> Handle | None:
        """None: the call may go out now. A handle: it goes out later. Raises where members disagree."""
        op = said.key[0]
        log: GroupLog = guard.group_log
        if op in ("send", "recv"):
            return self._messages.hold(guard, said, index, is_async, issue)
        if len(log.ranks) == 1 or self._over or _is_refused(said, len(log.ranks)):
            return None
        queue = self._queue(log, guard)
        if queue is None:
            self._recorder.ring.mark(index, rings.UNCHECKED)
            return None
        if op == "monitored_barrier":
            self._drain(guard, queue)
            self._show_and_look(guard, queue, seq, print_, index, said)
            return None
        if is_async and profiler_enabled() and not queue.waiting:
            # torch's profiler sees what goes out from the thread that it was started in.
            self._show_and_look(guard, queue, seq, print_, index, said)
            return None
        if is_async or queue.waiting:
            device = said.key[8]
            on_host = device is None or device.type == "cpu"
            deferred = Deferred(self._recorder, log, index, seq, print_, is_async, None if on_host else device, issue)
            deferred.timeout_s = partial(_timeout_s, guard)
            self._defer(queue, deferred, said)
            return deferred
        self._show(queue, seq, print_, index, said)
        self._agree(guard, queue, seq, print_, index)
        return None

    def ready(self, log: GroupLog) -> bool:
        """Whether a call that was made before may come by `hold_again`: all members are on this host, and no
        asynchronous call waits before it."""
        queue = self._queues.get(id(log))
        return queue is not None and queue.row is not None and not queue.waiting and not queue.remote

    def hold_again(self, guard: Any, seq: int, print_: int, index: int) -> None:
        """`hold` for a synchronous call of a `ready` group that was made before."""
        queue = self._queues[id(guard.group_log)]
        assert queue.row is not None, "not ready"
        self._recorder.ring.publish(queue.row, seq, print_, index)
        self._agree(guard, queue, seq, print_, index)

    def _show_and_look(self, guard: Any, queue: _Queue, seq: int, print_: int, index: int, said: Call) -> None:
        """For a call that is not held (a monitored barrier waits for the others by itself, and says in its own words
        who is late): members that are there already are compared, those to come will compare themselves."""
        self._show(queue, seq, print_, index, said)
        self._agree(guard, queue, seq, print_, index, wait=False)

    def _drain(self, guard: Any, queue: _Queue) -> None:
        """Let the asynchronous calls before this one go out first: gloo numbers what goes out."""
        deadline = time.monotonic() + _timeout_s(guard)
        while queue.waiting and time.monotonic() < deadline:
            time.sleep(LAST_SLEEP_S)

    def _agree(self, guard: Any, queue: _Queue, seq: int, print_: int, index: int, *, wait: bool = True) -> None:
        try:
            if wait:
                self._meet(guard, queue, seq, print_, index)
            elif (answers := self._arrived(queue, seq)) is not None:
                self._compare(queue, seq, print_, index, answers)
        except BaseException as error:
            self._recorder.ring.error(index, error_line(error))
            self._recorder.ring.finish(index, rings.FAILED)
            guard.group_log.busy = 0
            raise
        queue.done = seq

    def _queue(self, log: GroupLog, guard: Any) -> _Queue | None:
        queue = self._queues.get(id(log))
        if queue is None:
            group = Group(log.name, str(guard.group_desc), log.ranks)
            peers: list[Any] = []
            for rank in log.ranks:
                if rank == self._rank:
                    continue
                if self._peers.here(rank):
                    neighbour = self._peers.neighbour(rank)
                    if neighbour is None:
                        return None  # it has no ring: unguarded, or another directory
                    peers.append(neighbour)
                else:
                    peers.append(StorePeer(self._peers.store(), rank, group))
            row = self._recorder.ring.meeting_row(log.key)
            queue = self._queues[id(log)] = _Queue(log, row, peers, group, bool(log.ranks.index(self._rank) % 2))
        return queue if queue.row is not None else None

    def _show(self, queue: _Queue, seq: int, print_: int, index: int, said: Call) -> None:
        if queue.row is not None:
            self._recorder.ring.publish(queue.row, seq, print_, index)
        if queue.remote:
            store = self._peers.store()
            value = json_call(print_, said)
            name = queue.group_log.key
            store.set(f"{name}/{seq}/{self._rank}", value)
            if seq > rings.MEETING_WINDOW:
                store.delete_key(f"{name}/{seq - rings.MEETING_WINDOW}/{self._rank}")

    def _arrived(self, queue: _Queue, seq: int) -> list[tuple[int, int]] | None:
        """What every peer said, or None while one is missing."""
        name = queue.group_log.key
        answers = []
        for peer in queue.peers:
            answer = peer.said(name, seq)
            if answer is None:
                return None
            answers.append(answer)
        return answers

    def _meet(self, guard: Any, queue: _Queue, seq: int, print_: int, index: int) -> None:
        """Wait in place for all members, then compare."""
        sleep_s = FIRST_SLEEP_S
        began = checked = time.monotonic()
        while (answers := self._arrived(queue, seq)) is None:
            if time.monotonic() - began < SPIN_S and not queue.remote:
                os.sched_yield()  # a sleep lasts 70 us at least, longer than most calls are apart
                continue
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.3, LAST_SLEEP_S)
            now = time.monotonic()
            if now - checked > LIFE_CHECK_S:
                checked = now
                if any(peer.gone() for peer in self._absent(queue, seq)):
                    self._recorder.ring.mark(index, rings.UNCHECKED)
                    return  # the backend's own error says it best
                if now - began > (timeout_s := _timeout_s(guard)):
                    raise RuntimeError(self._late(queue, seq, timeout_s))
        self._compare(queue, seq, print_, index, answers)
        if queue.odd and not queue.remote:
            until = time.monotonic() + APART_S
            while time.monotonic() < until:
                pass

    def _absent(self, queue: _Queue, seq: int) -> list[Any]:
        name = queue.group_log.key
        return [peer for peer in queue.peers if peer.said(name, seq) is None]

    def _late(self, queue: _Queue, seq: int, timeout_s: float) -> str:
        ranks = [peer.rank for peer in self._absent(queue, seq)]
        # Programs look for gloo's words, with a space before and after.
        return (
            f"[distsim] Timed out waiting {timeout_s * 1000:.0f}ms for ranks {ranks} to make call #{seq} on group "
            f"{queue.group.label} (ranks {list(queue.group.ranks)})"
        )

    def _compare(self, queue: _Queue, seq: int, print_: int, index: int, answers: Sequence[tuple[int, int]]) -> None:
        if print_ & 1 == 0 and all(answer[0] == print_ for answer in answers):
            return
        prints = dict(zip((peer.rank for peer in queue.peers), (a[0] for a in answers), strict=True))
        prints[self._rank] = print_
        pattern = (id(queue), *(prints[rank] for rank in queue.group.ranks))
        known = self._verdicts.get(pattern)
        if known:
            return
        records = self._records(queue, seq, index, answers)
        mismatch = check_meeting(records) if len(records) > 1 else None
        if mismatch is None:
            self._verdicts[pattern] = True
            return
        raise CollectiveMismatch(_message(mismatch, records, self._rank), records)

    def _records(self, queue: _Queue, seq: int, index: int, answers: Sequence[tuple[int, int]]) -> list[CallRecord]:
        name = queue.group_log.key
        me = self._peers.neighbour(self._rank)
        records = [me.record(name, seq, index) if me is not None else None]
        for peer, answer in zip(queue.peers, answers, strict=True):
            records.append(peer.record(name, seq, answer[1]))
        return [record for record in records if record is not None]

    # Asynchronous calls -----------------------------------------------------------------------------

    def _defer(self, queue: _Queue, deferred: Deferred, said: Call) -> None:
        with self._lock:
            deferred.said = said
            queue.waiting.append(deferred)
            self._show_some(queue)
            if queue not in self._busy:
                self._busy.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distsim-strict", daemon=True)
                self._thread.start()
            self._lock.notify()

    def _show_some(self, queue: _Queue) -> None:
        for deferred in queue.waiting:
            if deferred.seq - queue.done > AHEAD:
                return
            if not deferred.shown and deferred.said is not None:
                deferred.shown = True
                self._show(queue, deferred.seq, deferred.print_, deferred._index, deferred.said)

    def _run(self) -> None:
        sleep_s = FIRST_SLEEP_S
        while True:
            with self._lock:
                while not self._busy and not self._over:
                    self._lock.wait()
                queues, over = list(self._busy), self._over
            moved = False
            for queue in queues:
                moved = self._advance(queue) or moved
            if moved:
                sleep_s = FIRST_SLEEP_S
            elif over:
                return
            else:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 1.3, LAST_SLEEP_S)

    def _advance(self, queue: _Queue) -> bool:
        """Let the calls at the head of a queue go out whose members are there."""
        moved = False
        while True:
            with self._lock:
                if not queue.waiting:
                    if queue in self._busy:
                        self._busy.remove(queue)
                    return moved
                head = queue.waiting[0]
            answers = self._arrived(queue, head.seq)
            if answers is None:
                waited = time.monotonic() - head.began
                if waited < LIFE_CHECK_S:
                    return moved
                if any(peer.gone() for peer in self._absent(queue, head.seq)):
                    head.went_out()  # the backend's own error says it best
                elif waited > (timeout_s := head.timeout_s()):
                    head.refuse(RuntimeError(self._late(queue, head.seq, timeout_s)))
                else:
                    return moved
            else:
                try:
                    self._compare(queue, head.seq, head.print_, head._index, answers)
                except BaseException as error:
                    head.refuse(error)
                else:
                    head.went_out()
            moved = True
            with self._lock:
                queue.waiting.popleft()
                queue.done = head.seq
                if queue.waiting:
                    queue.waiting[0].began = time.monotonic()  # gloo's timeouts begin when a call's turn comes, too
                self._show_some(queue)


def _is_refused(said: Call, size: int) -> bool:
    """The backend refuses such a call at this rank, so nobody else is to hear of it."""
    return any(said.key[part] and len(said.key[part]) != size for part in FIELDS[said.key[0]].lists)


def _timeout_s(guard: Any) -> float:
    for backend in guard.backends.values():
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return DEFAULT_TIMEOUT_S


def json_call(print_: int, said: Call) -> str:
    """A call for the store."""
    import json

    return json.dumps({"print": print_, "call": content(said.key)[0]})


def _message(mismatch: Any, records: Sequence[CallRecord], rank: int) -> str:
    calls = "; ".join(
        f"rank {record.rank}: {mismatch.found.get(record.rank, mismatch.expected)}"
        + (f" at {record.site}" if record.site is not None else "")
        for record in sorted(records, key=lambda record: record.rank)
    )
    mine = next((record for record in records if record.rank == rank), None)
    here = f"{mine.op} #{mismatch.seq}" if mine is not None else f"call #{mismatch.seq}"
    return (
        f"{mismatch.kind.value}: {here} on group {mismatch.group.label} (ranks {list(mismatch.group.ranks)}) "
        f"did not go out: {calls}. Make ranks {list(mismatch.culprits)} agree with the others."
    )
