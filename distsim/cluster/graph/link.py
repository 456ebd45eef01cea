"""What a cluster's graph is made of: vertices, directed links, and the slots that take ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Link", "Slot", "Vertex"]


@dataclass(frozen=True, slots=True)
class Vertex:
    """A piece of hardware. *kind* is one of gpu, cpu, nvswitch, pcie, nic, leaf, spine, switch.

    *host* is None for what several hosts share (switches, an NVLink domain of a rack); *local* is the index
    among the vertices of that kind on the host, or in the fabric.
    """

    name: str
    kind: str
    host: int | None
    local: int


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link. *bandwidth_bytes_per_s* is what transfers can have of it (the specified rate times the
    efficiency that the cluster file states); *index* is its position in `Cluster.links`.

    *kind* is one of nvlink, c2c, pcie, socket, nic, fabric, loopback.
    """

    index: int
    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str

    @property
    def name(self) -> str:
        """`src->dst`, as reports print it."""
        return f"{self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a rank runs."""

    rank: int
    host: int
    local_rank: int
    device: str
