"""Watches a job from outside: who has ended or stopped, whether it hangs, who is slow.

One stack of each rank a look. A rank that works longer than the others is outside of a wait in more looks; it announces
how many looks that needs. When nothing moves for ten seconds, it examines the job as `attach` does without --watch.
"""

from __future__ import annotations

import math
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from distsim.debug.attach.judge import Judged
from distsim.debug.attach.positions import Doing, Position, position_of
from distsim.debug.attach.ranks import StackWatch
from distsim.debug.messages import are, ranks_text
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.report.news import Events, news_key
from distsim.errors import UsageError

SURE = 4.0
"""Standard errors by which a rank's share of looks outside of waits has to differ from that of the others."""
MEDIAN = math.pi / 2
"""Variance of a median relative to that of a mean, of many independent values."""
LEAST = 0.06
"""Smallest difference of two shares of looks that is worth a word."""
FEWEST = 40
"""Looks before which nobody is slow."""
PARTS = 3
"""Parts of the looks in each of which the rank has to be outside of waits more often."""
MOST_CPU = 0.01
"""Share of a core for each rank that the looks may use; the interval is doubled above that."""
LONGEST_S = 600.0
STILL_S = 10.0
"""Seconds between the looks at a job that does not move before it is examined: a program may sleep for a while."""
STOPPED, ENDED = "stopped (SIGSTOP)", "ended"


@dataclass
class LookCounts:
    """In how many looks each rank was outside of a wait for others, by part of the time; pure."""

    ranks: Sequence[int]
    looks: list[dict[int, bool]] = field(default_factory=list)
    """For each look and rank, whether it was outside of a wait."""

    def add(self, positions: Sequence[Position]) -> None:
        """Count one look, if all ranks could be read in it."""
        seen = {one.rank: not one.waits for one in positions if one.doing not in (Doing.UNKNOWN, Doing.STARTING)}
        if seen.keys() >= set(self.ranks):
            self.looks.append(seen)

    def slow(self) -> list[tuple[int, float, float]]:
        """Return the ranks that are outside of waits more often, each with its share of looks and the others'."""
        number = len(self.looks)
        if number < FEWEST or len(self.ranks) < 2:
            return []
        shares = self._shares(self.looks)
        ends = [number * part // PARTS for part in range(PARTS + 1)]
        parts = [self._shares(self.looks[begin:end]) for begin, end in pairwise(ends)]
        slow = []
        for rank, share in shares.items():
            others = median(one for other, one in shares.items() if other != rank)
            variance = share * (1 - share) + others * (1 - others) * MEDIAN / (len(shares) - 1)
            error = math.sqrt(variance / number) or 1.0 / number
            lasts = all(part[rank] > median(one for other, one in part.items() if other != rank) for part in parts)
            if share - others > max(LEAST, SURE * error) and lasts:
                slow.append((rank, share, others))
        return slow if len(slow) <= max(1, len(self.ranks) // 3) else []

    def needed(self) -> int:
        """Return after how many looks a rank that works 10% longer would be seen."""
        share = median(self._shares(self.looks).values()) if self.looks else 0.5
        variance = max(share * (1 - share), 0.05) * (1 + MEDIAN / max(1, len(self.ranks) - 1))
        return max(FEWEST, math.ceil(((SURE + 1.0) / 0.1) ** 2 * variance / 10) * 10)

    def _shares(self, looks: Sequence[Mapping[int, bool]]) -> dict[int, float]:
        return {rank: sum(look[rank] for look in looks) / max(1, len(looks)) for rank in self.ranks}


class JobWatch:
    """Turns looks at a job into lines: one for each change.

    Args:
        say: Prints one line.
        examine: Examines a job that does not move, as `attach` does.
        show: Prints a diagnosis.
        events: Where changes are written as JSON.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        examine: Callable[[], Judged],
        show: Callable[[Judged], None],
        events: Events,
    ) -> None:
        self._say, self._examine, self._show, self._events = say, examine, show, events
        self._states: dict[int, str] = {}
        self._counts: LookCounts | None = None
        self._reported: list[Diagnosis] = []
        self._still_s = 0.0
        self._named: set[int] = set()
        self._world_size = 0

    @property
    def hangs(self) -> bool:
        """Return whether the job hung at the last look."""
        return any(diagnosis.exit_code for diagnosis in self._reported)

    def take(self, positions: Sequence[Position], ended: Sequence[int] = (), since_s: float = STILL_S) -> None:
        """Take the positions of the ranks at one look, *since_s* after the last one, and the processes that have
        ended.
        """
        self._world_size = max(self._world_size, len(positions))
        self._report_states(positions, ended)
        if self._counts is None or set(self._counts.ranks) != {one.rank for one in positions}:
            self._counts = LookCounts(sorted(one.rank for one in positions))
        elif all(one.idle for one in positions) and any(one.waits for one in positions):
            self._still_s += since_s
            if self._still_s >= STILL_S:
                self._report_hang()
        else:
            self._still_s = 0.0
            self._counts.add(positions)
            self._report_motion()
            self._report_slow(self._counts)

    def outlook(self, every_s: float) -> str:
        """Return after which time a rank that works 10% longer would be seen."""
        needed = (self._counts or LookCounts(())).needed()
        return f"a rank 10% slower would be seen after {needed} looks ({needed * every_s / 60:.0f} min)"

    def _report_states(self, positions: Sequence[Position], ended: Sequence[int]) -> None:
        states = {one.rank: STOPPED for one in positions if one.doing is Doing.STOPPED}
        alive = {one.rank for one in positions}
        states |= {rank: ENDED for rank in (*self._states, *ended) if rank not in alive and rank >= 0}
        by_state: dict[str, list[int]] = defaultdict(list)
        for rank, state in states.items():
            if self._states.get(rank, "") != state:
                by_state[state].append(rank)
        for state, ranks in by_state.items():
            verb = are(ranks, "has", "have") if state == ENDED else are(ranks, "is", "are")
            self._note("rank_state", f"{ranks_text(sorted(ranks))} {verb} {state}", {"ranks": sorted(ranks)})
        before = {rank for rank, state in self._states.items() if state == STOPPED}
        if back := sorted(before & alive - states.keys()):
            self._note("rank_state", f"{ranks_text(back)} {are(back, 'goes', 'go')} on", {"ranks": back})
        self._states = dict.fromkeys(alive, "") | states

    def _report_motion(self) -> None:
        if self._reported:
            text = "the ranks move again: the diagnosis is withdrawn"
            self._say(text)
            for diagnosis in self._reported:
                self._events.withdrawn(diagnosis, text, self._document())
            self._reported = []

    def _report_hang(self) -> None:
        try:
            judged = self._examine()
        except UsageError:
            return  # they end just now: no stack can be read
        known = {news_key(one) for one in self._reported}
        new = [one for one in judged.diagnoses if news_key(one) not in known]
        if new and not judged.running:
            self._reported = list(judged.diagnoses)
            self._show(judged)
            self._events.diagnosed(new, self._document())

    def _report_slow(self, counts: LookCounts) -> None:
        slow = counts.slow()
        for rank, share, others in slow:
            if rank not in self._named:
                text = f"rank {rank} looks slow: it is outside of waits in {share:.0%} of {len(counts.looks)} looks, "
                figures = {"rank": rank, "share": share, "others": others}
                self._note("looks_slow", f"{text}the others in {others:.0%}", figures)
        self._named = {rank for rank, _, _ in slow}

    def _note(self, kind: str, text: str, figures: Mapping[str, object]) -> None:
        self._say(text)
        self._events.pace(kind, figures, text, self._document())

    def _document(self) -> dict[str, object]:
        return {"world_size": self._world_size, "exit_code": 3 if self.hangs else 0}

    def finish(self) -> None:
        """Write the last event."""
        self._events.finished(self._document())


def watch_job(
    stacks: StackWatch, job: JobWatch, every_s: float, say: Callable[[str], None], poll: Callable[[], None]
) -> None:
    """Look at the ranks until they have ended.

    Args:
        stacks: The ranks.
        job: Takes the looks.
        every_s: Seconds between two looks. Doubled where looks cost more than `MOST_CPU` of a core for each rank.
        say: Prints one line.
        poll: Asks further services of the job, at each look.
    """
    numbers: dict[int, int] = {}
    looks = 0
    while True:
        began_s, used_s = time.monotonic(), _cpu_s()
        samples = stacks.look()
        used_s = _cpu_s() - used_s
        positions = [position for sample in samples if (position := position_of(sample)) is not None]
        numbers |= {position.pid: position.rank for position in positions}
        job.take(positions, [numbers.get(sample.process.pid, -1) for sample in samples if sample.ended], every_s)
        if not positions or not stacks.processes:
            break
        looks += 1
        poll()
        if looks == 1:
            who = ranks_text(numbers.values())
            say(f"watches {who} each {every_s:g} s; {job.outlook(every_s)}; Ctrl-C ends the watch")
        if used_s > MOST_CPU * len(positions) * every_s and every_s < LONGEST_S:
            every_s *= 2
            say(f"looks each {every_s:g} s from now on, to use at most {MOST_CPU:.0%} of a core for each rank")
        time.sleep(max(0.0, every_s - (time.monotonic() - began_s)))
    say("all ranks have ended")


def _cpu_s() -> float:
    """Return the CPU time of this process and of py-spy so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
