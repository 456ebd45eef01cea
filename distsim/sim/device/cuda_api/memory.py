"""torch.cuda.memory on simulated GPUs: what the simulated caching allocator counts, in torch's words."""

from __future__ import annotations

from typing import Any

import torch

from distsim.sim.device.allocator import Tallies
from distsim.sim.device.cuda_api.ranks import Patch, accelerator_function, cuda_function, gpu, refused, refused_function
from distsim.sim.device.gpu import Device
from distsim.sim.isolation.process import RankTask
from distsim.torch_compat.cuda_api import CUDA

__all__ = ["memory_info", "memory_patches"]

_NONE = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
_POOLS = ("all", "small_pool", "large_pool")


def memory_stats(device: Device) -> dict[str, Any]:
    """The nested dictionary of torch/csrc/cuda/Module.cpp, `memoryStats`."""
    memory = device.memory
    memory_of = (memory.all, memory.of_pool[True], memory.of_pool[False])
    found: dict[str, Any] = {
        name: {pool: getattr(one, name).as_dict() for pool, one in zip(_POOLS, memory_of, strict=True)}
        for name in Tallies.__slots__
    }
    return found | {
        "oversize_allocations": dict(_NONE),
        "oversize_segments": dict(_NONE),
        "num_alloc_retries": memory.num_retries,
        "num_ooms": memory.num_out_of_memory,
        "num_sync_all_streams": memory.num_retries,
        "num_device_alloc": memory.all.segment.allocated,
        "num_device_free": memory.all.segment.freed,
        "max_split_size": -1,
    }


def memory_info(device: Device) -> tuple[int, int]:
    """(free, total) bytes of the GPU; other processes of its node may use it as well (cudaMemGetInfo)."""
    total = device.model.memory_bytes
    used = 0
    for process in device.process.world.processes:
        if process.accelerators is not None and process.slot.host == device.process.slot.host and process.alive:
            for other in process.accelerators.devices:
                if other.index == device.index:
                    used += other.memory.reserved + other.model.context_bytes
    return max(0, total - used), total


def _per_gpu(act: Any) -> Any:
    def call(task: RankTask, index: int | None = None) -> Any:
        return act(gpu(task, index))

    return call


def _empty_cache(task: RankTask, *_: Any) -> None:
    found = task.process.accelerators
    for device in [] if found is None else found.devices:
        device.synchronize_all(task)  # segments go back by cudaFree, which waits
        device.give_back()
        device.memory.empty_cache()


def _set_fraction(task: RankTask, fraction: float, index: int | None = None) -> None:
    device = gpu(task, index)
    device.memory.fraction = fraction
    device.memory.allowed = int(fraction * device.model.memory_bytes)


def memory_patches() -> list[Patch]:
    """(holder, attribute, replacement) of what torch.cuda.memory and torch.accelerator.memory ask of C++."""
    patches: list[Patch] = []
    for name, answer in (
        ("memoryStats", _per_gpu(memory_stats)),
        ("resetPeakMemoryStats", _per_gpu(lambda device: device.memory.reset_peaks())),
        ("resetAccumulatedMemoryStats", _per_gpu(lambda device: device.memory.reset_totals())),
        ("emptyCache", _empty_cache),
        ("setMemoryFraction", _set_fraction),
        ("getMemoryFraction", _per_gpu(lambda device: device.memory.fraction)),
        ("getAllocatorBackend", lambda task: "native"),
        ("cudaCachingAllocator_is_enabled", lambda task: True),
        ("hostMemoryStats", lambda task: {}),
        ("resetAccumulatedHostMemoryStats", lambda task: None),
        ("resetPeakHostMemoryStats", lambda task: None),
        ("ipc_collect", lambda task: None),
        ("canDeviceAccessPeer", lambda task, one, other: one != other),
    ):
        patches.append(cuda_function(name, answer))
    asks = "ask torch.cuda.memory_stats() or memory_summary()"
    owns = "allocate with torch.empty(..., device='cuda')"
    for name, call, remedy in (
        ("memorySnapshot", "torch.cuda.memory_snapshot", asks),
        ("record_memory_history", "torch.cuda.memory._record_memory_history", asks),
        ("record_memory_history_legacy", "torch.cuda.memory._record_memory_history", asks),
        ("cudaCachingAllocator_raw_alloc", "torch.cuda.caching_allocator_alloc", owns),
        ("cudaCachingAllocator_raw_delete", "torch.cuda.caching_allocator_delete", owns),
        ("cudaCachingAllocator_enable", "torch.cuda.caching_allocator_enable", owns),
        ("customAllocator", "torch.cuda.CUDAPluggableAllocator", owns),
        ("changeCurrentAllocator", "torch.cuda.change_current_allocator", owns),
        ("getAllocator", "torch.cuda.memory._get_current_allocator", owns),
        ("getStreamFromExternal", "torch.cuda.get_stream_from_external", "use torch.cuda.Stream()"),
    ):
        patches.append(refused_function(CUDA[name], call, remedy))
    for name in ("MemPool", "use_mem_pool"):
        real = getattr(torch.cuda.memory, name, None)
        patches += [
            (holder, name, refused(f"torch.cuda.{name}", owns, real))
            for holder in (torch.cuda.memory, torch.cuda)
            if hasattr(holder, name)
        ]
    for name, answer in (
        ("isAllocatorInitialized", lambda task: task.process.accelerators.used),
        ("emptyCache", _empty_cache),
        ("emptyHostCache", lambda task: None),
        ("getDeviceStats", _per_gpu(memory_stats)),
        ("resetAccumulatedStats", _per_gpu(lambda device: device.memory.reset_totals())),
        ("resetPeakStats", _per_gpu(lambda device: device.memory.reset_peaks())),
        ("getMemoryInfo", _per_gpu(memory_info)),
    ):
        patches += accelerator_function(name, answer)
    return patches
