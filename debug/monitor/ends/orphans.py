"""Ranks whose launcher was killed: it takes the store along that they meet in, and nobody tells them."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Protocol

from distsim.debug.evidence.procfs import look
from distsim.debug.monitor.host import Host
from distsim.debug.settings import OnHang, Settings

__all__ = ["ORPHANS_S", "Orphans"]

ORPHANS_S = 10.0
"""Ranks whose launcher was killed while they met have this long to meet all the same."""

SHOWN = 16
"""Process numbers in the line that is said."""


class Watcher(Protocol):
    """The monitor that looks after them."""

    host: Host
    settings: Settings
    aborted: bool

    def _say(self, note: str) -> None: ...

    def abort(self) -> None: ...


class Orphans:
    """Notices that the launcher of a job is gone before the job is over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since: float | None = None
        """When it was seen, and said."""

    def step(self, monitor: Watcher) -> None:
        """Say it once; end ranks that can not meet any more, where a hang is to end the job."""
        host = monitor.host
        if monitor.aborted or not self.launcher_died() or all(host.ended().values()):
            return
        now = time.monotonic()
        meeting = not host.joined() and host.local_world >= host.world_size > 1
        if self._since is None:
            self._since = now
            text = "the launcher is gone (killed?)"
            if meeting:
                text += " while its ranks meet in init_process_group, in a store that was the launcher's: they would "
                text += "wait there until their timeout (10 minutes). Start the job again"
            else:
                pids = sorted({str(host.readers[rank].header.pid) for rank, over in host.ended().items() if not over})
                text += "; its ranks run on, and are watched to their end "
                text += f"(kill {' '.join(pids[:SHOWN])}{' ...' if len(pids) > SHOWN else ''} ends them)"
            monitor._say(text)
        elif meeting and now - self._since > ORPHANS_S and monitor.settings.on_hang is OnHang.ABORT:
            monitor._say(f"its ranks have not met in {ORPHANS_S:.0f} s, and are ended")
            monitor.abort()

    def launcher_died(self) -> bool:
        """There was one on this host, and it has not said that the job is over."""
        try:
            said = json.loads((self._directory / "launcher.json").read_text())
            gone = said.get("host") == platform.node() and look(int(said["pid"]), int(said["start"])) is None
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            return False
        return gone and not (self._directory / "done.json").exists()
