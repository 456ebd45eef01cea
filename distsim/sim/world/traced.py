"""Who of a job's ranks is traced: every one, or one of each kind of those that do the same (equal_ranks.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distsim.debug.records import CallRecord, Group, Phase
from distsim.debug.words.phrases import ranks_text
from distsim.sim.isolation.process import current_task
from distsim.sim.kernel.task import Killed
from distsim.sim.world.equal_ranks import EqualRanks, StartAgain, Unlike, families

if TYPE_CHECKING:
    import simpy
    from torch import Tensor

    from distsim.cluster.graph.link import Slot
    from distsim.sim.isolation.output import Held
    from distsim.sim.isolation.process import SimProcess

__all__ = ["Traced"]

FEW_UNEQUAL = 64
"""Up to so many ranks, all are traced where two make the same calls with other operators between them."""
FEW_ODD = 512
"""Up to so many, where three do that, each its own."""
FEW_VALUES = 64
"""Up to so many ranks, all are traced where they bring values of their own to a collective."""


class Job(Protocol):
    """What is asked of the world whose ranks these are."""

    env: simpy.Environment
    crash: BaseException | None
    """What ends the run; set here where it has to start again with other kinds."""
    world_size: int
    processes: list[SimProcess]
    rank_processes: dict[int, SimProcess]
    slots: list[Slot]

    @property
    def communicators(self) -> Mapping[Any, Any]: ...

    def note(self, text: str) -> None: ...

    def only_first_has_begun(self) -> bool: ...


class Traced:
    """The ranks of *job* that come themselves. *equal*: who does the same, None where every one is traced;
    *may_be_equal*: whether ranks are looked at as kinds once the program uses a GPU; *held*: the streams that show
    what ranks print only once the run will not begin anew."""

    def __init__(self, job: Job, equal: EqualRanks | None, may_be_equal: bool, held: Sequence[Held]) -> None:
        self._job = job
        self.equal = equal
        self._may_be_equal = may_be_equal
        self._held = held
        self._ranks: frozenset[int] = frozenset() if equal is None else equal.traced
        self.cuts_unevenly = False
        """Ranks have parts of several sizes of some parameter, the first of each kind the largest."""
        self.apart: set[Any] = set()
        """Threads in which each rank does its own by rights (checkpoints.py), so that they are not compared."""
        self.unseen = ""
        """What the run cannot tell of, because it did not trace every rank throughout."""

    def __contains__(self, rank: int) -> bool:
        return self.equal is None or rank in self._ranks

    @property
    def not_all(self) -> bool:
        """Whether some rank stands for others."""
        return self.equal is not None and len(self._ranks) < self._job.world_size

    def number_of(self, world_size: int) -> int:
        """How many of *world_size* ranks come themselves."""
        return len(self._ranks) if self.equal is not None and world_size == self._job.world_size else world_size

    def standing_for(self, group: Group) -> list[int] | None:
        """For each member of *group* the place of who arrives for it; None: everybody arrives."""
        if self.equal is None:
            return None
        try:
            return self.equal.standing_for(group.ranks, self._ranks)
        except Unlike:
            self.split_by(group)
            return list(range(len(group.ranks)))

    def uses_gpu(self) -> None:
        """The program uses a GPU for the first time: from here on one rank of each kind is enough."""
        if not self._may_be_equal:
            return
        self._may_be_equal = False
        job = self._job
        equal = EqualRanks.of_one_kind(job.world_size)
        equal.host_s = max(process.compute_s for process in job.processes)
        if equal.is_no_longer_small:
            equal.sample()
        if not job.only_first_has_begun():
            job.crash = StartAgain(equal, "the program uses GPUs")
            return
        self.equal, self._ranks = equal, equal.traced
        for process in list(job.processes):
            if process.rank not in self._ranks:
                assert process.main_task is not None
                process.main_task.cancel()
                job.processes.remove(process)
                del job.rank_processes[process.rank]

    def decide(self) -> None:
        """An operator came with which something may be decided (EqualRanks.saw_operator)."""
        equal = self.equal
        assert equal is not None
        if equal.is_no_longer_small:
            self._sample()
        elif equal.is_believed:
            self._go_on_with_few(equal)

    def computed(self, process: SimProcess) -> None:
        """A traced rank has computed on its host: all of a few would, and hold what they make of it, before any of them
        moves it to its GPU."""
        equal = self.equal
        if equal is not None and process.rank in self._ranks:
            equal.host_s = max(equal.host_s, process.compute_s)
            if equal.is_no_longer_small:
                self._sample()

    def _sample(self) -> None:
        """The program is not a small one: of its few ranks only one of each kind and one to compare it with go on."""
        equal, job = self.equal, self._job
        assert equal is not None
        gone = equal.sample()
        left = self._ranks - gone
        for communicator in job.communicators.values():
            members = set(communicator.group.ranks)
            if communicator.has_messages and members & gone and members & left:
                self.split_by(communicator.group)
                return
        self._give_up(gone)

    def split_by(self, group: Group) -> None:
        """Members of *group* send to each other: their places make them kinds."""
        assert self.equal is not None
        job = self._job
        made = [r.new_ranks for p in job.processes for r in p.calls.kept() if r.op == "new_group" and r.new_ranks]
        family = next((f for f in families(list(dict.fromkeys(made))) if group.ranks in f), [group.ranks])
        places = {rank: place for ranks in family for place, rank in enumerate(ranks)}
        equal = self.equal.split(places, f"its place in groups such as {group.label}")
        kinds = None if equal.kinds == self.equal.kinds else equal  # the same would come to the same end
        if job.crash is None:
            job.crash = StartAgain(kinds, f"ranks of group {group.label} send to each other")

    def share_gpus(self) -> None:
        """Ranks at other places on their nodes have brought GPUs of the same number: whether two of one node do is seen
        where a rank of each place is traced."""
        equal, job = self.equal, self._job
        if equal is None or job.crash is not None:
            return
        places = {slot.rank: slot.local_rank for slot in job.slots}
        split = equal.split(places, "its place on its node")
        if split.kinds != equal.kinds:
            job.crash = StartAgain(split, "ranks at several places on their nodes use GPUs of the same number")

    def saw_call(self, process: SimProcess, record: CallRecord, inputs: Sequence[Tensor] | None) -> None:
        """A traced rank makes a call; *inputs*: its values, where they are known."""
        equal, job = self.equal, self._job
        if equal is None or equal.compared or equal.values_differ or current_task() in self.apart:
            return
        equal.saw_call(process.rank, record, inputs)
        if equal.values_differ and equal.are_all_traced:
            self.equal = None  # each is traced for itself anyway
            return
        if equal.values_differ and job.world_size <= FEW_VALUES and job.crash is None:
            where = "" if record.site is None else f" at {record.site.file}:{record.site.line}"
            job.crash = StartAgain(None, f"ranks bring values of their own to {record.op}{where}")

    def ended_step(self, process: SimProcess) -> None:
        """A traced rank's optimizer has made a step: doubles that did the same are traced no more."""
        equal, job = self.equal, self._job
        for stream in self._held if job.crash is None else ():
            stream.release()
        self._held = ()
        if equal is None or equal.compared:
            return
        equal.ended_step(process.rank)
        while (found := equal.difference()) is not None:
            if equal.are_all_traced:
                self.equal = None
                return
            if not found.same_calls or job.world_size <= FEW_UNEQUAL:
                why = f"ranks {found.leader} and {found.double} did not do the same in step {found.step}"
                job.crash = job.crash or StartAgain(None, why)
                return
            calls = f"ranks {found.leader} and {found.double} make the same calls, with other operators between them"
            if not self.cuts_unevenly and not equal.witnessed:
                job.crash = job.crash or StartAgain(equal.with_witnesses(), f"{calls}: a third one says who is odd")
                return
            # torch.chunk gives the first ranks whole parts: what they do is the most that any rank does.
            odd = found.double if self.cuts_unevenly else equal.odd_one(found)
            if odd is None:
                return
            if odd == found.leader and not equal.set_apart:
                job.crash = job.crash or StartAgain(
                    equal.without(odd), f"{calls}, and rank {odd} is alone with its own"
                )
                return
            if odd < 0 and job.world_size <= FEW_ODD:
                job.crash = job.crash or StartAgain(None, f"{calls}, and a third one others still")
                return
            if odd < 0 or odd == found.leader:  # the first two are odd: so are many, and the first does most
                odd = found.double
            equal.own.add(odd)
            job.note(
                f"ranks {found.leader} and {odd} make the same calls, with other operators or shapes between them (the "
                f"last ranks have less of a tensor that is cut unevenly): rank {odd} is traced for itself, and rank "
                f"{found.leader} for all others of their kind (--ranks all traces every one)"
            )
        if equal.is_believed:
            self._go_on_with_few(equal)

    def _go_on_with_few(self, equal: EqualRanks) -> None:
        """Doubles have done what their leaders did for long enough."""
        job = self._job
        equal.compared = True
        if equal.values_differ:
            job.note(
                "ranks bring values of their own to collectives; of equal ranks one was traced, and its values stand "
                "for the others' (--ranks all traces every rank)"
            )
        gone = self._who_may_go(equal)
        left, steps = self._ranks - gone, max((len(steps) for steps in equal.steps.values()), default=0)
        if len(left) == job.world_size:
            return
        after = f" after step {steps}" if gone else ""
        others = ranks_text(sorted(set(range(job.world_size)) - left))
        self.unseen = f"what {others} may do otherwise{after} (--ranks all traces every rank throughout)"
        then = f"then {ranks_text(sorted(left))}" if gone else "and go on"
        job.note(
            f"{ranks_text(sorted(equal.traced))} of {job.world_size} were traced and compared for "
            f"{steps} step{'s' * (steps > 1)}, {then} for all of their kind (--ranks all traces every one throughout)"
        )
        self._give_up(gone)

    def tell(self) -> None:
        """A run whose ranks were never compared to the end: who was traced."""
        if self.equal is not None and not self.equal.compared and len(self._ranks) < self._job.world_size:
            others = sorted(set(range(self._job.world_size)) - self._ranks)
            self.unseen = f"what {ranks_text(others)} may do otherwise (--ranks all traces every rank)"
            self._job.note(
                f"{ranks_text(sorted(self._ranks))} of {self._job.world_size} were traced, for all of their kind"
            )

    def _who_may_go(self, equal: EqualRanks) -> frozenset[int]:
        """Of two ranks of a kind the second, unless it tells the user something that the first does not, whatever their
        numbers: many programs log on the last rank, and then those that it sends to stay with it (its pipeline). The
        first stays: more log on rank 0, at times not before a later step."""
        said = {
            rank: set().union(*(s.said for s in (p.stdout, p.stderr) if s is not None))
            for rank, p in self._job.rank_processes.items()
        }
        pairs = [(leader, double) for double, leader in equal.pairs() if double not in equal.own]
        last = dict(pairs)  # of several that log, one is enough
        gone = frozenset(d for leader, d in pairs if said[d] <= said[leader] or d != last[leader])
        groups = [communicator.group.ranks for communicator in self._job.communicators.values()]
        while needed := gone & equal.needed_by(groups, self._ranks - gone):
            gone -= needed
        return gone

    def _give_up(self, gone: frozenset[int]) -> None:
        """*gone* are traced no more: others arrive for them."""
        job = self._job
        self._ranks -= gone
        for rank in gone:
            self._retire(job.rank_processes.pop(rank))
        for communicator in list(job.communicators.values()):
            communicator.fewer_traced()
        task = current_task()
        if task is not None and task.doom is not None:
            raise task.doom

    def _retire(self, process: SimProcess) -> None:
        """*process* has been traced long enough; nothing of its end is seen."""
        process.phase, process.exit_code, process.end_s = Phase.FINISHED, 0, float(self._job.env.now)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.finish()
        self._job.processes.remove(process)
        if not process.has_begun and process.main_task is not None:
            process.main_task.cancel()
            return
        for task in process.tasks:
            task.doom = Killed()
            if task is not current_task():
                task.interrupt(task.doom)
