"""The handle of a guarded call: torch's Work, noting when it is waited for and when it ended.

What a program hangs on a future of a held call (`Future.then`, a DDP communication hook) runs in threads of its own.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from distsim.debug.rings import layout as rings
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat import works

__all__ = [
    "KEEPS_ALIVE",
    "Handle",
    "HostHandle",
    "MessageHandle",
    "MessageWork",
    "SyncHandle",
    "drain",
    "keep_alive",
    "run_apart",
    "watched",
]

FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
FLAGS, ENDED = rings.WORD_FLAGS, rings.WORD_COMPLETED
WAITED_FOR = rings.WAITED | rings.FUTURE
WAITS, DONE, GOES_ON = rings.WAITING | rings.WAITED, rings.COMPLETED, rings.STATE_MASK | rings.WAITING


_alive: deque[Any] = deque(maxlen=1024)
"""Below torch 2.7: handles for which C++ may still wait."""


def keep_alive(handle: Any) -> None:
    """Keep the Python object of a handle that goes to C++ until it was waited for.

    Below torch 2.7, C++ keeps a Work without its Python object. Once that is gone, it calls C++'s `Work::wait`,
    which never returns: DistributedDataParallel's constructor hangs there.
    """
    while _alive and _alive[0].is_waited_for():
        _alive.popleft()
    if handle._touched:  # else a user owns it, and is told of a handle that is dropped
        _alive.append(handle)


KEEPS_ALIVE = not works.WORK.works()


class _Noted:
    """Base of all handles: passes on to torch's Work, and notes that it was waited for."""

    if not TYPE_CHECKING:
        __slots__ = ()  # a base beside Work can have none
    _inner: Any
    _group_log: GroupLog
    _index: int
    _word: int
    """Position of its record in the ring."""
    _touched: bool
    _is_async: bool
    _polled: bool
    _again: bool

    @property
    def _recorder(self) -> Recorder:
        recorder: Recorder = self._group_log.recorder
        return recorder

    def _failed(self, error: BaseException) -> None:
        self._recorder.ring.fail(self._index, error_line(error))
        self._free()

    def _free(self) -> None:
        if not self._is_async:
            self._group_log.busy = 0

    def is_completed(self) -> bool:
        ended = self._inner.is_completed()
        if ended:
            # A loop over is_completed() is a way of waiting.
            self._touched = True
            self._recorder.ring.mark(self._index, rings.WAITED)
        return bool(ended)

    def is_waited_for(self) -> bool:
        """Return whether wait() was called or the future was taken, which C++ does at most once."""
        words, word = self._group_log.words, FIRST + self._index % RECORDS * EACH
        return bool(words[word] != self._index + 1 or words[word + FLAGS] & WAITED_FOR)

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        rank = int(self._inner._source_rank())
        if 0 <= rank < len(self._group_log.ranks):
            self._recorder.ring.peer(self._index, self._group_log.ranks[rank])
        return rank

    @property
    def timeout(self) -> timedelta:
        limit: timedelta = self._inner.timeout
        return limit

    def result(self) -> Any:
        return self._inner.result()

    def synchronize(self) -> None:
        self._touched = True
        self._recorder.ring.mark(self._index, rings.WAITED)
        self._inner.synchronize()

    def block_current_stream(self) -> None:
        self._touched = True
        self._recorder.ring.mark(self._index, rings.WAITED)
        self._inner.block_current_stream()

    def get_future(self) -> Any:
        self._touched = True
        self._recorder.ring.mark(self._index, rings.FUTURE)
        if not self._is_async and self._polled:
            # Only the host's own wait() would note the end.
            self._recorder.watch(self._index, self._inner, self._again)
        return self._inner.get_future()

    def get_future_result(self) -> Any:
        self._touched = True
        return self._inner.get_future_result()

    def _get_op_type(self) -> Any:
        return self._inner._get_op_type()

    def _get_duration(self) -> float:
        return float(self._inner._get_duration())

    def __del__(self) -> None:
        if not self._touched:
            try:  # noqa: SIM105  (the interpreter may be going down, and have no contextlib any more)
                self._recorder.ring.mark(self._index, rings.DROPPED)
            except Exception:
                pass


class Handle(_Noted, Work):
    """Wraps the Work of a real backend. C++ (DDP, functional collectives) calls `wait` and `get_future`."""

    __slots__ = (
        "_after",
        "_again",
        "_group_log",
        "_index",
        "_inner",
        "_is_async",
        "_on_host",
        "_polled",
        "_touched",
        "_word",
    )

    def __init__(
        self,
        inner: Any,
        recorder: Recorder,
        log: GroupLog,
        index: int,
        is_async: bool,
        on_host: bool,
        owned: bool,
        p2p: bool = False,
    ) -> None:
        Work.__init__(self)
        self._inner = inner
        self._group_log = log
        self._index = index
        self._is_async = is_async
        self._on_host = on_host
        """wait() returns when the data are there (CPU tensors); on an accelerator the stream waits."""
        self._again = on_host and not p2p
        """wait() may be called twice: gloo's send and receive block for ever the second time."""
        self._touched = not (is_async and owned)
        """Whether dropping the handle is no fault: it was waited for, or torch's own code has it."""
        self._after: Any = None
        """Called once when the first wait() has come back (NaN watch, checksums)."""
        self._polled = not p2p or not on_host
        """gloo's sends and receives say that they have ended only after wait()."""
        if is_async and self._polled:
            recorder.watch(index, inner, self._again)

    def wait(self, timeout: timedelta | None = None) -> bool:
        recorder, index = self._recorder, self._index
        ring = recorder.ring
        if self._is_async:
            self._touched = True
            ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            answer = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except BaseException as error:
            self._failed(error)
            raise
        if self._on_host or self._inner.is_completed():
            recorder.outstanding.pop(index, None)  # it knows the tensors
            ring.finish(index, rings.COMPLETED)
        else:
            ring.unmark(index, rings.WAITING)
            if not self._is_async and self._polled:
                recorder.watch(index, self._inner, self._again)
        self._free()
        if self._after is not None:
            after, self._after = self._after, None
            after()
        return bool(answer)


class HostHandle(Handle):
    """The handle of an asynchronous collective on the host's tensors; made by `watched`."""

    __slots__ = ()
    __init__ = Work.__init__
    _is_async = True
    _on_host = True
    _again = True
    _polled = True
    _after = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        # The ring's `mark` and `finish`, written out: whoever comes here has waited, and finds its caches cold.
        self._touched = True
        index, word, log = self._index, self._word, self._group_log
        words = log.words
        if words[word] == index + 1:
            words[word + FLAGS] |= WAITS
        try:
            answer: bool = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except BaseException as error:
            self._failed(error)
            raise
        log.recorder.outstanding.pop(index, None)
        if words[word] == index + 1:
            words[word + ENDED] = monotonic_ns()
            words[word + FLAGS] = words[word + FLAGS] & ~GOES_ON | DONE
        return answer

    def get_future(self) -> Any:
        self._touched = True
        words, word = self._group_log.words, self._word
        if words[word] == self._index + 1:
            words[word + FLAGS] |= rings.FUTURE
        return self._inner.get_future()


class MessageHandle(_Noted):
    """The handle of `isend` or `irecv`: gloo's may be waited for but once, and end only with that.

    Python alone gets it, from torch's public functions, so it says that it is a Work and is none: to make an object
    that C++ can take costs as much as half of the record. A group's methods answer a `MessageWork`."""

    __slots__ = ("_group_log", "_index", "_inner", "_touched", "_word")
    _is_async = True
    _again = False
    _polled = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Work

    def wait(self, timeout: timedelta | None = None) -> bool:
        # As of a `HostHandle`, and written out again: a call of Python's would cost as much as what the two share.
        self._touched = True
        index, word, words = self._index, self._word, self._group_log.words
        if words[word] == index + 1:
            words[word + FLAGS] |= WAITS
        try:
            answer: bool = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except BaseException as error:
            self._failed(error)
            raise
        if words[word] == index + 1:
            words[word + ENDED] = monotonic_ns()
            words[word + FLAGS] = words[word + FLAGS] & ~GOES_ON | DONE
        return answer

    def boxed(self) -> Any:
        return self._inner.boxed()


class MessageWork(HostHandle):
    """A `MessageHandle` that C++ can take."""

    __slots__ = ()
    _again = False
    _polled = False
    wait = MessageHandle.wait

    @classmethod
    def of(cls, handle: MessageHandle) -> MessageWork:
        """Return a replacement for *handle*."""
        owned, handle._touched = not handle._touched, True
        work: MessageWork = watched(cls, handle._inner, handle._group_log, handle._index, owned)
        return work


def watched(kind: type[HostHandle | MessageHandle], work: Any, log: GroupLog, index: int, owned: bool) -> Any:
    """The handle of a call that has just gone out. (Not by `__init__`: a call of Python's for each costs a microsecond
    where the caches are cold.)"""
    handle = kind()
    handle._inner = work
    handle._group_log = log
    handle._index = index
    handle._word = FIRST + index % RECORDS * EACH
    handle._touched = not owned
    if kind._polled:
        log.recorder.outstanding[index] = work
    return handle


class SyncHandle:
    """The handle of a synchronous call on CPU tensors, which only torch.distributed's own function sees:
    it calls `wait()` at once. Not a Work, so it costs next to nothing."""

    __slots__ = ("_group_log", "_index", "_inner", "_ring")

    def __init__(self, inner: Any, ring: RingWriter, log: GroupLog, index: int) -> None:
        self._inner = inner
        self._ring = ring
        self._group_log = log
        self._index = index

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._inner.wait()
        except BaseException as error:
            self._ring.fail(self._index, error_line(error))
            self._group_log.busy = 0
            raise
        self._ring.finish(self._index, rings.COMPLETED)
        self._group_log.busy = 0
        return True


LOOK_S = 0.01
QUIET_LOOKS = 2
"""A job that sleeps through so many looks in a row waits for something, maybe for what a later one does."""
LEAVE_S = 2.0
"""Seconds that the end of the process waits for running callbacks."""


class _Turn:
    """A job's place in the order."""

    def __init__(self, job: Callable[[], object], before: _Turn | None) -> None:
        self.job = job
        self.before = before
        self.begun, self.done = threading.Event(), threading.Event()
        self._thread = 0
        self._clock = 0
        self._used_s = 0.0

    def take(self) -> None:
        before, self.before = self.before, None
        if before is not None:
            before.begun.wait()
            before.ends_or_waits()
        self._thread, self._clock = threading.get_native_id(), time.pthread_getcpuclockid(threading.get_ident())
        self.begun.set()
        try:
            self.job()
        except Exception:  # a job that is waiting counts on this thread
            traceback.print_exc()
        del self.job  # and the tensors it holds: the next turn knows this one
        self.done.set()

    def ends_or_waits(self) -> None:
        """Return once the job has ended, or sleeps. One that computes, or wants to on a machine that is busy, does
        not: were the next to begin, the two would make their calls in an order that differs from rank to rank."""
        quiet = 0
        while quiet < QUIET_LOOKS:
            began_s = time.monotonic()
            if self.done.wait(LOOK_S):
                return
            in_time = time.monotonic() - began_s < 2 * LOOK_S
            quiet = quiet + 1 if in_time and self._sleeps() else 0

    def _sleeps(self) -> bool:
        try:
            used_s = time.clock_gettime(self._clock)
            with open(f"/proc/self/task/{self._thread}/stat", "rb") as file:
                runs = file.read().rpartition(b")")[2].split()[0] == b"R"
        except OSError:  # it is about to end
            return False
        moved, self._used_s = used_s != self._used_s, used_s
        return not moved and not runs


class _Pool:
    """Starts jobs in their order, each after the one before it or once that one is seen to wait: callbacks that make
    calls of their own make them in one order on every rank. Grows by a thread whenever all are inside: a callback may
    wait for another call, whose own future may have callbacks that wait, and so on. With any fixed number of threads
    the last one would wait for ever."""

    def __init__(self) -> None:
        self._turns: SimpleQueue[_Turn] = SimpleQueue()
        self._lock = threading.Condition()
        self._open = 0
        """Jobs that have not ended."""
        self._last: _Turn | None = None
        self._idle = 0
        """Threads that wait for a job and that no job in the queue counts on."""

    def run(self, job: Callable[[], object]) -> None:
        with self._lock:
            idle = self._idle > 0
            if idle:
                self._idle -= 1
            self._open += 1
            self._last = turn = _Turn(job, self._last)
            self._turns.put(turn)
        if not idle:
            threading.Thread(target=self._work, name="distsim-callbacks", daemon=True).start()

    def _work(self) -> None:
        while True:
            self._turns.get().take()
            with self._lock:
                self._idle += 1
                self._open -= 1
                self._lock.notify_all()

    def drain(self, limit_s: float) -> bool:
        """Wait until all jobs have ended; False: some have not in *limit_s*."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, limit_s)


_pool = _Pool()


def run_apart(job: Callable[[], object]) -> None:
    """Run *job* on a thread where it may block for as long as it likes."""
    _pool.run(job)


def drain() -> bool:
    """Wait for callbacks before the interpreter shuts down, which would crash a thread that is inside torch's C++."""
    return _pool.drain(LEAVE_S)
