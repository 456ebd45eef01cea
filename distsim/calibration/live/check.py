"""A live measurement against what the simulator says of it, from the cluster file alone."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distsim.calibration.live.measure import LiveRow
from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer, canonical_op

__all__ = ["check_gloo"]


def check_gloo(toml: str, rows: Sequence[LiveRow], nodes: int, ranks_per_node: int) -> str:
    """A table of measured and predicted times, and the median error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(toml, encoding="utf-8")
        cluster = load_cluster(str(path))
    compiler = Compiler(cluster)
    devices = tuple(slot.device for slot in cluster.place(nodes, ranks_per_node))
    lines = [f"{'operation':12s}{'size (B)':>12s}{'measured (us)':>15s}{'predicted (us)':>16s}{'error':>9s}"]
    errors: list[float] = []
    for row in rows:
        plan = compiler.compile(Transfer(canonical_op(row.op), "gloo", devices, row.size_bytes))
        predicted = plan.alone_s(compiler.links.capacity) * 1e6
        error = predicted / row.time_us - 1.0
        errors.append(abs(error))
        lines.append(f"{row.op:12s}{row.size_bytes:>12d}{row.time_us:>15.1f}{predicted:>16.1f}{error:>+9.1%}")
    lines.append(f"{len(errors)} sizes that were not fitted: median error {np.median(errors):.1%}")
    return "\n".join(lines)
