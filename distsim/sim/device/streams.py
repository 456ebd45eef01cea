"""Which stream and which GPU a thread of a rank works on, as torch.cuda keeps it: by thread, each device its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distsim.errors import NotSimulated

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Accelerators, Device
    from distsim.sim.device.timeline import Stream
    from distsim.sim.isolation.process import RankTask, SimProcess

__all__ = ["accelerators_of", "current_device", "current_stream", "set_current_device", "set_current_stream"]


def accelerators_of(process: SimProcess) -> Accelerators:
    """The GPUs of *process*; a node without any: NotSimulated."""
    found: Accelerators | None = process.accelerators
    if found is None:
        raise NotSimulated(
            f"CUDA on {process.world.cluster.name}, whose nodes have no accelerators",
            "choose a cluster that has them (--on dgx-h100:1), or use CPU tensors",
        )
    return found


def current_device(task: RankTask) -> int:
    return task.cuda_device


def set_current_device(task: RankTask, index: int) -> None:
    accelerators_of(task.process)[index]
    task.cuda_device = index
    torch._C._accelerator_setDeviceIndex(index)


def current_stream(task: RankTask, device: Device) -> Stream:
    return task.cuda_streams.get(device.index) or device.default_stream


def set_current_stream(task: RankTask, device: Device, stream: Stream) -> None:
    task.cuda_streams[device.index] = stream
