"""Symmetric memory of simulated GPUs: torch.distributed._symmetric_memory and its operators.

torch's own Python (the fused and low-contention operators of async TP) runs unchanged on the handle of this module.
Kernels of C++ are collectives that meet apart from the group's other calls, one communicator for each algorithm and
channel. Memory of a peer has a place and no values; what reads or writes it waits for NVLink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from distsim.errors import NotSimulated
from distsim.kernels import Cost
from distsim.sim.c10d.group import SimGroup
from distsim.sim.device.dispatch import HANDLERS
from distsim.sim.device.hooks import below_modes, carrier
from distsim.sim.device.memory import accelerators_of
from distsim.sim.device.operators.special import Handler, Mode
from distsim.sim.device.timeline.timeline import PEER
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks
from distsim.sim.isolation.process import require_task
from distsim.torch_compat.groups import IMPLICIT_MEM_POOL, SYMMETRIC_MEMORY

_GROUPS = "_distsim_symmetric"
"""Attribute of a storage in symmetric memory: the names of the groups whose members have all registered it."""
_INSTEAD = "call barrier() of its handle, copy from get_buffer(), or call a collective of torch.distributed"


def _is_symmetric(tensor: Tensor) -> bool:
    return _GROUPS in tensor.untyped_storage().__dict__


def group_named(group_name: str) -> SimGroup:
    """Return the group that torch knows by *group_name*."""
    names = require_task().process.groups.c10d.pg_names
    group = next((group for group, name in names.items() if name == group_name), None)
    if not isinstance(group, SimGroup) or "nccl" not in group.backend_config():
        raise NotSimulated(f"symmetric memory of group {group_name}", "make the group with backend nccl")
    return group


def _beside(group_name: str, algo: str, channel: int = 0) -> SimGroup:
    """Return the group of the calls by *algo* on *channel*."""
    group = group_named(group_name)
    kind = f"symmetric memory, {algo}" + (f", channel {channel}" if channel else "")
    return group.beside(kind, {"cuda": "nccl"}, algo)


def _options(kind: str) -> Any:
    """Return the options of a synchronous call."""
    options = getattr(c10d, kind)()
    options.asyncOp = False
    return options


class SymmetricMemory:
    """The handle of `rendezvous`: the memory of *tensor* on each member of the group *group_name*."""

    def __init__(self, tensor: Tensor, group_name: str) -> None:
        group = _beside(group_name, "one_shot")
        self.device = tensor.device
        self.rank, self.world_size = group.rank(), group.size()
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.buffer_size = tensor.untyped_storage().nbytes()
        self._bytes = tensor.detach().as_strided((tensor.numel(),), (1,), 0).view(torch.uint8)
        self._group_name = group_name

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait for the current streams of all members."""
        options = _options("BarrierOptions")
        _beside(self._group_name, "one_shot", channel).barrier(options)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """Return the memory of the member *rank* from element *storage_offset* on."""
        size = torch.Size(sizes)
        start, nbytes = storage_offset * dtype.itemsize, size.numel() * dtype.itemsize
        if not 0 <= rank < self.world_size:
            raise RuntimeError(f"expected a rank from 0 to {self.world_size - 1}, got {rank}")
        if start + nbytes > self.buffer_size:
            raise RuntimeError(
                f"SymmetricMemory::get_buffer: the requested size ({nbytes} bytes at {start}) exceeds the allocated "
                f"size ({self.buffer_size} bytes)"
            )
        if rank == self.rank:
            return self._bytes[start : start + nbytes].view(dtype).view(size)
        return remote_tensor(size, dtype, self.device, group_named(self._group_name), rank)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal the member *dst_rank* from the current stream. It does not wait for the last signal to be read."""
        send_signal(group_named(self._group_name), dst_rank, self.device, channel).wait()

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait for the next signal of the member *src_rank*."""
        receive_signal(group_named(self._group_name), src_rank, self.device, channel).wait()

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of the member *peer*."""
        return self.get_buffer(peer, sizes, dtype, self.offset // dtype.itemsize)

    def __getattr__(self, name: str) -> NoReturn:
        if not hasattr(SYMMETRIC_MEMORY.get(None), name):
            raise AttributeError(f"SymmetricMemory has no attribute {name!r}")
        raise NotSimulated(f"SymmetricMemory.{name}", _INSTEAD)


def send_signal(group: SimGroup, peer: int, device: torch.device, channel: int | None = None) -> Any:
    """Signal the member *peer* in the current stream of *device*, and return the handle."""
    signals, flag = group.signals(group.rank(), peer, channel), torch.empty(1, dtype=torch.uint8, device=device)
    return signals.send([flag], peer, 0)


def receive_signal(group: SimGroup, peer: int, device: torch.device, channel: int | None = None) -> Any:
    """Wait in a stream of *device* for the next signal of the member *peer*, and return the handle."""
    signals, flag = group.signals(peer, group.rank(), channel), torch.empty(1, dtype=torch.uint8, device=device)
    return signals.recv([flag], peer, 0)


def remote_tensor(size: Sequence[int], dtype: torch.dtype, device: torch.device, group: SimGroup, peer: int) -> Tensor:
    """Return a tensor on *device* that refers to another member's memory."""
    task = require_task()
    devices = group.devices
    with below_modes():
        tensor = carrier(size, torch.empty(size, device="meta").stride(), dtype, device)
    compiler = task.port.facts.network.compiler

    def seconds(nbytes: int) -> float:
        plan = compiler.compile_send(devices[peer], devices[group.rank()], nbytes, "one_shot", 0)
        return float(plan.alone_s(compiler.links.capacity))

    tensor.untyped_storage()._distsim_peer = seconds
    accelerators_of(task.process).remote_cost = _remote_cost
    return tensor


def _remote_cost(cost: Cost, tensors: Sequence[Tensor]) -> Cost:
    """Return *cost* with the time in which the bytes of *tensors* in peers' memory cross NVLink."""
    seconds = 0.0
    for tensor in tensors:
        over_nvlink = tensor.untyped_storage().__dict__.get("_distsim_peer")
        if over_nvlink is not None:
            seconds += over_nvlink(tensor.numel() * tensor.element_size())
    if seconds <= cost.seconds:
        return cost
    return replace(cost, seconds=seconds, memory_bound=False, kind=PEER if cost.kind == "copy" else cost.kind)


# -- The functions of `_SymmetricMemory` that make memory and handles.


def _empty(
    task: Any,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group_name: str | None = None,
    alloc_id: int | None = None,
) -> Tensor:
    if task.port.facts.data.real:
        raise NotSimulated("symmetric memory with --data real", "leave --data out, or call torch.distributed")
    if device.type != "cuda":
        raise NotSimulated(f"symmetric memory on {device.type}", "allocate it with device='cuda'")
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
    tensor.untyped_storage().__dict__[_GROUPS] = {None: group_name}
    return tensor


def _rendezvous(task: Any, tensor: Tensor, group_name: str | None = None) -> SymmetricMemory | None:
    """Return the handle; the first time all members of the group meet and their hosts wait."""
    if not _is_symmetric(tensor):
        return None
    groups = tensor.untyped_storage().__dict__[_GROUPS]
    name = group_name or groups[None]
    if name is None:
        raise RuntimeError("rendezvous: expected a group, since the memory was allocated without one")
    group = _beside(name, "one_shot")
    if len(task.port.facts.network.compiler.group(group.devices, 0).domains) > 1:
        raise NotSimulated(
            f"symmetric memory of group {group.group_desc}, whose GPUs are in several NVLink domains",
            "rendezvous with a group of one domain, such as the tensor-parallel one",
        )
    handle = SymmetricMemory(tensor, name)
    if name not in groups:
        groups[name] = name
        options = _options("BarrierOptions")
        group.barrier(options).wait()
    return handle


def _has_multicast(task: Any, kind: Any, index: int) -> bool:
    return bool(task.port.facts.cluster.node.nvls)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def call(task: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulated(f"symmetric memory: {name}", _INSTEAD)

    return call


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "empty_strided_p2p": _empty,
    "rendezvous": _rendezvous,
    "has_multicast_support": _has_multicast,
    "is_symm_mem_tensor": lambda task, tensor: _is_symmetric(tensor),
    "set_group_info": lambda task, *args: None,
    "get_backend": lambda task, device: "CUDA",
    **{name: _refuse(name) for name in ("get_mempool_allocator", "stream_write_value32", "memset32")},
}


def _set_backend(task: Any, name: str) -> None:
    if name != "CUDA":
        raise NotSimulated(f"symmetric memory of backend {name}", "use backend CUDA, the default")


_FUNCTIONS["set_backend"] = _set_backend


# -- torch's kernels on symmetric memory: operators `symm_mem::...` of C++.


def _handler(carry_out: Callable[[Mode, dict[str, Any]], Any]) -> Handler:
    def handle(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        with mode:
            return carry_out(mode, {**dict(zip(names, args, strict=False)), **kwargs, "operator": func})

    return handle


def _checked(values: dict[str, Any], tensor: Tensor) -> None:
    """Raise torch's errors for *tensor*, which the kernel uses in each member's memory."""
    name = values["operator"]._opname
    if not _is_symmetric(tensor):
        raise RuntimeError(f"{name}: input must be allocated with empty_strided_p2p().")
    _rendezvous(require_task(), tensor, values["group_name"])
    if values.get("reduce_op", "sum") != "sum":
        raise RuntimeError(f"{name}: only sum is supported for now.")
    if "multimem" in name and not require_task().port.facts.cluster.node.nvls:
        raise RuntimeError(f"{name}: multicast support is required.")


def _all_reduce(algo: str, source: str, target: str | None) -> Handler:
    """Reduce the argument *source* into the argument *target*, or into a new tensor."""

    def carry_out(mode: Mode, values: dict[str, Any]) -> Any:
        given = values[source]
        _checked(values, values.get("symm_buffer", given))
        result = torch.empty_like(given) if target is None else values[target]
        if result is not given:
            host = mode.values.host(given)
            mode.values.write(result, None if host is None else host.clone(), mode.values.guessed(given))
        options = _options("AllreduceOptions")
        _beside(values["group_name"], algo).allreduce([result], options)
        return result

    return _handler(carry_out)


def _multimem_all_gather(mode: Mode, values: dict[str, Any]) -> Any:
    _checked(values, values["out"])
    options = _options("AllgatherOptions")
    _beside(values["group_name"], "multimem")._allgather_base(values["out"], values["input"], options)
    return values["out"]


def _reduce_scatter(mode: Mode, values: dict[str, Any]) -> Any:
    _checked(values, values["input"])
    options = _options("ReduceScatterOptions")
    group = _beside(values["group_name"], "two_shot")
    given = values["input"]
    if values["split_last_dim"]:
        mode.values.forget(given)
    group._reduce_scatter_base(values["output"], given.view(-1), options)
    return values["output"]


_OPERATORS: dict[str, Handler] = {
    "one_shot_all_reduce": _all_reduce("one_shot", "input", None),
    "one_shot_all_reduce_out": _all_reduce("one_shot", "input", "out"),
    "one_shot_all_reduce_copy": _all_reduce("one_shot", "local_input", None),
    "one_shot_all_reduce_copy_out": _all_reduce("one_shot", "local_input", "out"),
    "two_shot_all_reduce_": _all_reduce("two_shot", "input", "input"),
    "two_shot_all_reduce_out": _all_reduce("two_shot", "input", "output"),
    "multimem_all_reduce_": _all_reduce("multimem", "input", "input"),
    "multimem_one_shot_all_reduce": _all_reduce("one_shot", "input", None),
    "multimem_one_shot_all_reduce_out": _all_reduce("one_shot", "input", "out"),
    "multimem_all_gather_out": _handler(_multimem_all_gather),
    "reduce_scatter_out": _handler(_reduce_scatter),
}


_REFUSED = (
    "multimem_one_shot_reduce_out", "memset32_", "stream_write_value32_", "_async_input_mm", "_rendezvous", "_barrier",
    "all_to_all_vdev", "all_to_all_vdev_2d", "all_to_all_vdev_2d_offset", "tile_reduce", "multi_root_tile_reduce",
    "nccl_get", "nccl_put", "nccl_put_signal", "nccl_put_with_signal", "nccl_reduce_scatter_offset",
    "nccl_wait_for_signal", "nccl_wait_signal", "nvshmem_all_to_all", "nvshmem_broadcast", "nvshmem_get", "nvshmem_put",
    "nvshmem_put_with_signal", "nvshmem_wait_for_signal",
)  # fmt: skip
"""The other operators of C++."""


def _refuse_operator(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise NotSimulated(f"torch.ops.{func}", _INSTEAD)


def symmetric_memory_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) while a simulation runs; operators are answered in any dispatch mode of ours."""
    real_class = SYMMETRIC_MEMORY.get(None)
    if real_class is None:
        return []
    for name, handler in {**_OPERATORS, **dict.fromkeys(_REFUSED, _refuse_operator)}.items():
        if hasattr(torch.ops.symm_mem, name):
            HANDLERS.setdefault(getattr(torch.ops.symm_mem, name).default, handler)
    patches = [
        (real_class, name, staticmethod(for_ranks(getattr(real_class, name), answer)))
        for name, answer in _FUNCTIONS.items()
        if hasattr(real_class, name)
    ]
    return patches + name_for_ranks(IMPLICIT_MEM_POOL, lambda task: False)
