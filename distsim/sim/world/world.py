"""World of one simulation: its processes, groups and stores, and the evidence when it stops."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distsim.cluster import Cluster, Slot
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.stragglers import FEWEST_CALLS, SIMULATED, straggler_findings
from distsim.debug.evidence.guard_findings import unwaited
from distsim.debug.messages import ranks_text, site_text
from distsim.debug.records import CallRecord, CallWait, Evidence, Finding, Group, HostWait, Phase, Wait
from distsim.debug.records.call_log import window
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.frames import user_stack
from distsim.errors import UsageError
from distsim.network import Network
from distsim.sim.c10d.communicator import Communicator
from distsim.sim.device.gpu import Accelerators
from distsim.sim.device.operators.special import RandomFills
from distsim.sim.device.operators.values import ValuePolicy
from distsim.sim.isolation.interpreter import InterpreterState
from distsim.sim.isolation.io_barrier import withheld
from distsim.sim.isolation.process import RankTask, SimProcess, current_task
from distsim.sim.kernel.baton import check_memory
from distsim.sim.kernel.limits import Limits
from distsim.sim.kernel.port import Facts
from distsim.sim.kernel.scheduler import Event, Scheduler, Unwind
from distsim.sim.kernel.shared import SharedObjects
from distsim.sim.kernel.task import Killed
from distsim.sim.kernel.turns import TurnQueue, name_of
from distsim.sim.orders.processes import take_turn_to_end
from distsim.sim.world.equal_ranks import Sample
from distsim.sim.world.restarts import Restarts
from distsim.sim.world.traced import Traced
from distsim.text import original_print

if TYPE_CHECKING:
    import torch

    from distsim.sim.isolation.global_flags import HostState
    from distsim.sim.isolation.output import HeldOutput, RankStream
    from distsim.sim.kernel.chooser import Orders
    from distsim.sim.world.undo import UndoLog


def limited_by(cluster: Cluster, slots: Sequence[Slot]) -> str:
    """Return the flags that restrict *cluster* to *slots*, as the end of a sentence about too few slots."""
    whole = len(cluster.place())
    if len(slots) >= whole:
        return ": take a larger one"
    nodes, places = len({slot.host for slot in slots}), max(slot.local_rank for slot in slots) + 1
    limits = [f"--nnodes {nodes} (nnodes)"] if nodes < cluster.num_nodes else []
    if places < whole // cluster.num_nodes:
        limits.append(f"--nproc-per-node {places} (nproc_per_node)")
    return f" of its {whole}, because of {' and '.join(limits)}: remove that limit, or use a larger cluster"


# -- The world of one simulation: its processes, groups and stores, and what is said when nothing moves.
#
# It is its own scheduler (scheduler.py), which knows time and tasks and nothing of what they do.

RECENT = 2_000  # calls of each rank that are looked at for stragglers


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Services of upper layers that a world calls."""

    live: Callable[[SimProcess, Callable[[], Any]], None]
    """Body of a process's main thread (rank.live)."""
    witness: Callable[..., Evidence]
    """Returns the state of every rank (observe/evidence.py)."""
    look_ahead: Callable[[World, Sequence[Any]], Any]
    """Runs the ranks of a mismatch to their next wait (lookahead.Lookahead)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a world, which do not change afterwards."""

    cluster: Cluster
    slots: Sequence[Slot]
    """Locations of the ranks."""
    network: Network
    """Network, whose clock is the world's clock."""
    seed: int
    host_timeout_s: float
    patience: float
    """Factor on *host_timeout_s* for a rank that computes between two calls."""
    host: HostState
    torch_rng: torch.Tensor
    """State of torch's random generator in every new process."""
    open_streams: Callable[[SimProcess], tuple[RankStream, RankStream]]
    guards: Any
    """Checks of the tensors of calls (tensors.Guards)."""
    faults: Callable[[World], Any]
    """Creates the injected faults of the world (planted.Faults)."""
    data: ValuePolicy = ValuePolicy.SHAPES
    """Policy that decides which values on simulated GPUs are known."""
    on_progress: Callable[[World], None] | None = None
    limits: Limits | None = None
    orders: Orders | None = None
    """How to order what no rule orders; None for the order of virtual time."""
    memory: Any = None
    """Recorder of the memory of CPU tensors (memory.Memory), or None."""
    sample: Sample | None = None
    """Ranks to trace; None for all, as long as the budget lasts."""
    budget_s: float | None = None
    """CPU seconds for tracing all ranks of a program on GPUs; None for no limit."""
    held: Sequence[HeldOutput] = ()
    """Streams that hold back the output of ranks until the run can no longer restart."""
    undo: UndoLog | None = None
    """Undoes the effects of a run that restarts; None if it never restarts."""
    keeps_all_calls: bool = False
    """Whether all calls are kept, for a trace or a scenario; otherwise only the last ones are (call_log.py)."""
    keeps_slices: bool = False
    """Whether the times of each rank's CPU operators are kept, for a trace."""
    silent: Callable[[SimProcess], Any] | None = None
    """Makes the recorder of a process for silent faults; None if they are not searched for."""
    last_step: int | None = None
    """Optimizer step after which the run ends, once every traced rank has ended it; None to run the whole program."""
    keeps_sites: bool = False
    """Whether to keep the lines and operators that use GPU memory."""
    measures_memory: bool = False
    """Whether a full GPU continues as if it were larger, so that the run shows how much memory is needed."""
    is_alone: bool = False
    """Whether one process is started, as by `python`, which may start ranks itself."""
    late_ranks_are_planted: bool = False
    """Whether late ranks are reported however little they cost, because a scenario injects them. Otherwise they are
    reported at the end if they cost time.
    """

    def facts(self) -> Facts:
        """Return the part of it that ranks may know."""
        slots = list(self.slots)
        per_node = max(slot.local_rank for slot in slots) + 1
        return Facts(
            cluster=self.cluster,
            slots=slots,
            network=self.network,
            cpu=replace(self.cluster.cpu.share(per_node), ranks_per_node=per_node),
            seed=self.seed,
            data=self.data,
            turns=None if self.orders is None else TurnQueue(self.orders),
            last_step=self.last_step,
            keeps_slices=self.keeps_slices,
            keeps_sites=self.keeps_sites,
            measures_memory=self.measures_memory,
        )


_real_monotonic = time.monotonic
GRACE_S = 30.0
"""Seconds of wall time that ranks have to reach their next call after another rank raised, as with torchrun."""
SAID_AFTER_S = 1.0
"""Seconds of that time after which a line is printed about what the run waits for."""


@dataclass(slots=True)
class FirstError:
    """The first rank that raised, after which the others have GRACE_S left."""

    process: SimProcess
    wall_s: float
    """Wall time at which it raised."""
    is_printed: bool = False


class World(Scheduler):
    """One simulated job."""

    def __init__(self, setting: Setting, surroundings: Surroundings) -> None:
        super().__init__(
            setting.network.env, setting.host_timeout_s, setting.patience, setting.limits, setting.on_progress
        )
        self.setting, self._around = setting, surroundings
        self.facts = setting.facts()
        slots = self.facts.slots
        self.processes: list[SimProcess] = []
        self.rank_processes: dict[int, SimProcess] = {}
        """The ranks that have been made."""
        self._start_rank: Callable[[SimProcess], None] | None = None
        """Starts a rank; None once all traced ranks have been started."""
        self._indices = itertools.count(1 if setting.is_alone else len(slots))
        """Numbers of the processes that ranks start."""
        self.restarts = Restarts(self)
        self.world_size = 1 if setting.is_alone else len(slots)
        self.shared = SharedObjects(self.event)
        self.diagnoses: list[Diagnosis] = []
        self.findings: list[Finding] = []
        self._first_error: FirstError | None = None
        self.notes: list[str] = []
        self.ended = False
        self.launcher: SimProcess | None = None
        """The process that starts the ranks; None if they are started before the program runs."""
        self.lookahead: Any = None
        """Look-ahead after calls that contradict each other (lookahead.Lookahead); None before."""
        self.stopped_at_s: float | None = None
        """Virtual time at which a mismatch ended the run. The simulation after it only serves the diagnosis."""
        self.final: Evidence | None = None
        self.guards, self.memory = setting.guards, setting.memory
        self._at_last_step: set[int] = set()
        """Ranks that have ended `last_step`."""
        self.turns = self.facts.turns
        self.traced = Traced(self, setting.sample, setting.budget_s, setting.held, setting.undo)
        self.shared.random_fills = RandomFills(len(slots))
        self.faults = setting.faults(self)

    # -- building

    def start_task(
        self, process: SimProcess, body: Callable[[], Any], name: str, daemon: bool = False, at_once: bool = False
    ) -> RankTask:
        task = RankTask(self, process, body, name, daemon, at_once)
        task.port = self
        process.tasks.append(task)
        self.live_tasks += 1
        if self.turns is not None and (parent := current_task()) is not None:
            task.clock = parent.clock
            name_of(task)  # before it gets another rank
        if process.main_task is None:
            process.main_task = task
        return task

    def note(self, text: str) -> None:
        """Report once something that the simulation does differently from a real run."""
        if text not in self.notes:
            self.notes.append(text)

    def report(self, finding: Finding, *, stops: bool = False) -> None:
        """Report a fault of the program, once for all ranks with the same fault. If it *stops* the run, further steps
        are meaningless.
        """
        key = (finding.kind, finding.text, finding.site)
        same = [known for known in self.findings if (known.kind, known.text, known.site) == key]
        ranks = {*finding.ranks, *(rank for known in same for rank in known.ranks)}
        self.findings = [known for known in self.findings if known not in same]
        self.findings.append(replace(finding, ranks=tuple(sorted(ranks))))
        if stops:
            self.stop_for_fault()

    def communicator(self, key: tuple[Any, ...], group: Group, flavour: str) -> Communicator:
        """Return the communicator of the group with *key*, which its first member creates."""
        communicator: Communicator | None = self.shared.communicators.get(key)
        if communicator is None:
            communicator = self.shared.communicators[key] = Communicator(self, group, flavour)
        return communicator

    def widen(self, world_size: int) -> None:
        """Set the number of ranks, for a program that starts its own ranks."""
        cluster, slots = self.facts.cluster, self.facts.slots
        if world_size > len(slots):
            raise UsageError(
                f"the program makes a group of {world_size} ranks, but the cluster {cluster.name!r} has room for "
                f"{len(slots)}{limited_by(cluster, slots)} (--on), or start fewer ranks"
            )
        if self.launcher is not None:
            self.world_size = max(self.world_size, world_size)

    def begin_ranks(
        self, environ_of: Callable[[Slot], dict[bytes, bytes]], start: Callable[[SimProcess], None]
    ) -> None:
        """Begin rank 0. The other traced ranks begin when it first waits or ends: until then it may use a GPU, which
        decides who is traced.

        Args:
            environ_of: Returns the environment of the rank on a slot.
            start: Starts a new process.
        """
        self.shared.environ_of, self.restarts.start, self._start_rank = environ_of, start, start
        first, *others = self.facts.slots[:1] if self.setting.is_alone else self.facts.slots
        start(self._new_rank(first))
        self.live_tasks += len(others)
        if self.faults.are_planted:  # they may strike a rank before its first line
            self._begin_others(others)
        else:
            self.in_background(self._when_rank_0_waits(others))

    def _when_rank_0_waits(self, others: Sequence[Slot]) -> Generator[Event, Any, None]:
        yield self.timer(0.0)
        self._begin_others(others)

    def _begin_others(self, others: Sequence[Slot]) -> None:
        start, self._start_rank = self._start_rank, None
        self.live_tasks -= len(others)
        if start is None:
            return
        traced = [slot for slot in others if slot.rank in self.traced]
        check_memory(len(traced))
        self.leave()  # they begin with the state of the surrounding program, not that of rank 0
        for slot in traced:
            start(self._new_rank(slot))

    @property
    def only_rank_0(self) -> bool:
        """Return whether the ranks other than rank 0 are still to be begun."""
        return self._start_rank is not None

    def _new_rank(self, slot: Slot) -> SimProcess:
        return self.new_process(slot, self.shared.environ_of(slot), sys.argv, slot.rank, slot.rank)

    def new_process(
        self, slot: Slot, environ: dict[bytes, bytes], argv: list[str], rank: int | None, index: int | None = None
    ) -> SimProcess:
        """Return a new process on *slot*. *rank* is None for a helper process of a rank, *index* for all that ranks
        start.
        """
        interpreter = InterpreterState(self.setting.host, environ, argv, self.setting.torch_rng)
        calls_kept = None if self.setting.keeps_all_calls else window(len(self.facts.slots))
        process = SimProcess(self, next(self._indices) if index is None else index, slot, interpreter, calls_kept)
        process.is_rank = rank is not None
        if rank is not None:
            process.rank = rank
            self.rank_processes.setdefault(rank, process)
            self.world_size = max(self.world_size, rank + 1)
        if self.facts.cluster.node.num_gpus:
            process.accelerators = Accelerators(process, self.facts.cluster.node.num_gpus)
        if self.setting.silent is not None:
            process.observers.silent = self.setting.silent(process)
        self.processes.append(process)
        process.stdout, process.stderr = self.setting.open_streams(process)
        return process

    def start_process(self, process: SimProcess, program: Callable[[], Any], daemon: bool = False) -> None:
        def body() -> None:
            process.has_begun = True
            self._around.live(process, program)

        at_once = process.family.parent is None and self.processes[0].has_begun  # before what rank 0 is to wake next
        self.start_task(process, body, "MainThread", daemon, at_once)

    def only_first_has_begun(self) -> bool:
        """Return whether only the first process has started. It may be a launcher that starts the ranks."""
        return self.processes[0].has_begun and not any(p.has_begun for p in self.processes[1:])

    def become_launcher(self, process: SimProcess) -> None:
        """Make *process* the launcher of the ranks. It is not a rank itself, and the prepared copies of it never
        run.
        """
        process.is_rank, self._start_rank = False, None
        for task in process.tasks:
            task.label = ""  # the first child is rank 0
        process.stdout, process.stderr = self.setting.open_streams(process)
        for other in self.processes:
            if other is not process and other.main_task is not None:
                other.phase = Phase.FINISHED
                other.main_task.cancel()
        self.rank_processes = {}
        self.world_size = 0
        self.launcher = process
        self.note("the program starts its own ranks: it ran once, and the processes it started are the ranks")

    def prefix_lines(self, process: SimProcess) -> None:
        """Show the rank of *process* before each line of its output from now on."""
        process.stdout, process.stderr = self.setting.open_streams(process)

    def kill_process(self, process: SimProcess, signal_name: str, exit_code: int) -> None:
        """End *process* from another process."""
        process.phase, process.ending.exit_code, process.ending.signal_name = Phase.KILLED, exit_code, signal_name
        process.ending.end_s = self.now_s
        for task in process.tasks:
            task.doom = Killed()
            task.interrupt(task.doom)

    def end_process(self, process: SimProcess, phase: Phase, exit_code: int, signal_name: str | None = None) -> None:
        """End the running process without cleanup (`os._exit`, a signal). Does not return."""
        task = current_task()
        assert task is not None
        assert task.process is process
        if self.facts.turns is not None:
            take_turn_to_end(self.facts.turns, task)
        process.last_stack = user_stack(sys._getframe(1))
        process.phase, process.ending.exit_code, process.ending.signal_name = phase, exit_code, signal_name
        process.ending.end_s = task.now_s()
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

    def die(self, process: SimProcess) -> None:
        """End *process*, whose thread is running, as SIGKILL does."""
        self.end_process(process, Phase.KILLED, -9, "SIGKILL")

    def process_ended(self, process: SimProcess) -> None:
        """Handle the end of a main thread; daemon threads die with it."""
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
        for task in process.tasks:
            if not task.finished and not task.abandoned and task is not process.main_task:
                task.end(Unwind())
        if not process.ended.triggered:
            process.ended.succeed()
        is_first = self._first_error is None and process.family.parent is None
        if is_first and process.phase is Phase.RAISED and process.is_rank:
            self._first_error = FirstError(process, _real_monotonic())
            self.limits = self.limits or Limits()
            why = f"the other ranks still ran {GRACE_S:.0f} s of wall time after rank {process.rank} had raised"
            self.limits.end_within(GRACE_S, why)

    def claim_rank(self, process: SimProcess, rank: int) -> None:
        """Set the rank of *process*. Spawned ranks state theirs in init_process_group."""
        process.rank = rank
        process.is_rank = True
        self.rank_processes[rank] = process

    def renumber(self, ranks: Mapping[SimProcess, int]) -> None:
        """Change the ranks of processes, for a program that numbers them differently from their launcher."""
        numbers = {process.rank: rank for process, rank in ranks.items()}
        groups: dict[Group, Group] = {}
        for process, rank in ranks.items():
            for record in process.records:
                _renumber(record, numbers, groups)
            process.rank = rank
            self.rank_processes[rank] = process

    def slot_of(self, rank: int) -> Slot:
        """Return the slot of a rank."""
        process = self.rank_processes.get(rank)
        return self.facts.slots[rank] if process is None else process.slot

    # -- what the scheduler asks

    def timed_out(self, why: Wait | None) -> None:
        """Stop the world because of a timeout while other ranks still run.

        The current state is the evidence. The rank for which the others waited until the timeout counts as missing,
        even if it would have arrived later.
        """
        if not self.diagnoses and not isinstance(why, HostWait):
            waited_s = self.now_s - why.record.issued_s if isinstance(why, CallWait) else 0.0
            self.diagnoses = diagnose(self._around.witness(self, asleep=self.asleep, hang_after_s=waited_s))

    def ended_last_step(self, task: RankTask) -> None:
        """Let the rank of *task* wait after step `last_step`, on its GPU as well. The last rank ends the run. Does
        not return.
        """
        self._at_last_step.add(task.process.rank)
        self.is_enough = not self.only_rank_0 and self._at_last_step.issuperset(self.rank_processes)
        task.wait_until(self.event(), HostWait("the end of the run"), None)

    def stands_still(self) -> None:
        """Say why the world cannot continue: no event is left, all ranks only poll, or a limit was reached."""
        if self._at_last_step:  # the others wait for ranks that have done what was asked
            self.is_enough = True
            return
        if self._first_error is not None and self.limits is not None and self.limits.reached is not None:
            self.note(self.limits.reached)
        evidence = self.evidence()
        self.traced.confirm(evidence, self.asleep)
        self.diagnoses = self.diagnoses or diagnose(evidence, nothing_moves=self.next_event_s == float("inf"))

    def failed(self) -> None:
        """Diagnose calls that contradict each other, or a fault that a guard found."""
        self.final = self.evidence()
        self.stopped_at_s = self.now_s
        with withheld(self):
            self.lookahead.run()
        self.diagnoses = diagnose(self.final)

    def _report_progress(self) -> None:
        super()._report_progress()
        first = self._first_error
        if first is None or first.is_printed or _real_monotonic() - first.wall_s < SAID_AFTER_S:
            return
        first.is_printed, raised = True, first.process
        at = f" at {site_text(raised.last_stack[0])}" if raised.last_stack else ""
        original_print(
            f"distsim: rank {raised.rank} raised {type(raised.ending.exception).__name__}: "
            f"{raised.ending.error_text}{at}; others have {GRACE_S:.0f} s (of wall time) to reach a call that waits "
            "for it",
            file=sys.__stderr__,  # its own stream is closed
            flush=True,
        )

    def all_ended(self) -> None:
        """Diagnose after all ranks have ended: calls in another order, a crash, and the like."""
        self.traced.tell()
        self.final = self.evidence()
        self.restarts.look_for_recoveries(self.final)
        if self.diagnoses and all(
            p.phase in (Phase.FINISHED, Phase.EXITED) and not p.ending.exit_code
            for p in self.processes
            if p.rank not in self.restarts.left_behind and p is self.rank_processes.get(p.rank, p)
        ):
            first = self.diagnoses[0]
            self.note(f"{first.kind} ({ranks_text(first.culprits)}); the program caught the error and finished")
            self.diagnoses = []
        if not self.diagnoses:
            self.final.findings = (*self.final.findings, *unwaited(self.final), *self._slow(self.final))
            self.diagnoses = diagnose(self.final)
            if self.diagnoses:
                self.final.sources = dict(self.final.sources)  # as they are now

    def give_up(self, task: RankTask) -> None:
        """Stop waiting for a rank that spins or blocks on the host. Its stack is kept, and the other ranks continue."""
        process = task.process
        frame = task.frame()
        outlived = self._first_error is not None and self.limits is not None and self.limits.reached is not None
        process.phase = Phase.RUNNING if outlived else Phase.HOST_STUCK
        process.ending.end_s = self.now_s
        process.last_stack = () if frame is None else user_stack(frame)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
                stream.muted = True
        task.doom = Unwind()
        task.raise_inside(Unwind)

    def _slow(self, final: Evidence) -> list[Finding]:
        """Return findings of slow ranks that are not among those of the evidence, and note what else is slow."""
        records = {rank: calls[-RECENT:] for rank, calls in final.records.items()}
        late = [] if self.setting.late_ranks_are_planted else straggler_findings(records, SIMULATED)
        if max(map(len, records.values()), default=0) < FEWEST_CALLS:
            return late
        from distsim.debug.diagnosis.pace.job import simulated_pace

        findings, notes = simulated_pace(records, {slot.rank: str(slot.host) for slot in self.setting.slots})
        for note in notes:
            self.note(note.text)
        known = {rank for finding in (*final.findings, *late) for rank in finding.ranks}
        return [*late, *(finding for finding in findings if not known.issuperset(finding.ranks))]

    def stop_for_mismatch(self, met: Sequence[Any]) -> None:
        """Stop the world because calls met that contradict each other, before any data move."""
        self._look_ahead(met)

    def stop_for_fault(self) -> None:
        """Stop the world because a guard found corrupted data or a race, which makes further steps meaningless."""
        self._look_ahead(())

    def _look_ahead(self, met: Sequence[Any]) -> None:
        if self.lookahead is None:
            self.lookahead, self.has_failed = self._around.look_ahead(self, met), True

    def final_evidence(self) -> Evidence:
        """Return where every rank was when the world stopped, for the report."""
        return self.final or self.evidence()

    def end(self, unwind: Callable[[], Unwind] = Unwind) -> None:
        """Unwind every thread that still runs."""
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
        abandoned: list[RankTask] = []
        with withheld(self) if left else contextlib.nullcontext():
            for task in left:
                if task.abandoned:
                    task.raise_inside(Unwind)
                    abandoned.append(task)
                elif not task.finished:
                    task.end(unwind())
        if abandoned:
            time.sleep(0.02)  # who runs Python takes it in this time
        for task in abandoned:
            task.stop_asking()
        self.leave()
        for process in self.processes:  # a world waits for the collector, and a list of all modules is long
            process.interpreter.modules = process.interpreter.logs = None

    # -- looking

    def evidence(self) -> Evidence:
        """Return the evidence for a diagnosis: where every rank is."""
        return self._around.witness(self, asleep=self.asleep)


def _renumber(record: CallRecord, numbers: Mapping[int, int], groups: dict[Group, Group]) -> None:
    """Renumber records of finished calls, because their process now has another rank."""
    group = groups.get(record.group)
    if group is None:
        ranks = tuple(numbers.get(rank, rank) for rank in record.group.ranks)
        group = groups[record.group] = Group(record.group.name, record.group.description, ranks)
    record.rank, record.group = numbers.get(record.rank, record.rank), group
    record.peer = None if record.peer is None else numbers.get(record.peer, record.peer)
    record.root = None if record.root is None else numbers.get(record.root, record.root)
    if record.new_ranks is not None:
        record.new_ranks = tuple(numbers.get(rank, rank) for rank in record.new_ranks)
