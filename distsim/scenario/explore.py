"""`--explore N`: one program under many schedules, and the shortest one under which it fails."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

from distsim.scenario.expect.result import Result
from distsim.scenario.file.load import Scenario
from distsim.scenario.run import observe, simulate_scenario
from distsim.scenario.shrink import shrink
from distsim.sim.kernel.schedule import Schedule

MIN_DELAY_S = 1e-3
"""Smallest delay of a rank that is to come last, in seconds. The delay is otherwise the length of the undelayed run."""
OF_TIME = ("step_time", "virtual_time_below_s", "busbw_above", "utilisation_below")
"""Expectations about times, which delays would break; they do not depend on the order of calls."""
_perf_counter = time.perf_counter


@dataclass(slots=True)
class Explored:
    """Result of an exploration."""

    scenario: Scenario
    num_schedules: int
    num_failing: int
    kinds: dict[str, int]
    """Number of schedules by diagnosis."""
    failing: Result | None = None
    """Result of the shortest failing schedule; None if every schedule passed."""
    schedule: Schedule | None = None
    seed: int | None = None
    """The seed that the schedule was shrunk from; None: the ordinary schedule fails already."""
    num_tries: int = 0
    """Runs that shrinking took."""

    wall_s: float = 0.0

    @property
    def text(self) -> str:
        """Return a summary: how many schedules fail, how, and how to repeat the shortest."""
        head = f"{self.scenario.name}: {self._count}"
        if self.failing is None:
            return head
        body = "\n".join(f"    {line}".rstrip() for line in self.failing.text.splitlines())
        return f"{head}\n  {self._shortest}\n{body}"

    @property
    def result(self) -> Result:
        """Return one result for JUnit: that of the shortest failing schedule, after a line that counts the failing
        ones.
        """
        if self.failing is None:
            return Result(self.scenario.name, str(self.scenario.path), wall_s=self.wall_s)
        report = f"{self._count}\n{self._shortest}\n\n{self.failing.report}"
        return replace(self.failing, report=report, wall_s=self.wall_s)

    @property
    def _count(self) -> str:
        schedules = "1 schedule" if self.num_schedules == 1 else f"{self.num_schedules} schedules"
        fail = f"{self.num_failing} {'fails' if self.num_failing == 1 else 'fail'}"
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items(), key=lambda k: (-k[1], k[0])))
        return f"{schedules}, {fail} ({kinds})" if kinds else f"{schedules}, {fail}"

    @property
    def _shortest(self) -> str:
        origin = "the ordinary schedule" if self.seed is None else f"seed {self.seed}, shrunk in {self.num_tries} runs"
        return f"shortest: {self.schedule} ({origin})"


def explore(scenario: Scenario, num: int, progress: bool = False) -> Explored:
    """Run *scenario* under its ordinary and *num* random schedules."""
    started = _perf_counter()
    explored = _explore(_timeless(scenario), num, progress)
    explored.wall_s = _perf_counter() - started
    return explored


def _explore(scenario: Scenario, num: int, progress: bool) -> Explored:
    ordinary, calls = _attempt(scenario, Schedule())
    if not ordinary.passed:
        return Explored(scenario, 1, 1, {ordinary.verdict: 1}, ordinary, Schedule())
    long_s = max(MIN_DELAY_S, ordinary.virtual_time_s)
    failing: dict[int, tuple[Schedule, Result]] = {}
    for seed in range(1, num + 1):
        schedule = Schedule.draw(seed, calls, long_s)
        result, _ = _attempt(scenario, schedule)
        if not result.passed:
            failing[seed] = (schedule, result)
        if progress and not seed % 20:
            print(f"\r{seed} of {num} schedules, {len(failing)} fail", end="", file=sys.stderr, flush=True)
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    explored = Explored(scenario, num, len(failing), Counter(result.verdict for _, result in failing.values()))
    if not failing:
        return explored
    tried: dict[str, None] = {}
    for seed in sorted(failing, key=lambda s: (len(failing[s][0].delays), s)):
        schedule, result = failing[seed]
        if result.verdict in tried:
            continue  # one of each kind is shrunk
        tried[result.verdict] = None
        small, small_result, tries = _shrink(scenario, schedule, result)
        explored.num_tries += tries
        if explored.schedule is None or _length(small) < _length(explored.schedule):
            explored.schedule, explored.failing, explored.seed = small, small_result, seed
    return explored


def _timeless(scenario: Scenario) -> Scenario:
    data = scenario.data
    expect = {key: value for key, value in data.get("expect", {}).items() if key not in OF_TIME}
    return scenario.changed(expect=expect, schedule=None)


def _attempt(scenario: Scenario, schedule: Schedule) -> tuple[Result, list[int]]:
    outcome, output, conditions = simulate_scenario(scenario, schedule)
    calls = [len(outcome.records.get(rank, ())) for rank in range(outcome.world_size)]
    return observe(scenario, outcome, output, conditions), calls


def _length(schedule: Schedule) -> int:
    return len(schedule.delays) + schedule.buffered + (schedule.any_source is not None)


def _shrink(scenario: Scenario, schedule: Schedule, result: Result) -> tuple[Schedule, Result, int]:
    """Remove scheduling choices as long as the failure stays of the same kind."""
    tries = 0

    def fails(smaller: Schedule) -> bool:
        nonlocal schedule, result, tries
        tries += 1
        attempt, _ = _attempt(scenario, smaller)
        alike = not attempt.passed and attempt.verdict == result.verdict
        if alike:
            schedule, result = smaller, attempt
        return alike

    ordinary = Schedule()
    choices = [name for name in ("buffered", "any_source") if getattr(schedule, name) != getattr(ordinary, name)]
    left_out = {name: getattr(ordinary, name) for name in choices}
    shrink(
        choices,
        lambda kept: fails(replace(schedule, **{k: v for k, v in left_out.items() if k not in kept})),
        singly=True,
    )
    shrink(schedule.delays, lambda delays: fails(replace(schedule, delays=tuple(delays))))
    return schedule, result, tries
