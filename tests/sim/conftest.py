"""`script(text)`: simulate a program written into a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim.running import Scripts


@pytest.fixture
def script(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)
