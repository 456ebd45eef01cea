"""The monitor's own knowledge of who has started the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.debug.jobdir import ring_path, write_whole
from distsim.debug.levels import Settings
from distsim.debug.monitor import MOST_FAULTS, Monitor, Steady
from distsim.debug.orphans import ORPHANS_S
from distsim.debug.procfs import own_process
from distsim.debug.ring import W_JOINED, RingWriter
from distsim.debug.together import Together

NOBODY = 2**22 + 1
"""Above the kernel's largest process number."""


@pytest.mark.parametrize(
    ("said", "there"),
    [
        (own_process(), True),
        ({**own_process(), "start": own_process()["start"] + 1}, False),
        ({"pid": os.getpid()}, True),
        ({"pid": NOBODY}, False),
        ({}, True),
        (7, False),
    ],
)
def test_a_launcher_is_there_as_long_as_its_process_lives(tmp_path: Path, said: Any, there: bool) -> None:
    """Its start tells it from a later process of the same number; without it, the number has to do."""
    (tmp_path / "launcher.json").write_text(json.dumps(said))
    assert Monitor(tmp_path, Settings.read({}), None)._launched() is there


@pytest.mark.parametrize("level", ["record", "check"])
def test_calls_that_all_have_made_are_forgotten(tmp_path: Path, level: str) -> None:
    """At level record, too, where nobody wants to know of their differences: that would be the whole job."""
    monitor = Monitor(tmp_path, Settings.read({"level": level}), None)
    comparer = monitor.host.comparer
    for rank in (0, 1):
        comparer.feed_rows(rank, ("0", (0, 1), 0), np.array([[1, 2, 3], [2, 2, 3]], dtype=np.uint64))
    monitor._compare()
    assert [done for _, done in comparer.lanes()] == [2]
    assert not any(lane.waiting for lane in comparer._lanes.values())


def rank(folder: Path, number: int = 0) -> RingWriter:
    """The ring of a rank that lives: this process."""
    path = ring_path(folder, number, 0, "job")
    return RingWriter(path, rank=number, world_size=2, local_rank=number, job="job", attempt=0)


def test_a_monitor_that_gives_up_leaves_the_rings_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but faults of its own: the job is not called healthy, and what its ranks have noted stays."""
    monkeypatch.setattr("distsim.debug.monitor.time.sleep", lambda seconds: None)
    monkeypatch.setattr("distsim.debug.monitor.default_directory", lambda job: tmp_path / job)
    folder = tmp_path / "job"  # one that we chose ourselves: a healthy job's goes
    folder.mkdir()
    rank(folder)
    monitor = Steady(folder, Settings.read({}, {}), "job")
    monkeypatch.setattr(monitor.host, "read", lambda together: 1 / 0)
    assert monitor.run() == 0
    said = json.loads((folder / "verdict.json").read_text())
    assert "gave up" in said["inconclusive"]
    assert said["diagnoses"] == []
    assert list(folder.glob("rank*.ring"))
    assert (folder / "monitor.err").read_text().count("ZeroDivisionError: ") == MOST_FAULTS + 1
    assert "goes on without a guard" in capsys.readouterr().err


def test_a_good_turn_ends_a_row_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault now and then over a long job is no reason to give up."""
    monkeypatch.setattr("distsim.debug.monitor.time.sleep", lambda seconds: None)
    monitor = Steady(tmp_path, Settings.read({}, {}), None)
    turns = iter([False, True] * (2 * MOST_FAULTS))

    def find() -> None:
        if not next(turns):
            raise ValueError("a fault")

    monkeypatch.setattr(monitor.host, "find", find)
    assert not any(monitor._turn() for _ in range(4 * MOST_FAULTS))
    assert monitor.faults == 0


@pytest.mark.parametrize("joined", [False, True])
def test_a_killed_launcher_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], joined: bool
) -> None:
    """Said once. Ranks that still wait for each other in its store can never meet: they are ended after a while, where
    a hang is to end the job; ranks that have met run on."""
    write_whole(tmp_path / "launcher.json", json.dumps({**own_process(), "pid": NOBODY}))
    rings = [rank(tmp_path, number) for number in (0, 1)]
    if joined:
        rings[0].header(W_JOINED, 1)
    monitor = Monitor(tmp_path, Settings.read({"on_hang": "abort"}, {}), None)
    clock = [1000.0]
    aborted: list[float] = []

    def abort() -> None:
        monitor.aborted = True
        aborted.append(clock[0])

    monkeypatch.setattr(monitor, "abort", abort)
    monkeypatch.setattr("distsim.debug.orphans.time.monotonic", lambda: clock[0])
    monitor.host.find()
    for _ in range(4):
        monitor._orphans.step(monitor)
        clock[0] += ORPHANS_S * 0.6
    said = capsys.readouterr().err
    assert said.count("the launcher is gone") == 1
    assert ("run on" in said, aborted) == ((True, []) if joined else (False, [1000.0 + 2 * ORPHANS_S * 0.6]))
    (tmp_path / "done.json").write_text("{}")
    assert not monitor._orphans.launcher_died()


@pytest.mark.parametrize("said", ["", "{", "{}", "[]", '{"address": "a", "port": "x", "secret": ""}', '{"port": 3}'])
def test_a_half_written_introduction_is_read_again(tmp_path: Path, said: str) -> None:
    """It is no fault of the monitor's: the next turn finds the whole."""
    (tmp_path / "follow.json").write_text(said)
    together = Together(tmp_path)
    together._choose(Monitor(tmp_path, Settings.read({}, {}), None))
    assert together.follower is None


def test_a_small_file_is_written_whole(tmp_path: Path) -> None:
    """Only its owner may read it; nothing is left beside it; a link in its place is replaced, not followed."""
    (tmp_path / "other").write_text("theirs")
    (tmp_path / "follow.json").symlink_to(tmp_path / "other")
    write_whole(tmp_path / "follow.json", "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["follow.json", "other"]
    assert ((tmp_path / "follow.json").read_text(), (tmp_path / "other").read_text()) == ("ours", "theirs")
    assert (tmp_path / "follow.json").stat().st_mode & 0o777 == 0o600
