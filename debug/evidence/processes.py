"""Numbers the processes of a job like the world that the program uses.

Each process records the worlds that it has joined (`rings.files`). One of them, the *main world*, gives the numbers:
the largest of the default groups that processes are in now. If several are equally large (two halves of a job with a
default group each), or none is joined yet, the launcher's numbers are used. Processes outside of the main world get
the numbers after its last. What a process cannot report itself is read from /proc. Stacks of ranks that do not respond
come from faulthandler, which answers a signal, and from py-spy, which reads a stopped process.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from distsim.debug.records import RankThread, Site
from distsim.debug.records.frames import Owner, absolute, is_ours, owner, program_frames, shown
from distsim.debug.rings import layout as rings
from distsim.debug.rings.files import Process, RecordedWorld, WorldKind, stack_path
from distsim.debug.rings.reader import RingReader
from distsim.text.codec import Whole, read
from distsim.text.untrusted_input import open_regular

Key = tuple[str, int, int]
"""`Process.key`."""


@dataclass(frozen=True)
class Numbering:
    """The numbers of one job's processes."""

    size: int = 0
    """Ranks of the main world."""
    total: int = 0
    """Number of the members of the main world and of the processes outside of it."""
    main: str = ""
    """Identifier of the main world; empty: the launcher's."""
    numbers: Mapping[Key, int] = field(default_factory=dict)
    """Numbers of the processes, without those that a later process replaced, and those that only started ranks."""
    worlds: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of each world by their numbers in diagnoses, for worlds in which they differ."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Descriptions of the processes whose number differs from the launcher's."""
    unseen: frozenset[int] = frozenset()
    """Members of other worlds without a known process of this job."""
    launched: int = 0
    """World size of the launcher if it differs from the program's; else 0."""
    fits_launcher: bool = False
    """Whether a launcher started as many ranks as the program has."""
    doubles: tuple[str, ...] = ()
    """Sentences about processes with the same rank."""
    double_ranks: Mapping[int, int] = field(default_factory=dict)
    """The numbers of those -> the rank that they call themselves."""
    known: frozenset[str] | None = None
    """Worlds that some process had joined by then; the members of other worlds cannot be identified yet. None: all."""

    def in_job(self, world: str, rank: int) -> int:
        """Return the number of the process that is *rank* of *world*."""
        numbers = self.worlds.get(world, ())
        return numbers[rank] if 0 <= rank < len(numbers) else rank

    def of_launcher(self, rank: int) -> int | None:
        """Return the number of a process without records that the launcher calls *rank*; None if unknown."""
        return rank if self.fits_launcher and "" not in self.worlds and rank < self.size else None


def number_readers(readers: Iterable[RingReader], numbering: Numbering) -> list[RingReader]:
    """Return *readers* by the number of their process, and set each reader's number."""
    known = []
    for reader in readers:
        number = numbering.numbers.get(reader.process.key)
        if number is not None:
            reader.called(number, numbering.worlds, numbering.known)
            known.append(reader)
    return sorted(known, key=lambda reader: reader.number)


def number_processes(processes: Iterable[Process]) -> Numbering:
    """Return the number the processes of a job."""
    known = _current(sorted(processes, key=lambda process: (process.opened_ns, process.key)))
    members: dict[str, dict[int, Process]] = defaultdict(dict)
    doubles: list[tuple[RecordedWorld, Process, Process]] = []
    for process in known:
        for world in process.worlds:
            first = members[world.id].setdefault(world.rank, process)
            if first is not process:
                doubles.append((world, first, process))
    main = _main_world(known)
    launched = _launched(known)
    size = main.size if main is not None else max((process.world_size for process in known), default=0)
    of_main = {} if main is None else {**members.get(main.met, {}), **members[main.id]}
    numbers, total = _numbers(known, of_main, size, "" if main is None else main.id)
    sizes = {process.world_size for process in known if process.has_launcher}
    worlds: dict[str, tuple[int, ...]] = {}
    unseen: dict[int, str] = {}
    unseen_numbers: dict[tuple[str, int], int] = {}
    """Numbers of processes without records, shared by a rendezvous of the program and the worlds made in its store."""
    for id_, of_world in members.items():
        world = next(world for process in of_world.values() for world in process.worlds if world.id == id_)
        met = next((one.met for process in of_world.values() for one in process.worlds if one.id == id_), "")
        if main is not None and (id_ in (main.id, main.met) or met == main.id):
            continue
        if all(any(one.met == id_ for one in process.worlds) for process in of_world.values()):
            continue  # all have come on to a world that they made in its store
        come = {**members.get(met, {}), **of_world}
        in_job = []
        for rank in range(world.size):
            member = come.get(rank)
            if member is None:
                number = unseen_numbers.setdefault((met or id_, rank), total)
                if number == total:
                    unseen[total] = f"rank {rank} of {world.size} at {world.where}, of which no records are here"
                    total += 1
                in_job.append(number)
            else:
                in_job.append(numbers[member.key])
        if in_job != list(range(world.size)):
            worlds[id_] = tuple(in_job)
    if to := _of_launcher(known, launched, numbers, size):
        worlds[""] = to
    return Numbering(
        size,
        total,
        "" if main is None else main.id,
        numbers,
        worlds,
        {**_names(known, numbers, main), **unseen},
        frozenset(unseen),
        max((started for started in sizes if started != size), default=0),
        size in sizes,
        tuple(_double(*pair) for pair in doubles),
        {numbers[one.key]: world.rank for world, *pair in doubles for one in pair if one.key in numbers},
        frozenset(members),
    )


def _numbers(
    processes: Sequence[Process], members: Mapping[int, Process], size: int, main: str
) -> tuple[dict[Key, int], int]:
    """Return the numbers of all processes, and how many there are. *members* are the processes of the main world."""
    numbers = {process.key: rank for rank, process in members.items()}
    taken = set(numbers.values())
    outside = []
    rest = [process for process in processes if process.key not in numbers]
    for process in sorted(rest, key=lambda process: not process.worlds):  # who has joined a world is a rank for sure
        is_double = any(world.id == main for world in process.worlds)
        if process.world_size == size and process.rank not in taken and not is_double:
            numbers[process.key] = process.rank
            taken.add(process.rank)
        elif process.worlds:
            outside.append((process, is_double))
    total = size
    vacant = [number for number in range(size) if number not in taken]
    for process, is_double in sorted(outside, key=lambda one: (one[0].rank, one[0].key)):
        if process.world_size == size and vacant and not is_double:  # on its way into the main world, as yet unnamed
            numbers[process.key] = vacant.pop(0)
            continue
        numbers[process.key] = total
        total += 1
    return numbers, total


def _current(processes: Sequence[Process]) -> list[Process]:
    """Drop processes that ended before a later one took their place, after a restart in the same folder."""
    last: dict[tuple[str, int], Process] = {}
    for process in processes:
        for world in process.worlds:
            last[world.id, world.rank] = process
        if process.has_launcher and not process.worlds:
            last["", process.rank] = process
    known = []
    for process in processes:
        places = [(world.id, world.rank) for world in process.worlds] or [("", process.rank)]
        later = [last[slot] for slot in places if slot in last]
        if not any(one is not process and one.opened_ns > process.seen_ns for one in later):
            known.append(process)
    return known


def _main_world(processes: Sequence[Process]) -> RecordedWorld | None:
    """Return the world whose ranks are the numbers of the job; None: the launcher's."""
    now = _joined_last(processes, WorldKind.REPLICAS)
    now = now or _joined_last(processes, WorldKind.DEFAULT) + _joined_last(processes, WorldKind.RPC)
    now = now or _joined_last(processes, WorldKind.FURTHER)
    if not now:
        return None
    count = Counter(world.id for world in now)
    joined = Counter(id_ for process in processes for id_ in {world.id for world in process.worlds})
    now = [world for world in now if 2 * count[world.id] >= joined[world.id]] or now  # most have not moved on
    size = max(world.size for world in now)
    of_size = [world for world in now if world.size == size]
    launched = {process.rank for process in processes if process.has_launcher and process.world_size > size}
    if len({world.id for world in of_size}) > 1 and len(launched) > size:
        return None
    return max(of_size, key=lambda world: (count[world.id], of_size.index(world)))


def _joined_last(processes: Sequence[Process], kind: WorldKind) -> list[RecordedWorld]:
    return [world for process in processes if (world := _last(process, kind)) is not None]


def _last(process: Process, kind: WorldKind) -> RecordedWorld | None:
    return next((world for world in reversed(process.worlds) if world.kind is kind), None)


def _launched(processes: Sequence[Process]) -> dict[int, Process]:
    """Return the processes whose launcher's number is unique.

    A process that has joined a world takes precedence over one that only starts ranks.
    """
    result: dict[int, Process] = {}
    for process in processes:
        if process.rank not in result or not result[process.rank].worlds:
            result[process.rank] = process
    return result


def _of_launcher(
    processes: Sequence[Process], launched: Mapping[int, Process], numbers: Mapping[Key, int], size: int
) -> tuple[int, ...]:
    """Return the numbers of the launcher's ranks; empty: the same."""
    there = {rank: numbers[process.key] for rank, process in launched.items() if process.key in numbers}
    if all(rank == number for rank, number in there.items()):
        return ()
    most = max([process.world_size for process in processes])
    free = iter([number for number in range(size) if number not in there.values()])
    return tuple(there.get(rank, next(free, rank)) if rank < size else there.get(rank, rank) for rank in range(most))


def _names(processes: Sequence[Process], numbers: Mapping[Key, int], main: RecordedWorld | None) -> dict[int, str]:
    names = {}
    for process in processes:
        number = numbers.get(process.key)
        if number is None:
            continue
        own = f"pid {process.pid} on {process.host}"
        inside = main is None or any(world.id == main.id for world in process.worlds)
        world = _last(process, WorldKind.DEFAULT) or next(reversed(process.worlds), None)
        other_size = main is not None and world is not None and world.size != main.size
        if not inside and world is not None and (number != process.rank or other_size):
            names[number] = f"rank {world.rank} of {world.size} at {world.where} ({own})"
        elif process.has_launcher and process.rank != number:
            names[number] = f"rank {process.rank} of its launcher ({own})"
    return names


def _double(world: RecordedWorld, first: Process, second: Process) -> str:
    both = ", ".join(
        f"pid {process.pid} on {process.host}"
        + (f", the launcher's rank {process.rank}" if process.has_launcher else "")
        for process in (first, second)
    )
    return (
        f"two processes call themselves rank {world.rank} of {world.size} at {world.where} ({both}): give each process "
        "a rank of its own in init_process_group(rank=...) or RANK"
    )


@dataclass(frozen=True)
class SystemProcess:
    """One process at one moment."""

    state: str
    """R, S, D, T (stopped), t (traced), Z (dead, not yet reaped)."""
    start_ticks: int
    wait_status: int | None
    """For a zombie: its end, as os.waitpid returns it; None if the kernel does not say."""

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of a zombie, negative for a signal."""
        if self.state != "Z" or self.wait_status is None:
            return None
        return os.waitstatus_to_exitcode(self.wait_status)


def look(pid: int, start_ticks: int = 0) -> SystemProcess | None:
    """Return the process; None if it is gone, or if its number now belongs to another process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    start = int(words[19])
    if start_ticks and start != start_ticks:
        return None
    # Field 52, exit_code, is 0 for readers without ptrace rights as well; as a zombie's it is taken at its word.
    status = int(words[49]) if len(words) > 49 else None
    return SystemProcess(words[0], start, status)


def has_ended(pid: int, start_ticks: int = 0) -> bool:
    """Return whether the process is gone, or dead and not yet reaped."""
    process = look(pid, start_ticks)
    return process is None or process.state in "ZX"


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal instead of ending by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        return False


def oom_kills() -> int:
    """Return how many processes the kernel of this host has killed because memory was used up; 0 if unknown."""
    try:
        return int(Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def own_process() -> dict[str, Any]:
    """Return what distinguishes this process from all others, because a number alone may be reused."""
    process = look(os.getpid())
    return {"pid": os.getpid(), "host": platform.node(), "start": process.start_ticks if process else 0}


class LauncherProcess(Struct):
    """The launcher of a folder's job (`launcher.json`)."""

    pid: Whole = 0
    """0: one that ends the job by another sign."""
    host: str = ""
    start: Whole = 0

    @property
    def is_alive(self) -> bool:
        return not self.pid or look(self.pid, self.start) is not None

    @property
    def is_here(self) -> bool:
        """Return whether it runs on this host, if it runs."""
        return bool(self.pid) and self.host == platform.node()


def launcher_of(directory: Path) -> LauncherProcess | None:
    """Return the launcher that wrote into the folder; None if there is none or its file cannot be read."""
    try:
        return read(directory / "launcher.json", LauncherProcess)
    except (OSError, ValueError):
        return None


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Work:
    """Work of a process and its children so far."""

    cpu_s: float
    transferred: int
    """Bytes read and written by system calls."""
    main_cpu_s: float = 0.0
    """CPU time of the main thread alone."""


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError, ValueError):
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def work_of(pid: int) -> Work:
    """Return the work of a process tree so far, but for the caller's; of children that have ended as far as they were
    waited for.

    A rank may have started the monitor that asks.
    """
    cpu_ticks = transferred = main_ticks = 0
    pids = [pid]
    with contextlib.suppress(OSError, ValueError, IndexError):
        main_ticks = sum(map(int, Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    while pids:
        each = pids.pop()
        try:
            words = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            cpu_ticks += sum(int(word) for word in words[11:15])  # utime, stime and of children that were waited for
            pids += [child for child in children_of(each) if child != os.getpid()]
            io = Path(f"/proc/{each}/io").read_text().split()
            transferred += int(io[1]) + int(io[3])  # rchar, wchar
        except (OSError, ValueError, IndexError):
            continue
    a_second = os.sysconf("SC_CLK_TCK")
    return Work(cpu_ticks / a_second, transferred, main_ticks / a_second)


_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_THREAD = re.compile(r"^(?:Current t|T)hread 0x(?P<ident>[0-9a-f]+)")

MOST_CHILDREN = 8
"""Maximum number of child processes of a rank whose stacks are read."""
WAIT_S = 0.4
"""faulthandler answers within milliseconds, unless the process is stopped."""


def parse_faulthandler(text: str, main_thread: int) -> tuple[Site, ...]:
    """Return the main thread's frames, innermost first, of the last dump in *text*."""
    stacks: dict[int, list[Site]] = {}
    current: list[Site] | None = None
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            current = stacks[int(thread["ident"], 16)] = []
        elif (frame := _FRAME.match(line)) and current is not None:
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(Site(shown(frame["file"]), number, frame["function"]))
    return tuple(stacks.get(main_thread, ()))


def collect(
    readers: Iterable[RingReader],
    frozen: Iterable[int] = (),
    notes: list[str] | None = None,
    silent: Iterable[int] = (),
) -> dict[int, tuple[Site, ...]]:
    """Return the main-thread stacks of live ranks, innermost frame first.

    *frozen* ranks do not answer signals: py-spy reads them if it is installed, and *notes* gets the reason if it
    cannot. py-spy is also tried first for *silent* ranks, which are inside a C call that a signal might interrupt.
    """
    pending: dict[int, tuple[RingReader, int]] = {}
    stacks: dict[int, tuple[Site, ...]] = {}
    stopped = set(frozen)
    readers = list(readers)
    for reader in readers:
        if reader.number in set(silent) and (stack := without_launcher(_py_spy(reader.header.pid)[0])):
            stacks[reader.number] = stack
    for reader in readers:
        number = reader.word(rings.W_STACK_SIGNAL)
        rank = reader.number
        if rank in stopped or rank in stacks or not number:
            continue
        path = stack_path(reader.path)
        try:
            before = path.stat().st_size
            os.kill(reader.header.pid, number)
        except OSError:
            continue
        pending[rank] = (reader, before)
    deadline = time.monotonic() + WAIT_S
    while pending and time.monotonic() < deadline:
        time.sleep(0.01)
        for rank, (reader, before) in list(pending.items()):
            text = _tail(stack_path(reader.path), before)
            if not text or not text.endswith("\n"):
                continue
            stack = without_launcher(parse_faulthandler(text, reader.word(rings.W_MAIN_THREAD)))
            if stack:
                stacks[rank] = stack
                del pending[rank]
    for reader in readers:
        if reader.number in stopped:
            frames, why = _py_spy(reader.header.pid)
            if stack := without_launcher(frames):
                stacks[reader.number] = stack
            elif notes is not None:
                notes.append(f"no stack of rank {reader.number}, which answers no signal: {why}")
    return stacks


def child_stacks(readers: Iterable[RingReader]) -> dict[int, tuple[int, tuple[RankThread, ...]]]:
    """Return the number of calls of each live rank, and the user frames of its child processes (workers of a data
    loader).

    A forked child writes its stack on the rank's own signal, into the rank's file. Other children are left out.
    """
    children: dict[int, tuple[int, tuple[RankThread, ...]]] = {}
    for reader in readers:
        number = reader.word(rings.W_STACK_SIGNAL)
        forked = [pid for pid in children_of(reader.header.pid) if number and catches(pid, number)]
        stacks = {pid: user_part(_stack_of_child(reader, pid, number)) for pid in forked[:MOST_CHILDREN]}
        inside = tuple(RankThread(str(pid), True, stack) for pid, stack in stacks.items() if stack)
        children[reader.number] = reader.count, inside
    return children


def _stack_of_child(reader: RingReader, pid: int, number: int) -> tuple[Site, ...]:
    path = stack_path(reader.path)
    with contextlib.suppress(OSError):
        before = path.stat().st_size
        os.kill(pid, number)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if (text := _tail(path, before)).endswith("\n"):
                stack = parse_faulthandler(text, reader.word(rings.W_MAIN_THREAD))
                began = next((at for at, site in enumerate(stack) if site.function == "_bootstrap"), len(stack))
                return stack[:began]  # below are the frames of the rank that started it
    return ()


def crash_stack(reader: RingReader) -> tuple[Site, ...]:
    """Return what faulthandler wrote while the process died of a signal such as SIGABRT."""
    text = _tail(stack_path(reader.path), 0)
    at = text.rfind("Fatal Python error")
    return without_launcher(parse_faulthandler(text[at:], reader.word(rings.W_MAIN_THREAD))) if at >= 0 else ()


def _tail(path: Path, start: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(start)
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""


def py_spy() -> str | None:
    """Return the path of py-spy, that of this environment first; None if it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def py_spy_threads(tool: str, pid: int, *options: str, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Return the threads of a process as py-spy prints them, the main thread first, without stopping the process;
    empty if it is not permitted, and why.
    """
    command = [tool, "dump", "--nonblocking", "--json", "--full-filenames", *options, "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode == 0 and isinstance(threads := json.loads(done.stdout), list):
            return sorted(threads, key=lambda thread: thread.get("os_thread_id") != thread.get("pid")), ""
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [], f"py-spy could not be run ({type(error).__name__})"
    return [], (done.stderr.strip().splitlines() or ["py-spy says nothing"])[0]


def _py_spy(pid: int) -> tuple[tuple[Site, ...], str]:
    """Return frames of the main thread by py-spy; empty if it cannot read them, and why."""
    tool = py_spy()
    if tool is None:
        return (), "py-spy, which could read it, is not installed"
    threads, why = py_spy_threads(tool, pid, timeout_s=3.0)
    frames = threads[0]["frames"] if threads else ()
    return tuple(
        Site(shown(frame["filename"]), frame["line"], frame["name"]) for frame in frames
    ), f"py-spy failed ({why})"


def is_library(site: Site) -> bool:
    """Return whether a frame is of no interest to the user: torch's, distsim's, or the interpreter's."""
    return owner(site.file) is Owner.MACHINERY


def without_launcher(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return a stack without the outermost frames of `python -m distsim.debug`."""
    for depth, site in enumerate(stack):
        if site.file.endswith("debug/__main__.py") and is_ours(absolute(site.file)):
            return stack[:depth]
    return stack


def user_part(stack: tuple[Site, ...]) -> tuple[Site, ...]:
    """Return the user's frames of a stack, innermost first."""
    return program_frames((site.file, site.line, site.function) for site in stack)


def as_text(stacks: Mapping[int, tuple[Site, ...]]) -> str:
    """Return stacks for a file, a rank after the other."""
    parts = []
    for rank in sorted(stacks):
        frames = "\n".join(f"  {site.function} ({site})" for site in stacks[rank])
        parts.append(f"rank {rank}\n{frames}\n")
    return "\n".join(parts)
