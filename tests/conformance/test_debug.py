"""Rows 12 and 13: monitored_barrier, the debug level, and the errors."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance.arms import Conform
from conformance.plain import error_of, says


def one_is_missing(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 names the first that did not come."""
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group()
    if rank in (0, 2):
        found["error"] = error_of(dist.monitored_barrier, group, timedelta(milliseconds=500))
    dist.barrier()
    return found


def all_missing_are_named(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": rank}
    group = dist.new_group()
    if rank == 0:
        try:
            dist.monitored_barrier(group, timedelta(milliseconds=500), wait_all_ranks=True)
        except RuntimeError as error:
            found["type"] = type(error).__name__
            found["names 1"] = "1" in str(error)
            found["names 3"] = "3" in str(error)
    dist.barrier()
    return found


def debug_level(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"at first": str(dist.get_debug_level())}
    for level in (dist.DebugLevel.INFO, dist.DebugLevel.DETAIL, dist.DebugLevel.OFF):
        dist.set_debug_level(level)
        found[f"set {level}"] = str(dist.get_debug_level())
    for text in ("INFO", "DETAIL", "OFF", "detail"):
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = text
        dist.set_debug_level_from_env()
        found[f"env {text}"] = str(dist.get_debug_level())
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "NONSENSE"
    found["env nonsense"] = error_of(dist.set_debug_level_from_env)
    del os.environ["TORCH_DISTRIBUTED_DEBUG"]
    dist.set_debug_level_from_env()
    found["env absent"] = str(dist.get_debug_level())
    found["wrong type"] = error_of(dist.set_debug_level, "INFO")
    return found


def debug_detail(rank: int, world_size: int) -> dict[str, Any]:
    """A healthy program stays healthy under DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    t = torch.tensor([1.0])
    dist.all_reduce(t, group=group)
    dist.broadcast(t, 2, group=group)
    dist.barrier(group)
    dist.set_debug_level(dist.DebugLevel.OFF)
    return {"t": t}


def error_types(rank: int, world_size: int) -> dict[str, Any]:
    kinds = [dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError]
    found: dict[str, Any] = {kind.__name__: [base.__name__ for base in kind.__mro__] for kind in kinds}
    found["queue empty"] = [base.__name__ for base in dist.QueueEmptyError.__mro__]
    found["raised"] = error_of(_raise, dist.DistBackendError("mine"))
    return found


def _raise(error: Exception) -> None:
    raise error


def store_errors(rank: int, world_size: int) -> dict[str, Any]:
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    caught = []
    for kind in (dist.DistStoreError, dist.DistError, RuntimeError):
        try:
            store.wait([f"nothing {rank}"], timedelta(milliseconds=100))
        except kind as error:
            caught.append(type(error).__name__)
    return {"caught": caught}


def shapes_of_errors(rank: int, world_size: int) -> dict[str, Any]:
    """A refused call leaves the group as it was."""
    found: dict[str, Any] = {}
    found["all_gather"] = error_of(dist.all_gather, [torch.zeros(1)], torch.zeros(1))
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    found["still works"] = t
    found["short"] = error_of(dist.all_reduce, torch.ones(2, dtype=torch.int16))
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    found["works again"] = t
    return found


def no_time_at_all(rank: int, world_size: int) -> dict[str, Any]:
    """monitored_barrier(timeout=0) fails at rank 0 and waits for nobody."""
    if rank:
        return {"rank": rank}
    return {"says": says(dist.monitored_barrier, timeout=timedelta(0))}


BODIES = [
    no_time_at_all,
    one_is_missing,
    all_missing_are_named,
    debug_level,
    debug_detail,
    error_types,
    store_errors,
    shapes_of_errors,
]


@pytest.mark.parametrize("body", BODIES)
def test_debugging(conform: Conform, body: Any) -> None:
    """monitored_barrier, debug levels and errors are torch's."""
    conform(body)
