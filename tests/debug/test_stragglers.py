"""Who makes the others wait at every step, and who only looks like it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.stragglers import SIMULATED, straggler_findings, stragglers
from distsim.debug.records import CallRecord, Group, Site, State
from distsim.debug.records.kinds import Kind
from tests.debug import builders as b

Work = Callable[[int, int], float]
"""Rank, step -> seconds of its own work before the step's collectives."""


def job(
    work: Work,
    size: int = 4,
    steps: int = 60,
    buckets: int = 1,
    op: str = "all_reduce",
    skew_s: tuple[float, ...] = (),
    is_async: bool = False,
) -> dict[int, list[CallRecord]]:
    """Steps of work and *buckets* collectives that take 1 ms once all are there; rank r's clock is off by skew_s[r]."""
    group = Group("0", "default_pg", tuple(range(size)))
    records: dict[int, list[CallRecord]] = {rank: [] for rank in range(size)}
    clock = [0.0] * size
    seq = 0
    for step in range(steps):
        for bucket in range(buckets):
            seq += 1
            arrivals = [clock[rank] + (work(rank, step) if bucket == 0 else 0.002) for rank in range(size)]
            done = max(arrivals) + 0.001
            for rank in range(size):
                off = skew_s[rank] if skew_s else 0.0
                records[rank].append(
                    CallRecord(
                        rank, group, seq, op, ((4,),), ((4,),), ("float32",), is_async=is_async,
                        site=Site("train.py", 10, "step"), issued_s=arrivals[rank] + off, started_s=done - 0.001 + off,
                        completed_s=done + off, state=State.COMPLETED, index=len(records[rank]),
                    )
                )  # fmt: skip
                clock[rank] = done
    return records


def late(who: int, by_s: float = 0.5, base_s: float = 0.5) -> Work:
    return lambda rank, step: base_s + (by_s if rank == who else 0.0)


def named(records: dict[int, list[CallRecord]]) -> list[int]:
    return [found.rank for found in stragglers(records, SIMULATED)]


def test_one_second_of_two_is_told_with_its_share() -> None:
    """No single wait is long; the share says what it costs."""
    (found,) = stragglers(job(late(2, 1.0, 1.0)), SIMULATED)
    assert (found.rank, found.late, found.meetings) == (2, 59, 59)
    assert found.share == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("buckets", [1, 2, 20])
def test_it_is_late_to_the_first_collective_of_a_step_only(buckets: int) -> None:
    """DDP's further buckets all come in time, and are many."""
    assert named(job(late(1), buckets=buckets)) == [1]


def test_a_rank_that_becomes_slow_is_named() -> None:
    """It was as fast as the others in the first sixth of the records."""
    records = job(lambda rank, step: 1.0 + (1.0 if rank == 0 and step >= 20 else 0.0))
    assert named({rank: calls[12:] for rank, calls in records.items()}) == [0]


def test_two_slow_ranks_of_four_are_both_told_the_worse_first() -> None:
    """Lateness is counted from the earlier half."""
    assert named(job(lambda rank, step: {1: 1.0, 3: 1.2}.get(rank, 0.5))) == [3, 1]


def test_clocks_of_hosts_may_differ_by_hours() -> None:
    """Only durations on a rank's own clock are compared."""
    skewed = job(late(1), skew_s=(0.0, 3_600.0, -7.0, 0.3))
    assert named(skewed) == [1]
    assert named(job(lambda rank, step: 0.5, skew_s=(0.0, 3_600.0, -7.0, 0.3))) == []


def noisy(rank: int, step: int) -> float:
    return random.Random(f"{rank}:{step}").expovariate(2.0)


def evaluates_at_the_end() -> dict[int, list[CallRecord]]:
    """Rank 0 evaluates before each of the last three collectives, which are made at another line."""
    records = job(lambda rank, step: 0.2 + (2.0 if rank == 0 and step >= 57 else 0.0))
    for calls in records.values():
        for call in calls[-3:]:
            call.site = Site("train.py", 20, "evaluate")
    return records


HEALTHY: dict[str, dict[int, list[CallRecord]]] = {
    "an evaluation of rank 0 at the end": evaluates_at_the_end(),
    "all alike": job(lambda rank, step: 0.5),
    "noise of a loaded machine": job(noisy, steps=200),
    "noise, two ranks": job(noisy, size=2, steps=200),
    "a checkpoint of rank 0 every tenth step": job(
        lambda rank, step: 0.2 + (3.0 if rank == 0 and step % 10 == 5 else 0.0)
    ),
    "an evaluation of rank 0 every fifth step, with buckets": job(
        lambda rank, step: 0.2 + (1.0 if rank == 0 and step % 5 == 4 else 0.0), buckets=4
    ),
    "rank 1 compiles in its first steps": job(lambda rank, step: 0.2 + (8.0 if rank == 1 and step < 3 else 0.0)),
    "late once by a minute": job(lambda rank, step: 0.5 + (60.0 if (rank, step) == (3, 30) else 0.0)),
    "a little slower than the others": job(late(1, 0.05)),
    "one early rank": job(lambda rank, step: 0.1 if rank == 2 else 0.5),
    "too short to say": job(late(1), steps=4),
    "who comes late to a broadcast keeps nobody": job(late(1), op="broadcast"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nobody_is_accused(name: str) -> None:
    """What happens now and then, to everybody by turns, or by a little, is no straggler."""
    assert named(HEALTHY[name]) == []


def test_who_was_kept_waiting_itself_is_not_blamed() -> None:
    """A rank comes late to the world because a message came late to it; its sender is not named either: they are
    stages of a pipeline, and do different work by design."""
    records = job(late(1))
    pair = Group("0", "default_pg", (0, 1, 2, 3))
    for number, call in enumerate(list(records[1])):
        begin = call.issued_s - 0.5
        records[1].append(
            CallRecord(
                1, pair, number + 1, "recv", peer=0, issued_s=begin, completed_s=call.issued_s, state=State.COMPLETED
            )
        )
    assert named(records) == []


def test_a_replica_that_waits_for_its_own_upstream_is_not_blamed() -> None:
    """Time inside of another group's call is not its own work: the slow rank of that group is looked at there."""
    records = job(late(1), size=2)
    other = Group("7", "tp", (1, 5))
    for call in list(records[1]):
        begin = call.issued_s - 0.5
        records[1].append(
            CallRecord(
                1, other, call.seq, "all_gather", issued_s=begin, completed_s=call.issued_s, state=State.COMPLETED
            )
        )
    assert named(records) == []


def test_a_finding_names_the_worst_rank_and_its_line() -> None:
    """What `diagnose` takes: one finding, with the line before which the time goes."""
    (finding,) = straggler_findings(job(late(2)), SIMULATED)
    assert finding.kind is Kind.STRAGGLER
    assert finding.ranks == (2,)
    assert finding.text.startswith("rank 2 came late to 59 of 59 collectives and kept the others waiting for 29.5 s")
    assert str(finding.site) == "train.py:10"
    assert straggler_findings(HEALTHY["all alike"], SIMULATED) == []


@pytest.mark.parametrize("line", [0, 9])
def test_who_is_late_for_a_message_is_told_with_a_line(line: int) -> None:
    """Where it is; where nobody knows that, where its last call was. The message is awaited by the other end."""
    programs = {0: [b.all_reduce(3), b.recv(1, 5)], 1: [b.all_reduce(3), b.run(line)]}
    evidence = b.play(2, programs, straggler_after_s=1.0, hang_after_s=60.0, now_s=20.0)
    (told,) = diagnose(evidence)
    assert (told.kind, told.culprits) == (Kind.STRAGGLER, (1,))
    assert "Rank 1 is late for rank 0's recv from rank 1 (tag 0)" in told.explanation
    expected = "still runs, at train.py:9." if line else "still runs; its last call was all_reduce #1 at train.py:3."
    assert expected in told.explanation


@pytest.mark.parametrize(
    ("op", "peer", "late_ranks"),
    [("send", 0, []), ("recv", 2, []), ("send", 9, [1]), ("recv", None, [1]), ("broadcast", 0, [1])],
)
def test_nobody_is_late_in_a_group_whose_members_send_each_other_messages(
    op: str, peer: int | None, late_ranks: list[int]
) -> None:
    """Two of four are enough, and a message to a rank outside says nothing."""
    records = job(late(1))
    message = CallRecord(3, records[3][0].group, 1, op, peer=peer, state=State.COMPLETED, index=len(records[3]))
    assert named(records | {3: [*records[3], message]}) == late_ranks


def test_a_rank_can_be_late_for_one_other() -> None:
    """A group of two has two clocks; a group of one waits for nobody."""
    assert named(job(late(1), size=2)) == [1]
    assert named(job(late(0), size=1)) == []
