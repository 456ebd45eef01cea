"""One zygote for all real jobs of a test session; a folder in memory for each job."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from jobs import Zygote, ring_directory, shared_zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks ranks; killed and started anew if a job got stuck."""
    yield shared_zygote()
    shared_zygote().close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where one job's rings go."""
    with ring_directory() as place:
        yield place
