"""What befalls some ranks once: at a time, wherever they are, or inside a call of theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from annotated_types import Len

from distsim.debug.records import CallRecord, Phase
from distsim.sim.faults.fault import Fault, Rank, Rule, check_ranks
from distsim.sim.kernel.task import Killed
from distsim.sim.observe.user_stack import user_stack
from distsim.text.ranks import of_ranks

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.sim.isolation.process import RankTask, SimProcess

__all__ = ["RankFault", "RankRule", "end_from_outside"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRule(Rule):
    """A rule about some ranks."""

    ranks: Annotated[tuple[Rank, ...], Len(1)]
    """Which ranks, such as [1, 3]."""

    @property
    def who(self) -> str:
        return of_ranks(self.ranks)

    def check(self, cluster: Cluster, world_size: int) -> None:
        check_ranks(self.ranks, world_size)


R = TypeVar("R", bound=RankRule)


class RankFault(Fault[R]):
    """Strikes each of its ranks at its time, or in its call, or some time after that."""

    def begin(self) -> None:
        if self.rule.when.call is None:
            self.later(self.rule.when.start_s, self._strike)

    def _strike(self) -> None:
        for rank in self.rule.ranks:
            process = self.world.rank_processes.get(rank)
            if process is not None and _target_is_alive(process):
                self.hit()
                self._befall(process)

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        when = self.rule.when
        if when.call is None or record.rank not in self.rule.ranks or not when.call.matches(record):
            return
        self.hit()
        if when.after_s > 0.0:
            self.later(when.after_s, lambda: self._befall(task.process))
        else:
            self.inside(task, record)
            record.issued_s = task.now_s()

    def _befall(self, process: SimProcess) -> None:
        if not _target_is_alive(process):
            return
        main = process.main_task
        frame = main.frame() if main is not None else None
        if frame is not None:
            process.last_stack = user_stack(frame)
        self.outside(process, main)

    def inside(self, task: RankTask, record: CallRecord) -> None:
        """In the rank's own thread, which makes the call."""
        raise NotImplementedError

    def outside(self, process: SimProcess, main: RankTask | None) -> None:
        """Scheduler side: wherever the rank is now. *main* is its main thread."""
        raise NotImplementedError


def _target_is_alive(process: SimProcess) -> bool:
    """Whether a fault can strike *process*; one that is ABSENT is on its way into the rendezvous."""
    return process.phase in (Phase.RUNNING, Phase.ABSENT)


def end_from_outside(process: SimProcess, phase: Phase, code: int, signal_name: str | None = None) -> None:
    """*process* ends now, wherever it is."""
    world = process.world
    if process.has_begun:
        world.kill_process(process, signal_name or "", code)
    else:  # before its first line: its thread finds its doom when it starts
        for task in process.tasks:
            task.doom = Killed()
    process.phase, process.exit_code, process.signal_name = phase, code, signal_name
    process.end_s = float(world.env.now)
