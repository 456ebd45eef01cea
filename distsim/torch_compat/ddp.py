"""DistributedDataParallel's C++ half."""

from __future__ import annotations

from distsim.torch_compat.names import OPTIONAL, Name

__all__: list[str] = []

KEEP_HANDLE = Name(
    "torch.distributed.Reducer._set_forward_pass_work_handle",
    "a handle of DDP's join that C++ keeps",
    OPTIONAL,
    public="none: keep the handle alive by itself",
)
