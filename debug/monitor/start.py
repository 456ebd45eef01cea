"""Starts the monitor process of a host, once, from its first rank, and requests a diagnosis.

A launcher requests one before it ends the peers of a failed rank, because their evidence ends with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from distsim.debug.rings.files import create_private
from distsim.debug.settings import Settings
from distsim.text.untrusted_input import read_text

VERDICT_WAIT_S = 4.0
"""Time in seconds for which the peers of a failed rank are kept alive, so that the monitor can make its last diagnosis.
"""


def start_monitor(
    directory: Path, settings: Settings, job: str, *, force: bool = False
) -> subprocess.Popen[bytes] | None:
    """Start a monitor over *directory*, unless one for this job runs there already.

    It is a process of its own, in a session of its own: it must outlive the ranks it reports on.
    """
    lock = directory / f"monitor.{job}.lock"
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600)
    except FileExistsError:
        if not force and _alive(lock):
            return None
        descriptor = create_private(lock)
    environment = dict(os.environ, **settings.environment())
    # The monitor is no rank: nothing in it may join the job.
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        environment.pop(name, None)
    package = Path(__file__).resolve()
    process = subprocess.Popen(
        [sys.executable, "-m", "distsim.debug.monitor", str(directory), "--job", job],
        env=importable(environment, package),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # a full disk: the monitor runs all the same
        os.write(descriptor, str(process.pid).encode())
    os.close(descriptor)
    return process


def gone_text(pid: int, code: int) -> str:
    """Return the line about a monitor that was killed."""
    from distsim.debug.evidence.processes import signal_name

    how = signal_name(-code) or f"signal {-code}"
    return (
        f"distsim: the monitor (pid {pid}) was killed by {how}: the job continues without the guard, hangs are not "
        "reported"
    )


def _alive(lock: Path) -> bool:
    try:
        pid = int(read_text(lock, 100) or "0")
    except (OSError, ValueError):
        return True  # its maker is about to write the number
    if not pid:
        return True
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"distsim.debug.monitor" in command


def importable(environment: dict[str, str], package: Path) -> dict[str, str]:
    """Return the environment in which a process finds distsim where this one did, also in a bare clone."""
    where = str(Path(sys.modules["distsim"].__file__ or package).resolve().parent.parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if where not in paths:
        paths.append(where)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def ask(directory: Path, job: str = "") -> None:
    """Wait until the monitor of *directory*, if there is one, has examined the job."""
    if not (directory / f"monitor.{job}.lock").exists():
        return
    number = sum(1 for _ in directory.glob("ask.*"))
    os.close(create_private(directory / f"ask.{number}"))
    answer = directory / f"answer.{number}"
    deadline = time.monotonic() + VERDICT_WAIT_S
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


class Series:
    """Monitor of a whole test run, started with its first job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def begin(self, directory: Path, settings: Settings) -> None:
        """Start watching the job in *directory*."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "distsim.debug.monitor", "--series"],
                env=importable(dict(os.environ), Path(__file__).resolve()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        with contextlib.suppress(OSError), os.fdopen(create_private(directory / "monitor..lock"), "w") as lock:
            lock.write(str(self._process.pid))
        order = {"directory": str(directory), "environment": settings.environment()}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed: the job goes on without
            print(json.dumps(order), file=self._process.stdin, flush=True)

    def wait(self, timeout_s: float) -> None:
        """Wait until the monitor has finished with the job. One that does not finish is ended."""
        if self._process is None or self._process.stdout is None:
            return
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready or not self._process.stdout.readline():
            self.end(kill=True)

    def end(self, *, kill: bool = False) -> None:
        """Announce that no further job follows."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
            return
        process.kill()
        process.wait()
