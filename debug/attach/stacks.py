"""Two samples of every rank by py-spy: frames with their local variables, and what each thread computed between."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distsim.debug.attach.processes import RankProcess
from distsim.errors import UsageError

__all__ = ["APART_S", "Frame", "Sample", "Thread", "sample_ranks"]

APART_S = 2.0
"""Between the two samples."""
DUMP_S = 20
"""A dump of py-spy that takes longer is given up."""
BUSY = 0.2
"""A thread that computed for this share of the time between the samples is not waiting."""
WOKE = 3
"""A thread that waits for what does not come wakes at most so often between the samples, from timeouts."""
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class _Spent:
    """What a thread has done so far."""

    cpu_s: float
    sleeps: int
    """How often it gave up its core by itself."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    function: str
    variables: tuple[tuple[str, str], ...] = ()
    """Local variables and their reprs as py-spy prints them."""

    def variable(self, name: str) -> str | None:
        return next((text for known, text in self.variables if known == name), None)


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a rank at the second sample."""

    name: str
    frames: tuple[Frame, ...]
    """Innermost first."""
    busy: bool = False
    """It computed between the samples."""
    moved: bool = False
    """Its frames changed between the samples, or it slept and woke: in a loop both samples may meet one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen of one rank."""

    process: RankProcess
    threads: tuple[Thread, ...] = ()
    """The main thread first; empty where nothing could be read."""
    why: str = ""
    """Why nothing could be read."""
    stopped: bool = False
    """The process is stopped (SIGSTOP)."""


def sample_ranks(processes: Iterable[RankProcess], apart_s: float = APART_S) -> list[Sample]:
    """Sample each process twice, *apart_s* seconds apart. A UsageError where py-spy is missing, or may read none."""
    processes = list(processes)
    tool = _tool()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        before = list(pool.map(lambda process: _dump(tool, process.pid), processes))
        spent = [_spent(process.pid) for process in processes]
        began = time.monotonic()
        time.sleep(apart_s)
        passed_s = time.monotonic() - began
        spent_after = [_spent(process.pid) for process in processes]
        after = list(pool.map(lambda process: _dump(tool, process.pid), processes))
    samples = []
    for process, first, second, was, now in zip(processes, before, after, spent, spent_after, strict=True):
        state = _state(process.pid)
        dump, why = second if second[0] else (first[0], second[1])
        busy = {t for t in now if t in was and now[t].cpu_s - was[t].cpu_s > BUSY * passed_s}
        woke = {t for t in now if t in was and now[t].sleeps - was[t].sleeps > WOKE}
        threads = _threads(first[0], dump, busy, woke)
        samples.append(Sample(process, threads, "" if threads else why, state in "Tt" and state != ""))
    if samples and not any(sample.threads for sample in samples):
        raise UsageError(_remedy(samples[0]))
    return samples


def _tool() -> str:
    beside = Path(sys.executable).parent / "py-spy"
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        raise UsageError("attach reads stacks with py-spy, which is not installed: pip install py-spy")
    return tool


def _remedy(sample: Sample) -> str:
    pid, why = sample.process.pid, sample.why
    if "ermission" in why or "EPERM" in why or "ptrace" in why.lower():
        return (
            f"py-spy may not read process {pid} ({why}): run distsim attach as the job's user with the right to "
            "ptrace. As root: sudo env PATH=$PATH distsim attach ...; in a container: start it with "
            "--cap-add SYS_PTRACE; on the host: sysctl kernel.yama.ptrace_scope=0"
        )
    return f"no stack of process {pid} could be read: {why}"


def _dump(tool: str, pid: int) -> tuple[list[dict[str, Any]], str]:
    """The threads of a process as py-spy prints them, or why there are none."""
    command = [tool, "dump", "--nonblocking", "--locals", "--json", "--full-filenames", "--pid", str(pid)]
    why = ""
    for _ in range(3):  # without stopping the process a dump may meet a frame that just changes
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, check=False)
            if done.returncode == 0 and isinstance(threads := json.loads(done.stdout), list):
                return threads, ""
            why = (done.stderr.strip().splitlines() or ["py-spy says nothing"])[0]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            why = f"py-spy could not be run ({type(error).__name__})"
    return [], why.removeprefix("Error: ")


def _threads(
    first: list[dict[str, Any]], second: list[dict[str, Any]], busy: Collection[int], woke: Collection[int]
) -> tuple[Thread, ...]:
    """The main thread first."""
    earlier = {thread.get("os_thread_id"): _frames(thread) for thread in first}
    threads = []
    for thread in sorted(second, key=lambda thread: thread.get("os_thread_id") != thread.get("pid")):
        frames, number = _frames(thread), thread.get("os_thread_id")
        if frames:
            name = str(thread.get("thread_name") or number)
            threads.append(Thread(name, frames, number in busy, number in woke or earlier.get(number) != frames))
    return tuple(threads)


def _frames(thread: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(
        Frame(
            str(frame["filename"]),
            int(frame["line"]),
            str(frame["name"]),
            tuple((str(one["name"]), str(one["repr"])) for one in frame.get("locals") or ()),
        )
        for frame in thread["frames"]
    )


def _spent(pid: int) -> dict[int, _Spent]:
    """By thread."""
    spent = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "stat").read_text().rpartition(")")[2].split()
            sleeps = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
            cpu_s = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
            spent[int(task.name)] = _Spent(cpu_s, int(sleeps[1]) if sleeps else 0)
    except (OSError, ValueError, IndexError):
        pass
    return spent


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
