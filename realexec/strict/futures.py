"""Futures of calls at the strict level: what a program hangs on them runs on threads of ours.

It may wait for a call that only the thread that is here can let go out, or that one of gloo's two threads is to carry.
A call that is held has a future of ours. One that went out has gloo's own: whoever waits for it, in Python or C++, pays
for nothing, and only what Python hangs on it (`then`, `add_done_callback`) is led through a future of ours.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.futures

from distsim.realexec.guard.callbacks import run_apart
from distsim.torch_compat import works

__all__ = ["CallbackHooks", "HeldFuture", "callbacks_apart", "pass_on"]

FUTURE = works.FUTURE.get(torch.futures.Future)
ADD = FUTURE.add_done_callback
SET_UNWRAP = works.UNWRAP.get()
_apart: WeakSet[Any] = WeakSet()
"""Futures of gloo's whose callbacks run apart."""


class Hastened(Protocol):
    """The part of a held call that its future needs."""

    def hasten(self, limit_s: float) -> bool: ...


def callbacks_apart(future: Any) -> Any:
    """gloo's future, with its callbacks to come on threads of ours. One that is done calls back whoever hangs on it,
    there and then."""
    if not future.done():
        _apart.add(future)
    return future


class CallbackHooks:
    """Exchanges the two methods of torch's by which Python hangs a callback on a future."""

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
        """Leave what somebody else has put in their place meanwhile."""
        while self._undo:
            self._undo.pop()()
        _apart.clear()


class HeldFuture(torch.futures.Future):
    """The future of a call that is held, or was. Callbacks that Python hangs on it run apart: they may wait for a call
    that only the thread that is here can let go out, or one of gloo's two threads can carry."""

    def __init__(self, call: Hastened | None, device: torch.device | None) -> None:
        super().__init__(devices=[] if device is None else [device])
        self.call = call
        """None: it went out, or was refused."""
        self._lock = threading.Lock()
        self._called_back = device is not None
        self._follower = 0

    def follow(self, source: Any) -> None:
        """End as *source* does."""
        self._follower = threading.get_ident()
        ADD(source, self._take)

    def _take(self, source: Any) -> None:
        with self._lock:
            if not self._called_back and threading.get_ident() != self._follower:
                pass_on(source, self)  # in gloo's own thread
                return
        run_apart(lambda: pass_on(source, self))

    def set_exception(self, error: BaseException) -> None:
        """End with *error*, for whoever waits in C++, too: torch's own stores the exception as a value, and DDP's
        reducer, which looks for a tensor in it (`parseCppCommHookResult` of torch 2.13), dies of SIGSEGV."""
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
    """The value of a future that failed: it raises where C++ takes tensors from it, which it does by pickling."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.error


def _raise(value: Any) -> None:
    if isinstance(value, _Failure):
        raise value.error


def pass_on(source: Any, target: Any) -> None:
    """Let *target* end as *source* has."""
    try:
        value = source.wait()
    except Exception as error:
        target.set_exception(error)
        return
    target.set_result(value)
