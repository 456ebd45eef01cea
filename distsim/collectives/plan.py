"""A collective as a transfer, and the plan of flows that an algorithm makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.errors import UsageError
from distsim.text.untrusted_input import brief


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective of one group."""

    op: str
    """torch.distributed's name: all_reduce, all_gather_into_tensor, all_to_all_single, barrier, ..."""
    flavour: str
    """Library whose algorithms are used: nccl, gloo or mpi; or one of `SYMMETRIC`."""
    devices: tuple[str, ...]
    """Devices of the ranks, in the order of the group."""
    nbytes: int
    """Bytes as nccl-tests counts them.

    The whole buffer (the shares of all ranks) for all_gather, reduce_scatter and all_to_all; one rank's share for all
    other operations, including gather and scatter.
    """
    root: int = 0
    """Group rank."""
    splits: tuple[tuple[int, ...], ...] | None = None
    """For an uneven all_to_all: bytes from each rank to each rank."""
    reduce_op: str = "SUM"
    key: int = 0
    """Number of the group, which decides among equal paths (ECMP)."""


SYMMETRIC = ("one_shot", "two_shot", "multimem")
"""Algorithms of torch's kernels on symmetric memory."""

_SPELLINGS = {
    "all_reduce": ("allreduce", "all_reduce_coalesced", "all_reduce_perf"),
    "all_gather": (
        "allgather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": ("reducescatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("alltoall", "all_to_all_single", "alltoallv"),
    "broadcast": (),
    "reduce": (),
    "gather": (),
    "scatter": (),
    "sendrecv": ("send_recv",),
    "barrier": ("monitored_barrier", "new_group", "init_process_group", "destroy_process_group"),
}
OPS = tuple(_SPELLINGS)
"""Every operation, by its canonical name."""

_CANONICAL = {name: op for op, names in _SPELLINGS.items() for name in (op, *names)}


def canonical_op(name: str) -> str:
    """Return the algorithms' name of an operation, from torch's or nccl-tests' spelling."""
    op = _CANONICAL.get(name.lower().replace("-", "_").removesuffix("_perf"))
    if op is None:
        raise UsageError(f"expected an operation ({', '.join(OPS)}), got {brief(name)!r}")
    return op


# -- What an algorithm compiles to: phases of coupled flows for the fluid engine, messages for its referee.

INFINITY = float("inf")


@dataclass(frozen=True)
class Loads:
    """The links that lockstep transfers cross, each with the bytes that cross it per byte of progress."""

    links: NDArray[np.int64]
    weights: NDArray[np.float64]


NOTHING = Loads(np.zeros(0, dtype=np.int64), np.zeros(0))
"""No load on any link."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Costs that a protocol adds to the bare links."""

    wire: float = 1.0
    """Bytes on the wire for each byte of payload inside a node (flags, or the inverse of an efficiency)."""
    net_wire: float = 1.0
    """Bytes on the wire for each payload byte, between nodes."""
    edge_bytes_per_s: float = INFINITY
    """Maximum bytes/s from one rank to its neighbour over all channels, whatever the speed of the links."""
    near_bytes_per_s: float | None = None
    """That maximum for a piece that passes through a tree inside a node; None: *edge_bytes_per_s*."""
    far_bytes_per_s: float | None = None
    """That maximum for a piece that passes through a tree between nodes."""
    piece_bytes: float = INFINITY
    """Bytes that pass through a tree in one piece, over all channels; infinite for as few pieces as possible."""
    cut_through: bool = False
    """Whether a rank passes a piece on inside a node while it still receives it."""
    parts: int = 1
    """Into how many a piece that is passed on while it comes is cut at least."""
    intra_hop_s: float = 0.0
    """Added to the links' latency at each hop inside a node."""
    inter_hop_s: float = 0.0
    """Added to the links' latency at each hop between nodes."""
    intra_links: float = 1.0
    """Share of the links' latency that counts inside a node; 0 if a measured start-up time already includes it."""

    def least_s(self, inter: bool) -> float:
        """Return seconds for a byte of a piece over one edge of a tree, however fast the links are."""
        rate = self.far_bytes_per_s if inter else self.near_bytes_per_s
        return 1.0 / (self.edge_bytes_per_s if rate is None else rate)

    def hop_s(self, links_s: Any, inter: bool) -> Any:
        """Return one hop over links of that latency together (a number or an array)."""
        return links_s + self.inter_hop_s if inter else links_s * self.intra_links + self.intra_hop_s


@dataclass(frozen=True, slots=True)
class Overlap:
    """Traffic of the fast links while slow links limit a phase.

    It is *first_bytes* at once, then *pieces* pieces of *piece_bytes*, one every *every_s*, and in sequence if other
    traffic delays them. Alone it ends before the phase does, so a delayed piece is still in time.
    """

    loads: Loads
    first_bytes: float
    piece_bytes: float
    pieces: int
    every_s: float
    way_s: float
    """Seconds from the start of the phase until the piece with the longest path arrives on otherwise idle links."""
    busy_s: float
    """Seconds during which the fast links are then busy."""
    share: float
    """Share of any additional busy time by which that piece is delayed, too."""
    cap_bytes_per_s: float = INFINITY
    streams: float = 1.0


@dataclass(frozen=True)
class PlanPhase:
    """One fluid object: *progress_bytes* over *loads*, and a latency after its last byte."""

    loads: Loads
    progress_bytes: float
    cap_bytes_per_s: float = INFINITY
    latency_s: float = 0.0
    streams: float = 1.0
    """Number of parallel transfers of the phase; each has a share of its own on an overloaded link."""
    then: tuple[PlanPhase, ...] = ()
    """Phases that start in parallel when the last byte of this one has arrived. This phase ends when all of them
    have.
    """
    overlap: Overlap | None = None
    """Begins with it; it is not over before that is."""

    def alone_s(self, capacity: NDArray[np.float64]) -> float:
        """Return the seconds of the plan if no other transfer uses its links."""
        rate = self.cap_bytes_per_s
        if len(self.loads.links):
            rate = min(rate, float((capacity[self.loads.links] / self.loads.weights).min()))
        alone_s = self.latency_s + (self.progress_bytes / rate if self.progress_bytes else 0.0)
        return alone_s + max((phase.alone_s(capacity) for phase in self.then), default=0.0)


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One explicit transfer. It starts when the messages *after* have arrived and the one before it in its
    *queue* has left; it arrives *latency_s* after its last byte has left."""

    links: tuple[int, ...]
    nbytes: float
    latency_s: float = 0.0
    cap_bytes_per_s: float = INFINITY
    after: tuple[int, ...] = ()
    """Positions in the list of messages, all smaller than this one's."""
    queue: tuple[int, int, int] | None = None
    streams: float = 1.0
    """Shares that it has of a link that is too narrow; see `PlanPhase`."""


@dataclass(frozen=True)
class Plan:
    """A collective, compiled: a fixed start-up time, then phases one after the other."""

    algo: str
    proto: str
    channels: int
    floor_s: float
    phases: tuple[PlanPhase, ...] = ()
    messages: Callable[[], list[PlannedMessage]] | None = field(default=None, repr=False)
    """The plan as explicit messages; None if the algorithm has no such form."""

    def alone_s(self, capacity: NDArray[np.float64]) -> float:
        """Return the seconds of the plan if no other transfer uses its links."""
        total = self.floor_s
        for phase in self.phases:
            total += phase.alone_s(capacity)
        return total
