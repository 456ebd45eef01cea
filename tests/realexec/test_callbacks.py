"""Callbacks of held calls run apart: in their order, and past one that waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from distsim.realexec.guard.handle import run_apart


def test_jobs_run_in_their_order() -> None:
    """Each begins when the one before has ended, however many threads there are by then."""
    done = threading.Event()
    seen: list[int] = []
    jobs: list[Callable[[], None]] = [lambda i=i: seen.append(i) for i in range(200)]  # type: ignore[misc]
    for job in [*jobs, done.set]:
        run_apart(job)
    assert done.wait(30)
    assert seen == list(range(200))


def test_a_job_may_wait_for_later_ones() -> None:
    """Ten that each wait for the next: the last one is reached, and all end, the last first."""
    done = threading.Event()
    gates = [threading.Event() for _ in range(11)]
    ended: list[int] = []

    def waits(i: int) -> None:
        assert gates[i + 1].wait(30)
        ended.append(i)
        gates[i].set()

    for i in range(10):
        run_apart(lambda i=i: waits(i))  # type: ignore[misc]
    run_apart(gates[10].set)
    assert gates[0].wait(30)
    assert ended == list(range(9, -1, -1))
    run_apart(done.set)
    assert done.wait(30)


def test_a_job_that_raises_keeps_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Its traceback is shown; the next one runs."""
    done = threading.Event()

    def raises() -> None:
        raise ValueError("in a callback")

    run_apart(raises)
    run_apart(done.set)
    assert done.wait(30)
    assert "ValueError: in a callback" in capsys.readouterr().err


def test_a_job_that_computes_is_not_overtaken() -> None:
    """However long it takes, on however busy a machine: the next would make its calls before it does."""
    order: list[str] = []
    ended = threading.Event()

    def computes() -> None:
        begun_s = time.thread_time()
        while time.thread_time() - begun_s < 0.15:
            pass
        order.append("first")

    def follows() -> None:
        order.append("second")
        ended.set()

    run_apart(computes)
    run_apart(follows)
    assert ended.wait(30)
    assert order == ["first", "second"]
