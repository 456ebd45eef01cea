"""The threads in which a worker serves requests and takes replies: `num_worker_threads` of them, simulated threads of
its process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import simpy

from distsim.debug.records import HostWait
from distsim.sim.isolation.process import require_task
from distsim.sim.processes.thread_context import thread_of

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Pool"]

Job = Callable[[], None]


class Pool:
    """At most *size* threads of *process*. One that is there and idle takes a job before another is started."""

    def __init__(self, process: SimProcess, size: int) -> None:
        self.process = process
        self.size = size
        self.started = 0
        self.idle: list[simpy.Event] = []
        self._jobs: deque[Job] = deque()
        self._stopped = False

    @property
    def num_idle(self) -> int:
        return self.size - self.started + len(self.idle)

    @property
    def has_room(self) -> bool:
        """Whether a job would begin at once."""
        return self.num_idle > len(self._jobs)

    def submit(self, job: Job) -> None:
        """Have a thread do *job*. On the scheduler's side or in any thread."""
        if self._stopped or not self.process.alive:
            return
        self._jobs.append(job)
        if self.idle:
            self.idle.pop().succeed()
        elif self.started < self.size:
            self.started += 1
            task = self.process.world.start_task(self.process, self._body, f"RPC {self.started}", daemon=True)
            task.serves = True

    def stop(self) -> None:
        """Threads that are idle end now, the others when they are."""
        self._stopped = True
        self._jobs.clear()
        waiting, self.idle = self.idle, []
        for event in waiting:
            event.succeed()

    def _body(self) -> None:
        with thread_of(self.process):
            task = require_task()
            while not self._stopped:
                if self._jobs:
                    self._jobs.popleft()()
                    continue
                event = self.process.world.env.event()
                self.idle.append(event)
                task.serves = False
                task.wait(event, HostWait("a request"))
                task.serves = True
