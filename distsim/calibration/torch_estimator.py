"""torch's own estimate of a collective (torch/_inductor/comm_analysis.py), on the same tables."""

from __future__ import annotations

from unittest import mock

import numpy as np
from numpy.typing import NDArray

from distsim.calibration.compare import Bench

__all__ = ["torch_times_us"]

_COLLECTIVES = {
    "all_reduce": "ALL_REDUCE",
    "all_gather": "ALL_GATHER",
    "reduce_scatter": "REDUCE_SCATTER",
    "alltoall": "ALL_TO_ALL",
}


def torch_times_us(bench: Bench) -> NDArray[np.float64] | None:
    """What torch says of every row, told what it would find on that machine; None for an operation it does
    not know."""
    import importlib

    analysis = importlib.import_module("torch._inductor.comm_analysis")
    cuda = importlib.import_module("torch").cuda
    name = _COLLECTIVES.get(bench.table.op)
    if name is None or not hasattr(analysis.NCCL_COLL, name):
        return None
    cluster = bench.compiler.cluster
    capability = cluster.nccl.compute_capability
    kinds = analysis.NVIDIA_GPU_TYPE
    kind = kinds.BLACKWELL if capability >= 100 else kinds.HOPPER if capability >= 90 else kinds.AMPERE
    with (
        mock.patch.object(analysis, "get_gpu_type", return_value=kind),
        mock.patch.object(analysis, "_has_nvlink", return_value=cluster.node.nvlink != "none"),
        mock.patch.object(cuda, "is_available", return_value=True),
        mock.patch.object(cuda, "device_count", return_value=bench.table.nproc_per_node),
    ):
        estimate = analysis.estimate_nccl_collective_runtime_impl
        collective = getattr(analysis.NCCL_COLL, name)
        return np.array([1e3 * estimate(row.size_bytes, len(bench.devices), collective) for row in bench.table.rows])
