"""Futures of calls, and who waits for one: it waits for the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sim.running import ranks

Future = torch.futures.Future[Any]


def _wait(future: Future) -> None:
    future.wait()


def _follow(future: Future) -> None:
    future.then(lambda done: done.value()[0]).then(lambda done: done.value() / 2).wait()


def _wait_all(future: Future) -> None:
    torch.futures.wait_all([dist.all_reduce(torch.ones(2), async_op=True).get_future(), future])


def _collect(future: Future) -> None:
    torch.futures.collect_all([future.then(lambda done: done.value()), future]).then(lambda done: done.value()).wait()


def _threads(future: Future) -> None:
    threads = [threading.Thread(target=future.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _hand_on(future: Future) -> None:
    own: Future = torch.futures.Future()
    future.add_done_callback(lambda done: own.set_result(done.value()))
    own.wait()


def _signal(future: Future) -> None:
    there = threading.Event()
    future.add_done_callback(lambda done: there.set())
    there.wait()


def _daemon(future: Future) -> None:
    there = threading.Event()
    threading.Thread(target=lambda: (future.wait(), there.set()), daemon=True).start()
    there.wait()


def _look(future: Future) -> None:
    while not future.done():
        pass


def _look_now_and_then(future: Future) -> None:
    while not future.done():
        time.sleep(0.01)


WAITS = [_wait, _follow, _wait_all, _collect, _threads, _hand_on, _signal, _daemon]
LOOKS = [_look, _look_now_and_then]


@pytest.mark.parametrize("wait", [*WAITS, *LOOKS], ids=lambda wait: wait.__name__[1:])
def test_who_waits_for_a_future_waits_for_its_call(wait: Callable[[Future], None]) -> None:
    """Whatever the way, the rank that never joins is named, and at once unless the program looks again and again."""

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() != 1:
            wait(dist.all_reduce(torch.ones(2), async_op=True).get_future())

    outcome = ranks(body, 3, check=False)
    found = outcome.diagnoses[0]
    assert (found.kind.value, found.culprits, outcome.exit_code) == ("missing_rank", (1,), 3), found.explanation
    assert (outcome.virtual_time_s < 1) == (wait in WAITS)


def test_a_future_that_no_call_is_behind_is_the_waiters_own() -> None:
    """Who waits for a future that nobody sets is stuck itself, and that is known at once."""

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            torch.futures.Future().wait()
        dist.barrier()

    outcome = ranks(body, 3, check=False)
    assert (outcome.diagnoses[0].kind.value, outcome.diagnoses[0].culprits) == ("host_stuck", (1,))
    assert outcome.virtual_time_s < 1


def _failed(future: Future) -> str:
    try:
        future.wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_future_fails_when_the_time_of_its_call_is_over() -> None:
    """The program's own timeout ends the wait for a future and for what follows from it, with what gloo says."""

    def body() -> list[str]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=3))
        if dist.get_rank():
            time.sleep(60)
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        after = future.then(lambda done: done.value())
        return [_failed(one) for one in (after, future, torch.futures.collect_all([future, after]))]

    outcome = ranks(body, 2, check=False)
    assert len(outcome.results[0]) == 3
    assert all("Timed out waiting 3000ms" in said and "closed" not in said for said in outcome.results[0])
    assert outcome.ranks[0].end_s == pytest.approx(3.0, abs=0.1)


def test_a_future_that_is_looked_at_fails_when_the_time_of_its_call_is_over() -> None:
    """`done()` says so, too, of a future whose call has timed out."""

    def body() -> str:
        dist.init_process_group("gloo", timeout=timedelta(seconds=3))
        if dist.get_rank():
            time.sleep(60)
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        while not future.done():
            time.sleep(0.5)
        return _failed(future)

    said = ranks(body, 2, check=False).results[0]
    assert "Timed out waiting 3000ms" in said
    assert "closed" not in said


@pytest.mark.parametrize("look", ["is_completed", "done"])
def test_who_only_looks_is_told_who_never_came(look: str) -> None:
    """A loop that its group's own timeout ends has met a fault, though the program goes on: the report says which."""

    def body() -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=3))
        if dist.get_rank() != 1:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            asked = work.is_completed if look == "is_completed" else work.get_future().done
            while not asked():
                time.sleep(0.5)

    outcome = ranks(body, 3)
    assert any(note.startswith("missing_rank (rank 1)") for note in outcome.notes), outcome.notes


def test_one_failed_call_ends_the_wait_for_all() -> None:
    """As with C++'s futures, `wait_all` does not wait for the others once one has failed."""

    def body() -> list[bool]:
        dist.init_process_group("gloo")
        short = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        if dist.get_rank():
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(2))
            return []
        calls = [dist.all_reduce(torch.ones(2), async_op=True, group=group).get_future() for group in (None, short)]
        with pytest.raises(RuntimeError, match="Timed out waiting 3000ms"):
            torch.futures.wait_all(calls)
        done = [future.done() for future in calls]
        dist.send(torch.ones(1), 1)
        calls[0].wait()
        return done

    assert ranks(body, 2).results[0] == [False, True]
