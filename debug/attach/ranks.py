"""The ranks of this host: which processes they are, by /proc, and two samples of their stacks, by py-spy.

A process is a rank by its environment and by who started it. A sample has the frames of its threads with their local
variables, and what each thread computed between the two.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distsim.debug.evidence.processes import has_ended, look, py_spy, py_spy_threads
from distsim.errors import UsageError
from distsim.text.untrusted_input import digits

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers store a rank: torchrun, Open MPI, PMIx, MPICH, SLURM."""
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""Ranks that agree in these belong to one job."""
APART_S = 2.0
"""Seconds between the two samples."""
DUMP_S = 20
"""A dump of py-spy that takes longer is given up."""
BUSY = 0.2
"""A thread that computed for this share of the time between the samples is not waiting."""
WOKE = 3
"""Largest number of times that a thread which waits for an event may wake up between the samples because of timeouts.
"""
AT_ONCE = 4
LOOKS = 4
"""Largest number of second samples."""
MOST_CHILDREN = 8
"""Largest number of child processes of a rank that are sampled."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process that is a rank."""

    pid: int
    rank: int | None
    """Rank; None if the environment does not contain it (torch.multiprocessing.spawn). The stack may show it."""
    world_size: int | None = None
    local_world_size: int | None = None
    job: tuple[str, ...] = ()
    launcher: int = 0
    """The process that started it."""


def find_ranks(pids: Iterable[int] = (), pattern: str = "") -> list[RankProcess]:
    """Return the ranks among processes *pids* and their descendants.

    Without *pids*, ranks are searched among all processes whose command line matches *pattern* (all if it is empty).

    Raises:
        UsageError: There is no rank, or there are ranks of several jobs.
    """
    if not Path("/proc/self/stat").exists():
        raise UsageError(f"attach finds ranks in /proc, which only Linux has; this is {sys.platform}")
    table = _table()
    pids = list(pids)
    for pid in pids:
        if pid not in table:
            raise UsageError(f"expected the number of a running process, got {pid}: there is no such process")
    if pids:
        chosen = with_descendants(pids, table)
        where = f"process {', '.join(map(str, pids))} or its descendants"
    else:
        chosen = {pid for pid in table if not pattern or re.search(pattern, _command(pid))}
        where = f"the processes whose command line matches {pattern!r}" if pattern else "the processes of this host"
    result = rank_processes({pid: parent for pid, parent in table.items() if pid in chosen}, spawned=bool(pids))
    if not result:
        closed = sum(not os.access(f"/proc/{pid}/environ", os.R_OK) for pid in chosen)
        others = f"; {closed} of them are another user's: sudo env PATH=$PATH distsim attach ..." if closed else ""
        raise UsageError(
            f"no rank among {where}: expected Python processes with RANK in their environment, as torchrun, mpirun and "
            f"srun start them; give the number of the launcher's process (distsim attach PID){others}"
        )
    jobs = {process.job for process in result}
    if len(jobs) > 1 and len(pids) != 1:
        launchers = sorted({process.pid if process.launcher == 1 else process.launcher for process in result})
        raise UsageError(
            f"ranks of {len(jobs)} jobs are here: choose one by its launcher's process (distsim attach "
            f"{' | '.join(map(str, launchers[:6]))}) or by --pattern"
        )
    return result


def rank_processes(parents: Mapping[int, int], spawned: bool = False) -> list[RankProcess]:
    """Return the ranks among the processes of *parents* (process: who started it). What a rank started has its
    environment and is none, such as the workers of its data loader. With *spawned*, and no rank by environment,
    Python processes that torch.multiprocessing.spawn has started.
    """
    environments = {pid: environment_of(pid) for pid in parents}
    numbers = {pid: _first(environment, RANK_VARIABLES) for pid, environment in environments.items()}
    ranks = []
    for pid, parent in sorted(parents.items()):
        number = numbers[pid]
        if number is None or not _is_python(pid):
            continue
        above = numbers[parent] if parent in numbers else _first(environment_of(parent), RANK_VARIABLES)
        if above == number and _is_python(parent):
            continue
        environment = environments[pid]
        job = tuple(environment.get(name, "") for name in JOB_VARIABLES)
        size, local = _first(environment, SIZE_VARIABLES), _first(environment, ("LOCAL_WORLD_SIZE",))
        ranks.append(RankProcess(pid, number, size, local, job, parent))
    if not ranks and spawned:
        ranks = [
            RankProcess(pid, None, launcher=parent)
            for pid, parent in sorted(parents.items())
            if "multiprocessing.spawn" in _command(pid) and "resource_tracker" not in _command(pid)
        ]
    return _one_each(ranks)


def _one_each(processes: list[RankProcess]) -> list[RankProcess]:
    """Keep one process for each rank: the innermost, because a launcher may wrap ranks in a Python shell or
    profiler.
    """
    by_rank: dict[tuple[object, ...], list[RankProcess]] = defaultdict(list)
    for process in processes:
        by_rank[(process.job, process.rank if process.rank is not None else process.pid)].append(process)
    return [group[-1] for group in by_rank.values()]


def _table() -> dict[int, int]:
    """Return every process of this host with its parent."""
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                table[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    return table


def with_descendants(pids: Iterable[int], parents: Mapping[int, int] | None = None) -> set[int]:
    """Return *pids* and all processes that they started. *parents* is the process table (default: the current one)."""
    children = defaultdict(list)
    for pid, parent in (_table() if parents is None else parents).items():
        children[parent].append(pid)
    chosen: set[int] = set()
    rest = list(pids)
    while rest:
        pid = rest.pop()
        if pid not in chosen:
            chosen.add(pid)
            rest += children[pid]
    return chosen


def environment_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; empty if they cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _first(environment: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((number for name in names if (number := digits(environment.get(name, ""))) is not None), None)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _is_python(pid: int) -> bool:
    process = look(pid)
    if process is None or process.state == "Z":
        return False
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return "python" in _command(pid).partition(" ")[0]


@dataclass(frozen=True, slots=True)
class _Spent:
    """CPU time and switches of a thread so far."""

    cpu_s: float
    sleeps: int
    """Number of voluntary context switches."""
    transfers: float = math.nan
    """Number of reads and writes of its process; not a number if a GPU may transfer without them."""


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
    """Whether the thread computed between the samples."""
    moved: bool = False
    """Its frames changed between the samples, or it slept and woke: in a loop both samples may meet one line."""


@dataclass(frozen=True, slots=True)
class StackSample:
    """Samples of one rank."""

    process: RankProcess
    threads: tuple[Thread, ...] = ()
    """Stacks of the threads, the main thread first; empty if none could be read."""
    why: str = ""
    """Reason why no stack could be read."""
    stopped: bool = False
    """The process is stopped (SIGSTOP)."""
    ended: bool = False
    """Whether the process has ended since it was found."""
    children: tuple[StackSample, ...] = ()
    """Samples of its child processes, if its main thread waits for such: workers of a data loader or a pool."""


def sample_ranks(processes: Iterable[RankProcess], apart_s: float = APART_S) -> list[StackSample]:
    """Sample each process twice, *apart_s* seconds apart, and again if ranks moved, as they may be on the way to
    their hang.

    Raises:
        UsageError: py-spy is missing, or cannot read any process.
    """
    tool = _tool()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        samples = _sample_all(tool, list(processes), pool, apart_s)
        waiting = [sample for sample in samples if _waits_for_child(sample)]
        parents = {child: sample for sample in waiting for child in _children(sample.process.pid)}
        if parents:
            children = [RankProcess(pid, sample.process.rank) for pid, sample in parents.items()]
            of_children = _sample_all(tool, children, pool, apart_s / 2, looks=1)
            for sample in waiting:
                own = tuple(child for child in of_children if parents[child.process.pid] is sample)
                samples[samples.index(sample)] = replace(sample, children=own)
    if samples and not any(sample.threads or sample.ended for sample in samples):
        raise UsageError(_remedy(samples[0]))
    return samples


def _sample_all(
    tool: str, processes: Sequence[RankProcess], pool: ThreadPoolExecutor, apart_s: float, looks: int = LOOKS
) -> list[StackSample]:
    before = _dumps(tool, processes, pool)
    samples: list[StackSample] = []
    for _ in range(looks):
        spent = [_spent(process.pid) for process in processes]
        began = time.monotonic()
        time.sleep(apart_s)
        passed_s = time.monotonic() - began
        spent_after = [_spent(process.pid) for process in processes]
        after = _dumps(tool, processes, pool)
        samples = [_sample(*each, passed_s) for each in zip(processes, before, after, spent, spent_after, strict=True)]
        if not any(sample.threads[0].moved for sample in samples if sample.threads):
            break
        before = after
    return samples


class StackWatch:
    """Samples the same processes again and again, each compared with the sample before; one dump a look."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._tool = _tool()
        self.processes = list(processes)
        """Those that had not ended at the last look."""
        self._before: dict[int, tuple[_Dump, dict[int, _Spent]]] = {}
        self._at_s = 0.0

    def look(self) -> list[StackSample]:
        """Sample each process once. At the first look nothing has moved.

        Raises:
            UsageError: At the first look, py-spy cannot read any process.
        """
        is_first = not self._before
        with ThreadPoolExecutor(AT_ONCE) as pool:
            dumps = _dumps(self._tool, self.processes, pool)
        passed_s, self._at_s = time.monotonic() - self._at_s, time.monotonic()
        samples = []
        for process, dump in zip(self.processes, dumps, strict=True):
            spent = _spent(process.pid)
            first, was = self._before.get(process.pid, (dump, spent))
            self._before[process.pid] = dump, spent
            samples.append(_sample(process, first, dump, was, spent, passed_s))
        self.processes = [sample.process for sample in samples if not sample.ended]
        if is_first and samples and not any(sample.threads or sample.ended for sample in samples):
            raise UsageError(_remedy(samples[0]))
        return samples


def _waits_for_child(sample: StackSample) -> bool:
    main = sample.threads[0].frames if sample.threads else ()
    return any("/torch/utils/data/" in frame.file or "/multiprocessing/" in frame.file for frame in main)


def _children(pid: int) -> list[int]:
    """Return the Python processes that a rank has started, a few of them."""
    return [child for child in sorted(with_descendants([pid])) if child != pid and _is_python(child)][:MOST_CHILDREN]


_Dump = tuple[list[dict[str, Any]], str]


def _dumps(tool: str, processes: Iterable[RankProcess], pool: ThreadPoolExecutor) -> list[_Dump]:
    return list(pool.map(lambda process: _dump(tool, process.pid), processes))


def _sample(
    process: RankProcess,
    first: _Dump,
    second: _Dump,
    was: Mapping[int, _Spent],
    now: Mapping[int, _Spent],
    passed_s: float,
) -> StackSample:
    if has_ended(process.pid):
        return StackSample(process, why="it has ended", ended=True)
    dump, why = second if second[0] else first
    busy = {t for t in now if t in was and now[t].cpu_s - was[t].cpu_s > BUSY * passed_s}
    wakes = WOKE * max(1.0, passed_s / APART_S)
    woke = {t for t in now if t in was and now[t].sleeps - was[t].sleeps > wakes}
    if not busy and not any(now[t].transfers - was[t].transfers for t in now if t in was):
        woke = set()  # it sleeps and looks again, and gloo's thread polls
    threads = _threads(first[0], dump, busy, woke)
    now_is = look(process.pid)
    is_stopped = now_is is not None and now_is.state in "Tt"
    return StackSample(process, threads, "" if threads else why or second[1], is_stopped)


def _tool() -> str:
    tool = py_spy()
    if tool is None:
        raise UsageError("attach reads stacks with py-spy, which is not installed: pip install py-spy")
    return tool


def _remedy(sample: StackSample) -> str:
    pid, why = sample.process.pid, sample.why
    if "ermission" in why or "EPERM" in why or "ptrace" in why.lower():
        return (
            f"py-spy may not read process {pid} ({why}): run distsim attach as the job's user with the right to "
            "ptrace. As root: sudo env PATH=$PATH distsim attach ...; in a container: start it with "
            "--cap-add SYS_PTRACE; on the host: sysctl kernel.yama.ptrace_scope=0"
        )
    return f"no stack of process {pid} could be read: {why}"


def _dump(tool: str, pid: int) -> _Dump:
    """Return the threads of a process from py-spy's output, or an explanation if there are none."""
    for _ in range(3):  # without stopping the process a dump may meet a frame that just changes
        threads, why = py_spy_threads(tool, pid, "--locals", timeout_s=DUMP_S)
        if threads:
            break
    return threads, why.removeprefix("Error: ")


def _threads(
    first: list[dict[str, Any]], second: list[dict[str, Any]], busy: Collection[int], woke: Collection[int]
) -> tuple[Thread, ...]:
    """Return the threads, the main thread first."""
    earlier = {thread.get("os_thread_id"): _frames(thread) for thread in first}
    threads = []
    for thread in second:
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
    """Return the work of each thread."""
    spent = {}
    try:
        on_gpu = b"libcuda.so" in Path(f"/proc/{pid}/maps").read_bytes()
        calls = re.findall(r"^sysc[rw]: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
        transfers = math.nan if on_gpu else float(sum(map(int, calls)))
        for task in Path(f"/proc/{pid}/task").iterdir():
            words = (task / "stat").read_text().rpartition(")")[2].split()
            sleeps = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", (task / "status").read_text(), re.MULTILINE)
            cpu_s = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
            spent[int(task.name)] = _Spent(cpu_s, int(sleeps[1]) if sleeps else 0, transfers)
    except (OSError, ValueError, IndexError):
        pass
    return spent
