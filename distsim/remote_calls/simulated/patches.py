"""Redirects RPC and distributed autograd from torch's C++ to the agent of the rank.

A name is replaced in every module that has imported it. Outside of ranks torch's own function is called.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd  # what they import from C++ has to be there to be replaced
import torch.distributed.rpc as rpc

from distsim.remote_calls.simulated import calls
from distsim.remote_calls.simulated.agent import SimAgent
from distsim.remote_calls.simulated.autograd import Context, execute, release
from distsim.remote_calls.simulated.calls import SimPyRRef, SimRRef
from distsim.remote_calls.simulated.profiling import ProfilerKeys, profiling_patches
from distsim.remote_calls.simulated.requests import record_patches
from distsim.remote_calls.simulated.serving import call_script, qualified_name, script, serve
from distsim.remote_calls.simulated.state import RRefContext, agent_here, autograd_here, rpc_here, rrefs_here
from distsim.remote_calls.simulated.transport import collect_all, workers_of
from distsim.sim.isolation.for_ranks import for_ranks, name_for_ranks
from distsim.sim.isolation.modules.aliases import ALIASES
from distsim.sim.isolation.process import RankTask
from distsim.sim.processes.threads import CoopLock
from distsim.torch_compat import rpc as rpc_names
from distsim.torch_compat.groups import COLLECT_ALL

_C_rpc: Any = rpc_names.DISTRIBUTED_RPC.get()
_C_autograd: Any = rpc_names.DISTRIBUTED_AUTOGRAD.get()
_REAL = {name: vars(module)[name] for module in (_C_rpc, _C_autograd) for name in vars(module)}


def _is_set() -> bool:
    return rpc_here().agent is not None


class _WorkerNames(set[str]):
    """The names of all workers in their order, since torch asks one after the other: that of a set differs by run."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def __sub__(self, others: AbstractSet[Any]) -> _WorkerNames:
        return _WorkerNames(super().__sub__(others))


def _set_and_start(agent: SimAgent) -> None:
    vars(rpc.api)["_ALL_WORKER_NAMES"] = _WorkerNames(vars(rpc.api)["_ALL_WORKER_NAMES"])
    state = rpc_here()
    if state.agent is None:
        state.agent = agent
        state.rrefs = RRefContext(agent)
    agent.start()


def _reset() -> None:
    rpc_here().agent = None


def _destroy(ignore_leaks: bool = True) -> None:
    context = rpc_here().rrefs
    if context is not None:
        context.destroy(ignore_leaks)


def _flush(timeout: timedelta = timedelta(milliseconds=100_000)) -> None:
    rrefs_here().flush(timeout.total_seconds())


def _timeout() -> float:
    return agent_here().timeout_s


def _set_timeout(seconds: float) -> None:
    agent_here().timeout_s = float(seconds)


def _profile_gil(flag: bool) -> None:
    agent_here().profiles_gil = flag


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a function of torch that supports its C++ code."""


def _backward(context_id: int, roots: Any, retain_graph: bool = False) -> None:
    fits = isinstance(context_id, int) and isinstance(roots, list | tuple)
    if not fits or not all(isinstance(root, torch.Tensor) for root in roots):
        raise TypeError(
            "backward(): incompatible function arguments. The following argument types are supported:\n"
            "    1. (context_id: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None"
        )
    execute(autograd_here(), rpc_here().agent, context_id, list(roots), retain_graph)


def _debug_info() -> dict[str, str]:
    contexts = autograd_here().ready().contexts
    return {
        "num_current_backward_passes": str(sum(context.backward is not None for context in contexts.values())),
        "num_autograd_contexts": str(len(contexts)),
    }


def _valid(context_id: int) -> None:
    autograd_here().ready().retrieve(context_id)


_RPC: dict[str, Callable[..., Any]] = {
    "_is_current_rpc_agent_set": _is_set,
    "_get_current_rpc_agent": agent_here,
    "_set_and_start_rpc_agent": _set_and_start,
    "_reset_current_rpc_agent": _reset,
    "_delete_all_user_and_unforked_owner_rrefs": _flush,
    "_destroy_rref_context": _destroy,
    "_rref_context_get_debug_info": lambda: rrefs_here().debug_info(),
    "_cleanup_python_rpc_handler": _nothing,
    "_invoke_rpc_builtin": calls.invoke_rpc_builtin,
    "_invoke_rpc_python_udf": calls.invoke_rpc_python_udf,
    "_invoke_rpc_torchscript": calls.invoke_rpc_torchscript,
    "_invoke_remote_builtin": calls.invoke_remote_builtin,
    "_invoke_remote_python_udf": calls.invoke_remote_python_udf,
    "_invoke_remote_torchscript": calls.invoke_remote_torchscript,
    "get_rpc_timeout": _timeout,
    "_set_rpc_timeout": _set_timeout,
    "enable_gil_profiling": _profile_gil,
    "_set_profiler_node_id": _nothing,
}
_AUTOGRAD: dict[str, Callable[..., Any]] = {
    "_init": lambda worker_id: autograd_here().init(worker_id),
    "_new_context": lambda: autograd_here().ready().new_context(),
    "_release_context": lambda context_id: release(autograd_here().ready(), rpc_here().agent, context_id),
    "_get_max_id": lambda: autograd_here().ready().max_id,
    "_is_valid_context": _valid,
    "_retrieve_context": lambda context_id: autograd_here().ready().retrieve(context_id),
    "_current_context": lambda: autograd_here().ready().current(),
    "_get_debug_info": _debug_info,
    "backward": _backward,
    "get_gradients": lambda context_id: dict(autograd_here().ready().retrieve(context_id).grads),
}
_CLASSES: dict[str, type] = {
    "PyRRef": SimPyRRef,
    "TensorPipeAgent": SimAgent,
    "DistAutogradContext": Context,
    "RemoteProfilerManager": ProfilerKeys,
}


def _without_task(simulated: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: simulated(*args, **kwargs)


_LED = {name: for_ranks(_REAL[name], _without_task(simulated)) for name, simulated in {**_RPC, **_AUTOGRAD}.items()}

_NAMES = (*_LED, *_CLASSES, "RRef")
ALIASES.also(*_NAMES)


class _Rendezvous:
    """Replacement for the gloo group by which the workers find each other."""

    def __init__(self, task: RankTask, store: Any, rank: int, world_size: int) -> None:
        self.workers = workers_of(task.port, store)
        self._rank, self._size = rank, world_size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def barrier(self) -> _Rendezvous:
        self.workers.meet("barrier", self._rank, self._size, None, "init_rpc: the other workers")
        return self

    def wait(self) -> None:
        """Do nothing: the rendezvous is complete."""

    def gather(self, value: Any) -> list[Any]:
        return list(self.workers.meet("devices", self._rank, self._size, value, "init_rpc: the other workers").values())


def _exchange(_: RankTask, name: str, device_count: int, device_maps: Any, devices: Any, group: Any) -> Any:
    gathered = group.gather((name, device_count, device_maps, devices))
    names = [name for name, _, _, _ in gathered]
    counts = {name: count for name, count, _, _ in gathered}
    maps = {name: device_total for name, _, device_total, _ in gathered}
    all_devices = {name: device_total for name, _, _, device_total in gathered}
    rpc_names.VALIDATE_DEVICE_MAPS.get()(names, counts, maps, all_devices)
    back = rpc_names.CREATE_REVERSE_MAPPING.get()(name, names, maps)
    return back, rpc_names.CREATE_DEVICE_LIST.get()(devices, device_maps, back)


_OPTIMIZER = "torch.distributed.optim.optimizer"


def _locks() -> list[tuple[Any, str, Any]]:
    """Return patches for locks of torch's RPC. DistributedOptimizer is patched only if imported, because importing
    it takes a second.
    """
    locks = [
        *rpc_names.ALL_GATHER_DICT_LOCK.replaced_by(threading._PyRLock()),  # type: ignore[attr-defined]
        *rpc_names.INIT_COUNTER_LOCK.replaced_by(CoopLock()),
    ]
    module = sys.modules.get(_OPTIMIZER)
    return locks if module is None else [*locks, (module._LocalOptimizer, "global_lock", CoopLock())]


def give_locks() -> None:
    """Create new locks after the patches are installed, because a rank of the last simulation may have ended with
    one held.
    """
    for holder, name, lock in _locks():
        setattr(holder, name, lock)


def rpc_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    SimAgent.serve = staticmethod(serve)
    replaced: dict[int, tuple[str, Any]] = {}
    for name, call in _LED.items():
        replaced[id(_REAL[name])] = name, call
    for name, kind in _CLASSES.items():
        replaced[id(_REAL[name])] = name, kind
    replaced[id(rpc.RRef)] = "RRef", SimRRef
    patches: list[tuple[Any, str, Any]] = []
    for _, holder, name, value in [*ALIASES.of(*_NAMES), *_in_c()]:
        replacement = replaced.get(id(value))
        if replacement is not None and replacement[0] == name and _may_have(holder):
            patches.append((holder, name, replacement[1]))
    real_rref = rpc.RRef
    return [
        *{(id(holder), name): (holder, name, value) for holder, name, value in patches}.values(),
        (real_rref, "__new__", staticmethod(for_ranks(real_rref.__new__, _new_rref))),
        *name_for_ranks(rpc_names.INIT_PROCESS_GROUP, _Rendezvous),
        *name_for_ranks(rpc_names.TENSORPIPE_EXCHANGE_AND_CHECK_ALL_DEVICE_MAPS, _exchange),
        *_locks(),
        *record_patches(),
        *profiling_patches(),
        *rpc_names.SCRIPT_IMPL.replaced_by(script),
        (torch.jit.ScriptFunction, "__call__", call_script),
        *rpc_names.QUALIFIED_NAME.replaced_by(qualified_name),
        *COLLECT_ALL.replaced_by(collect_all),
    ]


def _new_rref(_: RankTask, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replacement for the class RRef in modules imported before the simulation."""
    return SimRRef(*args, **kwargs)


def _in_c() -> Iterator[tuple[str, Any, str, Any]]:
    """Return C++ modules, which are not all in `sys.modules`."""
    for holder in (_C_rpc, _C_autograd):
        space = vars(holder)
        yield from ((holder.__name__, holder, name, space[name]) for name in _NAMES if name in space)


def _may_have(module: Any) -> bool:
    return isinstance(module, ModuleType) and module.__name__.startswith("torch.")
