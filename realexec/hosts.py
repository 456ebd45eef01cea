"""Introducing the monitors of several hosts to each other through the job's store."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from distsim.debug.jobdir import write_whole

__all__ = ["introduce_monitors"]

KEY = "distsim/monitor"
PATIENCE_S = 60.0
POLL_S = 0.05
LEAVE_S = 2.0


def introduce_monitors(directory: Path, rank: int) -> None:
    """Rank 0 makes its monitor the leader and says where it is; the first rank of each other host listens.

    In a thread, over a connection of its own: the job's store may be held by a rank that waits on it.
    """
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    if rank != 0 and not first:
        return
    store = own_store()
    if store is None:
        return
    ended = threading.Event()
    target = _lead if rank == 0 else _follow
    thread = threading.Thread(target=target, args=(directory, store, ended), name="distsim-introduction", daemon=True)

    def leave() -> None:
        # A thread that Python 3.11 finds inside the store's C++ when it ends takes the process down (SIGABRT).
        ended.set()
        thread.join(LEAVE_S)

    atexit.register(leave)
    thread.start()


def own_store() -> Any:
    """A new connection to the job's TCPStore; other stores are used as they are."""
    try:
        base = c10d._get_default_store()
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        if isinstance(base, dist.TCPStore):
            return dist.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
        return base
    except (RuntimeError, ValueError):
        return None


def _lead(directory: Path, store: Any, ended: threading.Event) -> None:
    write_whole(directory / "lead.json", "{}")
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            said = dict(json.loads((directory / "monitor.json").read_text()))
        except (OSError, ValueError, TypeError):
            if ended.wait(POLL_S):
                return
            continue
        said["address"] = os.environ.get("MASTER_ADDR") or store.host
        store.set(_key(), json.dumps(said))
        return


def _follow(directory: Path, store: Any, ended: threading.Event) -> None:
    deadline = time.monotonic() + PATIENCE_S
    try:
        while not store.check([_key()]):
            if ended.wait(POLL_S) or time.monotonic() > deadline:
                return
        said = store.get(_key()).decode()
    except RuntimeError:  # no leader: this host's monitor judges by itself
        return
    write_whole(directory / "follow.json", said)


def _key() -> str:
    return f"{KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
