"""A job that is watched from outside: what is said when, by positions of its ranks at each look."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distsim.cli.dispatch import main
from distsim.debug.attach import Doing, JobWatch, Judged, LookCounts, Position
from distsim.debug.records import Evidence, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from distsim.debug.report.news import Events

SITE = Site("train.py", 7, "main")


def waits(rank: int) -> Position:
    return Position(rank, 100 + rank, Doing.CALL, "all_reduce", SITE, moved=True)


def works(rank: int) -> Position:
    return Position(rank, 100 + rank, Doing.RUNS, site=SITE, busy=True)


def still(positions: Sequence[Position]) -> list[Position]:
    return [replace(one, moved=False, busy=False) for one in positions]


class Watched:
    """A watch whose lines and examinations are kept."""

    def __init__(self, folder: Path, diagnoses: Sequence[Diagnosis] = ()) -> None:
        self.lines: list[str] = []
        self.shown: list[Judged] = []
        self.examined = 0
        self.diagnoses = list(diagnoses)
        self.path = folder / "events.jsonl"
        self.job = JobWatch(self.lines.append, self.examine, self.shown.append, Events(str(self.path), ""))

    def examine(self) -> Judged:
        self.examined += 1
        return Judged(self.diagnoses, Evidence(3, {}))

    @property
    def events(self) -> list[str]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line)["event"] for line in lines]


HANG = Diagnosis(Kind.MISSING_RANK, (1,), (0, 2), explanation="Rank 1 is elsewhere.", suggestion="Look there.")


def test_a_hang_is_reported_once_and_withdrawn(tmp_path: Path) -> None:
    """When nothing has moved between two looks; a job that goes on is not examined."""
    watched = Watched(tmp_path, [HANG])
    moving, hung = [waits(0), works(1), waits(2)], still([waits(0), works(1), waits(2)])
    for looked in (hung, moving, hung, hung, moving, moving):
        watched.job.take(looked)
    assert (watched.examined, len(watched.shown)) == (2, 1)
    assert watched.lines == ["the ranks move again: the diagnosis is withdrawn"]
    assert watched.events == ["verdict", "withdrawn"]
    assert not watched.job.hangs


def test_what_becomes_of_ranks(tmp_path: Path) -> None:
    """One line for each change, of several ranks together."""
    watched = Watched(tmp_path)
    stopped = replace(waits(0), doing=Doing.STOPPED)
    every = [waits(0), works(1), waits(2)]
    for positions, ended in ((every, []), ([stopped, *every[1:]], []), (every, []), ([waits(0)], [1, 2]), ([], [0])):
        watched.job.take(positions, ended)
    assert watched.lines == [
        "rank 0 is stopped (SIGSTOP)",
        "rank 0 goes on",
        "ranks 1,2 have ended",
        "rank 0 has ended",
    ]


def counts(looks: int, shares: Sequence[float], seed: int = 0) -> LookCounts:
    draw = random.Random(seed)
    counted = LookCounts(range(len(shares)))
    for _ in range(looks):
        counted.add([works(rank) if draw.random() < share else waits(rank) for rank, share in enumerate(shares)])
    return counted


@pytest.mark.parametrize(
    ("looks", "shares", "slow"),
    [
        (900, (0.5, 0.5, 0.6, 0.5), [2]),
        (100, (0.5, 0.5, 0.9, 0.5), [2]),
        (30, (0.5, 0.5, 1.0, 0.5), []),  # too few looks
        (900, (0.5, 0.5, 0.53, 0.5), []),
        (900, (0.5, 0.8, 0.8, 0.5), []),  # half of the ranks
    ],
)
def test_who_is_outside_of_waits_more_often(looks: int, shares: Sequence[float], slow: list[int]) -> None:
    """By four standard errors, in each third of the looks."""
    assert [rank for rank, _, _ in counts(looks, shares).slow()] == slow


def test_equal_ranks_are_not_slow() -> None:
    """In forty jobs."""
    assert not any(counts(400, (0.6,) * 8, seed).slow() for seed in range(40))


def test_the_announced_looks_suffice() -> None:
    """For a rank that works 10% longer, in five jobs of six."""
    announced = counts(50, (0.5,) * 4).needed()
    assert 400 <= announced <= 1200
    named = [[rank for rank, _, _ in counts(announced, (0.5, 0.5, 0.6, 0.5), seed).slow()] for seed in range(20)]
    assert 14 <= named.count([2]) == 20 - named.count([])


def test_a_slow_rank_is_one_line(tmp_path: Path) -> None:
    """When it is seen for the first time."""
    watched, draw = Watched(tmp_path), random.Random(1)
    for _ in range(200):
        watched.job.take([works(r) if draw.random() < (0.9 if r == 2 else 0.4) else waits(r) for r in range(4)])
    assert len(watched.lines) == 1
    assert watched.lines[0].startswith("rank 2 looks slow: it is outside of waits in ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--watch", "--hosts", "/nowhere"], "--watch: it watches the ranks of this host"),
        (["--events", "-"], "--events: expected --watch"),
        (["--watch", "--every", "x"], "--every"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit together."""
    assert main(["attach", *words]) == 2
    assert line in capsys.readouterr().err
