"""The threads in which a worker serves requests and takes replies: `num_worker_threads` of them, simulated threads of
its process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import simpy

from distsim.debug.records import HostWait
from distsim.sim.isolation.process import require_task
from distsim.sim.processes.thread_context import thread_of

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Pool"]

Job = Callable[[], None]


class Pool:
    """At most *size* threads of *process*. As Python's interpreter lock has it, one of them runs at a time: another
    takes a job only where those that are awake wait for something."""

    def __init__(self, process: SimProcess, size: int) -> None:
        self.process = process
        self.size = size
        self._started = 0
        self._busy = 0
        """Threads in a job, waiting or not."""
        self._awake = 0
        """Threads that were woken, and will look for another job before they sleep."""
        self._idle: list[simpy.Event] = []
        self._jobs: deque[Job] = deque()
        self._stopped = False

    @property
    def num_idle(self) -> int:
        return self.size - self._busy

    @property
    def has_room(self) -> bool:
        """Whether a job would begin at once, or as soon as one ends that does not wait."""
        return self._busy + len(self._jobs) < self.size

    def submit(self, job: Job) -> None:
        """Have a thread do *job*. On the scheduler's side or in any thread."""
        if self._stopped or not self.process.alive:
            return
        self._jobs.append(job)
        if not self._awake:
            self._wake_one()

    def _wake_one(self) -> None:
        if self._idle:
            self._idle.pop().succeed()
            self._awake += 1
        elif self._started < self.size:
            self._started += 1
            self._awake += 1
            self.process.world.start_task(self.process, self._body, f"RPC {self._started}", daemon=True)

    def stop(self) -> None:
        """Threads that are idle end now, the others when they are."""
        self._stopped = True
        self._jobs.clear()
        waiting, self._idle = self._idle, []
        for event in waiting:
            event.succeed()

    def _body(self) -> None:
        with thread_of(self.process):
            task = require_task()
            sleeps: Any = task._hand_over

            def hand_over(request: Any) -> None:
                """What a thread waits for in a job keeps nobody from the next one."""
                self._awake -= 1
                if self._jobs and not self._awake:
                    self._wake_one()
                try:
                    sleeps(request)
                finally:
                    self._awake += 1

            while not self._stopped:
                if self._jobs:
                    self._busy += 1
                    task.serves = True
                    task._hand_over = hand_over  # type: ignore[method-assign]
                    try:
                        self._jobs.popleft()()  # under no name: it holds what it was sent
                    finally:
                        self._busy -= 1
                        task.serves = False
                        task._hand_over = sleeps  # type: ignore[method-assign]
                    continue
                event = self.process.world.env.event()
                self._idle.append(event)
                self._awake -= 1
                task.wait(event, HostWait("a request"))
