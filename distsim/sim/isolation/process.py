"""A simulated process and its threads: what belongs to one rank."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, cast

from distsim.debug.evidence.watched_source import CaughtLog
from distsim.debug.records import CallRecord, Phase, Site
from distsim.debug.records.call_log import CallLog
from distsim.sim.isolation.environ import RealChildren
from distsim.sim.isolation.interpreter import InterpreterState
from distsim.sim.kernel.port import RankPort
from distsim.sim.kernel.scheduler import Event, HostTimes
from distsim.sim.kernel.task import Task
from distsim.sim.kernel.task import current_task as any_task
from distsim.sim.kernel.task import require_task as any_task_there
from distsim.sim.kernel.turns import Moment

if TYPE_CHECKING:
    from distsim.cluster import Slot
    from distsim.sim.isolation.output import RankStream


@dataclass(slots=True)
class GroupState:
    """Process groups and stores of one process, and values that one of their hooks passes to another."""

    c10d: Any = None
    """torch's `_World` of the process (c10d/backend.py); None until it is first used."""
    objects: list[Any] = field(default_factory=list)
    """Every group that the process made (group.SimGroup), in order."""
    numbers: Counter[str] = field(default_factory=Counter)
    """Number of calls so far that no group numbers, by operation."""
    requested: tuple[dict[str, Any], str | None, CallRecord | None] | None = None
    """Backend by device, description and call of the group that torch is about to make."""
    parts: list[tuple[int, ...]] = field(default_factory=list)
    """Ranks of every part of the groups that were split, and of every group of a mesh."""
    joining: CallRecord | None = None
    """The call of `init_process_group` that has begun and has not created its group yet."""
    job: str = ""
    """Address at which the ranks of the process's job met, if the program gave them their ranks.

    One simulation may contain several jobs.
    """
    creation_counts: dict[Any, int] = field(default_factory=dict)
    """World and name of a group, or place and size of a world -> how often it was made."""
    rendezvous: Any = None
    """The world of the default group (`c10d.group.rendezvous`)."""
    connecting: tuple[str, int] | None = None
    """Host and port of the store that the process tries to reach."""
    meets_at: str | None = None
    """Address of the last TCPStore that the process tried to reach."""
    stores: dict[str, bool] = field(default_factory=dict)
    """TCPStores that the process has used (`host:port`), and whether they end with it (`RankState.stores`)."""
    served: list[Hashable] = field(default_factory=list)
    """Names of the TCPStores that end with the process."""
    file_stores: dict[int, Any] = field(default_factory=dict)
    """The process's claims on the files of FileStores, in order (file_store._File)."""
    backward: list[Any] = field(default_factory=list)
    """Works and futures that the end of backward waits for (work.SimWork)."""
    unsettled: dict[Any, None] = field(default_factory=dict)
    """Handles of calls whose futures are not completed, in order (work.SimWork)."""
    works_of_torch: set[Any] = field(default_factory=set)
    """Handles (work.SimWork) that are kept alive here, because only torch's C++ may hold them otherwise."""
    ddp_waits_in_cpp: bool = False
    """Whether C++ code of DDP is about to wait, so that a future created now must already be completed."""

    def next_number(self, op: str) -> int:
        """Return the number of the next call of an operation that no group numbers."""
        self.numbers[op] += 1
        return self.numbers[op]

    def leave_out(self, count: int) -> None:
        """Give the numbers and names of *count* new groups to nobody."""
        self.numbers[f"new_group new_group {self.c10d.default_pg.size()}"] += count
        self.c10d.group_count += count


class Completions:
    """Callbacks of futures, which must run in the process's own threads."""

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self.due: deque[Callable[[], None]] = deque()
        self._awaiting: list[Event] = []

    def add(self, completion: Callable[[], None]) -> None:
        """Let the next running thread of the process carry out *completion*; a waiting thread is woken."""
        self.due.append(completion)
        self.wake()

    def next(self) -> Event:
        """Return an event that happens when the next completion is due."""
        event = self._new_event()
        self._awaiting.append(event)
        return event

    def wake(self) -> None:
        """Wake the threads that wait for a completion."""
        waiting, self._awaiting = self._awaiting, []
        for event in waiting:
            event.succeed()

    def carry_out(self) -> None:
        """Complete the futures that became due while this process slept."""
        while self.due:
            self.due.popleft()()


@dataclass(slots=True)
class SignalState:
    """Signal handlers of one process."""

    handlers: dict[Any, Any] = field(default_factory=dict)
    """The handlers that it has set."""
    due: deque[tuple[Callable[..., Any], int]] = field(default_factory=deque)
    """Handlers to call in its main thread, with their signals."""

    def call_handlers(self) -> None:
        """Call the handlers that are due."""
        while self.due:
            handler, number = self.due.popleft()
            handler(number, sys._getframe())


@dataclass(slots=True)
class ThreadState:
    """What `threading` says of one process."""

    main: threading.Thread | None = None
    """Value of `threading.main_thread()`; None before its first use."""
    others: list[weakref.ref[threading.Thread]] = field(default_factory=list)
    names: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers in the names of threads that the program does not name."""
    pool_numbers: Iterator[int] = field(default_factory=itertools.count)


@dataclass(slots=True)
class Observers:
    """What watches one process, each None if nothing asks for it."""

    recorder: Any = None
    """Recorder of `torch.profiler`, while the program profiles itself."""
    silent: Any = None
    """Recorder for silent faults (debug/diagnosis/silent/collect)."""
    execution_trace: Any = None
    """Trace that an ExecutionTraceObserver writes (sim/observe/execution_trace.py)."""
    provenance: Any = None
    """Origins of tensors on simulated GPUs (sim/observe/provenance.py)."""


@dataclass(slots=True)
class Notes:
    """Notes of one hook for another hook in the same process."""

    in_worker: str = ""
    """Start method (fork, spawn) of the data loader worker that the process currently simulates; empty if none."""
    pipes: list[Any] = field(default_factory=list)
    """Ends of pipes that the process holds (pipes.Connection)."""
    num_threads: int = 1
    num_interop_threads: int = 1
    operators: dict[str, Any] = field(default_factory=dict)
    """Dictionaries of operators that belong to this process (torch_state/operators.py)."""
    profile_with_shapes: bool = False
    """`record_shapes` of the profile that begins."""


@dataclass(slots=True)
class Ending:
    """How a process ended; the defaults hold while it runs."""

    exit_code: int | None = None
    result: Any = None
    exception: BaseException | None = None
    error_text: str = ""
    """`str` of the exception, taken once in the rank's own thread, because it runs code of the user."""
    traceback_text: str | None = None
    origins: str | None = None
    """Where the exception was raised first (`RankState.origins`)."""
    signal_name: str | None = None
    """Signal that killed the process."""
    injected: bool = False
    """Whether a fault of the scenario was to end or stop the process."""
    end_s: float | None = None
    """Virtual time of the end."""
    through: bool = False
    """Whether the script has returned; its threads and exit handlers may still run."""
    moments: list[Moment] = field(default_factory=list)
    """In an exploration, when it ended, if other processes can notice that."""


@dataclass(slots=True)
class Family:
    """The process that started a process, and those that it started."""

    parent: SimProcess | None = None
    children: list[SimProcess] = field(default_factory=list)
    real_children: RealChildren = field(default_factory=RealChildren)
    daemonic: bool = False
    ended_by_program: bool = False
    """The parent terminated it, which is not a fault."""
    is_forked: bool = False
    """The parent forked it, so it ends with `os._exit`."""
    is_noticed: bool = False
    """The parent has seen that it ended, so its number is free for another child."""
    is_code_read: bool = False
    """The parent has read its exit code."""
    restarts: int = 0
    """How often the rank was killed and started again before this process."""
    label: str = ""
    """In an exploration the name of a process that is not a rank: `p`, the task that started it, and a number."""


class SimProcess:
    """One process of the simulated job. *index* numbers processes in order of creation."""

    def __init__(
        self, port: RankPort, index: int, slot: Slot, interpreter: InterpreterState, calls_kept: int | None
    ) -> None:
        self.port = port
        """All that it may ask of its world."""
        self.index = index
        self.slot = slot
        self.rank: int = slot.rank
        self.has_begun = False
        self.interpreter = interpreter
        self.is_rank = True
        """False for a launcher that only starts others (the parent of `mp.spawn`)."""
        self.groups = GroupState()
        self.rpc: Any = None
        """Its agent, references and autograd contexts (rpc/state.py), once it uses them."""
        self.accelerators: Any = None
        """GPUs of the process, or None if its node has none (device/gpu.py)."""
        self.stdout: RankStream | None = None
        self.stderr: RankStream | None = None
        self.tasks: list[RankTask] = []
        self.main_task: RankTask | None = None
        self.numpy_random: Any = None
        self.calls = CallLog(calls_kept)
        self.caught = CaughtLog()
        self.completions = Completions(port.event)
        self.phase = Phase.RUNNING
        self.ending = Ending()
        self.family = Family()
        self.times = HostTimes()
        self.thaw: Event | None = None
        """Event for which the process waits while it is stopped (SIGSTOP); None while it runs."""
        self.ended = port.event()
        self.last_site: Site | None = None
        self.last_stack: tuple[Site, ...] = ()
        self.at_exit: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self.signals = SignalState()
        self.threads = ThreadState()
        self.program: Any = None
        """The script or module it runs (`rank.Program`); None for a function."""
        self.observers = Observers()
        self.unarmed: dict[tuple[str, Any], Any] = {}
        """Settings that the process changed without effect (processes/process_settings.py)."""
        self.notes = Notes()
        """Notes that one hook leaves for another in the same process."""

    @functools.cached_property
    def random(self) -> Random:
        """Return the process's random generator, created at first use because few programs need it."""
        return Random(f"{self.port.facts.seed}:{self.index}")

    @functools.cached_property
    def entropy(self) -> Random:
        """Return the process's source of the operating system's random numbers."""
        return Random(f"{self.port.facts.seed}:{self.index}:entropy")

    # -- bookkeeping

    @property
    def records(self) -> list[CallRecord]:
        """Return its last calls in order (call_log.py)."""
        return self.calls.last

    @property
    def told_its_parent(self) -> bool:
        """Return whether the exit code was a message to a parent that read it and ended well, which is not a fault."""
        parent = self.family.parent
        return (
            self.phase is Phase.EXITED
            and self.family.is_code_read
            and self.ending.exception is None
            and parent is not None
            and parent.phase in (Phase.FINISHED, Phase.EXITED)
            and not parent.ending.exit_code
        )

    @property
    def alive(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def label(self) -> str:
        """Return the prefix of its output: its rank (a helper has its parent's), or `main` for the parent of spawned
        ranks."""
        return "main" if self is self.port.launcher else str(self.rank)

    def __repr__(self) -> str:
        return f"SimProcess(rank={self.rank})"


class RankTask(Task):
    """A thread of a simulated process."""

    process: SimProcess
    port: RankPort
    """All that its process may ask of the world."""
    cuda_device = 0
    """The current GPU, which torch keeps by thread."""
    serves = False
    """Whether the thread serves requests of other workers (rpc/transport.py)."""
    served: CallRecord | None = None
    """The record of that."""
    dispatch_mode: Any = None
    """Mode that dispatches the thread's operators (device/dispatch.py)."""
    held_by = ""
    """Name of the thread that held the lock for which it waited last."""
    within_turn = False
    """Whether, in an exploration, the thread is inside an operation that has its turn."""
    cuda_streams = False
    """Whether the thread has ever used a stream other than a default one."""

    def programs_work(self) -> int:
        """Return the work of the real children of its process."""
        return self.process.family.real_children.cpu_ticks()


current_task = cast("Callable[[], RankTask | None]", any_task)
require_task = cast("Callable[[], RankTask]", any_task_there)


def not_ordered(something: str) -> None:
    """In an exploration, note *something* that the running task does and whose order is not a choice."""
    task = current_task()
    if task is not None and task.port.facts.turns is not None:
        task.port.facts.turns.does(something)


def current_process() -> SimProcess | None:
    """Return the simulated process whose thread this is; None outside a simulation."""
    task = current_task()
    return None if task is None else task.process
