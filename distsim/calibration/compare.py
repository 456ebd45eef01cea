"""Measured against simulated, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.constants import Constants
from distsim.calibration.tables import Table, regime
from distsim.cluster import load_cluster
from distsim.collectives import Compiler, Transfer, canonical_op
from distsim.collectives.libraries.nccl_timing import NcclTiming

__all__ = ["Bench"]


@dataclass
class Bench:
    """One table with its cluster, ready to be simulated with any constants."""

    table: Table
    compiler: Compiler
    devices: tuple[str, ...]

    @staticmethod
    def of(table: Table) -> Bench:
        """Load the cluster of *table*."""
        cluster = load_cluster(table.cluster)
        compiler = Compiler(cluster, algo=table.algo, launcher=table.launcher, nccl_version=table.nccl)
        return Bench(table, compiler, tuple(slot.device for slot in cluster.place(table.nnodes, table.nproc_per_node)))

    def thinned(self, most: int = 48) -> Bench:
        """The same with at most about *most* rows: a fit learns nothing from a thousand sizes of one curve."""
        rows = self.table.rows[:: max(1, len(self.table.rows) // most)]
        return Bench(replace(self.table, rows=rows), self.compiler, self.devices)

    def own(self, constants: Constants) -> Constants:
        """*constants* with those in their place that the cluster's own file was fitted to."""
        return constants.changed({name: one.value for name, one in self.compiler.cluster.constants.items()})

    def use(self, constants: Constants) -> None:
        """From now on with these constants."""
        nccl = self.compiler._nccl
        nccl.timing = NcclTiming(nccl.cluster, constants, self.table.launcher, nccl.numbers)
        self.compiler._plans.clear()

    def times_us(self, places: Sequence[int] | NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Simulated time of every row (or of those at *places*), each alone on the network."""
        rows = self.table.rows if places is None else [self.table.rows[place] for place in places]
        op, capacity = canonical_op(self.table.op), self.compiler.links.capacity
        per_rank = op in ("gather", "scatter")
        return np.array(
            [
                self.compiler.compile(
                    Transfer(op, "nccl", self.devices, row.size_bytes // (len(self.devices) if per_rank else 1))
                ).alone_s(capacity)
                * 1e6
                for row in rows
            ]
        )

    @property
    def measured_us(self) -> NDArray[np.float64]:
        """Measured time of every row."""
        return np.array([row.time_us for row in self.table.rows])

    @property
    def regimes(self) -> NDArray[np.int64]:
        """The regime of every row."""
        return np.array([regime(row.size_bytes) for row in self.table.rows])
