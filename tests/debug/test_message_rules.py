"""Which unmatched message is nearly the one that a call waits for: pure rules, each in a table of small cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.debug.diagnosis import point_to_point as rules
from distsim.debug.records import CallRecord, Group, Site, State

DP, TP = Group("0", "dp", (0, 1, 2)), Group("1", "tp", (0, 1, 2))


def message(
    rank: int,
    op: str,
    peer: int | None,
    tag: int | None = 0,
    group: Group = DP,
    index: int = 10,
    line: int = 1,
    done: bool = False,
    error: str | None = None,
) -> CallRecord:
    """A send or receive of *rank*."""
    state = State.FAILED if error else State.COMPLETED if done else State.ISSUED
    site = Site("train.py", line, "main")
    return CallRecord(rank, group, 0, op, index=index, peer=peer, tag=tag, site=site, state=state, error=error)


def index_of(others: Sequence[CallRecord], past: Mapping[int, Sequence[CallRecord]] | None = None) -> Any:
    """As much of an index as these rules read: unmatched messages, and all messages by rank."""
    sends, recvs = ([one for one in others if one.op == op] for op in ("send", "recv"))
    pairs = SimpleNamespace(lonely_sends=sends, lonely_recvs=recvs)
    return SimpleNamespace(pairs=pairs, records=lambda rank: list((past or {}).get(rank, ())))


RECV = message(0, "recv", 1)
MISSES = [
    # another rank's unmatched send -> in what it differs from what rank 0 receives from rank 1, and who is blamed
    (message(1, "send", 0, tag=7), "tag", (0, 1), "another tag"),
    (message(1, "send", 0, tag=7, group=TP), "tag", (0, 1), "another tag, whatever the group"),
    (message(1, "send", 0, group=TP), "group", (0, 1), "another group"),
    (message(1, "send", 2), "receiver", (1,), "to another rank"),
    (message(1, "send", 2, tag=7), None, (), "to another rank with another tag"),
    (message(1, "send", 2, group=TP), None, (), "to another rank on another group"),
    (message(1, "send", 2, done=True), None, (), "to another rank, and arrived"),
    (message(2, "send", 0), "sender", (0,), "from another rank"),
    (message(2, "send", 0, tag=7), None, (), "from another rank with another tag"),
    (message(2, "send", 0, done=True), None, (), "from another rank, and arrived"),
    (message(2, "send", 1), None, (), "between two others"),
    (message(0, "send", 0, tag=7), None, (), "its own"),
    (message(1, "send", 0, tag=7, error="x"), None, (), "one that failed"),
    (message(1, "send", 0, tag=7, done=True), "tag", (0, 1), "one that is under way"),
    (message(1, "recv", 0, tag=7), None, (), "a receive"),
]


@pytest.mark.parametrize(("other", "differs", "culprits", "reason"), MISSES)
def test_a_message_that_differs_in_one_property(
    other: CallRecord, differs: str | None, culprits: tuple[int, ...], reason: str
) -> None:
    """In tag, group, receiver or sender."""
    miss = rules.near_miss(index_of([other]), RECV)
    assert (None if miss is None else (miss.differs, miss.culprits)) == (differs and (differs, culprits)), reason


def test_a_message_from_any_rank_has_no_wrong_sender() -> None:
    """Nor a wrong receiver: it needs this rank as its receiver, and the tag."""
    call = message(0, "recv", None)
    for other, differs in ((message(2, "send", 0, tag=7), "tag"), (message(1, "send", 2), None)):
        miss = rules.near_miss(index_of([other]), call)
        assert (miss and miss.differs) == differs


def test_a_send_is_compared_with_receives() -> None:
    """And no tag is tag 0."""
    call = message(0, "send", 1, tag=None)
    for other, differs in (
        (message(1, "recv", 0, tag=3), "tag"),
        (message(1, "recv", 2), "sender"),
        (message(2, "recv", 0), "receiver"),
        (message(1, "recv", 0, group=TP), "group"),
        (message(1, "recv", None, group=TP), None),
    ):
        miss = rules.near_miss(index_of([other]), call)
        assert (miss and miss.differs) == differs


def test_the_nearest_of_several_messages() -> None:
    """A tag before a group, then a receiver, then a sender; of two alike the last one."""
    every = [
        message(2, "send", 0),
        message(1, "send", 2),
        message(1, "send", 0, group=TP),
        message(1, "send", 0, tag=7, index=4),
        message(1, "send", 0, tag=8, index=5),
    ]
    order = []
    while (miss := rules.near_miss(index_of(every), RECV)) is not None:
        order.append(miss.differs if miss.differs != "tag" else str(miss.call.tag))
        every.remove(miss.call)
    assert order == ["8", "7", "group", "receiver", "sender"]


HABITS = [
    # earlier messages of the two ranks -> who is blamed for a tag that differs
    ({}, (0, 1), "no habit: both"),
    ({0: [message(0, "recv", 1, index=1)]}, (0, 1), "this rank kept its habit, and nothing is known of the other"),
    ({0: [message(0, "recv", 1, tag=7, index=1)]}, (0,), "this rank used to have the other's tag"),
    ({1: [message(1, "send", 0, index=1)]}, (1,), "the other one used to have this one's"),
    ({1: [message(1, "send", 0, index=1, line=2)]}, (0, 1), "at another line"),
    ({1: [message(1, "send", 2, index=1)]}, (0, 1), "to another rank"),
    ({1: [message(1, "send", 0, index=11)]}, (0, 1), "later"),
    ({1: [message(1, "send", 0, index=10)]}, (0, 1), "the message itself"),
    ({1: [message(1, "send", 0, group=TP, tag=7, index=1)]}, (1,), "on another group"),
    ({1: [message(1, "send", 0, tag=7, index=1)]}, (0, 1), "it kept its habit"),
    ({0: [message(0, "recv", 1, tag=7, index=1)], 1: [message(1, "send", 0, index=1)]}, (0, 1), "both broke theirs"),
]


@pytest.mark.parametrize(("past", "culprits", "reason"), HABITS)
def test_who_broke_a_habit(past: dict[int, list[CallRecord]], culprits: tuple[int, ...], reason: str) -> None:
    """Of two ends that differ in their tags."""
    miss = rules.near_miss(index_of([message(1, "send", 0, tag=7)], past), RECV)
    assert miss is not None
    assert miss.culprits == culprits, reason


MET = [
    ([message(1, "send", 2, index=1, done=True)], None, "as always"),
    ([message(1, "send", 2, index=1)], "receiver", "an earlier one that has not arrived either"),
    ([message(1, "send", 2, index=1, error="x")], "receiver", "an earlier one that failed"),
    ([message(1, "send", 0, index=1, done=True)], "receiver", "an earlier one to this rank"),
    ([message(1, "send", 2, index=1, line=2, done=True)], "receiver", "at another line"),
    ([message(1, "send", 2, index=1, group=TP, done=True)], "receiver", "on another group"),
    ([message(1, "recv", 2, index=1, done=True)], "receiver", "a receive"),
]


@pytest.mark.parametrize(("past", "differs", "reason"), MET)
def test_a_message_that_is_sent_as_always_goes_to_the_right_rank(
    past: list[CallRecord], differs: str | None, reason: str
) -> None:
    """If an earlier one of that line to that rank arrived."""
    miss = rules.near_miss(index_of([message(1, "send", 2)], {1: past}), RECV)
    assert (miss and miss.differs) == differs, reason


SENDERS = [
    ([], None, "nothing is known of the receiver's line"),
    ([message(0, "recv", 2, index=1)], "sender", "the receiver used to expect another rank"),
    ([message(0, "recv", 1, index=1)], None, "and not this one"),
    ([message(0, "recv", 2, index=1), message(0, "recv", 1, index=2)], None, "or this one as well"),
]


@pytest.mark.parametrize(("past", "differs", "reason"), SENDERS)
def test_a_receiver_that_used_to_expect_another_rank(past: list[CallRecord], differs: str | None, reason: str) -> None:
    """Where the send is as always."""
    always = [message(2, "send", 0, index=1, done=True)]
    miss = rules.near_miss(index_of([message(2, "send", 0)], {0: past, 2: always}), RECV)
    assert (miss and miss.differs) == differs, reason


def sent(counts: Sequence[int]) -> dict[int, list[CallRecord]]:
    """So many sends of ranks 1, 2, ... to rank 0."""
    return {rank: [message(rank, "send", 0)] * count for rank, count in enumerate(counts, 1)}


FEWEST = [
    ((2, 3), ((1,), 2, 3), "one of two sent fewer"),
    ((3, 3), None, "all sent as many"),
    ((0, 0), None, "nobody sent any"),
    ((1, 2, 2, 2), ((1,), 1, 2), "one of four"),
    ((1, 2, 1, 2), ((1, 3), 1, 2), "half of them"),
    ((1, 1, 1, 2), None, "most of them"),
    ((1, 2, 3, 3), None, "two by different numbers"),
]


@pytest.mark.parametrize(("counts", "fewest", "reason"), FEWEST)
def test_who_sent_the_fewest_messages(counts: Sequence[int], fewest: Any, reason: str) -> None:
    """To a receive from any rank: at most half of the ranks, alike."""
    group = Group("0", "dp", tuple(range(len(counts) + 1)))
    assert rules._fewest(index_of([], sent(counts)), message(0, "recv", None, group=group)) == fewest, reason


def test_other_messages_do_not_count() -> None:
    """To another rank, with another tag, or received."""
    past = sent((2, 2))
    past[1] = [message(1, "send", 2), message(1, "send", 0, tag=7), message(1, "recv", 0), message(1, "send", 0)]
    assert rules._fewest(index_of([], past), message(0, "recv", None)) == ((1,), 1, 2)
