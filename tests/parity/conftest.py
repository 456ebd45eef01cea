"""Real jobs, as the tests of the guard run them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "realexec"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from jobs import Zygote, shared_zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks."""
    yield shared_zygote()
    shared_zygote().close()
