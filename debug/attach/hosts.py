"""The ranks of one host, as data that another host can judge, and the judgement of several hosts together."""

from __future__ import annotations

import linecache
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distsim.debug.attach.judge import Judged, judge
from distsim.debug.attach.positions import Doing, Position, position_of
from distsim.debug.attach.ranks import RankProcess, sample_ranks
from distsim.debug.records import Site
from distsim.debug.records.frames import absolute
from distsim.text.untrusted_input import MOST, text, whole

__all__ = ["HostPositions", "judge_hosts", "look_at_host"]

SCHEMA = "distsim.places/2"
MOST_LINES = 1_000_000
"""Largest line number for which another host sends the text of a file."""


@dataclass(frozen=True, slots=True)
class HostPositions:
    """Positions of the ranks of one host."""

    host: str
    world_size: int
    positions: Sequence[Position]
    gone: Sequence[int] = ()
    """Ranks that should run on this host and have no process."""
    lines: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Source lines at which ranks are, by file and line number."""

    def to_json(self) -> dict[str, Any]:
        """Return the positions as plain data, for another host."""
        return {
            "schema": SCHEMA,
            "host": self.host,
            "world_size": self.world_size,
            "gone": list(self.gone),
            "lines": {file: {str(number): line for number, line in some.items()} for file, some in self.lines.items()},
            "places": [_to_json(position) for position in self.positions],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostPositions:
        """Return the inverse of `to_json`. Raises ValueError, KeyError or TypeError if *data* is something else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"expected {SCHEMA}, got {data['schema']!r}")
        return cls(
            text(data["host"], "host"),
            whole(data["world_size"], "world_size"),
            [_from_json(one) for one in data["places"]],
            [whole(rank, "gone") for rank in data["gone"]],
            {
                text(file, "file"): {
                    whole(number, "line", 1, MOST_LINES): text(line, "line") for number, line in some.items()
                }
                for file, some in data["lines"].items()
            },
        )


def look_at_host(processes: Sequence[RankProcess]) -> HostPositions:
    """Sample the ranks of this host that `find_ranks` has found."""
    positions = [position for sample in sample_ranks(processes) if (position := position_of(sample)) is not None]
    ranks = {position.rank for position in positions}
    size = max((process.world_size or 0 for process in processes), default=0) or len(ranks)
    local = max((process.local_world_size or 0 for process in processes), default=0)
    gone: list[int] = []
    if local and len(ranks) < local:  # ranks of one host follow each other under every launcher that sets it
        first = min(ranks) // local * local
        gone = [rank for rank in range(first, min(first + local, size)) if rank not in ranks]
    return HostPositions(platform.node(), size, positions, gone, _lines(positions))


def judge_hosts(hosts: Sequence[HostPositions]) -> Judged:
    """Judge the ranks of all *hosts* as one job."""
    return judge(
        [position for host in hosts for position in host.positions],
        max(host.world_size for host in hosts),
        [rank for host in hosts for rank in host.gone],
        _sources([host.lines for host in hosts]),
    )


def _lines(positions: Iterable[Position]) -> dict[str, dict[int, str]]:
    wanted: dict[str, set[int]] = {}
    for position in positions:
        if position.site is not None:
            wanted.setdefault(position.site.file, set()).add(position.site.line)
    return {
        file: {number: linecache.getline(absolute(file), number).rstrip() for number in sorted(numbers)}
        for file, numbers in wanted.items()
    }


def _sources(hosts: Iterable[Mapping[str, Mapping[int, str]]]) -> dict[str, str]:
    """Return the texts of files in which all lines are empty except the known ones."""
    known: dict[str, dict[int, str]] = {}
    for lines in hosts:
        for file, some in lines.items():
            known.setdefault(file, {}).update(some)
    return {
        file: "\n".join(some.get(number, "") for number in range(1, max(some) + 1))
        for file, some in known.items()
        if some
    }


def _to_json(position: Position) -> dict[str, Any]:
    return {
        "rank": position.rank,
        "pid": position.pid,
        "doing": position.doing.name,
        "op": position.op,
        "stack": [site.to_json() for site in position.stack],
        "peer": position.peer,
        "root": position.root,
        "on_group": position.on_group,
        "members": position.members,
        "blocks": position.blocks,
        "counters": [[*key, value] for key, value in position.counters.items()],
        "thread": position.thread,
        "busy": position.busy,
        "moved": position.moved,
        "why": position.why,
    }


def _from_json(data: Mapping[str, Any]) -> Position:
    stack = tuple(map(Site.from_json, data["stack"]))
    return Position(
        whole(data["rank"], "rank"),
        whole(data["pid"], "pid"),
        Doing[data["doing"]],
        text(data["op"], "op"),
        stack[0] if stack else None,
        stack,
        None if data["peer"] is None else whole(data["peer"], "peer"),
        None if data["root"] is None else whole(data["root"], "root"),
        data["on_group"] is True,
        text(data["members"], "members"),
        None if data["blocks"] is None else tuple(text(block, "block") for block in data["blocks"]),
        {(text(f, "function"), text(v, "variable")): whole(n, "value", -MOST) for f, v, n in data["counters"]},
        text(data["thread"], "thread"),
        data["busy"] is True,
        data["moved"] is True,
        text(data["why"], "why"),
    )
