"""Pace of a whole job: its groups in steps, its slow ranks, what else costs time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from distsim.debug.diagnosis.pace.changes import LONGER, longer_since, pauses
from distsim.debug.diagnosis.pace.statistic import WINDOWS, Outlook, SlowRank, StepHistory
from distsim.debug.diagnosis.pace.steps import StepCutter
from distsim.debug.diagnosis.pace.turns import Floats, RankCalls, Turns, find_turns
from distsim.debug.diagnosis.stragglers import EVERYBODY, SIMULATED
from distsim.debug.records import CallRecord, Finding, Group, State
from distsim.debug.records.kinds import Kind

GroupKey = tuple[Group, int]
"""A group and the number of groups of that name that the process had before it."""
OWN_SHARE = 0.7
"""Share of a slow host's excess from which one of its ranks is at fault, and not the host."""
BESIDE = 3
"""Number of groups that make equal calls from which the transfers of one can be compared with those of the others."""
SLOWER_GROUP = 1.2


@dataclass(frozen=True)
class PaceNote:
    """A fact about the pace of a job that accuses no rank."""

    kind: str
    """`slow_host`, `slow_steps`, `slow_transfers`, `slow_group` or `periodic_pause`."""
    text: str
    figures: Mapping[str, float | str | list[int]]

    @property
    def key(self) -> tuple[str, str]:
        """Return a key that stays while the fact does."""
        return self.kind, str(self.figures.get("rank", self.figures.get("host", self.figures.get("group", ""))))


@dataclass
class GroupPace:
    """Turns and steps of one group."""

    history: StepHistory
    by_host: StepHistory | None = None
    """Mean own work of the ranks of each host, if there are several; its rows are `hosts`."""
    hosts: tuple[str, ...] = ()
    moved_s: Floats = field(default_factory=lambda: np.empty(0))
    """Time of the transfers of each of the last steps."""
    cutter: StepCutter = field(default_factory=StepCutter)
    last: int = -1
    """Number of the call that ended the last known turn."""


class JobPace:
    """Collects the steps of a job's groups from the calls of its ranks, as they become known.

    Attributes:
        groups: What is known of each group.
        numbers: Number of each group in `RankCalls.group`.
        pairs: Ranks that have sent each other messages.
        hosts: Host of each rank, as far as known. Ranks without one are on one host.
    """

    def __init__(self, span_s: float = 2.5, sure_steps: int = 100) -> None:
        self.groups: dict[GroupKey, GroupPace] = {}
        self.numbers: dict[GroupKey, int] = {}
        self.pairs: set[tuple[int, int]] = set()
        self.hosts: dict[int, str] = {}
        self._span_s, self._sure_steps = span_s, sure_steps
        self._clock_error_s: float | None = 0.0
        self._keys: dict[tuple[object, ...], int] = {}
        """Number of each call in `RankCalls.key`: operation, line, shapes and types."""

    def take(self, calls: Mapping[int, RankCalls], clock_error_s: float | None = 0.0) -> None:
        """Take the last calls of each rank; some of them may be known.

        Args:
            calls: Calls by rank.
            clock_error_s: Error of the difference of two ranks' clocks; None if it is not known.
        """
        self._clock_error_s = clock_error_s
        for key, number in self.numbers.items():
            ranks = key[0].ranks
            if len(ranks) < 2 or not all(rank in calls for rank in ranks):
                continue
            if any(one in ranks and other in ranks for one, other in self.pairs):
                self.groups.pop(key, None)  # stages of a pipeline do different work by design
                continue
            last = self.groups[key].last if key in self.groups else -1
            turns = find_turns(calls, number, ranks, clock_error_s, last)
            if turns is not None and len(turns.seq):
                self.add(key, turns)

    def add(self, key: GroupKey, turns: Turns) -> None:
        """Add the next turns of a group."""
        ranks = key[0].ranks
        pace = self.groups.setdefault(key, self._new(ranks))
        pace.last = int(turns.seq[-1])
        steps, is_new = pace.cutter.add(turns)
        if is_new:
            pace.history, pace.moved_s = self._new(ranks).history, np.empty(0)
            pace.by_host = self._new(ranks).by_host
        pace.history.own_clock = bool(2 * turns.own_clock.sum() > len(turns.own_clock))
        if steps is not None:
            pace.history.add(steps.work_s, steps.length_s)
            pace.moved_s = np.concatenate((pace.moved_s, steps.moved_s))[-len(pace.history.matrix()[1]) :]
            if pace.by_host is not None:
                rows = [[self._host(rank) == host for rank in ranks] for host in pace.hosts]
                means = np.stack([steps.work_s[row].mean(axis=0) for row in rows])
                pace.by_host.add(means, steps.length_s)
                pace.by_host.own_clock = pace.history.own_clock

    def take_records(self, records: Mapping[int, Sequence[CallRecord]], clock_error_s: float | None = 0.0) -> None:
        """Take the last calls of each rank, in program order; *clock_error_s*: see `take`."""
        self.take({rank: self._of_records(calls) for rank, calls in records.items()}, clock_error_s)

    def slow_ranks(self) -> dict[int, tuple[SlowRank, GroupKey]]:
        """Return the slow ranks, each with the group that it costs most. Ranks of a slow host are not among them,
        unless one has most of its excess."""
        slow: dict[int, tuple[SlowRank, GroupKey]] = {}
        for key, pace in self.groups.items():
            slow_hosts = {pace.hosts[one.rank]: one for one in pace.by_host.slow_ranks()} if pace.by_host else {}
            for one in pace.history.slow_ranks():
                host = slow_hosts.get(self._host(one.rank))
                if host is not None:
                    number = sum(self._host(rank) == self._host(one.rank) for rank in key[0].ranks)
                    if one.excess_s < OWN_SHARE * number * host.excess_s:
                        continue
                if one.rank not in slow or slow[one.rank][0].excess_s < one.excess_s:
                    slow[one.rank] = one, key
        return slow

    def notes(self) -> list[PaceNote]:
        """Return what else costs time: slow hosts, pauses with a period, steps and transfers that became longer."""
        notes: list[PaceNote] = []
        slow = self.slow_ranks()
        for key, pace in self.groups.items():
            notes += self._slow_hosts(key, pace)
            notes += [
                PaceNote(
                    "periodic_pause",
                    f"rank {one.rank} keeps the others waiting {one.pause_s:.2g} s each {one.every} steps: "
                    f"{one.share:.0%} of the time",
                    asdict(one),
                )
                for one in pauses(pace.history)
            ]
            if not slow:
                notes += _became_longer(key, pace)
        notes += self._slow_groups()
        return list({note.key: note for note in notes}.values())

    def outlook(self) -> tuple[Group, Outlook] | None:
        """Return what can be seen in the largest group whose members work in steps; None if there is none.

        Where all calls are asynchronous and the clocks are not known well enough, it says so.
        """
        known = [(key[0], pace.history.outlook()) for key, pace in self.groups.items() if pace.history.steps]
        if not known and self._clock_error_s != 0.0 and self.numbers:
            error = "not known" if self._clock_error_s is None else f"known to {self._clock_error_s * 1e3:.2g} ms only"
            reason = f"the difference of the hosts' clocks is {error}, so that asynchronous calls cannot be compared"
            return max((key[0] for key in self.numbers), key=lambda one: len(one.ranks)), Outlook(
                0, 0.0, 0.0, None, reason
            )
        return max(known, key=lambda one: (len(one[0].ranks), one[1].steps), default=None)

    def _new(self, ranks: tuple[int, ...]) -> GroupPace:
        hosts = tuple(dict.fromkeys(map(self._host, ranks)))
        several = 3 <= len(hosts) < len(ranks)
        by_host = self._history(tuple(range(len(hosts)))) if several else None
        return GroupPace(self._history(ranks), by_host, hosts)

    def _history(self, rows: tuple[int, ...]) -> StepHistory:
        return StepHistory(rows, span_s=self._span_s, sure_steps=self._sure_steps)

    def _host(self, rank: int) -> str:
        return self.hosts.get(rank, "")

    def _slow_hosts(self, key: GroupKey, pace: GroupPace) -> list[PaceNote]:
        if pace.by_host is None:
            return []
        single = {self._host(rank) for rank in self.slow_ranks()}
        return [
            PaceNote(
                "slow_host",
                f"slow host {host}: its {sum(self._host(rank) == host for rank in key[0].ranks)} ranks work "
                f"{one.excess_s * 1e3:.3g} ms longer than those of the {len(pace.hosts) - 1} other hosts, "
                f"{one.share:.0%} of each step since step {one.since_step}",
                {**asdict(one), "host": host},
            )
            for one in pace.by_host.slow_ranks()
            if (host := pace.hosts[one.rank]) not in single
        ]

    def _slow_groups(self) -> list[PaceNote]:
        """Return groups whose transfers take longer than those of groups beside them that make equal calls."""
        alike: dict[tuple[int, int], list[tuple[Group, Floats]]] = defaultdict(list)
        for key, pace in self.groups.items():
            moved_s = pace.moved_s[-200:]
            if len(moved_s) >= 20 and np.isfinite(moved_s).all():
                alike[len(key[0].ranks), pace.cutter.end].append((key[0], moved_s))
        notes = []
        for groups in alike.values():
            if len(groups) < BESIDE:
                continue
            usual_s = [float(np.median(moved_s)) for _, moved_s in groups]
            for number, (group, moved_s) in enumerate(groups):
                others_s = max(usual_s[:number] + usual_s[number + 1 :])
                if usual_s[number] > SLOWER_GROUP * others_s and np.percentile(moved_s, 10) > others_s:
                    notes.append(
                        PaceNote(
                            "slow_group",
                            f"transfers of group {group.label} (ranks {group.ranks[0]}-{group.ranks[-1]}) take "
                            f"{usual_s[number] * 1e3:.3g} ms a step after the last arrival, those of {len(groups) - 1} "
                            f"groups beside it at most {others_s * 1e3:.3g} ms: look at the links between its ranks",
                            {"group": group.name, "moved_s": usual_s[number], "others_s": others_s},
                        )
                    )
        return notes

    def _of_records(self, records: Sequence[CallRecord]) -> RankCalls:
        ended = [c for c in records if c.state is State.COMPLETED or (c.is_async and c.state is not State.FAILED)]
        self.pairs.update((call.rank, call.peer) for call in ended if call.is_p2p and call.peer is not None)
        groups = [-1 if call.is_p2p else self.numbers.setdefault((call.group, 0), len(self.numbers)) for call in ended]
        contents = ((call.op, call.site, call.input_shapes, call.dtypes) for call in ended)
        keys = [self._keys.setdefault(content, 2 * len(self._keys)) for content in contents]
        return RankCalls(
            np.array(groups, np.int64),
            np.array([call.seq for call in ended], np.int64),
            np.array(keys, np.int64),
            np.array([call.issued_s for call in ended]),
            np.array([call.issued_s if call.completed_s is None else call.completed_s for call in ended]),
            np.array([not call.is_p2p and call.op in EVERYBODY for call in ended], bool),
            np.array([call.is_async for call in ended], bool),
        )


def simulated_pace(
    records: Mapping[int, Sequence[CallRecord]], hosts: Mapping[int, str]
) -> tuple[list[Finding], list[PaceNote]]:
    """Return the slow ranks of a simulation, which has no noise, and what else costs time in its steps.

    Args:
        records: The last calls of each rank, in program order.
        hosts: Host of each rank.
    """
    job = JobPace(span_s=0.0, sure_steps=WINDOWS[0])
    job.hosts = dict(hosts)
    job.take_records(records)
    findings = []
    for slow, (group, _) in job.slow_ranks().values():
        if slow.excess_s * slow.at_step >= SIMULATED.lost_s:
            last = next(call for call in reversed(records[slow.rank]) if call.group == group)
            findings.append(slow_finding(slow, group, last))
    return findings, job.notes()


def _became_longer(key: GroupKey, pace: GroupPace) -> list[PaceNote]:
    """Return since when the steps of a group, or its transfers, take longer."""
    work_s, length_s, first = pace.history.matrix()
    if not len(length_s):
        return []
    least_s = LONGER * float(np.median(length_s))
    change = longer_since(length_s, least_s, first)
    if change is None:
        return []
    moved = longer_since(pace.moved_s, least_s / 2, first) if len(pace.moved_s) == len(length_s) else None
    worked = longer_since(np.median(work_s, axis=0), least_s / 2, first)
    figures = {**asdict(change), "group": key[0].name}
    text = f"since step {change.since_step} every step takes {change.after_s / change.before_s - 1:.0%} longer on all "
    text += f"ranks: {change.before_s * 1e3:.3g} -> {change.after_s * 1e3:.3g} ms"
    if moved is not None and worked is None:
        text += f"; the ranks work as before, the transfers of group {key[0].label} after the last arrival take longer"
        text += f" ({moved.before_s * 1e3:.3g} -> {moved.after_s * 1e3:.3g} ms): the network"
        return [
            PaceNote("slow_transfers", text, {**figures, "moved_before_s": moved.before_s, "moved_s": moved.after_s})
        ]
    if worked is not None:
        text += f"; all ranks work longer ({worked.before_s * 1e3:.3g} -> {worked.after_s * 1e3:.3g} ms)"
    return [PaceNote("slow_steps", text, figures)]


def slow_text(slow: SlowRank) -> str:
    """Return one clause: `rank 2 works 5.1 ms longer than the others in each step of 67 ms, 7.6% of the time, ...`."""
    verb = "works" if slow.is_sure else "looks slow: it works"
    return (
        f"rank {slow.rank} {verb} {slow.excess_s * 1e3:.3g} ms longer than the others in each step of "
        f"{slow.step_s * 1e3:.3g} ms, {slow.share:.1%} of the time, since step {slow.since_step} "
        f"({slow.certainty:.1f} standard errors in {slow.window} steps)"
    )


def pace_figures(slow: SlowRank) -> dict[str, float]:
    """Return the figures of a slow rank for JSON."""
    return {name: value for name, value in asdict(slow).items() if name != "is_sure"}


def slow_finding(slow: SlowRank, group: Group, call: CallRecord | None) -> Finding:
    """Return the finding of a slow rank; *call*: its last one before which it worked longer."""
    site = None if call is None else call.site
    return Finding(
        Kind.STRAGGLER,
        (slow.rank,),
        f"{slow_text(slow)}; the others wait for it",
        group=group,
        call=call,
        site=site,
        suggestion=f"Look at what rank {slow.rank} does before {site or 'its collectives'}: its share of the data, "
        "its host, its clock speed.",
        pace=pace_figures(slow),
    )


def outlook_text(outlook: Outlook) -> str:
    """Return what can be seen: `noise of a step 4%: a rank 10% slower would be named within 40 steps`."""
    if outlook.unknown:
        return outlook.unknown
    noise = f"{outlook.steps} steps of {outlook.step_s * 1e3:.3g} ms, noise {outlook.noise:.0%}: "
    if outlook.needed_steps is None:
        return f"{noise}a rank 10% slower would cost less than 4% of a step and would not be named"
    return f"{noise}a rank 10% slower would be named after {outlook.needed_steps} steps"
