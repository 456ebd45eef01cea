"""Virtual time: inside a rank the clocks of Python answer what the simulated cluster's would."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

from distsim.sim.task import current_task

__all__ = ["clock_patches"]

EPOCH_S = 1_700_000_000.0
"""What `time.time()` answers when a simulation begins: fixed, so that runs are repeatable."""


def _seconds(real: Callable[[], float], origin_s: float) -> Callable[[], float]:
    def clock() -> float:
        task = current_task()
        return real() if task is None else origin_s + task.time_query()

    return clock


def _nanoseconds(real: Callable[[], int], origin_s: float) -> Callable[[], int]:
    def clock() -> int:
        task = current_task()
        return real() if task is None else round((origin_s + task.time_query()) * 1e9)

    return clock


def _sleep(seconds: float) -> None:
    task = current_task()
    if task is None:
        _real_sleep(seconds)
        return
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    task.sleep(seconds)


_real_sleep = time.sleep


def clock_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of every clock."""
    patches: list[tuple[Any, str, Any]] = [
        (time, "time", _seconds(time.time, EPOCH_S)),
        (time, "time_ns", _nanoseconds(time.time_ns, EPOCH_S)),
        (time, "sleep", _sleep),
    ]
    for name in ("perf_counter", "monotonic", "process_time", "thread_time"):
        patches.append((time, name, _seconds(getattr(time, name), 0.0)))
        patches.append((time, name + "_ns", _nanoseconds(getattr(time, name + "_ns"), 0.0)))
    patches.append((timeit, "default_timer", dict((n, r) for h, n, r in patches if h is time)["perf_counter"]))
    return patches
