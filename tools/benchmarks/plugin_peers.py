"""A test on 4 ranks under pytest: our marker beside torch's MultiThreadedTestCase, the same body.

    python -m tools.benchmarks.plugin_peers [REPEATS]

Peer: torch's threads. Aim: at most 2 times their CPU time.

Each arm is a pytest process of its own with TESTS tests; in a repeat the arms take TURNS turns, and the least time of
each counts, for whoever else uses the machine only adds to it. Printed is the CPU time of one test, all of pytest's own
work on it included, from the end of the first test (which imports what all need) to the end of the last; and the ratio
of each repeat, also with the time of an empty test taken off both. torch's threads
keep no clock and no record, a rank of theirs shares modules, generators and environment with all others, and a test
that hangs there stands for its whole time limit. It exits with 1 where the median ratio is over LIMIT.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.benchmarks.arguments import Arguments, count

TESTS, REPEATS, TURNS, LIMIT = 100, 3, 3, 2.0

BODY = """\
import torch
import torch.distributed as dist


def body(rank):
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0] * 4
"""
OURS = f"""\
import pytest
from body import body

class TestOurs:
    pass

def made(number):
    @pytest.mark.ranks(4)
    def test(self, rank):
        body(rank)
    return test

for number in range({TESTS}):
    setattr(TestOurs, f"test_{{number}}", made(number))
"""
THREADS = f"""\
import importlib.util
import sys
import types
import unittest

if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = types.ModuleType("expecttest")  # torch's base names it; nothing here uses it
    sys.modules["expecttest"].TestCase = unittest.TestCase
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from body import body

class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

def made(number):
    def test(self):
        body(self.rank)
    return test

for number in range({TESTS}):
    setattr(TestThreads, f"test_{{number}}", made(number))
del MultiThreadedTestCase
"""
EMPTY = f"""\
import torch

class TestEmpty:
    pass

for number in range({TESTS}):
    setattr(TestEmpty, f"test_{{number}}", lambda self: None)
"""
CONFTEST = """\
import time

ends = []

def pytest_runtest_logfinish():
    ends.append(time.process_time())

def pytest_sessionfinish():
    print(f"\\nCPU {(ends[-1] - ends[0]) / (len(ends) - 1)}")
"""
ARMS = {"distsim": OURS, "MultiThreadedTestCase": THREADS, "an empty test": EMPTY}


def measure(arm: str, folder: Path) -> float:
    """CPU seconds of one test."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-s"]
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTEST_ADDOPTS="")
    done = subprocess.run(
        [*command, f"test_{list(ARMS).index(arm)}.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode or f"{TESTS} passed" not in done.stdout:
        sys.exit(f"{arm}: {done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return float(done.stdout.partition("\nCPU ")[2].split()[0])


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("repeats", nargs="?", metavar="REPEATS", type=count, default=REPEATS)
    repeats = parser.parse_args().repeats
    seen: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratios, net = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "body.py").write_text(BODY)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        for number, text in enumerate(ARMS.values()):
            (folder / f"test_{number}.py").write_text(text)
        for _ in range(repeats):
            turns = [{arm: measure(arm, folder) for arm in ARMS} for _ in range(TURNS)]
            for arm in ARMS:
                seen[arm].append(min(turn[arm] for turn in turns))
            ours, threads, empty = (seen[arm][-1] for arm in ARMS)
            ratios.append(ours / threads)
            net.append((ours - empty) / (threads - empty))
    for arm, spent in seen.items():
        print(f"  {arm:<22} {statistics.median(spent) * 1e3:6.2f} ms of CPU a test ({TESTS} tests, 4 ranks)")
    print(f"  ratio {' '.join(f'{r:.2f}' for r in ratios)}; without an empty test {' '.join(f'{r:.2f}' for r in net)}")
    return int(statistics.median(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
