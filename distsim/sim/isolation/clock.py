"""Virtual time and random numbers: the clocks and generators of Python and torch that each simulated process has."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import random
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from distsim.sim.isolation.for_ranks import for_ranks, patch_for_ranks
from distsim.sim.isolation.modules.aliases import ALIASES, CLOCKS
from distsim.sim.isolation.process import RankTask, current_task
from distsim.sim.kernel.task import current_process

EPOCH_S = 1_700_000_000.0
"""Value of `time.time()` at the start of a simulation, fixed so that runs are repeatable."""

_REAL_TIME = ("distsim.", "simpy", "subprocess", "selectors", "socket", "_pytest", "pytest", "xdist", "execnet")
"""Modules that keep the real clock: ours, and those that wait for things outside the simulation."""


def _seconds(origin_s: float, task: RankTask) -> float:
    return origin_s + task.time_query()


def _nanoseconds(origin_s: float, task: RankTask) -> int:
    return round((origin_s + task.time_query()) * 1e9)


def _sleep(task: RankTask, seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    task.process.family.real_children.sleep(seconds)
    task.sleep(seconds)


_ORIGINS = {time.CLOCK_REALTIME: EPOCH_S}


def _now_by_default(real: Callable[..., Any], task: RankTask, seconds: float | None = None) -> Any:
    """Answer as `time.localtime` and similar functions, which without an argument use the current time."""
    return real(EPOCH_S + task.time_query() if seconds is None else seconds)


def clock_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for every clock, also under names that modules have imported."""
    patches = [patch_for_ranks(time, "sleep", _sleep)]
    replaced: dict[int, Any] = {id(time.sleep): patches[0][2]}
    for name, origin_s in (
        ("time", EPOCH_S),
        ("perf_counter", 0.0),
        ("monotonic", 0.0),
        ("process_time", 0.0),
        ("thread_time", 0.0),
    ):
        for real_name, wrap in ((name, _seconds), (name + "_ns", _nanoseconds)):
            patches.append(patch_for_ranks(time, real_name, partial(wrap, origin_s)))
            replaced[id(getattr(time, real_name))] = patches[-1][2]
    for name in ("localtime", "gmtime", "ctime"):
        patches.append(patch_for_ranks(time, name, partial(_now_by_default, getattr(time, name))))
    real_strftime, real_asctime = time.strftime, time.asctime

    def strftime(form: str, when: Any = None) -> str:
        return real_strftime(form, time.localtime() if when is None else when)

    def asctime(when: Any = None) -> str:
        return real_asctime(time.localtime() if when is None else when)

    patches += [
        (time, "strftime", strftime),
        (time, "asctime", asctime),
        patch_for_ranks(time, "clock_gettime", lambda task, clock: _seconds(_ORIGINS.get(clock, 0.0), task)),
        patch_for_ranks(time, "clock_gettime_ns", lambda task, clock: _nanoseconds(_ORIGINS.get(clock, 0.0), task)),
    ]
    virtual = replaced[id(time.perf_counter)]
    for function in (timeit.Timer.__init__, timeit.timeit, timeit.repeat):
        defaults: tuple[Any, ...] = function.__defaults__ or ()
        patches.append((function, "__defaults__", tuple(replaced.get(id(value), value) for value in defaults)))
    patches.append((timeit, "default_timer", virtual))
    return patches + _aliases(replaced)


def _aliases(replaced: dict[int, Any]) -> list[tuple[Any, str, Any]]:
    """Return patches for names such as `from time import monotonic as _time` in modules that are already imported."""
    return [
        (module, alias, replaced[id(value)])
        for name, module, alias, value in ALIASES.of(*CLOCKS)
        if id(value) in replaced and module is not time and not name.startswith(_REAL_TIME)
    ]


# `datetime.datetime` is a C type with a clock of its own. A subclass would not be the class that
# pickle, isinstance and C code know; so its two class methods themselves are exchanged.

_methods: dict[str, Any] = gc.get_referents(datetime.datetime.__dict__)[0]
_real_now, _real_utcnow = _methods["now"], _methods["utcnow"]


def _now(cls: Any, tz: Any = None) -> Any:
    task = current_task()
    if task is None:
        return _real_now.__get__(None, cls)(tz)
    return cls.fromtimestamp(EPOCH_S + task.time_query(), tz)


def _utcnow(cls: Any) -> Any:
    task = current_task()
    if task is None:
        return _real_utcnow.__get__(None, cls)()
    return cls.fromtimestamp(EPOCH_S + task.time_query(), datetime.UTC).replace(tzinfo=None)


def datetime_clock(virtual: bool) -> None:
    """Make `datetime.now` and `utcnow` return virtual time inside ranks, or stop doing so."""
    _methods["now"] = classmethod(_now) if virtual else _real_now
    _methods["utcnow"] = classmethod(_utcnow) if virtual else _real_utcnow
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Return a context whose draws from `random` do not change the surrounding program's sequence."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def random_patches() -> list[tuple[Any, str, Any]]:
    """Return patches of everything that draws random numbers.

    `random` and `numpy.random` use the running process's own generators, and the operating system's random numbers
    come from its seed.
    """
    patches: list[tuple[Any, str, Any]] = []
    for name, bound in list(vars(random).items()):
        if getattr(bound, "__self__", None) is random._inst:
            patches.append((random, name, _per_process(name, bound, lambda p: p.random)))
    legacy = np.random.mtrand._rand
    for name, bound in list(vars(np.random).items()):
        if getattr(bound, "__self__", None) is legacy:
            patches.append((np.random, name, _per_process(name, bound, _numpy_generator)))
    for name, method in (("seed", "seed"), ("ranf", "random_sample"), ("sample", "random_sample")):
        patches.append((np.random, name, _per_process(method, getattr(np.random, name), _numpy_generator)))
    real_seed = random.Random.seed
    urandom = for_ranks(os.urandom, lambda task, size: task.process.entropy.randbytes(size))

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        process = current_process()
        real_seed(self, a if a is not None or process is None else process.entropy.getrandbits(64), version)

    def torch_seed(task: RankTask) -> int:
        value: int = task.process.entropy.getrandbits(63)
        torch.manual_seed(value)
        return value

    patches += [
        (os, "urandom", urandom),
        (random, "_urandom", urandom),
        (random.Random, "seed", seed),
        patch_for_ranks(torch, "seed", torch_seed),
        patch_for_ranks(sys.modules["torch.random"], "seed", torch_seed),
    ]
    return patches


def _numpy_generator(process: Any) -> Any:
    if process.numpy_random is None:
        process.numpy_random = np.random.RandomState(process.entropy.getrandbits(32))
    return process.numpy_random


def _per_process(name: str, bound: Callable[..., Any], generator: Callable[[Any], Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        process = current_process()
        return bound(*args, **kwargs) if process is None else getattr(generator(process), name)(*args, **kwargs)

    call.__name__ = name
    return call
