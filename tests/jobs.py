"""Running small real jobs on gloo and reading what the monitor says of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.debug.monitor.loop import Monitor
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.settings import Settings

HERE = Path(__file__).resolve().parent
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass
class Result:
    """What a job left."""

    diagnoses: list[Diagnosis]
    codes: dict[int, int]
    outputs: dict[int, str]
    directory: Path
    told_at: float | None = None
    """monotonic seconds of the first verdict that was fatal."""
    compared: int = 0
    silent: list[dict[str, Any]] | None = None
    """Silent findings as the report has them."""

    @property
    def exit_code(self) -> int:
        return next((code for d in self.diagnoses if (code := d.exit_code)), 0)


class QuietMonitor(Monitor):
    """Keeps the report as text instead of printing it; notes when the first fatal verdict came."""

    told_at: float | None = None
    grace_s = 0.0
    text = ""

    def __init__(self, directory: Path, settings: Settings, job: str | None) -> None:
        super().__init__(directory, settings, job)
        self.report.say = self._say  # type: ignore[method-assign]
        self.report.print_diagnoses = self._print  # type: ignore[method-assign]

    def _say(self, note: str) -> None:
        self.text += f"distsim: {note}\n"

    def _print(self, new: Any, evidence: Any) -> None:
        from distsim.debug.report.render import render_diagnoses

        if self.told_at is None and any(d.exit_code for d in new):
            self.told_at = time.monotonic()
        self.text += render_diagnoses(new, evidence).plain(110)


class Zygote:
    """The forking server; one job at a time."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The server's process: torch imported once, every rank a fork of it."""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ, PYTHONPATH=str(HERE.parent)),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(
        self,
        script: Path,
        ranks: int,
        *,
        directory: Path,
        level: str = "check",
        environ: Mapping[str, str] | None = None,
        skip: tuple[int, ...] = (),
        args: tuple[str, ...] = (),
        guarded: bool = True,
        on_hang: str = "abort",
        hang_after_s: float = 60.0,
        limit_s: float = 40.0,
        **settings: Any,
    ) -> Result:
        """One job from start to end under a monitor in this process."""
        given = Settings.read(
            {
                "level": level,
                "on_hang": on_hang,
                "directory": str(directory),
                "hang_after_s": hang_after_s,
                **settings,
            }
        )
        job = {
            "script": str(script),
            "args": list(args),
            "ranks": ranks,
            "directory": str(directory),
            "skip": list(skip),
            "guarded": guarded,
            "environ": {
                **given.environment(),
                "DISTSIM_MONITOR": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                **(environ or {}),
            },
        }
        if self.process.poll() is not None:  # the watchdog of a job that never ended: one test fails, not all after it
            self.close()  # or its pipes would be a warning in whichever test Python finds them
            self.start()
        (directory / "launcher.json").write_text("{}")
        monitor = QuietMonitor(directory, given, None)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if guarded:
            watchdog(self, limit_s, directory)
            monitor.run()
        answer = json.loads(self.process.stdout.readline())
        outputs = {rank: (directory / f"out.{rank}").read_text() for rank in range(ranks) if rank not in skip}
        codes = {int(rank): code for rank, code in answer["codes"].items()}
        result = Result(
            monitor.report.diagnoses, codes, outputs, directory, monitor.told_at, monitor.host.comparer.compared
        )
        result.silent = monitor.report.silent
        result.report = monitor.text  # type: ignore[attr-defined]
        return result

    def close(self) -> None:
        """End it; a second time is harmless."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@functools.cache
def shared_zygote() -> Zygote:
    """The one of this process: loading torch with its parts takes seconds."""
    return Zygote()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def ring_directory() -> Iterator[Path]:
    """A folder in memory, as jobs use."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="distsim-test-", dir=base) as folder:
        yield Path(folder)


def watchdog(zygote: Zygote, seconds: float, directory: Path) -> None:
    """Ends a job that never ends by itself, so that a test fails instead of hanging."""

    def end() -> None:
        if not (directory / "done.json").exists() and directory.exists():
            zygote.process.kill()
            (directory / "done.json").write_text("{}")

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def run(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command line to its end."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**ENVIRON, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def distsim_run(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "distsim", "run", "--on", "gloo", "--nproc-per-node", "2", *words, cwd=cwd, **environ)
