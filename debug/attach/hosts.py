"""The ranks of one host, as data that another host can judge, and the judgement of several hosts together."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct, field

from distsim.debug.attach.judge import Judged, judge
from distsim.debug.attach.positions import Position, position_of
from distsim.debug.attach.ranks import RankProcess, sample_ranks
from distsim.debug.records.frames import absolute
from distsim.errors import UsageError
from distsim.text.codec import Rank, Whole, decode
from distsim.text.untrusted_input import LARGEST_SOURCE, brief, read_bytes

SCHEMA = "distsim.places/4"
MOST_SOURCES = 64
"""Largest number of files whose text one host sends."""


class HostPositions(Struct, frozen=True):
    """Positions of the ranks of one host."""

    host: str
    world_size: Whole
    positions: Sequence[Position]
    gone: Sequence[Rank] = ()
    """Ranks that should run on this host and have no process."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files in which the ranks' threads are: blocks around a line show locks and what lies below."""
    schema: str = SCHEMA

    @classmethod
    def from_json(cls, data: str) -> HostPositions:
        """Return the positions that another host wrote as JSON. Raises ValueError if *data* is something else."""
        host = decode(data.encode(errors="replace"), cls)
        if host.schema != SCHEMA:
            raise ValueError(f"expected {SCHEMA}, got {brief(host.schema)}")
        return host


def look_at_host(processes: Sequence[RankProcess]) -> HostPositions:
    """Sample the ranks of this host that `find_ranks` has found. Raises UsageError if none of them is left."""
    positions = [position for sample in sample_ranks(processes) if (position := position_of(sample)) is not None]
    if not positions:
        pids = ", ".join(str(process.pid) for process in processes[:4])
        raise UsageError(f"no rank is left: process {pids} ended, or began no program, while it was looked at")
    ranks = {position.rank for position in positions}
    size = max((process.world_size or 0 for process in processes), default=0) or len(ranks)
    local = max((process.local_world_size or 0 for process in processes), default=0)
    gone: list[int] = []
    if local and len(ranks) < local:  # ranks of one host follow each other under every launcher that sets it
        first = min(ranks) // local * local
        gone = [rank for rank in range(first, min(first + local, size)) if rank not in ranks]
    return HostPositions(platform.node(), size, positions, gone, _sources(positions))


def judge_hosts(hosts: Sequence[HostPositions]) -> Judged:
    """Judge the ranks of all *hosts* as one job."""
    return judge(
        [position for host in hosts for position in host.positions],
        max(host.world_size for host in hosts),
        [rank for host in hosts for rank in host.gone],
        {file: text for host in hosts for file, text in host.sources.items()},
        {position.rank: host.host for host in hosts for position in host.positions},
    )


def _sources(positions: Iterable[Position]) -> dict[str, str]:
    """Return the texts of the files that the ranks are in, as far as they can be read."""
    stacks = [stack for p in positions for stack in (p.stack, p.worker_stack, *(t.stack for t in p.threads))]
    sources: dict[str, str] = {}
    for file in list(dict.fromkeys(site.file for stack in stacks for site in stack))[:MOST_SOURCES]:
        with suppress(OSError):
            sources[file] = read_bytes(absolute(file), LARGEST_SOURCE).decode(errors="replace")
    return sources
