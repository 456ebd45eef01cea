"""Processes that ranks start, their pipes and their ends: orders on the simulator, counted by hand."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from distsim.scenario.explore.words import who
from distsim.sim.kernel.chooser import Orders, ReplayString, Usual
from tests.explore.searches import with_reduction, without_reduction
from tests.explore.simulated import runs, store
from tests.kin import one_in


def begun(target: Callable[..., None], *args: Any) -> Any:
    """Start a process of the rank."""
    process = multiprocessing.Process(target=target, args=args)
    process.start()
    return process


def send(end: Any, value: object) -> None:
    end.send(value)


def nothing() -> None:
    pass


def put(items: Any, value: object) -> None:
    items.put(value)


def send_three(end: Any) -> None:
    for number in range(3):
        end.send(number)


def double(end: Any) -> None:
    end.send(2 * end.recv())


def of_rank_0(body: Callable[[], None]) -> Callable[[], None]:
    """Return a body of two ranks; one that starts processes when the other has begun is no launcher."""

    def run() -> None:
        store()
        if dist.get_rank() == 0:
            body()

    return run


def two_senders_at_one_end() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    children = [begun(send, writer, number) for number in range(2)]
    assert {reader.recv(), reader.recv()} == {0, 1}
    for child in children:
        child.join()


def one_sender() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send_three, writer)
    assert [reader.recv() for _ in range(3)] == [0, 1, 2]
    child.join()
    assert child.exitcode == 0


def there_and_back() -> None:
    here, there = multiprocessing.Pipe()
    child = begun(double, there)
    here.send(3)
    assert here.recv() == 6
    child.join()


def end_of_messages() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send, writer, 1)
    writer.close()
    assert reader.recv() == 1
    with pytest.raises(EOFError):
        reader.recv()
    child.join()


def polls_once() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send, writer, 1)
    reader.poll()
    child.join()


def polls_in_a_loop() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send, writer, 1)
    while not reader.poll():
        pass
    child.join()


def own_pipes() -> None:
    children, readers = [], []
    for number in range(2):
        reader, writer = multiprocessing.Pipe(duplex=False)
        children.append(begun(send, writer, number))
        readers.append(reader)
    assert [reader.recv() for reader in readers] == [0, 1]
    for child in children:
        child.join()


def waits_for_one_of_two() -> None:
    children, readers = [], []
    for number in range(2):
        reader, writer = multiprocessing.Pipe(duplex=False)
        children.append(begun(send, writer, number))
        readers.append(reader)
    multiprocessing.connection.wait(readers)
    for child in children:
        child.join()


def joins_both() -> None:
    for child in [begun(nothing), begun(nothing)]:
        child.join()


def is_alive_once() -> None:
    child = begun(nothing)
    child.is_alive()
    child.join()
    assert not child.is_alive()


def first_of_two_ends() -> None:
    children = [begun(nothing), begun(nothing)]
    multiprocessing.connection.wait([child.sentinel for child in children])
    for child in children:
        child.join()


def first_of_three_ends() -> None:
    children = [begun(nothing), begun(nothing), begun(nothing)]
    multiprocessing.connection.wait([child.sentinel for child in children])
    for child in children:
        child.join()


def queue_of_two_children() -> None:
    items: Any = multiprocessing.Queue()
    children = [begun(put, items, number) for number in range(2)]
    assert {items.get(), items.get()} == {0, 1}
    for child in children:
        child.join()


def expects_the_first_to_end_first() -> None:
    children = [begun(nothing), begun(nothing)]
    ready = multiprocessing.connection.wait([child.sentinel for child in children])
    if children[0].sentinel not in ready:
        raise ValueError
    for child in children:
        child.join()


def looks_for_the_end_of_messages() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send, writer, 1)
    writer.close()
    reader.recv()
    reader.poll()
    child.join()


def close(end: Any) -> None:
    end.close()


def sends_to_one_who_closes() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=close, args=(reader,))
    child.start()
    reader.close()
    writer.send(1)
    child.join()


def take_lock(lock: Any) -> None:
    with lock:
        pass


def locks_of_two_children() -> None:
    lock = multiprocessing.Lock()
    for child in [begun(take_lock, lock), begun(take_lock, lock)]:
        child.join()


def leave(code: int) -> None:
    os._exit(code)


def ends_without_cleanup() -> None:
    child = begun(leave, 3)
    child.is_alive()
    child.join()
    assert child.exitcode == 3


def grandchild(end: Any) -> None:
    begun(send, end, 1).join()


def two_grandchildren() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    children = [begun(grandchild, writer), begun(grandchild, writer)]
    reader.recv()
    reader.recv()
    for child in children:
        child.join()


def spawned(rank: int, end: Any) -> None:
    end.send(rank)


def starts_ranks_by_torch() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    torch.multiprocessing.spawn(spawned, (writer,), nprocs=2)
    assert {reader.recv(), reader.recv()} == {0, 1}


@pytest.mark.parametrize(
    ("body", "classes", "failing"),
    [
        (two_senders_at_one_end, 2, 0),
        (one_sender, 1, 0),
        (there_and_back, 1, 0),
        (end_of_messages, 1, 0),
        (polls_once, 2, 0),
        (polls_in_a_loop, 2, 0),
        (own_pipes, 1, 0),
        (waits_for_one_of_two, 3, 0),  # the first only, the second only, both
        (joins_both, 1, 0),
        (is_alive_once, 2, 0),
        (first_of_two_ends, 3, 0),
        (first_of_three_ends, 7, 0),  # each set of them but the empty one
        (queue_of_two_children, 4, 0),  # who comes first, and whether the first get comes before the second put
        (expects_the_first_to_end_first, 3, 1),
        (looks_for_the_end_of_messages, 2, 0),
        (sends_to_one_who_closes, 2, 1),
        (locks_of_two_children, 2, 0),
        (ends_without_cleanup, 2, 0),
        (two_grandchildren, 2, 0),
        (starts_ranks_by_torch, 2, 0),
    ],
)
@pytest.mark.parametrize("launches", [False, True])
def test_processes_counted_by_hand(body: Callable[[], None], classes: int, failing: int, launches: bool) -> None:
    """A rank starts them, or a launcher whose ranks they are."""
    codes: list[int] = []
    unexplored: dict[str, None] = {}
    run = runs(body, 1) if launches else runs(of_rank_0(body), 2)

    def begin(orders: Orders) -> None:
        codes.append(run(orders).exit_code)
        unexplored.update(orders.trace.unexplored)

    searched = with_reduction(begin)
    assert unexplored == {}
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert sum(code != 0 for code in codes) == failing
    assert without_reduction(begin, 300) in (None, set(searched.classes))


Operation = tuple[str, int]


def random_processes(seed: int) -> tuple[list[Operation], list[list[Operation]]]:
    """Return what a parent and its two children do with two pipes, a queue and the ends of the children."""
    draw = random.Random(seed)
    kinds = draw.choice([("poll", "receive", "alive", "any"), ("take", "first", "join", "poll")])
    parent = [(draw.choice(kinds), draw.randrange(2)) for _ in range(draw.randint(1, 3))]
    children = [
        [(draw.choice(("send", "put", "close")), draw.randrange(2)) for _ in range(draw.randint(0, 2))]
        for _ in range(2)
    ]
    return parent, children


def work(operations: list[Operation], pipes: Any, items: Any) -> None:
    for kind, number in operations:
        if kind == "send" and not pipes[number][1].closed:
            pipes[number][1].send(1)
        elif kind == "put":
            items.put(1)
        elif kind == "close":
            pipes[number][1].close()


def use_processes(parent: list[Operation], operations: list[list[Operation]]) -> None:
    """Make the operations of the parent."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    items: Any = multiprocessing.Queue()
    children = [begun(work, of_one, pipes, items) for of_one in operations]
    for _, writer in pipes:
        writer.close()
    for kind, number in parent:
        with contextlib.suppress(EOFError, queue.Empty):
            if kind == "poll":
                pipes[number][0].poll()
            elif kind == "receive":
                pipes[number][0].recv()
            elif kind == "alive":
                children[number].is_alive()
            elif kind == "any":
                multiprocessing.connection.wait([pipes[0][0], pipes[1][0], children[number].sentinel])
            elif kind == "first":
                multiprocessing.connection.wait([child.sentinel for child in children])
            elif kind == "take":
                items.get(False)
            else:
                children[number].join()
    for child in children:
        child.join()


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(4, range(0, 40, 10)))
def test_random_processes_have_the_same_classes_as_without_reduction(first: int) -> None:
    """Every class once."""
    checked = 0
    for seed in range(first, first + 10):
        parent, children = random_processes(seed)
        run = runs(use_processes, 1, parent, children)
        every = without_reduction(run, 150)
        if every is not None:
            searched = with_reduction(run)
            assert set(searched.classes) == every, (seed, parent, children)
            assert len(searched.classes) == len(every), (seed, parent, children)
            checked += 1
    assert checked > 2


def terminates() -> None:
    here, there = multiprocessing.Pipe()
    child = begun(double, there)
    assert not here.poll(1.0)  # the child has begun
    child.terminate()
    child.join()


def leaves_a_daemon() -> None:
    here, there = multiprocessing.Pipe()
    multiprocessing.Process(target=double, args=(there,), daemon=True).start()
    assert not here.poll(1.0)


def joins_a_daemon() -> None:
    child = multiprocessing.Process(target=nothing, daemon=True)
    child.start()
    child.join()


def uses_a_manager() -> None:
    multiprocessing.Manager().dict()["a"] = 1


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (terminates, "ends a process"),
        (leaves_a_daemon, "ends while a daemonic process of its own may still run"),
        (joins_a_daemon, None),
        (uses_a_manager, "uses objects of a manager"),
    ],
)
def test_what_has_no_order_is_noted(body: Callable[[], None], note: str | None) -> None:
    """A signal strikes at one moment only, and containers of a manager are those of one process."""
    orders = Orders(Usual())
    runs(body, 1)(orders)
    assert [text.partition(" (")[0] for text in orders.trace.unexplored] == ([note] if note else [])


def gives_up_on_a_child() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = begun(send, writer, 1)
    if not reader.poll(1.0):
        raise ValueError
    child.join()


@pytest.mark.parametrize(("timeouts", "failing"), [(False, 0), (True, 1)])
def test_a_limit_of_a_wait_may_strike_first(timeouts: bool, failing: int) -> None:
    """A poll gives up before the child sends, if limits are explored."""
    codes: list[int] = []
    run = runs(gives_up_on_a_child, 1)
    assert with_reduction(lambda orders: codes.append(run(orders).exit_code), timeouts=timeouts).classes
    assert sum(code != 0 for code in codes) == failing


def test_a_child_has_the_same_name_in_all_runs() -> None:
    """It is that of the task which started it, with a number; and a replay string can have it."""
    orders = Orders(Usual())
    runs(of_rank_0(two_senders_at_one_end), 2)(orders)
    senders = [step.offer for step in orders.trace.steps if step.offer.label == "send"]
    assert [offer.actor for offer in senders] == ["p0.0#1#0", "p0.0#2#0"]
    assert [who(offer) for offer in senders] == ["process 1 of rank 0", "process 2 of rank 0"]
    assert ReplayString.parse("x1:1=p0.0#2#0,2=p0@1.0#2#1#0").choices == {1: "p0.0#2#0", 2: "p0@1.0#2#1#0"}
