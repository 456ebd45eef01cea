"""Runs many scenarios, several at a time, on an existing engine: a `concurrent.futures.Executor`.

`processes` is this machine; `ray`, `dask` and `slurm` are engines of their own (distsim.scenario.engines), and any
function that returns an Executor can be named. A scenario goes there as data. Whatever the engine, each one runs in a
process of its own under the watchdog. A scenario whose worker ends without a result runs once more.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import platform
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from distsim import __version__
from distsim.errors import UsageError
from distsim.scenario.apart import ApartResult, failed, run_apart
from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import BadFile, Scenario, check
from distsim.scenario.run import run_scenario
from distsim.scenario.sources import own_sources
from distsim.text.units import format_bytes
from distsim.text.untrusted_input import LARGEST_SOURCE, brief, digits, read_bytes
from distsim.watchdog.process import can_watch, machine_memory

ENGINES = "processes[:N], ray[:HOST:PORT], dask:HOST:PORT, slurm[:FLAGS], or module:function that returns an Executor"
MOST_LOST = 2
"""Workers that may end while they run a scenario; then it has failed."""
LOOK_S = 0.5
"""Interval at which points that another command runs are looked for."""
Key = TypeVar("Key")
Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class PointTask:
    """A scenario as data, for a worker that may be another machine."""

    path: str
    data: dict[str, Any]
    options: dict[str, Any]
    """Keywords of `run_scenario`."""
    quiet: bool
    versions: dict[str, str]
    """Versions that the worker must have."""
    sources: dict[str, str]
    """Digests of the program's sources and of the cluster file, by paths relative to the scenario's folder."""
    shipped: dict[str, bytes] = field(default_factory=dict)
    """Their content, for a worker without that folder."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What a worker says of a task."""

    host: str
    ended: ApartResult | None = None
    refusal: str = ""
    """Why it did not run: not the versions or the program that the command has."""


@cache
def versions() -> dict[str, str]:
    """Return the versions that must be the same wherever points of one command run."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {"distsim": __version__, "torch": torch, "Python": platform.python_version()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _sources(scenario: Scenario) -> dict[str, bytes]:
    """Return the content of what a run of *scenario* reads: its sources and cluster file, by relative paths."""
    files = [] if scenario.file is None else own_sources(scenario.file)
    files += [path for path in (Path(scenario.on.partition(":")[0]),) if path.is_file()]
    return {os.path.relpath(path, scenario.path.parent): read_bytes(path, LARGEST_SOURCE) for path in files}


def _other_versions(wanted: dict[str, str]) -> str:
    """Return what versions this worker has instead of those *wanted*; empty if it has these."""
    mine = versions()
    other = [f"{name} {mine[name]} and not {its}" for name, its in wanted.items() if mine[name] != its]
    return f"it has {', '.join(other)}" if other else ""


def run_call(
    function: Callable[[Item], Value], item: Item, wanted: dict[str, str], cancelled: threading.Event | None = None
) -> tuple[Value | None, str]:
    """Call *function* in this worker. Return its value, or why the worker refuses."""
    refusal = _other_versions(wanted)
    return (None, f"a worker on {socket.gethostname()} refuses: {refusal}") if refusal else (function(item), "")


def received(task: PointTask, folder: str) -> Scenario | str:
    """Return the scenario of *task* in this worker, or why the worker refuses.

    Args:
        task: A scenario as data.
        folder: Where sources are written that were shipped.
    """
    if other := _other_versions(task.versions):
        return other
    path = Path(task.path)
    for name, content in task.shipped.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    if task.shipped:
        path = Path(folder, path.name)
    for name, digest in task.sources.items():
        try:
            if _digest(read_bytes(path.parent / name, LARGEST_SOURCE)) != digest:
                return f"its {path.parent / name} differs; --ship sends the script's sources"
        except OSError as error:
            return f"{path.parent / name}: {error.strerror}; --ship sends the script's sources"
    try:
        return check(task.data, path)
    except BadFile as error:
        return str(error)


def run_task(task: PointTask, cancelled: threading.Event | None = None) -> WorkerAnswer:
    """Run *task* in this worker, in a fork; a worker that lacks what the task needs refuses."""
    host = socket.gethostname()
    with tempfile.TemporaryDirectory(prefix="distsim-") as folder:
        scenario = received(task, folder)
        if isinstance(scenario, str):
            return WorkerAnswer(host, refusal=scenario)
        ended = run_apart(scenario, partial(run_scenario, **task.options), cancelled, task.quiet)
        result = ended.result
        if result is not None and task.shipped:
            result.path = task.path
            result.replay = result.replay.replace(os.path.relpath(scenario.path), os.path.relpath(task.path))
    return WorkerAnswer(host, ended)


class _Processes(ThreadPoolExecutor):
    """This machine: each thread waits for the process that it forks."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, "point")
        self._cancelled = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(fn, *args, self._cancelled, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._cancelled.set()
        super().shutdown(wait, cancel_futures=cancel_futures)


class PointPool:
    """Where scenarios run.

    Args:
        make: Returns the executor; called again if the engine has broken.
        width: How many scenarios are under way at a time, at most.
        local: Whether they run on this machine, of whose memory then no more is used than there is.
        ship: Whether the sources of a script are sent along.
    """

    def __init__(self, make: Callable[[], Executor], width: int, local: bool = True, ship: bool = False) -> None:
        self._make, self.width, self.local, self.ship = make, width, local, ship
        self._executor: Executor | None = None
        self._memory_bytes = machine_memory()[1]
        self.peak_bytes = 0
        self.running = self.ended = self.repeated = 0
        self.hosts: set[str] = set()
        self.worked_s = 0.0
        """Wall time of the scenarios that have ended."""

    @property
    def room(self) -> int:
        """Return how many scenarios may be under way: as many as fit in memory, judged by the largest so far."""
        if not (self.local and self.peak_bytes):
            return self.width
        return max(1, min(self.width, self._memory_bytes // self.peak_bytes))

    def submit(self, task: PointTask) -> Future[WorkerAnswer]:
        """Begin *task*."""
        return self._submit(run_task, task)

    def map(self, function: Callable[[Item], Value], items: Sequence[Item]) -> Iterator[Value]:
        """Yield what *function* returns of each item, in their order. It starts processes of its own.

        Raises:
            UsageError: A worker has other versions.
        """
        futures = [self.call(function, item) for item in items]
        for item, future in zip(items, futures, strict=True):
            try:
                value, refusal = future.result()
            except BrokenExecutor:  # a worker was lost: once more
                self.repeated += 1
                value, refusal = self.call(function, item).result()
            if refusal:
                raise UsageError(f"--pool: {refusal}")
            yield value

    def call(self, function: Callable[[Item], Value], item: Item) -> Future[tuple[Value, str]]:
        """Begin a call of *function* in a worker. It comes back with an empty text, or with why the worker refuses."""
        return self._submit(run_call, function, item, versions())

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._executor is None:
            self._executor = self._make()
        try:
            return self._executor.submit(function, *args)
        except BrokenExecutor:
            self._executor = self._make()
            return self._executor.submit(function, *args)

    def task(self, scenario: Scenario, quiet: bool, options: dict[str, Any]) -> PointTask:
        """Return *scenario* as data."""
        path = str(scenario.path.resolve())
        sources = {} if self.local else _sources(scenario)
        if self.ship and (outside := [name for name in sources if name.startswith("..")]):
            raise UsageError(f"--ship: {outside[0]} is not below the script's folder; move it there")
        digests = {name: _digest(content) for name, content in sources.items()}
        return PointTask(path, scenario.data, options, quiet, versions(), digests, sources if self.ship else {})

    def state(self, left: int) -> str:
        """Describe the progress for a line in which the points that have ended are counted; *left* are not begun."""
        parts = [f"{self.running} running"] if self.running else []
        if self.repeated:
            parts.append(f"{self.repeated} lost and repeated")
        if len(self.hosts) > 1:
            parts.append(f"{len(self.hosts)} hosts")
        if self.ended and left + self.running:
            minutes = self.worked_s / self.ended * (left + self.running / 2) / self.room / 60
            parts.append(f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left")
        return ", ".join(parts)

    def close(self) -> None:
        """End what is under way."""
        if self._executor is not None:
            self._executor.shutdown(wait=self.local)  # none waits in its queue: as many were submitted as it runs
            self._executor = None


Ask = Callable[[int], Sequence[tuple[Key, Scenario | Result]] | None]
"""Returns up to so many further scenarios, each with its key; none at the end. None: ask later. Of one that need not
run the result.
"""


@dataclass
class _UnderWay:
    key: Any
    scenario: Scenario
    task: PointTask
    lost: list[str] = field(default_factory=list)
    """How each worker ended that ran it."""


def _here(ask: Ask[Key], options: dict[str, Any]) -> Iterator[tuple[Key, Result]]:
    while (following := ask(1)) is None or following:
        for key, it in following or ():
            yield key, it if isinstance(it, Result) else run_scenario(it, **options)
        if following is None:
            time.sleep(LOOK_S)


def as_they_end(
    pool: PointPool | None, ask: Ask[Key], quiet: bool = False, **options: Any
) -> Iterator[tuple[Key, Result]]:
    """Run the scenarios for which *ask* is asked whenever one has ended, and yield each key with its result.

    Args:
        pool: Where they run; None: here, one by one.
        ask: See `Ask`.
        quiet: Whether warnings of the runs are discarded.
        options: Keywords of `run_scenario`.

    Raises:
        UsageError: A worker refused, because it does not have the same program or versions.
    """
    if pool is None:
        yield from _here(ask, options)
        return
    under_way: dict[Future[WorkerAnswer], _UnderWay] = {}
    again: deque[_UnderWay] = deque()
    later = False
    try:
        while True:
            while len(under_way) < pool.room and again:
                one = again.popleft()
                under_way[pool.submit(one.task)] = one
            if (room := pool.room - len(under_way)) > 0:
                following = ask(room)
                later = following is None
                known = [(key, it) for key, it in following or () if isinstance(it, Result)]
                for key, it in following or ():
                    if isinstance(it, Scenario):
                        one = _UnderWay(key, it, pool.task(it, quiet, options))
                        under_way[pool.submit(one.task)] = one
                yield from known
                if known:
                    continue
            pool.running = len(under_way)
            if not under_way:
                if not later:
                    return
                time.sleep(LOOK_S)
                continue
            for future in wait(under_way, LOOK_S if later else None, FIRST_COMPLETED).done:
                one = under_way.pop(future)
                result = _result(pool, one, future)
                if result is None:
                    again.append(one)
                else:
                    pool.running = len(under_way) + len(again)
                    yield one.key, result
    except BaseException:
        pool.close()
        raise


def _result(pool: PointPool, one: _UnderWay, future: Future[WorkerAnswer]) -> Result | None:
    """Return the result of a scenario; None if its worker was lost and another may try."""
    try:
        answer = future.result()
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[-1]
        one.lost.append(f"{type(error).__name__}: {brief(text, 200)}" if text else type(error).__name__)
    else:
        pool.hosts.add(answer.host)
        if answer.refusal:
            raise UsageError(f"--pool: a worker on {answer.host} does not run {one.scenario.path}: {answer.refusal}")
        assert answer.ended is not None
        pool.peak_bytes = max(pool.peak_bytes, answer.ended.peak_bytes)
        if answer.ended.result is not None:
            pool.ended += 1
            pool.worked_s += answer.ended.result.wall_s
            return answer.ended.result
        likely = ", likely memory" if answer.ended.signal_name == "SIGKILL" else ""
        size = f" at {format_bytes(answer.ended.peak_bytes)}" if answer.ended.peak_bytes else ""
        one.lost.append(f"{answer.ended.signal_name}{likely}{size}")
    if len(one.lost) < MOST_LOST:
        pool.repeated += 1
        return None
    ends = "; ".join(dict.fromkeys(one.lost))
    return failed(one.scenario, f"{len(one.lost)} workers ended while they ran it ({ends})")


def one_by_one(items: Sequence[Item]) -> Callable[[int], list[tuple[int, Item]]]:
    """Return a function that returns up to so many further *items* with their indices, in their order."""
    numbered = iter(enumerate(items))

    def ask(most: int) -> list[tuple[int, Item]]:
        return list(islice(numbered, most))

    return ask


def processes(workers: int) -> PointPool:
    """Return this machine, with *workers* processes at a time. This process must be able to fork."""
    return PointPool(lambda: _Processes(workers), workers)


def pool_of(args: argparse.Namespace) -> PointPool | None:
    """Return the pool that the flags of `distsim.cli.inputs.pool` name; None: this process itself, which may not fork.

    Raises:
        UsageError: They name no engine, or one that is not installed or cannot be reached.
    """
    text = args.pool
    if args.workers is not None:
        if text is not None:
            raise UsageError("-n N is --pool processes:N; give one of the two")
        if args.workers < 1:
            raise UsageError(f"-n: expected at least one worker, got {args.workers}")
    name, _, rest = (text or "processes").partition(":")
    if name == "processes":
        number = digits(rest) if rest else args.workers or args.usual_workers
        if not number:
            raise UsageError(f"--pool {brief(text)}: expected processes:N with at least one")
        if args.ship:
            raise UsageError("--ship: the points run on this machine; give --pool of other machines")
        return processes(number) if args.own_process and can_watch() else None
    if name in ("ray", "dask", "slurm"):
        from distsim.scenario import engines

        make, width = getattr(engines, name)(rest)
        return PointPool(make, width, local=False, ship=args.ship)
    return PointPool(*_named(text), local=False, ship=args.ship)


def _named(text: str) -> tuple[Callable[[], Executor], int]:
    module, _, attribute = text.partition(":")
    wrong = f"--pool {brief(text, 200)}: expected {ENGINES}"
    if not (module and attribute.isidentifier()):
        raise UsageError(wrong)
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{wrong} ({error})") from None
    executor = make()
    if not callable(getattr(executor, "submit", None)):
        raise UsageError(f"{wrong}; {attribute}() returned {type(executor).__name__}")
    first = [executor]
    width = getattr(executor, "_max_workers", None) or os.cpu_count() or 1
    return (lambda: first.pop() if first else make()), int(width)


@contextmanager
def opened(pool: PointPool | None) -> Iterator[None]:
    """Close *pool* at the end, if there is one."""
    try:
        yield
    finally:
        if pool is not None:
            pool.close()
