"""Collects all patches of a simulation, and applies and removes them together."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.data

from distsim.debug.diagnosis.silent.collect.hooks import global_hooks
from distsim.debug.evidence.watched_source import watch_suppress, watch_tasks
from distsim.errors import UsageError
from distsim.shelves import shelf
from distsim.sim.c10d.backend import backend_patches, register_backend
from distsim.sim.c10d.work import future_patches
from distsim.sim.device.cuda_api import (
    cuda_patches,
    give_back_dcp,
    give_back_kernels,
    give_back_warning,
    register_kernels,
    time_dcp,
)
from distsim.sim.device.gpu import prepare
from distsim.sim.device.hooks import accepted, install_stand_in, tested
from distsim.sim.isolation.clock import clock_patches, datetime_clock, random_patches
from distsim.sim.isolation.environ import child_patches, environ_patches
from distsim.sim.isolation.global_flags import HostState, switch_patches
from distsim.sim.isolation.io_barrier import socket_patches
from distsim.sim.isolation.modules.modules import RankModules, decide, import_patches
from distsim.sim.isolation.modules.own_code import caught_by_ranks, refuse_cuda_builds
from distsim.sim.isolation.modules.patch_table import Patch, PatchTable
from distsim.sim.isolation.output import StreamProxy, forget_levels, log_patches, outlive_threads
from distsim.sim.isolation.process import Notes, current_task
from distsim.sim.isolation.torch_state.distributed import mesh_patches
from distsim.sim.isolation.torch_state.operators import forget_operators, operator_patches, optimizer_patches
from distsim.sim.observe.profiler import profiler_patches
from distsim.sim.observe.silent import current_collector, silent_patches
from distsim.sim.observe.training import noticed
from distsim.sim.processes.hosts import host_patches
from distsim.sim.processes.ipc import sharing_patches
from distsim.sim.processes.process_settings import unarmed_patches, usage_patches
from distsim.sim.processes.signals import pid_patches, signal_patches
from distsim.sim.processes.spawn import spawn_patches, start_rank
from distsim.sim.processes.threads import thread_patches
from distsim.torch_compat.compiler import SET_IS_IN_MODE_WITHOUT_IGNORE_COMPILE_INTERNALS
from distsim.torch_compat.device import MODE_FLAGS
from distsim.torch_compat.groups import SET_THREAD_ISOLATION_MODE
from distsim.torch_compat.releases import unsupported
from distsim.torch_compat.state import LOADER_ITERATOR

_set_thread_isolation_mode = SET_THREAD_ISOLATION_MODE.get()


@contextlib.contextmanager
def simulation(gpus: bool, silent: bool = False) -> Iterator[HostState]:
    """Return a context in which Python and torch behave as simulated ranks expect, for one simulation in this
    process.

    With *gpus*, torch accepts CUDA tensors. With *silent*, torch reports steps to the ranks' collectors.
    """
    if _active[0]:
        raise UsageError(
            "a simulation already runs in this process: distsim.simulate and run_program cannot be called by a rank"
        )
    # torch's counts of dispatch modes, which are restored because ours are entered and left in any order
    flags = {name: flag.get() for name, flag in MODE_FLAGS.items() if flag.exists()}
    environ, argv, path = os.environ._data, sys.argv, list(sys.path)  # type: ignore[attr-defined]
    main, rng = sys.modules["__main__"], torch.get_rng_state()
    streams = sys.stdout, sys.stderr
    threads = torch.get_num_threads()
    try:
        _active[0] = True
        register_backend()
        modules = RankModules()
        decide(modules)
        outlive_threads()
        forget_levels()
        all_patches()
        _TABLE.put(shelf("simulated rpc").give_locks)
        sys.stdout, sys.stderr = StreamProxy(streams[0], "stdout"), StreamProxy(streams[1], "stderr")
        _set_thread_isolation_mode(True)
        datetime_clock(virtual=True)
        install_stand_in()
        if gpus:
            shelf("libraries")  # before the ranks' imports ask it
            prepare(tested)
            prepare(register_kernels)
            prepare(time_dcp)
            refuse_cuda_builds()
        host = HostState(environ, modules.shared)
        with (
            noticed(),
            global_hooks(current_collector) if silent else contextlib.nullcontext(),
            caught_by_ranks(),
            watch_suppress(),
            watch_tasks(),
            host.torch.watching(),
            accepted() if gpus else contextlib.nullcontext(),
        ):
            yield host
    finally:
        give_back_kernels()
        give_back_dcp()
        give_back_warning()
        datetime_clock(virtual=False)
        _set_thread_isolation_mode(False)
        sys.stdout, sys.stderr = streams
        _TABLE.take_away()
        forget_operators()
        decide(None)
        for name, flag in flags.items():
            setattr(MODE_FLAGS[name].holder(), name, flag)
        _tell_guards()
        os.environ._data = os.environb._data = environ  # type: ignore[attr-defined]
        sys.argv, sys.path[:] = argv, path
        sys.modules["__main__"] = main
        torch.set_rng_state(rng)
        torch.set_num_threads(threads)
        _active[0] = False


def all_patches() -> list[Patch]:
    """Return (holder, attribute, replacement) of everything that is patched.

    A replacement has the signature, names and docstring of its original: Lightning rebuilds a data loader by its
    `__init__`'s.
    """
    shelf("simulated rpc")  # what it imports of torch is looked through as well
    try:
        return _TABLE.look()
    except AttributeError as error:  # a torch that is not tested lacks a public name
        raise unsupported(error) from error


_active = [False]


def _tell_guards() -> None:
    """Update one of the flags that Dynamo's guards keep in C++."""
    tell = SET_IS_IN_MODE_WITHOUT_IGNORE_COMPILE_INTERNALS.get(None)
    if tell is not None:
        tell(MODE_FLAGS["_is_in_any_mode_without_ignore_compile_internals"].get())


def _loader_patches() -> list[Patch]:
    """Return a data loader's workers."""
    loader = torch.utils.data.DataLoader
    real_init = loader.__init__
    positions = tuple(inspect.signature(real_init).parameters)[1:]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is not None:
            given = {**dict(zip(positions, args, strict=False)), **kwargs}
            if int(given.get("num_workers") or 0) > 0:
                task.port.note("DataLoader workers run inside their rank's own process in a simulation (num_workers=0)")
                context = given.get("multiprocessing_context")
                method = context if isinstance(context, str) or context is None else context.get_start_method()
                self.worker_start_method = method or "fork"
                for name in (
                    "num_workers",
                    "prefetch_factor",
                    "persistent_workers",
                    "timeout",
                    "multiprocessing_context",
                ):
                    given.pop(name, None)
                args, kwargs = (), given
        real_init(self, *args, **kwargs)

    iterator = LOADER_ITERATOR.get()
    real_begin = iterator.__init__

    def begin(self: Any, of: Any) -> None:
        real_begin(self, of)
        task = current_task()
        method = getattr(of, "worker_start_method", "")
        if task is not None and method:
            self._dataset_fetcher.fetch = _as_worker(task.process.notes, method, self._dataset_fetcher.fetch)

    return [(loader, "__init__", init), (iterator, "__init__", begin)]


def _as_worker(notes: Notes, method: str, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Mark the process as a loader's worker, so that process groups, which do not survive a fork, know it."""

    def fetch_as_worker(batch: Any) -> Any:
        notes.in_worker = method
        try:
            return fetch(batch)
        finally:
            notes.in_worker = ""

    return fetch_as_worker


_TABLE = PatchTable(
    clock_patches,
    thread_patches,
    backend_patches,
    spawn_patches,
    future_patches,
    random_patches,
    environ_patches,
    partial(child_patches, start_rank),
    pid_patches,
    host_patches,
    socket_patches,
    switch_patches,
    signal_patches,
    unarmed_patches,
    usage_patches,
    sharing_patches,
    profiler_patches,
    operator_patches,
    optimizer_patches,
    mesh_patches,
    _loader_patches,
    cuda_patches,
    import_patches,
    log_patches,
    silent_patches,
    lambda: shelf("simulated rpc").rpc_patches(),
    lambda: shelf("dropped names, simulated").patches(),
)
