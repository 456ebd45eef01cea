"""Python's collector during a simulation."""

from __future__ import annotations

import gc
import weakref

import pytest
from sim.running import ranks

from distsim.sim.isolation.torch_state import words
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


def test_garbage_of_earlier_runs_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that follow each other keep Python from full collections: one is made after as much as it would have waited
    for."""
    monkeypatch.setattr(interrupts, "YOUNG_PER_FULL", 0)
    monkeypatch.setattr(interrupts, "_young_at_last_full", -1)
    left = cycle()
    ranks(inside, 1)
    assert left() is None


def test_the_first_run_looks_for_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was none before it: a walk through all that torch's import has made would find next to nothing."""
    monkeypatch.setattr(interrupts, "YOUNG_PER_FULL", 0)
    monkeypatch.setattr(interrupts, "_young_at_last_full", None)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a full collection"))
    ranks(int, 1)


def test_what_a_run_is_made_of_is_set_aside_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at no more until the end; the collections that this spares count as made."""
    monkeypatch.setattr(interrupts, "_spared", 0.0)
    with interrupts.set_aside():
        made = cycle()
        spared = interrupts._spared
        interrupts.set_more_aside()
        gc.collect()
        assert made() is not None
        assert interrupts._spared > spared
    gc.collect()
    assert made() is None


def test_nothing_is_set_aside_outside_of_a_simulation() -> None:
    """What the surrounding program has made is its own business, also where it has set something aside itself."""
    left = cycle()
    interrupts.set_more_aside()
    gc.collect()
    assert left() is None
    gc.freeze()
    try:
        with interrupts.set_aside():
            left = cycle()
            interrupts.set_more_aside()
            gc.collect()
            assert left() is None
    finally:
        gc.unfreeze()


def pace() -> tuple[tuple[int, int, int], int, int]:
    asked, real = gc.get_threshold(), interrupts._get_threshold()[0]
    gc.set_threshold(500, 5, 5)
    return asked, real, gc.get_threshold()[0]


def test_many_ranks_share_one_collector() -> None:
    """It comes once for all when each has made what one alone may; the program sees its own thresholds."""
    before = gc.get_threshold()
    for asked, real, own in ranks(pace, 32).results:
        assert asked == before
        assert real == 2 * before[0]
        assert own == 500
    assert gc.get_threshold() == before
    assert {real for _, real, _ in ranks(pace, 31).results} == {before[0]}


@pytest.mark.parametrize("off", [True, False])
def test_a_collector_that_is_off_stays_off(off: bool) -> None:
    """Switched off, or by a threshold of nothing."""
    before = gc.get_threshold()
    gc.disable() if off else gc.set_threshold(0, *before[1:])
    try:
        with interrupts.paced(64):
            assert interrupts._get_threshold() == gc.get_threshold() == (before if off else (0, *before[1:]))
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_collections_that_a_slower_pace_spares_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage of earlier runs is looked for as often as at Python's own pace."""
    monkeypatch.setattr(interrupts, "_spared", 0.0)
    with interrupts.paced(64):
        gc.collect(0)
    assert interrupts._spared >= 3


class Base:
    """A class whose attributes a program may assign."""


class Heir(Base):
    """Nobody looks into it but the test."""


@pytest.mark.parametrize("in_memory", [True, False])
def test_marks_of_classes(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assigning an attribute of a class takes the mark of its heir, read from memory or asked for."""
    if not in_memory:
        if words._VERSIONS_ARE_THERE:
            pytest.skip("this Python tells by a number in memory alone (3.14)")
        monkeypatch.setattr(words, "_FLAGS_ARE_THERE", False)
    getattr(Heir, "unknown", None)
    marks, at_rest = words.marks_of([Heir, Thing])
    getattr(Thing, "unknown", None)
    assert marks() == at_rest
    Base.attribute = 1  # type: ignore[attr-defined]
    assert marks() != at_rest
    getattr(Heir, "unknown", None)
    assert marks() == at_rest
