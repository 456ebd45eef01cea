"""The faults of one world, which the simulator calls at every point where something can go wrong.

Every world has such an object; without rules it does nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from distsim.debug.records import CallRecord, Finding
from distsim.sim.faults.fault import Fault, Rule
from distsim.sim.faults.links import LinkState, stalled_links
from distsim.sim.faults.storage_faults import seen_accesses

if TYPE_CHECKING:
    from distsim.cluster.graph.link import Slot
    from distsim.sim.c10d.work import Arrival
    from distsim.sim.isolation.process import RankTask, SimProcess
    from distsim.sim.world import World


class Faults:
    """All faults of a world, called in the order of the rules."""

    def __init__(self, world: World, rules: Sequence[Rule] = ()) -> None:
        self.world = world
        self.faults: list[Fault[Any]] = []
        if rules:
            self.links = LinkState(world.facts.network)
            self.faults = [rule.planted(world, number) for number, rule in enumerate(rules)]
        self.are_planted = bool(self.faults)
        """Whether there are faults; then they are called in the thread that makes a call."""
        self._at_calls = self._who_answer("on_call")
        self._at_starts = self._who_answer("on_start")
        self._after_data = self._who_answer("after_data")
        self._computing = self._who_answer("compute_s")
        self._launching = self._who_answer("host_s")
        self._on_gpus = self._who_answer("kernel_s")
        self._at_accesses = self._who_answer("on_access")
        self._connecting = self._who_answer("on_connect")

    def _who_answer(self, question: str) -> tuple[Fault[Any], ...]:
        neutral = getattr(Fault, question)
        return tuple(fault for fault in self.faults if getattr(type(fault), question) is not neutral)

    def touched(self, slots: Sequence[Slot]) -> dict[int, tuple[int, ...]]:
        """Return the numbers of the faults that touch each rank, by rank."""
        numbers: dict[int, tuple[int, ...]] = {}
        for number, fault in enumerate(self.faults):
            for rank in fault.rule.touches(slots):
                numbers[rank] = (*numbers.get(rank, ()), number)
        return numbers

    # -- what the simulator asks: see Fault

    def begin(self) -> None:
        for fault in self.faults:
            fault.rule.check(self.world.facts.cluster, self.world.world_size)
            fault.begin()

    def on_call(self, task: RankTask, record: CallRecord) -> None:
        for fault in self._at_calls:
            fault.on_call(task, record)

    def on_start(self, members: Sequence[Arrival]) -> None:
        for fault in self._at_starts:
            fault.on_start(members)

    def after_data(self, members: Sequence[Arrival]) -> None:
        for fault in self._after_data:
            fault.after_data(members)

    def compute_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        for fault in self._computing:
            seconds = fault.compute_s(process, start_s, seconds)
        return seconds

    def host_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        for fault in self._launching:
            seconds = fault.host_s(process, start_s, seconds)
        return seconds

    def kernel_s(self, process: SimProcess, start_s: float, seconds: float) -> float:
        for fault in self._on_gpus:
            seconds = fault.kernel_s(process, start_s, seconds)
        return seconds

    def on_connect(self, task: RankTask, host_name: str, port: int, timeout: timedelta, explicit: bool) -> None:
        for fault in self._connecting:
            fault.on_connect(task, host_name, port, timeout, explicit)

    def accesses(self) -> AbstractContextManager[None]:
        """Return a context in which file accesses of ranks are reported to the faults, if a fault concerns them."""
        return seen_accesses(self._on_access) if self._at_accesses else contextlib.nullcontext()

    def _on_access(self, task: RankTask, path: str) -> None:
        for fault in self._at_accesses:
            fault.on_access(task, path)

    # -- what the report says

    @property
    def notes(self) -> list[str]:
        """Return one sentence for each fault that struck."""
        return [f"injected: {fault.rule}, {fault.rule.when}" for fault in self.faults if fault.struck_s is not None]

    @property
    def never_struck(self) -> list[Rule]:
        """Return the rules that never took effect, because their call, file or connection did not occur."""
        return [fault.rule for fault in self.faults if fault.struck_s is None]

    def findings(self) -> list[Finding]:
        """Return what guards on links, payloads and arrivals would have found by now."""
        if not self.faults:
            return []
        return [
            *(finding for fault in self.faults for finding in fault.findings()),
            *stalled_links(self.world, self.links),
        ]
