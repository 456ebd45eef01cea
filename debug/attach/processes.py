"""Which processes of this host are ranks of a job, by /proc: their environment, and who started whom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distsim.debug.evidence.procfs import look
from distsim.errors import UsageError

__all__ = ["RankProcess", "environment_of", "find_ranks", "rank_processes", "with_descendants"]

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers put a rank's number: torchrun, Open MPI, PMIx, MPICH, SLURM."""
SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""Ranks that agree in these belong to one job."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One process that is a rank."""

    pid: int
    rank: int | None
    """None: its environment has no number (torch.multiprocessing.spawn); its stack may tell."""
    world_size: int | None = None
    local_world_size: int | None = None
    job: tuple[str, ...] = ()
    launcher: int = 0
    """The process that started it."""


def find_ranks(pids: Iterable[int] = (), pattern: str = "") -> list[RankProcess]:
    """The ranks among processes *pids* and all that these started; without them, among all whose command line matches
    *pattern* (all processes where it is empty). A UsageError where there is no rank, or more than one job."""
    table = _table()
    pids = list(pids)
    for pid in pids:
        if pid not in table:
            raise UsageError(f"expected the number of a running process, got {pid}: there is no such process")
    if pids:
        chosen = with_descendants(pids, table)
        where = f"process {', '.join(map(str, pids))} or what it started"
    else:
        chosen = {pid for pid in table if not pattern or re.search(pattern, _command(pid))}
        where = f"the processes whose command line matches {pattern!r}" if pattern else "the processes of this host"
    found = rank_processes({pid: parent for pid, parent in table.items() if pid in chosen}, spawned=bool(pids))
    if not found:
        raise UsageError(
            f"no rank among {where}: expected Python processes with RANK in their environment, as torchrun, mpirun and "
            "srun start them; give the number of the launcher's process (distsim attach PID)"
        )
    jobs = {process.job for process in found}
    if len(jobs) > 1 and not pids:
        launchers = sorted({process.pid if process.launcher == 1 else process.launcher for process in found})
        raise UsageError(
            f"ranks of {len(jobs)} jobs run here: choose one by its launcher's process (distsim attach "
            f"{' | '.join(map(str, launchers[:6]))}) or by --pattern"
        )
    return found


def rank_processes(parents: Mapping[int, int], spawned: bool = False) -> list[RankProcess]:
    """The ranks among the processes of *parents* (process: who started it). What a rank started has its environment and
    is none, such as the workers of its data loader. With *spawned*, and no rank by environment, Python processes that
    torch.multiprocessing.spawn has started."""
    environments = {pid: environment_of(pid) for pid in parents}
    numbers = {pid: _first(environment, RANK_VARIABLES) for pid, environment in environments.items()}
    found = []
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
        found.append(RankProcess(pid, number, size, local, job, parent))
    if not found and spawned:
        found = [
            RankProcess(pid, None, launcher=parent)
            for pid, parent in sorted(parents.items())
            if "multiprocessing.spawn" in _command(pid) and "resource_tracker" not in _command(pid)
        ]
    return _one_each(found)


def _one_each(found: list[RankProcess]) -> list[RankProcess]:
    """A launcher may wrap each rank in a shell or a profiler that is Python itself: the innermost one is the rank."""
    by_rank: dict[tuple[object, ...], list[RankProcess]] = defaultdict(list)
    for process in found:
        by_rank[(process.job, process.rank if process.rank is not None else process.pid)].append(process)
    return [group[-1] for group in by_rank.values()]


def _table() -> dict[int, int]:
    """Every process of this host, and its parent."""
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                table[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    return table


def with_descendants(pids: Iterable[int], parents: Mapping[int, int] | None = None) -> set[int]:
    """*pids*, and all processes that they have started; *parents* is the table of processes (default: now)."""
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
    """The variables that a process was started with; none where they cannot be read."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _first(environment: Mapping[str, str], names: Iterable[str]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)


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
