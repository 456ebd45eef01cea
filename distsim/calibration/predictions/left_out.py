"""Predictions of tables that were left out: what the model says of a machine that it has not seen."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench
from distsim.calibration.constants import Constants, data_folder, nccl_constants
from distsim.calibration.tables import Table
from distsim.collectives.uncertainty import node_class

__all__ = ["FEW_NODES", "Prediction", "predicted"]

FEW_NODES = "1 and 2 nodes"
"""The name under which left_out.toml has the constants that were fitted to so few nodes only."""


@dataclass(frozen=True)
class Prediction:
    """One table, simulated three times."""

    bench: Bench
    fitted_us: NDArray[np.float64]
    """With the constants that come with distsim."""
    left_out_us: NDArray[np.float64] | None
    """With constants that no table of its machine was used for; None where the machine is not among the fitted."""
    few_nodes_us: NDArray[np.float64] | None
    """With constants of one and two nodes, for tables of more."""

    @property
    def fabric(self) -> str:
        """By NCCL's name; one node has none but its NVLinks or PCIe."""
        cluster = self.bench.compiler.cluster
        if self.bench.table.nnodes == 1 or cluster.node.nvlink_domain_nodes >= self.bench.table.nnodes:
            return "none"
        return cluster.nccl.net

    @property
    def nodes(self) -> str:
        """The class of its number of nodes; an NVLink domain counts as one."""
        return "1 node" if self.fabric == "none" else node_class(self.bench.table.nnodes)


@cache
def _cases() -> Mapping[str, Mapping[str, float]]:
    path = data_folder() / "left_out.toml"
    if not path.is_file():
        return {}
    cases: dict[str, dict[str, float]] = tomllib.loads(path.read_text("utf-8"))
    return cases


def predicted(tables: Sequence[Table], constants: Constants | None = None) -> list[Prediction]:
    """Each table as fitted, with its machine left out, and where it has more than two nodes without such tables."""
    constants = constants or nccl_constants()
    found: list[Prediction] = []
    for table in tables:
        bench = Bench.of(table)

        def times(case: str, bench: Bench = bench) -> NDArray[np.float64] | None:
            values = _cases().get(case)
            if values is None:
                return None
            bench.use(bench.own(constants.changed(values)))
            return bench.times_us()

        left_out = times(table.machine)
        domain = bench.compiler.cluster.node.nvlink_domain_nodes
        few = times(FEW_NODES) if table.nnodes > max(2, domain) else None
        bench.use(bench.own(constants))
        found.append(Prediction(bench, bench.times_us(), left_out, few))
    return found
