"""From the calls of a job to the rank that is chronically slower: what counts as its own work, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distsim.debug.diagnosis.pace.job import outlook_text
from distsim.debug.diagnosis.pace.steps import StepCutter
from distsim.debug.diagnosis.pace.turns import Turns
from distsim.debug.monitor import straggler_watch
from distsim.debug.monitor.straggler_watch import LOOK_S, PaceWatch
from distsim.debug.records import CallRecord, Group, Site, State

WORLD = Group("0", "default_pg", (0, 1, 2, 3))
LOW, HIGH = Group("1", "tp", (0, 1)), Group("2", "tp", (2, 3))
WAIT = "wait"
Item = float | str | tuple[Group, str, int, bool]
"""Seconds of work, a wait for the last asynchronous call, or a call: group, operation, line, whether asynchronous."""
Step = Callable[[int, int], Sequence[Item]]
"""Rank, step -> what the rank does in it."""
STEPS = 120


def call(line: int, group: Group = WORLD, op: str = "all_reduce", is_async: bool = False) -> Item:
    return group, op, line, is_async


@dataclass
class _Rank:
    items: list[Item]
    at: int = 0
    clock_s: float = 0.0
    blocked: bool = False
    made: dict[Group, int] = field(default_factory=dict)
    last: tuple[Group, int] | None = None


def play(step: Step, steps: int = STEPS, waits: bool = True) -> dict[int, list[CallRecord]]:
    """Run a job of four ranks; a collective takes 1 ms once all are there. Unless it *waits*, a call returns at once,
    as one of NCCL's does.
    """
    ranks = [_Rank([item for number in range(steps) for item in step(rank, number)]) for rank in range(4)]
    arrived: dict[tuple[Group, int], dict[int, float]] = {}
    records: dict[int, list[CallRecord]] = {rank: [] for rank in range(4)}

    def ended(meeting: tuple[Group, int]) -> float | None:
        there = arrived.get(meeting, {})
        return max(there.values()) + 0.001 if len(there) == len(meeting[0].ranks) else None

    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.at < len(rank.items):
                item = rank.items[rank.at]
                if isinstance(item, tuple) and not rank.blocked:
                    group = item[0]
                    rank.made[group] = rank.made.get(group, 0) + 1
                    rank.last = (group, rank.made[group])
                    arrived.setdefault(rank.last, {})[number] = rank.clock_s
                if isinstance(item, float):
                    rank.clock_s += item
                else:
                    assert rank.last is not None
                    end_s = ended(rank.last)
                    is_async = isinstance(item, tuple) and (item[3] or not waits)
                    rank.blocked = end_s is None and not is_async
                    if rank.blocked:
                        break
                    if isinstance(item, tuple):
                        issued_s = rank.clock_s
                        rank.clock_s = issued_s + 1e-5 if is_async else max(end_s or 0.0, issued_s)
                        records[number].append(_record(number, rank.last, item, issued_s, rank.clock_s))
                    else:
                        rank.clock_s = max(rank.clock_s, end_s or 0.0)
                rank.at += 1
                moved = True
    return records


def _record(rank: int, meeting: tuple[Group, int], item: Any, issued_s: float, ended_s: float) -> CallRecord:
    group, op, line, is_async = item
    return CallRecord(
        rank, group, meeting[1], op, ((4,),), ((4,),), ("float32",), site=Site("train.py", line, "step"),
        is_async=is_async, issued_s=issued_s, completed_s=ended_s, state=State.COMPLETED,
    )  # fmt: skip


def noisy(rank: int, step: int, seconds: float, factor: float = 1.1, slow: int = 2) -> float:
    draw = np.random.default_rng([rank, step, int(seconds * 1e4)])
    return seconds * (1 + 0.02 * float(draw.standard_normal())) * (factor if rank == slow else 1.0)


def named(records: dict[int, list[CallRecord]], clock_error_s: float | None = 0.0) -> list[int]:
    watch = PaceWatch()
    watch.job.take_records(records, clock_error_s)
    return [slow.rank for slow, _ in watch.judge()]


def blocking(rank: int, step: int) -> Sequence[Item]:
    return [noisy(rank, step, 0.04), call(1), noisy(rank, step, 0.01), call(2)]


def equal_calls(rank: int, step: int) -> Sequence[Item]:
    return [noisy(rank, step, 0.04), call(1), noisy(rank, step, 0.002), call(1), noisy(rank, step, 0.002), call(1)]


def buckets(rank: int, step: int) -> Sequence[Item]:
    first, second = call(1, is_async=True), call(2, is_async=True)
    return [noisy(rank, step, 0.04), first, noisy(rank, step, 0.01), second, WAIT]


def buckets_and_loss(rank: int, step: int) -> Sequence[Item]:
    return [*buckets(rank, step), 0.005, call(3)]


def partners(rank: int, step: int) -> Sequence[Item]:
    """Pairs meet, then all do: rank 3 is as late for the world as rank 2, for which it has waited."""
    pair = LOW if rank < 2 else HIGH
    return [noisy(rank, step, 0.05), call(1, pair), noisy(rank, step, 0.005, 1.0), call(2)]


def evaluation(rank: int, step: int) -> Sequence[Item]:
    extra: list[Item] = [1.0 if rank == 2 else 0.0, call(9, op="barrier")] if step % 30 == 29 else []
    return [noisy(rank, step, 0.05, 1.0), call(1), *extra]


def root(rank: int, step: int) -> Sequence[Item]:
    """In a broadcast nobody waits for a member."""
    return [noisy(rank, step, 0.05), call(1, op="broadcast")]


def unseen_wait(rank: int, step: int) -> Sequence[Item]:
    """Rank 3 waits for its partner's asynchronous call, which no record shows."""
    pair = LOW if rank < 2 else HIGH
    return [noisy(rank, step, 0.05), call(1, pair, is_async=True), WAIT, 0.005, call(2)]


def late_work(rank: int, step: int) -> Sequence[Item]:
    """Rank 2 works longer after its last bucket, where others may have waited: nobody knows."""
    return [0.05, call(1, is_async=True), WAIT, noisy(rank, step, 0.02, 1.5), call(2)]


JOBS: list[tuple[Step, list[int]]] = [
    (blocking, [2]), (equal_calls, [2]), (buckets, [2]), (buckets_and_loss, [2]), (partners, [2]), (evaluation, []),
    (root, []), (unseen_wait, []), (late_work, []),
]  # fmt: skip


@pytest.mark.parametrize(("step", "ranks"), JOBS, ids=[step.__name__ for step, _ in JOBS])
def test_who_is_named(step: Step, ranks: list[int]) -> None:
    """The rank whose own work is longer, not who waited itself, nor who did something now and then."""
    assert named(play(step)) == ranks


def test_a_step_is_more_than_a_call() -> None:
    """Equal calls: the one with the longest work before it begins a step."""
    for step in (blocking, equal_calls, buckets, buckets_and_loss, evaluation):
        watch = PaceWatch()
        watch.job.take_records(play(step))
        seen = watch.job.outlook()
        assert seen is not None
        assert STEPS - 10 <= seen[1].steps <= STEPS, step.__name__


@pytest.mark.parametrize("step", [blocking, partners])
def test_clocks_of_hosts_may_differ_by_hours(step: Step) -> None:
    """Blocking calls release each rank on its own clock."""
    records = play(step)
    for rank, off_s in ((1, 3600.0), (2, -7.0), (3, 0.3)):
        for one in records[rank]:
            one.issued_s += off_s
            one.completed_s = (one.completed_s or 0.0) + off_s
    assert named(records, clock_error_s=None) == [2]


def test_asynchronous_calls_of_hosts_say_nothing() -> None:
    """Arrivals of different clocks cannot be compared."""
    assert named(play(buckets), clock_error_s=None) == []


def test_calls_that_return_at_once_say_nothing() -> None:
    """With NCCL the host runs ahead of the device: rank 2 gets later and later, and nobody waits."""

    def step(rank: int, number: int) -> Sequence[Item]:
        return [noisy(rank, number, 0.05, 1.001), call(1)]

    watch = PaceWatch()
    watch.job.take_records(play(step, 200, waits=False))
    assert watch.judge() == []
    seen = watch.job.outlook()
    assert seen is None or "do not wait for each other" in outlook_text(seen[1])


@pytest.mark.parametrize(("rank", "peer", "ranks"), [(1, 3, []), (3, 1, []), (1, 7, [2])])
def test_stages_of_a_pipeline_do_different_work(rank: int, peer: int, ranks: list[int]) -> None:
    """Members of a group that send each other messages are not compared."""
    records = play(blocking)
    records[rank].insert(0, CallRecord(rank, WORLD, 1, "send", peer=peer, completed_s=0.0, state=State.COMPLETED))
    assert named(records) == ranks


@pytest.mark.parametrize("portion", [7, 50, 1000])
def test_calls_may_come_in_any_portions(portion: int) -> None:
    """As a monitor sees them, with the calls before."""
    records, watch = play(blocking), PaceWatch()
    for end in range(portion, 2 * STEPS + portion, portion):
        watch.job.take_records({rank: calls[max(0, end - portion - 4) : end] for rank, calls in records.items()})
    assert [slow.rank for slow, _ in watch.judge()] == [2]
    seen = watch.job.outlook()
    assert seen is not None
    assert seen[1].steps >= STEPS - 10


def test_calls_of_two_threads_are_compared_by_their_numbers() -> None:
    """They may be recorded in another order than they are numbered in."""
    records = play(blocking)
    for at in range(10, 200, 30):
        records[1][at], records[1][at + 1] = records[1][at + 1], records[1][at]
    assert named(records) == [2]


def test_a_warning_is_given_once_and_withdrawn() -> None:
    """A rank that keeps pace again is named no more after three looks."""
    records = play(lambda rank, step: [noisy(rank, step, 0.05, 1.2 if step < 120 else 1.0), call(1)], 240)
    watch, news, named_at = PaceWatch(), [], []
    for end in range(20, 241, 20):
        watch.job.take_records({rank: calls[max(0, end - 24) : end] for rank, calls in records.items()})
        new = watch.judge()
        news += [(end, slow.rank, slow.is_sure) for slow, _ in new]
        watch.name(new, ())
        named_at += [end] * len(watch.findings())
    assert news == [(80, 2, True)]
    assert named_at[0] == 80
    assert 180 <= named_at[-1] <= 220


def test_what_a_finding_says() -> None:
    """Milliseconds, share of a step, standard errors: in one clause, with the figures for JSON."""
    watch = PaceWatch()
    watch.job.take_records(play(blocking))
    (finding,) = watch.name(watch.judge(), ())
    assert finding.ranks == (2,)
    assert finding.text.startswith("rank 2 works 5")
    assert "% of the time, since step 1 (" in finding.text
    assert set(finding.pace) >= {"excess_s", "share", "certainty", "window", "since_step", "step_s", "at_step"}


def test_the_line_of_a_slow_rank_is_that_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of an evaluation at the end, which is its last call of the group."""
    monkeypatch.setattr(straggler_watch, "origin_of", lambda readers: 0)
    monkeypatch.setattr(straggler_watch, "wall_offsets", lambda readers: {2: 0})
    watch = PaceWatch()
    records = play(lambda rank, step: [noisy(rank, step, 0.05, 1.3), call(1), *[call(9)] * (step % 50 == 49)], 150)
    watch.job.take_records(records)
    calls = records[2]
    reader: Any = SimpleNamespace(
        number=2,
        count=len(calls),
        since=lambda first: (np.arange(max(0, first), len(calls)),),
        decode=lambda at, origin_ns: calls[at],
    )
    (finding,) = watch.name(watch.judge(), [reader])
    assert (calls[-1].site, str(finding.site)) == (Site("train.py", 9, "step"), "train.py:1")


def test_the_first_look_is_a_while_after_the_start() -> None:
    """At the first turn there is nothing to see."""
    watch = PaceWatch()
    times_s = (0.0, LOOK_S / 2, LOOK_S, LOOK_S + 0.1, 2 * LOOK_S)
    assert [watch.due(at_s) for at_s in times_s] == [False, False, True, False, True]


def test_what_is_said_of_the_steps_once_a_minute() -> None:
    """With the rank of the largest excess; nothing before steps are known."""
    watch = PaceWatch()
    assert [watch.steps(at_s) for at_s in (0.0, 61.0)] == [None, None]
    watch.job.take_records(play(blocking))
    first, *later = [watch.steps(at_s) for at_s in (62.0, 63.0, 121.0, 122.5)]
    assert [one is None for one in later] == [True, True, False]
    assert first is not None
    assert (first.worst_rank, first.worst_share) == (2, pytest.approx(0.1, abs=0.02))
    assert first.worst_certainty > 6


def test_a_step_that_changes_begins_a_new_history() -> None:
    """Another loop of the program: its steps are not compared with those before."""

    def turns(key: int, begin: int, number: int) -> Turns:
        at = np.arange(begin, begin + number)
        return Turns(np.ones((2, number)), np.full(number, key), at * 1.0, at, np.ones(number), np.ones(number, bool))

    cutter = StepCutter()
    first = [cutter.add(turns(10, begin, 10))[1] for begin in range(0, 40, 10)]
    later = [cutter.add(turns(20, begin, 40))[1] for begin in range(40, 1000, 40)]
    assert first == [False, True, False, False]
    assert 1 <= sum(later) <= 2
    assert not any(later[10:])
