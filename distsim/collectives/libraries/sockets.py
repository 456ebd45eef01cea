"""What one rank can move through sockets: its thread copies every byte, whatever the NIC could carry."""

from __future__ import annotations

from collections.abc import Mapping

from distsim.collectives.members import Members

__all__ = ["each_of", "shares"]


def each_of(group: Members, peers: float) -> float:
    """Bytes per second with each of *peers* at once: together no more than over loopback, where nothing but the copies
    takes time (gloo/transport/tcp/loop.cc: one loop for all pairs; Open MPI's btl/tcp: one progress engine)."""
    return group.cluster.cpu.loopback_bytes_per_s / max(1.0, peers)


def shares(pairs: Mapping[tuple[int, int], float]) -> float:
    """How many of the largest transfer the busiest rank of uneven *pairs* sends or receives."""
    sent: dict[tuple[int, bool], float] = {}
    for (src, dst), nbytes in pairs.items():
        sent[src, True] = sent.get((src, True), 0.0) + nbytes
        sent[dst, False] = sent.get((dst, False), 0.0) + nbytes
    return max(sent.values(), default=0.0) / max(pairs.values(), default=1.0)
