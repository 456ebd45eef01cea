"""Level strict: a collective is made only once all of its members have called the same.

Each rank shows the fingerprint of its call to its peers and compares it with theirs. A synchronous call waits for
them in place, as the collective itself would. An asynchronous one is queued in its group's queue and made by a
thread of the guard, so that the caller continues. Sends and receives are never held (`messages`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distsim.debug.records import Group
from distsim.debug.records.arguments import FIELDS, INPUTS, OUTPUTS, MethodCall
from distsim.debug.records.signature import content
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.fast_path import AT_ONCE_S, SPIN_S
from distsim.realexec.guard.handle import Handle
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.realexec.strict.deferred import FIRST_SLEEP_S, LAST_SLEEP_S, LIFE_CHECK_S, CallbackHooks, Deferred, WentOut
from distsim.realexec.strict.messages import HeldMessages
from distsim.realexec.strict.peers import Peers, ShownCall, StorePeer, refused_key, timeout_s
from distsim.realexec.strict.queue import Queue
from distsim.text.codec import encode
from distsim.text.tracebacks import error_line
from distsim.torch_compat import groups

profiler_enabled = groups.PROFILES.get(groups.unknown)

AHEAD = rings.MEETING_WINDOW // 2
"""Largest number of asynchronous calls of a group that are shown before they are made. Further calls queue without
being shown.
"""
DOZE_S = 0.25
"""Time in seconds for which the thread keeps polling after a call, because asynchronous calls often follow each other.
"""
STRIDED, COORDINATES = torch.strided, torch.sparse_coo
SUM = 0
"""torch's number of the reduce operation SUM."""
LEAVE_S = 2.0
"""Maximum time in seconds that an exiting process waits for a call in progress."""


class Strict:
    """Delays each call until all members of the group agree."""

    handle = WentOut
    """Handle class of an asynchronous collective on the host that was not held."""

    def __init__(self, recorder: Recorder, peers: Peers) -> None:
        self._recorder = recorder
        self.peers = peers
        self._queues: dict[int, Queue] = {}
        self._rows: dict[str, int | None] = {}
        """Row in the ring for each group.

        A call is shown there even if some members are not known to be guarded: guarded members may hold their own
        call until they see it.
        """
        self.messages = HeldMessages(recorder, peers)
        self._hooks = CallbackHooks()
        self._lock = threading.Condition()
        self._busy: list[Queue] = []
        self._thread: threading.Thread | None = None
        self._pause_s = FIRST_SLEEP_S
        """Seconds between two polls of the thread."""
        self._asleep = False
        """Whether the thread sleeps until it is woken."""
        self._over = False
        """Whether the process is ending, so that no further call is held."""

    def stop(self) -> None:
        """Stop the thread at the end of the process, and make the held calls as without a guard.

        The thread must end first: if the interpreter shuts down while it is inside torch's C++, Python 3.11 aborts
        the process (SIGABRT).
        """
        with self._lock:
            self._over = True
            self._lock.notify()
        self._hooks.remove()
        for queue in self._queues.values():
            queue.group_log.near = None
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
        call: MethodCall,
        index: int,
        seq: int,
        print_: int,
        is_async: bool,
        issue: Callable[[], Any],
    ) -> Handle | None:
        """Return None if the call may be made now, or a handle if it is made later. Raise if members disagree."""
        op = call.key[0]
        log: GroupLog = guard.group_log
        if op in ("send", "recv"):
            return self.messages.hold(guard, call, index, is_async, issue)
        if len(log.ranks) == 1 or self._over or _is_refused(call, len(log.ranks), _on_gloo(guard)):
            return None
        queue = self._queue(log, guard)
        if queue is None:
            self._recorder.ring.mark(index, rings.UNCHECKED)
            row = self._row(log)
            if row is not None:
                self._recorder.ring.publish(row, seq, print_, index)
            return None
        if queue.again[0] == seq:
            queue.settle(seq)
        if op == "monitored_barrier":
            self._drain(guard, queue)
            self._show_and_look(guard, queue, seq, print_, index, call)
            return None
        if is_async and profiler_enabled() and not queue.waiting:
            # torch's profiler sees what goes out from the thread that it was started in.
            self._show_and_look(guard, queue, seq, print_, index, call)
            return None
        if is_async or queue.waiting:
            device = call.key[8]
            on_host = device is None or device.type == "cpu"
            if is_async and self._goes_at_once(queue, seq, print_, index, call):
                return None
            deferred = Deferred(self._recorder, log, index, seq, print_, is_async, None if on_host else device, issue)
            if op.startswith("reduce_scatter") and on_host:
                deferred.has_future = not _on_gloo(guard)
            self._defer(guard, queue, deferred, call)
            return deferred
        self._show(queue, seq, print_, index, call)
        self._agree(guard, queue, seq, print_, index)
        if queue.is_near():
            log.near = queue
        return None

    def defer_again(
        self, guard: Any, queue: Queue, seq: int, print_: int, index: int, issue: Callable[[], Any]
    ) -> Deferred:
        """Hold an asynchronous call from the fast path, which has just been shown."""
        deferred = Deferred(self._recorder, guard.group_log, index, seq, print_, True, None, issue)
        deferred.shown = True
        deferred.has_future = "reduce_scatter" not in getattr(getattr(issue, "func", None), "__name__", "")
        self._defer(guard, queue, deferred, None)
        return deferred

    def _goes_at_once(self, queue: Queue, seq: int, print_: int, index: int, call: MethodCall) -> bool:
        """Show an asynchronous call if its queue is empty, and return whether all members have made the same call.

        It waits a moment for members that are about to call.
        """
        if queue.waiting or queue.row is None or queue.again[0] == seq or not queue.is_near():
            return False
        self._recorder.ring.publish(queue.row, seq, print_, index)
        queue.group_log.near = queue
        return queue.meet(seq, rings.meeting_slot(seq), print_, AT_ONCE_S)

    def _show_and_look(self, guard: Any, queue: Queue, seq: int, print_: int, index: int, call: MethodCall) -> None:
        """Compare a call that is not held (a monitored barrier) with the members that have arrived.

        Later members compare themselves with it.
        """
        self._show(queue, seq, print_, index, call)
        self._agree(guard, queue, seq, print_, index, wait=False)

    def _drain(self, guard: Any, queue: Queue) -> None:
        """Make earlier asynchronous calls first, because gloo numbers calls in the order in which they are made."""
        deadline = time.monotonic() + timeout_s(guard)
        while queue.waiting and time.monotonic() < deadline:
            time.sleep(LAST_SLEEP_S)

    def agree_again(self, guard: Any, queue: Queue, seq: int, print_: int, index: int) -> None:
        """Wait for all members of a synchronous call from the fast path, which has just been shown."""
        self._agree(guard, queue, seq, print_, index)

    def _agree(self, guard: Any, queue: Queue, seq: int, print_: int, index: int, *, wait: bool = True) -> None:
        try:
            if wait:
                self._meet(guard, queue, seq, print_, index)
            elif (answers := queue.arrived(seq)) is not None:
                queue.compare(seq, print_, index, answers)
        except BaseException as error:
            self._recorder.ring.fail(index, error_line(error))
            guard.group_log.busy = 0
            raise
        queue.done = seq

    def _queue(self, log: GroupLog, guard: Any) -> Queue | None:
        queue = self._queues.get(id(log))
        if queue is None:
            group = Group(log.name, str(guard.group_desc), log.ranks)
            peers: list[Any] = []
            world = log.world
            for rank in log.ranks:
                if rank == world.rank:
                    continue
                neighbour = self.peers.neighbour(world, rank)
                if neighbour is not None:
                    peers.append(neighbour)
                elif self.peers.guarded(world, rank):
                    peers.append(StorePeer(self.peers.store(world), rank, group))
                else:
                    return None
            queue = self._queues[id(log)] = Queue(log, self._row(log), peers, group, world.rank, self.peers)
            log.refusing = partial(self._refused, queue)
        return queue if queue.row is not None else None

    def _row(self, log: GroupLog) -> int | None:
        if log.key not in self._rows:
            self._rows[log.key] = self._recorder.ring.meeting_row(log.key)
        return self._rows[log.key]

    def _show(self, queue: Queue, seq: int, print_: int, index: int, call: MethodCall) -> None:
        if queue.row is not None:
            self._recorder.ring.publish(queue.row, seq, print_, index)
        if queue.remote:
            store = self.peers.store(queue.group_log.world)
            value = encode(ShownCall(print_, index, content(call.key)[0]))
            name = queue.group_log.key
            store.set(f"{name}/{seq}/{queue.group_log.world.rank}", value)
            if seq > rings.MEETING_WINDOW:
                store.delete_key(f"{name}/{seq - rings.MEETING_WINDOW}/{queue.group_log.world.rank}")

    def _refused(self, queue: Queue, seq: int, index: int) -> bool:
        """Do the same as `Queue.refused`, and also tell ranks on other hosts through the store."""
        used_up = queue.refused(seq, index, self._recorder.ring)
        if queue.again[0] == seq and queue.remote:
            self.peers.store(queue.group_log.world).set(
                refused_key(queue.group_log.key, seq, queue.group_log.world.rank, index), "1"
            )
        return used_up

    def _meet(self, guard: Any, queue: Queue, seq: int, print_: int, index: int) -> None:
        """Wait for all members, then compare their calls."""
        sleep_s = FIRST_SLEEP_S
        began = checked = time.monotonic()
        while (answers := queue.arrived(seq)) is None:
            if time.monotonic() - began < SPIN_S and not queue.remote:
                os.sched_yield()  # a sleep lasts 70 us at least, longer than most calls are apart
                continue
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.3, LAST_SLEEP_S)
            now = time.monotonic()
            if now - checked > LIFE_CHECK_S:
                checked = now
                if any(peer.gone() for peer in queue.absent(seq)):
                    self._recorder.ring.mark(index, rings.UNCHECKED)
                    return  # the backend's own error says it best
                if now - began > (limit_s := timeout_s(guard)):
                    raise RuntimeError(queue.late(seq, limit_s))
        queue.compare(seq, print_, index, answers)

    # Asynchronous calls -----------------------------------------------------------------------------

    def _defer(self, guard: Any, queue: Queue, deferred: Deferred, call: MethodCall | None) -> None:
        deferred.timeout_s = partial(timeout_s, guard)
        deferred.hasten = partial(self._hasten, queue, deferred)
        deferred.urge = self._urge
        with self._lock:
            deferred.said = call
            queue.waiting.append(deferred)
            self._show_some(queue)
            if queue not in self._busy:
                self._busy.append(queue)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distsim-strict", daemon=True)
                self._thread.start()
            if self._asleep:
                self._lock.notify()

    def _urge(self) -> None:
        with self._lock:
            self._pause_s = FIRST_SLEEP_S
            self._lock.notify()

    def _hasten(self, queue: Queue, deferred: Deferred, timeout_s: float) -> bool:
        """Make calls of the queue on the waiting thread instead of the helper thread; return False after the
        timeout.
        """
        began = time.monotonic()
        sleep_s = FIRST_SLEEP_S
        while not deferred.decided:
            if self._advance(queue):
                continue
            took = time.monotonic() - began
            if took > timeout_s:
                return False
            if took < SPIN_S and not queue.remote:
                os.sched_yield()
                continue
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.3, LAST_SLEEP_S)
        return True

    def _show_some(self, queue: Queue) -> None:
        for deferred in queue.waiting:
            if deferred.seq - queue.done > AHEAD:
                return
            if not deferred.shown and deferred.said is not None:
                deferred.shown = True
                self._show(queue, deferred.seq, deferred.print_, deferred._index, deferred.said)

    def _run(self) -> None:
        quiet_since = time.monotonic()
        while True:
            with self._lock:
                while not self._busy and not self._over and time.monotonic() - quiet_since > DOZE_S:
                    self._asleep = True
                    self._lock.wait()
                    self._asleep = False
                    quiet_since = time.monotonic()
                queues, over = list(self._busy), self._over
            moved = False
            for queue in queues:
                moved = self._advance(queue) or moved
            if queues:
                quiet_since = time.monotonic()
            if moved:
                self._pause_s = FIRST_SLEEP_S
            elif over:
                return
            else:
                with self._lock:
                    self._lock.wait(self._pause_s)
                self._pause_s = min(self._pause_s * 1.3, LAST_SLEEP_S)

    def _advance(self, queue: Queue) -> bool:
        """Make the calls at the head of a queue whose members have all arrived."""
        if not queue.turn.acquire(blocking=False):
            return False  # another thread does
        try:
            return self._advance_alone(queue)
        finally:
            queue.turn.release()

    def _advance_alone(self, queue: Queue) -> bool:
        moved = False
        while True:
            with self._lock:
                if not queue.waiting:
                    if queue in self._busy:
                        self._busy.remove(queue)
                    return moved
                head = queue.waiting[0]
            answers = queue.arrived(head.seq)
            if answers is None:
                waited = time.monotonic() - head.began
                if waited < LIFE_CHECK_S:
                    return moved
                if any(peer.gone() for peer in queue.absent(head.seq)):
                    head.went_out()  # the backend's own error says it best
                elif waited > (timeout_s := head.timeout_s()):
                    head.refuse(RuntimeError(queue.late(head.seq, timeout_s)))
                else:
                    return moved
            else:
                try:
                    queue.compare(head.seq, head.print_, head._index, answers)
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


def _on_gloo(guard: Any) -> bool:
    return type(guard.backends.get("cpu")).__name__ == "ProcessGroupGloo"


def _is_refused(call: MethodCall, size: int, on_gloo: bool) -> bool:
    """Return whether the backend would refuse such a call on this rank, so that it must not be shown to other ranks."""
    op = call.key[0]
    lists = [call.key[part] for part in FIELDS[op].lists if call.key[part]]
    if any(len(shapes) != size for shapes in lists):
        return True
    if on_gloo and len(FIELDS[op].lists) == 1 and lists:  # gloo wants every item to be like the rank's one tensor
        own = call.key[INPUTS + OUTPUTS - FIELDS[op].lists[0]]
        if len(own) == 1 and any(shape != own[0] for shape in lists[0]):
            return True
    # torch's dispatcher knows no collective of sparse tensors but the sum of coordinates (c10d/Ops.cpp).
    return any(
        tensor.layout is not STRIDED
        and not (op == "all_reduce" and tensor.layout is COORDINATES and call.key[4] == SUM)
        for tensor in (*call.inputs, *call.outputs)
    )
