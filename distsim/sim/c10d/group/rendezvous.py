"""Worlds of a simulation: which process is which rank in each rendezvous that it has joined.

Processes are numbered as their launcher does. A default group of as many ranks gives them its own numbers instead, once
all have met; in groups of other worlds members go by the numbers that their processes have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distsim.debug.records import Group
from distsim.errors import UsageError
from distsim.sim.c10d.stores import PrefixStore

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["Rendezvous", "meeting_place"]


@dataclass(eq=False)
class Rendezvous:
    """One world, and who has come so far."""

    size: int
    is_default: bool
    members: dict[int, SimProcess] = field(default_factory=dict)
    """Rank in this world -> process."""
    ranks: tuple[int, ...] = ()
    """Of each member the job's number of its process, once all have met."""

    def is_over(self, rank: int) -> bool:
        """Whether the process that was *rank* has ended: whoever comes as the same now is of another job."""
        other = self.members.get(rank)
        return other is not None and not other.alive

    def join(self, rank: int, process: SimProcess) -> None:
        """*process* comes as *rank*; UsageError where another has come as the same."""
        other = self.members.setdefault(rank, process)
        if other is not process:
            raise UsageError(
                f"two processes call themselves rank {rank} of {self.size} (their launcher's ranks {other.rank} and "
                f"{process.rank}): give each process a rank of its own in init_process_group(rank=...) or RANK"
            )

    def form(self, world: World) -> None:
        """All have met; whoever is first through says so."""
        if self.ranks:
            return
        given = {process: rank for rank, process in self.members.items()}
        renamed = self.is_default and self.size == world.world_size == len(given)
        if renamed and any(process.rank != rank for process, rank in given.items()):
            world.renumber(given)
        there = {rank: process.rank for rank, process in self.members.items()}
        self.ranks = tuple(there.get(rank, rank) for rank in range(self.size))

    def in_job(self, group: Group) -> Group:
        """*group*, whose ranks are this world's, in the job's numbers."""
        ranks = tuple(self.ranks[rank] for rank in group.ranks)
        return group if ranks == group.ranks else Group(group.name, group.description, ranks)


def meeting_place(store: Any) -> tuple[object, ...]:
    """What identifies the rendezvous in a store: what it holds, and under which prefixes."""
    prefixes = []
    while isinstance(store, PrefixStore):
        prefixes.append(store._prefix)
        store = store.underlying_store
    return getattr(store, "_values", store), *prefixes
