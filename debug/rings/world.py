"""Worlds: the rank of a process in each rendezvous that it has joined.

A process belongs to the operating system (host, pid); a *world* is one rendezvous: `init_process_group`, or a group
with its own ranks that a framework constructs. Ranks are numbers within a world. A launcher's RANK is a number in a
world that the program need not use.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from distsim.text.untrusted_input import MOST_RANKS, text, whole

__all__ = ["Process", "RecordedWorld", "WorldKind"]


class WorldKind(enum.StrEnum):
    """Creator of a world."""

    DEFAULT = "default"  # init_process_group: its ranks are the numbers that the program calls ranks
    RPC = "rpc"  # init_rpc: likewise
    FURTHER = "further"  # the program itself, beside them


@dataclass(frozen=True, slots=True)
class RecordedWorld:
    """One process's membership in a world."""

    id: str
    """Identifier that is equal on every member, and different from that of every other world of the job."""
    rank: int
    size: int
    kind: WorldKind
    where: str
    """The rendezvous, for people."""
    reuses_store: bool = False
    """Its store still holds what an earlier world of this process, or in a file an earlier job, wrote there under the
    same keys."""
    met: str = ""
    """Identifier of the world from whose rendezvous its store comes: the same ranks, some of which may still wait."""

    def to_json(self) -> list[Any]:
        """Return all fields in their order."""
        return [self.id, self.rank, self.size, self.kind.value, self.where, self.reuses_store, self.met]

    @classmethod
    def from_json(cls, content: Any) -> RecordedWorld:
        """The inverse of `to_json`; ValueError where that is none."""
        id_, rank, size, kind, where, *rest = content
        reuses_store, met = any(rest[:1]), text(rest[1] if len(rest) > 1 else "", "met", 64)
        size = whole(size, "world size", 1, MOST_RANKS)
        rank = whole(rank, "rank", 0, size - 1)
        return cls(text(id_, "world", 64), rank, size, WorldKind(kind), text(where, "where", 200), reuses_store, met)


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a job, and the worlds it has joined, in their order."""

    host: str
    pid: int
    rank: int
    """Rank as in `layout.HEADER`."""
    world_size: int
    has_launcher: bool
    """A launcher gave it these two numbers."""
    opened_ns: int
    seen_ns: int
    """Time of its last heartbeat (wall clock)."""
    worlds: tuple[RecordedWorld, ...] = ()

    @property
    def key(self) -> tuple[str, int, int]:
        """Tells it from every other process."""
        return self.host, self.pid, self.opened_ns

    def to_json(self) -> list[Any]:
        """Return all fields in their order."""
        worlds = [world.to_json() for world in self.worlds]
        times = self.opened_ns, self.seen_ns
        return [self.host, self.pid, self.rank, self.world_size, int(self.has_launcher), *times, worlds]

    @classmethod
    def from_json(cls, content: Any) -> Process:
        """The inverse of `to_json`; ValueError where that is none."""
        host, pid, rank, size, has_launcher, opened_ns, seen_ns, worlds = content
        if not isinstance(worlds, list):
            raise ValueError("worlds: expected a list")
        return cls(
            text(host, "host", 200),
            whole(pid, "pid"),
            whole(rank, "rank", 0, MOST_RANKS),
            whole(size, "world size", 1, MOST_RANKS),
            bool(has_launcher),
            whole(opened_ns, "opened"),
            whole(seen_ns, "seen"),
            tuple(RecordedWorld.from_json(world) for world in worlds),
        )
