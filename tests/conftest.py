"""What every test run of the house needs: no GPU, few threads, nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

# Before anybody imports torch: ranks share two cores, and a test means the same with and without a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)  # a shell left inside somebody's job must not reach the tests

# The suite starts some hundred interpreters: without bytecode on file each compiles all of distsim, nearly a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What a shell starts with & ignores Ctrl-C, and so would every process that a test sends it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Helpers of a test folder are imported as `conformance.arms`, by pytest and by the processes it starts.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Whatever a test does to the environment ends with it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
