"""torch.cuda's memory functions, and checkpoints written from CUDA tensors."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from distsim.sim.device.allocator import Tallies
from distsim.sim.device.allocator.host_memory import still_unknown
from distsim.sim.device.cuda_api.tensors import (
    accelerator_function,
    cuda_function,
    gpu,
    refused,
    refused_function,
)
from distsim.sim.device.gpu import Device
from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.isolation.torch_state.torch_state import STATE
from distsim.sim.isolation.wraps import resembling
from distsim.torch_compat import state as state_names
from distsim.torch_compat.cuda_api import CUDA

# -- torch.cuda.memory on simulated GPUs: what the simulated caching allocator counts, in torch's words.

_NONE = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
_POOLS = ("all", "small_pool", "large_pool")
_PEAK = "the report lists what holds the memory at its peak"


def memory_stats(device: Device) -> dict[str, Any]:
    """Return the nested dictionary of torch/csrc/cuda/Module.cpp, `memoryStats`."""
    device.put_held_back()
    memory = device.memory
    memory_of = (memory.all, memory.of_pool[True], memory.of_pool[False])
    stats: dict[str, Any] = {
        name: {pool: getattr(one, name).as_dict() for pool, one in zip(_POOLS, memory_of, strict=True)}
        for name in Tallies.__slots__
    }
    return stats | {
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
    """Return (free, total) bytes of the GPU; other processes of its node may use it as well (cudaMemGetInfo)."""
    total = device.model.memory_bytes
    used = 0
    for process in device.process.port.processes:
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
    accelerators = task.process.accelerators
    for device in [] if accelerators is None else accelerators.devices:
        device.synchronize_all(task)  # segments go back by cudaFree, which waits
        device.give_back()
        device.memory.empty_cache()


def _reset_peaks(device: Device) -> None:
    device.put_held_back()
    device.memory.reset_peaks()


def _set_fraction(task: RankTask, fraction: float, index: int | None = None) -> None:
    device = gpu(task, index)
    device.memory.fraction = fraction
    device.memory.allowed = int(fraction * device.model.memory_bytes)


def memory_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for the C++ functions that torch.cuda.memory and
    torch.accelerator.memory call.
    """
    patches: list[Patch] = []
    for name, answer in (
        ("memoryStats", _per_gpu(memory_stats)),
        ("resetPeakMemoryStats", _per_gpu(_reset_peaks)),
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
    owns = "allocate with torch.empty(..., device='cuda')"
    for name, call, remedy in (
        ("cudaCachingAllocator_raw_alloc", "torch.cuda.caching_allocator_alloc", owns),
        ("cudaCachingAllocator_raw_delete", "torch.cuda.caching_allocator_delete", owns),
        ("cudaCachingAllocator_enable", "torch.cuda.caching_allocator_enable", owns),
        ("customAllocator", "torch.cuda.CUDAPluggableAllocator", owns),
        ("changeCurrentAllocator", "torch.cuda.change_current_allocator", owns),
        ("getAllocator", "torch.cuda.memory._get_current_allocator", owns),
        ("memorySnapshot", "torch.cuda.memory_snapshot", _PEAK),
        ("record_memory_history", "torch.cuda.memory._record_memory_history", _PEAK),
        ("record_memory_history_legacy", "torch.cuda.memory._record_memory_history", _PEAK),
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
        ("resetPeakStats", _per_gpu(_reset_peaks)),
        ("getMemoryInfo", _per_gpu(memory_info)),
    ):
        patches += accelerator_function(name, answer)
    return patches


# -- Checkpoints: what torch.save and torch.distributed.checkpoint write and read takes time on the rank's host.
#
# A node writes to the file system and reads from it as its cluster file says (node.storage_write, node.storage_read;
# the rates of presets are borrowed, cluster/graph/link.py). The ranks of a node share it: each its part in DCP, where
# all write at once; in turn in torch.save. Copies from the GPU come before that, over PCIe. Files have the right
# length, with holes where nobody knows the values.

_HOLE = 1 << 12
"""Bytes of zeros from which on a file has a hole: a page's."""
_SMALL = 1 << 16
"""Bytes of a part of a tensor up to which it costs next to nothing to write it."""
_free_s: WeakKeyDictionary[Any, dict[int, float]] = WeakKeyDictionary()
"""Time at which the ranks of each node of a simulation will have finished all begun writes of torch.save."""
_inside: set[RankTask] = set()
"""Threads that are in a call of DCP, which counts itself."""


def _takes_time(task: RankTask) -> bool:
    """Return whether file accesses of the thread take time: its rank uses GPUs, and it is not inside a call of DCP."""
    gpus = task.process.accelerators
    return gpus is not None and gpus.works and task not in _inside


def _neighbours(task: RankTask) -> int:
    """Return the ranks of the job on the same node."""
    mine = task.process.slot.host
    return max(1, sum(1 for slot in task.port.facts.slots if slot.host == mine))


def _wrote(task: RankTask, nbytes: int, seconds: float) -> None:
    saved = task.process.accelerators.saved
    saved.writes += 1
    saved.written_bytes += nbytes
    saved.write_s += seconds
    if task is task.process.main_task:  # an asynchronous checkpoint holds up no step
        step = task.process.accelerators.steps.num_ended
        begin_s = task.now_s()
        if step in saved.by_step:  # another file of the same checkpoint
            begin_s = saved.spans.pop()[0]
        saved.spans.append((begin_s, task.now_s() + seconds))
        saved.by_step[step] = saved.by_step.get(step, 0.0) + seconds
    task.sleep(seconds)


def _read(task: RankTask, nbytes: int, seconds: float) -> None:
    saved = task.process.accelerators.saved
    saved.reads += 1
    saved.read_bytes += nbytes
    saved.read_s += seconds
    task.sleep(seconds)


def _size(file: Any) -> int | None:
    """Return the size of a file given by name; None if it is not a file or already open."""
    if not isinstance(file, str | os.PathLike):
        return None
    try:
        return os.path.getsize(file)
    except OSError:
        return None


def _save(real: Callable[..., Any], task: RankTask, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    task.port.traced.writes(f)  # torch opens it in C++, which no audit hook hears of
    real(obj, f, *args, **kwargs)
    nbytes = _size(f)
    if _takes_time(task) and nbytes:
        free_s = _free_s.setdefault(task.port, {})
        node, now_s = task.process.slot.host, task.now_s()
        ends_s = max(free_s.get(node, 0.0), now_s) + nbytes / task.port.facts.cluster.node.storage_write_bytes_per_s
        free_s[node] = ends_s
        if isinstance(obj, Tensor):  # a file of a dataset, as VITS's spectrograms
            task.sleep(ends_s - now_s)
        else:
            _wrote(task, nbytes, ends_s - now_s)


def _load(real: Callable[..., Any], task: RankTask, f: Any, *args: Any, **kwargs: Any) -> Any:
    nbytes = _size(f)
    loaded = real(f, *args, **kwargs)
    if _takes_time(task) and nbytes:
        seconds = nbytes / task.port.facts.cluster.node.storage_read_bytes_per_s
        if isinstance(loaded, Tensor):
            task.sleep(seconds)
        else:
            _read(task, nbytes, seconds)
    return loaded


def _unknown(data: Tensor) -> bool:
    """Return whether *data* has unknown values of a GPU that were copied to the host and not written to since."""
    storage = data.untyped_storage()
    version = 0 if data.is_inference() else data._version  # torch does not count the versions of inference tensors
    return storage.__dict__.get("_distsim_placeholders") == version or still_unknown(storage)


def _zeros(data: Tensor) -> Tensor:
    """Return zeros that take no memory before they are written to."""
    nbytes = data.numel() * data.element_size()
    there = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    tensor = torch.empty(0, dtype=data.dtype, device="cpu")
    there.untyped_storage()._distsim_holes = True
    return tensor.set_(there.untyped_storage(), 0, data.shape, data.stride())


class _Sparse:
    """A file in which long zeros are holes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= _HOLE and not np.frombuffer(view, dtype=np.uint8).any():
            self._stream.seek(len(view), os.SEEK_CUR)
        else:
            self._stream.write(view)
        return len(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _member(of: set[RankTask], task: RankTask) -> Iterator[None]:
    """Return a context in which *task* is in a set."""
    of.add(task)
    try:
        yield
    finally:
        of.discard(task)


def _write_item(
    real: Callable[..., Any], task: RankTask, transforms: Any, stream: Any, data: Any, *args: Any, **kwargs: Any
) -> Any:
    if not _takes_time(task):
        return real(transforms, stream, data, *args, **kwargs)
    if isinstance(data, Tensor) and _unknown(data):
        data, stream = _zeros(data), _Sparse(stream)
    with _member(_inside, task):
        result = real(transforms, stream, data, *args, **kwargs)
    nbytes = result.size_in_bytes
    _wrote(task, nbytes, nbytes * _neighbours(task) / task.port.facts.cluster.node.storage_write_bytes_per_s)
    return result


def _read_data(real: Callable[..., Any], task: RankTask, self: Any, plan: Any, planner: Any) -> Any:
    if not _takes_time(task):
        return real(self, plan, planner)
    there = [item for item in plan.items if item.storage_index in self.storage_data]
    nbytes = sum(self.storage_data[item.storage_index].length for item in there)
    if len(there) < len(plan.items):  # the others' parts of a simulation that traced only some of its ranks
        nbytes *= len(plan.items) // max(1, len(there))
        plan = replace(plan, items=there)
    _read(task, nbytes, nbytes * _neighbours(task) / task.port.facts.cluster.node.storage_read_bytes_per_s)
    with _member(_inside, task):
        return real(self, plan, planner)


def _by_each(real: Callable[..., Any], task: RankTask, *args: Any, **kwargs: Any) -> Any:
    """Save or load by DCP so that every rank counts its own part, also if it equals another rank's."""
    if task in task.port.traced.apart:
        return real(*args, **kwargs)
    with _member(task.port.traced.apart, task):
        return real(*args, **kwargs)


def _plan_for_all(real: Callable[..., Any], task: RankTask, self: Any, plans: list[Any]) -> Any:
    """Return DefaultSavePlanner's plan for all ranks, made from the plans of ranks of which some stand for others."""
    if not task.port.traced.not_all:
        return real(self, plans)
    task.port.note(
        "the distributed checkpoint on disk has the parts of the ranks that ran, and no others (--ranks all writes "
        "all of them)"
    )
    validate = state_names.VALIDATE_GLOBAL_PLAN
    planner, name, before = validate.holder(), validate.attribute, validate.get()
    setattr(planner, name, lambda *_: [])  # nobody has the other ranks' parts
    try:
        return real(self, _of_equal_ranks(plans))
    finally:
        setattr(planner, name, before)


def _of_equal_ranks(plans: list[Any]) -> list[Any]:
    """Return *plans* without repetitions of a part that a rank has on behalf of others.

    The part is kept for that rank, and for as many others as have copies of it, because DCP divides the writing of
    copies.
    """
    plans_with = Counter(item.index for plan in plans for item in plan.items)
    holders: Counter[Any] = Counter()
    left = []
    for plan in plans:
        items = []
        for item in plan.items:
            holders[item.index] += 1
            if holders[item.index] <= max(1, round(plans_with[item.index] * _share(item))):
                items.append(item)
        left.append(replace(plan, items=items))
    return left


def _share(item: Any) -> float:
    """Return the share of its tensor that a part is; 0 if it is too small to matter which rank writes it.

    A step number, which is read again, thus stays with the traced rank.
    """
    data = item.tensor_data
    return float(data.chunk.sizes.numel() / data.size.numel()) if (item.tensor_storage_size() or 0) > _SMALL else 0.0


def _thread_executor(real: type[Any]) -> type[Any]:
    """Return a class for *real*, which saves a checkpoint in a process that joins a process group of its own."""

    class ThreadForProcess(state_names.THREAD_EXECUTOR.get()):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            task = current_task()
            if task is not None:
                task.port.note(
                    "dcp.async_save with AsyncCheckpointerType.PROCESS: a thread of the rank writes the checkpoint"
                )

    ThreadForProcess.__name__, ThreadForProcess.__qualname__ = real.__name__, real.__qualname__
    return ThreadForProcess


def checkpoint_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for code that writes and reads files with torch.save and
    torch.load.
    """
    save, load = functools.partial(_save, torch.save), functools.partial(_load, torch.load)
    return [
        patch_for_ranks(holder, name, ours)
        for holder in (torch, torch.serialization)
        for name, ours in (("save", save), ("load", load))
    ]


_dcp: list[Patch] = []
"""(holder, attribute, torch's own) of DCP, while it is led here."""


def time_dcp() -> None:
    """Lead torch.distributed.checkpoint here, once a rank uses a GPU: it takes a second to import."""
    if _dcp:
        return
    with STATE.everyones():  # not the rank's own assignment, whose GPU happens to be the first
        from torch.distributed.checkpoint import FileSystemReader

        led: list[Any] = [
            *state_names.WRITE_ITEM.replaced_by(_write_item),
            (FileSystemReader, "read_data", _read_data),
            *state_names.CREATE_GLOBAL_PLAN.replaced_by(_plan_for_all),
            *state_names.SAVE_STATE_DICT.replaced_by(_by_each),
            *state_names.LOAD_STATE_DICT.replaced_by(_by_each),
        ]
        for holder, name, ours in led:
            real = getattr(holder, name)
            _dcp.append((holder, name, real))
            setattr(holder, name, resembling(real, for_ranks(real, functools.partial(ours, real))))
        if state_names.THREAD_EXECUTOR.exists():
            process = state_names.PROCESS_EXECUTOR
            _dcp.append((process.holder(), process.attribute, process.get()))
            setattr(process.holder(), process.attribute, _thread_executor(process.get()))


def give_back_dcp() -> None:
    """Undo `time_dcp`."""
    while _dcp:
        setattr(*_dcp.pop())
