"""Collects the state of every rank of a world, as the evidence for a diagnosis."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import filterfalse
from types import FrameType
from typing import TYPE_CHECKING, Any

from distsim.debug.diagnosis.stragglers import PLANTED, straggler_findings
from distsim.debug.matching.index import DEAD
from distsim.debug.messages import INJECTED, STARTED_ALONE
from distsim.debug.records import (
    CallRecord,
    CallWait,
    Evidence,
    Finding,
    Group,
    HostWait,
    Phase,
    RankState,
    RankThread,
    Wait,
)
from distsim.debug.records.frames import absolute, frame_of, user_stack
from distsim.debug.records.kinds import Kind
from distsim.sim.c10d.work import SimWork
from distsim.sim.device.gpu import KERNELS, open_call
from distsim.sim.isolation.process import SimProcess
from distsim.sim.isolation.wraps import format_user_traceback
from distsim.sim.kernel.scheduler import has_happened
from distsim.sim.processes.hosts import lost_clients
from distsim.sim.processes.threads import OWN_THREADS
from distsim.text.tracebacks import error_line

if TYPE_CHECKING:
    from distsim.sim.world import World

_DDP_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_ENDS = (KERNELS,)
"""Waits on the host that end without other ranks, as long as the simulation continues."""
_DDP_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def evidence(world: World, *, asleep: bool = False, hang_after_s: float | None = None) -> Evidence:
    """Return the evidence on all ranks.

    Args:
        world: The simulated job.
        asleep: Whether a rank that only sleeps counts as blocked.
        hang_after_s: Seconds of waiting after which a running rank that others wait for counts as missing.
    """
    ranks = [rank for rank in range(world.world_size) if rank in world.traced]
    states = {rank: _state(world, rank, asleep, hang_after_s) for rank in ranks}
    processes = {rank: process for rank in ranks if (process := world.restarts.seen_as(rank)) is not None}
    records = {rank: process.calls.kept() for rank, process in processes.items()}
    beyond = range(0)
    if any(state.phase is Phase.BLOCKED for state in states.values()):
        beyond = range(world.world_size, _awaited(states, records))
        states.update((rank, RankState(rank, Phase.ABSENT)) for rank in beyond)
        records = {rank: _met(processes[rank], calls) for rank, calls in records.items()}
        _mark_absent(states, records)
    not_run = frozenset(world.traced.not_traced)
    if not_run:
        among = _AmongThoseThatRan(not_run)
        records = {rank: [among.record(call) for call in calls] for rank, calls in records.items()}
        states = {rank: replace(state, waits=tuple(map(among.wait, state.waits))) for rank, state in states.items()}
    return Evidence(
        world.world_size + len(beyond),
        states,
        records,
        world.now_s,
        notes=(*world.notes, *world.faults.notes),
        findings=(
            *world.findings,
            *world.guards.found,
            *world.faults.findings(),
            *(straggler_findings(records, PLANTED) if world.setting.late_ranks_are_planted else ()),
            *_ddp_findings(world),
            *lost_clients(world),
        ),
        sources=_sources(states, records),
        hang_after_s=hang_after_s,
        cut=frozenset(rank for rank, process in processes.items() if process.calls.is_cut),
        not_run=not_run,
        launched=world.world_size if beyond else 0,
    )


def _awaited(states: Mapping[int, RankState], records: Mapping[int, list[CallRecord]]) -> int:
    """Return the size of the largest world that a rank still waits for in a rendezvous."""
    last = [calls[-1] for rank, calls in records.items() if calls and states[rank].phase is Phase.BLOCKED]
    return max((len(c.group.ranks) for c in last if c.op == "init_process_group" and not c.done), default=0)


class _AmongThoseThatRan:
    """Calls without the ranks that did not run, which are neither missing from a call nor present in it."""

    def __init__(self, not_run: frozenset[int]) -> None:
        self._not_run = not_run
        self._groups: dict[int, Group] = {}
        self._records: dict[int, CallRecord] = {}
        self._kept: list[CallRecord | Group] = []
        """Objects whose ids are in use, kept alive so that the ids stay unique."""

    def group(self, group: Group) -> Group:
        """Return *group* restricted to members that ran."""
        known = self._groups.get(id(group))
        if known is None:
            self._kept.append(group)
            known = self._groups[id(group)] = replace(group, ranks=self._ranks(group.ranks))
        return known

    def record(self, call: CallRecord) -> CallRecord:
        """Return *call* on its group restricted to members that ran."""
        known = self._records.get(id(call))
        if known is None:
            self._kept.append(call)
            new_ranks = None if call.new_ranks is None else self._ranks(call.new_ranks)
            known = self._records[id(call)] = replace(call, group=self.group(call.group), new_ranks=new_ranks)
        return known

    def wait(self, wait: Wait) -> Wait:
        """Return *wait* restricted to ranks that ran."""
        if isinstance(wait, CallWait):
            return CallWait(self.record(wait.record))
        return HostWait(wait.what, self._ranks(wait.on_ranks)) if isinstance(wait, HostWait) else wait

    def _ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(filterfalse(self._not_run.__contains__, ranks))


def _met(process: SimProcess, calls: list[CallRecord]) -> list[CallRecord]:
    """Return those of *calls* of *process* that others can meet, without calls queued on its GPU behind one that does
    not end. The host is ahead of its streams, so a blocked stream counts as a waiting host."""
    if process.accelerators is None:
        return calls
    behind = {
        id(record)
        for device in process.accelerators.devices
        for comm in device.comms[1:]  # the first one waits for kernels alone, which end
        if comm.begun_s is None
        for record in comm.records
    }
    return [record for record in calls if id(record) not in behind] if behind else calls


def _first_on_gpu(process: SimProcess, why: CallWait) -> CallWait:
    """Return the call for which a host waits that reads the result of a queued call: the first one on the GPU."""
    for device in () if process.accelerators is None else process.accelerators.devices:
        if any(r is why.record for comm in device.comms[1:] if comm.begun_s is None for r in comm.records):
            return CallWait(open_call(device.comms[0]))
    return why


def _on_gpu(process: SimProcess, hang_after_s: float) -> list[Wait]:
    """Return the waits of its GPUs of this length while the host continues."""
    if process.accelerators is None or not process.alive:
        return []
    now_s = process.port.now_s
    firsts = (next((open_call(c) for c in device.comms if c.records), None) for device in process.accelerators.devices)
    return [CallWait(call) for call in firsts if call is not None and now_s - call.issued_s >= hang_after_s / 2]


def _state(world: World, rank: int, asleep: bool, hang_after_s: float | None) -> RankState:
    process = world.restarts.seen_as(rank)
    if process is None:
        return RankState(rank, Phase.RUNNING if world.only_rank_0 else Phase.ABSENT)
    waits: list[Wait] = []
    helping: list[Wait] = []
    """Calls of its daemon threads."""
    since_s = process.ending.end_s
    stack = process.last_stack
    for task in process.tasks if process.alive else ():
        is_main = task is process.main_task
        if task.served is not None and task.ident is not None:
            _stand(task.served, frame_of(task.ident))
        why = None if _goes_on(task) else task.wait_reason
        if task.finished or (task.daemon and not is_main):
            helping += [why] if isinstance(why, CallWait) and not task.finished and not task.serves else []
            continue
        meeting = None if process.rpc is None else process.rpc.meeting
        if is_main and why is not None and meeting is not None:
            why = CallWait(meeting)  # init_rpc or shutdown, whatever torch's Python waits for in it
        if why is not None and (is_main or isinstance(why, CallWait)):
            waits.append(_first_on_gpu(process, why) if isinstance(why, CallWait) else why)
            since_s = task.blocked_since_s
        if is_main and task.ident is not None:
            frame = frame_of(task.ident)
            stack = () if frame is None else user_stack(frame)
    phase = Phase.EXITED if process.family.ended_by_program else process.phase
    if phase is Phase.HOST_STUCK:
        since_s = None  # it used up wall time; that of the simulation passes for the others alone
    ends = _ENDS if asleep else (*_ENDS, "sleep")
    can_end = world.next_event_s < float("inf")
    if waits and can_end and all(isinstance(w, HostWait) and w.what in ends for w in waits):
        waits = []  # it will wake by itself: late, not stuck
    if waits and all(isinstance(w, HostWait) for w in waits):  # a future's callback may end them, or a daemon thread
        waits += [*(CallWait(work.record) for work in process.groups.unsettled), *helping]
    if not waits and hang_after_s is not None:
        waits = _on_gpu(process, hang_after_s)
    if phase is Phase.RUNNING and waits:
        phase = Phase.BLOCKED
    error, text = process.ending.exception, process.ending.traceback_text
    line = None if error is None else f"{type(error).__name__}: {process.ending.error_text}"
    if phase is Phase.BLOCKED and any(isinstance(w, CallWait) for w in waits):
        error = error or _on_its_way(process)  # raised already: its GPU still has calls to end
        text = None if error is None else format_user_traceback(error)
        line = None if error is None else error_line(error)
    return RankState(
        rank,
        phase,
        tuple(waits),
        site=stack[0] if stack else process.last_site,
        stack=stack,
        since_s=since_s,
        exit_code=0 if process.family.ended_by_program or process.told_its_parent else process.ending.exit_code,
        exception=line,
        traceback=text,
        origins=process.ending.origins,
        signal=process.ending.signal_name,
        host=f"node{process.slot.host}",
        meets_at=process.groups.meets_at,
        reached_store=process.groups.connecting is None,
        stores=process.groups.stores,
        reason=(STARTED_ALONE if rank in world.restarts.died_s else INJECTED)
        if process.ending.injected and phase in DEAD
        else None,
        caught=process.caught.kept(),
        memory=() if process.accelerators is None else tuple(process.accelerators.steps.memory),
        threads=_threads(process) if phase is Phase.BLOCKED else (),
        through=process.ending.through and process.alive and not stack,
    )


def _threads(process: SimProcess) -> tuple[RankThread, ...]:
    """Return the threads of a process that waits."""
    return tuple(
        RankThread(
            task.name,
            task.daemon and task is not process.main_task,
            () if (frame := frame_of(task.ident)) is None else user_stack(frame),
            task.held_by if task.wait_reason == OWN_THREADS and task.held_by != task.name else "",
        )
        for task in process.tasks
        if not task.finished
    )


def _goes_on(task: Any) -> bool:
    """Return whether the awaited event has happened, so that the task continues at its next turn."""
    event = None if task.request is None else task.request.event
    return event is not None and has_happened(event)


def _stand(served: CallRecord, frame: FrameType | None) -> None:
    """Return the current place of the thread that serves a remote call."""
    stack = () if frame is None else user_stack(frame)
    if stack and not served.done:
        served.site, served.stack = stack[0], stack


def _on_its_way(process: SimProcess) -> BaseException | None:
    """Return the exception of a blocked rank whose `finally` or `except` block made its current call."""
    task = process.main_task
    exception: Any = None if task is None else sys._current_exceptions().get(task.ident or 0)
    if isinstance(exception, tuple):  # Python 3.11
        exception = exception[1]
    return exception if isinstance(exception, Exception) else None


def _mark_absent(states: dict[int, RankState], records: dict[int, list[CallRecord]]) -> None:
    """Mark ranks without a call as absent if other ranks wait in init_process_group or init_rpc."""
    joining = [
        w.record
        for state in states.values()
        for w in state.waits
        if isinstance(w, CallWait) and w.record.op in ("init_process_group", "init_rpc")
    ]
    for rank, state in states.items():
        on_host = all(isinstance(w, HostWait) for w in state.waits)
        still = state.phase is Phase.HOST_STUCK or (state.phase is Phase.BLOCKED and on_host)
        ended = state.phase is Phase.FINISHED and not state.exit_code
        if joining and (ended or still) and not records.get(rank):
            states[rank] = RankState(
                rank, Phase.ABSENT, site=state.site, stack=state.stack, host=state.host, exit_code=state.exit_code
            )


def _ddp_findings(world: World) -> tuple[Finding, ...]:
    """Return findings for DDP's errors about parameters without gradients, with the parameters' names."""
    by_text: dict[str, list[SimProcess]] = {}
    for process in world.rank_processes.values():
        if process.ending.exception is not None and _DDP_UNFINISHED in process.ending.error_text:
            by_text.setdefault(_unused(process.ending.exception, process.ending.error_text), []).append(process)
    return tuple(
        Finding(
            Kind.DDP_UNUSED_PARAMETER,
            tuple(sorted(p.rank for p in processes)),
            text,
            site=processes[0].last_stack[0] if processes[0].last_stack else None,
            suggestion="Use the parameters in the loss, or pass find_unused_parameters=True to DDP.",
        )
        for text, processes in by_text.items()
    )


def _unused(error: BaseException, text: str) -> str:
    match = _DDP_INDICES.search(text)
    indices = [int(word) for word in match[1].split()] if match else []
    trace = error.__traceback__
    model: Any = None
    while trace is not None:
        model = (
            trace.tb_frame.f_locals.get("self") if hasattr(trace.tb_frame.f_locals.get("self"), "reducer") else model
        )
        trace = trace.tb_next
    names = [] if model is None else [n for n, p in model.module.named_parameters() if p.requires_grad]
    shown = [names[i] if i < len(names) else f"number {i}" for i in indices]
    subject = f"parameter{'s' if len(shown) != 1 else ''} {', '.join(shown)}" if shown else "parameters of a model"
    return f"DDP {subject} got no gradient in the last backward pass"


def _sources(states: dict[int, RankState], records: dict[int, list[CallRecord]]) -> Mapping[str, str]:
    """Return the text of every file that a call or a rank's stack names."""
    files = {site.file: None for state in states.values() for site in state.lines}
    for calls in records.values():
        for record in calls:
            for site in record.stack:
                files[site.file] = None
    texts = _Texts(files)
    fine = all(state.phase is Phase.FINISHED and not state.exit_code for state in states.values())
    return texts if fine else dict(texts)


class _Texts(Mapping[str, str]):
    """Texts of *files*, read on access, because a run in which every rank finishes hardly needs them."""

    def __init__(self, files: Iterable[str]) -> None:
        self._files: dict[str, str | None] = dict.fromkeys(files)

    def __getitem__(self, file: str) -> str:
        text = self._files[file]
        if text is None:
            linecache.checkcache(absolute(file))
            text = self._files[file] = "".join(linecache.getlines(absolute(file)))
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


# -- Run the ranks of a mismatch on to their next wait, as real ones would before anybody stops them.
#
# A rank that has started several asynchronous calls goes on to wait for the first of them; the calls that it
# makes until then are evidence in a real job, so they are recorded here, too. No call ends: what a rank would
# do after a call that never ends is not known of a real job, and a verdict must not rest on it. The output of the
# ranks is muted, nothing of theirs takes effect (io_barrier.py), and their states are put back as they were.

MAX_EVENTS = 50_000
WALL_LIMIT_S = 2.0


class Lookahead:
    """Runs the ranks on to their next wait once, when *met* (the calls of one meeting) contradict each other.

    Without *met*, a guard has found the fault, and no rank needs to continue.
    """

    def __init__(self, world: World, met: Sequence[SimWork]) -> None:
        self.world = world
        self._met = met

    def run(self) -> None:
        if not self._met:
            return
        world = self.world
        kept = [self._keep(process) for process in world.processes]
        muted = [s for p in world.processes for s in (p.stdout, p.stderr) if s is not None and not s.muted]
        for stream in muted:
            stream.muted = True
        limit_s, world.host_timeout_s = world.host_timeout_s, WALL_LIMIT_S
        steps = 0
        while world.next_event_s != float("inf") and steps < MAX_EVENTS and not world.stuck:
            world.step()
            steps += 1
        world.host_timeout_s = limit_s
        for stream in muted:
            stream.muted = False
        for restore in kept:
            restore()

    @staticmethod
    def _keep(process: SimProcess) -> Callable[[], None]:
        """Return a function that restores the state of *process* as it is now."""
        phase, stack, num_slices = process.phase, process.last_stack, len(process.times.slices)
        ending, times = copy(process.ending), copy(process.times)

        def restore() -> None:
            process.phase, process.last_stack, process.ending, process.times = phase, stack, ending, times
            del times.slices[num_slices:]

        return restore
