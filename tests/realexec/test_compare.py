"""The comparer: ranks that agree pass in bulk, each new pattern of disagreement is looked at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.debug.matching import comparer as compare
from distsim.debug.matching.comparer import (
    PAIR,
    STREAM,
    Comparer,
    GroupKey,
    Suspicion,
    Suspicions,
    world_of,
)
from distsim.debug.rings import layout as rings
from distsim.debug.rings.reader import RECORD, Records

GROUP: GroupKey = ("0", (0, 1, 2), 0)


def rows(*calls: tuple[int, int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """(seq, fingerprint, line) rows; even fingerprints need no look at equal calls."""
    return np.array(calls, dtype=np.uint64)


def feed(comparer: Comparer, *per_rank: list[tuple[int, int, int]]) -> None:
    for rank, calls in enumerate(per_rank):
        if calls:
            comparer.feed_rows(rank, GROUP, rows(*calls))


def test_agreement_is_silent() -> None:
    """Equal fingerprints and lines raise no suspicion, however the calls trickle in."""
    comparer = Comparer()
    feed(comparer, [(1, 8, 5), (2, 8, 5)], [(1, 8, 5)], [(1, 8, 5), (2, 8, 5), (3, 8, 5)])
    assert comparer.check() == []
    feed(comparer, [(3, 8, 5)], [(2, 8, 5), (3, 8, 5)], [])
    assert comparer.check() == []
    assert comparer.compared == 3
    assert dict(comparer.progress()) == {GROUP: 3}


def test_a_disagreement_is_suspected_once() -> None:
    """A pattern of fingerprints that differ is reported at its number, and not again when it repeats."""
    comparer = Comparer()
    feed(comparer, [(1, 8, 5), (2, 8, 5)], [(1, 8, 5), (2, 6, 5)], [(1, 8, 5), (2, 8, 5)])
    found = comparer.check()
    assert [(s.seq, s.lines_only) for s in found] == [(2, False)]
    feed(comparer, [(3, 8, 5)], [(3, 6, 5)], [(3, 8, 5)])
    assert comparer.check() == []


def test_lines_that_differ_are_told_apart() -> None:
    """The same call from another line is a weaker suspicion."""
    comparer = Comparer()
    feed(comparer, [(1, 8, 5)], [(1, 8, 6)], [(1, 8, 5)])
    assert [s.lines_only for s in comparer.check()] == [True]


def test_pairwise_calls_are_looked_at_even_when_equal() -> None:
    """An odd fingerprint (all_to_all) says nothing by being equal."""
    comparer = Comparer()
    feed(comparer, [(1, 9, 5)], [(1, 9, 5)], [(1, 9, 5)])
    assert [s.lines_only for s in comparer.check()] == [False]


def test_calls_lost_to_an_overrun_are_skipped() -> None:
    """A rank whose ring was overrun between two looks is compared on what all still have."""
    comparer = Comparer()
    feed(comparer, [(1, 8, 5), (2, 8, 5), (3, 8, 5)], [(2, 8, 5), (3, 8, 5)], [(1, 8, 5), (3, 8, 5)])
    assert comparer.check() == []
    assert dict(comparer.progress()) == {GROUP: 3}


def test_a_missing_member_holds_the_comparison() -> None:
    """Nothing is compared before every member has made the call."""
    comparer = Comparer()
    feed(comparer, [(1, 8, 5)], [(1, 6, 5)], [])
    assert comparer.check() == []
    feed(comparer, [], [], [(1, 8, 5)])
    assert len(comparer.check()) == 1


@pytest.mark.parametrize(
    ("zero", "one", "compared", "odd"),
    [
        ([1, 2, 3], [1, 2, 3], 3, [1, 2, 3]),
        ([1, 2, 3], [1, 2], 2, [1, 2]),
        ([3, 4], [1, 2], 0, []),
        ([2, 3], [1, 2], 1, [2]),
        ([1, 2, 3], [1, 3], 2, [1, 3]),
        ([1, 3], [1, 2, 3], 2, [1, 3]),
        ([2, 1, 3], [1, 2, 3], 2, [2, 3]),
        ([1, 3, 2, 4], [1, 2, 3, 4], 4, [1, 2, 3, 4]),
        ([1, 2, 2, 3], [1, 2, 3], 3, [1, 2, 3]),
        ([1, 3], [1, 3], 2, [1, 3]),
    ],
)
def test_the_numbers_that_all_have_are_compared(zero: list[int], one: list[int], compared: int, odd: list[int]) -> None:
    """From the latest first number to the earliest last one, without those that a ring has lost, in any order."""
    comparer = Comparer()
    for rank, numbers in enumerate((zero, one)):
        comparer.feed_rows(rank, ("0", (0, 1), 0), rows(*((n, 10 * n, rank) for n in numbers)))
    assert [s.seq for s in comparer.check()] == odd
    assert comparer.compared == compared


def test_a_pattern_is_told_again_when_many_others_came() -> None:
    """What is known is bounded."""
    comparer = Comparer()
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "MOST_KNOWN", 2)
        for number, line in enumerate((1, 2, 3, 1, 2, 3, 4, 1), 1):
            feed(comparer, [(number, 8, 0)], [(number, 8, line)], [(number, 8, 0)])
            told += [s.seq for s in comparer.check()]
    assert told == [1, 2, 3, 7, 8]


def test_the_first_rank_is_compared_like_the_others() -> None:
    """Only the rank that differs matters, not its place; a line that differs does not hide another fingerprint."""
    for rank in range(3):
        comparer = Comparer()
        feed(comparer, *([(1, 6 if rank == r else 8, r)] for r in range(3)))
        assert [s.lines_only for s in comparer.check()] == [False]


def of_process(*calls: tuple[int, int, int, int]) -> Records:
    """(group, number, fingerprint, flags) of the calls in a ring."""
    records = np.zeros(len(calls), RECORD)
    for place, (group, seq, print_, flags) in enumerate(calls):
        values = {"commit": place + 1, "group": group, "seq": seq, "fingerprint": print_, "flags": flags}
        for name, value in values.items():
            records[name][place] = value
    return records


def test_collectives_of_a_ring_are_compared_group_by_group() -> None:
    """Without messages and calls that were refused; a group that is not compared has no key. A rank is the process's,
    or that in the world of the group."""
    keys = {5: ("a", (0, 1), 0), 6: ("b", (0, 1), 0)}
    comparer = Comparer()
    for process in (10, 11):
        records = of_process(
            (5, 1, 8, 0),
            (6, 1, 8 + 2 * process, 0),
            (7, 1, process, 0),
            (5, 2, process, rings.REJECTED),
            (5, 2, 8, 0),
        )
        comparer.feed(process, records, keys.get, None, rank_in=lambda key, process=process: process - 10)
    assert [(s.key[0], s.seq) for s in comparer.check()] == [("b", 1)]
    assert comparer.compared == 3
    assert {key[0]: count for key, count in comparer.progress()} == {"a": 2, "b": 1}
    plain = Comparer()
    for process in (0, 1):
        plain.feed(process, of_process((5, 1, 8 + 2 * process, 0)), keys.get, None)
    assert [s.key[0] for s in plain.check()] == ["a"]


@pytest.mark.parametrize("taken", [True, False])
def test_a_route_may_take_calls_away(taken: bool) -> None:
    """They are compared on another host, or else here."""
    comparer, routed = Comparer(), []

    def route(rank: int, key: GroupKey, rows: Any) -> bool:
        routed.append((rank, key, rows.tolist()))
        return taken

    for process in (0, 1):
        comparer.feed(process, of_process((5, 1, 8 + 2 * process, 0)), lambda _: ("a", (0, 1), 0), None, route)
    assert routed == [(rank, ("a", (0, 1), 0), [[1, 8 + 2 * rank, 0]]) for rank in (0, 1)]
    assert len(comparer.check()) == (0 if taken else 1)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("0", ""),
        ("0123456789ab:0", "0123456789ab"),
        ("0123456789a:0", ""),
        ("x0123456789ab:0", ""),
        (f"{STREAM}0123456789ab:0/1/99", "0123456789ab"),
        (f"{STREAM}0/1/99", ""),
        (PAIR, ""),
        (f"{PAIR}0123456789ab", "0123456789ab"),
    ],
)
def test_the_world_of_a_key(name: str, world: str) -> None:
    """Of a group, of a stream and of a pair; none for the launcher's world."""
    assert world_of((name, (0, 1), 0)) == world


B: GroupKey = ("1", (0, 1), 0)


def suspicions(*calls: Suspicion, at_s: float = 100.0) -> Suspicions:
    held = Suspicions()
    held.add(calls, at_s)
    return held


def test_the_earliest_call_of_each_group_is_suspected() -> None:
    """Whichever came first; all are handed over once."""
    of_a = [Suspicion(GROUP, seq, lines_only=False) for seq in (5, 3, 4, 3)]
    of_b = Suspicion(B, 9, lines_only=False)
    held = suspicions(*of_a, of_b)
    assert held.due(100.0) == {GROUP: 3, B: 9}
    assert held.hand_over() == [of_a[1], of_b]
    assert held.hand_over() == []


@pytest.mark.parametrize(
    ("lines_only", "due_s"), [((False,), 100.0), ((True,), 100.25), ((True, False), 100.0), ((False, True), 100.0)]
)
def test_lines_settle_before_they_are_compared(lines_only: tuple[bool, ...], due_s: float) -> None:
    """Other calls are due at once, and with them all of their group."""
    held = suspicions(*(Suspicion(B, 1 + n, one) for n, one in enumerate(lines_only)))
    assert held.due(due_s) == {B: 1}
    assert held.due(due_s - 0.01) == {}


def test_few_suspicions_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones, as later ones follow from them."""
    monkeypatch.setattr(compare, "MOST_HELD", 2)
    keys = [(str(n), (0, 1), 0) for n in range(4)]
    held = suspicions(*(Suspicion(key, 1, lines_only=False) for key in keys))
    assert list(held.due(100.0)) == keys[:2]


def test_a_call_whose_members_are_on_record_is_looked_at_once() -> None:
    """Others come again half a second later, and twenty times in all."""
    held = suspicions(*(Suspicion(key, 1, lines_only=False) for key in (GROUP, B)))
    held.looked_at([GROUP, B], {0, 1}, 100.0)
    assert [list(held.due(at_s)) for at_s in (100.4, 100.5)] == [[], [GROUP]]
    looks = 1
    while held.due(1000.0):
        held.looked_at([GROUP], {0, 1}, 100.0)
        looks += 1
    assert looks == compare.MOST_LOOKS
    elsewhere = suspicions(Suspicion(GROUP, 1, lines_only=False))
    elsewhere.looked_at([GROUP], {7}, 100.0, lambda key: (7,))
    assert elsewhere.due(1000.0) == {}
