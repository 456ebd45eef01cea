"""Functions that answer a rank one way and everybody else another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from distsim.errors import NotSimulated
from distsim.sim.device.gpu import Accelerators, Device
from distsim.sim.device.streams import accelerators_of, current_device
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.isolation.wraps import refusing_class
from distsim.torch_compat.cuda_api import ACCELERATOR, CUDA, PARSE_VISIBLE_DEVICES
from distsim.torch_compat.names import Name

__all__ = [
    "Patch",
    "accelerator_function",
    "accelerators",
    "cuda_function",
    "for_ranks",
    "gpu",
    "indexed",
    "only_ranks",
    "refused",
    "refused_function",
    "visible_devices",
    "with_gpus",
]

_parse_visible_devices = PARSE_VISIBLE_DEVICES.get()

Patch = tuple[Any, str, Any]


def for_ranks(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """*ours* for a rank, with its task in front; *real* for everybody else."""

    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        return real(*args, **kwargs) if task is None else ours(task, *args, **kwargs)

    return call


def only_ranks(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """*ours* for a rank; for everybody else what a torch without CUDA says."""

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None:
            raise AssertionError(f"Torch not compiled with CUDA enabled ({name})")
        return ours(task, *args, **kwargs)

    return call


def with_gpus(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """*ours* for a rank on a cluster that has GPUs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        if task is None or not visible_devices(task):
            return real(*args, **kwargs)
        return ours(task, *args, **kwargs)

    return call


def refused(call: str, remedy: str, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """What stands for *real* (a function or a class) and raises for a rank: *call* is not simulated."""
    if isinstance(real, type):
        return refusing_class(real, lambda: NotSimulated(call, remedy))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if current_task() is None and real is not None:
            return real(*args, **kwargs)
        raise NotSimulated(call, remedy)

    return refuse


def cuda_function(name: str, answer: Callable[..., Any]) -> Patch:
    """The patch of `torch._C._cuda_*name*`, which a torch without CUDA lacks."""
    function = CUDA[name]
    real = function.get(None)
    holder = function.holder()
    return holder, function.attribute, only_ranks(name, answer) if real is None else for_ranks(real, answer)


def accelerator_function(name: str, answer: Callable[..., Any]) -> list[Patch]:
    """The patch of `torch._C._accelerator_*name*`, where this torch has it."""
    function = ACCELERATOR[name]
    return function.replaced_by(with_gpus(function.get(None), answer))


def refused_function(function: Name, call: str, remedy: str) -> Patch:
    """The patch of a function of C++ that refuses *call* for a rank."""
    return function.holder(), function.attribute, refused(call, remedy, function.get(None))


def visible_devices(task: RankTask) -> int:
    """How many GPUs the process sees: those of its node, or as many as it has left itself in CUDA_VISIBLE_DEVICES."""
    found = task.process.accelerators
    if found is None:
        return 0
    if not found.used and b"CUDA_VISIBLE_DEVICES" in task.process.changed_environ:
        chosen = _parse_visible_devices()
        found.count = len([one for one in chosen if isinstance(one, str) or one < found.physical])
    return int(found.count)


def accelerators(task: RankTask) -> Accelerators:
    """The GPUs of the rank, which it uses from now on."""
    found = accelerators_of(task.process)
    found.begin()
    return found


def indexed(task: RankTask, index: int | None) -> int:
    return current_device(task) if index is None or index < 0 else index


def gpu(task: RankTask, index: int | None = None) -> Device:
    """GPU *index* of the rank; None or a negative number: the current one."""
    return accelerators(task)[indexed(task, index)]
