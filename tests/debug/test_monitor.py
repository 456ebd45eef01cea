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


@pytest.mark.parametrize(("level", "kept"), [("record", 0), ("check", 1)])
def test_calls_that_nobody_compares_are_forgotten(tmp_path: Path, level: str, kept: int) -> None:
    """At level record what a rank has called is not held until the others call it: that would be the whole job."""
    monitor = Monitor(tmp_path, Settings.read({"level": level}), None)
    monitor.host.comparer.feed_rows(0, ("0", (0, 1), 0), np.ones((3, 3), dtype=np.uint64))
    monitor._compare()
    assert len(list(monitor.host.comparer.lanes())) == kept
