"""Ranks for processes that were given none: where they meet, and who gets which.

torch.distributed's documentation up to 1.0: with `file://` and with a multicast `tcp://` address "ranks can be assigned
automatically", and `group_name` lets jobs use one file or address.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

__all__ = ["Meeting", "assigned", "meeting_at", "take_place"]


@dataclass(frozen=True)
class Meeting:
    """One process's side of a meeting."""

    url: str
    """As the program wrote it, without what stands behind `?`."""
    world_size: int
    rank: int
    """-1: to be given."""
    group_name: str
    address: str = ""
    """The multicast address; empty: a file."""
    port: int = 0
    path: str = ""

    @property
    def name(self) -> str:
        """What tells this job from others."""
        return f"{self.url} group_name={self.group_name}"

    def error(self, text: str) -> ValueError:
        """In the words of torch's rendezvous."""
        kind = "tcp" if self.address else "file"
        return ValueError(f"Error initializing torch.distributed using {kind}:// rendezvous: {text}")


def meeting_at(init_method: object, rank: int, world_size: int, group_name: str) -> Meeting | None:
    """Where processes meet of which not all were given a rank; None for every address that torch serves by itself.

    A launcher that has started as many processes as there are ranks has given each its rank, in RANK.
    Raises ValueError where the number of processes is not said, a rank does not fit it, or a port is missing.
    """
    if not isinstance(init_method, str) or not init_method.startswith(("file://", "tcp://")):
        return None
    parts = urlsplit(init_method)
    said = dict(parse_qsl(parts.query))
    rank = int(said.get("rank", -1)) if rank < 0 else rank
    world_size = int(said.get("world_size", -1)) if world_size < 0 else world_size
    multicast = parts.scheme == "tcp" and _is_multicast(parts.hostname or "")
    if not multicast and (rank >= 0 or parts.scheme == "tcp" or not parts.path):
        return None
    url = init_method.partition("?")[0]
    if not multicast:
        meeting = Meeting(url, world_size, rank, group_name, path=parts.path)
    else:
        meeting = Meeting(url, world_size, rank, group_name, str(parts.hostname), parts.port or 0)
        if not parts.port:
            raise meeting.error("port number missing")
    if world_size <= 0:
        raise meeting.error(f"world size parameter missing: ranks are given to world_size processes, got {world_size}")
    if rank < 0 and os.environ.get("WORLD_SIZE") == str(world_size) and os.environ.get("RANK", "").isdigit():
        rank = int(os.environ["RANK"])
    if rank >= world_size:
        raise meeting.error(f"rank {rank} of {world_size} processes: expected 0 to {world_size - 1}")
    return Meeting(url, world_size, rank, group_name, meeting.address, meeting.port, meeting.path)


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False  # a name: the machine of rank 0


def assigned(meeting: Meeting, wishes: Sequence[int]) -> list[int]:
    """The rank of each process: its own where it named one (*wishes*, -1: it did not), the free ones in order to the
    others. Raises ValueError for a rank that two have named, or that does not fit."""
    named = [rank for rank in wishes if rank >= 0]
    twice = sorted({rank for rank in named if named.count(rank) > 1})
    if twice:
        raise meeting.error(f"rank {twice[0]} was given to {named.count(twice[0])} of {len(wishes)} processes")
    beyond = [rank for rank in named if rank >= len(wishes)]
    if beyond:
        raise meeting.error(f"rank {beyond[0]} of {len(wishes)} processes: expected 0 to {len(wishes) - 1}")
    free = iter(sorted({*range(len(wishes))} - {*named}))
    return [rank if rank >= 0 else next(free) for rank in wishes]


def take_place(meeting: Meeting, store: Any) -> tuple[int, Any]:
    """How many came to *store* before this process, and what its job has of the store: the next job at the same
    address has another part, as one of another `group_name` has."""
    count = int(dist.PrefixStore(f"distsim/{meeting.group_name}", store).add("came", 1)) - 1
    turn, place = divmod(count, meeting.world_size)
    return place, dist.PrefixStore(f"{meeting.group_name}/{turn}", store)
