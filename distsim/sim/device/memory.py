"""Memory and streams of a device as torch's generic accelerator functions see them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from distsim.errors import NotSimulated
from distsim.sim.isolation.wraps import resembling
from distsim.torch_compat.cuda_api import ACCELERATOR

if TYPE_CHECKING:
    from distsim.sim.device.gpu import Accelerators, Device
    from distsim.sim.device.timeline import StreamTimeline
    from distsim.sim.isolation.process import RankTask, SimProcess

# -- How much memory each process of a simulation holds in tensors, and the most it ever held.
#
# As torch.distributed._tools.mem_tracker does it: a storage is counted from the operator that first
# meets it to the moment it is freed, which a weak reference to it tells. `World.memory` is None in a
# run that nobody asked about it.
#
# Tensors in reference cycles live until Python's collector comes, which depends on everything the
# process ever did. Here it comes when a peak has grown by a sixteenth, and only then: the same seed
# gives the same peak, which is at most that much above what the program could still reach.

FIRST_LEVEL_BYTES = 1 << 16
"""Bytes below which garbage is not collected, because a collection takes milliseconds."""


class Memory:
    """Bytes of CPU tensors by process; a storage belongs to the process whose operator used it first."""

    def __init__(self) -> None:
        self._held: dict[SimProcess, int] = {}
        self._peak: dict[SimProcess, int] = {}
        self._level: dict[SimProcess, int] = {}
        """Bytes at which garbage is collected next."""
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], SimProcess, int]] = {}
        """Storages by identity, as torch keeps one Python object for a storage as long as it lives."""

    def peak_bytes(self, process: SimProcess) -> int:
        return self._peak.get(process, 0)

    def saw(self, process: SimProcess, values: Any) -> None:
        """Count *values*, which are inputs or outputs of an operator of *process*."""
        if isinstance(values, Tensor):
            if values.device.type == "cpu" and values.layout is torch.strided:
                self._count(process, values.untyped_storage())
        elif isinstance(values, list | tuple):
            for value in values:
                self.saw(process, value)

    def _count(self, process: SimProcess, storage: UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            self._storages[key] = weakref.ref(storage, lambda _: self._freed(key)), process, num_bytes
            self._add(process, num_bytes)
        elif known[2] != num_bytes:
            self._storages[key] = known[0], known[1], num_bytes
            self._add(known[1], num_bytes - known[2])

    def _freed(self, key: int) -> None:
        _, process, num_bytes = self._storages.pop(key)
        self._held[process] -= num_bytes

    def _add(self, process: SimProcess, num_bytes: int) -> None:
        held = self._held[process] = self._held.get(process, 0) + num_bytes
        if held > self._level.get(process, FIRST_LEVEL_BYTES):
            gc.collect()
            held = self._held[process]
            self._level[process] = max(self._level.get(process, FIRST_LEVEL_BYTES), held + held // 16)
        if held > self._peak.get(process, 0):
            self._peak[process] = held

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which storages that are resized without an operator are counted (FSDP frees parameters
        so).

        It also collects garbage when `_add` requests it.
        """
        collects = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()  # what was there before has no part in it, and costs no time
        real = UntypedStorage.resize_

        def resize(storage: UntypedStorage, size: int) -> UntypedStorage:
            answer = real(storage, size)
            known = self._storages.get(id(storage))
            if known is not None:
                self._count(known[1], storage)
            return answer

        setattr(UntypedStorage, "resize_", resembling(real, resize))  # noqa: B010 - a method of a class of torch's
        try:
            yield
        finally:
            setattr(UntypedStorage, "resize_", real)  # noqa: B010
            self._storages.clear()
            gc.unfreeze()
            if collects:
                gc.enable()


# -- Which stream and which GPU a thread of a rank works on, as torch.cuda keeps it: by thread, each device its own.

_CUDA = 1
_CudaStream = torch.Stream
_set_device, _set_stream = ACCELERATOR["setDeviceIndex"].get(), ACCELERATOR["setStream"].get()
_get_stream = ACCELERATOR["getStream"].get()


def accelerators_of(process: SimProcess) -> Accelerators:
    """Return the GPUs of *process*; a node without any: NotSimulated."""
    result: Accelerators | None = process.accelerators
    if result is None:
        raise NotSimulated(
            f"CUDA on {process.port.facts.cluster.name} (its nodes have no accelerators)",
            "choose a cluster that has them (--on dgx-h100:1), or use CPU tensors",
        )
    return result


def current_device(task: RankTask) -> int:
    return task.cuda_device


def set_current_device(task: RankTask, index: int) -> None:
    accelerators_of(task.process)[index]
    task.cuda_device = index
    _set_device(index)


def current_stream(task: RankTask, device: Device) -> StreamTimeline:
    """Return the current stream, which torch keeps by thread in C++. Autograd runs backward on the streams of
    forward.
    """
    if not task.cuda_streams:
        return device.default_stream
    stream: StreamTimeline = device.streams[_get_stream(device.index).stream_id]
    return stream


def set_current_stream(task: RankTask, device: Device, stream: StreamTimeline) -> None:
    if stream is not device.default_stream:
        task.cuda_streams = True
    if task.cuda_streams:
        _set_stream(_CudaStream(stream_id=stream.number, device_index=device.index, device_type=_CUDA))
