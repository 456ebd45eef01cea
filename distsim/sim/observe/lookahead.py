"""What the ranks of a mismatch would have called next.

`A B` against `B A`, a skipped call and an extra one look alike at the first call that differs. So
before the world stops, its ranks go on for a few calls that move nothing and end at once, with
their output muted, and no effect of theirs leaves them (effects.py): the calls they make are recorded,
and all else is put back as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.sim.c10d.work import SimWork
from distsim.sim.isolation.process import SimProcess

if TYPE_CHECKING:
    from distsim.sim.world import World

__all__ = ["Lookahead"]

CALLS = 4
"""Calls a rank may make beyond the mismatch."""
MAX_EVENTS = 50_000
WALL_LIMIT_S = 2.0

_KEPT = (
    "phase",
    "exit_code",
    "exception",
    "traceback_text",
    "origins",
    "end_s",
    "last_stack",
    "exposed_s",
    "idle_s",
    "compute_s",
)


class Lookahead:
    """Runs once, when *met* (the calls of one meeting) do not fit each other; without any, a guard has seen
    what is wrong, and nobody need go on."""

    def __init__(self, world: World, met: Sequence[SimWork]) -> None:
        self.world = world
        self._met = met
        self._calls: dict[int, int] = {}

    def passes(self, work: SimWork) -> None:
        """A call made while looking ahead: it ends at once, until its rank has made enough of them."""
        index = work.process.index
        self._calls[index] = self._calls.get(index, 0) + 1
        if self._calls[index] < CALLS:
            work.done.succeed()

    def run(self) -> None:
        if not self._met:
            return
        world = self.world
        kept = [self._keep(process) for process in world.processes]
        muted = [s for p in world.processes for s in (p.stdout, p.stderr) if s is not None and not s.muted]
        for stream in muted:
            stream.muted = True
        limit_s, world.host_timeout_s = world.host_timeout_s, WALL_LIMIT_S
        for work in self._met:
            if not work.done.triggered:
                work.done.succeed()
        steps = 0
        while world.env.peek() != float("inf") and steps < MAX_EVENTS and not world.stuck:
            world.env.step()
            steps += 1
        world.host_timeout_s = limit_s
        for stream in muted:
            stream.muted = False
        for process, values, slices in kept:
            for name, value in zip(_KEPT, values, strict=True):
                setattr(process, name, value)
            del process.slices[slices:]

    @staticmethod
    def _keep(process: SimProcess) -> tuple[SimProcess, list[object], int]:
        return process, [getattr(process, name) for name in _KEPT], len(process.slices)
