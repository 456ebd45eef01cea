"""The handle of a guarded call: torch's Work, noting when it is waited for and when it ended."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torch.distributed import Work

from distsim.debug.rings import layout as rings
from distsim.debug.rings.writer import RingWriter
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat import works

__all__ = ["KEEPS_ALIVE", "Handle", "HostHandle", "MessageHandle", "MessageWork", "SyncHandle", "keep_alive", "watched"]


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
