"""Orders on the simulator: counted by hand, and compared with a search without reduction."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distsim.sim.kernel.chooser import Orders
from tests.explore.searches import with_reduction, without_reduction
from tests.explore.simulated import make_calls, random_calls, random_threads, runs, store, take_locks
from tests.kin import one_in


def senders() -> None:
    store()
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        return
    for _ in range(dist.get_world_size() - 1):
        dist.recv(torch.zeros(1))


def rounds() -> None:
    store()
    for number in range(3):
        if dist.get_rank():
            dist.send(torch.ones(1), 0, tag=number)
        else:
            dist.recv(torch.zeros(1), tag=number)
            dist.recv(torch.zeros(1), tag=number)
        dist.barrier()


def adds() -> None:
    store().add("n", 1)


def counter() -> None:
    held = store()
    number = int(held.get("n")) if held.check(["n"]) else 0
    held.set("n", str(number + 1))


def own_keys() -> None:
    held, rank = store(), dist.get_rank()
    for number in range(10):
        held.set(f"{rank}/{number}", "1")
        held.get(f"{rank}/{number}")


def given_sources() -> None:
    store()
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        return
    for sender in range(1, dist.get_world_size()):
        dist.recv(torch.zeros(1), sender)


def sender_that_waits_for_a_key() -> None:
    held, rank = store(), dist.get_rank()
    if rank == 0:
        for _ in range(3):
            dist.recv(torch.zeros(1))
        return
    if rank == 3:
        held.get("go")
    work = dist.isend(torch.ones(1), 0)
    if rank == 1:
        held.set("go", "1")
    work.wait()


def sender_that_waits_for_a_match() -> None:
    held, rank = store(), dist.get_rank()
    if rank == 0:
        for _ in range(3):
            dist.recv(torch.zeros(1))
        return
    if rank == 3:
        held.get("go")
    dist.send(torch.ones(1), 0)
    if rank == 1:
        held.set("go", "1")


def polls() -> None:
    held = store()
    if dist.get_rank():
        held.set("first", "1")
        held.set("second", "1")
    else:
        while not held.check(["second"]):
            pass


def both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def two_groups() -> None:
    store()
    groups = dist.new_group(), dist.new_group()
    both(*(lambda group=group: dist.all_reduce(torch.ones(1), group=group) for group in groups))


def one_group() -> None:
    store()
    both(*(lambda size=size: dist.all_reduce(torch.ones(size)) for size in (1, 2)))


def one_group_with_handles() -> None:
    store()
    both(*(lambda size=size: dist.all_reduce(torch.ones(size), async_op=True).wait() for size in (1, 2)))


def two_locks() -> None:
    first, second = threading.Lock(), threading.Lock()

    def take(one: threading.Lock, other: threading.Lock) -> None:
        with one, other:
            pass

    both(lambda: take(first, second), lambda: take(second, first))


def event() -> None:
    happened = threading.Event()
    both(happened.wait, happened.set)


def queue_of_two() -> None:
    items: queue.Queue[int] = queue.Queue()

    def put() -> None:
        items.put(1)
        items.put(2)

    def get() -> None:
        items.get()
        items.get()

    both(put, get)


def wait_with_a_limit() -> None:
    held = store()
    if dist.get_rank():
        held.set("alive", "1")
        return
    try:
        held.wait(["alive"], timedelta(seconds=1))
    except RuntimeError:
        held.set("late", "1")


def ddp() -> None:
    store()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("body", "ranks", "classes", "failing"),
    [
        (senders, 4, 6, 0),
        (senders, 5, 24, 0),
        (rounds, 3, 8, 0),
        (adds, 3, 6, 0),
        (adds, 4, 24, 0),
        (counter, 2, 4, 0),
        (counter, 3, 48, 0),
        (own_keys, 4, 1, 0),
        (given_sources, 4, 1, 0),
        (sender_that_waits_for_a_key, 4, 6, 0),
        (sender_that_waits_for_a_match, 4, 3, 0),
        (polls, 2, 2, 0),
        (two_groups, 2, 1, 0),
        (one_group, 2, 2, 2),  # two threads are inside calls of one group: a fault in itself
        (one_group_with_handles, 2, 4, 2),
        (two_locks, 1, 3, 1),
        (event, 1, 2, 0),
        (queue_of_two, 1, 2, 0),
        (ddp, 4, 1, 0),
    ],
)
def test_counted_by_hand(body: Callable[[], None], ranks: int, classes: int, failing: int) -> None:
    """One run for each class, and the known number of them fails."""
    codes: list[int] = []
    run = runs(body, ranks)
    searched = with_reduction(lambda orders: codes.append(run(orders).exit_code))
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing


def test_a_limit_that_may_strike_is_one_more_class() -> None:
    """A wait that ends in time has one order, two if its limit is a choice."""
    run = runs(wait_with_a_limit, 2)
    assert len(with_reduction(run).classes) == 1
    assert len(with_reduction(run, timeouts=True).classes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("timeouts", [False, True])
@pytest.mark.parametrize("first", one_in(3, range(0, 60, 20)))
def test_random_calls_have_the_same_classes_as_without_reduction(first: int, timeouts: bool) -> None:
    """Store operations and messages with and without a source: every class once."""
    checked = 0
    for seed in range(first, first + 20):
        programs = random_calls(seed)
        run = runs(make_calls, len(programs), programs)
        every = without_reduction(run, 60, timeouts)
        if every is None:
            continue
        checked += 1
        searched = with_reduction(run, timeouts)
        assert set(searched.classes) == every, (seed, programs)
        assert len(searched.classes) == len(every), (seed, programs)
    assert checked > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(2, range(0, 40, 20)))
def test_random_threads_have_the_same_classes_as_without_reduction(first: int) -> None:
    """Locks, with deadlocks: every class once."""
    checked = 0
    for seed in range(first, first + 20):
        programs = random_threads(seed)
        run = runs(take_locks, 1, programs, seed % 2 == 0)
        every = without_reduction(run, 60)
        if every is None:
            continue
        checked += 1
        searched = with_reduction(run)
        assert set(searched.classes) == every, (seed, programs)
        assert len(searched.classes) == len(every), (seed, programs)
    assert checked > 8


def jobs() -> None:
    lock = threading.Lock()

    def job() -> None:
        with lock:
            pass

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(job) for _ in range(3)]:
            future.result()


def jobs_that_meet_nowhere() -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]


def jobs_of_one_thread() -> None:
    lock = threading.Lock()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(lock.__enter__).result()
            lock.release()


def simple_queue() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    taken: list[int] = []
    both(lambda: items.put(1), lambda: items.put(2))
    both(lambda: taken.append(items.get()), items.get)


def queue_that_may_be_empty() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    both(lambda: items.put(1), items.empty)


def event_with_a_limit() -> None:
    happened = threading.Event()
    both(happened.set, lambda: happened.wait(1.0))


def event_that_is_asked() -> None:
    happened = threading.Event()
    both(happened.set, lambda: happened.is_set())
    assert happened.is_set()


def thread_that_is_asked() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.is_alive()
    thread.join()
    assert not thread.is_alive()


def queue_with_a_limit() -> None:
    items: queue.Queue[int] = queue.Queue()
    both(lambda: items.put(1), lambda: items.get(timeout=1))


@pytest.mark.parametrize(
    ("body", "classes"),
    [
        (jobs, 4),  # the third begins when a thread is free
        (jobs_that_meet_nowhere, 1),
        (jobs_of_one_thread, 1),
        (simple_queue, 4),
        (queue_that_may_be_empty, 2),
        (event_with_a_limit, 2),
        (queue_with_a_limit, 2),
        (event_that_is_asked, 2),
        (thread_that_is_asked, 2),
    ],
)
def test_threads_counted_by_hand(body: Callable[[], None], classes: int) -> None:
    """Jobs of executors, whichever thread runs them, queues without locks and waits with a limit are proven."""
    run = runs(body, 1)
    unexplored: dict[str, None] = {}

    def begin(orders: Orders) -> None:
        assert run(orders).exit_code == 0
        unexplored.update(orders.trace.unexplored)

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert without_reduction(begin, 300) == set(searched.classes)
    assert not unexplored
