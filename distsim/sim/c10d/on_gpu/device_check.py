"""Each member of an NCCL communicator has a GPU of its own: NCCL refuses two on one (src/init.cc, "Duplicate GPU
detected"). So does a program find out that forgets torch.cuda.set_device(LOCAL_RANK)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from distsim.torch_compat.cuda_api import PARSE_VISIBLE_DEVICES

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Device
    from distsim.sim.isolation.process import RankTask, SimProcess

__all__ = ["OneEach"]

_parse_visible_devices = PARSE_VISIBLE_DEVICES.get()

FIRST_BUS = 0x1B
"""Of the first GPU of a node, as people know it from a DGX H100; the others follow."""


class OneEach:
    """The GPUs that the members of a group brought to their calls. (A second GPU needs a second communicator: where it
    is another member's, who has none, as where objects are gathered without torch.cuda.set_device, the job hangs.)"""

    def __init__(self) -> None:
        self._brought: dict[str, list[SimProcess]] = {}
        """By the GPU's name on its node: who works on it."""

    def bring(self, task: RankTask, device: Device) -> None:
        """Raises DistBackendError where another member on the same node has brought the same GPU."""
        process = task.process
        gpu = _on_node(process, device.index)
        there = self._brought.setdefault(gpu, [])
        for other in there:
            if other.slot.host == process.slot.host:
                version = ".".join(map(str, torch.cuda.nccl.version()))
                raise dist.DistBackendError(
                    "NCCL error in: ProcessGroupNCCL.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL "
                    f"version {version}\n"
                    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
                    f"Duplicate GPU detected : rank {process.rank} and rank {other.rank} both on CUDA device "
                    f"{FIRST_BUS + device.index:x}000 (GPU {gpu} of node {process.slot.host}: "
                    "torch.cuda.set_device(LOCAL_RANK) gives each rank its own)"
                )
            if other.slot.local_rank != process.slot.local_rank:
                process.world.traced.share_gpus()
        there.append(process)


def _on_node(process: SimProcess, index: int) -> str:
    """The program may have left itself only some of the node's GPUs."""
    if b"CUDA_VISIBLE_DEVICES" not in process.changed_environ:
        return str(index)
    visible = _parse_visible_devices()
    return str(visible[index]) if index < len(visible) else str(index)
