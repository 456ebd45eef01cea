"""C++ functions that torch.cuda and torch.accelerator call."""

from __future__ import annotations

from distsim.torch_compat.names import FEATURE, OPTIONAL, SIM, TorchName

CUDA_BUILD = "a build for CUDA"
PARSE_VISIBLE_DEVICES = TorchName("torch.cuda._parse_visible_devices", "CUDA_VISIBLE_DEVICES", SIM)
GET_DEVICE_INDEX = TorchName("torch.cuda._utils._get_device_index", "torch.cuda.utilization and its kin", SIM)
IS_COMPILED = TorchName("torch.cuda._is_compiled", "torch.cuda in a torch without CUDA", SIM)
CUDA_STREAM_BASE = TorchName("torch._C._CudaStreamBase", "torch.cuda.Stream", SIM)
CUDA_EVENT_BASE = TorchName("torch._C._CudaEventBase", "torch.cuda.Event", SIM)
ACCELERATOR_GET_ACCELERATOR = TorchName("torch._C._accelerator_getAccelerator", "the accelerator of a rank", SIM)

CUDA = {
    name: TorchName(f"torch._C._cuda_{name}", "torch.cuda", OPTIONAL, only=CUDA_BUILD)
    for name in [
        "getDevice",
        "setDevice",
        "exchangeDevice",
        "maybeExchangeDevice",
        "getDeviceCount",
        "getCurrentStream",
        "getDefaultStream",
        "setStream",
        "getCurrentRawStream",
        "synchronize",
        "memoryStats",
        "resetPeakMemoryStats",
        "resetAccumulatedMemoryStats",
        "emptyCache",
        "setMemoryFraction",
        "getMemoryFraction",
        "getAllocatorBackend",
        "cudaCachingAllocator_is_enabled",
        "hostMemoryStats",
        "resetAccumulatedHostMemoryStats",
        "resetPeakHostMemoryStats",
        "ipc_collect",
        "canDeviceAccessPeer",
        "memorySnapshot",
        "record_memory_history",
        "record_memory_history_legacy",
        "cudaCachingAllocator_raw_alloc",
        "cudaCachingAllocator_raw_delete",
        "cudaCachingAllocator_enable",
        "customAllocator",
        "changeCurrentAllocator",
        "getAllocator",
        "getStreamFromExternal",
        "getArchFlags",
        "init",
        "isInBadFork",
        "get_sync_debug_mode",
        "set_sync_debug_mode",
        "sleep",
        "getCurrentBlasHandle",
        "getCurrentSolverHandle",
    ]
}
"""C++ functions that only a torch built for CUDA has. A simulation replaces them, or adds them."""
ACCELERATOR = {
    name: TorchName(f"torch._C._accelerator_{name}", "torch.accelerator", FEATURE, since=since)
    for since, names in (
        ("2.6", "getDeviceIndex setDeviceIndex getStream setStream synchronizeDevice"),
        (
            "2.12",
            "exchangeDevice maybeExchangeDevice isAllocatorInitialized emptyCache emptyHostCache getDeviceStats "
            "resetAccumulatedStats resetPeakStats getMemoryInfo",
        ),
    )
    for name in names.split()
}
COPIES = {
    name: TorchName(f"torch._C.{name}", "torch.nn.DataParallel", OPTIONAL, only=CUDA_BUILD)
    for name in [
        "_broadcast",
        "_broadcast_out",
        "_broadcast_coalesced",
        "_scatter",
        "_scatter_out",
        "_gather",
        "_gather_out",
    ]
}
"""Copies to several GPUs of one process."""
MODULE = {
    name: TorchName(f"torch.cuda.{name}", "torch.cuda", FEATURE)
    for name in ["_lazy_init", "_lazy_call", "_get_generator", "_compile_kernel", "_cudart"]
}
ALLOCATOR_STATE = TorchName(
    "torch._C._cuda_CUDAAllocator_AllocatorState", "torch.compiler.reset", OPTIONAL, only=CUDA_BUILD
)
SET_CACHED_TENSORS_ENABLED = TorchName(
    "torch._C._set_cached_tensors_enabled", "torch.compiler.reset", OPTIONAL, only=CUDA_BUILD
)
"""Names that the compiler's CUDA graphs import (torch/_inductor/cudagraph_trees.py)."""
HOST_EMPTY_CACHE = TorchName("torch._C._host_emptyCache", "torch.cuda.graph", OPTIONAL, only=CUDA_BUILD)
PROPERTIES = TorchName(
    "torch.cuda._get_device_properties", "torch.cuda.get_device_properties", OPTIONAL, only=CUDA_BUILD
)
PROPERTIES_CLASS = TorchName("torch.cuda._CudaDeviceProperties", "torch.cuda.get_device_properties", FEATURE)
CORE_PROPERTIES_CLASS = TorchName(
    "torch._C._CudaDeviceProperties", "torch.cuda.get_device_properties", OPTIONAL, only=CUDA_BUILD
)
EXCHANGE_DEVICE = TorchName("torch.cuda._exchange_device", "torch.cuda.device", FEATURE)
MAYBE_EXCHANGE_DEVICE = TorchName("torch.cuda._maybe_exchange_device", "torch.cuda.device", FEATURE)
NVTX = TorchName("torch.cuda.nvtx._nvtx", "torch.cuda.nvtx", FEATURE)
CREATE_JIT_FN = TorchName("torch.cuda.jiterator._create_jit_fn", "torch.cuda.jiterator", FEATURE)
CREATE_MULTI_OUTPUT_JIT_FN = TorchName(
    "torch.cuda.jiterator._create_multi_output_jit_fn", "torch.cuda.jiterator", FEATURE
)
STREAM = TorchName("torch._C.Stream", "torch.Stream", SIM, public="torch.Stream")
EVENT = TorchName("torch._C.Event", "torch.Event", SIM, public="torch.Event")
GENERATOR = TorchName("torch._C.Generator", "torch.Generator", SIM, public="torch.Generator")
DTENSOR_REGION = TorchName(
    "torch.distributed.tensor._random.OffsetBasedRNGTracker._distribute_region", "random numbers of DTensors", FEATURE
)
STAND_INS = frozenset(
    name.path
    for name in (
        *(CUDA_STREAM_BASE, CUDA_EVENT_BASE, PROPERTIES_CLASS, EXCHANGE_DEVICE, MAYBE_EXCHANGE_DEVICE, NVTX),
        MODULE["_cudart"],
    )
)
"""Paths that hold something of another kind in a build without CUDA: a dummy class, a Python function, None."""
