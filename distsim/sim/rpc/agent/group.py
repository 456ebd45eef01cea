"""The workers of one `init_rpc`, and the pipes between them."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import simpy

from distsim.debug.records import HostWait
from distsim.sim.isolation.process import require_task

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["Workers", "workers_of"]


class Worker(Protocol):
    """An agent, as the others know it (agent.SimAgent)."""

    id: int
    process: SimProcess

    def lost(self, worker: int) -> None:
        """*worker* answers nothing any more."""


@dataclass(slots=True)
class _Pipe:
    """One direction of a connection: messages arrive in the order they were sent."""

    under_way: deque[list[Any]] = field(default_factory=deque)
    """For each message: whether it has come, and what happens then."""


@dataclass(slots=True)
class _Meeting:
    came: dict[int, Any]
    everybody: simpy.Event


class Workers:
    """All workers that met in one store. Shared by their processes."""

    def __init__(self, world: World, key: str) -> None:
        self.world = world
        self.key = key
        self.agents: dict[int, Any] = {}
        """By number (agent.SimAgent)."""
        self._pipes: dict[tuple[int, int, bool], _Pipe] = {}
        self._meetings: dict[str, _Meeting] = {}

    def meet(self, name: str, worker: int, size: int, value: Any, purpose: str) -> dict[int, Any]:
        """Wait until all *size* workers are here; what each has brought, by its number."""
        task = require_task()
        task.compute(self.world.store_latency_s)
        task.flush()
        meeting = self._meetings.get(name)
        if meeting is None:
            meeting = self._meetings[name] = _Meeting({}, self.world.env.event())
        meeting.came[worker] = value
        if len(meeting.came) == size:
            del self._meetings[name]
            meeting.everybody.succeed()
        else:
            missing = [rank for rank in range(size) if rank not in meeting.came]
            task.wait(meeting.everybody, HostWait(purpose, tuple(missing)))
        return dict(sorted(meeting.came.items()))

    def carry(self, source: Worker, to: Worker, nbytes: int, is_reply: bool, then: Callable[[], None]) -> None:
        """Move a message over the network, and call *then* when it and all before it have come (scheduler side)."""
        pipe = self._pipes.setdefault((source.id, to.id, is_reply), _Pipe())
        entry = [False, then]
        pipe.under_way.append(entry)

        def arrived(_: simpy.Event) -> None:
            entry[0] = True
            while pipe.under_way and pipe.under_way[0][0]:
                pipe.under_way.popleft()[1]()

        moved: simpy.Event
        if source.process is to.process:
            moved = self.world.env.timeout(0.0)
        else:
            moved = self.world.network.send(
                source.process.slot.device,
                to.process.slot.device,
                nbytes,
                "gloo",
                zlib.crc32(f"{source.id} {to.id}".encode()),
            )
        assert moved.callbacks is not None
        moved.callbacks.append(arrived)

    def left(self, agent: Worker) -> None:
        """*agent* answers no more: what others have asked it has failed."""
        if self.agents.get(agent.id) is agent:
            del self.agents[agent.id]
        for other in list(self.agents.values()):
            other.lost(agent.id)


def workers_of(world: World, store: Any) -> Workers:
    """Those who meet in *store*: the same for all processes that opened it under this name."""
    prefix, inner = "", store
    while hasattr(inner, "underlying_store"):
        prefix = f"{inner._prefix}/{prefix}"
        inner = inner.underlying_store
    key = f"{id(inner._values)}:{prefix}"
    found = world.rpc_workers.get(key)
    if found is None:
        found = world.rpc_workers[key] = Workers(world, key)
    return found
