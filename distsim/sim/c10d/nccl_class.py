"""`torch.distributed.ProcessGroupNCCL` and its options, which a torch without NCCL lacks.

Megatron-core and FSDP2 make options before they make a group. The group itself is a simulated one.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distsim.errors import NotSimulated

__all__ = ["ProcessGroupNCCL", "nccl_patches"]

_UNDEFINED = -(2**31)
"""NCCL_CONFIG_UNDEF_INT of nccl.h."""


class NCCLConfig:
    """Fields of ncclConfig_t (nccl.h, 2.27)."""

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = _UNDEFINED
        self.split_share = self.traffic_class = self.collnet_enable = self.cta_policy = _UNDEFINED
        self.shrink_share = self.nvls_ctas = self.n_channels_per_net_peer = self.nvlink_centric_sched = _UNDEFINED
        self.net_name: str | None = None
        self.comm_name: str | None = None


class Options:
    """What a program asks of a communicator; a simulation takes no other time for it."""

    backend = "nccl"

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = NCCLConfig()
        self.split_from: object = None
        self.split_color = _UNDEFINED
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self._timeout = timedelta(minutes=10)


class ProcessGroupNCCL:
    """Stands for torch's class: it has options, and is not made by hand."""

    NCCL_CTA_POLICY_DEFAULT, NCCL_CTA_POLICY_EFFICIENCY, NCCL_CTA_POLICY_ZERO = 0, 1, 2
    NCCLConfig, Options = NCCLConfig, Options

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotSimulated("ProcessGroupNCCL(store, rank, size) made by hand", "use init_process_group or new_group")


for _class, _name in ((NCCLConfig, "NCCLConfig"), (Options, "Options")):
    _class.__module__, _class.__qualname__ = c10d.__name__, f"ProcessGroupNCCL.{_name}"
ProcessGroupNCCL.__module__ = c10d.__name__


def nccl_patches() -> list[tuple[object, str, object]]:
    """(holder, attribute, replacement) where this torch has no such class."""
    lacking = [holder for holder in (dist, c10d) if not hasattr(holder, "ProcessGroupNCCL")]
    return [(holder, "ProcessGroupNCCL", ProcessGroupNCCL) for holder in lacking]
