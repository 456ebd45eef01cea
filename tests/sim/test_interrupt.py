"""Ctrl-C while `distsim.simulate` runs: it is the caller's, once everything is as it was."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from sim.running import Scripts, ranks

import distsim
from distsim.scenario.file.load import load_scenario
from distsim.scenario.run import run_scenario
from distsim.sim import run as sim_run
from distsim.sim.kernel.interrupts import CtrlC

_libc = ctypes.CDLL(None)


def press(number: signal.Signals = signal.SIGINT) -> None:
    """A signal for this very process: a rank's own os.kill is the simulated machine's."""
    _libc.kill(_libc.getpid(), int(number))


def _computes() -> None:
    press()
    while True:
        pass


def _sleeps() -> None:
    press()
    while True:
        time.sleep(1)


def _calls() -> None:
    press()
    while True:
        dist.barrier()


def _presses_while_it_is_ended() -> None:
    try:
        _computes()
    finally:
        press()


@pytest.mark.parametrize(
    ("what", "check"),
    [
        (_sleeps, True),
        (_sleeps, False),
        (_calls, True),
        pytest.param(_computes, True, marks=[pytest.mark.slow, pytest.mark.soak]),
        pytest.param(_presses_while_it_is_ended, True, marks=pytest.mark.slow),
    ],
)
def test_it_reaches_the_caller(what: Callable[[], None], check: bool) -> None:
    """Whatever the ranks do, while they are ended, too: KeyboardInterrupt with the outcome, in a process as before."""

    def body() -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        what()

    threads = set(threading.enumerate())
    before = time.time, dict(os.environ), sys.stdout
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks(body, 2, check=check)
    assert type(caught.value) is KeyboardInterrupt, "Python ends as interrupted for no other"
    outcome: Any = caught.value.outcome  # type: ignore[attr-defined]
    assert (outcome.interrupted, outcome.exit_code, len(outcome.ranks)) == (True, 130, 2)
    assert " at sim/test_interrupt.py:" in caught.value.__notes__[0]
    assert (time.time, dict(os.environ), sys.stdout) == before
    assert set(threading.enumerate()) <= threads, "a thread of an earlier test may end meanwhile"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ranks(dist.is_initialized).results == [False, False], "the next one runs"


def test_a_loop_over_simulations_ends() -> None:
    """The second of three presses it: there is no third."""
    seen = []

    def body(number: int) -> None:
        seen.append(number)
        if number == 1:
            _sleeps()

    def loop() -> None:
        for number in range(3):
            ranks(body, 1, number)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert seen == [0, 1]


def test_the_second_one_cuts_nothing_off_that_must_be_whole() -> None:
    """Asked again it raises while the world thinks; not while a rank has the baton, nor while ranks are ended."""
    world = SimpleNamespace(interrupted=False, ended=False, running=object(), shared_state=None)
    with CtrlC() as ctrl_c:
        ctrl_c.asks(cast(Any, world))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert (world.interrupted, ctrl_c.pressed) == (True, signal.SIGINT)
        world.running = None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        world.ended = True
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_came_before_an_error_is_not_lost() -> None:
    """Where no outcome can tell of it, it is raised: before the world is there, say, or where a run begins anew."""

    def fails() -> None:
        with CtrlC():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("of ours")

    with pytest.raises(KeyboardInterrupt):
        fails()


def test_pressed_again_while_it_thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis may take long: the second one ends it, and the ranks with it."""

    def long_diagnosis(evidence: object) -> object:
        press()
        raise AssertionError("it went on")

    monkeypatch.setattr(sim_run, "diagnose", long_diagnosis)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt) as caught:
        ranks(_sleeps, 2)
    assert not hasattr(caught.value, "outcome")
    assert set(threading.enumerate()) <= before


def test_nobody_waits_in_a_call_that_has_ended() -> None:
    """Rank 1's turn has not come since the all_reduce was over: it is at its line, and waits for nothing."""

    def body() -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        _sleeps()

    with pytest.raises(KeyboardInterrupt) as caught:
        ranks(body, 2)
    first, second = caught.value.__notes__[0].splitlines()
    assert first.startswith("Rank 0 is at")
    assert second.startswith("Rank 1 is at")


def test_who_waits_is_said_to_wait() -> None:
    """The other rank's barrier is not over when Ctrl-C comes."""

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(1)
            _sleeps()
        dist.barrier()

    with pytest.raises(KeyboardInterrupt) as caught:
        ranks(body, 2)
    assert caught.value.__notes__[0].startswith("Rank 0 waits in barrier #1 on group default_pg (ranks 0,1), at ")


def test_a_step_that_was_not_finished_is_not_measured() -> None:
    """Its kernels were queued, and what they would take later is no time of the run; steps before it are."""

    def body(finished: int) -> None:
        weight = torch.ones(8192, 8192, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        for step in range(finished + 1):
            (torch.ones(8192, 8192, device="cuda") @ weight).sum().backward()
            optimizer.step()
            if step < finished:
                torch.cuda.synchronize()
        _sleeps()

    for finished in (0, 2):
        with pytest.raises(KeyboardInterrupt) as caught:
            distsim.simulate(functools.partial(body, finished), on="dgx-h100:1", nproc_per_node=1)
        outcome = cast(Any, caught.value).outcome
        assert outcome.training.steps == finished
        assert sum(outcome.training.step_times_s) <= outcome.virtual_time_s


def test_of_very_many_places_the_first_are_told() -> None:
    """Ranks at a line each: eight, how many more, and what has them."""

    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        if rank == 11:
            time.sleep(1)
            press()
        exec(compile("\n" * rank + "time.sleep(9)", __file__, "exec"), {"time": time})

    with pytest.raises(KeyboardInterrupt) as caught:
        ranks(body, 12)
    lines = caught.value.__notes__[0].splitlines()
    assert [line.partition(" is ")[0] for line in lines[:8]] == [f"Rank {rank}" for rank in range(8)]
    assert lines[8:] == ["... and 4 more lines (all of them: the Outcome)"]


class _Enough(Exception):
    """What a handler of the caller's raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_what_a_handler_of_the_callers_raises_ends_the_run_at_once(number: signal.Signals) -> None:
    """While a rank spins, and before it is another's turn."""
    begun, over = [], threading.Event()

    def handler(*_: object) -> None:
        over.set()
        raise _Enough

    def body() -> None:
        dist.init_process_group("gloo")
        begun.append(dist.get_rank())
        press(number)
        while not over.is_set():
            pass
        dist.barrier()

    before = signal.signal(number, handler)
    try:
        with pytest.raises(_Enough):
            ranks(body, 3, host_timeout_s=2)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert len(begun) == 1
    assert ranks(dist.is_initialized).results == [False, False], "the next one runs"


@pytest.mark.soak
@pytest.mark.slow
def test_a_program_that_simulates_says_to_its_shell_that_it_was_interrupted(tmp_path: Path) -> None:
    """It dies of SIGINT as every Python program does, and its last words are where every rank was."""
    program = tmp_path / "program.py"
    program.write_text(
        "import distsim\n"
        "def body():\n    print('started', flush=True)\n    while True:\n        pass\n"
        "while True:\n    distsim.simulate(body, on='ethernet-cpu:2', nproc_per_node=1)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "started" in line:
                break
        child.send_signal(signal.SIGINT)
        text, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT, text
    told = text.partition("KeyboardInterrupt\n")[2]
    assert told.startswith(f"Rank 0 is at {tmp_path.name}/program.py:"), text


@pytest.mark.parametrize("function", ["", ":body"])
def test_no_scenario_comes_after_it(script: Scripts, function: str) -> None:
    """Neither a program's nor a function's run becomes a result that others follow."""
    name = "body" if function else "__main__"
    script.write(
        f"import ctypes, time\ndef body():\n    libc = ctypes.CDLL(None)\n    libc.kill(libc.getpid(), 2)\n"
        f"    while True:\n        time.sleep(1)\nif __name__ == {name!r}:\n    body()\n",
        {
            "case.toml": f'program = "program.py{function}"\non = "ethernet-cpu:2"\nnproc_per_node = 1\n'
            "[expect]\nexit_code = 0\n"
        },
    )
    with pytest.raises(KeyboardInterrupt):
        run_scenario(load_scenario(script.folder / "case.toml"))


@pytest.mark.parametrize("queued", [1, 2])
def test_ranks_that_are_all_in_one_call_are_no_circle(queued: int) -> None:
    """The interrupt came while the kernels before the call ran, of which nobody is the culprit."""

    def body() -> None:
        dist.init_process_group("nccl")
        square = torch.ones(16384, 16384, device=f"cuda:{dist.get_rank()}")
        dist.all_reduce(torch.ones(1, device=square.device))
        product = square @ square
        threading.Timer(1e-3, press).start()
        for _ in range(queued):
            dist.all_reduce(product)
        product.sum().item()

    with pytest.raises(KeyboardInterrupt) as caught:
        distsim.simulate(body, on="dgx-h100:1", nproc_per_node=2)
    assert caught.value.__notes__[0].startswith("Ranks 0,1 wait in all_reduce #2 on group default_pg (ranks 0,1), at ")
    assert cast(Any, caught.value).outcome.diagnoses == []
