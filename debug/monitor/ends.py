"""Ends ranks that do not end themselves.

After a hang, the ranks of a host may be ended, by SIGTERM first. A job that still makes calls is not ended for
being slow, unless the user has set a limit. Ranks whose launcher was killed are orphans: their store ended with the
launcher, which they do not notice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from distsim.debug.evidence.processes import launcher_of, look
from distsim.debug.evidence.rank_state import given_up
from distsim.debug.monitor.host import Host
from distsim.debug.monitor.job_report import JobReport
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Proof
from distsim.debug.settings import OnHang, Settings

GOES_ON_S = 10.0
"""Seconds within which some rank has made or ended a call in a job that makes progress."""
BY_THE_LIMIT = (
    "Other ranks still make calls, so this is not proof that it never comes: it is a hang by the limit you set "
    "(--hang-after)."
)
ORPHANS_S = 10.0
"""Time in seconds that ranks have to complete their rendezvous after their launcher was killed."""

SHOWN = 16
"""Maximum number of process ids in a line."""


def end_ranks(host: Host, grace_s: float) -> None:
    """Send SIGTERM, and finally SIGKILL, to every living rank of *host*.

    Exit handlers of ranks that have raised get *grace_s* seconds to save and upload their data.
    """
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
    """Return the ranks' process groups, where each has its own, as the launcher's have: what ranks have started (a
    data loader's workers) would outlive them, and hold the job's output open.
    """
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


def without_guesses(
    diagnoses: Sequence[Diagnosis], settings: Settings, still_s: float, given_up: Collection[int] = ()
) -> list[Diagnosis]:
    """Return the *diagnoses* that still hold if no rank has made or ended a call for *still_s*.

    If the user has set no limit, a wait that is only long does not end a job in which some rank has made a call in
    that time, because torch's own timeout may be longer than our default. Such a diagnosis is left out, or is a
    warning while calls continue. A wait of the ranks that have *given_up*, because that timeout is over, is no guess.
    """
    if settings.hang_after_s is not None or still_s >= settings.patience_s:
        return list(diagnoses)
    guesses = [d.proof is Proof.PATIENCE and set(given_up).isdisjoint(d.victims) for d in diagnoses]
    if still_s > GOES_ON_S:
        return [d for d, is_guess in zip(diagnoses, guesses, strict=True) if not is_guess]
    return [replace(d, proof=Proof.NOT_YET) if guess else d for d, guess in zip(diagnoses, guesses, strict=True)]


def among_moving(diagnoses: Sequence[Diagnosis], settings: Settings) -> list[Diagnosis]:
    """Return the diagnoses that hold although ranks made calls in the meantime: only waits that are too long."""
    long = [d for d in diagnoses if (d.detected_after_s or 0.0) >= settings.patience_s]
    if settings.hang_after_s is None:
        return [replace(d, proof=Proof.NOT_YET) for d in long]
    return [replace(d, explanation=f"{d.explanation} {BY_THE_LIMIT}") for d in long]


class WatchingMonitor(Protocol):
    """Interface of the monitor to the code that ends ranks."""

    host: Host
    settings: Settings
    report: JobReport
    aborted: bool

    def abort(self) -> None: ...


class Orphans:
    """Notices that the launcher of a job is gone before the job is over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._since: float | None = None
        """Time at which the launcher's death was noticed and reported."""

    def step(self, monitor: WatchingMonitor) -> None:
        """Report a dead launcher once, and end ranks that can no longer meet if a hang is to end the job."""
        host = monitor.host
        if monitor.aborted or not self.launcher_died() or all(host.ended().values()):
            return
        now = time.monotonic()
        meeting = not host.joined() and host.local_world >= host.world_size > 1
        if self._since is None:
            self._since = now
            text = "the launcher has ended (killed?)"
            if meeting:
                text += " while its ranks meet in init_process_group, in a store that was the launcher's: they would "
                text += "wait there until their timeout (10 minutes). Start the job again"
            else:
                pids = sorted({str(host.readers[rank].header.pid) for rank, over in host.ended().items() if not over})
                text += "; its ranks continue, and are watched until they end "
                text += f"(kill {' '.join(pids[:SHOWN])}{' ...' if len(pids) > SHOWN else ''} ends them)"
            monitor.report.say(text)
        elif meeting and now - self._since > ORPHANS_S and monitor.settings.on_hang is OnHang.ABORT:
            monitor.report.say(f"its ranks did not complete their rendezvous within {ORPHANS_S:.0f} s, and are ended")
            monitor.abort()

    def launcher_died(self) -> bool:
        """Return whether this host's launcher has died without reporting the end of the job."""
        launcher = launcher_of(self._directory)
        gone = launcher is not None and launcher.is_here and not launcher.is_alive
        return gone and not (self._directory / "done.json").exists()
