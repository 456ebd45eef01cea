"""Everything that is led elsewhere while a simulation runs, put in place and taken away in one place."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from distsim.debug.records import Phase
from distsim.errors import NotSimulated
from distsim.sim.backend import backend_patches, register_backend
from distsim.sim.clock import clock_patches
from distsim.sim.modules import import_patches, install_finder, remove_finder
from distsim.sim.output import StreamProxy
from distsim.sim.spawn import spawn_patches
from distsim.sim.task import current_process, current_task, require_task
from distsim.sim.threads import thread_patches
from distsim.sim.work import future_patches

__all__ = ["simulation"]

Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Python and torch as simulated ranks see them, for the time of one simulation in this process."""
    if _active[0]:
        raise RuntimeError("a simulation already runs in this process")
    _active[0] = True
    register_backend()
    patches = [
        *clock_patches(),
        *thread_patches(),
        *import_patches(),
        *backend_patches(),
        *spawn_patches(),
        *future_patches(),
        *_random_patches(),
        *_process_patches(),
        *_refusals(),
    ]
    saved = [(holder, name, _get(holder, name)) for holder, name, _ in patches]
    environ, argv, path = os.environ._data, sys.argv, list(sys.path)  # type: ignore[attr-defined]
    main, hook, rng = sys.modules["__main__"], sys.excepthook, torch.get_rng_state()
    streams = sys.stdout, sys.stderr
    threads = torch.get_num_threads()
    finder = install_finder()
    try:
        for holder, name, value in patches:
            setattr(holder, name, value)
        sys.stdout, sys.stderr = StreamProxy(streams[0], "stdout"), StreamProxy(streams[1], "stderr")  # type: ignore[assignment]
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        sys.stdout, sys.stderr = streams
        for holder, name, value in reversed(saved):
            if value is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
        remove_finder(finder)
        os.environ._data = environ  # type: ignore[attr-defined]
        sys.argv, sys.path[:], sys.excepthook = argv, path, hook
        sys.modules["__main__"] = main
        torch.set_rng_state(rng)
        torch.set_num_threads(threads)
        _active[0] = False


_active = [False]
_MISSING = object()


def _get(holder: Any, name: str) -> Any:
    """The attribute as it stands in *holder* itself, descriptors included."""
    return vars(holder).get(name, _MISSING)


def _random_patches() -> list[Patch]:
    """`random` and `numpy.random`: module functions act on the running process's own generator."""
    patches: list[Patch] = []
    for name, bound in list(vars(random).items()):
        if getattr(bound, "__self__", None) is random._inst:  # type: ignore[attr-defined]
            patches.append((random, name, _per_process(name, bound, lambda p: p.random)))
    legacy = np.random.mtrand._rand  # type: ignore[attr-defined]
    for name, bound in list(vars(np.random).items()):
        if getattr(bound, "__self__", None) is legacy:
            patches.append((np.random, name, _per_process(name, bound, _numpy_generator)))
    return patches


def _numpy_generator(process: Any) -> Any:
    if process.numpy_random is None:
        process.numpy_random = np.random.RandomState(process.random.getrandbits(32))
    return process.numpy_random


def _per_process(name: str, bound: Callable[..., Any], generator: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        return bound(*args, **kwargs) if process is None else getattr(generator(process), name)(*args, **kwargs)

    call.__name__ = name
    return call


def _process_patches() -> list[Patch]:
    """What a process does to itself: exits, signals, exit handlers; and its data loader's workers."""
    real_exit, real_kill, real_signal, real_register = os._exit, os.kill, signal.signal, atexit.register
    real_current, real_main = threading.current_thread, threading.main_thread
    loader = torch.utils.data.DataLoader
    real_loader_init = loader.__init__

    def exit_(status: int) -> None:
        task = current_task()
        if task is None:
            real_exit(status)
        else:
            task.world.end_process(task.process, Phase.EXITED, status)

    def abort() -> None:
        task = require_task()
        task.world.end_process(task.process, Phase.KILLED, -signal.SIGABRT, "SIGABRT")

    def kill(pid: int, number: int) -> None:
        task = current_task()
        if task is not None and pid == os.getpid() and number:
            task.world.end_process(task.process, Phase.KILLED, -number, signal.Signals(number).name)
        elif pid > 4_194_304:  # the numbers of simulated processes
            raise NotSimulated("os.kill of another simulated process", "use Process.terminate()")
        else:
            real_kill(pid, number)

    def set_signal(number: Any, handler: Any) -> Any:
        task = current_task()
        if task is None:
            return real_signal(number, handler)
        return task.process.signals.setdefault(number, handler)

    def register(function: Any, *args: Any, **kwargs: Any) -> Any:
        process = current_process()
        if process is None:
            return real_register(function, *args, **kwargs)
        process.at_exit.append((function, args, kwargs))
        return function

    def current_thread() -> threading.Thread:
        task = current_task()
        if task is not None and task is task.process.main_task and task.process.main_thread is not None:
            return task.process.main_thread
        return real_current()

    def main_thread() -> threading.Thread:
        process = current_process()
        return real_main() if process is None or process.main_thread is None else process.main_thread

    def loader_init(self: Any, *args: Any, **kwargs: Any) -> None:
        task = current_task()
        if task is not None:
            names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
            bound = dict(zip(names, args, strict=False))
            if int(kwargs.get("num_workers", bound.get("num_workers", 0)) or 0) > 0:
                task.world.note("DataLoader workers run inside their rank's own process in a simulation (num_workers=0)")
                args = tuple(0 if name == "num_workers" else value for name, value in zip(names, args, strict=False)) + args[6:]
                if "num_workers" in kwargs:
                    kwargs["num_workers"] = 0
                for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
                    kwargs.pop(name, None)
        real_loader_init(self, *args, **kwargs)

    def fork() -> int:
        if current_task() is None:
            return real_fork()
        raise NotSimulated("os.fork", "use multiprocessing.Process")

    real_fork = os.fork
    return [
        (os, "_exit", exit_),
        (os, "abort", abort),
        (os, "kill", kill),
        (os, "fork", fork),
        (signal, "signal", set_signal),
        (atexit, "register", register),
        (threading, "current_thread", current_thread),
        (threading, "main_thread", main_thread),
        (loader, "__init__", loader_init),
    ]


def _refusals() -> list[Patch]:
    """What is refused by name until it is simulated."""
    accelerator = ("use CPU tensors and backend 'gloo'", "accelerator tensors (CUDA)")
    patches: list[Patch] = [
        (torch.cuda, name, _refuse(accelerator[1], accelerator[0], getattr(torch.cuda, name)))
        for name in ("_lazy_init", "set_device", "current_device", "synchronize", "current_stream")
    ]
    # torch's own error log asks for NCCL's version when a call on an nccl group fails
    patches.append((torch.cuda.nccl, "version", lambda: (2, 27, 3)))
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is not None and hasattr(rpc, "init_rpc"):
        refused = _refuse("torch.distributed.rpc.init_rpc", "run it for real with --on gloo", rpc.init_rpc)
        patches.append((rpc, "init_rpc", refused))
    return patches


def _refuse(call: str, remedy: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if current_task() is None:
            return real(*args, **kwargs)
        raise NotSimulated(call, remedy)

    return refuse
