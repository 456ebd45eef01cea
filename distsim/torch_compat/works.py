"""Handles and futures, DDP's C++ half, stores, the launcher's processes, and the state that decides a call's way."""

from __future__ import annotations

import weakref
from typing import Any

from distsim.torch_compat.names import FEATURE, GUARD, OPTIONAL, SIM, TorchName

__all__ = ["PROCESSES", "of_default_group", "unknown"]


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
