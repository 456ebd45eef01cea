"""Handles of guarded calls: torch's Work, with a note of when it was waited for and when it ended.

Callbacks on the future of a held call (`Future.then`, a DDP communication hook) run on threads of the guard.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from distsim.debug.rings import layout as rings
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat import groups

FIRST, RECORDS, EACH = rings.RECORDS_AT // 8, rings.RECORDS, rings.RECORD_WORDS
FLAGS = rings.WORD_FLAGS
WAITED_FOR = rings.WAITED | rings.FUTURE


_alive: deque[Any] = deque(maxlen=1024)
"""Recent handles that are kept alive before torch 2.7, because C++ may still wait for them."""


def keep_alive(handle: Any) -> None:
    """Keep the Python object of a handle that is passed to C++ until it was waited for.

    Below torch 2.7, C++ keeps a Work without its Python object. Once that object is gone, C++ calls its own
    `Work::wait`, which never returns: DistributedDataParallel's constructor hangs there.
    """
    while _alive and _alive[0].is_waited_for():
        _alive.popleft()
    if handle._touched:  # else a user owns it, and is told of a handle that is dropped
        _alive.append(handle)


KEEPS_ALIVE = not groups.WORK.works()


class _Noted:
    """Base of all handles: forwards to torch's Work, and notes in the record that the handle was waited for."""

    if not TYPE_CHECKING:
        __slots__ = ()  # a base beside Work can have none
    _inner: Any
    _group_log: GroupLog
    _index: int
    _touched: bool
    _is_async: bool
    _polled: bool
    _again: bool

    @property
    def _recorder(self) -> Recorder:
        recorder: Recorder = self._group_log.recorder
        return recorder

    def _wait_by(self, wait: Callable[..., bool], timeout: timedelta | None) -> bool:
        """Wait by *wait* for an asynchronous call on CPU tensors."""
        self._touched = True
        recorder, index = self._recorder, self._index
        recorder.ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            answer = wait() if timeout is None else wait(timeout)
        except BaseException as error:
            self._failed(error)
            raise
        recorder.outstanding.pop(index, None)  # it knows the tensors
        recorder.ring.finish(index, rings.COMPLETED)
        return answer

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
    """Wrapper of a backend's Work. C++ code (DDP, functional collectives) calls its `wait` and `get_future`."""

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
        """Whether the tensors are on the CPU, so that wait() returns when the data have arrived. On a GPU, wait()
        only makes the stream wait.
        """
        self._again = on_host and not p2p
        """Whether wait() may be called twice. A second wait() of a send or receive blocks forever in gloo."""
        self._touched = not (is_async and owned)
        """Whether dropping the handle is harmless: it was waited for, or torch's own code holds it."""
        self._after: Any = None
        """Called once after the first wait() has returned (NaN check, checksums)."""
        self._polled = not p2p or not on_host
        """Whether polling shows that the call has ended. gloo's sends and receives end only with wait()."""
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
    """Handle of an asynchronous collective on CPU tensors; created by `watched`."""

    __slots__ = ()
    __init__ = Work.__init__
    _is_async = True
    _on_host = True
    _again = True
    _polled = True
    _after = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._wait_by(self._inner.wait, timeout)


class MessageHandle(_Noted):
    """Handle of `isend` or `irecv`. gloo's Work may be waited for only once, and ends only with that wait.

    Only Python code gets this handle, from torch's public functions, so it imitates Work without being one: an
    object that C++ accepts costs half as much as the record. Methods of a group return a `MessageWork`.
    """

    __slots__ = ("_group_log", "_index", "_inner", "_touched")
    _is_async = True
    _again = False
    _polled = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._wait_by(self._inner.wait, timeout)

    def boxed(self) -> Any:
        return self._inner.boxed()


class MessageWork(HostHandle):
    """A `MessageHandle` that C++ code accepts as a Work."""

    __slots__ = ()
    _again = False
    _polled = False

    @classmethod
    def of(cls, handle: MessageHandle) -> MessageWork:
        """Return a replacement for *handle*."""
        owned, handle._touched = not handle._touched, True
        work: MessageWork = watched(cls, handle._inner, handle._group_log, handle._index, owned)
        return work


def watched(kind: type[HostHandle | MessageHandle], work: Any, log: GroupLog, index: int, owned: bool) -> Any:
    """Return the handle of a call that has just been made.

    It is not created by `__init__`, because one more Python call costs a microsecond with cold caches.
    """
    handle = kind()
    handle._inner = work
    handle._group_log = log
    handle._index = index
    handle._touched = not owned
    if kind._polled:
        log.recorder.outstanding[index] = work
    return handle


class SyncHandle:
    """Handle of a synchronous call on CPU tensors. It is not a Work, which makes it cheap.

    Only torch.distributed's own function sees it, and calls `wait()` immediately.
    """

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
"""Number of consecutive polls that must see a callback asleep before the next callback starts: it may wait for a
later one.
"""
LEAVE_S = 2.0
"""Seconds that the process waits at its end for running callbacks."""


class _Turn:
    """Ensures that callbacks run in the order in which they were added."""

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
        """Return once the callback has ended, or sleeps because it waits for something.

        It does not return while the callback computes, or wants to on a busy machine: if the next callback started
        then, the two could make their calls in an order that differs from rank to rank.
        """
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
    """Thread pool that starts callbacks in order, each once the previous one has ended or waits.

    Callbacks that make calls thus make them in the same order on every rank. The pool adds a thread whenever all
    threads are busy: a callback may wait for another call whose future has callbacks that wait, and so on, and with
    any fixed number of threads the last callback would wait forever.
    """

    def __init__(self) -> None:
        self._turns: SimpleQueue[_Turn] = SimpleQueue()
        self._lock = threading.Condition()
        self._open = 0
        """Number of callbacks that have not ended."""
        self._last: _Turn | None = None
        self._idle = 0
        """Number of idle threads that no queued callback will use."""

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
        """Wait until all callbacks have ended. Return False if some have not after *limit_s* seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._open, limit_s)


_pool = _Pool()


def run_apart(job: Callable[[], object]) -> None:
    """Run *job* on a thread of the pool, where it may block as long as needed."""
    _pool.run(job)


def drain() -> bool:
    """Wait for callbacks before the interpreter shuts down. Shutdown would crash a thread that is inside torch's C++
    code.
    """
    return _pool.drain(LEAVE_S)


def settle() -> None:
    """Wait until the threads of gloo sleep.

    One that frees the tensors of a completed call while the interpreter shuts down needs the interpreter lock, and then
    aborts the process (pytorch/pytorch#190489). A thread that waits for the lock wakes up once per switch interval.
    """
    before: dict[Path, list[str]] = {}
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        now = _gloo_threads()
        if all(look[0].startswith("State:\tS") and look == before.get(thread) for thread, look in now.items()):
            return
        before = now
        time.sleep(2 * sys.getswitchinterval())


def _gloo_threads() -> dict[Path, list[str]]:
    """Return the state of each thread of gloo, and how often it has waited."""
    looks = {}
    for thread in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended
            lines = thread.read_text().splitlines()
            if lines[0] == "Name:\tpt_gloo_runloop":
                looks[thread] = [line for line in lines if line.startswith(("State:", "voluntary_ctxt"))]
    return looks
