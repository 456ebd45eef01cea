"""Reads the records of a real run's ranks, over all hosts of the job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distsim.debug.postmortem import examine
from distsim.debug.records import CallRecord, Evidence, Phase, RankState
from distsim.errors import UsageError

__all__ = ["seen"]


def seen(folder: Path, num_hosts: int, world_size: int) -> Evidence | None:
    """Return the evidence in the rings of *folder* (`rings0`, `rings1`, ...); None if there are no rings.

    The job may still run. Each host contributes what it knows of its own ranks.
    """
    parts = []
    for host in range(num_hosts):
        try:
            parts.append(examine(folder / f"rings{host}").evidence)
        except UsageError:
            continue  # no rank of this host has come that far
    if not parts:
        return None
    ranks = {rank: RankState(rank, Phase.ABSENT) for rank in range(world_size)}
    records: dict[int, Sequence[CallRecord]] = {}
    sources: dict[str, str] = {}
    for part in parts:
        own = [rank for rank, state in part.ranks.items() if state.host is not None]
        for rank in own:
            state = ranks[rank] = part.ranks[rank]
            if state.site is not None and not state.site.line:
                state.site = None  # inside the interpreter's own start
        records.update((rank, part.records.get(rank, ())) for rank in own)
        sources.update(part.sources)
    return Evidence(world_size, ranks, records, sources=sources)
