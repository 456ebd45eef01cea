"""Process groups, their handles, futures and stores: the functions that make them, and their private methods.

A group's methods are looked up on the class, so that an entry is the unbound method. What decides the way of a
call is here, too: dispatch modes, the profiler, and whether a backward pass runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from distsim.torch_compat.names import FEATURE, GUARD, OPTIONAL, SIM, TorchName

C10D = "torch.distributed.distributed_c10d."
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
GROUP = "torch._C._distributed_c10d.ProcessGroup."


def _asks_exact_type() -> bool:
    from torch.distributed import batch_isend_irecv

    return "type" in batch_isend_irecv.__code__.co_names


WORLD = TorchName(
    C10D + "_world",
    "the groups that exist, and the calls of a coalescing block",
    GUARD | SIM,
    public="get_process_group_ranks and get_pg_count for parts of it",
)
DEFAULT_GROUP = TorchName(C10D + "_world._default_pg", "the short path of calls on the default group", OPTIONAL)
COALESCING = TorchName(C10D + "_world._pg_coalesce_state", "the short path of calls in a coalescing block", OPTIONAL)
RENDEZVOUS = TorchName(C10D + "rendezvous", "the beginning of init_process_group", GUARD | SIM)
SPLIT_GROUP = TorchName(C10D + "split_group", "groups that split_group makes", FEATURE)
NEW_GROUP_HELPER = TorchName(
    C10D + "_new_process_group_helper",
    "every group that init_process_group and new_group make",
    GUARD | SIM,
)
STORE_BARRIER = TorchName(C10D + "_store_based_barrier", "TORCH_DIST_INIT_BARRIER where ranks stand for others", SIM)
UPDATE_DEFAULT_GROUP = TorchName(
    C10D + "_update_default_pg", "the end of init_process_group", GUARD, public="wrap init_process_group"
)
NEW_GROUP_WITH_TAG = TorchName(C10D + "_new_group_with_tag", "calls of new_group", GUARD, public="wrap new_group")
WRAPPER = TorchName(
    C10D + "_create_process_group_wrapper",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL without torch's own checks",
    OPTIONAL,
    public="the variable itself",
)
REGISTER = TorchName(C10D + "_register_process_group", "a guarded group under the name of its own", GUARD)
UNREGISTER = TorchName(C10D + "_unregister_process_group", "a guarded group under the name of its own", GUARD)
COLLECTIVE_OP = TorchName(C10D + "_CollOp", "the short path of calls in a coalescing block", OPTIONAL)
LOG_MESSAGE = TorchName(
    "torch.distributed.c10d_logger._get_msg_dict", "calls that torch refuses", FEATURE, public="wrap public functions"
)
LOGGER = TorchName("torch.distributed.c10d_logger._c10d_logger", "the short path's error log", OPTIONAL)
MPI_AVAILABLE = TorchName(C10D + "_MPI_AVAILABLE", "backend mpi without a torch that was built with it", FEATURE)

BACKEND = TorchName(
    "torch._C._distributed_c10d.Backend",
    "calls that go to a backend at once",
    GUARD | SIM,
    public="none: torch.distributed.Backend is the class of backend names",
)
GET_BACKEND = TorchName(GROUP + "_get_backend", "a group's backend for a device", GUARD | SIM)
SYMMETRIC_MEMORY = TorchName("torch._C._distributed_c10d._SymmetricMemory", "symmetric memory", OPTIONAL)
IMPLICIT_MEM_POOL = TorchName(
    "torch.distributed._symmetric_memory._should_use_implicit_mempool",
    "symmetric memory without a torch.cuda.MemPool",
    OPTIONAL,
    since="2.13",
)
DEVICE_TYPES = TorchName(GROUP + "_device_types", "the devices of a group", GUARD)
REGISTER_BACKEND = TorchName(GROUP + "_register_backend", "a guarded group's backends", GUARD | SIM)
SET_DEFAULT_BACKEND = TorchName(GROUP + "_set_default_backend", "a guarded group's default backend", GUARD | SIM)
SET_NAME = TorchName(GROUP + "_set_group_name", "a guarded group's name", GUARD | SIM)
SET_DESCRIPTION = TorchName(GROUP + "_set_group_desc", "a guarded group's description", GUARD | SIM)
NAN_CHECK = TorchName(C10D + "NanCheckHook.attach", "torch's NaN check on a guarded group", FEATURE, since="2.14")
FLIGHT_RECORDER = TorchName(
    "torch._C._distributed_c10d.FlightRecorderHook.attach",
    "torch's Flight Recorder on a guarded group",
    OPTIONAL,
    since="2.14",
)
HAS_HOOKS = TorchName(GROUP + "_has_hooks", "NCCL's completion hooks", OPTIONAL)
EXACT_TYPE = TorchName(
    C10D + "batch_isend_irecv",
    "batched messages of NCCL, which torch before 2.14 coalesces only if type(group) is ProcessGroup",
    OPTIONAL,
    test=_asks_exact_type,
    passes_until="2.13",
)

DISTRIBUTED_C10D_WORLD = TorchName(
    "torch.distributed.distributed_c10d._World", "the groups of each simulated process", SIM
)
PLUGINS = TorchName("torch.distributed.distributed_c10d.Backend._plugins", "backends that are registered", SIM)
SET_PG_TIMEOUT = TorchName(
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "a group's timeout",
    OPTIONAL,
    public="torch.distributed.set_timeout (2.14)",
)
GET_DEFAULT_GROUP = TorchName("torch.distributed.distributed_c10d._get_default_group", "the default group", SIM)
CHECK_P2P_OP_LIST = TorchName("torch.distributed.distributed_c10d._check_p2p_op_list", "batched messages of NCCL", SIM)
UNREGISTER_ALL_PROCESS_GROUPS = TorchName(
    "torch._C._distributed_c10d._unregister_all_process_groups", "groups in a thread of a simulated process", SIM
)
SET_THREAD_ISOLATION_MODE = TorchName(
    "torch._C._distributed_c10d._set_thread_isolation_mode", "groups in a thread of a simulated process", SIM
)
HOOK_OP_NAME = TorchName("torch._C._distributed_c10d.HookOpName", "hooks on groups", OPTIONAL, since="2.14")
NAN_CHECK_HOOK = TorchName(
    "torch._C._distributed_c10d.NanCheckHook", "torch's check for NaN, which a note replaces", OPTIONAL, since="2.14"
)
FLIGHT_RECORDER_HOOK = TorchName(
    "torch._C._distributed_c10d.FlightRecorderHook",
    "torch's Flight Recorder, which a note replaces",
    OPTIONAL,
    since="2.14",
)


def share_backends(source: Any, target: Any, backend_type: Callable[[Any], Any]) -> dict[str, Any]:
    """Copy the backends, name and description of the group *source* to *target*, and return the backends by device
    type."""
    backends = {}
    for device in source._device_types:
        backend = backends[device.type] = source._get_backend(device)
        target._register_backend(device, backend_type(backend), backend)
    if backends:
        target._set_default_backend(backend_type(next(iter(backends.values()))))
        target._set_group_name(source.group_name)
        target._set_group_desc(source.group_desc)
    return backends


def timeout_of(backend: Any) -> timedelta | None:
    """Return the timeout of a backend's calls; None if it has none."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def without_hooks(group: Any) -> bool:
    """Replacement of `_has_hooks` for releases in which a group does not have it."""
    return False


def tables(world: Any) -> list[dict[Any, Any]]:
    """Return every table of torch's that may have a group as a key or in a list."""
    return [getattr(world, name) for name in TABLES if hasattr(world, name)]


def unknown() -> bool:
    """Return True in a release that cannot be asked, so that callers take the long path."""
    return True


def _outlive_python() -> bool:
    """Return whether C++ keeps the Python object of a handle alive that comes from a group implemented in Python."""
    from torch.distributed import ProcessGroup, Work

    handles: list[weakref.ref[Any]] = []

    class KeptHandle(Work):
        pass

    class KeptGroup(ProcessGroup):
        def barrier(self, *args: Any, **kwargs: Any) -> Any:
            handle = KeptHandle()
            handles.append(weakref.ref(handle))
            return handle

    held = ProcessGroup.barrier(KeptGroup(0, 1))  # by way of C++
    return held is not None and handles[0]() is not None


WORK = TorchName(
    "torch.distributed.Work",
    "handles that C++ keeps: below torch 2.7 the guard has to keep them alive",
    OPTIONAL,
    test=_outlive_python,
)
FUTURE = TorchName(
    "torch._C.Future", "futures of calls that are held back, and of remote calls", GUARD | SIM, public="torch.futures"
)
UNWRAP = TorchName(
    "torch._C.Future._set_unwrap_func", "the exception of a refused call, for C++ that waits for its future", GUARD
)
COLLECT_ALL = TorchName(
    "torch._C._collect_all", "futures that collect others", FEATURE, public="torch.futures.collect_all"
)
PROFILES = TorchName("torch._C._autograd._profiler_enabled", "calls under the profiler", GUARD)
DISPATCH_MODES = TorchName("torch._C._len_torch_dispatch_stack", "calls under a TorchDispatchMode", GUARD | SIM)
FUNCTION_MODES = TorchName("torch._C._len_torch_function_stack", "calls under a TorchFunctionMode", GUARD)
TRANSFORMS = TorchName("torch._C._functorch.peek_interpreter_stack", "calls inside a transform of torch.func", GUARD)
RUN_BACKWARD = TorchName("torch.autograd.graph._engine_run_backward", "DDP's calls on the short path", GUARD | SIM)
SOURCE_RANK = TorchName(
    "torch._C._distributed_c10d.Work._source_rank", "the sender that recv without a source met", OPTIONAL
)

CURRENT_GRAPH_TASK_ID = TorchName("torch._C._current_graph_task_id", "whether a backward pass runs", SIM | FEATURE)
EXECUTION_ENGINE = TorchName(
    "torch.autograd.Variable._execution_engine", "callbacks at the end of a backward pass", SIM
)
SET_MULTITHREADING_ENABLED = TorchName(
    "torch._C._set_multithreading_enabled",
    "backward in a rank's own thread",
    SIM,
    public="torch.autograd.set_multithreading_enabled",
)

KINETO_EVENT = TorchName("torch._C._autograd._KinetoEvent", "what a profiler asks of an event", OPTIONAL)
ENABLE_PROFILER = TorchName("torch.autograd.profiler._enable_profiler", "torch.profiler", FEATURE)
PREPARE_PROFILER = TorchName("torch.autograd.profiler._prepare_profiler", "torch.profiler", FEATURE)
DISABLE_PROFILER = TorchName("torch.autograd.profiler._disable_profiler", "torch.profiler", FEATURE)
ADD_METADATA_JSON = TorchName("torch.autograd._add_metadata_json", "torch.profiler", FEATURE)
SUPPORTED_ACTIVITIES = TorchName("torch.autograd._supported_activities", "torch.profiler", FEATURE)
ENABLE_RECORD_FUNCTION = TorchName("torch.autograd._enable_record_function", "profiles of remote calls", FEATURE)
ENABLE_PROFILER_LEGACY = TorchName(
    "torch.autograd.profiler_legacy._enable_profiler_legacy", "profiles of remote calls", FEATURE
)
DISABLE_PROFILER_LEGACY = TorchName(
    "torch.autograd.profiler_legacy._disable_profiler_legacy", "profiles of remote calls", FEATURE
)
SUPPORTED_ACTIVITIES_HERE = TorchName("torch.autograd.profiler._supported_activities", "torch.profiler", FEATURE)


PROCESSES = "_pc"
"""Attribute of MultiprocessContext with its processes."""


DEFAULT_STORE = TorchName(
    "torch.distributed.distributed_c10d._get_default_store", "the monitors of several hosts, and strict ranks, meet"
)
CREATE_STORE = TorchName(
    "torch.distributed.rendezvous._create_c10d_store", "a rendezvous beside that of the launcher", FEATURE
)


def of_default_group() -> Any:
    """Return the store that the default group was made with, without the prefixes around it.

    Raises:
        RuntimeError, ValueError: there is no default group, or this torch does not say which store it has.
    """
    ask = DEFAULT_STORE.get(None)
    if ask is None:
        raise RuntimeError("this torch does not say which store its default group has")
    store = ask()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


KEEP_HANDLE = TorchName(
    "torch.distributed.Reducer._set_forward_pass_work_handle",
    "a handle of DDP's join that C++ keeps",
    OPTIONAL,
    public="none: keep the handle alive by itself",
)

GET_DDP_LOGGING_DATA = TorchName(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data", "DDP's logging data", FEATURE
)
REGISTER_BUILTIN_COMM_HOOK = TorchName(
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook", "DDP's hooks of C++", FEATURE
)
SET_RUNTIME_STATS_AND_LOG = TorchName(
    "torch._C._distributed_c10d.Logger.set_runtime_stats_and_log", "DDP's timer of CUDA events", FEATURE
)
DEBUG_HANDLERS = TorchName(
    "torch.distributed.debug._handlers",
    "the debug server's handlers, which C++ frees after Python has ended",
    OPTIONAL,
    since="2.13",
)
PREPARE_FOR_BACKWARD = TorchName(
    "torch._C._distributed_c10d.Reducer.prepare_for_backward",
    "DDP's search for unused parameters in a profile",
    OPTIONAL,
)
DELAY_ALL_REDUCE = TorchName(
    "torch._C._distributed_c10d.Reducer._delay_all_reduce", "DDP with delayed all_reduce", OPTIONAL
)

INIT_ONE_PROCESS_GROUP = TorchName(
    "torch.distributed.device_mesh.DeviceMesh._init_one_process_group",
    "meshes whose set-up is not quadratic in the ranks of a job",
    OPTIONAL,
    since="2.13",
)
MESH_LAYOUT = TorchName("torch.distributed.device_mesh._MeshLayout", "the same", OPTIONAL, since="2.13")

BACKEND_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Methods that still have their old name in a backend."""
