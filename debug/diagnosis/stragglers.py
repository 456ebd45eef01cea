"""Find ranks that make the others wait at every step, from the records of a simulation.

A real job has noise, and many steps: `pace` judges it.

No single wait needs to be long: one second of every two is half of a cluster. Two questions are asked about each
rank, both about durations on its own clock, so that hosts with different clocks accuse no rank:

- How long did the others wait for it? In a collective in which every rank needs every other, the last rank to arrive
is in the call for the shortest time, and the others are in it longer by the time they waited (`share`).
- Did it really work longer, or was it kept waiting itself (by a message, by another group)? Only time outside any
call is its own.

A section is the work before one collective of the step: a rank that is late now and then, for a checkpoint, is not
late at most turns of any section.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import median_low

from distsim.debug.records import CallRecord, Finding, Group, State
from distsim.debug.records.kinds import Kind

EVERYBODY = frozenset(
    {
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_coalesced",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
    }
)
"""Collectives in which each member waits for all others.

In other collectives, members wait for the root, or the root for them.
"""
MIN_SHARE = 0.2
"""Smallest share of the recorded time that is worth reporting, because ranks are never equally fast."""
HABIT = 0.75
"""A section is habitually late if the rank was late in this fraction of its turns. Noise alone makes half of them
late; checkpoints, evaluations and a compiling first step are rare turns.
"""
LATE = 0.25
"""Delay for the other ranks from which a turn counts as late, as a share of an average turn."""
NEW_STEP = 3.0
"""Length of a pause, relative to the usual one, that starts a new step.

The first collective of a step is a section of its own, even if equal collectives follow.
"""
STEPS = 4
"""Smallest number of step beginnings that are trusted."""
FEWEST_CALLS = 40
"""Calls of a rank from which the pace of a simulated job is judged, too."""
THIRDS = 12
"""Number of collectives from which the first, the middle and the last third must all show the delay: an evaluation at
the end has a section of its own, to which its rank is late at every turn."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Thresholds that must be exceeded before a rank is reported."""

    meetings: int
    """Collectives of one group that all its members have completed."""
    lost_s: float
    """Seconds that the other ranks must have waited for the rank in that time."""


PLANTED = Demand(meetings=3, lost_s=0.0)
"""Demand for a simulation with injected faults, which has no noise and should show them."""
SIMULATED = Demand(meetings=5, lost_s=0.01)
"""Demand for any other simulation: programs of a few microseconds are not worth an accusation."""


@dataclass(frozen=True, slots=True)
class LateRank:
    """A straggler and its cost for the other ranks."""

    rank: int
    group: Group
    lost_s: float
    """Seconds that the others waited for the rank (their lower median, so that one early rank accuses no one)."""
    share: float
    """Share of the examined time."""
    late: int
    """Number of collectives to which the rank came late, of *meetings*."""
    meetings: int
    call: CallRecord
    """The one that it was latest to."""


@dataclass(slots=True)
class _Turn:
    """One meeting, as the comparison needs it."""

    calls: dict[int, CallRecord]
    section: Hashable
    work_s: dict[int, float]
    """Time of each rank's own work since the previous collective, by rank."""


@dataclass(slots=True)
class _Toll:
    """Cost that one rank caused the others."""

    lost_s: float = 0.0
    late: int = 0
    by_section: dict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list))
    by_third: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    worst: tuple[float, CallRecord | None] = (0.0, None)


def stragglers(records: Mapping[int, Sequence[CallRecord]], demand: Demand) -> list[LateRank]:
    """Return the ranks that keep the members of a group waiting, the worst first; each once, for the group it hurts
    most.

    Pure. *records* are the last calls of each rank, in program order. Nobody is named in a group whose members also
    send each other messages: they are stages of a pipeline, and do different work by design.
    """
    meetings: dict[Group, dict[int, dict[int, CallRecord]]] = defaultdict(lambda: defaultdict(dict))
    friends: dict[int, set[int]] = defaultdict(set)
    for rank in sorted(records):
        for call in records[rank]:
            if call.is_p2p and call.peer is not None:
                friends[rank].add(call.peer)
                friends[call.peer].add(rank)
            elif call.op in EVERYBODY and call.state is State.COMPLETED and call.completed_s is not None:
                meetings[call.group][call.seq][rank] = call
    away: dict[int, _Away] = {}
    worst: dict[int, LateRank] = {}
    for group, numbered in meetings.items():
        if len(group.ranks) < 2 or any(friends[rank].intersection(group.ranks) for rank in group.ranks):
            continue
        full = [numbered[seq] for seq in sorted(numbered) if len(numbered[seq]) == len(group.ranks)]
        if len(full) < demand.meetings or _keep_pace(group, full, demand):
            continue
        away = away or {rank: _Away(calls) for rank, calls in records.items()}
        for straggler in _in_group(group, full, away, demand):
            if straggler.rank not in worst or worst[straggler.rank].lost_s < straggler.lost_s:
                worst[straggler.rank] = straggler
    return sorted(worst.values(), key=lambda s: (-s.lost_s, s.rank))


def _keep_pace(group: Group, full: Sequence[dict[int, CallRecord]], demand: Demand) -> bool:
    """Return whether no rank can be named, because longest and shortest calls of each meeting are close.

    Most jobs need no further check.
    """
    any_rank = group.ranks[0]
    span_s = (full[-1][any_rank].completed_s or 0.0) - full[0][any_rank].issued_s
    at_most_s = 0.0
    for met in islice(full, 1, None):
        inside = [(call.completed_s or 0.0) - call.issued_s for call in met.values()]
        at_most_s += max(inside) - min(inside)
    return span_s <= 0.0 or at_most_s / span_s < MIN_SHARE or at_most_s < demand.lost_s


class _Away:
    """Time that a rank spent inside calls, up to any moment."""

    def __init__(self, calls: Sequence[CallRecord]) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []
        total = 0.0
        for call in sorted((c for c in calls if c.completed_s is not None), key=lambda c: c.issued_s):
            begin, end = call.issued_s, call.completed_s or call.issued_s
            if self._ends and begin <= self._ends[-1]:
                if end > self._ends[-1]:
                    total += end - self._ends[-1]
                    self._ends[-1] = end
                continue
            self._begins.append(begin)
            self._ends.append(end)
            self._before.append(total)
            total += end - begin

    def until(self, moment_s: float) -> float:
        index = bisect_right(self._begins, moment_s) - 1
        if index < 0:
            return 0.0
        return self._before[index] + min(moment_s, self._ends[index]) - self._begins[index]


def _in_group(
    group: Group, full: Sequence[dict[int, CallRecord]], away: Mapping[int, _Away], demand: Demand
) -> list[LateRank]:
    turns = _turns(full, away)
    any_rank = group.ranks[0]
    span_s = (full[-1][any_rank].completed_s or 0.0) - full[0][any_rank].issued_s
    tolls = _tolls(group, turns, span_s)
    stragglers = []
    for rank, toll in tolls.items():
        share = toll.lost_s / span_s
        if share < MIN_SHARE or toll.lost_s < demand.lost_s or toll.worst[1] is None:
            continue
        habitual_s = sum(sum(costs) for costs in toll.by_section.values() if _habit(costs, span_s / len(turns)))
        if habitual_s < toll.lost_s / 2:
            continue
        if len(turns) >= THIRDS and min(toll.by_third) < MIN_SHARE / 2 * span_s / 3:
            continue
        stragglers.append(LateRank(rank, group, toll.lost_s, share, toll.late, len(turns), toll.worst[1]))
    # Where most are slow, nobody is: that is noise.
    return stragglers if 2 * len(stragglers) <= len(group.ranks) else []


def _turns(full: Sequence[dict[int, CallRecord]], away: Mapping[int, _Away]) -> list[_Turn]:
    """Return the meetings after the first, in sections; the work before the first one is not known."""
    turns: list[_Turn] = []
    pauses: list[float] = []
    for before, met in pairwise(full):
        work: dict[int, float] = {}
        for rank, call in met.items():
            since_s = before[rank].issued_s
            inside_s = away[rank].until(call.issued_s) - away[rank].until(since_s)
            work[rank] = max(0.0, call.issued_s - since_s - inside_s)
        turns.append(_Turn(met, None, work))
        pauses.append(min(work.values()))
    usual_s = median_low(pauses) if pauses else 0.0
    position = 0
    last: tuple[object, ...] = ()
    places: list[tuple[Hashable, int]] = []
    for turn, pause_s in zip(turns, pauses, strict=True):
        call = next(iter(turn.calls.values()))
        key = (call.op, call.site, call.input_shapes, call.dtypes)
        position = 0 if key != last or pause_s > NEW_STEP * usual_s else position + 1
        last = key
        places.append((key, position))
    begun = Counter(key for key, position in places if position == 0)
    for turn, (section, start) in zip(turns, places, strict=True):
        turn.section = (section, start if begun[section] >= STEPS else 0)  # else nothing shows where a step begins
    return turns


def _tolls(group: Group, turns: Sequence[_Turn], span_s: float) -> dict[int, _Toll]:
    tolls: dict[int, _Toll] = {rank: _Toll() for rank in group.ranks}
    for number, turn in enumerate(turns):
        inside = {rank: (call.completed_s or 0.0) - call.issued_s for rank, call in turn.calls.items()}
        waits, works = sorted(inside.values()), sorted(turn.work_s.values())
        for rank, toll in tolls.items():
            waited_s = _others(waits, inside[rank]) - inside[rank]
            longer_s = turn.work_s[rank] - _others(works, turn.work_s[rank])
            cost_s = max(0.0, min(waited_s, longer_s))
            toll.by_section[turn.section].append(cost_s)
            toll.by_third[3 * number // len(turns)] += cost_s
            toll.lost_s += cost_s
            toll.late += cost_s > LATE * MIN_SHARE * span_s / len(turns)
            if cost_s > toll.worst[0]:
                toll.worst = (cost_s, turn.calls[rank])
    return tolls


def _others(ordered: Sequence[float], own: float) -> float:
    """Return the lower median of all but one of *ordered* whose value is *own*."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle] if middle < bisect_left(ordered, own) else ordered[middle + 1]


def _habit(costs: Sequence[float], turn_s: float) -> bool:
    late = sum(cost > LATE * MIN_SHARE * turn_s for cost in costs)
    return len(costs) >= 2 and late >= HABIT * len(costs)


def straggler_text(straggler: LateRank) -> str:
    """Return one clause: `rank 3 came late to 40 of 41 collectives and kept ... waiting for 20 s, 48% of the time`."""
    return (
        f"rank {straggler.rank} came late to {straggler.late} of {straggler.meetings} collectives and kept "
        f"the others waiting for {straggler.lost_s:.3g} s, {straggler.share:.0%} of the time"
    )


def straggler_findings(records: Mapping[int, Sequence[CallRecord]], demand: Demand) -> list[Finding]:
    """Return one finding for all stragglers, the worst named first; empty if all keep pace."""
    found_stragglers = stragglers(records, demand)
    if not found_stragglers:
        return []
    first = found_stragglers[0]
    return [
        Finding(
            Kind.STRAGGLER,
            tuple(sorted(one.rank for one in found_stragglers)),
            "; ".join(straggler_text(one) for one in found_stragglers[:8]),
            group=first.group,
            call=first.call,
            site=first.call.site,
            suggestion=f"Look at what rank {first.rank} does before {first.call.site}: its share of the data, its "
            "host, its clock speed.",
        )
    ]
