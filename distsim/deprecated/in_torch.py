"""Puts dropped parts of torch.distributed back into it, for the time of a simulation, and under the guard.

Programs call torch's own names, so these are replaced: the backend `tcp`, `init_process_group` without ranks, the
collectives of several devices per rank.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distsim.deprecated import multigpu, rendezvous
from distsim.deprecated.rendezvous import OldMeeting, meeting_at, take_place
from distsim.torch_compat.groups import PLUGINS

__all__ = ["begins", "known_backend", "note", "on_backend_requested", "torch_patches", "with_ranks"]

_plugins = PLUGINS.get()

GLOO_FOR_TCP = "backend 'tcp', which torch has dropped, is served by gloo"


def note(text: str) -> None:
    """Warn the user, at the calling line, about a difference from the program's request; a simulation adds the warning
    to its report."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "distsim.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def begins(meeting: OldMeeting, rank: int) -> None:
    """Note that this process now has a rank and is about to join, so that the guard creates its flight record."""


def on_backend_requested(backend: Any) -> None:
    """Note on which backend the program requests its default group; a simulation replaces this function."""


def known_backend(backend: Any) -> Any:
    """Return *backend*, or gloo if it is `tcp`."""
    if isinstance(backend, str) and backend.lower() == "tcp" and "tcp" not in _plugins:
        note(GLOO_FOR_TCP)
        return c10d.Backend.GLOO
    return backend


def with_ranks(
    backend: Any, init_method: Any, timeout: timedelta | None, world_size: int, rank: int, group_name: str
) -> dict[str, Any]:
    """Return additional arguments for torch's init_process_group: where the processes meet, and the rank of this
    one.

    The result is empty if torch finds out by itself. MPI assigns its own ranks. At a multicast address this waits
    for the others.
    """
    if isinstance(backend, str) and backend.lower() == "mpi":
        return {}
    meeting = meeting_at(init_method, rank, world_size, group_name)
    if meeting is None:
        return {}
    if meeting.address:
        store, rank = rendezvous.meet(meeting, timeout or c10d.default_pg_timeout)
    else:
        turn_rank, store = take_place(meeting, dist.FileStore(meeting.path, meeting.world_size))
        rank = turn_rank if meeting.rank < 0 else meeting.rank
    begins(meeting, rank)
    return {"init_method": None, "store": store, "rank": rank, "world_size": meeting.world_size}


def torch_patches() -> list[tuple[Any, str, Any]]:
    """Return (holder, attribute, replacement) of everything that is patched.

    The public init_process_group stays the same object, for modules that have imported it; the function within its
    decorator is exchanged.
    """
    patches: list[tuple[Any, str, Any]] = [(c10d.Backend, "__new__", _backend(c10d.Backend.__new__))]
    public = c10d.init_process_group
    cells = dict(zip(public.__code__.co_freevars, public.__closure__ or (), strict=True))
    if "func" in cells:
        patches.append((cells["func"], "cell_contents", _init(cells["func"].cell_contents)))
    for name in multigpu.__all__:
        if not hasattr(c10d, name):  # torch before 2.2
            patches += [(holder, name, getattr(multigpu, name)) for holder in (c10d, dist)]
    return patches


def _backend(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def new(cls: type, name: Any) -> Any:
        return original(cls, known_backend(name))

    return staticmethod(new)


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        keywords: dict[str, Any] = {
            "init_method": init_method,
            "timeout": timeout,
            "world_size": world_size,
            "rank": rank,
            "store": store,
            "group_name": group_name,
        }
        on_backend_requested(backend)
        if store is None and c10d.GroupMember.WORLD is None:
            keywords |= with_ranks(backend, init_method, timeout, world_size, rank, group_name)
        original(backend, *keywords.values(), *args, **kwargs)

    return init_process_group
