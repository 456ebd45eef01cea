"""Run the ranks of a mismatch on to their next wait, as real ones would before anybody stops them.

A rank that has started several asynchronous calls goes on to wait for the first of them; the calls that it
makes until then are evidence in a real job, so they are recorded here, too. No call ends: what a rank would
do after a call that never ends is not known of a real job, and a verdict must not rest on it. The output of the
ranks is muted, nothing of theirs takes effect (io_barrier.py), and their states are put back as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.sim.c10d.work import SimWork
from distsim.sim.isolation.process import SimProcess

if TYPE_CHECKING:
    from distsim.sim.world import World

__all__ = ["Lookahead"]

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
