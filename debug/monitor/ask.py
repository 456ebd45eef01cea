"""Having a monitor look at once: before a launcher ends the peers of a failed rank, and all evidence with them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from distsim.debug.rings.private import create_private

__all__ = ["VERDICT_WAIT_S", "ask"]

VERDICT_WAIT_S = 4.0
"""How long a failed rank's peers are spared for the monitor's last look."""


def ask(directory: Path, job: str = "") -> None:
    """Wait until the monitor over *directory* has looked, where there is one."""
    if not (directory / f"monitor.{job}.lock").exists():
        return
    number = sum(1 for _ in directory.glob("ask.*"))
    os.close(create_private(directory / f"ask.{number}"))
    answer = directory / f"answer.{number}"
    deadline = time.monotonic() + VERDICT_WAIT_S
    while not answer.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
