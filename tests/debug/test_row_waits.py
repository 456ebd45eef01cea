"""Locks, threads and keys of a store as causes: what is an edge, and what looks alike and is none."""

from __future__ import annotations

from typing import Any

import pytest

from distsim.debug.diagnosis.diagnose import diagnose
from distsim.debug.records import Phase, RankState, RankThread, Site
from distsim.debug.records.diagnosis import Diagnosis
from distsim.debug.records.kinds import Kind
from tests.debug.builders import (
    FILE,
    all_reduce,
    barrier,
    group,
    play,
    store,
)
from tests.debug.test_causes import only, program

LOCKS = """
def weights():
    with lock:
        dist.all_reduce(w, group=sync)  #@ sync
for step in range(3):
    with lock:  #@ takes
        dist.all_reduce(g, group=train)  #@ train
"""


def locked(text: str = LOCKS, threads_cut: bool = False, below: tuple[Site, ...] = (), **main: Any) -> list[Diagnosis]:
    """Rank 0's main thread is in a call under the lock; rank 1's thread is in another, its main thread at the lock."""
    p = program(text)
    train, sync = group(0, 1, name="1"), group(0, 1, name="2")
    evidence = play(
        2,
        {
            0: [all_reduce(p.train, train, function="<module>")],
            1: [all_reduce(p.sync, sync, function="weights", thread="Thread-1")],
        },
        sources={FILE: p.text},
    )
    evidence.hang_after_s = 40.0
    evidence.ranks[1].at_large = True
    threads = (
        RankThread("MainThread", False, (*below, Site(FILE, p.takes, "<module>")), **main),
        RankThread("Thread-1", True, (Site(FILE, p.sync, "weights"),)),
    )
    evidence.ranks[1].threads, evidence.ranks[1].threads_cut = threads, threads_cut
    return diagnose(evidence)


def test_a_lock_that_is_held_in_a_call_is_an_edge() -> None:
    """The circle is a proof: nobody waits for --hang-after; the lock is named."""
    (d,) = locked()
    assert (d.kind, d.culprits, d.ends_job) == (Kind.DEADLOCK_CYCLE, (0, 1), True)
    assert d.suggestion.startswith("Hold no lock during a collective: release `lock` before all_reduce at train.py:3")


@pytest.mark.parametrize("method", ["Odd.__enter__", "Odd.acquire"])
def test_a_lock_of_the_programs_own_class(method: str) -> None:
    """Its method stands at a line that takes another lock; who called it waits for the object."""
    own = Site(FILE, 3, method)
    assert "release `lock` before" in locked(below=(own,))[0].suggestion
    assert not any(d.ends_job for d in locked(below=(Site(FILE, 3, "Odd.wait"),)))


def test_another_lock_is_no_edge() -> None:
    """The main thread may get its lock at any moment: no proof, unless the simulator knows who holds it."""
    other = LOCKS.replace("    with lock:\n        dist.all_reduce(w", "    with other:\n        dist.all_reduce(w")
    assert not any(d.ends_job or "lock" in d.suggestion for d in locked(other))
    assert "a lock" not in locked(other, held_by="Thread-1")[0].suggestion
    assert locked(other, held_by="Thread-1")[0].ends_job


@pytest.mark.parametrize(
    ("takes", "holds"),
    [
        ("lock.acquire(timeout=8)", "lock"),
        ("lock.acquire(blocking=False)", "lock"),
        ("lock.acquire(True, 8)", "lock"),
        ("with ThreadPoolExecutor(4) as pool:", "ThreadPoolExecutor(4)"),
        ("with lock_of(step):", "lock_of(step)"),
        ("with locks[step]:", "locks[step]"),
    ],
)
def test_a_line_that_may_wait_for_something_else_is_no_edge(takes: str, holds: str) -> None:
    """A wait with a time limit ends by itself; calls and elements that read alike may be different locks."""
    text = f"""
def weights():
    with {holds}:
        dist.all_reduce(w, group=sync)  #@ sync
for step in range(3):
    {takes}  #@ takes
        dist.all_reduce(g, group=train)  #@ train
"""
    if not takes.startswith("with"):
        text = text.replace("        dist.all_reduce(g", "    dist.all_reduce(g")
    assert not any(d.ends_job or "Hold no lock" in d.suggestion for d in locked(text))


@pytest.mark.parametrize(("takes", "edge"), [("lock.acquire()", True), ("lock.acquire(timeout=8)", False)])
def test_what_is_acquired_above_a_call(takes: str, edge: bool) -> None:
    """With a time limit it is not known whether the thread has got the lock."""
    held = f"    {takes}\n    dist.all_reduce(w, group=sync)  #@ sync"
    text = LOCKS.replace("    with lock:\n        dist.all_reduce(w, group=sync)  #@ sync", held)
    assert any("Hold no lock" in d.suggestion for d in locked(text)) == edge


def test_a_lock_of_a_rank_that_waits_is_no_cause_of_another_rank_that_left() -> None:
    """The logger would get its lock if the rank that finished had come."""
    p = program(LOCKS)
    evidence = play(2, {0: [all_reduce(p.train, function="<module>")], 1: []}, sources={FILE: p.text})
    evidence.ranks[0].threads = (
        RankThread("MainThread", False, evidence.ranks[0].stack),
        RankThread("logger", True, (Site(FILE, p.takes, "<module>"),)),
    )
    (d,) = diagnose(evidence)
    assert d.culprits == (1,)
    assert "Hold no lock" not in d.suggestion


def test_a_thread_that_is_not_known_may_release_the_lock() -> None:
    """There was no room for all threads in the ring."""
    assert not any(d.ends_job or "Hold no lock" in d.suggestion for d in locked(threads_cut=True))


def through(*threads: RankThread, threads_cut: bool = False) -> Diagnosis:
    evidence = play(2, lambda rank: [barrier(9)], sources={})
    evidence.ranks[1] = RankState(
        1, Phase.RUNNING, idle_s=50.0, through=True, threads=(RankThread("MainThread", False), *threads)
    )
    evidence.ranks[1].threads_cut = threads_cut
    evidence.hang_after_s = 40.0
    return only(evidence)


def test_a_process_that_outlives_its_script() -> None:
    """The thread that is no daemon is named, with its line; without one it waits for child processes."""
    d = through(
        RankThread("beat", True, (Site(FILE, 4, "beat"),)), RankThread("logger", False, (Site(FILE, 17, "logger"),))
    )
    assert (d.kind, d.culprits, d.sites[1].line) == (Kind.HOST_STUCK, (1,), 17)
    assert "thread logger at train.py:17" in d.suggestion
    assert "a worker of a pool" in through(RankThread("ThreadPoolExecutor-0_0", False)).suggestion
    made = through(RankThread("ThreadPoolExecutor-0_0", False, pool=Site("train.py", 5, "main")))
    assert "a worker of a pool (made at train.py:5) that was not shut down" in made.suggestion
    assert made.causes == (Site("train.py", 5, "main"),)
    assert through().suggestion.startswith("End the child processes before the program ends")
    assert "child processes" not in through(threads_cut=True).suggestion


KEYS = """
def give():
    store.set(f"token/{rank}", "x")  #@ sets
if rank == 0:
    BEFORE
    store.wait([f"token/{1}"])  #@ first
    give()
else:
    store.wait(["token/0"])  #@ second
    give()
"""


def keys(before: str = "pass", thread: str = "") -> list[Diagnosis]:
    """Rank 0 waits for the key that rank 1 would set, and the other way round."""
    p = program(KEYS.replace("BEFORE", before))
    evidence = play(2, {0: [store("s/token/1", p.first)], 1: [store("s/token/0", p.second)]}, sources={FILE: p.text})
    for rank, line in enumerate((p.first, p.second)):
        evidence.ranks[rank].stack = (Site(FILE, line, "<module>"),)
        evidence.ranks[rank].since_s = 0.0
    if thread:
        main = RankThread("MainThread", False, evidence.ranks[0].stack)
        frames = (Site(FILE, 1, "feed"),) if thread == "feeder" else ()
        evidence.ranks[0].threads = (main, RankThread(thread, True, frames))
    evidence.hang_after_s = 40.0
    return diagnose(evidence)


def test_a_circle_of_keys() -> None:
    """Each rank would set its key behind its wait; that a line above was not taken changes nothing."""
    for before in ("pass", 'if "fixed" in sys.argv: give()'):
        (d,) = keys(before)
        assert (d.kind, d.culprits, d.cycle, d.ends_job) == (Kind.DEADLOCK_CYCLE, (0, 1), (0, 1), True)
        assert d.suggestion.startswith("Break the circle: let rank 1 set the key at train.py:2 before it waits at")


def test_a_key_that_another_thread_or_process_may_set() -> None:
    """It is no circle: the wait may end at any moment. A timer has no frame of the program's until it is due."""
    for diagnoses in (keys(thread="feeder"), keys(thread="Thread-1"), keys("Process(target=give).start()")):
        assert not any(d.ends_job or d.kind is Kind.DEADLOCK_CYCLE for d in diagnoses)


@pytest.mark.parametrize(
    "before",
    [
        'Timer(5, store.set, ("token/1", "x")).start()',
        'Timer(5, lambda: store.set("token/1", "x")).start()',
        'pool.submit(functools.partial(store.clone().set, "token/1"), "x")',
        "put = store.set",
        'if late: store.multi_set([name], ["x"])',
        "if late: store.set(*pair)",
        "if late: store.set(**pair)",
        'if late: store.set(key=name, value="x")',
    ],
)
def test_a_key_that_the_program_may_set_in_another_way(before: str) -> None:
    """A method that is handed on, a lambda, and names that cannot be read: no circle is known."""
    assert not any(d.ends_job or d.kind is Kind.DEADLOCK_CYCLE for d in keys(before))


@pytest.mark.parametrize("before", ['store.multi_set(["other", "more"], ["x", "x"])', "seen.add(rank)", "ready.set()"])
def test_keys_and_sets_that_are_of_no_concern_to_a_circle(before: str) -> None:
    """Other keys, a set and an event."""
    assert [d.kind for d in keys(before)] == [Kind.DEADLOCK_CYCLE]
