"""Inside a rank every clock tells virtual time, and none tells the laptop's."""

from __future__ import annotations

import datetime
import logging
import os
import pickle
import time
import timeit
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import HEAD, Scripts, ranks

EPOCH_S = 1_700_000_000.0


def test_sleep_takes_exactly_what_it_says() -> None:
    """A day of sleep is a day on every clock, at once."""

    def body() -> list[float]:
        clocks = (time.time, time.perf_counter, time.monotonic, time.process_time)
        before = [clock() for clock in clocks]
        nanoseconds = time.perf_counter_ns(), time.monotonic_ns(), time.time_ns()
        time.sleep(86_400)
        after = time.perf_counter_ns(), time.monotonic_ns(), time.time_ns()
        spans = [clock() - start for clock, start in zip(clocks, before, strict=True)]
        return [*spans, *((b - a) / 1e9 for a, b in zip(nanoseconds, after, strict=True))]

    outcome = ranks(body)
    for spans in outcome.results:
        assert spans == pytest.approx([86_400] * 7, abs=1e-4)
    assert outcome.virtual_time_s == pytest.approx(86_400, abs=1e-4)
    assert outcome.wall_time_s < 60


def test_all_clocks_agree() -> None:
    """datetime.now, utcnow, strftime, localtime, gmtime, ctime, clock_gettime follow time.time()."""

    def body() -> Any:
        time.sleep(3_600)
        now = time.time()
        utc = datetime.datetime.now(datetime.UTC)
        return (
            abs(utc.timestamp() - now) < 0.001,
            abs(datetime.datetime.now().timestamp() - now) < 0.001,
            datetime.date.today() == datetime.datetime.now().date(),
            time.strftime("%Y-%m-%d", time.gmtime()) == time.strftime("%Y-%m-%d", time.gmtime(now)),
            time.ctime() == time.ctime(now),
            time.localtime().tm_year,
            abs(time.clock_gettime(time.CLOCK_REALTIME) - now) < 0.001,
            abs(time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic()) < 0.001,
            round(now - EPOCH_S, 2),
        )

    assert ranks(body).results == [(True, True, True, True, True, 2023, True, True, 3600.0)] * 2


def test_datetime_stays_the_class_it_is() -> None:
    """now() returns datetime.datetime itself: pickle, isinstance, subclasses and arithmetic work."""

    class Mine(datetime.datetime):
        pass

    def body() -> bool:
        now = datetime.datetime.now()
        assert type(now) is datetime.datetime
        assert pickle.loads(pickle.dumps(now)) == now
        assert type(Mine.now()) is Mine
        start = datetime.datetime.now()
        time.sleep(2.5)
        return (datetime.datetime.now() - start) >= timedelta(seconds=2.5)

    real = datetime.datetime.now
    assert all(ranks(body).results)
    assert abs(datetime.datetime.now().timestamp() - time.time()) < 60
    assert type(real()) is datetime.datetime


def test_names_taken_before(script: Scripts) -> None:
    """`from time import perf_counter` in the script and in modules imported long ago; timeit's default timer."""
    ran = script(
        HEAD
        + """
from time import perf_counter, sleep, time as now
import timeit, queue, threading
start = perf_counter(), now()
sleep(2)
print(round(perf_counter() - start[0], 3), round(now() - start[1], 3))
repeated = timeit.repeat(lambda: sleep(1), number=1, repeat=2)
print(round(timeit.timeit(lambda: sleep(1), number=3), 3), round(min(repeated), 3))
try:
    queue.Queue().get(timeout=5)
except queue.Empty:
    print(round(perf_counter() - start[0], 3))
"""
    )
    assert ran.of(0) == ran.of(1) == ["2.0 2.0", "3.0 1.0", "12.0"]
    assert timeit.timeit.__defaults__ is not None
    assert timeit.default_timer is time.perf_counter


def test_busy_wait_on_the_clock() -> None:
    """A loop that only reads the clock ends close to when it means to, short or long."""

    def body(seconds: float) -> float:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            pass
        return time.perf_counter() - start

    for seconds in (1e-5, 0.25, 30.0):
        for spent in ranks(body, 2, seconds).results:
            assert seconds <= spent <= seconds * 1.005 + 4e-7


def test_log_records_do_not_wait() -> None:
    """Many lines of a log in a row are not a loop that waits for a time: numba alone writes thousands at DEBUG."""

    def body() -> float:
        start, logger = time.perf_counter(), logging.getLogger("test_time")
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        for _ in range(12_000):
            logger.debug("a line")
        return time.perf_counter() - start

    assert ranks(body, 1).results == [pytest.approx(0.0012, rel=0.1)]


def test_polling_a_call_and_a_store() -> None:
    """`while not work.is_completed()` and `while not store.check()` end when the thing has happened."""

    def body() -> tuple[float, float]:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank == 1:
            time.sleep(4)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        while not work.is_completed():
            pass
        met = time.perf_counter()
        store = dist.TCPStore(os.environ["MASTER_ADDR"], 29_700, 2, rank == 0)
        if rank == 0:
            time.sleep(3)
            store.set("go", "1")
        else:
            while not store.check(["go"]):
                time.sleep(0.01)
        return met, time.perf_counter()

    for met, end in ranks(body).results:
        assert met == pytest.approx(4, rel=0.001)
        assert end == pytest.approx(7, rel=0.01)


def test_work_costs_modelled_time_only() -> None:
    """Operators take what the cluster file says; two runs agree to the last bit."""

    def body() -> float:
        dist.init_process_group("gloo")
        x = torch.randn(64, 64)
        for _ in range(20):
            x = torch.relu(x @ x)
            x = x / x.norm()
            dist.all_reduce(x)
        return time.perf_counter()

    first, second = ranks(body, 4), ranks(body, 4)
    assert first.results == second.results
    assert first.virtual_time_s == second.virtual_time_s > 0
    assert [r.end_s for r in first.ranks] == [r.end_s for r in second.ranks]


def test_negative_sleep_is_refused() -> None:
    """As Python refuses it."""

    def body() -> str:
        with pytest.raises(ValueError, match="non-negative"):
            time.sleep(-1)
        return "refused"

    assert ranks(body).results == ["refused"] * 2
