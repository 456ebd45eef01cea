"""Threads that run in turns share a core while nobody else wants it, and nobody is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from sim.conftest import Scripts
from sim.running import ranks

from distsim.sim.kernel import baton
from distsim.sim.kernel.baton import FIRST_PAUSE_S, LONGEST_PAUSE_S, LOOK_S, OneCore
from distsim.sim.kernel.task import Task

ALL = frozenset((4, 5, 6))


class Machine:
    """Three cores; this process runs *share* of the time that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.ran_s = 1_000.0
        self.put: dict[int, frozenset[int]] = {}
        self.on = 5
        self.clocks = dict.fromkeys(ALL, 3000000)
        monkeypatch.setattr(baton, "cores_of", lambda native: set(self.put.get(native, ALL)))
        monkeypatch.setattr(baton, "thread_ids", lambda: self.threads)
        self.threads = {1, 2}
        monkeypatch.setattr(baton, "put_on", self.put.__setitem__)
        monkeypatch.setattr(baton, "core_now", lambda: self.on)
        monkeypatch.setattr(baton, "clock_khz", lambda core: self.clocks[core])
        monkeypatch.setattr(baton, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(baton, "process_time", lambda: self.ran_s)
        monkeypatch.setattr(baton.Busy, "until_s", 0.0)
        monkeypatch.setattr(baton.Busy, "pause_s", FIRST_PAUSE_S)

    def passes(self, seconds: float, share: float) -> None:
        self.now_s += seconds
        self.ran_s += share * seconds


def test_all_on_the_core_where_it_is_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the kernel had put the thread that lets the others run; afterwards it may run anywhere again."""
    machine, core = Machine(monkeypatch), OneCore()
    task = SimpleNamespace(native=77, cores=None)
    with core:
        assert (machine.put, core.cores, core.all) == ({0: {5}}, {5}, ALL)
        core.bind(task)
        assert (machine.put[77], task.cores) == ({5}, core.cores)
        machine.passes(LOOK_S * 2, 0.95)
        core.look()
        assert core.cores == {5}
    assert (machine.put[0], core.cores, core.all) == (ALL, None, None)


def test_a_core_that_others_want_is_left_and_tried_again_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time after twice as long, up to a limit, and the next simulation of the process goes on with that."""
    machine, core = Machine(monkeypatch), OneCore()
    with core:
        paused_s = []
        for _ in range(9):
            machine.passes(LOOK_S * 2, 0.5)
            core.look()
            assert (core.cores, machine.put[0]) == (ALL, ALL)
            left_s = machine.now_s
            machine.on = 6
            while core.cores != {6}:
                machine.passes(LOOK_S * 2, 0.5)
                core.look()
            paused_s.append(machine.now_s - left_s)
        expected = [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(9)]
        assert paused_s == pytest.approx(expected, abs=LOOK_S * 3)
    with OneCore() as _:  # the next simulation knows
        assert machine.put[0] == {6}
    machine.now_s = baton.Busy.until_s - 1.0
    with OneCore() as _:
        assert machine.put[0] == ALL


def test_not_on_a_core_that_saves_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop's slow cores are left to others; once the thread is on a fast one, that is taken."""
    machine, core = Machine(monkeypatch), OneCore()
    machine.clocks[5] = 2_000_000
    with core:
        assert (machine.put, core.cores) == ({}, None)
        machine.on = 4
        machine.passes(LOOK_S * 2, 1.0)
        core.look()
        assert (machine.put[0], core.cores) == ({4}, {4})


def test_what_a_rank_is_left_with_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was given up, and what a rank starts: neither is in turns with the others."""
    machine, core = Machine(monkeypatch), OneCore()
    with core:
        core.release(SimpleNamespace(native=78, cores=core.cores))
        assert machine.put[78] == ALL
        with core.left():
            assert machine.put[0] == ALL
        assert machine.put[0] == {5}
        with core.left(), core.left():
            assert machine.put[0] == ALL
        with core.left():
            with core.left():  # an import within an import
                pass
            assert machine.put[0] == ALL
        with core.left():
            core.cores = ALL  # others want the core meanwhile
        assert machine.put[0] == ALL
    machine.put.clear()
    with core.left():
        assert machine.put == {}


def test_threads_that_stay_run_anywhere_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's begun by a rank have the rank's core; those that were there, or chose several, are left alone."""
    machine, core = Machine(monkeypatch), OneCore()
    with core:
        machine.threads = {1, 2, 3, 4}
        machine.put.update({1: frozenset((4,)), 3: frozenset((5,)), 4: frozenset((4, 5))})
    assert machine.put == {0: ALL, 1: {4}, 3: ALL, 4: {4, 5}}


@pytest.mark.parametrize("missing", ["cores_of", "core_now"])
def test_where_there_are_no_such_calls(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """macOS has neither: nothing is done."""
    machine, core = Machine(monkeypatch), OneCore()
    monkeypatch.setattr(baton, missing, None)
    with core:
        core.look()
        assert (machine.put, core.cores, core.all) == ({}, None, None)


def where() -> tuple[frozenset[int], set[int], set[int], set[int]]:
    """Where the rank's thread may run, what it is told, where programs that it starts may."""
    real: Callable[[int], set[int]] = baton.cores_of  # type: ignore[assignment]
    told = subprocess.check_output([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"])
    reads, writes = os.pipe()
    words = [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    os.posix_spawn(sys.executable, words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writes, 1)])
    os.close(writes)
    with open(reads) as answer:
        spawned = {int(core) for core in answer.read().split()}
    return frozenset(real(0)), os.sched_getaffinity(0), {int(core) for core in told.split()}, spawned


def test_ranks_share_a_core_and_are_told_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they start runs on all, and so does the surrounding program afterwards."""
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(baton, "IDLE_SHARE", 2.0)  # the programs that the ranks wait for are nobody else
    monkeypatch.setattr(baton.Busy, "until_s", 0.0)
    if len(before) == 1:
        pytest.skip("this machine has one core")
    found = ranks(where, 3).results
    assert {cores for cores, *_ in found} == {found[0][0]}
    assert len(found[0][0]) == 1
    assert all(others == [before] * 3 for _, *others in found)
    assert os.sched_getaffinity(0) == before


def test_threads_follow_when_the_core_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is moved before it runs the next time."""
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("this machine has one core")
    monkeypatch.setattr(baton, "IDLE_SHARE", 2.0)
    monkeypatch.setattr(baton.Busy, "until_s", 0.0)
    resume = Task.resume

    def left_in_between(self: Task, throw: BaseException | None) -> bool:
        core = self.world.core
        if self.native and core.cores is not None:
            core.cores = core.all
        return resume(self, throw)

    monkeypatch.setattr(Task, "resume", left_in_between)

    def body() -> tuple[int, set[int]]:
        import time

        real: Callable[[int], set[int]] = baton.cores_of  # type: ignore[assignment]
        first = len(real(0))
        time.sleep(1.0)
        return first, real(0)

    assert ranks(body, 2).results == [(1, before), (1, before)]


def test_a_module_that_a_rank_imports_may_use_all_cores(
    script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries start as many threads as there are cores where they are imported, for as long as the process lives."""
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(baton.Busy, "until_s", 0.0)
    (tmp_path / "nothing.py").write_text("")
    (tmp_path / "many_threads.py").write_text(
        "from distsim.sim.kernel import baton\nimport nothing\nfound = len(baton.cores_of(0))\n"
    )
    ran = script("import many_threads\nprint(many_threads.found)\n")
    assert ran.of(0) == [str(len(before))]
