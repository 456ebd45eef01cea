"""One run of nccl-tests, as its log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["LogRow", "LogRun"]


@dataclass(frozen=True, slots=True)
class LogRow:
    """A size, and the smaller of out-of-place and in-place time, as first touch spoils either at random."""

    size_bytes: int
    time_us: float
    line: int


@dataclass(frozen=True)
class LogRun:
    """All sizes of one operation on the same GPUs."""

    file: str
    op: str
    """nccl-tests' name: all_reduce, alltoall, ..."""
    gpu: str
    """As the driver names it: NVIDIA H100 80GB HBM3; empty where the log does not (some builds of rccl-tests)."""
    nnodes: int
    nproc_per_node: int
    launcher: str
    """process: a process a GPU; shared: one process drives several."""
    rows: tuple[LogRow, ...]
    library: str = "nccl"
    """nccl or rccl."""
    version: str | None = None
    """Of the library; None where the log does not name it."""
    net: str | None = None
    """What NCCL said that it uses between nodes (NCCL_DEBUG=INFO): ib, roce, tcp, libfabric, tcpx, tcpxo."""
    plugin: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment that NCCL read and that changes times."""

    @property
    def where(self) -> str:
        """`2 x 8`: nodes and GPUs of each."""
        return f"{self.nnodes} x {self.nproc_per_node}"

    @property
    def configuration(self) -> tuple[object, ...]:
        """Runs that are alike in this should take the same time."""
        forced = tuple(self.settings.get(name, "") for name in ("NCCL_ALGO", "NCCL_PROTO"))
        return (self.op, self.nnodes, self.nproc_per_node, self.launcher, *forced)
