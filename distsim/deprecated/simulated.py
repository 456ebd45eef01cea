"""Dropped names in a simulation: how processes without ranks meet in virtual time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distsim.deprecated import in_torch
from distsim.deprecated.in_torch import OldMeeting, assigned, take_place
from distsim.sim.c10d.backend import backend_requested, joining
from distsim.sim.c10d.stores import SimStore
from distsim.sim.isolation.for_ranks import patch_for_ranks
from distsim.sim.isolation.process import RankTask, require_task


def patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the time of a simulation."""
    return [
        (in_torch, "on_backend_requested", backend_requested),
        (in_torch, "begins", _begins),
        patch_for_ranks(in_torch, "meet", _meet),
        patch_for_ranks(in_torch, "note", lambda task, text: task.port.note(text)),
        *in_torch.torch_patches(),
    ]


def _begins(meeting: OldMeeting, rank: int) -> None:
    """Note that a process joins its job with a given rank, without torch's rendezvous."""
    joining(meeting.world_size)
    require_task().process.groups.job = meeting.name


def _meet(task: RankTask, meeting: OldMeeting, timeout: timedelta) -> tuple[Any, int]:
    """Meet at a store that all ranks reach, for as long as the job lives."""
    port = task.port
    address = ("multicast", (meeting.address, meeting.port))
    values = port.shared.open_store(address)
    rank, store = take_place(meeting, SimStore(values, timeout))
    keys = [f"process {i}" for i in range(meeting.world_size)]
    store.set(keys[rank], str(meeting.rank))
    if port.traced.not_all and meeting.rank >= 0:
        return store, meeting.rank  # of ranks that do the same only some come
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        came = sum(store.check([key]) for key in keys)
        raise dist.DistNetworkError(
            f"{came} of {meeting.world_size} processes reached {meeting.url} within {timeout.total_seconds():g} s"
        ) from None
    return store, assigned(meeting, [int(store.get(key)) for key in keys])[rank]
