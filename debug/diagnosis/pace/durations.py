"""Pace by durations of collectives on the device, which need no common clock.

A collective ends on all ranks at once and includes the wait for the last rank: the rank that came last has the shortest
duration. Records are matched by their number; some ranks may have lost some (github.com/NVIDIA/nccl/issues/1945).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distsim.debug.diagnosis.pace.job import JobPace
from distsim.debug.diagnosis.pace.turns import Turns
from distsim.debug.diagnosis.stragglers import EVERYBODY
from distsim.debug.records import Group


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A collective that has ended, as one rank recorded it."""

    group: Group
    number: Hashable
    """Equal on all members for one call."""
    op: str
    content: Hashable
    """Equal if operation, shapes and the line of the program are equal."""
    duration_s: float
    ended_s: float
    """Any clock: it orders the calls, and says how long a step is."""


def durations_pace(
    calls: Mapping[int, Sequence[TimedCall]], hosts: Mapping[int, str] | None = None
) -> tuple[JobPace, int]:
    """Return the pace of a job, and the number of calls that some members of the group have not recorded.

    Args:
        calls: The calls of each rank.
        hosts: Host of each rank, as far as known.
    """
    by_group: dict[Group, dict[Hashable, dict[int, TimedCall]]] = defaultdict(lambda: defaultdict(dict))
    for rank, several in calls.items():
        for call in several:
            if call.op in EVERYBODY:
                by_group[call.group][call.number][rank] = call
    job, unmatched = JobPace(), 0
    job.hosts = dict(hosts or {})
    keys: dict[Hashable, int] = {}
    for group, numbered in by_group.items():
        ranks = group.ranks
        if len(ranks) < 2 or not any(len(met) > 1 for met in numbered.values()):
            continue
        whole = [met for met in numbered.values() if all(rank in met for rank in ranks)]
        unmatched += len(numbered) - len(whole)
        if len(whole) < 3:
            continue
        whole.sort(key=lambda met: float(np.median([call.ended_s for call in met.values()])))
        durations = np.array([[met[rank].duration_s for met in whole] for rank in ranks])
        ended = np.median([[met[rank].ended_s for met in whole] for rank in ranks], axis=0)
        times, at = np.unique(ended, return_index=True)
        ended = np.interp(np.arange(len(whole)), at, times)  # several are written at one time
        worked = np.maximum(np.diff(ended, prepend=ended[0]) - durations.max(axis=0), 0.0)  # the first to arrive
        first = [met[ranks[0]] for met in whole]
        job.add(
            (group, 0),
            Turns(
                worked + durations.max(axis=0) - durations,
                np.array([keys.setdefault((call.op, call.content), 2 * len(keys)) for call in first], np.int64),
                ended,
                np.arange(len(whole)),
                durations.min(axis=0),
                np.ones(len(whole), bool),
            ),
        )
    return job, unmatched
