"""The end of a host's ranks: politely, then not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

from distsim.debug.evidence.procfs import look
from distsim.debug.evidence.rank_state import given_up
from distsim.debug.monitor.host import Host

__all__ = ["end_ranks", "kill"]


def end_ranks(host: Host, grace_s: float) -> None:
    """SIGTERM, at last SIGKILL, to every rank of *host* that still lives; exit handlers of ranks that have raised get
    *grace_s* to save and upload what is left."""
    families = _families(host)
    leaving = {rank for rank, reader in host.readers.items() if given_up(reader)}
    kill(host, signal.SIGTERM, but=leaving)
    _until_ended(host, grace_s, leaving)
    kill(host, signal.SIGTERM)
    _until_ended(host, 2.0, host.readers)
    kill(host, signal.SIGKILL)
    for leader in families:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _families(host: Host) -> list[int]:
    """The ranks' process groups, where each has its own, as the launcher's have: what ranks have started (a data
    loader's workers) would outlive them, and hold the job's output open."""
    pids, alone = [], []
    for reader in host.readers.values():
        pid, ticks = reader.header.pid, reader.header.start_ticks
        with contextlib.suppress(OSError):
            if look(pid, ticks) is not None:
                alone.append(os.getsid(pid) == pid)
            elif look(pid) is not None:
                continue  # another process has the number by now
        pids.append(pid)
    return pids if alone and all(alone) else []


def _until_ended(host: Host, limit_s: float, ranks: Collection[int]) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not all(host.ended()[rank] for rank in ranks):
        time.sleep(0.05)


def kill(host: Host, number: int, but: Collection[int] = ()) -> None:
    """Send a signal to every rank of this host that still lives."""
    for rank, gone in host.ended().items():
        if not gone and rank not in but:
            with contextlib.suppress(OSError):
                os.kill(host.readers[rank].header.pid, number)
