"""Which stream and which GPU a thread of a rank works on, as torch.cuda keeps it: by thread, each device its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distsim.errors import NotSimulated
from distsim.torch_compat.cuda_api import ACCELERATOR

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Accelerators, Device
    from distsim.sim.device.timeline import Stream
    from distsim.sim.isolation.process import RankTask, SimProcess

_CUDA = 1
_CudaStream = torch.Stream
_set_device, _set_stream = ACCELERATOR["setDeviceIndex"].get(), ACCELERATOR["setStream"].get()
_get_stream = ACCELERATOR["getStream"].get()

__all__ = ["accelerators_of", "current_device", "current_stream", "set_current_device", "set_current_stream"]


def accelerators_of(process: SimProcess) -> Accelerators:
    """The GPUs of *process*; a node without any: NotSimulated."""
    found: Accelerators | None = process.accelerators
    if found is None:
        raise NotSimulated(
            f"CUDA on {process.world.cluster.name} (its nodes have no accelerators)",
            "choose a cluster that has them (--on dgx-h100:1), or use CPU tensors",
        )
    return found


def current_device(task: RankTask) -> int:
    return task.cuda_device


def set_current_device(task: RankTask, index: int) -> None:
    accelerators_of(task.process)[index]
    task.cuda_device = index
    _set_device(index)


def current_stream(task: RankTask, device: Device) -> Stream:
    """torch's C++ keeps it, by thread: autograd runs backward on the streams of forward."""
    if not task.cuda_streams:
        return device.default_stream
    stream: Stream = device.streams[_get_stream(device.index).stream_id]
    return stream


def set_current_stream(task: RankTask, device: Device, stream: Stream) -> None:
    if stream is not device.default_stream:
        task.cuda_streams = True
    if task.cuda_streams:
        _set_stream(_CudaStream(stream_id=stream.number, device_index=device.index, device_type=_CUDA))
