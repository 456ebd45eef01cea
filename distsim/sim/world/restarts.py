"""Ranks that are killed and started again, and jobs that go on without ranks that died."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distsim.debug.records import Phase

if TYPE_CHECKING:
    from distsim.debug.records import Evidence
    from distsim.sim.isolation.process import SimProcess

INIT = "init_process_group"


class Restarts:
    """The ranks of *world* that were started again or left behind."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.start: Callable[[SimProcess], None] | None = None
        """Starts the program of a rank's process."""
        self.died_s: dict[int, float] = {}
        """When ranks were killed that are started again, by rank."""
        self.left_behind: set[int] = set()
        """Ranks that died, and without which the others reconfigured their groups and went on."""

    def begin_again(self, process: SimProcess, after_s: float) -> None:
        """Start the program of *process*, a rank that is being killed, again on its slot after *after_s*."""
        world = self._world
        world.live_tasks += 1  # the job is not over
        self.died_s[process.rank] = world.now_s
        world.note("what ranks did before they were killed and started again is not in this report")

        def begin() -> None:
            assert self.start is not None
            world.live_tasks -= 1
            del world.rank_processes[process.rank]
            count = str(process.family.restarts + 1).encode()
            environ = {**world.shared.environ_of(process.slot), b"TORCHELASTIC_RESTART_COUNT": count}
            world.leave()
            again = world.new_process(process.slot, environ, sys.argv, process.rank)
            again.family.restarts = process.family.restarts + 1
            self.start(again)

        timer = world.timer(after_s)
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: begin())

    def seen_as(self, rank: int) -> SimProcess | None:
        """Return the process that is *rank* to the others: one that was started again alone, and has not met them, is
        still the one that was killed."""
        processes: dict[int, SimProcess] = self._world.rank_processes
        process = processes.get(rank)
        if process is None or not process.family.restarts or self.died_s.keys() >= processes.keys():
            return process
        joins = all(record.op == INIT and not record.done for record in process.records)
        first: SimProcess = next(p for p in self._world.processes if p.rank == rank and p.is_rank)
        return first if joins else process

    def look_for_recoveries(self, evidence: Evidence) -> None:
        """Note how ranks went on without others that died."""
        if not self.died_s and all(
            state.phase not in (Phase.KILLED, Phase.EXITED) for state in evidence.ranks.values()
        ):
            return
        from distsim.debug.diagnosis.causes.recovery import recoveries

        for recovery in recoveries(evidence, self.died_s):
            self.left_behind.update(recovery.lost)
            self._world.note(recovery.text)
