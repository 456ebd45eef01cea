"""A multicast address in a simulation: a store that all ranks reach, for as long as the job lives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distsim.deprecated import in_torch, multicast
from distsim.deprecated.ranks import Meeting, assigned, take_place
from distsim.sim.c10d.stores.store import KeyValues, SimStore
from distsim.sim.isolation.process import current_task, require_task

__all__ = ["meeting_patches"]

_real_meet = multicast.meet
_real_note = in_torch.note


def _meet(meeting: Meeting, timeout: timedelta) -> tuple[Any, int]:
    if current_task() is None:
        return _real_meet(meeting, timeout)
    world = require_task().world
    address = ("multicast", (meeting.address, meeting.port))
    values = world.stores.get(address)
    if values is None:
        values = world.stores[address] = KeyValues(world.env)
    place, store = take_place(meeting, SimStore(values, timeout))
    keys = [f"process {i}" for i in range(meeting.world_size)]
    store.set(keys[place], str(meeting.rank))
    if world.traced.not_all and meeting.rank >= 0:
        return store, meeting.rank  # of ranks that do the same only some come
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        came = sum(store.check([key]) for key in keys)
        raise dist.DistNetworkError(
            f"{came} of {meeting.world_size} processes came to {meeting.url} in {timeout.total_seconds():g} s"
        ) from None
    return store, assigned(meeting, [int(store.get(key)) for key in keys])[place]


def _note(text: str) -> None:
    task = current_task()
    if task is None:
        _real_note(text)
    else:
        task.world.note(text)


def meeting_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) while a simulation runs."""
    return [(multicast, "meet", _meet), (in_torch, "note", _note)]
