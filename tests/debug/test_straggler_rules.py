"""Who keeps others waiting, rule by rule: each in a table of small cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from distsim.debug.diagnosis import stragglers as rules
from distsim.debug.diagnosis.stragglers import SIMULATED, Demand, stragglers
from distsim.debug.records import CallRecord, Group, State
from tests.debug.test_stragglers import job, late

PAIR, FOUR = Group("0", "dp", (0, 1)), Group("0", "dp", (0, 1, 2, 3))
ONE_S = Demand(meetings=1, lost_s=1.0)


def met(group: Group, *times: tuple[float, float]) -> dict[int, CallRecord]:
    """One collective: when each rank came and left."""
    return {
        rank: CallRecord(rank, group, 0, "all_reduce", issued_s=came, completed_s=left, state=State.COMPLETED)
        for rank, (came, left) in zip(group.ranks, times, strict=True)
    }


PACES = [
    # of later meetings how much longer one rank was inside than the other -> whether nobody can be named
    ((0.0, 0.0), 10.0, True, "both as long"),
    ((1.0, 1.0), 10.0, False, "2 of 10 seconds are a fifth"),
    ((1.0, 0.9), 10.0, True, "less than a fifth"),
    ((0.5, 0.4), 1.0, True, "half of the time, and less than the second that is demanded"),
    ((-1.0, 1.0), 10.0, False, "in turn is as much"),
    ((), 10.0, True, "the first meeting does not count"),
]


@pytest.mark.parametrize(("longer", "span_s", "keeps", "reason"), PACES)
def test_ranks_that_keep_pace(longer: Sequence[float], span_s: float, keeps: bool, reason: str) -> None:
    """By the longest and the shortest call of each meeting."""
    full = [met(PAIR, (0.0, 9.0), (8.0, 9.0))]
    full += [met(PAIR, (5.0 - max(by, 0.0), 5.0), (5.0 + min(by, 0.0), 5.0)) for by in longer]
    full.append(met(PAIR, (span_s, span_s), (span_s, span_s)))
    assert rules._keep_pace(PAIR, full, ONE_S) is keeps, reason


def test_no_time_is_no_lateness() -> None:
    """Meetings at one moment."""
    assert rules._keep_pace(PAIR, [met(PAIR, (0.0, 0.0), (0.0, 0.0))] * 2, replace(ONE_S, lost_s=0.0)) is True


@pytest.mark.parametrize(
    ("ordered", "own", "other"),
    [
        ((1.0, 2.0), 1.0, 2.0),
        ((1.0, 2.0), 2.0, 1.0),
        ((1.0, 2.0, 3.0), 1.0, 2.0),
        ((1.0, 2.0, 3.0), 2.0, 1.0),
        ((1.0, 2.0, 3.0), 3.0, 1.0),
        ((1.0, 2.0, 3.0, 4.0), 1.0, 3.0),
        ((1.0, 2.0, 3.0, 4.0), 2.0, 3.0),
        ((1.0, 2.0, 3.0, 4.0), 4.0, 2.0),
        ((1.0, 1.0, 1.0), 1.0, 1.0),
    ],
)
def test_the_median_of_the_others(ordered: Sequence[float], own: float, other: float) -> None:
    """The lower one of two."""
    assert rules._others(ordered, own) == other


AWAY = [
    # calls as (begin, end) -> seconds inside them until a moment
    ([(1.0, 2.0)], 0.5, 0.0, "before the first"),
    ([(1.0, 2.0)], 1.0, 0.0, "as it begins"),
    ([(1.0, 2.0)], 1.5, 0.5, "in it"),
    ([(1.0, 2.0)], 9.0, 1.0, "after it"),
    ([(1.0, 2.0), (3.0, 5.0)], 4.0, 2.0, "in the second"),
    ([(3.0, 5.0), (1.0, 2.0)], 4.0, 2.0, "in any order"),
    ([(1.0, 4.0), (2.0, 3.0)], 9.0, 3.0, "one in another counts once"),
    ([(1.0, 3.0), (2.0, 5.0)], 9.0, 4.0, "two that overlap once"),
    ([(1.0, 3.0), (3.0, 5.0)], 4.0, 3.0, "one after the other"),
    ([], 4.0, 0.0, "none"),
]


@pytest.mark.parametrize(("spans", "moment_s", "inside_s", "reason"), AWAY)
def test_time_inside_calls(spans: Sequence[tuple[float, float]], moment_s: float, inside_s: float, reason: str) -> None:
    """Up to a moment."""
    calls = [CallRecord(0, PAIR, 0, "all_reduce", issued_s=begin, completed_s=end) for begin, end in spans]
    open_call = CallRecord(0, PAIR, 0, "all_reduce", issued_s=0.0)
    assert rules._Away([*calls, open_call]).until(moment_s) == pytest.approx(inside_s), reason


NAMED = stragglers(job(late(1)), SIMULATED)[0]
JUST_MET: list[tuple[str, float | int, float | int]] = [
    # a threshold, its largest value that still names rank 1, and a value that does not
    ("lost_s", NAMED.lost_s, NAMED.lost_s + 1e-9),
    ("meetings", NAMED.meetings + 1, NAMED.meetings + 2),
]


@pytest.mark.parametrize(("name", "met", "missed"), JUST_MET, ids=[row[0] for row in JUST_MET])
def test_a_threshold_that_is_just_met(name: str, met: float, missed: float) -> None:
    """A rank that is as late as demanded is named; one that is a little less so is not."""
    values = [met, missed]
    found = [stragglers(job(late(1)), replace(SIMULATED, **{name: value})) for value in values]
    assert [[one.rank for one in ranks] for ranks in found] == [[1], []]
