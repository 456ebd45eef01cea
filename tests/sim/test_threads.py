"""Threads of a rank: Python's own tools, in virtual time, each in its rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import HEAD, Scripts, ranks

from distsim.debug.records.kinds import Kind


def slowly(seconds: float, value: Any) -> Any:
    time.sleep(seconds)
    return value


def test_queues_pass_the_baton() -> None:
    """A producer thread feeds every kind of queue; the consumer sleeps meanwhile."""

    def body() -> Any:
        queues: list[Any] = [queue.Queue(), queue.SimpleQueue(), queue.LifoQueue(), queue.PriorityQueue(maxsize=5)]

        def produce() -> None:
            for number in range(3):
                time.sleep(1)
                for each in queues:
                    each.put(number)

        thread = threading.Thread(target=produce)
        thread.start()
        got = [[each.get() for each in queues] for _ in range(3)]
        thread.join()
        return got, round(time.perf_counter(), 6), thread.is_alive()

    assert ranks(body).results == [([[0] * 4, [1] * 4, [2] * 4], 3.0, False)] * 2


def test_who_leaves_a_lock_by_an_exception_takes_no_wake_up() -> None:
    """A signal handler that raises ends one thread's wait for a lock; the release then wakes the other that waits."""

    def body() -> Any:
        lock = threading.Lock()
        lock.acquire()

        def refuse(*_: object) -> None:
            raise KeyError

        def kill() -> None:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGUSR1)

        def wait() -> None:
            time.sleep(1)
            lock.acquire()

        signal.signal(signal.SIGUSR1, refuse)
        threading.Thread(target=kill).start()
        other = threading.Thread(target=wait, daemon=True)
        other.start()
        with pytest.raises(KeyError):
            lock.acquire()
        lock.release()
        other.join(timeout=10)
        return other.is_alive(), round(time.perf_counter(), 6)

    assert ranks(body).results == [(False, 2.0)] * 2


def test_timeouts_are_virtual() -> None:
    """Queue.get, Event.wait, Lock.acquire, Condition.wait, join, Future.result with a timeout."""

    def body() -> Any:
        held = threading.Lock()
        held.acquire()
        condition = threading.Condition()
        sleeper = threading.Thread(target=time.sleep, args=(100,), daemon=True)
        sleeper.start()
        pool = ThreadPoolExecutor(1)
        future = pool.submit(time.sleep, 50)
        waits: list[Any] = [queue.Queue().get, queue.SimpleQueue().get, future.result]
        for wait in waits:
            with pytest.raises((queue.Empty, concurrent.futures.TimeoutError)):
                wait(timeout=10)
        with condition:
            results = [
                threading.Event().wait(5),
                held.acquire(timeout=5),
                condition.wait(5),
                threading.Semaphore(0).acquire(timeout=5),
            ]
        sleeper.join(timeout=0.25)
        return results, sleeper.is_alive(), round(time.perf_counter(), 4)

    outcome = ranks(body)
    assert outcome.results == [([False] * 4, True, 50.25)] * 2
    assert outcome.notes == []


def test_events_conditions_barriers() -> None:
    """Timer, Event, Condition, Semaphore, Barrier and RLock do their work."""

    def body() -> Any:
        fired = threading.Event()
        timer = threading.Timer(2, fired.set)
        timer.start()
        unfired = threading.Timer(2, pytest.fail)
        unfired.start()
        unfired.cancel()
        assert not fired.wait(1)
        assert fired.wait(5)
        at = round(time.perf_counter(), 6)
        barrier, passed, lock = threading.Barrier(3), [], threading.RLock()

        def meet() -> None:
            with lock, lock:
                time.sleep(0.5)
            passed.append(barrier.wait())

        threads = [threading.Thread(target=meet) for _ in range(2)]
        for thread in threads:
            thread.start()
        passed.append(barrier.wait())
        for thread in threads:
            thread.join()
        return at, sorted(passed), round(time.perf_counter(), 6)

    assert ranks(body).results == [(2.0, [0, 1, 2], 3.0)] * 2


def test_a_pool_works_and_may_be_forgotten() -> None:
    """submit, map, exceptions, as_completed; a pool nobody shuts down ends with its process."""

    def body() -> Any:
        with ThreadPoolExecutor(4, thread_name_prefix="pool") as pool:
            futures = [pool.submit(slowly, 1, i) for i in range(4)]
            values = [future.result() for future in concurrent.futures.as_completed(futures)]
            squares = list(pool.map(lambda x: x * x, range(4)))
            error = pool.submit(lambda: 1 / 0).exception()
        forgotten = ThreadPoolExecutor(2)
        return (
            sorted(values),
            squares,
            type(error).__name__,
            forgotten.submit(lambda: 7).result(),
            round(time.perf_counter(), 6),
        )

    outcome = ranks(body)
    assert outcome.results == [([0, 1, 2, 3], [0, 1, 4, 9], "ZeroDivisionError", 7, 1.0)] * 2
    assert outcome.exit_code == 0


def test_a_rank_sees_only_its_own_threads() -> None:
    """enumerate, active_count, current_thread, main_thread, names: as in a process of its own."""

    def body() -> Any:
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        seen = (threading.active_count(), [t.name for t in threading.enumerate()], thread.name)
        stop.set()
        thread.join()
        return seen, threading.active_count(), threading.current_thread() is threading.main_thread()

    own = ((2, ["MainThread", "Thread-1 (wait)"], "Thread-1 (wait)"), 1, True)
    assert ranks(body, 3).results == [own] * 3
    assert ranks(body, 1).results == [own]


def test_collectives_in_a_thread_on_its_own_group() -> None:
    """A thread may communicate on a group while the main thread uses another."""

    def body() -> Any:
        dist.init_process_group("gloo")
        other = dist.new_group()
        found = []

        def work() -> None:
            tensor = torch.full((2,), float(dist.get_rank()))
            for _ in range(5):
                dist.all_reduce(tensor, group=other)
            found.extend(tensor.tolist())

        thread = threading.Thread(target=work)
        thread.start()
        mine = torch.ones(2)
        for _ in range(3):
            dist.all_reduce(mine)
        thread.join()
        return found, mine.tolist()

    assert ranks(body).results == [([16.0, 16.0], [8.0, 8.0])] * 2


def test_a_race_names_the_calls_of_both_threads() -> None:
    """The thread that calls and the one that is inside a call stand in the report, each with its call and line."""

    def body() -> None:
        dist.init_process_group("gloo")
        thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),), name="metrics")
        thread.start()
        time.sleep(1)
        dist.broadcast(torch.ones(2), 0)

    def late() -> None:
        dist.init_process_group("gloo")
        time.sleep(100)

    outcome = ranks(lambda: body() if os.environ["RANK"] == "0" else late())
    (found,) = [d for d in outcome.diagnoses if d.kind is Kind.THREAD_RACE]
    assert "Thread MainThread of rank 0 called broadcast #2 while thread metrics was inside all_reduce #1" in str(
        found.explanation
    )
    assert "It was in" not in found.explanation


def test_exceptions_in_threads(script: Scripts) -> None:
    """An exception in a thread is printed behind its rank and ends the thread only; the hook may be replaced."""
    ran = script(
        HEAD
        + """
import threading
def fail():
    raise ValueError("in a thread")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
if rank == 0:
    threading.excepthook = lambda args: print("hook", args.exc_type.__name__)
dist.barrier()
thread = threading.Thread(target=fail)
thread.start()
thread.join()
"""
    )
    assert ran.outcome.exit_code == 0
    assert ran.of(0) == ["hook ValueError"]
    assert ran.err.count("ValueError: in a thread") == 3


def test_daemon_threads_end_with_their_process(script: Scripts) -> None:
    """A daemon thread neither holds its process up nor says anything when it is ended."""
    ran = script(
        HEAD
        + """
import threading
def forever():
    while True:
        time.sleep(1)
threading.Thread(target=forever, daemon=True).start()
def linger():
    time.sleep(5)
    print("lingered", time.perf_counter() >= 5)
threading.Thread(target=linger).start()
print("main ends")
"""
    )
    assert ran.outcome.exit_code == 0
    assert ran.of(0) == ran.of(1) == ["main ends", "lingered True"]
    assert ran.err == ""


def test_locals_and_contexts() -> None:
    """threading.local and contextvars are per thread, and so per rank."""
    local = threading.local()
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=-1)

    def body() -> Any:
        dist.init_process_group("gloo")
        local.value = dist.get_rank()
        variable.set(dist.get_rank())
        dist.barrier()
        inside: list[Any] = []
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=lambda: inside.extend([hasattr(local, "value"), variable.get(), context.run(variable.get)])
        )
        thread.start()
        thread.join()
        return local.value, variable.get(), inside

    assert ranks(body).results == [(0, 0, [False, -1, 0]), (1, 1, [False, -1, 1])]
    assert variable.get() == -1


def test_asyncio_in_virtual_time() -> None:
    """gather, wait_for, to_thread and queues of an event loop, with a collective before and after."""

    async def work(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async def main() -> Any:
        values = await asyncio.gather(work(1), work(2), asyncio.to_thread(slowly, 3, "thread"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 0.5)
        inbox: asyncio.Queue[int] = asyncio.Queue()
        asyncio.get_running_loop().call_later(1, inbox.put_nowait, 5)
        return values, await inbox.get()

    def body() -> Any:
        dist.init_process_group("gloo")
        dist.barrier()
        start = time.perf_counter()
        found = asyncio.run(main())
        spent = time.perf_counter() - start
        dist.barrier()
        return found, round(spent, 4)

    outcome = ranks(body)
    assert outcome.results == [(([1, 2, "thread"], 5), 4.5)] * 2
    assert outcome.notes == []


def test_two_threads_that_lock_each_other_out(script: Scripts) -> None:
    """A deadlock of a rank's own threads is found at once and named."""
    ran = script(
        HEAD
        + """
import threading
one, other = threading.Lock(), threading.Lock()
def cross():
    with other:
        time.sleep(1)
        with one:
            pass
if rank == 1:
    thread = threading.Thread(target=cross)
    thread.start()
    with one:
        time.sleep(1)
        with other:
            pass
dist.barrier()
"""
    )
    assert ran.outcome.exit_code == 3
    assert ran.outcome.diagnoses[0].culprits == (1,)
    assert ran.outcome.diagnoses[0].kind == "host_stuck"


@pytest.mark.soak
def test_threads_of_ranks_are_gone_with_the_simulation() -> None:
    """Also one that never began, and the ranks' own: who waits until no other thread is left would wait for ever."""

    def body() -> None:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        time.sleep(1)
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

    before = threading.enumerate()
    ranks(body)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_a_thread_that_watches_the_machine_all_the_time() -> None:
    """A monitor of memory that never sleeps (MemoryTrace of llama-cookbook and peft) does not keep its rank from
    running."""

    def body() -> tuple[float, int]:
        looks, watches = 0, True

        def watch() -> None:
            nonlocal looks
            while watches:
                with open("/proc/self/statm", "rb") as file:
                    file.read()
                looks += 1

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(5):
            time.sleep(0.1)
        watches = False
        thread.join()
        return time.perf_counter(), looks

    outcome = ranks(body, 2, host_timeout_s=5.0)
    for end_s, looks in outcome.results:
        assert end_s == pytest.approx(0.5, rel=0.1)
        assert looks > 1000


def test_pools_of_ranks_that_have_read_the_clock_often() -> None:
    """Executors of all ranks share a lock, in which a rank that has read the clock often gives the baton away."""

    def body() -> int:
        for _ in range(2_000):
            time.perf_counter()
        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(abs, range(8)))

    assert ranks(body, 3, host_timeout_s=5.0).results == [28, 28, 28]
