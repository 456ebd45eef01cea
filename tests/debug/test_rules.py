"""Rules that decide who is accused and when a job may end, each on the smallest records that tell it from its like."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.diagnosis.stragglers import SIMULATED, stragglers
from distsim.debug.matching.agreement import check_meeting
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, State
from distsim.debug.records.kinds import Kind
from tests.debug.builders import all_reduce, finding, play, run
from tests.debug.test_stragglers import job, late

PATIENCE_S = 60.0


def cut_off(waited_s: dict[int, float], kind: Kind = Kind.NETWORK_FAULT) -> Evidence:
    """All ranks are in one all_reduce that never ends, for so long each; rank 0 is said to be cut off."""
    evidence = play(3, lambda rank: [run(10)] if rank == 0 else [all_reduce(11)])
    call = evidence.records[1][-1]
    evidence.now_s, evidence.hang_after_s = 1000.0, PATIENCE_S
    for rank, seconds in waited_s.items():
        own = replace(call, rank=rank, issued_s=evidence.now_s - seconds)
        evidence.records = {**evidence.records, rank: [own]}
        state = replace(evidence.ranks[1], rank=rank, waits=(CallWait(own),), since_s=own.issued_s)
        evidence.ranks = {**evidence.ranks, rank: state}
    evidence.findings = [finding(kind, 0, text="rank 0 is cut off")]
    return evidence


@pytest.mark.parametrize(
    ("kind", "waited_s", "may_end"),
    [
        (Kind.NETWORK_FAULT, {0: 61.0, 1: 61.0, 2: 61.0}, True),
        (Kind.NETWORK_FAULT, {0: 59.0, 1: 59.0, 2: 59.0}, False),
        (Kind.NETWORK_FAULT, {0: 1.0, 1: 61.0, 2: 1.0}, True),
        (Kind.NETWORK_FAULT, {0: 1.0, 1: 1.0, 2: 61.0}, True),
        (Kind.NETWORK_FAULT, {0: 1.0, 1: 59.0, 2: 1.0}, False),
        (Kind.NEVER_JOINED, {0: 61.0, 1: 1.0, 2: 1.0}, True),
        (Kind.NEVER_JOINED, {0: 1.0, 1: 61.0, 2: 61.0}, False),
    ],
)
def test_a_job_may_end_when_the_longest_wait_is_as_long_as_patience(
    kind: Kind, waited_s: dict[int, float], may_end: bool
) -> None:
    """Of the ranks that wait for who is cut off, those that came later do not count; who never joined has no victim,
    and its own wait counts."""
    told = diagnose(cut_off(waited_s, kind))[0]
    assert (told.kind, told.culprits) == (kind, (0,))
    assert told.ends_job is may_end


def with_message(
    records: dict[int, list[CallRecord]], receiver: int, peer: int, op: str = "recv"
) -> dict[int, list[CallRecord]]:
    """A message of no length at the beginning, which costs nobody anything."""
    pair = Group("9", "pp", (receiver, peer))
    message = CallRecord(receiver, pair, 1, op, peer=peer, issued_s=0.0, completed_s=0.0, state=State.COMPLETED)
    return {**records, receiver: [message, *records.get(receiver, ())]}


@pytest.mark.parametrize(
    ("receiver", "peer", "named"),
    [(1, 0, False), (0, 1, False), (3, 2, False), (1, 7, True), (7, 1, True), (8, 7, True)],
)
@pytest.mark.parametrize("op", ["recv", "send"])
def test_stages_of_a_pipeline_are_not_stragglers(receiver: int, peer: int, named: bool, op: str) -> None:
    """Members of a group that send each other messages do different work by design; a message to or from outside of
    the group says nothing about it."""
    records = job(late(1))
    assert [found.rank for found in stragglers(records, SIMULATED)] == [1]
    found = stragglers(with_message(records, receiver, peer, op), SIMULATED)
    assert [one.rank for one in found] == ([1] if named else [])


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (3, 0, 2, 1), (2, 3, 0, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_side_of_the_lowest_group_rank_is_the_reference_of_a_tie(ranks: tuple[int, ...], turned: bool) -> None:
    """In the group's own order, whatever the order of the records and the global numbers of the ranks."""
    group = Group("1", "tp", ranks)
    half = len(ranks) // 2
    records = [
        CallRecord(rank, group, 5, "all_reduce", ((4,),), (), ("float32",), reduce_op="MAX" if place % 2 else "SUM")
        for place, rank in enumerate(ranks)
    ]
    found = check_meeting(records[::-1] if turned else records)
    assert found is not None
    assert (found.kind, found.tie) == (Kind.REDUCE_OP_MISMATCH, True)
    assert set(found.reference) == set(ranks[::2])
    assert set(found.culprits) == set(ranks[1::2])
    assert len(found.culprits) == half
    assert (found.expected, set(found.actual.values())) == ("SUM", {"MAX"})


def test_two_against_one_is_no_tie() -> None:
    """The majority is the reference, also where it has not the lowest rank."""
    group = Group("1", "tp", (0, 1, 2))
    records = [
        CallRecord(rank, group, 5, "broadcast", ((4,),), (), ("float32",), root=0 if rank else 2) for rank in (0, 1, 2)
    ]
    found = check_meeting(records)
    assert found is not None
    assert (found.culprits, found.reference, found.tie) == ((0,), (1, 2), False)
