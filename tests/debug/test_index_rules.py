"""The index of the evidence: which calls meet, which send goes with which receive, and what a rank waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from distsim.debug.matching.index import EvidenceIndex
from distsim.debug.records import CallRecord, CallWait, Evidence, Group, HostWait, Phase, RankState, State, StoreWait
from distsim.debug.records.call import SERVE, Remote

WORLD = Group("0", "default_pg", (0, 1))
CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:16811"
OWN = "ValueError: bad batch"
Calls = Mapping[int, Sequence[CallRecord]]


def call(rank: int = 0, seq: int = 1, op: str = "all_reduce", *, group: Group = WORLD, **kw: Any) -> CallRecord:
    return CallRecord(rank, group, seq, op, **{"index": seq - 1, "state": State.COMPLETED, **kw})


def index_of(records: Calls, *states: RankState, size: int = 2, **kw: Any) -> EvidenceIndex:
    ranks = {state.rank: state for state in states}
    return EvidenceIndex(Evidence(size, ranks, records, now_s=9.0, **kw))


def met(index: EvidenceIndex) -> list[dict[int, list[int]]]:
    """For each log and number the ranks that made the call."""
    return [{seq: sorted(calls) for seq, calls in log.meetings.items()} for log in index.group_logs]


# --- who meets whom


def test_ranks_meet_by_group_and_number() -> None:
    """Groups are the same by name and members, also where each rank has a copy of its own."""
    copy, other, fewer = Group("0", "default_pg", (0, 1)), Group("1", "", (0, 1)), Group("0", "", (1,))
    records = {
        0: [call(0, 1), call(0, 2), call(0, 1, group=other)],
        1: [call(1, 1, group=copy), call(1, 1, group=fewer)],
    }
    index = index_of(records)
    assert met(index) == [{1: [0, 1], 2: [0]}, {1: [0]}, {1: [1]}]
    log = index.group_logs[0]
    assert [log.absent(1), log.absent(2), log.absent(3)] == [[], [1], [0, 1]]
    assert [log.id for log in index.group_logs] == [0, 1, 2]


def test_numbers_that_begin_again_are_another_world() -> None:
    """A second call number 1 of a rank opens a new log, and the n-th log of one rank is the n-th of another."""
    records = {0: [call(0, 1), call(0, 2), call(0, 1), call(0, 1)], 1: [call(1, 1), call(1, 1), call(1, 2)]}
    index = index_of(records)
    assert met(index) == [{1: [0, 1], 2: [0]}, {1: [0, 1], 2: [1]}, {1: [0]}]
    assert [index.group_log(one) for one in records[1]] == [index.group_logs[n] for n in (0, 1, 1)]
    assert index.group_log(call(1, 2)) is index.group_logs[1]  # an equal copy: the last that has such a call
    assert index.group_log(call(1, 3)) is None


def test_a_number_seen_twice_counts_once() -> None:
    """The first record of a number beyond 1 stays, and calls are in the order of their numbers."""
    first, again, late = call(0, 3, "barrier"), call(0, 3), call(0, 2)
    (log,) = index_of({0: [call(0, 1), first, again, late]}).group_logs
    assert log.meetings[3][0] is first
    assert [one.seq for one in log.calls[0]] == [1, 2, 3]


def test_who_destroys_a_group_meets_nobody() -> None:
    """Nobody waits in it; a rank of which only this is known is not in the log."""
    records = {0: [call(0, 1), call(0, 2, "destroy_process_group")], 1: [call(1, 2, "destroy_process_group")]}
    (log,) = index_of(records).group_logs
    assert (log.meetings, sorted(log.calls)) == ({1: {0: records[0][0]}}, [0])


@pytest.mark.parametrize(
    "odd",
    [
        call(0, 2, rejected=True),
        call(0, 2, group=Group("5", "", (1,))),
        call(0, 2, "rpc_sync", remote=Remote("f", "a", "b")),
        call(0, 2, "send", peer=1),
    ],
    ids=["refused", "of a group without it", "remote", "message"],
)
def test_other_calls_are_in_no_log(odd: CallRecord) -> None:
    """A call that its own rank refused, one of a group that the rank is not in, one between two."""
    assert met(index_of({0: [call(0, 1), odd, call(0, 3)], 1: [call(1, 1)]})) == [{1: [0, 1], 3: [0]}]


def test_refused_calls_are_known_apart() -> None:
    """In the order of the ranks."""
    refused = {rank: call(rank, 2, rejected=True) for rank in (1, 0)}
    index = index_of({rank: [call(rank, 1), one] for rank, one in refused.items()})
    assert index.refused == [refused[0], refused[1]]
    assert [[one.seq for one in index.records(rank)] for rank in (0, 1, 2)] == [[1], [1], []]


@pytest.mark.parametrize(
    "record",
    [
        call(0, 1, group=Group("1", "", (0, 7))),
        call(0, 1, "new_group", new_ranks=(0, 7)),
        call(0, 1, "send", peer=7),
        call(0, 1, "rpc_sync", peer=7, remote=Remote("f", "a", "b")),
    ],
    ids=["member", "member of a new group", "receiver", "callee"],
)
def test_ranks_beyond_the_world_are_strangers(record: CallRecord) -> None:
    """Damaged records may name them; they have a state like the others, so that looking them up never fails."""
    index = index_of({0: [record]})
    assert index.strangers == {7}
    assert index.states[7] == RankState(7)
    waiting = index_of({}, RankState(0, Phase.BLOCKED, (CallWait(record),)))
    assert waiting.strangers == {7}
    assert index_of({0: [call()]}).strangers == set()


def test_a_rank_without_a_state_runs_if_it_made_a_call() -> None:
    """One that made none never came; one that was not run is not there at all."""
    index = index_of({0: [call()], 1: []}, size=3, not_run=frozenset({2}))
    assert {rank: state.phase for rank, state in index.states.items()} == {0: Phase.RUNNING, 1: Phase.ABSENT}


# --- records that were overwritten


@pytest.mark.parametrize(
    ("first", "cut", "truncated"),
    [(None, (), False), (0, (), False), (1, (), True), (0, (0,), True), (None, (0,), True), (0, (1,), False)],
)
def test_a_rank_whose_first_record_is_not_number_0_was_cut(
    first: int | None, cut: Sequence[int], truncated: bool
) -> None:
    """Or one that is known to be."""
    records = [] if first is None else [call(index=first)]
    assert index_of({0: records}, cut=frozenset(cut)).truncated(0) is truncated


@pytest.mark.parametrize(
    ("indices", "is_async", "state", "cut", "seen"),
    [
        ([2, 5, 6], True, State.COMPLETED, True, [5, 6]),
        ([2, 5, 7], True, State.COMPLETED, True, [7]),
        ([4, 5, 6], True, State.COMPLETED, True, [4, 5, 6]),
        ([0, 1, 2], True, State.COMPLETED, True, [0, 1, 2]),
        ([2, 5, 6], False, State.COMPLETED, True, [2, 5, 6]),
        ([2, 5, 6], True, State.ISSUED, True, [2, 5, 6]),
        ([2, 5, 6], True, State.COMPLETED, False, [2, 5, 6]),
    ],
)
def test_finished_handles_without_their_neighbours_prove_nothing(
    indices: Sequence[int], is_async: bool, state: State, cut: bool, seen: Sequence[int]
) -> None:
    """Of a rank whose records were cut, a handle that ended counts from where all calls are recorded."""
    records = [call(0, 1 + index, index=index, is_async=is_async, state=state) for index in indices]
    (log,) = index_of({0: records}, cut=frozenset({0} if cut else ())).group_logs
    assert [one.index for one in log.calls[0]] == list(seen)


@pytest.mark.parametrize(("cut", "logs"), [((), [{1: [0]}, {1: [0]}]), ((1,), [{1: [0]}, {1: [0]}, {1: [0]}])])
@pytest.mark.parametrize("op", ["new_group", "init_process_group"])
def test_calls_with_their_own_numbers_have_their_own_logs(
    op: str, cut: Sequence[int], logs: list[dict[int, list[int]]]
) -> None:
    """Once records are missing, number 1 after number 1 no longer tells the two apart."""
    records = {0: [call(0, 1, op), call(0, 1), call(0, 1)]}
    index = index_of(records, cut=frozenset(cut))
    assert met(index) == (logs if cut else [{1: [0]}] * 3)
    assert [index.group_log(one) for one in records[0]] == index.group_logs
    if cut:  # of another rank
        mixed = index_of({0: [call(0, 1, op)], 1: [call(1, 1)]}, cut=frozenset(cut))
        assert met(mixed) == [{1: [0]}, {1: [1]}]


# --- messages


def send(rank: int, peer: int | None, index: int = 0, **kw: Any) -> CallRecord:
    return call(rank, 1, "send", **{"peer": peer, "tag": 0, "index": index, **kw})


def recv(rank: int, peer: int | None, index: int = 0, **kw: Any) -> CallRecord:
    return call(rank, 1, "recv", **{"peer": peer, "tag": 0, "index": index, **kw})


OTHER = Group("1", "", (0, 1, 2))
THREE = Group("0", "default_pg", (0, 1, 2))
PAIRS: list[tuple[str, list[CallRecord], list[tuple[int, int]]]] = [
    # records in order of the ranks -> (place of the send, place of the receive)
    ("a message", [send(0, 1), recv(1, 0)], [(0, 1)]),
    ("in order", [send(0, 1), send(0, 1, 1), recv(1, 0), recv(1, 0, 1)], [(0, 2), (1, 3)]),
    ("by tag", [send(0, 1, tag=1), send(0, 1, 1), recv(1, 0), recv(1, 0, 1, tag=1)], [(1, 2), (0, 3)]),
    ("no tag is tag 0", [send(0, 1, tag=None), recv(1, 0)], [(0, 1)]),
    ("nor for the receiver", [send(0, 1), recv(1, 0, tag=None)], [(0, 1)]),
    ("tag 1 is not", [send(0, 1, tag=None), recv(1, 0, tag=1)], []),
    ("by group", [send(0, 1, group=OTHER), recv(1, 0)], []),
    ("not to itself", [send(0, 1), recv(0, 1)], []),
    ("not of a third rank", [send(0, 1), recv(1, 2)], []),
    ("not to a third rank", [send(0, 2), recv(1, 0)], []),
    ("two sends", [send(0, 1), send(1, 0)], []),
    ("to no rank, from any", [send(0, None), recv(1, None)], []),
    ("from any", [send(0, 1), recv(1, None)], [(0, 1)]),
    ("from any, whoever was first", [send(0, 1, issued_s=2.0), recv(1, None), send(2, 1, issued_s=1.0)], [(2, 1)]),
    ("at once: the lower rank", [send(0, 1), recv(1, None), send(2, 1)], [(0, 1)]),
    ("from any, by tag", [send(0, 1, tag=1), recv(1, None)], []),
    ("from any, no tag", [send(0, 1, tag=None), recv(1, None, tag=None)], [(0, 1)]),
    ("from any after the named", [send(0, 1), send(0, 1, 1), recv(1, None), recv(1, 0, 1)], [(0, 3), (1, 2)]),
]


@pytest.mark.parametrize(("law", "records", "pairs"), PAIRS, ids=[law for law, _, _ in PAIRS])
def test_sends_and_receives_are_matched(law: str, records: list[CallRecord], pairs: list[tuple[int, int]]) -> None:
    """First come first served, by sender, receiver, tag and group; what is left is lonely."""
    records = [replaced(one) for one in records]
    index = index_of({rank: [one for one in records if one.rank == rank] for rank in range(3)}, size=3)
    ends = [(records[a], records[b]) for a, b in pairs]
    assert list(index.pairs_in_order()) == sorted(ends, key=lambda end: (end[0].rank, end[0].index))
    for a, b in ends:
        assert index.pairs.of(a) is b
        assert index.pairs.of(b) is a
    lonely = [one for one in records if not any(one in end for end in ends)]
    assert index.pairs.lonely_sends == [one for one in lonely if one.op == "send"]
    assert index.pairs.lonely_recvs == [one for one in lonely if one.op == "recv"]


def replaced(record: CallRecord) -> CallRecord:
    """A message in the world of three unless it says otherwise."""
    if record.group is WORLD:
        record.group = THREE
    return record


def test_lonely_sends_are_in_order() -> None:
    """Of ranks, and of each rank's program."""
    records = {0: [send(0, 1, 0), send(0, 1, 1, tag=5), send(0, 1, 2)], 1: [send(1, 0)]}
    lonely = index_of(records).pairs.lonely_sends
    assert [(one.rank, one.index) for one in lonely] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@pytest.mark.parametrize(
    ("cut", "state", "counts"),
    [((), State.COMPLETED, 2), ((0,), State.COMPLETED, 0), ((1,), State.COMPLETED, 0), ((0,), State.ISSUED, 2)],
)
def test_done_messages_of_a_rank_that_was_cut_are_left_out(cut: Sequence[int], state: State, counts: int) -> None:
    """Their other end may be lost, so that a later one would take its place. *cut*: this rank or the other one."""
    records = {0: [send(0, 1, state=state), recv(0, 1, 1, state=state)]}
    pairs = index_of(records, cut=frozenset(cut)).pairs
    assert len(pairs.lonely_sends + pairs.lonely_recvs) == counts


# --- waits


OPEN = {"state": State.ISSUED}
WAITS: list[tuple[str, list[CallRecord], int | None]] = [
    # calls of a blocked rank that does not say what it waits for -> the one that it waits for
    ("nothing is open", [call(0, 1)], None),
    ("what is open", [call(0, 1), call(0, 2, **OPEN)], 1),
    ("of two the last", [call(0, 1, **OPEN), call(0, 2, **OPEN)], 1),
    ("not a handle", [call(0, 1, **OPEN), call(0, 2, is_async=True, **OPEN)], 0),
    ("of handles the first", [call(0, n, is_async=True, **OPEN) for n in (1, 2)], 0),
    ("its own remote call", [call(0, 1, "rpc_sync", remote=Remote("f", "a", "b"), **OPEN)], 0),
    ("not what it serves", [call(0, 1, SERVE, remote=Remote("f", "a", "b"), **OPEN)], None),
]


@pytest.mark.parametrize(("law", "records", "which"), WAITS, ids=[law for law, _, _ in WAITS])
def test_what_a_blocked_rank_waits_for(law: str, records: list[CallRecord], which: int | None) -> None:
    """Where its state does not say; a rank that runs waits for nothing."""
    expected = () if which is None else (CallWait(records[which]),)
    index = index_of({0: records}, RankState(0, Phase.BLOCKED))
    assert index.waits(0) == expected
    assert [CallWait(one) for one in index.call_waits(0)] == list(expected)
    assert index_of({0: records}, RankState(0)).waits(0) == ()
    told = (StoreWait(("key",)), HostWait("a lock"))
    knows = index_of({0: records}, RankState(0, Phase.BLOCKED, told))
    assert (knows.waits(0), knows.call_waits(0)) == (told, [])
    assert index.last(0) is records[-1]
    assert index.last(1) is None


FAILED = {"state": State.FAILED, "error": CLOSED}
DEATHS: list[tuple[str, Phase, str | None, list[CallRecord], int | None]] = [
    # phase, exception, calls -> the call in which it died
    ("a rank that lives", Phase.RUNNING, CLOSED, [call(0, 1, **OPEN)], None),
    ("no call", Phase.RAISED, OWN, [], None),
    ("after its last call", Phase.RAISED, OWN, [call(0, 1)], None),
    ("killed after its last call", Phase.KILLED, None, [call(0, 1)], None),
    ("killed in a call", Phase.KILLED, None, [call(0, 1, **OPEN)], 0),
    ("killed with a handle", Phase.KILLED, None, [call(0, 1, is_async=True, **OPEN)], None),
    ("killed while it served", Phase.KILLED, None, [call(0, 1, **OPEN), call(0, 2, SERVE)], 0),
    ("raised in a call", Phase.RAISED, OWN, [call(0, 1, **OPEN)], 0),
    ("a call failed", Phase.RAISED, OWN, [call(0, 1, state=State.FAILED, error=OWN)], 0),
    ("a handle failed unseen", Phase.RAISED, OWN, [call(0, 1, is_async=True, **FAILED)], None),
    ("it waited for that", Phase.RAISED, OWN, [call(0, 1, is_async=True, waited=True, **FAILED)], 0),
    ("killed, a handle failed", Phase.KILLED, None, [call(0, 1, is_async=True, **FAILED)], 0),
    ("lost in C++", Phase.RAISED, CLOSED, [call(0, n, is_async=True, **OPEN) for n in (1, 2)], 0),
    ("killed in C++", Phase.KILLED, CLOSED, [call(0, n, is_async=True, **OPEN) for n in (1, 2)], None),
    (
        "lost in C++, not in a message",
        Phase.RAISED,
        CLOSED,
        [call(0, 1, "send", peer=1, is_async=True, **OPEN), call(0, 2, is_async=True, **OPEN)],
        1,
    ),
    ("lost, all done", Phase.RAISED, CLOSED, [call(0, 1)], None),
]


@pytest.mark.parametrize(("law", "phase", "words", "records", "which"), DEATHS, ids=[row[0] for row in DEATHS])
def test_the_call_in_which_a_rank_died(
    law: str, phase: Phase, words: str | None, records: list[CallRecord], which: int | None
) -> None:
    """What failed or was under way, unless the program never saw it."""
    index = index_of({0: records}, RankState(0, phase, exception=words))
    expected = None if which is None else records[which]
    assert index.died_inside(0) is expected
    if phase is not Phase.RUNNING:
        assert index.call_waits(0) == ([] if expected is None else [expected])
        told = index_of({0: records}, RankState(0, phase, (HostWait("x"), CallWait(call(0, 9))), exception=words))
        assert told.died_inside(0) == call(0, 9)
