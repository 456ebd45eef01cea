"""What `rpc_async` returns: torch's own future, waited for in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import simpy
from torch.futures import Future

from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.future_sources import is_done, made_of
from distsim.torch_compat.works import COLLECT_ALL

if TYPE_CHECKING:
    from distsim.debug.records import Wait
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Reply", "collect_all"]

_collect_all = COLLECT_ALL.get()


class Reply(Future[Any]):
    """The reply to one request. *read* makes of what came the value, or raises; *why* is what a thread that waits for
    it is said to wait for."""

    def __init__(self, process: SimProcess, why: Wait, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self._came: simpy.Event = process.world.env.event()
        self.why = why
        self._read = read
        self._waiters = 0
        self._raw: list[Any] = []
        self.error: Exception | None = None

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread of its process sleeps until it comes, and can do what is to be done with it."""
        return self._waiters > 0

    def hand_to_waiter(self, raw: Any) -> None:
        """It has come, and who waits for it reads it (scheduler side)."""
        self._raw.append(raw)
        self._came.succeed()

    def settle(self, raw: Any) -> None:
        """It has come: read it in the running thread, which calls what was to be called then."""
        try:
            value = self._read(raw)
        except Exception as error:
            self.error = error
            self.set_exception(error)
        else:
            self.set_result(value)
        if not self._came.triggered:
            self._came.succeed()

    def wait(self) -> Any:
        task = current_task()
        if task is not None and not is_done(self):
            self._waiters += 1
            try:
                task.wait(self._came, self.why)
            finally:
                self._waiters -= 1
            while self._raw:
                self.settle(self._raw.pop())
        return super().wait()


_real_collect_all: Any = _collect_all


def collect_all(futures: Sequence[Any]) -> Any:
    """torch's own; with a call that has failed it is over at once, as a failed future of C++'s would have it."""
    if current_task() is None or not any(hasattr(future, "why") for future in futures):
        made = _real_collect_all(futures)
        made_of(made, futures)
        return made
    together: Future[Any] = Future()
    left = len(futures)

    def one_more(future: Any) -> None:
        nonlocal left
        left -= 1
        if is_done(together):
            return
        if (error := _error_of(future)) is not None:
            together.set_exception(error)
        elif not left:
            together.set_result(list(futures))

    for future in futures:
        future.add_done_callback(lambda _, future=future: one_more(future))
    made_of(together, futures)
    return together


def _error_of(future: Any) -> Exception | None:
    """What it has failed with."""
    try:
        future.value()
    except Exception as error:
        return error
    return None
