"""Which rank is chronically slower than the others, by own work in each step, and who only looks like it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distsim.debug.diagnosis.pace.statistic import SlowRank, StepHistory, excess
from tests.debug.pace_families import FAMILIES, STEP_S, Floats, own_work

RUNS = sorted((Path(__file__).parent / "pace_runs").glob("*.npz"))
EVERY = 20
FIRST_LOOK = {"imbalance that moves each 20 steps", "a slow episode that goes round", "noise with a memory"}
"""Families in which an episode may look slow before 100 steps are over."""


def looks(work_s: Floats, length_s: Floats | None = None, own_clock: bool = True) -> list[SlowRank]:
    """Return each rank when it first looks slow and when it is first named with certainty; a look each 20 steps."""
    history = StepHistory(tuple(range(len(work_s))), own_clock)
    lengths = work_s.max(axis=0) + 0.02 if length_s is None else length_s
    first: dict[tuple[int, bool], SlowRank] = {}
    for begin in range(0, work_s.shape[1], EVERY):
        history.add(work_s[:, begin : begin + EVERY], lengths[begin : begin + EVERY])
        for slow in history.slow_ranks():
            first.setdefault((slow.rank, slow.is_sure), slow)
    return list(first.values())


def history_of(work_s: Floats, own_clock: bool = True) -> StepHistory:
    history = StepHistory(tuple(range(len(work_s))), own_clock)
    history.add(work_s, work_s.max(axis=0) + 0.02)
    return history


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("name", FAMILIES)
def test_nobody_is_accused_in_a_healthy_job(name: str, ranks: int) -> None:
    """With certainty in no family; most families have nobody who looks slow either."""
    slow = looks(own_work(name, ranks, ranks))
    assert [one for one in slow if one.is_sure or name not in FIRST_LOOK] == []


STEPS = {
    # family -> steps in which a rank 10% slower is named with certainty, of 400; None: its noise hides it
    "jitter of 2%": 60, "jitter of 10%": 180, "lognormal data of 20%": None,
    "imbalance that moves each 20 steps": None, "noise with a memory": None, "a slow episode that goes round": None,
    "two ranks that swap": None, "a slow turn that goes round": 300, "checkpoints of rank 0": 60,
    "an evaluation of rank 0": 60, "rank 0 logs each tenth step": 60, "pauses of all ranks": 100,
    "a slow start": 120, "Pareto": 60, "buckets of sequence lengths": 250,
    "a loader that refills each seventh step": 120, "uneven experts": 300, "GPUs that differ by 1%": 60,
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_ten_percent_slower_is_named(name: str) -> None:
    """It and no other, in the steps that the noise needs."""
    for seed in range(2):
        work_s = own_work(name, seed, steps=400)
        work_s[2] *= 1.1
        slow = looks(work_s)
        assert {one.rank for one in slow} <= {2}
        sure = [one.at_step for one in slow if one.is_sure]
        if STEPS[name] is not None:
            assert sure, seed
            assert sure[0] <= STEPS[name]


@pytest.mark.parametrize("name", ["imbalance that moves each 20 steps", "noise with a memory"])
def test_noise_with_a_memory_needs_more_steps(name: str) -> None:
    """Before 200 steps nobody is named with certainty, neither a slow rank nor one that only had an episode."""
    for seed in range(12):
        work_s = own_work(name, seed)
        work_s[2] *= 1.1 if seed % 2 else 1.0
        assert [slow for slow in looks(work_s[:, :180]) if slow.is_sure] == []


@pytest.mark.parametrize("path", RUNS, ids=[path.stem for path in RUNS])
def test_runs_on_gloo(path: Path) -> None:
    """Recorded by tools/benchmarks/slow_ranks.py on two busy cores: rank 2 is named where it was slower, no rank
    where none was.
    """
    run = np.load(path)
    named = {
        slow.rank for slow in looks(run["work"].astype(float), run["length"].astype(float), bool(run["own_clock"]))
    }
    assert named == (set() if path.stem.endswith("1.0") else {2})


def test_what_is_said_of_a_slow_rank() -> None:
    """Excess, share of a step, the step from which it was slow."""
    work_s = own_work("jitter of 2%", 0)
    work_s[1, 60:] *= 1.2
    slow = looks(work_s)[-1]
    assert (slow.rank, slow.is_sure, slow.window) == (1, True, 40)
    assert slow.excess_s == pytest.approx(0.2 * STEP_S, rel=0.1)
    assert slow.share == pytest.approx(slow.excess_s / slow.step_s)
    assert slow.since_step == pytest.approx(60, abs=5)


@pytest.mark.parametrize(
    ("slower", "others", "text"),
    [
        ([2, 5], 16, ""),
        ([1, 3], 4, "two groups of ranks: 1,3 work longer than 0,2"),
        ([0, 1, 2], 8, "two groups of ranks: 0,1,2 work longer than 3,4,5,6,7"),
    ],
)
def test_two_groups_of_ranks_are_no_slow_ranks(slower: list[int], others: int, text: str) -> None:
    """More than a third of the ranks: which of both is at fault, nobody knows."""
    work_s = own_work("jitter of 2%", 0, others)
    work_s[slower] *= 1.1
    history = history_of(work_s)
    assert history.outlook().unknown == text
    assert sorted(slow.rank for slow in history.slow_ranks()) == ([] if text else slower)


@pytest.mark.parametrize(("since", "named"), [(0, []), (100, [1])])
def test_of_two_ranks_the_one_that_has_changed_is_slow(since: int, named: list[int]) -> None:
    """If the other one has kept its own pace. Otherwise nobody knows, and that is said."""
    work_s = own_work("jitter of 2%", 0, ranks=2)
    work_s[1, since:] *= 1.15
    history = history_of(work_s)
    assert [slow.rank for slow in history.slow_ranks()] == named
    assert ("of two ranks nobody knows" in history.outlook().unknown) is not bool(named)


@pytest.mark.parametrize(
    "name", ["jitter of 2%", "jitter of 10%", "lognormal data of 20%", "buckets of sequence lengths"]
)
def test_the_announced_number_of_steps_holds(name: str) -> None:
    """A rank 10% slower is named in twice the number at most, and not in a half of it where that is long."""
    announced = history_of(own_work(name, 0, steps=400)).outlook().needed_steps
    assert announced is not None
    work_s = own_work(name, 1, steps=800)
    work_s[3] *= 1.1
    at = [slow.at_step for slow in looks(work_s)]
    assert announced / 2.5 <= at[0] <= 2 * announced


def test_little_work_hides_a_slow_rank() -> None:
    """Where a step is communication, 10% of the work are below what is worth a word."""
    work_s = own_work("jitter of 2%", 0)
    history = StepHistory((0, 1, 2, 3))
    history.add(work_s, np.full(work_s.shape[1], 4 * STEP_S))
    assert history.outlook().needed_steps is None


@pytest.mark.parametrize(("waits", "named"), [(True, [2]), (False, [])])
def test_lateness_means_something_if_ranks_wait(waits: bool, named: list[int]) -> None:
    """Where nobody waits, delays add up and stay: who is late has not worked longer since. That is said."""
    draw = np.random.default_rng(5)
    delays = 0.005 * draw.standard_normal((4, 200))
    lateness = delays if waits else np.cumsum(delays, axis=1)
    lateness[2] += 0.06
    history = history_of(STEP_S + lateness, own_clock=False)
    assert [slow.rank for slow in history.slow_ranks()] == named
    assert ("do not wait for each other" in history.outlook().unknown) is not waits


def test_a_rank_keeps_pace_again() -> None:
    """After 40 steps in which it is no longer slower."""
    work_s = own_work("jitter of 2%", 0)
    work_s[1, :120] *= 1.2
    history = StepHistory((0, 1, 2, 3))
    states = []
    for begin in range(0, 200, 40):
        history.add(work_s[:, begin : begin + 40], np.full(40, STEP_S))
        states.append(history.keeps_pace(1))
    assert states == [False, False, False, True, True]


def test_short_windows_say_nothing() -> None:
    """40 steps of 10 ms are a moment of the scheduler's."""
    work_s = 0.02 * own_work("jitter of 2%", 0)
    work_s[2] *= 1.5
    assert [slow.at_step for slow in looks(work_s, np.full(200, 0.02))] == [200]


def test_steps_may_come_in_any_portions() -> None:
    """One by one or all at once: the same verdict."""
    work_s = own_work("a slow turn that goes round", 3)
    work_s[2] *= 1.2
    whole, single = history_of(work_s), StepHistory((0, 1, 2, 3))
    for step in range(200):
        single.add(work_s[:, [step]], work_s.max(axis=0)[[step]] + 0.02)
    assert whole.slow_ranks() == single.slow_ranks() != []


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_excess_is_over_the_median_of_the_others(ranks: int) -> None:
    """Of all ranks but the one itself."""
    work_s = np.random.default_rng(1).random((ranks, 5))
    for row in range(ranks):
        others = np.median(np.delete(work_s, row, axis=0), axis=0)
        assert excess(work_s)[row] == pytest.approx(work_s[row] - others)
