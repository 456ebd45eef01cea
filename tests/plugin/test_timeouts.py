"""Tests on simulated ranks that pytest-timeout or their own limit ends: the failure says who was where."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import Any

import pytest

from distsim.plugin import timeouts
from distsim.sim.kernel.limits import Limits
from tests.plugin.conftest import Run

SPINS = """
import distsim.sim  # no part of a test's time

@pytest.mark.ranks(4)
def test_spins(rank):
    while rank == 1:
        pass
    dist.barrier()
"""
AFTER = """
@pytest.mark.ranks(2)
def test_after(rank):
    dist.barrier()
"""


@pytest.fixture(autouse=True)
def _nobody_debugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-timeout lifts all limits of a process once somebody was at a prompt in it, as in other tests here."""
    monkeypatch.setattr("pytest_timeout.SUPPRESS_TIMEOUT", False)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("method", ["signal", pytest.param("thread", marks=pytest.mark.soak)])
def test_a_rank_that_spins_is_named(run: Run, pytester: pytest.Pytester, method: str) -> None:
    """The others come to their call first; the report is in JUnit, and pytest goes on, also with a timer thread."""
    flags = ("--timeout", "3", "--timeout-method", method, "--junit-xml=out.xml", "--show-capture=no")
    result = run(SPINS + AFTER, *flags, apart=method == "thread")
    result.assert_outcomes(failed=1, passed=1)
    failure = ET.parse(pytester.path / "out.xml").getroot().find("testsuite/testcase/failure")
    assert failure is not None
    told = str(failure.text).splitlines()
    assert told[0] == "Timeout (>3.0s) from pytest-timeout."
    assert told[2].startswith("HANG  host stuck  rank 1  barrier #1 on group default_pg (ranks 0-3)")
    assert "Ranks 0,2,3 wait in barrier #1" in " ".join(" ".join(told).split())


@pytest.mark.slow
@pytest.mark.soak
def test_a_rank_that_computes_is_late_and_not_stuck(run: Run) -> None:
    """It runs operators, so nothing is diagnosed: where everybody is must do."""
    result = run(
        """
@pytest.mark.ranks(3)
def test_computes(rank):
    while rank == 2:
        torch.ones(4) + 1
    dist.barrier()
""",
        "--timeout=4",
    )
    result.stdout.fnmatch_lines(
        ["Timeout (>4.0s) from pytest-timeout.", "", "Ranks 0,1 wait in barrier*", "Rank 2 is at * in test_computes"]
    )
    assert "HANG" not in result.stdout.str()


@pytest.mark.slow
@pytest.mark.soak
def test_a_test_that_never_ends_though_all_ranks_live(run: Run) -> None:
    """Under pytest-timeout, and under its own limit."""
    result = run(
        """
@pytest.mark.timeout(4, method="signal")
@pytest.mark.ranks(2)
def test_theirs(rank):
    while True:
        dist.barrier()

@pytest.mark.ranks(2, timeout_s=1)
def test_ours(rank):
    while True:
        dist.barrier()
"""
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["Timeout*from pytest-timeout.", "Rank*0*in*", "*still ran after 1 s*"])


@pytest.mark.slow
@pytest.mark.soak
def test_a_timeout_with_xdist_and_x(run: Run) -> None:
    """In a worker, where the tests' thread may be another, and as the first failure that ends all."""
    for flags in (("-n", "1"), ("-x",)):
        result = run(SPINS + AFTER, "--timeout=6", *flags)
        assert result.parseoutcomes()["failed"] == 1
        result.stdout.fnmatch_lines(["HANG  host stuck  rank 1  barrier*"])


def test_a_ticker_of_the_tests_own_ticks_and_ends_nothing(run: Run) -> None:
    """Its handler returns, so it is called at once, also while a rank computes; nobody is left behind for it."""
    run(
        """
import signal

ticks = []

@pytest.fixture
def ticker():
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)

@pytest.mark.ranks(2)
def test_ticks(ticker, rank):
    ticks.clear()
    while rank == 1 and len(ticks) < 2:
        torch.ones(4) + 1
    dist.barrier()
"""
    ).assert_outcomes(passed=1)


def test_a_handler_of_pytest_timeout_that_returns_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody debugs: the next signal waits for the rank as long as the first did, or for nobody."""
    now_s, calls, running = 0.0, [], SimpleNamespace(process=SimpleNamespace(rank=1))
    world: Any = SimpleNamespace(running=running, ticks=0, in_operator=False, limits=Limits(), host_timeout_s=60.0)
    monkeypatch.setattr(timeouts, "monotonic", lambda: now_s)
    monkeypatch.setattr(timeouts, "debugged", lambda: False)

    def handler() -> None:
        calls.append(now_s)

    handler.__module__ = "pytest_timeout"
    last = timeouts.LastWord(world)

    def signalled() -> None:
        last.pending.append((handler, ()))
        last.deliver()

    signalled()
    assert not calls  # the rank may come back
    world.running = None
    last.deliver()
    assert calls == [0.0]
    world.running, now_s = running, 9.0
    signalled()
    assert last.left_behind is None
    monkeypatch.setattr(timeouts, "debugged", lambda: True)
    now_s = 99.0
    last.deliver()
    assert (calls, last.left_behind) == ([0.0, 99.0], None)
    monkeypatch.setattr(timeouts, "debugged", lambda: False)
    signalled()
    now_s += timeouts.GRACE_S + 0.1
    last.deliver()
    assert (last.left_behind, world.host_timeout_s, world.limits.wall_time_s) == (1, 0.0, timeouts.CALLS_S)


@pytest.mark.soak
@pytest.mark.slow
def test_a_fixture_that_never_ends_is_pytest_timeouts_own(pytester: pytest.Pytester) -> None:
    """No rank is simulated yet, so the timer thread does what it always does: it ends pytest."""
    pytester.makepyfile(
        """
import pytest

@pytest.fixture
def forever():
    while True:
        pass

@pytest.mark.ranks(2)
def test_never(forever):
    pass
"""
    )
    result = pytester.runpytest_subprocess("--timeout=1", "--timeout-method=thread", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*+ Timeout +*"])
    assert "1 failed" not in result.stdout.str()
