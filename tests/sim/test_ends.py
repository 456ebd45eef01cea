"""How ranks end: exits, signals, exceptions, exit handlers, and ranks that never return."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import simpy
import torch.distributed as dist
from sim.running import HEAD, Scripts, ranks

import distsim
from distsim.sim.kernel import baton
from distsim.sim.kernel.baton import Baton
from distsim.sim.kernel.task import Task


@pytest.mark.parametrize("code", ["sys.exit()", "sys.exit(0)", "exit(0)", "os._exit(0)", "raise SystemExit"])
def test_a_clean_exit_is_healthy(script: Scripts, code: str) -> None:
    """A rank may leave by any clean exit once its work is done."""
    ran = script(HEAD + f"dist.barrier()\n{code}\n")
    assert (ran.outcome.exit_code, ran.kinds) == (0, [])


@pytest.mark.parametrize(
    ("code", "exit_code"), [("sys.exit(3)", 3), ("sys.exit('text')", 1), ("os._exit(5)", 5), ("sys.exit(True)", 1)]
)
def test_exit_codes(script: Scripts, code: str, exit_code: int) -> None:
    """A rank's exit code is in its summary; the run's is 1, as torchrun's; text goes to stderr."""
    ran = script(HEAD + f"dist.barrier()\nif rank == 1:\n    {code}\n")
    assert [r.exit_code for r in ran.outcome.ranks] == [0, exit_code]
    assert ran.outcome.exit_code == 1
    assert ran.outcome.diagnoses[0].kind == "rank_exited"
    assert ran.outcome.diagnoses[0].culprits == (1,)
    assert ran.of(1, ran.err) == (["text"] if "text" in code else [])


@pytest.mark.parametrize(("code", "exit_code"), [("argparse.ArgumentParser().parse_args(['--x'])", 2), ("exit(7)", 1)])
def test_ranks_that_all_refuse_to_begin_are_no_finding(script: Scripts, code: str, exit_code: int) -> None:
    """A wrong flag: the program's own message stands for itself, and 2 is its exit code here as in a shell."""
    ran = script(f"import argparse\n{code}\n")
    assert (ran.outcome.exit_code, ran.kinds) == (exit_code, [])
    assert [r.exit_code for r in ran.outcome.ranks] == [2 if exit_code == 2 else 7] * len(ran.outcome.ranks)


def test_a_wrong_flag_is_told_once(script: Scripts) -> None:
    """All ranks have one command line: what argparse says of it, or answers to --help, is not repeated by each."""
    text = "import argparse\np = argparse.ArgumentParser('train.py')\np.add_argument('--lr')\np.parse_args({})\n"
    wrong, helped = script(text.format(["--lx"]), 3), script(text.format(["--help"]), 3)
    assert (wrong.outcome.exit_code, wrong.err.count("train.py: error: "), wrong.err.count("usage: ")) == (2, 1, 1)
    assert (helped.outcome.exit_code, helped.out.count("--lr LR")) == (0, 2)


@pytest.mark.parametrize(
    ("code", "kind", "signal_name"),
    [
        ("sys.exit(0)", "rank_exited", None),
        ("os._exit(0)", "rank_exited", None),
        ("os.kill(os.getpid(), 9)", "rank_killed", "SIGKILL"),
        ("os.abort()", "rank_killed", "SIGABRT"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "rank_killed", "SIGTERM"),
    ],
)
def test_leaving_others_behind(script: Scripts, code: str, kind: str, signal_name: str | None) -> None:
    """Whoever leaves while others wait for it is named with the place, at once."""
    ran = script(HEAD + f"if rank == 1:\n    {code}\ndist.barrier()\n", num_ranks=3)
    found = ran.outcome.diagnoses[0]
    assert (found.kind, found.culprits, found.victims) == (kind, (1,), (0, 2))
    assert ran.outcome.exit_code == 3
    assert found.sites[1].line == 7
    if signal_name:
        assert signal_name in found.explanation


def test_exceptions_merge() -> None:
    """Equal tracebacks of several ranks are one failure; the caller gets RankFailure with all of them."""

    def body() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() != 2:
            raise ValueError("same")
        raise KeyError("other")

    with pytest.raises(distsim.RankFailure) as caught:
        ranks(body, 4)
    assert [(f.ranks, f.type) for f in caught.value.failures] == [((0, 1, 3), "ValueError"), ((2,), "KeyError")]
    assert "ranks 0,1,3:" in str(caught.value)
    outcome = ranks(body, 4, check=False)
    assert outcome.exit_code == 1
    assert len(outcome.failures) == 2


def test_the_rank_that_a_timeout_waited_for_is_in_the_message() -> None:
    """RankFailure says beside torch's timeout errors of the others whom they waited for, and its line."""

    def body() -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()

    with pytest.raises(distsim.RankFailure, match="Timed out waiting 5000ms") as caught:
        ranks(body, 3)
    told = str(caught.value).partition("HANG  missing rank  rank 1")[2]
    assert "|  time.sleep(60)" in told
    assert "Traceback" not in told


def test_what_a_rank_raised_by_itself_is_not_told_twice() -> None:
    """No report where nobody waits for the rank that raised."""

    def body() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("no data")

    with pytest.raises(distsim.RankFailure) as caught:
        ranks(body, 2)
    assert str(caught.value).count("no data") == 2, "the line of the program and the exception"
    assert caught.value.report == ""


def test_traceback_is_the_programs(script: Scripts) -> None:
    """No frame of the simulator; chained exceptions and notes stay."""
    ran = script(
        HEAD
        + """
def inner():
    dist.all_reduce("no tensor")
try:
    inner()
except Exception as error:
    raise RuntimeError("outer") from error
"""
    )
    text = ran.outcome.failures[0].traceback
    assert "distsim/sim" not in text
    assert "The above exception was the direct cause" in text
    assert "in inner" in text
    assert ran.outcome.failures[0].ranks == (0, 1)


def test_a_raise_that_meets_a_barrier_in_finally(script: Scripts) -> None:
    """`finally: dist.barrier()` of a rank that raises lets the others' barrier through; the raiser is the root."""
    ran = script(
        HEAD
        + """
try:
    if rank == 1:
        raise ValueError("x")
    dist.barrier()
finally:
    dist.barrier()
"""
    )
    assert ran.outcome.diagnoses[0].kind == "rank_raised"
    assert ran.outcome.diagnoses[0].culprits == (1,)


def test_exit_handlers(script: Scripts) -> None:
    """atexit handlers run last in first out, may communicate and be taken back; not after os._exit."""
    ran = script(
        HEAD
        + """
import atexit
atexit.register(print, "first", rank)
@atexit.register
def last():
    dist.barrier()
    print("last")
def never():
    print("never")
atexit.register(never)
atexit.unregister(never)
"""
    )
    assert ran.of(0) == ["last", "first 0"]
    assert ran.of(1) == ["last", "first 1"]
    ran = script("import atexit, os\natexit.register(print, 'no')\nprint('yes')\nos._exit(0)\n")
    assert ran.of(0) == ["yes"]


def test_signal_handlers(script: Scripts) -> None:
    """A handler a rank sets is called when it signals itself; each rank has its own; signals ignored are."""
    before = signal.getsignal(signal.SIGTERM)
    ran = script(
        HEAD
        + """
import signal
def handler(number, frame):
    print("caught", number)
if rank == 0:
    old = signal.signal(signal.SIGTERM, handler)
    assert signal.getsignal(signal.SIGTERM) is handler and signal.signal(signal.SIGTERM, handler) is handler
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.raise_signal(signal.SIGUSR1)
    os.kill(os.getpid(), 0)
dist.barrier()
print(signal.getsignal(signal.SIGTERM) is handler)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    assert ran.of(0) == ["caught 15", "True", "interrupted"]
    assert ran.of(1) == ["False", "interrupted"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("call", ["alarm(3)", "setitimer(signal.ITIMER_REAL, 3)", "pause()"])
def test_real_timers_are_refused(script: Scripts, call: str) -> None:
    """Signals in real time would strike the simulator: refused by name."""
    ran = script(f"import signal\nsignal.{call}\n")
    assert ran.outcome.failures[0].type == "NotSimulated"
    assert "signal." + call.split("(")[0] in ran.outcome.failures[0].message


@pytest.mark.slow
def test_a_thread_that_blocks_for_ever_leaves_profilers_alone(script: Scripts) -> None:
    """A rank that blocks in C is given up, and what follows in this process may be profiled."""
    script(HEAD + "if rank == 1:\n    import ctypes; ctypes.CDLL(None).pause()\ndist.barrier()\n", host_timeout_s=0.5)
    seen: list[str] = []

    def called() -> None:
        pass

    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        called()
    finally:
        sys.setprofile(None)
    assert seen.count("call") == 1


def test_a_rank_that_swallows_everything(script: Scripts) -> None:
    """`except BaseException: pass` around a deadlock, once or for ever, cannot keep the run from ending."""
    body = "    try:\n        dist.recv(torch.ones(1), src=1 - rank)\n    except BaseException:\n        pass\n"
    for loop in ("for _ in range(3):\n", "while True:\n"):
        ran = script(HEAD + loop + body)
        assert (ran.outcome.exit_code, ran.kinds) == (3, ["deadlock_cycle"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import socket; a, b = socket.socketpair(); a.recv(1)",
        "import ctypes; ctypes.CDLL(None).pause()",
        "while True:\n        try:\n            while True: pass\n        except BaseException: break",
    ],
    ids=["spin", "socket", "C", "swallow"],
)
def test_stuck_on_the_host(script: Scripts, code: str) -> None:
    """A rank that spins or blocks outside is given up after --host-timeout, with its line."""
    ran = script(HEAD + f"if rank == 1:\n    {code}\ndist.barrier()\n", host_timeout_s=0.5)
    found = ran.outcome.diagnoses[0]
    assert (found.kind, found.culprits, ran.outcome.exit_code) == ("host_stuck", (1,), 3)
    assert found.sites[1].line >= 7


def test_a_thread_that_was_given_up_keeps_off_the_baton() -> None:
    """Who ends just as its scheduler goes on without it gives nothing back: two threads would run at once."""
    world: Any = SimpleNamespace(env=simpy.Environment(), next_task_number=lambda: 1, shared_state=None)
    world.baton = Baton()
    for given_up in (True, False):
        task = Task(world, cast(Any, SimpleNamespace()), lambda: None, "main")
        assert not given_up or task.part()
        task._go.give()
        thread = threading.Thread(target=task._thread_main)
        thread.start()
        thread.join(60)
        assert (task.finished, world.baton.wait_for(0.0)) == (True, not given_up)


@pytest.mark.slow
def test_time_in_which_others_had_the_machine_does_not_count(script: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that could run and was not let is not stuck, however long it takes by the clock on the wall."""

    def schedstat(path: str) -> io.StringIO:
        assert path.startswith("/proc/self/task/")
        return io.StringIO(f"0 {int(baton._real_monotonic() * 1e9)} 0\n")

    monkeypatch.setattr(baton, "_real_open", schedstat)
    ran = script(HEAD + "if rank == 1:\n    for _ in range(30_000_000): pass\ndist.barrier()\n", host_timeout_s=0.2)
    assert (ran.outcome.exit_code, ran.kinds) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("grows", [True, False])
def test_a_rank_that_a_slow_disk_serves_is_not_stuck(
    grows: bool, script: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte that a disk brings shows that an import goes on, however long it takes; a rank that waits without is
    stuck."""
    looks = itertools.count()
    monkeypatch.setattr("distsim.sim.kernel.scheduler.disk_reads", lambda native: str(next(looks)) if grows else "0")
    monkeypatch.setattr("distsim.sim.run.DEFAULT_HOST_TIMEOUT_S", 0.3)
    ran = script(HEAD + "if rank == 1:\n    import ctypes\n    ctypes.CDLL(None).usleep(900_000)\ndist.barrier()\n")
    assert (ran.outcome.exit_code, ran.kinds) == ((0, []) if grows else (3, ["host_stuck"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "at_the_end",
    [pytest.param("pass", marks=pytest.mark.soak), "libc = ctypes.CDLL(None); libc.kill(libc.getpid(), 2)"],
)
def test_ctrl_c(tmp_path: Path, at_the_end: str) -> None:
    """SIGINT in the middle of `distsim run`, and another while its ranks are ended: where every rank is, exit code 130,
    no traceback."""
    program = tmp_path / "program.py"
    program.write_text(
        HEAD
        + "import ctypes\nprint('started', flush=True)\ntry:\n    while rank == 1:\n"
        + f"        torch.ones(100).sum()\n    dist.barrier()\nfinally:\n    {at_the_end}\n"
    )
    command = [sys.executable, "-m", "distsim", "run", "--on", "ethernet-cpu:2", "--nproc-per-node", "1", str(program)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "[1] started" in line:
                break
        os.killpg(child.pid, signal.SIGINT)
        text, _ = child.communicate(timeout=60)
    assert child.returncode == 130, text
    assert "Traceback" not in text
    assert "Rank 0 is at" in text or "Rank 0 waits" in text
    assert "Rank 1 is at" in text


def test_no_threads_are_left() -> None:
    """Sixteen simulations, some of them deadlocked or failed, leave no thread behind."""

    def body(number: int) -> None:
        dist.init_process_group("gloo")
        if number % 3 == 1 and dist.get_rank() == 0:
            raise ValueError
        if number % 3 == 2 and dist.get_rank() == 0:
            threading.Thread(target=dist.barrier).start()
            return
        dist.barrier()

    def settled() -> int:
        """Threads of this process as the operating system counts them, once those that end have ended."""
        for _ in range(1_000):
            count = len(os.listdir("/proc/self/task"))
            if count <= first:
                break
            time.sleep(0)
            os.sched_yield()
        return count

    for number in range(6):
        ranks(body, 2, number, check=False)
    first = 0
    first = settled()
    for number in range(16):
        ranks(body, 2, number, check=False)
    assert settled() <= first


def test_a_recursion_error_folds_its_frames_as_python_does(script: Scripts) -> None:
    """A thousand equal frames are three and a count."""
    ran = script(HEAD + "def deeper(n):\n    return deeper(n + 1)\ndeeper(0)\n")
    (failure,) = ran.outcome.failures
    assert failure.type == "RecursionError"
    assert "[Previous line repeated " in failure.traceback
    assert failure.traceback.count("in deeper") == 3


@pytest.mark.slow
def test_an_endless_recursion_under_a_limit_without_an_end_names_its_rank(script: Scripts) -> None:
    """`sys.setrecursionlimit(10**9)`: a rank goes no deeper than memory and time allow, and says so."""
    ran = script(
        HEAD + "import sys\nt = torch.ones(1)\ndist.all_reduce(t)\nif dist.get_rank() == 1:\n"
        "    sys.setrecursionlimit(10**9)\n    def f(): f()\n    f()\ndist.all_reduce(t)\n",
    )
    (failure,) = ran.outcome.failures
    assert (failure.ranks, failure.type) == ((1,), "RecursionError")
    assert "[Previous line repeated " in failure.traceback
    assert ran.outcome.exit_code == 1
    assert any("recurses to a depth of 50,000" in note for note in ran.outcome.notes)
