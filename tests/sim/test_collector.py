"""Python's collector during a simulation."""

from __future__ import annotations

import gc
import weakref

import pytest
from sim.running import ranks

from distsim.sim.kernel import interrupts


class Thing:
    """What can be in a cycle and weakly referred to."""


def cycle() -> weakref.ref[Thing]:
    thing = Thing()
    vars(thing)["itself"] = thing
    return weakref.ref(thing)


def inside() -> tuple[int, bool]:
    made = cycle()
    gc.collect()
    return gc.get_freeze_count(), made() is None


def test_what_was_there_before_is_set_aside_and_comes_back() -> None:
    """A rank's garbage is collected while it runs; what the surrounding program has is not looked at until the end."""
    before = cycle()
    aside, gone = ranks(inside, 1).results[0]
    assert aside > 10_000
    assert gone
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_what_others_set_aside_stays() -> None:
    """A program that has frozen its objects itself finds them frozen after a simulation."""
    gc.freeze()
    try:
        ranks(inside, 1)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()


def test_garbage_of_earlier_runs_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freezing keeps Python from full collections, so one is made after a number of runs."""
    monkeypatch.setattr(interrupts, "RUNS_PER_FULL", 2)
    monkeypatch.setattr(interrupts, "_runs", 0)
    thing = Thing()
    vars(thing)["itself"] = thing
    left = weakref.ref(thing)
    gc.collect()  # old from now on: a collection of young objects, which comes at any moment, leaves it
    del thing
    ranks(lambda: None, 1)
    assert left() is not None
    ranks(lambda: None, 1)
    assert left() is None


def threshold() -> int:
    return gc.get_threshold()[0]


def test_many_ranks_share_one_collector() -> None:
    """It runs less often the more ranks share the process, and as before after the run."""
    before = gc.get_threshold()
    assert set(ranks(threshold, 32).results) == {2 * before[0]}
    assert gc.get_threshold() == before
    assert set(ranks(threshold, 31).results) == {before[0]}


@pytest.mark.parametrize("off", [True, False])
def test_a_collector_that_is_off_stays_off(off: bool) -> None:
    """Switched off, or by a threshold of nothing."""
    before = gc.get_threshold()
    gc.disable() if off else gc.set_threshold(0, *before[1:])
    try:
        with interrupts.collector_spares_host(64):
            assert gc.get_threshold() == (before if off else (0, *before[1:]))
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
        gc.set_threshold(*before)
