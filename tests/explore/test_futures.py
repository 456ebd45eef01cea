"""Futures that a program makes: who sets, asks and adds callbacks first, counted by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from distsim.sim.kernel.chooser import Orders, Usual
from tests.explore.searches import with_reduction, without_reduction
from tests.explore.simulated import runs, store


def with_setter(use: Callable[[Future[int]], object], *before: Callable[[], object]) -> None:
    """Use a future while a thread sets it."""
    future: Future[int] = Future()

    def set_it() -> None:
        for operation in before:
            operation()
        future.set_result(1)

    thread = threading.Thread(target=set_it)
    thread.start()
    use(future)
    future.wait()
    thread.join()
    assert future.done()


def asks_once() -> None:
    with_setter(lambda future: future.done())


def asks_twice() -> None:
    def ask(future: Future[int]) -> None:
        future.done()
        future.done()

    with_setter(ask)


def asks_in_a_loop() -> None:
    def loop(future: Future[int]) -> None:
        while not future.done():
            pass

    with_setter(loop)


def waits() -> None:
    with_setter(lambda future: future.wait())


def adds_a_callback() -> None:
    with_setter(lambda future: future.then(lambda _: None))


def adds_two_in_a_row() -> None:
    with_setter(lambda future: future.then(lambda _: 1).then(lambda _: 2))


def sets_its_own() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    assert future.done()
    future.then(lambda _: None).wait()


def sets_an_error() -> None:
    future: Future[int] = Future()
    thread = threading.Thread(target=lambda: future.set_exception(ValueError()))
    thread.start()
    future.done()
    thread.join()


def waits_after_a_key_is_set() -> None:
    held = store()
    with_setter(lambda future: (future.wait(), held.get("a")), lambda: held.set("a", "1"))


@pytest.mark.parametrize(
    ("body", "classes"),
    [
        (asks_once, 2),
        (asks_twice, 3),
        (asks_in_a_loop, 2),
        (waits, 1),
        (adds_a_callback, 2),
        (adds_two_in_a_row, 3),  # the result comes before, between, after them
        (sets_its_own, 1),
        (sets_an_error, 2),
        (waits_after_a_key_is_set, 1),
    ],
)
def test_plain_futures_counted_by_hand(body: Callable[[], None], classes: int) -> None:
    """One thread sets a future; the callbacks run there, or where they are added to a future that is set."""
    codes: set[int] = set()
    unexplored: dict[str, None] = {}
    run = runs(body, 1)

    def begin(orders: Orders) -> None:
        codes.add(run(orders).exit_code)
        unexplored.update(orders.trace.unexplored)

    searched = with_reduction(begin)
    assert (codes, unexplored) == ({0}, {})
    assert len(set(searched.classes)) == len(searched.classes) == classes
    assert without_reduction(begin, 200) == set(searched.classes)


def callback_sees_it_set() -> None:
    store()
    seen: list[Any] = []

    def look() -> None:
        seen.append(torch.ones(1))

    with_setter(lambda future: future.then(lambda _: look()))
    assert seen


def test_a_callback_has_run_when_its_future_was_waited_for() -> None:
    """In whichever thread it runs."""
    codes: set[int] = set()
    run = runs(callback_sees_it_set, 1)
    with_reduction(lambda orders: codes.add(run(orders).exit_code))
    assert codes == {0}


def asks_the_future_of_a_call() -> None:
    store()
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.done()
    future.then(lambda _: None).wait()


def test_futures_of_calls_are_noted() -> None:
    """The call may end at any time."""
    orders = Orders(Usual())
    runs(asks_the_future_of_a_call, 2)(orders)
    notes = [text.partition(" (")[0] for text in orders.trace.unexplored]
    assert notes == ["asks whether a future is done", "adds a callback to a future"]
