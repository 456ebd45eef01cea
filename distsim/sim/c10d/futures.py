"""torch.futures.Future in a simulated rank: who waits for one sleeps in virtual time, for the calls behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from distsim.debug.records import CallWait
from distsim.sim.c10d.on_gpu.futures import have_stream_wait
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.kernel.behind import calls_behind, is_done, why_it_waits

if TYPE_CHECKING:
    from distsim.sim.c10d.work import SimWork

__all__ = ["CallFuture", "wait_patches"]

_Base = torch._C.Future
_real_wait, _real_add = _Base.wait, _Base.add_done_callback


class CallFuture(Future[Any]):
    """What `get_future` gives: done when the call of *work* is, or when its time is over."""

    def __init__(self, work: SimWork) -> None:
        super().__init__()
        self.work: SimWork | None = work
        self.why = CallWait(work.record)

    def settle(self, value: object, error: BaseException | None) -> None:
        self.work = None  # it has the future
        if error is None:
            self.set_result(value)
        else:
            self.set_exception(error)


def _works(future: Any) -> list[SimWork]:
    """The handles of the calls behind *future* that are not over; a remote call has none."""
    return [work for one in calls_behind(future) if (work := getattr(one, "work", None)) is not None]


def _sleep(task: RankTask, future: Any) -> None:
    """Until something fell due in the process that may be the end of *future*, or the first of the calls behind it has
    used up its time: it then ends as if somebody had waited for its handle."""
    first = min(_works(future), key=lambda work: work.expires_s, default=None)
    event, why = task.process.next_due(), why_it_waits(future)
    if first is None:
        task.wait(event, why)
    elif not task.wait_until(event, why, max(0.0, first.expires_s - task.now_s()), first.has_own_limit):
        first.give_up()


def _wait(self: Any) -> Any:
    task = current_task()
    if task is not None:
        process = task.process
        process.complete_futures()
        watched: Any = None
        while not is_done(self):
            first = next(calls_behind(self), self)
            if first is not watched:  # when that call is over, it is another that the rank is said to wait for
                for one in (first,) if first is self else (first, self):
                    _real_add(one, lambda _: process.wake_for_due())
                watched = first
            _sleep(task, self)
    value = _real_wait(self)
    if task is not None:
        have_stream_wait(task, value)
    return value


def _done(self: Any) -> bool:
    task = current_task()
    if task is not None and not is_done(self):
        task.poll(why_it_waits(self), task.looks_on(self))
        for work in _works(self):
            work.give_up_if_late(task)
    return bool(is_done(self))


def wait_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of what blocks in C++, and of what is asked until it says yes."""
    return [(_Base, "wait", _wait), (_Base, "done", _done)]
