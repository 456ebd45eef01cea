"""The comparer: ranks that agree pass in bulk, each new pattern of disagreement is looked at once."""

from __future__ import annotations

import numpy as np

from distsim.debug.matching.comparer import Comparer, GroupKey

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
