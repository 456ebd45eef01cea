"""The baton between two threads."""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from distsim.sim.kernel import baton
from distsim.sim.kernel.baton import Baton


@pytest.fixture(params=["semaphores", "locks"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With libc's semaphores, and where there are none."""
    if request.param == "locks":
        monkeypatch.setattr(baton, "LIBC", None)
    elif baton.LIBC is None:
        pytest.skip("libc has no sem_clockwait")


def test_threads_run_in_turns() -> None:
    """Whoever has given the baton waits until it has its own."""
    here, there = Baton(), Baton()
    said: list[int] = []

    def answer() -> None:
        for number in range(1, 100, 2):
            there.wait()
            said.append(number)
            here.give()

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(0, 100, 2):
        said.append(number)
        if there.give() or here.waits():
            here.wait()
    thread.join()
    assert said == list(range(100))


@pytest.mark.parametrize("for_good", [True, False])
def test_a_baton_given_before_somebody_waits_is_there(for_good: bool) -> None:
    """It is given once: the next to wait finds none."""
    one = Baton()
    assert not one.wait_for(0.0)
    assert not (one.give_for_good if for_good else one.give)()
    assert one.wait_for(0.0)
    assert not one.wait_for(0.0)


def test_a_signal_ends_no_wait() -> None:
    """Its handler runs; the thread that waits goes on waiting until it is let run."""
    one, came = Baton(), threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        came.set()

    def send() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not came.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            came.wait(0.001)
        one.give()

    before = signal.signal(signal.SIGUSR1, note)
    try:
        thread = threading.Thread(target=send)
        thread.start()
        one.wait()
        assert came.is_set()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not one.wait_for(0.0)
