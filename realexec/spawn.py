"""Ranks that a program starts itself, with mp.spawn or Process: the guard goes with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["Guarded", "SpawnHook"]


class Guarded:
    """What a new process runs: its own target under guard, with the settings of its parent."""

    def __init__(self, target: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self.target = target
        self.given = dict(given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from distsim.realexec import install as guard

        guard.install_started(self.given)
        try:
            return self.target(*args, **kwargs)
        except BaseException as error:
            session = guard.current_session()
            if session is not None:
                session.raised(error)
            raise


class SpawnHook:
    """Patches `Process.start`. Processes of a rank (a data loader's workers) are no ranks and stay as they are."""

    def __init__(self, given: Mapping[str, Any], is_rank: Callable[[], bool]) -> None:
        self._given = dict(given)
        self._is_rank = is_rank
        self._original: Any = None

    def install(self) -> None:
        self._original = original = BaseProcess.start

        @functools.wraps(original)
        def start(process: Any) -> None:
            if not self._is_rank():
                self._guard(process)
            original(process)

        self._ours = start
        kind: Any = BaseProcess
        kind.start = start

    def remove(self) -> None:
        kind: Any = BaseProcess
        if kind.start is self._ours:
            kind.start = self._original

    def _guard(self, process: Any) -> None:
        target, args = process._target, process._args
        if target is None:  # run() of a subclass
            return
        # mp.spawn's own target turns an exception into an exit code: the user's function is the one to guard.
        if getattr(target, "__module__", "") == "torch.multiprocessing.spawn" and args and callable(args[0]):
            process._args = (Guarded(args[0], self._given), *args[1:])
        else:
            process._target = Guarded(target, self._given)
