"""The real arm of the plugin: processes on gloo, forked from pytest's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TEXT = """
import os
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks(2, on=["gloo", "sim"])
def test_both(rank, world, tmp_path):
    t = torch.tensor([float(rank)])
    dist.all_reduce(t)
    assert t.item() == 1 and tmp_path.is_dir()

@pytest.mark.ranks(2, on="gloo")
def test_assert(rank):
    print("line of", rank)
    assert rank == 0

@pytest.mark.ranks(3, on="gloo", timeout_s=30)
def test_hang(rank):
    if rank != 2:
        dist.barrier()

@pytest.mark.ranks(2, on="gloo", timeout_s=30)
def test_killed(rank):
    if rank:
        os.kill(os.getpid(), 9)
    dist.barrier()

@pytest.mark.ranks(2, on="gloo", host_timeout_s=2)
def test_spins(rank):
    while rank:
        pass
    dist.barrier()
"""

LIMITS = """
import sys, time
from datetime import timedelta
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks(2, on="gloo", timeout_s=4)
def test_ours(rank):
    while True:
        dist.barrier()

@pytest.mark.timeout(8, method="signal")
@pytest.mark.ranks(2, on="gloo")
def test_theirs(rank):
    while rank:
        pass
    dist.barrier()

@pytest.mark.ranks(2, on="gloo", init=False)
def test_late(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    if rank == 1:
        time.sleep(30)
    dist.barrier()

@pytest.mark.ranks(2, on="gloo", timeout_s=4)
def test_sleeps(rank):
    if rank == 1:
        time.sleep(1e6)
    dist.barrier()

@pytest.mark.ranks(2, on="gloo")
def test_slow_other(rank):
    if rank == 1:
        raise ValueError("mine")
    time.sleep(30)
"""

FIXTURES = """
import sys, unittest
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks(2, on="gloo")
def test_print(rank, capsys):
    print("hello", rank)
    assert capsys.readouterr().out == f"hello {rank}\\n"

@pytest.mark.ranks(2, on="gloo")
def test_parts(rank, subtests):
    with subtests.test(part=1):
        assert rank == 0

class TestUnit(unittest.TestCase):
    @pytest.mark.ranks(2, on="gloo")
    def test_unit(self):
        with self.subTest(part=2):
            self.assertEqual(dist.get_rank(), 0)

@pytest.mark.xfail(raises=KeyError)
@pytest.mark.ranks(2, on="gloo")
def test_known(rank):
    raise KeyError("known")

@pytest.mark.ranks(2, on="gloo")
def test_prompt(rank):
    breakpoint()
"""


AFTERMATH = """
import pytest

@pytest.mark.ranks(2, on="gloo")
def test_lost(rank):
    if rank == 0:
        where = "third_party/gloo/gloo/transport/tcp/pair.cc:553"
        raise RuntimeError(f"Gloo connectFullMesh failed with [{where}] Connection closed by peer [127.0.0.1]:44166")
    assert rank == 0
"""


CONNECTING = """
import os, select
import pytest, torch.distributed as dist

@pytest.fixture(autouse=True)
def slow_rank_0(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "began")
    real = dist.init_process_group
    def connect(*args, **kwargs):
        real(*args, **kwargs)
        if os.environ["RANK"] == "0":  # as if it were still connecting: does rank 1 go on?
            began = os.open(tmp_path / "began", os.O_RDWR)
            assert not select.select([began], [], [], 0.5)[0]
    monkeypatch.setattr(dist, "init_process_group", connect)

@pytest.mark.ranks(2, on="gloo")
def test_short(rank, tmp_path):
    os.write(os.open(tmp_path / "began", os.O_RDWR), b"!")
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> pytest.LineMatcher:
    """What one pytest says of the three files below: torch and the ranks' monitor are started once."""
    folder = tmp_path_factory.mktemp("real_ranks")
    for name, text in {"it": TEXT, "aftermath": AFTERMATH, "connecting": CONNECTING}.items():
        (folder / f"test_{name}.py").write_text(text.strip())
    command = [sys.executable, "-m", "pytest", "-p", "distsim.pytest_plugin", "-p", "no:cacheprovider", "-v"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stderr
    return pytest.LineMatcher(done.stdout.splitlines())


def results(session: pytest.LineMatcher, file: str) -> list[str]:
    """PASSED or FAILED, of each test of a file in its order."""
    lines = (line.split() for line in session.lines if line.startswith(f"{file}::"))
    return [words[1] for words in lines if len(words) > 1]


@pytest.mark.xdist_group("one session of real ranks")
def test_real_ranks_are_judged_like_simulated_ones(session: pytest.LineMatcher) -> None:
    """Assertions with introspection, hangs and deaths with the report, nothing left running."""
    assert results(session, "test_it.py") == ["PASSED"] * 2 + ["FAILED"] * 4
    session.fnmatch_lines(
        [
            "*rank 1: AssertionError: assert 1 == 0*",
            "*rank 1 of 2 on gloo*",
            "[[]1] line of 1",
            "HANG  missing rank  rank 2  barrier #1*",
            "  test_it.py:19  |  dist.barrier()",
            "HANG  rank killed  rank 1*",
            "HANG  *  rank 1*",
            "FAILED test_it.py::test_hang - line 19: HANG  missing rank*",
        ]
    )


@pytest.mark.xdist_group("one session of real ranks")
def test_who_lost_a_peer_is_told_after_the_peer(session: pytest.LineMatcher) -> None:
    """A rank that fails at once takes the connections of one that is still making them."""
    assert results(session, "test_aftermath.py") == ["FAILED"]
    session.fnmatch_lines(
        [
            "rank 1: AssertionError: assert 1 == 0",
            "note: rank 0 failed after that, of what gloo says: RuntimeError: Gloo*",
        ]
    )
    session.fnmatch_lines(["FAILED test_aftermath.py::test_lost - line *: rank 1: AssertionError*"])
    failure = session.str().partition("___ test_lost")[2].partition("___ test_")[0]
    assert failure
    assert "_____ rank 0 of 2" not in failure


@pytest.mark.xdist_group("one session of real ranks")
def test_nobody_leaves_while_others_connect(session: pytest.LineMatcher) -> None:
    """A body without a collective is over before the next rank has its connections, which it would take along."""
    assert results(session, "test_connecting.py") == ["PASSED"]


@pytest.mark.soak
def test_limits_of_real_ranks_say_where_everybody_is(pytester: pytest.Pytester) -> None:
    """The test's own limit, pytest-timeout's, and torch's: none of them is told as a rank that was killed."""
    pytester.makepyfile(LIMITS)
    result = pytester.runpytest_subprocess("-p", "distsim.pytest_plugin", "-p", "no:cacheprovider", "-v")
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(
        [
            "the test still ran after timeout_s=4 seconds",
            "Rank*barrier*",
            "Timeout (*from pytest-timeout.",
            "Rank 0 waits in barrier*",
            "Rank 1 is at *in test_theirs",
            "missing rank: rank 1 *RuntimeError: *Timed out waiting 2000ms*",
            "HANG  missing rank  rank 1  barrier*",
            "HANG  *  rank 1*",
            "note: a rank may compute for 2 seconds without a call, because of*",
            "rank 1: ValueError: mine",
        ]
    )
    assert "killed" not in result.stdout.str()


@pytest.mark.soak
def test_fixtures_on_real_ranks(pytester: pytest.Pytester) -> None:
    """What a rank prints, its subtests and what it raises reach the test though it is another process."""
    pytester.makepyfile(FIXTURES)
    result = pytester.runpytest_subprocess("-p", "distsim.pytest_plugin", "-p", "no:cacheprovider", "-v")
    result.assert_outcomes(passed=1, failed=3, xfailed=1)
    result.stdout.fnmatch_lines(
        ["E*in the subtest (part=1)", "E*in the subtest (part=2)", "*UsageError: breakpoint() on gloo*"]
    )


@pytest.mark.soak
def test_one_monitor_watches_all_tests(pytester: pytest.Pytester) -> None:
    """It is started with the first test on gloo, watches the second though the first has hung, and ends with pytest."""
    pytester.makepyfile(
        """
import pytest
import torch.distributed as dist
from distsim.plugin.run_gloo import MONITOR

seen = []

@pytest.fixture
def monitor():
    yield
    seen.append(MONITOR._process.pid)
    assert len(set(seen)) == 1

@pytest.mark.parametrize("number", range(2))
@pytest.mark.ranks(2, on="gloo", host_timeout_s=2)
def test_hang(rank, number, monitor):
    if rank:
        dist.barrier()

def test_last():
    print("MONITOR", seen[0])
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rP")
    result.assert_outcomes(failed=2, passed=1)
    assert result.stdout.str().count("HANG  missing rank  rank 0") == 2
    pid = next(line.split()[1] for line in result.stdout.lines if line.startswith("MONITOR "))
    assert not Path(f"/proc/{pid}").exists()
