"""Silent faults of a real job, from the files that its ranks have left on this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distsim.debug.diagnosis.silent.facts_file import SavedFacts, read_facts
from distsim.debug.diagnosis.silent.finding import Level, SilentFinding
from distsim.debug.diagnosis.silent.judge import judge
from distsim.debug.messages.phrases import ranks_text
from distsim.debug.rings.jobdir import facts_path

__all__ = ["Search", "search"]

MOST_JUDGED = 1_500_000
"""Parameters, summed over the steps of all ranks, that are judged: half a minute or a whole one."""


@dataclass
class Search:
    """What came of it."""

    findings: list[SilentFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What was not looked at, and why, a line each."""

    @property
    def has_error(self) -> bool:
        """Whether a finding is an error, and not a warning."""
        return any(one.level is Level.ERROR for one in self.findings)


def search(rings: Mapping[int, Path], world_size: int, allowed: Sequence[str] = ()) -> Search:
    """Judge the facts of all ranks of a job.

    Args:
        rings: the ring of each rank on this host; its facts lie beside it.
        world_size: ranks of the job.
        allowed: patterns `kind:tensor` of what the user knows to be right.
    """
    result = Search()
    if len(rings) < world_size:
        here = ranks_text(tuple(sorted(rings)))
        result.notes.append(f"silent faults: not searched, only {here} of {world_size} ran on this host")
        return result
    saved = _read(rings, result.notes)
    for rank, one in saved.items():
        result.notes += [f"silent faults: rank {rank} {note}" for note in one.notes]
    if any(one.saw_gpu for one in saved.values()):
        result.notes.append("silent faults: GPU tensors are not looked at")
    facts = {rank: one.facts for rank, one in saved.items() if one.facts.steps}
    for rank, of_rank in facts.items():
        of_rank.rank = rank
    if len(facts) > 1:
        result.findings = judge(facts, allowed)
    return result


def _read(rings: Mapping[int, Path], notes: list[str]) -> dict[int, SavedFacts]:
    saved = {}
    for rank, ring in sorted(rings.items()):
        path = facts_path(ring)
        if not path.exists():  # it made no step
            continue
        try:
            saved[rank] = read_facts(path, MOST_JUDGED / len(rings))
        except (OSError, ValueError) as error:
            notes.append(f"silent faults: not searched on rank {rank}: {error}")
    return saved
