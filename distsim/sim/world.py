"""The world of one simulation: virtual time, processes, groups, and the moment nothing moves.

Read this first: `run` is the whole scheduler. simpy owns the clock; each thread of a rank is a
simpy process (task.py); a deadlock is an empty event heap with ranks still blocked.
"""

from __future__ import annotations

import _thread
import contextlib
import heapq
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import simpy

from distsim import beacon
from distsim.cluster import Cluster, CpuModel, Slot
from distsim.debug.diagnosis import Diagnosis, diagnose
from distsim.debug.records import CallWait, Evidence, Finding, Group, HostWait, Phase, Wait
from distsim.debug.stragglers import SIMULATED, straggler_findings
from distsim.debug.unwaited import unwaited
from distsim.errors import UsageError
from distsim.network import Network
from distsim.sim.effects import withheld
from distsim.sim.guards import Guards
from distsim.sim.interrupts import Interrupts
from distsim.sim.lookahead import Lookahead
from distsim.sim.process import SimProcess
from distsim.sim.sites import user_stack
from distsim.sim.task import Killed, Request, Task, Unwind, current_task
from distsim.sim.witness import evidence

if TYPE_CHECKING:
    from distsim.sim.communicator import Communicator
    from distsim.sim.faults import Faults
    from distsim.sim.limits import Limits
    from distsim.sim.memory import Memory
    from distsim.sim.output import RankStream
    from distsim.sim.schedule import Schedule
    from distsim.sim.switches import Host
    from distsim.sim.work import SimWork

__all__ = ["Deadline", "PollEvent", "World"]

QUIET_LIMIT_S = 3_600.0
"""A world in which ranks only poll for this long (virtual) is a deadlock."""

RECENT = 2_000
"""Calls of each rank that are looked at for stragglers."""
_real_monotonic = time.monotonic


class PollEvent(simpy.Event):
    """Wakes a thread that looks again and again for something to change."""


@dataclass(order=True, slots=True)
class Deadline:
    """When a wait gives up. Kept out of simpy's heap: a pending timeout must not hide a deadlock."""

    at_s: float
    number: int
    task: Task = field(compare=False)
    request: Request = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class World:
    """One simulated job. *network* shares the clock *env*."""

    def __init__(
        self, cluster: Cluster, env: simpy.Environment, network: Network, seed: int, host_timeout_s: float
    ) -> None:
        self.cluster = cluster
        self.env = env
        self.network = network
        self.seed = seed
        self.host_timeout_s = host_timeout_s
        self.patience = 1.0
        """How much longer than *host_timeout_s* a rank that computes may stay away from its next call."""
        self.cpu: CpuModel = cluster.cpu
        """The rates of one rank's share of its node."""
        self.store_latency_s = cluster.cpu.store_latency_s
        self.max_slices = 20_000
        self.processes: list[SimProcess] = []
        self.rank_processes: dict[int, SimProcess] = {}
        self.world_size = 0
        self.stores: dict[tuple[str, Any], Any] = {}
        self.communicators: dict[tuple[Any, ...], Communicator] = {}
        self.current: SimProcess | None = None
        self.running: Task | None = None
        self.beacon = beacon.here()
        """Where somebody outside sees which rank runs (overseer.py); None: nobody looks."""
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.initial_torch_rng: Any = None
        self.diagnoses: list[Diagnosis] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.ticks = 0
        """Counts signs of life of the running thread: operators, calls, module loads."""
        self.in_operator = False
        self.events = 0
        self.ended = False
        self.live_tasks = 0
        self.on_progress: Callable[[World], None] | None = None
        self.slots: list[Slot] = []
        self.children_started = 0
        self.launcher: SimProcess | None = None
        self.host: Host
        self.opened: dict[int, tuple[int, int]] = {}
        """Descriptors that ranks have opened for writing, and what they stood for."""
        self.interrupted = False
        """Ctrl-C was pressed."""
        self.crash: BaseException | None = None
        """What must end the simulation at once: a user's mistake, or an error of ours."""
        self.open_streams: Callable[[SimProcess], tuple[RankStream, RankStream]]
        self.lookahead: Lookahead | None = None
        self.stuck: Task | None = None
        self.stopped_at_s: float | None = None
        """When a mismatch ended the run; what is simulated after that only helps to name it."""
        self.final: Evidence | None = None
        self.interrupts = Interrupts()
        self.faults: Faults | None = None
        self.guards = Guards()
        self.limits: Limits | None = None
        self.memory: Memory | None = None
        self.schedule: Schedule | None = None
        self._pollers: list[PollEvent] = []
        self._quiet_s = 0.0
        self.asleep = False
        self._last_ticks, self._last_tick_s, self._last_tick_event = -1, 0.0, 0
        self._deadlines: list[Deadline] = []
        self._count = itertools.count()
        self._store_waiters: list[simpy.Event] = []
        self._next_port = 40_000
        self._tasks_made = 0
        self._next_progress_s = 0.0

    # -- building

    def start_task(self, process: SimProcess, body: Callable[[], Any], name: str, daemon: bool = False) -> Task:
        task = Task(self, process, body, name, daemon)
        process.tasks.append(task)
        self.live_tasks += 1
        if process.main_task is None:
            process.main_task = task
        return task

    def note(self, text: str) -> None:
        """Tell the user once about something the simulation does differently."""
        if text not in self.notes:
            self.notes.append(text)

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def next_task_number(self) -> int:
        self._tasks_made += 1
        return self._tasks_made

    def next_store(self) -> simpy.Event:
        event = self.env.event()
        self._store_waiters.append(event)
        return event

    def store_opened(self) -> None:
        waiting, self._store_waiters = self._store_waiters, []
        for event in waiting:
            event.succeed()

    def device_of(self, rank: int) -> str:
        return self.slots[rank].device

    def widen(self, world_size: int) -> None:
        """The program starts its own ranks and says how many they are."""
        if world_size > len(self.slots):
            raise UsageError(
                f"the program makes a group of {world_size} ranks, the cluster {self.cluster.name!r} has room for "
                f"{len(self.slots)}{self._limited_by()} (--on), or start fewer ranks"
            )
        if self.launcher is not None:
            self.world_size = max(self.world_size, world_size)

    def _limited_by(self) -> str:
        """What makes the room smaller than the cluster."""
        whole = len(self.cluster.place())
        if len(self.slots) >= whole:
            return ": take a larger one"
        nodes, places = len({slot.host for slot in self.slots}), max(slot.local_rank for slot in self.slots) + 1
        said = [f"--nnodes {nodes} (nnodes)"] if nodes < self.cluster.num_nodes else []
        if places < whole // self.cluster.num_nodes:
            said.append(f"--nproc-per-node {places} (nproc_per_node)")
        return f" of its {whole}, because of {' and '.join(said)}: lift that, take a larger one"

    def new_process(self, slot: Slot, environ: dict[str, str], argv: list[str], rank: int | None) -> SimProcess:
        """A process on *slot*; *rank* None where it is only a helper of a rank."""
        process = SimProcess(self, len(self.processes), slot, environ, argv)
        process.is_rank = rank is not None
        if rank is not None:
            process.rank = rank
            self.rank_processes.setdefault(rank, process)
            if self.launcher is not None:
                self.world_size = max(self.world_size, rank + 1)
        self.processes.append(process)
        process.stdout, process.stderr = self.open_streams(process)
        return process

    def start_process(self, process: SimProcess, program: Callable[[], Any], daemon: bool = False) -> None:
        from distsim.sim.rank import live

        def body() -> None:
            process.has_begun = True
            live(process, program)

        self.start_task(process, body, "MainThread", daemon)

    def only_first_has_begun(self) -> bool:
        """Whether the first process runs before any other has: it may be a launcher of ranks."""
        return self.processes[0].has_begun and not any(p.has_begun for p in self.processes[1:])

    def become_launcher(self, process: SimProcess) -> None:
        """*process* starts the ranks itself: it is none, and its copies never run."""
        process.is_rank = False
        process.stdout, process.stderr = self.open_streams(process)
        for other in self.processes:
            if other is not process and other.main_task is not None:
                other.phase = Phase.FINISHED
                other.main_task.cancel()
        self.rank_processes.clear()
        self.world_size = 0
        self.launcher = process
        self.note("the program starts its own ranks: it ran once, and the processes it started are the ranks")

    def kill_process(self, process: SimProcess, signal_name: str, exit_code: int) -> None:
        """Another process ends *process*: it does not run again."""
        process.phase, process.exit_code, process.signal_name = Phase.KILLED, exit_code, signal_name
        process.end_s = float(self.env.now)
        for task in process.tasks:
            task.doom = Killed()
            task.interrupt(task.doom)

    def end_process(self, process: SimProcess, phase: Phase, exit_code: int, signal_name: str | None = None) -> None:
        """The running process ends itself without cleaning up (`os._exit`, a signal). Does not return."""
        task = current_task()
        assert task is not None
        assert task.process is process
        process.last_stack = user_stack(sys._getframe(1))
        process.phase, process.exit_code, process.signal_name = phase, exit_code, signal_name
        process.end_s = task.now_s()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
                stream.muted = True
        for other in process.tasks:
            other.doom = Killed()
            if other is not task:
                other.interrupt(other.doom)
        assert task.doom is not None
        raise task.doom

    def process_ended(self, process: SimProcess) -> None:
        """Its main thread is over: daemon threads die with it."""
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
        for task in process.tasks:
            if not task.finished and not task.abandoned and task is not process.main_task:
                task.end(Unwind())
        if not process.ended.triggered:
            process.ended.succeed()

    def claim_rank(self, process: SimProcess, rank: int) -> None:
        """*process* has said which rank it is (spawned ranks say so in init_process_group)."""
        process.rank = rank
        process.is_rank = True
        self.rank_processes[rank] = process

    # -- the baton

    def enter(self, process: SimProcess) -> None:
        if self.current is not process:
            if self.current is not None:
                self.current.leave()
            process.enter()
            self.current = process

    def leave(self) -> None:
        if self.current is not None:
            self.current.leave()
            self.current = None

    def take_baton_from(self, task: Task) -> None:
        """Wait until the running thread hands the baton back; watch that it does."""
        self.running = task
        if not self.baton.acquire(timeout=0.25):
            self._watch(task)
        self.running = None

    def _watch(self, task: Task) -> None:
        """Two limits: without any sign of life (operators, imports), and, longer unless the user set
        it, without a call: a loop of operators whose end never comes true lives too."""
        ticks, begun = self.ticks, _real_monotonic()
        since = begun
        while not self.baton.acquire(timeout=0.1):
            if self.beacon is not None:
                self.beacon.beat()
            limit_s = 2.0 if task.doom is not None else self.host_timeout_s  # a debugger lifts it meanwhile
            if self.interrupts.pending and task.doom is None:
                self.interrupts.deliver()
            self._report_progress()
            if self.interrupted and task.doom is None:
                raise KeyboardInterrupt
            if task.doom is None and (self.ticks != ticks or self.in_operator):
                ticks, since = self.ticks, _real_monotonic()
            over = self.limits is not None and task.doom is None and self.limits.wall_over()
            now = _real_monotonic()
            if over or now - since > limit_s or now - begun > limit_s * self.patience:
                task.abandoned = True
                if self.beacon is not None:
                    self.beacon.leave_threads_behind()
                if task.doom is None:
                    self.stuck = task
                else:
                    task.raise_inside(Unwind)
                return

    # -- time

    def add_deadline(self, task: Task, request: Request) -> Deadline:
        assert request.timeout_s is not None
        deadline = Deadline(float(self.env.now) + request.timeout_s, next(self._count), task, request)
        heapq.heappush(self._deadlines, deadline)
        return deadline

    def _next_deadline(self, explicit_only: bool) -> Deadline | None:
        while self._deadlines and self._deadlines[0].cancelled:
            heapq.heappop(self._deadlines)
        if not explicit_only:
            return self._deadlines[0] if self._deadlines else None
        waiting = [d for d in self._deadlines if not d.cancelled and d.request.explicit_timeout]
        return min(waiting, default=None)

    def _expire(self, deadline: Deadline) -> None:
        deadline.cancelled = True
        request = deadline.request
        assert request.on_timeout is not None
        error = request.on_timeout()

        def fire(_: object) -> None:
            if deadline.task.request is request:
                self._note_timeout(request.why)
                deadline.task.interrupt(error)

        alarm = self.env.timeout(max(0.0, deadline.at_s - float(self.env.now)))
        assert alarm.callbacks is not None
        alarm.callbacks.append(fire)

    def poll_event(self, quiet_polls: int) -> PollEvent:
        event = PollEvent(self.env)
        self._pollers.append(event)
        return event

    def _wake_pollers(self) -> None:
        waiting, self._pollers = self._pollers, []
        for event in waiting:
            event.succeed()

    # -- the scheduler

    def run(self) -> None:
        """Run until every process has ended, a mismatch met, or nothing can move any more."""
        env = self.env
        while self.live_tasks:
            if self.interrupts.pending:
                self.interrupts.deliver()
            upcoming = env.peek()
            if self._pollers and self._poll_turn(upcoming):
                continue
            deadline = self._next_deadline(explicit_only=False)
            if upcoming == float("inf"):
                if not self._nothing_moves():
                    return
                continue
            if deadline is not None and deadline.at_s < upcoming:
                heapq.heappop(self._deadlines)
                self._expire(deadline)
                continue
            is_poll = isinstance(env._queue[0][3], PollEvent)
            env.step()
            self.events += 1
            if self.crash is not None:
                raise self.crash
            if self.interrupted:
                raise KeyboardInterrupt
            if not is_poll:
                self._quiet_s = 0.0
                if self._pollers:
                    self._wake_pollers()
            if not self.events & 255:
                self._report_progress()
                if self._only_sleeps():
                    self.diagnoses = self.diagnoses or diagnose(self.evidence())
                    return
            if self.lookahead is not None:
                self.final = self.evidence()
                self.stopped_at_s = float(env.now)
                with withheld(self):
                    self.lookahead.run()
                self.diagnoses = diagnose(self.final)
                return
            if self.stuck is not None:
                self._host_stuck(self.stuck)
            if self.limits is not None and self.limits.over(float(env.now), self.events):
                self.diagnoses = self.diagnoses or diagnose(self.evidence())
                return
        if self.diagnoses and all(
            p.phase in (Phase.FINISHED, Phase.EXITED) and not p.exit_code for p in self.processes
        ):
            first = self.diagnoses[0]
            ranks = ", ".join(map(str, first.culprits))
            self.note(f"{first.kind} (ranks {ranks}); the program caught the error and finished")
            self.diagnoses = []
        if not self.diagnoses:  # what hung nobody but is wrong all the same: calls in another order, a crash
            self.final = self.evidence()
            self.final.findings = (*self.final.findings, *unwaited(self.final), *self._slow(self.final))
            self.diagnoses = diagnose(self.final)

    def _slow(self, final: Evidence) -> list[Finding]:
        if self.faults is not None:  # they are among the evidence's findings
            return []
        return straggler_findings({rank: calls[-RECENT:] for rank, calls in final.records.items()}, SIMULATED)

    def _only_sleeps(self) -> bool:
        """Whether nothing but naps and looks at a store has happened for an hour: `while not ready: sleep(1)`."""
        now_s = float(self.env.now)
        if self.ticks != self._last_ticks:
            self._last_ticks, self._last_tick_s, self._last_tick_event = self.ticks, now_s, self.events
        self.asleep = now_s - self._last_tick_s > QUIET_LIMIT_S and self.events - self._last_tick_event > 10_000
        return self.asleep

    @property
    def only_polls(self) -> bool:
        """Whether for the last second (virtual) nothing has happened but threads that look again and again."""
        return self._quiet_s > 1.0

    def _poll_turn(self, upcoming: float) -> bool:
        """Threads poll and nothing else is near: let time pass, in growing steps."""
        step_s = max(1e-6, 0.1 * self._quiet_s)
        if upcoming - float(self.env.now) <= step_s:
            return False
        deadline = self._next_deadline(explicit_only=False)
        if deadline is not None and deadline.at_s <= float(self.env.now) + step_s:
            return False
        if self._quiet_s > QUIET_LIMIT_S and upcoming == float("inf"):
            self._pollers.clear()
            return False
        quiet_s = self._quiet_s + step_s
        alarm = PollEvent(self.env)
        alarm._ok, alarm._value = True, None
        self.env.schedule(alarm, delay=step_s)
        assert alarm.callbacks is not None
        alarm.callbacks.append(lambda _: self._wake_pollers())
        self._quiet_s = quiet_s
        self.env.step()
        self.events += 1
        return True

    def _note_timeout(self, why: Wait | None) -> None:
        """A timeout strikes while others still run: what is stuck now is what they will ask about, and
        who has kept them that long is missing, however sure it would have come."""
        if not self.diagnoses and not isinstance(why, HostWait):
            waited_s = float(self.env.now) - why.record.issued_s if isinstance(why, CallWait) else 0.0
            self.diagnoses = diagnose(evidence(self, asleep=self.asleep, hang_after_s=waited_s))

    def _nothing_moves(self) -> bool:
        """Empty heap, blocked ranks: a deadlock. False ends the world."""
        deadline = self._next_deadline(explicit_only=True)
        if deadline is not None:
            self._expire(deadline)
            return True
        if not self.diagnoses:
            self.diagnoses = diagnose(self.evidence())
        return False

    def stop_for_mismatch(self, met: Sequence[SimWork]) -> None:
        """Calls met that do not fit: nothing may move on wrong data."""
        if self.lookahead is None:
            self.lookahead = Lookahead(self, met)

    def stop_for_fault(self) -> None:
        """A guard saw what makes every further step worthless (a corrupted payload, a race)."""
        if self.lookahead is None:
            self.lookahead = Lookahead(self, ())

    def _host_stuck(self, task: Task) -> None:
        """A rank spins or blocks on the host: keep its stack and let the others go on without it."""
        self.stuck = None
        process = task.process
        frame = task.frame()
        process.phase, process.end_s = Phase.HOST_STUCK, float(self.env.now)
        process.last_stack = () if frame is None else user_stack(frame)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
                stream.muted = True
        task.doom = Unwind()
        task.raise_inside(Unwind)

    def final_evidence(self) -> Evidence:
        """What the report shows beside the diagnoses: where everyone was when the world stopped."""
        return self.final or self.evidence()

    def end(self, unwind: Callable[[], Unwind] = Unwind) -> None:
        """Unwind every thread that is left."""
        self.ended = True
        if self.running is not None:  # we were interrupted while a rank had the baton
            self.running.doom = unwind()
            self._watch(self.running)
            self.running = None
        for process in self.processes:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.finish()
                    stream.muted = True
        left = [task for process in self.processes for task in process.tasks if not task.finished]
        with withheld(self) if left else contextlib.nullcontext():
            for task in left:
                if task.abandoned:
                    task.raise_inside(Unwind)
                elif not task.finished:
                    task.end(unwind())
        self.leave()

    # -- looking

    def evidence(self) -> Evidence:
        """Where every rank stands, for a diagnosis."""
        return evidence(self, asleep=self.asleep)

    def world_group(self) -> Group:
        return Group("0", "default_pg", tuple(range(self.world_size)))

    def _report_progress(self) -> None:
        if self.on_progress is not None:
            now = _real_monotonic()
            if now >= self._next_progress_s:
                self._next_progress_s = now + 0.2
                self.on_progress(self)
