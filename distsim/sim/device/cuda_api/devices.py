"""torch.cuda's devices: their properties, and which one is current."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import torch

from distsim.errors import NotSimulated
from distsim.sim.device.cuda_api.memory import memory_info
from distsim.sim.device.cuda_api.streams import (
    CALL_S,
    CUDA_TYPE,
    CudaEventBase,
    CudaStreamBase,
    Event,
    Stream,
    handle,
    make_current,
)
from distsim.sim.device.cuda_api.tensors import (
    accelerator_function,
    accelerators,
    cuda_function,
    gpu,
    indexed,
    only_ranks,
    refused,
    refused_function,
    visible_devices,
    with_gpus,
)
from distsim.sim.device.gpu import CUDA_VERSION, Device, invalid_ordinal, uuid_of
from distsim.sim.device.memory import accelerators_of, current_device, current_stream, set_current_device
from distsim.sim.device.timeline import Kernel
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks
from distsim.sim.isolation.modules.patch_table import Patch
from distsim.sim.isolation.process import RankTask, current_task, require_task
from distsim.torch_compat import cuda_api as cuda_names
from distsim.torch_compat.names import TorchName

# -- Which GPUs there are, what they are, and when a rank begins to use them.

_is_compiled = cuda_names.IS_COMPILED.get()

CUDNN_VERSION = 91_900
NCCL_VERSION = (2, 27, 3)
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
"""Architectures of torch 2.13's wheels (PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py)."""

_THREADS_PER_MULTIPROCESSOR = {75: 1024, 86: 1536, 89: 1536, 120: 1536}
_SHARED_PER_MULTIPROCESSOR = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB, by compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


class _CudaDeviceProperties:
    """Result of torch.cuda.get_device_properties."""

    def __init__(self, device: Device) -> None:
        model = device.model
        self.name: str = model.title
        self.major, self.minor = divmod(model.compute_capability, 10)
        self.total_memory: int = model.memory_bytes
        self.multi_processor_count: int = model.multiprocessors
        self.L2_cache_size: int = model.l2_bytes
        self.is_integrated = self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor = _THREADS_PER_MULTIPROCESSOR.get(model.compute_capability, 2048)
        self.max_threads_per_block = 1024
        self.regs_per_multiprocessor = 65_536
        self.warp_size = 32
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_multiprocessor = _SHARED_PER_MULTIPROCESSOR.get(model.compute_capability, 100) << 10
        self.shared_memory_per_block_optin = self.shared_memory_per_multiprocessor - (1 << 10)
        self.uuid = uuid_of(device.process.slot.host, device.index)
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = device.index, 0, 0
        self.gcnArchName = self.name

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // (1 << 20)}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // (1 << 20)}MB)"
        )


def _properties(task: RankTask, index: int) -> _CudaDeviceProperties:
    return _CudaDeviceProperties(gpu(task, index))


class _Runtime:
    """torch.cuda.cudart(), as far as torch itself (DCP pins memory by it) and profiled programs ask for it."""

    class cudaError(int):
        success = 0

    @staticmethod
    def cudaMemGetInfo(index: int) -> tuple[int, int]:
        return memory_info(gpu(require_task(), index))

    @staticmethod
    def cudaProfilerStart(*args: int) -> int:
        return 0

    cudaProfilerStop = cudaHostRegister = cudaHostUnregister = cudaProfilerStart

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotSimulated(f"cudart().{name}", "call torch.cuda instead of the CUDA runtime")


class _Tools:
    """torch._C._nvtx: marks for NVIDIA's tools, which see nothing of a simulation."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


class _Generators:
    """torch.cuda.default_generators of the running rank."""

    def __getitem__(self, index: int) -> Any:
        return accelerators_of(require_task().process).generator(index)

    def __len__(self) -> int:
        task = current_task()
        return 0 if task is None else visible_devices(task)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


def _lazy_call(task: RankTask, call: Callable[[], None], **kwargs: Any) -> None:
    """Queue a call for the first use of a GPU; on a cluster without GPUs it never runs."""
    accelerators = task.process.accelerators
    if accelerators is None:
        return
    if accelerators.used:
        call()
    else:
        if kwargs.get("seed_all"):  # it undoes all seeds before it
            accelerators.queued = [one for one in accelerators.queued if not getattr(one, "_distsim_seed", False)]
        if kwargs:
            call._distsim_seed = True  # type: ignore[attr-defined]
        accelerators.queued.append(call)


def _available(task: RankTask) -> bool:
    return visible_devices(task) > 0


def _accelerator(task: RankTask) -> torch.device | None:
    """Return the accelerator; None on a node without GPUs, also with a CUDA build of torch."""
    return torch.device("cuda") if visible_devices(task) else None


def _initialized(task: RankTask) -> bool:
    return task.process.accelerators is not None and task.process.accelerators.used


def _lazy_init(task: RankTask) -> None:
    accelerators(task)


def _sensed(task: RankTask, device: Any) -> Device:
    return gpu(task, cuda_names.GET_DEVICE_INDEX.get()(device, optional=True))


def _utilization(task: RankTask, device: Any = None) -> int:
    return _sensed(task, device).utilization(task.now_s())


def _memory_used(task: RankTask, device: Any = None) -> int:
    """Return bytes, of all processes, as nvidia-smi has them."""
    free, total = memory_info(_sensed(task, device))
    return total - free


def _everywhere(name: str, value: Any, modules: list[Any]) -> list[Patch]:
    """Return patches that replace *name* of torch.cuda by *value*, also in *modules* that have imported it."""
    real = getattr(torch.cuda, name)
    return [(module, name, value) for module in modules if vars(module).get(name) is real]


def _no_sensor(name: str, task: RankTask, device: Any = None) -> int:
    task.port.note(f"torch.cuda.{name} is 0: the simulated GPU has no such sensor")
    return 0


def device_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for devices, their properties, and the beginning."""
    cuda = torch.cuda
    was_compiled = _is_compiled()
    patches: list[Patch] = []
    takers = [m for path, m in sys.modules.copy().items() if path.startswith(("torch.cuda", "torch.accelerator"))]
    for name, ours in (
        ("is_available", _available),
        ("device_count", visible_devices),
        ("is_initialized", _initialized),
        (cuda_names.MODULE["_lazy_init"].attribute, _lazy_init),
        (cuda_names.MODULE["_lazy_call"].attribute, _lazy_call),
        (
            cuda_names.MODULE["_get_generator"].attribute,
            lambda task, device: accelerators(task).generator(indexed(task, device.index)),
        ),
    ):
        patches += _everywhere(name, for_ranks(getattr(cuda, name), ours), takers)
    for name, ours in (("utilization", _utilization), ("device_memory_used", _memory_used)):
        patches += _everywhere(name, for_ranks(getattr(cuda, name), ours), takers)
    for name in ("temperature", "power_draw", "clock_rate", "memory_usage"):
        patches += _everywhere(name, for_ranks(getattr(cuda, name), partial(_no_sensor, name)), takers)
    tools = "ask torch.cuda.device_memory_used"
    patches += _everywhere(
        "list_gpu_processes", refused("torch.cuda.list_gpu_processes", tools, cuda.list_gpu_processes), takers
    )
    patches.append((cuda.nccl, "is_available", for_ranks(cuda.nccl.is_available, lambda task, tensors: False)))
    replicas = "use DistributedDataParallel, with a rank for each GPU"
    patches += [
        refused_function(name, "torch.nn.DataParallel on several GPUs", replicas) for name in cuda_names.COPIES.values()
    ]
    if (nvml := sys.modules.get("pynvml")) is not None:  # torch has imported it, where it is installed
        patches.append((nvml, "nvmlInit", refused("pynvml.nvmlInit", "run nvidia-smi", nvml.nvmlInit)))
    for holder in (torch.distributed, torch.distributed.distributed_c10d):
        patches.append((holder, "is_nccl_available", with_gpus(holder.is_nccl_available, lambda task: True)))
    patches += [
        *cuda_names.IS_COMPILED.replaced_by(lambda: was_compiled or current_task() is not None),
        *cuda_names.MODULE["_cudart"].replaced_by(_Runtime()),
        (cuda, "default_generators", _Generators()),
        _added(cuda_names.PROPERTIES, only_ranks("get_device_properties", _properties)),
        _added(cuda_names.PROPERTIES_CLASS, _CudaDeviceProperties),
        _added(cuda_names.CORE_PROPERTIES_CLASS, _CudaDeviceProperties),
        _added(cuda_names.CUDA["getArchFlags"], only_ranks("get_arch_list", lambda task: ARCHITECTURES)),
        _added(cuda_names.CUDA["init"], only_ranks("init", _lazy_init)),
        _added(cuda_names.CUDA["isInBadFork"], lambda: False),
        _added(cuda_names.CUDA["get_sync_debug_mode"], only_ranks("get_sync_debug_mode", lambda task: 0)),
        _added(cuda_names.CUDA["set_sync_debug_mode"], only_ranks("set_sync_debug_mode", lambda task, mode: None)),
        _added(cuda_names.CUDA["sleep"], only_ranks("_sleep", _sleep)),
        *(
            _added(cuda_names.CUDA[name], refused(f"torch.cuda.{call}", "call torch's operators"))
            for name, call in (
                ("getCurrentBlasHandle", "current_blas_handle"), ("getCurrentSolverHandle", "current_solver_handle")
            )
        ),
        *cuda_names.NVTX.replaced_by(_Tools()),
        # torch's own error log asks for NCCL's version when a call on an nccl group fails
        (cuda.nccl, "version", lambda: NCCL_VERSION),
        *name_for_ranks(cuda_names.ACCELERATOR_GET_ACCELERATOR, _accelerator),
        (torch.version, "cuda", CUDA_VERSION),
        (torch.backends.cuda, "is_built", lambda: was_compiled or current_task() is not None),
        (torch.backends.cudnn, "is_available", for_ranks(torch.backends.cudnn.is_available, _available)),
        # nn.LSTM asks it and is warned by a build without cuDNN; its cells are priced one by one
        (torch.backends.cudnn, "is_acceptable", with_gpus(torch.backends.cudnn.is_acceptable, lambda *_: False)),
        (torch.backends.cudnn, "version", for_ranks(torch.backends.cudnn.version, lambda task: CUDNN_VERSION)),
    ]  # fmt: skip
    return patches


def _added(name: TorchName, value: Any) -> Patch:
    """Return the patch that adds a name that a torch without CUDA lacks."""
    return name.holder(), name.attribute, value


def _sleep(task: RankTask, cycles: int) -> None:
    """Launch a kernel that does nothing for a number of GPU cycles, at an assumed clock of 1.5 GHz."""
    device = gpu(task)
    device.timeline.put(current_stream(task, device), Kernel(cycles / 1.5e9, task.now_s() + device.model.launch_s))


# -- The current device and the current stream: what torch.cuda and torch.accelerator ask of C++.
#
# torch's Python classes stand on two of C++ (`torch._C._CudaStreamBase`, `_CudaEventBase`), which derive from
# torch.Stream and torch.Event. Ours stand in their place, and torch's own `torch/cuda/streams.py` is run once more on
# top of them.

_PlainStream: Any = torch.Stream


def _set_stream(task: RankTask, stream_id: int, device_index: int, device_type: int) -> None:
    make_current(task, device_index, gpu(task, device_index).streams[stream_id])


def _get_stream(task: RankTask, index: int) -> tuple[int, int, int]:
    on = gpu(task, index)
    return current_stream(task, on).number, on.index, CUDA_TYPE


def _get_default(task: RankTask, index: int) -> tuple[int, int, int]:
    return 0, gpu(task, index).index, CUDA_TYPE


def _raw(task: RankTask, index: int) -> int:
    on = gpu(task, index)
    return handle(_PlainStream(stream_id=current_stream(task, on).number, device_index=on.index, device_type=CUDA_TYPE))


def _accelerator_stream(task: RankTask, index: int) -> Stream:
    number, device_index, kind = _get_stream(task, index)
    result: Stream = Stream(stream_id=number, device_index=device_index, device_type=kind)
    return result


def _accelerator_set_stream(task: RankTask, stream: Any) -> None:
    _set_stream(task, stream.stream_id, stream.device_index, stream.device_type)


def _exchange(task: RankTask, index: int) -> int:
    """Set the current device and return the previous one; a negative number changes nothing."""
    if index < 0:
        return -1
    old = current_device(task)
    if index != old:
        if index >= visible_devices(task):
            accelerators_of(task.process)
            raise invalid_ordinal()
        set_current_device(task, index)
    return old


def _set_device(task: RankTask, index: int) -> None:
    if not 0 <= index < visible_devices(task):
        accelerators_of(task.process)  # says so where the cluster has none
        raise invalid_ordinal()
    accelerators(task).begin_work()
    set_current_device(task, index)


def _synchronize(task: RankTask, index: int | None = None) -> None:
    on = gpu(task, index)
    task.debt_s += CALL_S
    on.synchronize_all(task)


@functools.cache
def _on_top() -> ModuleType:
    """Return a copy of torch/cuda/streams.py whose classes derive from the simulated ones."""
    spec = importlib.util.find_spec("torch.cuda.streams")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = [(name, name.get()) for name in (cuda_names.CUDA_STREAM_BASE, cuda_names.CUDA_EVENT_BASE)]
    for (name, _), ours in zip(before, (CudaStreamBase, CudaEventBase), strict=True):
        setattr(name.holder(), name.attribute, ours)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, real in before:
            setattr(name.holder(), name.attribute, real)
    return module


def current_patches() -> list[Patch]:
    """Return patches (holder, attribute, replacement) for streams, events and the current device."""
    ours = _on_top()
    patches: list[Patch] = [
        *cuda_names.CUDA_STREAM_BASE.replaced_by(CudaStreamBase),
        *cuda_names.CUDA_EVENT_BASE.replaced_by(CudaEventBase),
        *cuda_names.STREAM.replaced_by(Stream),
        *cuda_names.EVENT.replaced_by(Event),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
    ]
    for holder in (torch.cuda, torch.cuda.streams):
        patches += [(holder, name, getattr(ours, name)) for name in ("Stream", "ExternalStream", "Event")]
    answers: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("getDevice", lambda task: (accelerators(task), current_device(task))[1]),
        ("setDevice", _set_device),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getDeviceCount", visible_devices),
        ("getCurrentStream", _get_stream),
        ("getDefaultStream", _get_default),
        ("setStream", _set_stream),
        ("getCurrentRawStream", _raw),
        ("synchronize", _synchronize),
    )
    called = {short: cuda_function(short, ask) for short, ask in answers}
    patches += called.values()
    accelerator_answers: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("getDeviceIndex", lambda task: current_device(task)),
        ("setDeviceIndex", lambda task, index: _set_device(task, index) if index >= 0 else None),
        ("exchangeDevice", _exchange),
        ("maybeExchangeDevice", _exchange),
        ("getStream", _accelerator_stream),
        ("setStream", _accelerator_set_stream),
        ("synchronizeDevice", _synchronize),
    )
    for name, answer in accelerator_answers:
        patches += accelerator_function(name, answer)
    patches += cuda_names.EXCHANGE_DEVICE.replaced_by(called["exchangeDevice"][2])
    patches += cuda_names.MAYBE_EXCHANGE_DEVICE.replaced_by(called["maybeExchangeDevice"][2])
    return patches
