"""Silent wrong results of a simulation: a collector a process, real values only, and the findings at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.collect.hooks import function_patches
from distsim.debug.diagnosis.silent.collect.sketch import array_of
from distsim.debug.diagnosis.silent.finding import SilentFinding
from distsim.debug.diagnosis.silent.judge import judge
from distsim.sim.isolation.process import current_task

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

__all__ = ["MOST_RANKS", "collector_of", "current_collector", "reader_of", "silent_findings", "silent_patches"]

MOST_RANKS = 64
"""Ranks up to which a simulation looks for silent faults."""


def current_collector() -> Collector | None:
    """Return the collector of the running rank; None outside of ranks, and if silent faults are not searched for."""
    task = current_task()
    return None if task is None else task.process.silent


def collector_of(process: SimProcess) -> Collector:
    """A new collector for *process*."""
    return Collector(process.rank, read=reader_of(process))


def reader_of(process: SimProcess) -> Callable[[Any], Any]:
    """The values of tensors on the CPU, and with `--data real` of those on simulated GPUs."""
    if process.accelerators is None or not process.world.data.real:
        return array_of

    def read(tensor: Any) -> Any:
        if not getattr(tensor, "is_cuda", False):
            return array_of(tensor)
        values = process.accelerators.values
        host = values.host(tensor) if values.keeps(tensor.numel(), tensor.dtype) else None
        return None if host is None or values.guessed(tensor) else array_of(host)

    return read


def silent_patches() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, replacement) of the functions of torch that the collectors hear of."""
    return function_patches(current_collector)


def silent_findings(world: World, allowed: Sequence[str]) -> list[SilentFinding]:
    """Return the silent findings in the facts of the ranks that ran."""
    facts = {}
    for process in world.processes:
        if process.silent is not None and process.is_rank and process.silent.facts.steps:
            process.silent.facts.rank = process.rank
            process.silent.facts.rest = process.silent.window
            facts[process.rank] = process.silent.facts
        if process.silent is not None and process.silent.failure is not None:
            kind = type(process.silent.failure).__name__
            world.note(
                f"rank {process.rank} was searched for silent faults only until the search itself failed with {kind}"
            )
    return judge(facts, allowed) if len(facts) > 1 else []
