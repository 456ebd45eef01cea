"""Who kept the others waiting, read off the records of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from distsim.debug.kinds import Kind
from distsim.debug.records import CallRecord, Finding, Group

__all__ = ["find_stragglers"]

MIN_MEETINGS = 3
"""Fewer say nothing about a habit."""
MIN_SHARE_OF_RUN = 0.2
"""Less is not worth a word: ranks are never equally fast."""


def find_stragglers(records: Mapping[int, Sequence[CallRecord]], min_share: float = MIN_SHARE_OF_RUN) -> list[Finding]:
    """One finding for the ranks that came last to most collectives and cost the others *min_share* of the run,
    the worst named first.

    Lateness is counted from the lower median of the arrivals, so that one early rank makes no stragglers.
    """
    meetings: dict[tuple[Group, int], list[CallRecord]] = defaultdict(list)
    for rank in sorted(records):
        for record in records[rank]:
            if not record.is_p2p and record.new_ranks is None and record.op != "init_process_group":
                meetings[record.group, record.seq].append(record)
    full = [met for (group, _), met in meetings.items() if len(met) == len(group.ranks) > 1]
    if len(full) < MIN_MEETINGS:
        return []
    first_s = min(r.issued_s for met in full for r in met)
    last_s = max(r.completed_s if r.completed_s is not None else r.issued_s for met in full for r in met)
    late_s: dict[int, float] = defaultdict(float)
    times: dict[int, int] = defaultdict(int)
    present: dict[int, int] = defaultdict(int)
    worst: dict[int, tuple[float, CallRecord]] = {}
    for met in full:
        arrivals = sorted(r.issued_s for r in met)
        usual_s = arrivals[(len(arrivals) - 1) // 2]
        for record in met:
            by_s = record.issued_s - usual_s
            present[record.rank] += 1
            if by_s > 0.0:
                late_s[record.rank] += by_s
                times[record.rank] += 1
                if record.rank not in worst or by_s > worst[record.rank][0]:
                    worst[record.rank] = (by_s, record)
    span_s = last_s - first_s
    slow = [
        rank
        for rank in sorted(late_s, key=lambda r: (-late_s[r], r))
        if late_s[rank] >= min_share * span_s and 2 * times[rank] >= present[rank]
    ]
    if not slow:
        return []
    told = [
        f"rank {rank} came late to {times[rank]} of {present[rank]} collectives and kept the others waiting for "
        f"{late_s[rank]:.3g} s, {late_s[rank] / span_s:.0%} of the run"
        for rank in slow
    ]
    _, record = worst[slow[0]]
    return [
        Finding(
            Kind.STRAGGLER,
            tuple(sorted(slow)),
            "; ".join(told),
            group=record.group,
            call=record,
            site=record.site,
            suggestion=f"Look at what rank {slow[0]} does before {record.site}: its share of the data, its host, its "
            "clock speed.",
        )
    ]
