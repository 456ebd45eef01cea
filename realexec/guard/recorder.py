"""Recorder of the calls of one process: the hot path between a guarded group and the ring."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple, Protocol

from distsim.debug.evidence.watched_source import CaughtLog
from distsim.debug.matching.secondary_errors import aftermath
from distsim.debug.records import P2P
from distsim.debug.records.arguments import SYNCHRONOUS_P2P, MethodCall
from distsim.debug.records.frames import raised_at
from distsim.debug.records.signature import Signature, content
from distsim.debug.rings import layout as rings
from distsim.debug.rings.callsite import FUNCTIONAL, CallSites, Place
from distsim.debug.rings.files import RecordedWorld, WorldKind
from distsim.debug.rings.writer import RingWriter
from distsim.text.tracebacks import error_line, error_traceback, last_line, origins

COMPLETED, FAILED = rings.COMPLETED, rings.FAILED
HEADS = range(4)
"""Number of outstanding calls at the head of the queue that are polled at each new call. More than one, so that the
queue shrinks.
"""


class Completable(Protocol):
    """Interface of torch's Work that polling uses."""

    def is_completed(self) -> bool: ...

    def wait(self) -> bool: ...


class Made(NamedTuple):
    """A call that the slow path has just made, for `fast_path`."""

    thread: int
    call: MethodCall
    record: int
    """Index of its record in the ring."""
    body: bytes
    """Bytes of its record when the call was made."""
    args: tuple[Any, ...]
    """Arguments that the backend received."""
    owned: bool
    """Whether the program gets the handle."""

    @property
    def flags(self) -> int:
        """Return the flags of the record."""
        return int.from_bytes(self.body[16:24], "little")


class _Unknown:
    """Placeholder for a call that is not cached (`fast_path.CachedCall`)."""

    __slots__ = ("next",)
    what = None
    next: Any
    """Call that followed it."""

    def __init__(self) -> None:
        self.next = UNKNOWN


UNKNOWN: Any = _Unknown.__new__(_Unknown)
UNKNOWN.next = UNKNOWN


class GroupLog:
    """State of a group in this process: its members, the next call numbers, and the current call."""

    __slots__ = (
        "before",
        "busy",
        "group",
        "key",
        "last",
        "marked",
        "name",
        "near",
        "ordinals",
        "p2p",
        "ranks",
        "recorder",
        "refusing",
        "seen",
        "seq",
        "words",
        "world",
    )

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        group: int,
        generation: int = 0,
        recorder: Recorder | None = None,
        world: RecordedWorld | None = None,
    ) -> None:
        self.name = name
        self.world = RecordedWorld("", 0, len(ranks), WorldKind.DEFAULT, "") if world is None else world
        """World whose ranks the group uses: the processes that met in one rendezvous."""
        self.recorder: Any = recorder
        """Recorder of this process; None in tests without one."""
        self.words: Any = None if recorder is None else recorder.ring.words
        self.key = f"{self.world.id}:{name}/{generation}/{','.join(map(str, ranks))}"
        """Key of the group, equal on every member and unique among groups."""
        self.ranks = tuple(ranks)
        self.group = group
        self.seq = count(1)
        self.p2p = count(1)
        self.ordinals: dict[tuple[str, int, int], list[int]] = {}
        """Number of messages by operation, peer and tag. Each number is in a one-element list, which `fast_path`
        shares.
        """
        self.seen: dict[tuple[Any, ...], Any] = {}
        """Cached calls, by line and shapes (see `fast_path`)."""
        self.before: Any = _Unknown()
        """Last cached call that was made. Its `next` is the guess for the next call."""
        self.marked: dict[tuple[Any, ...], int] = {}
        """Index of the record by key, for calls that are not cached yet but have left marks on the stack."""
        self.last: Made | tuple[()] | None = None
        """The last call of the slow path if `fast_path` waits for it (empty until then), else None, so that no
        tensor is kept alive.
        """
        self.busy = 0
        """Id of the thread inside a synchronous collective of this group, or 0.

        Messages do not count, because they have no order relative to the calls of other threads.
        """
        self.near: Any = None
        """Strict level: the group's queue (`strict.queue`) if all members are on this host and have shown a call,
        else None.
        """
        self.refusing: Callable[[int, int], bool] | None = None
        """At level strict: called with the number and index of a collective that the backend refused, before it is
        recorded.

        It returns whether the number is used up.
        """

    def forget(self, calls: Iterable[Any]) -> None:
        """Drop cached calls, and the guesses that lead to or from them, which would keep the calls alive."""
        for seen in calls:
            seen.what, seen.next = None, UNKNOWN
            if self.before is seen:
                self.before = _Unknown()

    def forget_all(self) -> None:
        """Drop all cached calls of the group."""
        for seen in list(self.seen.values()):
            self.forget((seen, *seen.others))
        self.seen.clear()

    def __del__(self) -> None:
        # They point at one another, and a training loop may have turned the garbage collector off.
        for seen in self.seen.values():
            for one in (seen, *seen.others):
                one.next = None


class Recorder:
    """Writer of this process's calls into its ring."""

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.sites = CallSites(ring)
        self._threads: dict[int, int] = {}
        self.num_serving = 0
        """Number of these threads that belong to torch and serve remote calls."""
        self.look: Callable[[], None] | None = None
        """Called once per heartbeat to record the positions of threads that serve remote calls."""
        self._pending: tuple[Any, ...] = ()
        """Last line and lines of the last exception of `_exception_on_its_way`. The exception itself would keep the
        tensors of its frames alive.
        """
        self.caught = CaughtLog(ring.caught)
        self.outstanding: dict[int, Completable] = {}
        """Asynchronous calls that were not yet seen to end, by record index, in order."""
        self._creations: GroupLog | None = None
        self._generations: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self.launcher = RecordedWorld("", ring.rank, ring.world_size, WorldKind.DEFAULT, "its launcher")
        """World as the launcher describes it (the `layout.HEADER` of the ring)."""
        self.world = self.launcher
        """World of the default group, or the launcher's world until there is a default group."""
        main = threading.main_thread().ident
        ring.header(rings.W_MAIN_THREAD, main or 0)

    def join(self, world: RecordedWorld) -> None:
        """Note that this process is a member of *world* from now on."""
        self.ring.join_world(world)
        if world.kind is WorldKind.DEFAULT:
            self.world = world
            self._creations = None

    def group_log(
        self, name: str, description: str, ranks: Sequence[int], world: RecordedWorld | None = None
    ) -> GroupLog:
        """Return the log of a new group, and write the group into the ring's table.

        A group that is created again under the same name (after destroy_process_group) gets a new log. *ranks* are
        ranks of *world*, by default the default group's world.
        """
        world = self.world if world is None else world
        key = (world.id, name, tuple(ranks))
        generation = self._generations[key] = self._generations.get(key, -1) + 1
        group = self.ring.group(name, description, ranks, generation, world.id)
        return GroupLog(name, ranks, group, generation, self, world)

    def begin(self, log: GroupLog, call: MethodCall, site: Place) -> tuple[int, bool, int, int]:
        """Record a call that starts, and return its index, whether the caller continues at once, its number and its
        fingerprint.
        """
        key, is_async, peer, tag = call.key, call.is_async, call.peer, call.tag
        ring = self.ring
        signature, fingerprint = ring.signature(key, content)
        me = threading.get_ident()
        op = key[0]
        ordinal = 0
        if op == "send" or op == "recv":
            flags = rings.ISSUED | rings.P2P_CALL
            seq = next(log.p2p)
            end = (op, peer, tag)
            sent = log.ordinals.setdefault(end, [0])
            ordinal = sent[0] = sent[0] + 1
            is_async = site[2] not in SYNCHRONOUS_P2P
        else:
            flags = rings.ISSUED
            seq = next(log.seq)
            outputs = call.outputs
            if len(outputs) > 1 and outputs[0] is outputs[1]:  # `[tensor] * n`
                flags |= rings.ALIASED
            if log.busy and log.busy != me:
                flags |= rings.RACE
            if not is_async:
                log.busy = me
        flags |= rings.ASYNC if is_async else rings.WAITING
        if site[2] == FUNCTIONAL:
            flags |= rings.READ_WAITS
        error = sys.exception()
        if error is not None:
            flags |= self._exception_on_its_way(error)
        thread = self._threads.get(me)
        if thread is None:
            thread = self._thread(me)
        index = ring.issue(flags, log.group, thread, seq, signature, site[0], fingerprint, site[1], peer, tag, ordinal)
        if self.outstanding:
            self.poll()
        return index, is_async, seq, fingerprint

    def not_issued(self, log: GroupLog, end: tuple[str, int, int] | None, index: int, error: str) -> None:
        """Record that the backend raised immediately.

        Unless another rank caused this, the backend refused the call (a wrong argument): it has not arrived
        anywhere, and the next call takes its number, as in the backend. *end* is the operation, peer and tag of a
        message.
        """
        self.ring.fail(index, error)
        if not aftermath(error):
            seq = self.ring.number(index)
            used_up = end is None and log.refusing is not None and log.refusing(seq, index)
            self.ring.mark(index, rings.REJECTED)
            if end is None:
                if not used_up:
                    log.seq = count(seq)
            else:
                log.p2p = count(seq)
                log.ordinals[end][0] -= 1
        if end is None:
            log.busy = 0

    def refused(self, log: GroupLog, op: str, error: str) -> None:
        """Record a call that a public function of torch.distributed refused before it reached the group.

        The call has no number; the next call takes the number that it would have had.
        """
        site = self.sites.here(3)
        me = threading.get_ident()
        flags = rings.FAILED | rings.REJECTED
        if op in P2P:
            flags |= rings.P2P_CALL
            seq = next(log.p2p)
            log.p2p = count(seq)
        else:
            seq = next(log.seq)
            log.seq = count(seq)
        thread = self._threads.get(me) or self._thread(me)
        signature, fingerprint = self.ring.signature((op, None), _plain)
        index = self.ring.issue(flags, log.group, thread, seq, signature, site[0], fingerprint, site[1], -1, 0)
        self.ring.error(index, error)
        self.ring.finish(index, flags)

    def note(self, log: GroupLog, op: str, seq: int, new_ranks: tuple[int, ...] | None = None) -> int:
        """Record a call that is not a method of a group, such as init_process_group or new_group, and return its
        index.
        """
        site = self.sites.here(3)
        me = threading.get_ident()
        thread = self._threads.get(me) or self._thread(me)
        signature, fingerprint = self.ring.signature((op, new_ranks), _plain)
        return self.ring.issue(
            rings.ISSUED | rings.WAITING,
            log.group,
            thread,
            seq,
            signature,
            site[0],
            fingerprint,
            site[1],
            -1,
            0,
        )

    def note_new_group(self, ranks: tuple[int, ...], local: bool) -> int:
        """Record a new_group, which has its own numbering. With local synchronization, only its members take part."""
        world = range(self.world.size)
        log = self._creations
        if log is None:
            log = self._creations = self.group_log("new_group", "default_pg", world)
        if local:
            # Its number counts the same creation on each member; other ranks may make others in between.
            log = self.group_log("new_group " + ",".join(map(str, ranks)), "default_pg", world)
        return self.note(log, "new_group", next(log.seq), ranks)

    def rejected_new_group(self, index: int) -> None:
        """Mark a new_group as refused: torch rejected its arguments before it numbered the group."""
        self.ring.mark(index, rings.REJECTED)
        if self._creations is not None:
            self._creations.seq = count(next(self._creations.seq) - 1)

    def _thread(self, ident: int) -> int:
        name = threading.current_thread().name
        offset = self._threads[ident] = self.ring.entry(rings.TABLE_THREAD, (ident, name), [ident, name])
        self.ring.header(rings.W_THREADS, len(self._threads) - self.num_serving)
        return offset

    def _exception_on_its_way(self, error: BaseException) -> int:
        """Return the flag for a call inside a `finally` or `except` block, and write the exception once."""
        lines = ((id(frame.f_code), line) for frame, line in walk_tb(error.__traceback__))
        pending = (last_line(error), *lines)
        if pending != self._pending:
            self._pending = pending
            self.ring.header(rings.W_PENDING, self.exception(error))
        return rings.PENDING_EXCEPTION

    def exception(self, error: BaseException) -> int:
        """Write an exception's text into the ring and return its offset: the last line, then the user's frames."""
        text, last = error_traceback(error), last_line(error)
        return self.ring.entry(
            rings.TABLE_TEXT,
            (last, text),
            {
                "error": last,
                "frames": raised_at(error.__traceback__),
                "traceback": text[-8000:],
                "origins": origins(error),
            },
        )

    def handled(self, error: BaseException, code: CodeType, line: int, thread: str = "") -> None:
        """Record that the program has handled an exception at this line, or that it ended *thread*."""
        self.caught.add(error, code, line, self.ring.words[rings.WORDS_AT // 8 + rings.W_COUNT], thread)

    def end(self, index: int, state: int) -> None:
        """Record the end of a call."""
        self.ring.finish(index, state)

    def watch(self, index: int, work: Completable, again: bool) -> None:
        """Poll an asynchronous call until it has ended.

        *again* says that an ended call may be waited for once more, to learn whether it failed.
        """
        self.outstanding[index] = work if again else _Once(work)

    def poll(self) -> None:
        """Record the end of asynchronous calls at the head of the queue that have ended."""
        outstanding = self.outstanding
        for _ in HEADS:
            try:
                for index, work in outstanding.items():  # noqa: B007  (the first is wanted)
                    break
                else:
                    return
            except RuntimeError:  # a finalizer, or another thread, made calls just now
                return
            # `look_at`, written out: each call of the program comes here while one before it goes on.
            state = COMPLETED
            try:
                if not work.is_completed():
                    return
                work.wait()
            except RuntimeError as error:
                state = FAILED
                self.ring.error(index, error_line(error))
            if outstanding.pop(index, None) is not None:
                self.ring.finish(index, state)

    def look_at(self, index: int) -> bool:
        """Record the end of a call if it has ended, and return whether it has."""
        work = self.outstanding.get(index)
        if work is None:  # it was waited for
            return True
        state = COMPLETED
        try:
            if not work.is_completed():
                return False
            work.wait()  # it has ended, so this only says how
        except RuntimeError as error:
            state = FAILED
            self.ring.error(index, error_line(error))  # who waits for its future, or in C++, leaves no other word of it
        if self.outstanding.pop(index, None) is not None:  # else it was waited for just now
            self.ring.finish(index, state)
        return True

    def sweep(self) -> None:
        """Poll every asynchronous call once, and count the threads that make calls and are still alive."""
        if self.look is not None:
            self.look()
        if len(self._threads) - self.num_serving > 1:
            living = sum(thread.ident in self._threads for thread in threading.enumerate())
            self.ring.header(rings.W_THREADS, living)
        for index in list(self.outstanding):
            self.look_at(index)


def _plain(key: tuple[str, tuple[int, ...] | None]) -> tuple[Signature, bool]:
    op, ranks = key
    return Signature(op, new_ranks=ranks), False


class _Once:
    """A Work that may be waited for only once, which is left to the program."""

    __slots__ = ("is_completed",)

    def __init__(self, work: Completable) -> None:
        self.is_completed = work.is_completed

    def wait(self) -> bool:
        return True
