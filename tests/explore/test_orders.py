"""Orders on the simulator: counted by hand, and compared with a search without reduction."""

from __future__ import annotations

import linecache
import os
import queue
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

from distsim.sim.kernel.chooser import Orders, Usual
from tests.explore.searches import with_reduction, without_reduction
from tests.explore.simulated import make_calls, random_calls, random_threads, runs, store, take_locks


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
@pytest.mark.parametrize("first", range(0, 60, 20))
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
@pytest.mark.parametrize("first", range(0, 40, 20))
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


SERVED: list[int] = []


def serve(number: int) -> int:
    SERVED.append(number)
    return len(SERVED)


def three_requests() -> None:
    rank = dist_rpc()
    if rank:
        rpc.rpc_sync("worker0", serve, (rank,))
    rpc.shutdown()


def two_requests_of_one() -> None:
    rank = dist_rpc()
    if rank:
        replies = [rpc.rpc_async("worker0", serve, (number,)) for number in range(2)]
        for reply in replies:
            reply.wait()
    rpc.shutdown()


def one_after_the_other() -> None:
    rank = dist_rpc()
    if rank:
        for number in range(2):
            rpc.rpc_sync("worker0", serve, (number,))
    rpc.shutdown()


def a_value_and_its_fetch() -> None:
    rank = dist_rpc()
    if rank == 1:
        assert rpc.remote("worker0", serve, (1,)).to_here()
    rpc.shutdown()


def two_values_and_their_fetches() -> None:
    rank = dist_rpc()
    if rank:
        rpc.remote("worker0", serve, (rank,)).to_here()
    rpc.shutdown()


def operators_of_torch() -> None:
    rank = dist_rpc()
    if rank:
        rpc.rpc_sync("worker0", torch.add, (torch.ones(1), 1))
    rpc.shutdown()


def add_to_store(key: str) -> None:
    dist.distributed_c10d._get_default_store().add(key, 1)


def requests_that_use_a_store() -> None:
    store()
    rank = dist_rpc()
    if rank:
        rpc.rpc_sync("worker0", add_to_store, (f"{rank}",))
    rpc.shutdown()


def requests_that_use_one_key() -> None:
    store()
    rank = dist_rpc()
    if rank:
        rpc.rpc_sync("worker0", add_to_store, ("n",))
    rpc.shutdown()


def dist_rpc() -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    return rank


@pytest.mark.parametrize(
    ("body", "ranks", "classes"),
    [
        (three_requests, 4, 6),
        (two_requests_of_one, 2, 2),
        (one_after_the_other, 2, 1),
        (a_value_and_its_fetch, 2, 1),
        (two_values_and_their_fetches, 3, 4),
        (operators_of_torch, 3, 1),
        (requests_that_use_a_store, 3, 2),
        (requests_that_use_one_key, 3, 4),
    ],
)
def test_remote_calls_counted_by_hand(body: Callable[[], None], ranks: int, classes: int) -> None:
    """In which order requests are served, without those that torch makes itself. A fetch follows its value's making."""
    run = runs(body, ranks)

    def begin(orders: Orders) -> None:
        SERVED.clear()
        assert run(orders).exit_code == 0

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert without_reduction(begin, 100) == set(searched.classes)


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


def asked() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.is_completed()
    work.wait()
    assert work.is_completed()


def asked_twice() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if work.is_completed():
        assert work.is_completed()
    else:
        work.is_completed()
    work.wait()


def asked_in_a_loop() -> None:
    store()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        pass


def asked_before_a_look() -> None:
    held = store()
    if dist.get_rank():
        held.set("a", "1")
        dist.all_reduce(torch.ones(1))
        return
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if not work.is_completed():
        held.check(["a"])
    work.wait()


def asked_for_ever() -> None:
    store()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass


@pytest.mark.parametrize(
    ("body", "classes", "failing"),
    [
        (asked, 4, 0),  # each of two ranks: yes, not yet
        (asked_twice, 9, 0),  # each: yes; not yet, yes; not yet twice
        (asked_in_a_loop, 4, 0),
        (asked_before_a_look, 3, 0),  # yes; not yet, and the key is there or not
        (asked_for_ever, 1, 1),
    ],
)
def test_a_handle_is_complete_or_not_yet(body: Callable[[], None], classes: int, failing: int) -> None:
    """Both answers, whichever came first in time; a handle that was waited for is complete."""
    codes: list[int] = []
    run = runs(body, 2)
    searched = with_reduction(lambda orders: codes.append(run(orders).exit_code))
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing
    assert without_reduction(run, 300) == set(searched.classes)


def looks_for_a_file(folder: Path) -> None:
    if dist_rank():
        (folder / "checkpoint").write_text("1")
    else:
        (folder / "checkpoint").exists()


def writes_own_files(folder: Path) -> None:
    path = folder / f"{dist_rank()}"
    path.write_text("1")
    assert path.read_text() == "1"


def lists_while_another_writes(folder: Path) -> None:
    if dist_rank():
        torch.save(torch.ones(1), folder / "one")
    else:
        os.listdir(folder)


def makes_one_folder(folder: Path) -> None:
    os.makedirs(folder / "made", exist_ok=True)


def removes_what_another_writes(folder: Path) -> None:
    (folder / "run").mkdir(exist_ok=True)
    store()
    dist.barrier()
    if dist.get_rank():
        shutil.rmtree(folder / "run")
    else:
        (folder / "run" / "log").write_text("1")


def dist_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize(
    ("body", "classes", "failing"),
    [
        (looks_for_a_file, 2, 0),
        (writes_own_files, 1, 0),
        (lists_while_another_writes, 2, 0),
    ],
)
def test_files_counted_by_hand(body: Callable[[Path], None], classes: int, failing: int, tmp_path: Path) -> None:
    """Two ranks: what one looks for is there or not, own files make no difference."""
    codes: list[int] = []
    run = runs(body, 2, tmp_path)

    def begin(orders: Orders) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        codes.append(run(orders).exit_code)

    searched = with_reduction(begin)
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing
    assert without_reduction(begin, 300) == set(searched.classes)


@pytest.mark.parametrize(("body", "can_fail"), [(makes_one_folder, False), (removes_what_another_writes, True)])
def test_folders_that_two_ranks_share(body: Callable[[Path], None], can_fail: bool, tmp_path: Path) -> None:
    """`makedirs` may be called by both; a folder that one removes may be gone, or not be empty, for the other."""
    codes: set[int] = set()
    run = runs(body, 2, tmp_path)

    def begin(orders: Orders) -> None:
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        codes.add(run(orders).exit_code)

    assert with_reduction(begin).classes
    assert codes == ({0, 1} if can_fail else {0})


def reads_its_own_lines() -> None:
    linecache.clearcache()
    warnings.warn(f"{linecache.getline(__file__, 1)}", stacklevel=1)
    tempfile.gettempdir()


def test_what_the_standard_library_reads_for_itself_has_no_order() -> None:
    """It may read a file once only, so that the first run would not repeat."""
    orders = Orders(Usual())
    with pytest.warns(UserWarning, match="Orders"):
        assert runs(reads_its_own_lines, 2)(orders).exit_code == 0
    assert orders.trace.steps == []
