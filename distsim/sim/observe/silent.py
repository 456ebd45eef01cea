"""Silent wrong results of a simulation: a collector a process, real values only, and the findings at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from distsim.debug.diagnosis.silent.collect.collector import Collector
from distsim.debug.diagnosis.silent.collect.hooks import function_patches
from distsim.debug.diagnosis.silent.collect.sketch import array_of
from distsim.debug.diagnosis.silent.facts import RankFacts, Severity, SilentFinding, SilentKind
from distsim.debug.diagnosis.silent.judge import judge
from distsim.debug.messages import ranks_text, site_text
from distsim.sim.isolation.process import current_task
from distsim.sim.observe.origins import Meetings, Origin, first_difference, resolve
from distsim.sim.observe.provenance import Provenance

if TYPE_CHECKING:
    from distsim.sim.isolation.process import SimProcess
    from distsim.sim.world import World

MOST_RANKS = 64
"""Largest number of ranks for which a simulation searches for silent faults by default."""


def current_collector() -> Collector | None:
    """Return the collector of the running rank; None outside of ranks, and if silent faults are not searched for."""
    task = current_task()
    return None if task is None else task.process.observers.silent


def collector_of(process: SimProcess) -> Collector:
    """Return a new collector for *process*, which reads values."""
    return Collector(process.rank, read=reader_of(process))


def collectors_of_origins() -> Callable[[SimProcess], Collector]:
    """Return a function that creates collectors for a run in which tensors on GPUs have origins instead of values."""
    meetings = Meetings()

    def collector_of_origins(process: SimProcess) -> Collector:
        collector: Collector
        provenance = Provenance(
            meetings, lambda index: process.accelerators.generator(index), lambda: collector.num_steps
        )
        collector = Collector(process.rank, read=provenance.read, sketch_of=provenance.sketch)
        process.observers.provenance = provenance
        return collector

    return collector_of_origins


def reader_of(process: SimProcess) -> Callable[[Any], Any]:
    """Return the values of tensors on the CPU, and with `--data real` of those on simulated GPUs."""
    if process.accelerators is None or not process.port.facts.data.real:
        return array_of

    def read(tensor: Any) -> Any:
        if not getattr(tensor, "is_cuda", False):
            return array_of(tensor)
        values = process.accelerators.values
        host = values.host(tensor) if values.keeps(tensor.numel(), tensor.dtype) else None
        return None if host is None or values.guessed(tensor) else array_of(host)

    return read


def silent_patches() -> list[tuple[Any, str, Any]]:
    """Return patches (holder, attribute, replacement) for the functions of torch that the collectors hear of."""
    return function_patches(current_collector)


def silent_findings(world: World, allowed: Sequence[str]) -> list[SilentFinding]:
    """Return the silent findings in the facts of the ranks that ran."""
    traces = [process.observers.provenance for process in world.processes]
    sketches = [pair for trace in traces if trace for pair in trace.vectors]
    if sketches:
        resolve(sketches)
    facts = {}
    for process in world.processes:
        recorder = process.observers.silent
        if recorder is None:
            continue
        recorder.facts.rest = recorder.window
        if process.is_rank and process.rank not in world.restarts.died_s and not recorder.facts.is_empty:
            recorder.facts.rank = process.rank
            facts[process.rank] = recorder.facts
        if recorder.failure is not None:
            kind = type(recorder.failure).__name__
            world.note(
                f"rank {process.rank} was searched for silent faults only until the search itself failed with {kind}"
            )
    findings = judge(facts, allowed) if len(facts) > 1 else []
    if not sketches:
        return findings
    origins = {id(vector): origin for vector, origin in sketches}
    return [_by_origins(finding, facts, origins) for finding in findings if finding.kind not in _OF_VALUES]


_OF_VALUES = frozenset(
    {
        *(SilentKind.GRADIENT_SCALE, SilentKind.MIXED_SCALE, SilentKind.STALE_GRADIENT, SilentKind.SAME_BATCH),
        *(SilentKind.TOKENS_WEIGH_DIFFERENTLY, SilentKind.EQUAL_DROPOUT, SilentKind.SHARDS_ALIKE),
    }
)
"""Kinds that calculate with values, which origins do not give."""
_OF_EQUALITY = frozenset(
    {
        *(SilentKind.REPLICAS_DIFFER_AT_START, SilentKind.REPLICAS_DIVERGE, SilentKind.CHANGED_OUTSIDE_STEP),
        *(SilentKind.OPTIMIZER_STATE_DIFFERS, SilentKind.REPLICATE_IS_NOT, SilentKind.BUFFERS_DIFFER),
        *(SilentKind.DROPOUT_DIFFERS, SilentKind.TIED_NOT_SYNCHRONIZED),
    }
)
"""Kinds that only compare whether values are equal."""
_NAMES = dict.fromkeys(("part", "parts", "view", "strided"), "a part of a tensor") | {
    "from the host": "data of the host"
}


def _by_origins(finding: SilentFinding, facts: Mapping[int, RankFacts], origins: Mapping[int, Origin]) -> SilentFinding:
    """Return *finding* as a warning, with the line where the values begin to differ, if it rests on origins."""
    if finding.kind not in _OF_EQUALITY:
        return finding
    begin, suggestion = "", finding.suggestion
    for roles in (("gradients", "after"), ("before",)):
        tensors = [origin for rank in finding.ranks if (origin := _origin(finding, facts[rank], roles, origins))]
        unlike = next((pair for pair in pairwise(tensors) if pair[0].key != pair[1].key), None)
        difference = first_difference(*unlike) if unlike else None
        if difference is not None:
            name, site = difference
            begin = f" The values begin to differ with {_NAMES.get(name, name)} at {site_text(site, function=True)}."
            if _is_random(name):
                ranks = ranks_text(finding.ranks)
                suggestion = (
                    f"Give {ranks} the same generator state before {site}. If the draws may differ: {suggestion}"
                )
            break
    text = f"{finding.explanation}{begin} This compares how values are computed; the values are not simulated."
    return replace(finding, level=Severity.WARNING, distance=None, explanation=text, suggestion=suggestion)


def _is_random(operator: str) -> bool:
    packet = getattr(torch.ops.aten, operator, None)
    overloads = () if packet is None else (getattr(packet, name) for name in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _origin(
    finding: SilentFinding, facts: RankFacts, roles: Sequence[str], origins: Mapping[int, Origin]
) -> Origin | None:
    """Return the origin of the finding's first tensor in its step."""
    for step in facts.steps:
        for number in step.parameters if step.number == max(1, finding.step) else ():
            if facts.parameters[number].name == (finding.tensors or ("",))[0]:
                vectors = (getattr(step, role).get(number) for role in roles)
                return next((origins[id(vector)] for vector in vectors if id(vector) in origins), None)
    return None
