"""DistributedDataParallel's C++ half."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, TorchName

__all__: list[str] = []

KEEP_HANDLE = TorchName(
    "torch.distributed.Reducer._set_forward_pass_work_handle",
    "a handle of DDP's join that C++ keeps",
    OPTIONAL,
    public="none: keep the handle alive by itself",
)

GET_DDP_LOGGING_DATA = TorchName(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data", "DDP's logging data", FEATURE
)
SET_RUNTIME_STATS_AND_LOG = TorchName(
    "torch._C._distributed_c10d.Logger.set_runtime_stats_and_log", "DDP's timer of CUDA events", FEATURE
)
PREPARE_FOR_BACKWARD = TorchName(
    "torch._C._distributed_c10d.Reducer.prepare_for_backward",
    "DDP's search for unused parameters in a profile",
    OPTIONAL,
)
DELAY_ALL_REDUCE = TorchName(
    "torch._C._distributed_c10d.Reducer._delay_all_reduce", "DDP with delayed all_reduce", OPTIONAL
)
