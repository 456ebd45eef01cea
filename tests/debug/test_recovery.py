"""Ranks that die in a job that reconfigures its groups, on hand-made records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.causes.recovery import recoveries
from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind

BASE = Group("0", "default_pg", (0, 1, 2))
FIRST = BASE.reconfigured(1, (0, 1, 2))
SECOND = BASE.reconfigured(2, (0, 2))
AT = Site("train.py", 10, "main")


def call(rank: int, index: int, op: str, group: Group, seq: int, state: State, begin_s: float) -> CallRecord:
    end_s = begin_s + 0.5 if state is not State.STARTED else None
    record = CallRecord(rank, group, seq, op, site=AT, stack=(AT,), issued_s=begin_s, completed_s=end_s, state=state)
    record.index = index
    return record


def job(*survivors_calls: tuple[str, Group, int, State, float], hang_after_s: float | None = None) -> Evidence:
    """Three ranks, the second of which died at 3.2 s in its second all_reduce; and what the others did then."""
    records = {}
    for rank in range(3):
        calls = [call(rank, 0, "reconfigure", FIRST, 1, State.COMPLETED, 1.0)]
        calls.append(call(rank, 1, "all_reduce", FIRST, 1, State.COMPLETED, 2.0))
        calls.append(call(rank, 2, "all_reduce", FIRST, 2, State.STARTED if rank == 1 else State.FAILED, 3.0))
        if rank != 1:
            calls += [call(rank, 3 + i, *one) for i, one in enumerate(survivors_calls)]
        records[rank] = calls
    states = {}
    for rank, calls in records.items():
        last = calls[-1]
        blocked = last.state is State.STARTED
        states[rank] = RankState(
            rank,
            Phase.BLOCKED if blocked else Phase.FINISHED,
            (CallWait(last),) if blocked else (),
            since_s=last.issued_s if blocked else None,
            exit_code=None if blocked else 0,
        )
    states[1] = RankState(1, Phase.KILLED, since_s=3.2, exit_code=-9, signal="SIGKILL")
    return Evidence(3, states, records, now_s=9.0, hang_after_s=hang_after_s)


WENT_ON = (
    ("reconfigure", SECOND, 1, State.COMPLETED, 4.0),
    ("all_reduce", SECOND, 1, State.COMPLETED, 5.0),
)


def test_a_job_that_went_on_is_healthy() -> None:
    """Neither the death nor the call that failed is a fault; the sentence has the time, the place and the lost call."""
    evidence = job(*WENT_ON)
    assert diagnose(evidence) == []
    (recovery,) = recoveries(evidence)
    assert (recovery.lost, recovery.last and recovery.last.seq) == ((1,), 2)
    assert recovery.text == (
        "ranks 0,2 went on without rank 1 by reconfigure at train.py:10, 1.3 s after rank 1 ended; all_reduce #2 at "
        "train.py:10 was lost"
    )
    (back,) = recoveries(evidence, {1: 3.2})
    assert back.back_s is None, "it never was a member again"


def test_another_fault_after_it_is_reported() -> None:
    """Of the ranks that went on, one calls another operation."""
    evidence = job(*WENT_ON)
    records = {rank: list(calls) for rank, calls in evidence.records.items()}
    records[2][-1] = replace(records[2][-1], op="barrier")
    (diagnosis,) = diagnose(replace(evidence, records=records))
    assert diagnosis.group == SECOND
    assert diagnosis.kind in (Kind.OP_MISMATCH, Kind.MISSING_RANK, Kind.WRONG_ORDER)


def test_a_death_without_a_reconfiguration_is_the_fault() -> None:
    """The others' last call failed, and they ended; or they wait for the dead rank in the next group."""
    waiting = job(("reconfigure", BASE.reconfigured(2, (0, 1, 2)), 1, State.STARTED, 4.0))
    (diagnosis,) = diagnose(waiting)
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.victims) == (Kind.RANK_KILLED, (1,), (0, 2))
    assert recoveries(waiting) == []
    assert Kind.RANK_KILLED in {diagnosis.kind for diagnosis in diagnose(job())}


@pytest.mark.parametrize(("hang_after_s", "is_named"), [(60.0, False), (9.0, True)])
def test_a_live_job_has_time_to_reconfigure(hang_after_s: float, is_named: bool) -> None:
    """Others have waited 5 s for the rank that died: it is named once that is half of --hang-after."""
    evidence = job(("reconfigure", BASE.reconfigured(2, (0, 1, 2)), 1, State.STARTED, 4.0), hang_after_s=hang_after_s)
    kinds = [diagnosis.kind for diagnosis in diagnose(evidence) if diagnosis.exit_code]
    assert kinds == ([Kind.RANK_KILLED] if is_named else [])


@pytest.mark.parametrize(("begin_s", "is_named"), [(8.0, False), (4.0, True)])
def test_a_rank_that_is_to_return_has_time_to_start(begin_s: float, is_named: bool) -> None:
    """The others went on without it, and have waited 1 s for it in the next group, then 5 s."""
    third = BASE.reconfigured(3, (0, 1, 2))
    calls = (WENT_ON[0], ("reconfigure", third, 1, State.STARTED, begin_s))
    kinds = [diagnosis.kind for diagnosis in diagnose(job(*calls, hang_after_s=10.0)) if diagnosis.exit_code]
    assert kinds == ([Kind.RANK_KILLED] if is_named else [])


def test_an_exception_stays_a_fault() -> None:
    """The others went on without a rank that raised: the program has a bug."""
    evidence = job(*WENT_ON)
    raised = RankState(1, Phase.RAISED, since_s=3.2, exit_code=1, exception="ValueError: x")
    (diagnosis, *_) = diagnose(replace(evidence, ranks={**evidence.ranks, 1: raised}))
    assert (diagnosis.kind, diagnosis.culprits) == (Kind.RANK_RAISED, (1,))


def test_a_group_that_was_made_smaller_before_is_no_recovery() -> None:
    """The rank was left out at 4.5 s and died later: nobody has gone on without it because of that."""
    evidence = job(*WENT_ON)
    later = replace(evidence.ranks[1], since_s=6.0)
    assert recoveries(replace(evidence, ranks={**evidence.ranks, 1: later})) == []
