"""Messages compared as they arrive: pairs by number, never a wrong one, and told while both ends go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from jobs import Zygote

from distsim.debug.diagnosis.point_to_point import with_messages
from distsim.debug.matching import comparer as compare_p2p
from distsim.debug.matching.comparer import PAIR, Comparer, GroupKey, Suspicion
from distsim.debug.records import CallRecord, Evidence, Group, Phase, RankState, Site, State
from distsim.debug.records.kinds import Kind
from distsim.debug.records.signature import Signature
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RECORD, Records
from tests.cases.corpus import Case

GROUP: GroupKey = ("0", (0, 1, 2), 0)
WORLD = Group("0", "default_pg", (0, 1, 2))
ANY = -1


class Rank:
    """Writes the records of one rank, numbered as the recorder numbers them."""

    def __init__(self, comparer: Comparer, rank: int) -> None:
        self.comparer = comparer
        self.rank = rank
        self.commit = 0
        self.ordinals: dict[tuple[str, int, int], int] = {}
        self.records: list[tuple[int, int, int, int, int, int, int]] = []

    def send(self, peer: int, size: int, tag: int = 0, failed: bool = False) -> Rank:
        return self._call("send", peer, peer, size, tag, failed)

    def recv(self, peer: int, size: int, tag: int = 0, told: int | None = None, failed: bool = False) -> Rank:
        """*told* is what the record says of the sender when it is read: that of a receive from ANY may be known."""
        return self._call("recv", peer, peer if told is None else told, size, tag, failed)

    def _call(self, op: str, peer: int, told: int, size: int, tag: int, failed: bool) -> Rank:
        self.commit += 1
        ordinal = self.ordinals[op, peer, tag] = self.ordinals.get((op, peer, tag), 0) + 1
        print_ = size * 4 + 2 * (op == "send")
        state = rings.FAILED if failed else rings.COMPLETED
        self.records.append((self.commit, rings.P2P_CALL | state, self.commit, print_, told, tag, ordinal))
        return self

    def read(self) -> None:
        """The monitor comes by."""
        records = self.take()
        self.comparer.feed(self.rank, records, lambda _: GROUP, signature)

    def overrun(self) -> None:
        """What was not read by now is overwritten."""
        self.records.clear()

    def take(self) -> Records:
        records = np.zeros(len(self.records), RECORD)
        for place, values in enumerate(self.records):
            for name, value in zip(
                ("commit", "flags", "seq", "fingerprint", "peer", "tag", "ordinal"), values, strict=True
            ):
                records[name][place] = value
        self.records.clear()
        return records


def signature(_position: int, print_: int) -> Signature:
    """Of *size* bytes each."""
    return Signature("send" if print_ & 2 else "recv", nbytes=print_ // 4, dtypes=("uint8",))


def ranks(count: int = 2) -> tuple[Comparer, list[Rank]]:
    comparer = Comparer()
    return comparer, [Rank(comparer, rank) for rank in range(count)]


def pairs(found: list[Suspicion]) -> list[tuple[tuple[int, ...], int, int]]:
    """(sender, receiver), index of the send, of the receive."""
    assert all(s.key[0] == PAIR and not s.lines_only for s in found)
    return [(s.key[1], s.key[2], s.seq) for s in found]


def test_messages_that_fit_are_silent() -> None:
    """Every send meets its receive, whoever is read first, whatever the tag."""
    comparer, (a, b) = ranks()
    a.send(1, 8).send(1, 16, tag=3).recv(1, 8).read()
    assert comparer.check() == []
    b.recv(0, 16, tag=3).recv(0, 8).send(0, 8).read()
    assert comparer.check() == []
    assert comparer.messages.compared == 3


def test_a_message_that_does_not_fit_is_suspected() -> None:
    """The records of both ends are named; the same again is looked at more and more seldom."""
    comparer, (a, b) = ranks()
    for _ in range(8):
        a.send(1, 8).send(1, 12).read()
        b.recv(0, 8).recv(0, 8).read()
    assert pairs(comparer.check()) == [((0, 1), n, n) for n in (1, 3, 7, 15)]
    assert comparer.check() == []


def test_a_dtype_of_the_same_size_is_suspected() -> None:
    """Equal bytes of another dtype are no equal message."""
    comparer, (a, b) = ranks()
    says = {"send": "int32", "recv": "float32"}

    def of(position: int, print_: int) -> Signature:
        said = signature(position, print_)
        return Signature(said.op, nbytes=said.nbytes, dtypes=(says[said.op],))

    for end in (a.send(1, 8), b.recv(0, 8)):
        comparer.feed(end.rank, end.take(), lambda _: GROUP, of)
    assert pairs(comparer.check()) == [((0, 1), 0, 0)]


def test_sends_that_were_overwritten_match_nothing() -> None:
    """A sender's lost records leave their receives alone, and what comes later still finds its own number."""
    comparer, (a, b) = ranks()
    a.send(1, 8).read()
    a.send(1, 16).send(1, 24).overrun()
    a.send(1, 32).send(1, 40).read()
    for size in (8, 16, 24, 32, 4):
        b.recv(0, size)
    b.read()
    assert pairs(comparer.check()) == [((0, 1), 4, 4)]
    assert comparer.messages.compared == 3


def test_receives_are_left_out_after_some_were_overwritten() -> None:
    """What was lost may have been from any source: then the numbers that follow are not those of one sender."""
    comparer, (a, b, c) = ranks(3)
    b.recv(ANY, 8, told=0).overrun()
    b.recv(0, 16).read()
    b.recv(ANY, 16, tag=1, told=2).read()
    a.send(1, 8).send(1, 16).read()
    c.send(1, 24, tag=1).read()
    assert comparer.check() == []


def test_an_overrun_by_collectives_loses_no_message() -> None:
    """Messages go on being compared when only other calls were overwritten."""
    comparer, (a, b) = ranks()
    b.recv(0, 8).read()
    b.commit += 5000
    b.recv(0, 16)
    records = b.take()
    records["seq"] = 2
    comparer.feed(1, records, lambda _: GROUP, signature)
    a.send(1, 8).send(1, 12).read()
    assert pairs(comparer.check()) == [((0, 1), 1, 5001)]


@pytest.mark.parametrize("known", [True, False])
def test_receives_from_any_source_are_left_out(known: bool) -> None:
    """Whether or not their sender is known by the time they are read, and with them that receiver's tag; not others."""
    comparer, (a, b, c) = ranks(3)
    b.recv(ANY, 8, told=2 if known else ANY).recv(ANY, 16, told=0 if known else ANY).recv(0, 24).recv(0, 4, tag=1)
    b.read()
    a.send(1, 16).send(1, 24).send(1, 8, tag=1).read()
    c.send(1, 8).read()
    assert pairs(comparer.check()) == [((0, 1), 2, 3)]
    a.send(1, 32).read()
    b.recv(0, 32).read()
    assert comparer.check() == []


def test_a_number_that_comes_twice_is_left_out() -> None:
    """One from any source, then one from the rank that had sent it: both are number 1."""
    comparer, (a, b) = ranks()
    a.send(1, 8).send(1, 16).read()
    b.recv(ANY, 8, told=0).recv(0, 16).read()
    assert comparer.check() == []
    assert comparer.messages.compared == 1


def test_what_failed_shifts_nobody() -> None:
    """A send that raised has a number but was no message: those behind it are left out."""
    comparer, (a, b) = ranks()
    a.send(1, 8, failed=True).send(1, 16).send(1, 24)
    records = a.take()
    comparer.feed(0, records, lambda _: GROUP, signature)
    b.recv(0, 16).recv(0, 24).read()
    comparer.messages.note_failed(lambda _: 0, records[:1], lambda _: GROUP, signature)
    assert comparer.check() == []


@pytest.mark.parametrize(
    ("failed_op", "tag", "compared"), [("send", 0, 0), ("recv", 0, 0), ("send", 1, 1), ("recv", 1, 1)]
)
def test_a_failed_end_leaves_out_its_receiver_and_tag(failed_op: str, tag: int, compared: int) -> None:
    """Whichever end failed, whatever group has no key; messages with another tag are compared."""
    comparer, (a, b) = ranks()
    end = a.send(1, 8, tag, failed=True) if failed_op == "send" else b.recv(0, 8, tag, failed=True)
    failed = end.take()
    failed["group"] = 7
    comparer.messages.note_failed(lambda _: end.rank, failed, lambda _: None, signature)
    comparer.messages.note_failed(lambda _: end.rank, failed, lambda group: GROUP if group == 7 else None, signature)
    end.ordinals.clear()
    end.commit = 0
    a.send(1, 8).read()
    b.recv(0, 12).read()
    assert pairs(comparer.check()) == [((0, 1), 0, 0)] * compared


@pytest.mark.parametrize("lost", [0, 1])
def test_records_that_follow_each_other_have_no_gap(lost: int) -> None:
    """From the first one on, and from one read to the next; a gap stays one."""
    comparer, (a, b) = ranks()
    a.send(1, 8).read()
    a.commit += lost
    a.send(1, 8).send(1, 8).read()
    a.send(1, 8).read()
    assert comparer.messages._gaps == ({0} if lost else set())
    b.commit += lost
    b.recv(0, 8).read()
    assert comparer.messages._gaps == ({0, 1} if lost else set())


def test_groups_are_told_apart() -> None:
    """By name, generation and members: messages of one are not those of another, nor of a group without a key."""
    keys = [("0", (0, 1, 2), 0), ("1", (0, 1, 2), 0), ("0", (0, 1, 2), 1), ("0", (0, 1), 0), None]
    comparer, _ = ranks()
    for number, key in enumerate(keys):
        for rank in (0, 1):
            end = Rank(comparer, rank)
            end.send(1, 8) if rank == 0 else end.recv(0, 8 + 4 * number)
            comparer.feed((rank, number), end.take(), lambda _, key=key: key, signature, rank_in=lambda _, r=rank: r)
    assert len({s.key for s in comparer.check()}) == 1
    assert comparer.messages.compared == 4


def test_rows_that_are_not_taken_are_compared_here() -> None:
    """A route may refuse them; calls that are no messages are none of a stream."""
    comparer, (a, b) = ranks()
    routed: list[tuple[int, list[list[int]]]] = []

    def route(rank: int, key: GroupKey, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> bool:
        routed.append((rank, rows.tolist()))
        return False

    for end in (a.send(1, 8).send(1, 8), b.recv(0, 8).recv(0, 12)):
        records = end.take()
        comparer.messages.feed(end.rank, records, lambda _: GROUP, signature, route, lambda _, r=end.rank: r)
        records["flags"] = 0
        comparer.messages.feed(end.rank, records, lambda _: GROUP, signature, route, lambda _, r=end.rank: r)
    comparer.messages.feed(0, records[:0], lambda _: GROUP, signature, route, lambda _: 0)
    assert [(rank, [row[0] for row in rows]) for rank, rows in routed] == [(0, [3, 5]), (1, [2, 4])]
    assert pairs(comparer.check()) == [((0, 1), 1, 1)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a side that runs far ahead the oldest messages are forgotten, of many streams those not used for longest."""
    monkeypatch.setattr(compare_p2p, "MOST_WAITING", 100)
    monkeypatch.setattr(compare_p2p, "MOST_KNOWN", 100)
    comparer, (a, b) = ranks()
    for _ in range(1000):
        a.send(1, 8).read()
    for n in range(1000):
        b.recv(0, 8 if n < 990 else 12).read()
    assert pairs(comparer.check())[0] == ((0, 1), 990, 990)
    assert comparer.messages.compared <= 100
    for n in range(1000):
        a.send(1, 8, tag=1000 + n).send(1, 8, tag=5000 + n).send(1, 8 + n).read()
        b.recv(0, 8, tag=1000 + n).recv(ANY, 8, tag=9000 + n).recv(0, 8 + n).read()
    messages = comparer.messages
    tables = (messages._waiting, messages._forgotten, messages._received, messages._loose, messages._patterns)
    assert max(map(len, tables)) <= 101
    assert len(messages._ends) <= 101


def test_rows_of_another_host_are_compared() -> None:
    """What a follower routes away meets the leader's own end."""
    follower, (a, _) = ranks()
    leader, (_, b) = ranks()

    def route(rank: int, key: GroupKey, rows: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> bool:
        leader.feed_rows(rank, key, rows)
        return True

    follower.feed(0, a.send(1, 8).send(1, 12).take(), lambda _: GROUP, signature, route)
    b.recv(0, 8).recv(0, 8).read()
    assert pairs(leader.check()) == [((0, 1), 1, 1)]
    assert follower.check() == []


def call(rank: int, op: str, index: int, count: int, state: State = State.COMPLETED) -> CallRecord:
    shapes = {"input_shapes" if op == "send" else "output_shapes": ((count,),)}
    site = Site("train.py", 10 + rank, "step")
    other = {"peer": 1 - rank, "tag": 0, "dtypes": ("float32",), "nbytes": 4 * count, "site": site}
    return CallRecord(rank, WORLD, index + 1, op, index=index, state=state, **shapes, **other)  # type: ignore[arg-type]


def evidence(*calls: CallRecord) -> Evidence:
    states = {rank: RankState(rank, Phase.RUNNING) for rank in range(3)}
    return Evidence(3, states, {rank: [c for c in calls if c.rank == rank] for rank in range(3)}, now_s=1.0)


FOCUS = {(PAIR, (0, 1), 5001): 7001}


def test_a_suspicion_is_judged_whatever_is_overwritten() -> None:
    """Messages of ranks that made thousands of calls before: a size that differs is told once, with the culprit."""
    seen = evidence(
        call(0, "send", 5000, 8), call(0, "send", 5001, 4), call(1, "recv", 7000, 8), call(1, "recv", 7001, 8)
    )
    found = with_messages([], seen, FOCUS)
    assert [(d.kind, d.culprits, d.pair, d.exit_code) for d in found] == [(Kind.P2P_SIZE_MISMATCH, (0,), (0, 1), 4)]
    assert with_messages(found, seen, FOCUS) == found


@pytest.mark.parametrize(
    "calls",
    [
        (call(0, "send", 5001, 8), call(1, "recv", 7001, 8)),
        (call(0, "send", 5001, 4), call(1, "recv", 7000, 8)),
        (call(0, "send", 5001, 4, State.FAILED), call(1, "recv", 7001, 8)),
    ],
    ids=["they fit", "overwritten", "failed"],
)
def test_a_suspicion_alone_is_no_alarm(calls: tuple[CallRecord, ...]) -> None:
    """What the evidence does not show is not told."""
    assert with_messages([], evidence(*calls), FOCUS) == []


@pytest.mark.slow
def test_a_past_mismatch_is_told_while_both_go_on(zygote: Zygote, folder: Path) -> None:
    """The job is ended before it comes to its end by itself, by a mismatch that nobody was ever blocked by."""
    result = zygote.run(Case.named("messages/p2p_size_in_passing").path, 2, directory=folder)
    assert [d.kind for d in result.diagnoses] == [Kind.P2P_SIZE_MISMATCH], result.report
    assert all("came through" not in out for out in result.outputs.values()), result.outputs
    assert all(result.codes.values())
