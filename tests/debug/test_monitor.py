"""The monitor's own knowledge of who has started the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distsim.debug.levels import Settings
from distsim.debug.monitor import Monitor
from distsim.debug.procfs import own_process

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
