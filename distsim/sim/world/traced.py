"""Selects the ranks that are traced: all within a budget of work, beyond it a sample (equal_ranks.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distsim.debug.messages import ranks_text, wait_text
from distsim.debug.records import CallRecord, Evidence, Group, HostWait, StoreWait
from distsim.errors import UsageError
from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.task import Killed
from distsim.sim.world.equal_ranks import (
    RankTrace,
    RankUse,
    Sample,
    StartAgain,
    Unlike,
    families,
    kinds_by_place,
    own_files,
    rank_uses,
)

if TYPE_CHECKING:
    from torch import Tensor

    from distsim.sim.isolation.output import HeldOutput
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.kernel.port import Facts
    from distsim.sim.kernel.shared import SharedObjects
    from distsim.sim.world.undo import UndoLog

MOST_TRACED = 512
"""Threads of ranks that the machine carries well: of more ranks a sample is traced from the first use of a GPU."""
OPERATOR_S = 250e-6
"""CPU seconds here of an operator on a simulated GPU, with its views and the Python around it."""
HOST_FACTOR = 40.0
"""CPU seconds here of a second of a rank's computing on its host: there it has its share of the cores and the memory
of a node, here one core (measured on random weights of 539 million parameters: 5 to 7 s for 0.14)."""
RANK_S = 0.008
"""CPU seconds here of a rank that does nothing: its thread, its imports, its group."""
START_S = 5.0
"""CPU seconds here of a run's start: torch, the first use of a GPU."""
COMPARED_STEPS = 2
"""Optimizer steps for which the ranks of a sample are compared."""
MOST_CLASSES = 32
"""Classes of ranks, by the tests of the program, of which one rank each is in a sample."""


class TracedJob(Protocol):
    """Interface to the world of the traced ranks."""

    crash: BaseException | None
    """Exception that ends the run; set here to restart it with another sample."""
    world_size: int
    launcher: SimProcess | None
    processes: list[SimProcess]
    rank_processes: dict[int, SimProcess]
    facts: Facts
    shared: SharedObjects
    faults: Any
    """The injected faults (sim/faults/planted.py)."""

    def note(self, text: str) -> None: ...


class Traced:
    """The ranks of *job* that run themselves, and those that are represented by others.

    The work of tracing is counted in operators and not measured, so that a busy machine changes neither the sample
    nor the report.

    Args:
        job: The world.
        sample: Ranks that are traced; None: every rank, as long as *budget_s* lasts.
        budget_s: CPU seconds (estimated) for all ranks of a program on GPUs; None: no limit.
        held: Streams that hold back the ranks' output until the run can no longer restart.
        undo: Changes on disk by the ranks so far; None: the run never restarts.
    """

    def __init__(
        self,
        job: TracedJob,
        sample: Sample | None,
        budget_s: float | None,
        held: Sequence[HeldOutput],
        undo: UndoLog | None,
    ) -> None:
        self._job = job
        self.sample = sample
        self._budget_s = budget_s
        self._held = held
        self._undo = undo
        self.counts = sample is not None
        """Whether operators and calls of ranks are counted, which begins with the program's first use of a GPU."""
        self._traces: dict[int, RankTrace] = {}
        self._host_s: dict[int, float] = {}
        self._most_s = self._second_s = 0.0
        self._most_rank = -1
        self._is_compared = False
        self._scanned: tuple[list[str], list[RankUse]] = [], []
        """The program's files, and the lines in them at which it uses the rank."""
        self._stopped: list[int] = []
        """Ranks that had started when the sample was chosen."""
        self._steps: dict[int, int] = {}
        """Number of optimizer steps by rank."""
        self._odd: set[int] = set()
        """Ranks of the sample that stand only for themselves, because they differed from others of their kind."""
        self.cuts_unevenly = False
        """Ranks have parts of several sizes of some parameter, the first of each kind the largest."""
        self.apart: set[Any] = set()
        """Threads in which ranks legitimately do different work (cuda_api/memory.py), so they are not compared."""

    def __contains__(self, rank: int) -> bool:
        return self.sample is None or rank in self.sample.traced

    @property
    def not_traced(self) -> list[int]:
        """Return ranks that did not run to their end, so that their outcome is unknown."""
        return [] if self.sample is None else sorted(set(range(self._job.world_size)) - self.sample.traced)

    @property
    def not_all(self) -> bool:
        """Return whether some ranks are represented by others."""
        return self.sample is not None and len(self.sample.traced) < self._job.world_size

    def number_of(self, world_size: int) -> int:
        """Return how many of *world_size* ranks run themselves."""
        return len(self.sample.traced) if self.sample is not None and world_size == self._job.world_size else world_size

    def standing_for(self, group: Group) -> list[int] | None:
        """Return for each member of *group* the index of the member that arrives for it; None if every member
        arrives."""
        if self.sample is None or not self.not_all:
            return None
        try:
            return self.sample.standing_for(group.ranks)
        except Unlike:
            if not self.sample.traced.isdisjoint(group.ranks):
                self.split_by(group)
            return list(range(len(group.ranks)))

    # -- the work

    def uses_gpu(self) -> None:
        """Start to count the work of the ranks, because the program uses a GPU for the first time."""
        job = self._job
        if self._budget_s is None or self.counts or self.sample is not None or job.launcher is not None:
            return
        self.counts = True
        for process in job.processes:
            self._add_host(process)
        if job.world_size > MOST_TRACED or self._is_over():
            self._take_sample()

    def saw_operator(self, rank: int, number: int | None) -> None:
        """Note that *rank* launches an operator on its GPU, with the number of its plan.

        *number* is None for copies to or from the host and for reads of values, which only a logging rank may do,
        and which do not make a rank different.
        """
        trace = self._traces.get(rank)
        if trace is None:
            trace = self._traces[rank] = RankTrace()
        trace.add_operator(number)
        if not trace.operators & 63:
            self._add(rank, trace.operators * OPERATOR_S + self._host_s.get(rank, 0.0))

    def computed(self, process: SimProcess) -> None:
        """Count work of a rank on its host."""
        self._add_host(process)
        if self._is_over():
            self._take_sample()

    def _add_host(self, process: SimProcess) -> None:
        rank = process.rank
        self._host_s[rank] = host_s = process.times.compute_s * HOST_FACTOR
        trace = self._traces.get(rank)
        self._note_work(rank, host_s + (0.0 if trace is None else trace.operators * OPERATOR_S))

    def _add(self, rank: int, seconds: float) -> None:
        self._note_work(rank, seconds)
        if self._is_over():
            self._take_sample()

    def _note_work(self, rank: int, seconds: float) -> None:
        if rank == self._most_rank:
            self._most_s = max(self._most_s, seconds)
        elif seconds > self._most_s:
            self._second_s, self._most_s, self._most_rank = self._most_s, seconds, rank
        elif seconds > self._second_s:
            self._second_s = seconds

    @property
    def all_s(self) -> float:
        """Return the CPU seconds (estimated) of tracing every rank as far as this, where all do as much as the
        second most busy one: a rank that computes alone, as rank 0 does that loads a checkpoint for all, is
        counted once.
        """
        size = self._job.world_size
        return RANK_S * size + self._most_s + self._second_s * (size - 1)

    def _is_over(self) -> bool:
        return self.sample is None and self._budget_s is not None and self.all_s > self._budget_s

    def _take_sample(self) -> None:
        """Continue with a sample of the ranks. Ranks that send to each other are distinguished by their index in the
        group.
        """
        job = self._job
        communicators = list(job.shared.communicators.values())
        sending = [(c.group.ranks, c.group.label) for c in communicators if c.has_messages]
        whole = [f for f in self._families() if any(ranks in f for ranks, _ in sending)]
        labels = dict(sending)
        members = {ranks: labels.get(ranks, sending[0][1]) for family in whole for ranks in family} | labels
        sample = kinds_by_place(job.world_size, list(members.items()))
        if touched := job.faults.touched(job.facts.slots):
            numbers = {faults: number for number, faults in enumerate(dict.fromkeys(touched.values()))}
            sample = sample.split({rank: numbers[faults] for rank, faults in touched.items()}, "the injected faults")
        if len(kinds := job.facts.cluster.kinds) > 1:
            kind_of = {host: kind for kind, (_, hosts) in enumerate(kinds) for host in hosts}
            sample = sample.split({slot.rank: kind_of[slot.host] for slot in job.facts.slots}, "its kind of node")
        if job.facts.last_step is not None and not job.facts.measures_memory:
            sample.leave_middle_out()
        self._add_needed(sample, [ranks for ranks, _ in sending])
        self.sample = sample
        if not self.not_all:  # ranks that send to each other in the default group are all of different kinds
            self.sample, self._budget_s, self.counts = None, None, False
            return
        gone = [process for rank, process in job.rank_processes.items() if rank not in sample.traced]
        self._stopped = sorted(process.rank for process in gone)
        # Replaced, not changed: the line of progress and a timeout read them from another thread meanwhile.
        job.rank_processes = {rank: p for rank, p in job.rank_processes.items() if rank in sample.traced}
        job.processes = [process for process in job.processes if process not in gone]
        for process in gone:
            self._retire(process)
        for communicator in communicators:
            communicator.fewer_traced()
        for values in job.shared.stores.values():
            values.change()  # who waits there for all ranks waits for fewer
        task = current_task()
        if task is not None and task.doom is not None:
            raise task.doom

    def _add_needed(self, sample: Sample, sending: Sequence[tuple[int, ...]]) -> None:
        """Add to *sample* one rank of each class of the program, and who is needed in its groups.

        The members of each group of *sending* send to each other.
        """
        sample.add(self._one_of_each_class(sample.traced))
        sample.complete([c.group.ranks for c in self._job.shared.communicators.values()], sending)

    def _families(self) -> list[list[tuple[int, ...]]]:
        """Return the families of the groups that the program has made."""
        calls = [record for process in self._job.processes for record in process.calls.kept()]
        groups = [record.new_ranks for record in calls if record.op == "new_group" and record.new_ranks]
        parts = [part for process in self._job.processes for part in process.groups.parts]
        return families(list(dict.fromkeys([*parts, *groups])))

    def _uses(self) -> list[RankUse]:
        """Return the lines at which the program uses the rank."""
        main = next((p.interpreter.main for p in self._job.processes if p.interpreter.main is not None), None)
        files = [] if main is None else own_files(main)
        if files == self._scanned[0]:
            return self._scanned[1]
        slots = self._job.facts.slots
        nodes = {host: node for node, host in enumerate(dict.fromkeys(slot.host for slot in slots))}
        places = [
            {
                "RANK": slot.rank,
                "LOCAL_RANK": slot.local_rank,
                "GROUP_RANK": nodes[slot.host],
                "WORLD_SIZE": len(slots),
                "LOCAL_WORLD_SIZE": self._job.facts.cpu.ranks_per_node,
            }
            for slot in slots
        ]
        self._scanned = files, rank_uses(files, places)
        return self._scanned[1]

    def _one_of_each_class(self, traced: frozenset[int]) -> list[int]:
        """Return one rank of each class that the program's conditions distinguish from the *traced* ones."""
        outcomes = [use.outcomes for use in self._uses() if use.outcomes is not None]
        first: dict[tuple[bool, ...], int] = {}
        for rank in (*sorted(traced), *range(self._job.world_size)):
            first.setdefault(tuple(outcome[rank] for outcome in outcomes), rank)
        return [rank for rank in first.values() if rank not in traced][:MOST_CLASSES]

    def _retire(self, process: SimProcess) -> None:
        """Stop tracing *process*. Its outcome stays unknown."""
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
        for task in process.tasks:
            task.doom = Killed()
            if task is not current_task() and process.has_begun:
                task.interrupt(task.doom)

    # -- another sample

    def split_by(self, group: Group, why: str = "send to each other") -> None:
        """Distinguish the members of *group* by their index, because of what they do (*why*)."""
        assert self.sample is not None
        family = next((f for f in self._families() if group.ranks in f), [group.ranks])
        places = {rank: position for ranks in family for position, rank in enumerate(ranks)}
        split = self.sample.split(places, f"its position in groups such as {group.label}")
        self._add_needed(split, family)
        self._begin_anew(split, f"ranks of group {group.label} {why}")

    def misses(self, rank: int, awaited: str) -> None:
        """Trace every rank because a traced one waits for *awaited*, which the others may bring."""
        if self.sample is not None and self.not_all:
            places = {other: other for other in range(self._job.world_size)}
            everyone = self.sample.split(places, "what it brings to those that wait")
            self._begin_anew(everyone, f"rank {rank} waits for {awaited}")

    def confirm(self, waiting: Evidence, is_asleep: bool) -> None:
        """Start again with every rank where nothing moves, and a rank of a sample waits for what no collective brings.

        Raises:
            StartAgain, UsageError: As `_begin_anew` says.
        """
        for rank, state in waiting.ranks.items():
            wait = next((one for one in state.waits if isinstance(one, StoreWait)), None)
            if wait is not None or (is_asleep and any(isinstance(one, HostWait) for one in state.waits)):
                self.misses(rank, "what another rank may change" if wait is None else wait_text(wait))
        if self._job.crash is not None:
            raise self._job.crash

    def writes(self, file: Any) -> None:
        """Note that a rank overwrites *file*, a path or an open file."""
        if self._undo is not None and self._held and isinstance(file, str | os.PathLike):
            self._undo.opens(file, os.O_WRONLY)

    def share_gpus(self) -> None:
        """Trace a rank at each place of a node if ranks at different places use GPUs of the same number: only then does
        it show whether two ranks of one node share a GPU."""
        if self.sample is None or not self.not_all:
            return
        places = {slot.rank: slot.local_rank for slot in self._job.facts.slots}
        split = self.sample.split(places, "its local rank")
        if split.traced != self.sample.traced:
            self._begin_anew(split, "ranks with different local ranks use the same GPU index")

    def _begin_anew(self, sample: Sample, why: str) -> None:
        job = self._job
        if job.crash is not None:
            return
        if not self._held or self._undo is None or not self._undo.is_complete:
            traced = ranks_text(sorted(self.sample.traced if self.sample else ()))
            job.crash = UsageError(
                f"{why}, and of {job.world_size} ranks only {traced} are traced. The run cannot restart with the ranks "
                "that they need, because the program has already printed or written something. --ranks all traces "
                "every rank"
            )
            return
        job.crash = StartAgain(sample, why)

    # -- what the ranks of a sample do

    def saw_call(self, process: SimProcess, record: CallRecord, inputs: Sequence[Tensor] | None) -> None:
        """Handle a call of a traced rank. *inputs* are its values, if they are known."""
        if self._is_compared or current_task() in self.apart:
            return
        trace = self._traces.get(process.rank)
        if trace is None:
            trace = self._traces[process.rank] = RankTrace()
        trace.add_call(record, inputs)

    def ended_step(self, process: SimProcess) -> None:
        """Handle the end of an optimizer step of a traced rank. The run does not restart after the first."""
        self._steps[process.rank] = self._steps.get(process.rank, 0) + 1
        for stream in self._held if self._job.crash is None else ():
            stream.release()
        if self._held and self._undo is not None:
            self._undo.close()
        self._held = ()
        if self.counts and not self._is_compared:
            self._traces.setdefault(process.rank, RankTrace()).end_step()
            if self.sample is not None:
                self._compare(self.sample)

    def _compare(self, sample: Sample) -> None:
        """Find the ranks that differ from the others of their kind, and let them represent only themselves."""
        steps = min(len(self._traces[r].steps) if r in self._traces else 0 for r in sample.traced)
        for kind, ranks in list(sample.by_kind.items()):
            did = {rank: self._traces[rank].steps[:steps] for rank in ranks if rank not in self._odd and steps}
            if len(set(map(tuple, did.values()))) < 2:
                continue
            leader, others = ranks[0], [rank for rank in did if rank != ranks[0]]
            agreeing = len(others) > 1 and all(did[rank] == did[others[0]] for rank in others)
            if agreeing and not self.cuts_unevenly:
                # torch.chunk gives the first ranks whole parts: what they do is the most that any rank does.
                odd = [leader]
                sample.leave_to(kind, others[0])
            else:
                odd = [rank for rank in others if did[rank] != did[leader]]
            self._odd.update(odd)
            self._job.note(
                f"{ranks_text(odd)} of {ranks_text(sorted(did))} ran different operators or calls by the end of step "
                f"{steps}: rank {sample.by_kind[kind][0]} represents those that are not traced (--ranks all traces "
                "every one)"
            )
            for communicator in self._job.shared.communicators.values():
                communicator.fewer_traced()
        self._is_compared = steps >= COMPARED_STEPS

    def tell(self) -> None:
        """Add notes at the end of the run on what is unknown because only a sample ran."""
        sample = self.sample
        if sample is None or not self.not_all:
            return
        values = [self._traces[rank].values for rank in sorted(sample.traced) if rank in self._traces]
        if any(mine != values[0][: len(mine)] and values[0] != mine[: len(values[0])] for mine in values):
            self._job.note(
                "ranks pass different values to collectives, and the values of the ranks that ran are used for the "
                "others (--ranks all traces every rank)"
            )

    @property
    def unseen(self) -> str:
        """Return what the run cannot show because some ranks were not traced to their end; empty if all were."""
        others = self.not_traced
        if not others:
            return ""
        size = self._job.world_size
        never = [rank for rank in others if rank not in self._stopped]
        parts = [
            f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} {how}"
            for ranks, how in ((never, "never run"), (self._stopped, "stopped before the end"))
            if ranks
        ]
        return (
            f"{size - len(others)} of {size} ranks were traced; {' and '.join(parts)}{self._lines()} "
            f"(--ranks all: about {_rounded(self._whole_s())} of CPU time)"
        )

    @property
    def progress(self) -> str:
        """Return the progress: traced ranks, their position, and the used budget."""
        size = self._job.world_size
        if self.sample is None and not (self.counts and self._budget_s):
            return ""
        steps = f", step {max(self._steps.values())}" if self._steps else ""
        if self.sample is not None and self.not_all:
            return (
                f"{len(self.sample.traced)} of {size} ranks traced{steps} "
                f"(--ranks all: about {_rounded(self._whole_s())} so far)"
            )
        return f"all {size} ranks traced{steps}, about {_rounded(self.all_s)} of --budget {self._budget_s:g} s"

    def _lines(self) -> str:
        """Return the lines at which the ranks that did not run could behave differently, the most likely first."""
        assert self.sample is not None
        traced = self.sample.traced
        uses = [use for use in self._uses() if use.outcomes is None or use.tells_apart(traced)]
        uses.sort(key=lambda use: (use.outcomes is None, use.how == "text"))
        if not uses:
            return ""
        more = "" if len(uses) == 1 else f", and {len(uses) - 1} more {'line' if len(uses) == 2 else 'lines'}"
        return f"; {uses[0].where} uses the rank in a way that could differ ({uses[0].text}){more}"

    def _whole_s(self) -> float:
        """Return the estimated seconds of tracing every rank to the end."""
        sample = self.sample
        assert sample is not None
        total_s = START_S
        for kind, ranks in sample.by_kind.items():
            for rank in ranks:
                trace = self._traces.get(rank)
                own_s = RANK_S + self._host_s.get(rank, 0.0) + (0.0 if trace is None else trace.operators * OPERATOR_S)
                total_s += own_s * (1 + sample.sizes[kind] - len(ranks) if rank == ranks[0] else 1)
        return total_s


def _rounded(seconds: float) -> str:
    """Return an estimate of time as a round number."""
    minutes = seconds / 60.0
    if minutes < 2.0:
        return f"{max(1.0, seconds):.0f} s" if seconds < 10.0 else f"{round(seconds, -1):.0f} s"
    return f"{minutes:.0f} min" if minutes < 120.0 else f"{minutes / 60.0:.0f} h"
