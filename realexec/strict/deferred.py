"""Handles and futures of calls that level strict holds.

A call is held because its members do not agree yet, or because the other end of a message is missing. Python
callbacks on its future run on threads of the guard: they may wait for a call that only the current thread can make,
or that one of gloo's two threads carries out. A held call has a future of the guard. A call that was made has gloo's
own: waiting for it, in Python or C++, costs nothing extra, and only Python's callbacks (`then`, `add_done_callback`)
go through a future of the guard.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.futures

from distsim.debug.records.arguments import MethodCall
from distsim.debug.rings import layout as rings
from distsim.realexec.guard.handle import Handle, HostHandle, run_apart
from distsim.realexec.guard.recorder import GroupLog, Recorder
from distsim.text.tracebacks import error_line
from distsim.torch_compat import groups

LIFE_CHECK_S = 0.2
FIRST_SLEEP_S = 20e-6
LAST_SLEEP_S = 1e-3
AWAKE_S = 50e-6
"""Seconds for which the other end of a message is polled without a pause. A pause costs about half of that."""
LOOK_S = 300e-6
"""Seconds for which a caller that wants a future polls for the other members.

Waking the thread that releases calls, and its quick polls, cost as much.
"""
FUTURE = groups.FUTURE.get(torch.futures.Future)
ADD = FUTURE.add_done_callback
SET_UNWRAP = groups.UNWRAP.get()
_apart: WeakSet[Any] = WeakSet()
"""Futures of gloo whose callbacks run in threads of the guard."""


class Deferred(Handle):
    """Handle of a call that has not been made yet."""

    def __init__(
        self,
        recorder: Recorder,
        log: GroupLog,
        index: int,
        seq: int,
        print_: int,
        is_async: bool,
        device: torch.device | None,
        issue: Any,
    ) -> None:
        super().__init__(None, recorder, log, index, False, device is None, False)
        self._is_async = is_async
        self._device = device
        """Device of the tensors; None for the CPU."""
        self.seq = seq
        self.print_ = print_
        self.issue: Callable[[], Any] = issue
        self.said: MethodCall | None = None
        self.shown = False
        self.began = time.monotonic()
        """Time at which the call was held, or became the head of its queue."""
        self.timeout_s: Callable[[], float] = lambda: math.inf
        self.hasten: Callable[[float], bool] = lambda _: False
        """Wait for the members and make the call. Return False if that takes longer than the given seconds."""
        self.urge: Callable[[], None] = lambda: None
        """Called when code that cannot call `hasten` waits for the call."""
        self.has_future = True
        """False for gloo's reduce_scatters, which have no future and raise immediately if asked for one."""
        self.decided = False
        """Whether the call was made or refused."""
        self._error: BaseException | None = None
        self._future: Any = None
        self._lock = threading.Lock()
        """Lock held while the call is made or its future is created. Whichever comes second connects the two."""

    def went_out(self) -> None:
        """Make the call, because all members are present and agree."""
        try:
            self._inner = self.issue()
        except BaseException as error:
            self._error = error
            self._recorder.not_issued(self._group_log, None, self._index, error_line(error))
            self._free()
            self._decided()
            return
        if self._inner is None:
            self._recorder.ring.finish(self._index, rings.COMPLETED)
        else:
            self._recorder.watch(self._index, self._inner, self._again)
        self._decided()

    def refuse(self, error: BaseException) -> None:
        """Complete the call with *error* without making it."""
        self._error = error
        self._recorder.ring.fail(self._index, error_line(error))
        self._free()
        self._decided()

    def _decided(self) -> None:
        with self._lock:
            self.decided = True
            # These know this handle, and it knows the tensors.
            self.hasten, self.urge, self.issue = _decided_at_once, _nothing, _nothing
            if self._future is not None:
                self._future.call = None
                self._join(self._future)

    def _join(self, target: HeldFuture) -> None:
        """Complete *target* when the call ends."""
        error, source = self._error, None
        if error is None and self._inner is not None:
            try:
                source = self._inner.get_future()
            except RuntimeError as none:  # gloo's reduce_scatters have none: whoever waits for it is told so
                error = none
        if error is not None:
            run_apart(lambda: target.set_exception(error))
        elif source is None:
            run_apart(lambda: target.set_result(None))
        elif self._device is None:
            target.follow(source)
        else:
            on_device = partial(_pass_on_device, self._device)
            source.add_done_callback(lambda source: run_apart(lambda: on_device(source, target)))

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._looked()
        if not self.decided:
            self._recorder.ring.mark(self._index, rings.WAITING)
            if not self.hasten(timeout.total_seconds() if timeout else math.inf):
                raise RuntimeError("Operation timed out!")  # torch's own words; the call itself goes on
        if self._error is not None:
            raise self._error
        if self._inner is None:
            self._free()
            return True
        done = super().wait(timeout)
        if self._future is not None and self._on_host:
            self._future.wait()  # who has waited for the call finds the future's value there, too
        return done

    def _looked(self) -> None:
        self._touched = True
        self._recorder.ring.mark(self._index, rings.WAITED)

    def is_completed(self) -> bool:
        if not self.decided:
            return False
        if self._error is None and self._inner is not None:
            return super().is_completed()
        self._looked()
        return True

    def is_success(self) -> bool:
        return self.decided and self._error is None and (self._inner is None or super().is_success())

    def exception(self) -> Any:
        if self._error is not None:
            self._looked()
            return self._error
        return None if self._inner is None else super().exception()

    def result(self) -> Any:
        self._out()
        return [] if self._inner is None else super().result()

    def get_future(self) -> Any:
        self._touched = True
        if not self.has_future:
            raise RuntimeError("Work::getFuture not implemented.")
        if not self.decided:
            self.hasten(LOOK_S)
        with self._lock:
            if self._future is None:
                inner = self._inner if self.decided else None
                if inner is not None:  # on a device it knows the streams
                    return callbacks_apart(super().get_future()) if self._on_host else super().get_future()
                self._future = HeldFuture(None if self.decided else self, self._device)
                self._recorder.ring.mark(self._index, rings.FUTURE)
                if self.decided:
                    self._join(self._future)
        if not self.decided:
            self.urge()
        return self._future

    def synchronize(self) -> None:
        self._out()
        if self._inner is not None:
            super().synchronize()

    def _out(self) -> None:
        """Wait until the held call is made."""
        self._looked()
        self.hasten(math.inf)
        if self._error is not None:
            raise self._error


class WentOut(HostHandle):
    """Handle of an asynchronous call that was not held. Callbacks on its future also run on threads of the guard."""

    __slots__ = ()

    def get_future(self) -> Any:
        return callbacks_apart(super().get_future())


def _decided_at_once(limit_s: float) -> bool:
    return True


def _nothing() -> None:
    return None


def _pass_on_device(device: torch.device, source: Any, target: Any) -> None:
    """Pass the result of *source* to *target* on a separate stream.

    wait() makes the current stream wait for the call, and set_result() makes those who wait for *target* wait for
    the current stream. The stream of the program's kernels should do neither.
    """
    streams = torch.get_device_module(device)
    with streams.stream(streams.Stream(device)):
        pass_on(source, target)


class Watched(Handle):
    """Handle of a send or receive whose other end was missing: its wait() polls for the other end."""

    def __init__(
        self,
        handle_fields: tuple[Any, Recorder, GroupLog, int, bool, bool],
        wait: Callable[[Callable[..., bool], timedelta | None], bool],
    ) -> None:
        """Create the handle of a message.

        Args:
            handle_fields: Arguments of `Handle`.
            wait: Waits for the other end, and then for the message.
        """
        super().__init__(*handle_fields, owned=False, p2p=True)
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._is_async:
            self._recorder.ring.mark(self._index, rings.WAITING | rings.WAITED)
        try:
            return self._wait(super().wait, timeout)
        except RuntimeError as error:
            self._failed(error)
            raise


def look_out(check: Callable[[], bool], gone: Callable[[], bool], limit_s: float) -> bool:
    """Poll until *check* or *gone* returns True. Return False if neither does within *limit_s* seconds."""
    sleep_s = FIRST_SLEEP_S
    checked = began = time.monotonic()
    while not check():
        if time.monotonic() - began < AWAKE_S:
            os.sched_yield()
            continue
        time.sleep(sleep_s)
        sleep_s = min(sleep_s * 1.3, LAST_SLEEP_S / 4)
        now = time.monotonic()
        if now - checked > LIFE_CHECK_S:
            checked = now
            if gone():
                check()  # what it said before it ended, if that was a moment ago
                break
            if now - began > limit_s:
                return False
    return True


def callbacks_apart(future: Any) -> Any:
    """Return gloo's future, changed so that later callbacks run on threads of the guard.

    Callbacks on a finished future run immediately, as in torch.
    """
    if not future.done():
        _apart.add(future)
    return future


class CallbackHooks:
    """Patches of the two methods of torch's Future that add a Python callback."""

    def __init__(self) -> None:
        self._undo = [self._exchange("then"), self._exchange("add_done_callback")]

    def _exchange(self, name: str) -> Any:
        kind = FUTURE
        original = getattr(kind, name)

        def hang(self: Any, callback: Any) -> Any:
            if not _apart or self not in _apart or self.done():
                return original(self, callback)
            ours = HeldFuture(None, None)
            ours.follow(self)
            return getattr(ours, name)(callback)

        setattr(kind, name, hang)

        def undo() -> None:
            if getattr(kind, name) is hang:
                setattr(kind, name, original)

        return undo

    def remove(self) -> None:
        """Restore the original functions, unless other code has replaced ours meanwhile."""
        while self._undo:
            self._undo.pop()()
        _apart.clear()


class HeldFuture(torch.futures.Future):
    """Future of a call that is or was held. Its Python callbacks run on threads of the guard.

    They may wait for a call that only the current thread can make, or that one of gloo's two threads carries out.
    """

    def __init__(self, call: Deferred | None, device: torch.device | None) -> None:
        super().__init__(devices=[] if device is None else [device])
        self.call = call
        """The held call; None after it was made or refused."""
        self._lock = threading.Lock()
        self._called_back = device is not None
        self._follower = 0

    def follow(self, source: Any) -> None:
        """Complete this future when *source* is, with the same result."""
        self._follower = threading.get_ident()
        ADD(source, self._take)

    def _take(self, source: Any) -> None:
        with self._lock:
            if not self._called_back and threading.get_ident() != self._follower:
                pass_on(source, self)  # in gloo's own thread
                return
        run_apart(lambda: pass_on(source, self))

    def set_exception(self, error: BaseException) -> None:
        """End with *error*, also for callers that wait in C++.

        torch's own method stores the exception as a value, and DDP's reducer, which looks for a tensor in it
        (`parseCppCommHookResult` of torch 2.13), crashes (SIGSEGV).
        """
        SET_UNWRAP(self, _raise)
        self.set_result(_Failure(error))

    def wait(self) -> Any:
        call = self.call
        if call is not None:
            call.hasten(math.inf)
        return super().wait()

    def then(self, callback: Any) -> Any:
        self._called()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self._called()
        super().add_done_callback(callback)

    def _called(self) -> None:
        with self._lock:
            self._called_back = True


class _Failure:
    """Value of a failed future. It raises when C++ pickles it to extract tensors."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise(value: Any) -> None:
    if isinstance(value, _Failure):
        raise value.error


def pass_on(source: Any, target: Any) -> None:
    """Complete *target* like *source*."""
    try:
        value = source.wait()
    except Exception as error:
        target.set_exception(error)
        return
    target.set_result(value)
