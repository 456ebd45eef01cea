"""The handle of a guarded call: torch's Work, noting when it is waited for and when it ended."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work

from distsim.debug.rings import layout as rings
from distsim.debug.rings.writer import RingWriter
from distsim.debug.words.error_text import error_line
from distsim.realexec.guard.recorder import GroupLog, Recorder

__all__ = ["Handle", "HostHandle", "MessageHandle", "SyncHandle"]


class Handle(Work):
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
        "_recorder",
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
        self._recorder = recorder
        self._group_log = log
        self._index = index
        self._is_async = is_async
        self._on_host = on_host
        """wait() returns when the data are there (CPU tensors); on an accelerator the stream waits."""
        self._again = on_host and not p2p
        """wait() may be called twice: gloo's send and receive block for ever the second time."""
        self._touched = not (is_async and owned)
        """Nothing is to be said if the handle is dropped: it was waited for, or torch's own code holds it."""
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
            with contextlib.suppress(Exception):  # the interpreter may be going down
                self._recorder.ring.mark(self._index, rings.DROPPED)


class HostHandle(Handle):
    """The handle of an asynchronous collective on the host's tensors."""

    __slots__ = ()
    _is_async = True
    _on_host = True
    _again = True
    _polled = True
    _after = None

    def __init__(self, inner: Any, recorder: Recorder, log: GroupLog, index: int, owned: bool) -> None:
        Work.__init__(self)
        self._inner = inner
        self._recorder = recorder
        self._group_log = log
        self._index = index
        self._touched = not owned
        if self._polled:
            recorder.outstanding[index] = (inner, True)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._touched = True
        recorder, index = self._recorder, self._index
        ring = recorder.ring
        ring.mark(index, rings.WAITING | rings.WAITED)
        try:
            answer = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        except BaseException as error:
            self._failed(error)
            raise
        recorder.outstanding.pop(index, None)
        ring.finish(index, rings.COMPLETED)
        return bool(answer)


class MessageHandle(HostHandle):
    """The handle of `isend` or `irecv`: gloo's may be waited for but once, and end only with that."""

    __slots__ = ()
    _again = False
    _polled = False


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
